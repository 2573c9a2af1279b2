"""Ingest from actors in other processes: gear_jax beside dm-reverb and memcpy, and what it does to sampling.

`python -m gear_jax bench --ingest`. Every program of it is a process of its own, timed in turns.
"""
