"""Offline datasets: read them as a stream of episodes, load them into a replay table.

    import gear_jax as gear

    table = gear.datasets.table_spec("pendulum/mixed-v0")
    replay = gear.make_replay(table)
    state, summary = gear.datasets.load(replay, replay.init(), "pendulum/mixed-v0")

A dataset is a Minari dataset (HDF5, Arrow or Parquet storage) on this machine, a D4RL-style HDF5 file, or any
`Source`.
"""

from gear_jax.datasets._d4rl import D4RLSource
from gear_jax.datasets._episode import DatasetError, Episode, Source
from gear_jax.datasets._load import load
from gear_jax.datasets._minari import MinariSource
from gear_jax.datasets._open import open_source
from gear_jax.datasets._returns import derive, return_to_go
from gear_jax.datasets._spec import table_spec
from gear_jax.datasets._summary import LoadInterrupted, LoadSummary, UnmarkedTimeoutWarning

__all__ = [
    "D4RLSource",
    "DatasetError",
    "Episode",
    "LoadInterrupted",
    "LoadSummary",
    "MinariSource",
    "Source",
    "UnmarkedTimeoutWarning",
    "derive",
    "load",
    "open_source",
    "return_to_go",
    "table_spec",
]
