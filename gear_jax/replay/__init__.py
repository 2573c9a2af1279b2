"""The replay table: state, functional core, and `make_replay`."""

from gear_jax.replay._device import DeviceReplay
from gear_jax.replay._footprint import Footprint, footprint
from gear_jax.replay._in_place import assert_in_place
from gear_jax.replay._make import make_replay
from gear_jax.replay._replay import Replay
from gear_jax.replay._sample import PendingSample
from gear_jax.replay._state import Handle, ReplayState, Sample, Streams

__all__ = [
    "DeviceReplay",
    "Footprint",
    "Handle",
    "PendingSample",
    "Replay",
    "ReplayState",
    "Sample",
    "Streams",
    "assert_in_place",
    "footprint",
    "make_replay",
]
