"""The benchmark on a GPU: the targets of the CUDA kernels, beside what `cudaMemcpy` reaches in the same run.

`python -m gear_jax bench --device gpu` calls `cli.run`. One process; every row is checked against NumPy before it is
timed, and what is known is written after each row. Shapes: S slots of T steps, B batch, W window, A inserted.
"""
