"""What a state says of its table, in Python numbers."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from gear_jax.replay import _processes
from gear_jax.replay._state import Counter, ReplayState


def of_state(capacity: int, state: ReplayState) -> dict[str, int | float]:
    """The statistics of a state. Over several processes, each adds up its own shards, and all get the sums."""
    numbers = _count(_own(state.length), _own(state.counters))
    if state.streams is not None:
        numbers["open_streams"] = sum(int((x >= 0).sum()) for x in _own(state.streams.slot))
    if state.limits is not None:
        counters = _own(state.limits.counters)
        names = ("used_up", "expired", "refused_stale")
        numbers |= {name: sum(int64(x[:, i]) for x in counters) for i, name in enumerate(names)}
    if isinstance(state.length, jax.Array) and not state.length.is_fully_addressable:
        numbers = _over_processes(state.length.sharding.device_set, numbers)
    if state.limits is not None and state.limits.current is not None:
        numbers["version"] = int(_own(state.limits.current)[0].max(initial=0))
    largest = state.max_priority
    if isinstance(largest, jax.Array):  # all devices have it
        largest = largest.addressable_shards[0].data
    return {**numbers, "capacity": capacity, "max_priority": float(np.asarray(largest).max())}


def of_arrays(
    capacity: int, length: np.ndarray, counters: np.ndarray, max_priority: np.ndarray
) -> dict[str, int | float]:
    """The statistics of lengths `[P, S]`, counters `[P, 5, 2]` and a largest priority `[1]` that a file holds."""
    return {**_count([length], [counters]), "capacity": capacity, "max_priority": float(max_priority.max())}


def trajectories(state: ReplayState) -> int:
    """How many a state holds, over several processes this one's part of it. From its counters: small arrays, where the
    lengths are as many as the slots."""
    held = sum(int64(x[:, Counter.INSERTED]) - int64(x[:, Counter.EVICTED]) for x in _own(state.counters))
    if state.limits is not None:  # used up, expired
        held -= sum(int64(x[:, 0]) + int64(x[:, 1]) for x in _own(state.limits.counters))
    return held


def _count(length: list[np.ndarray], counters: list[np.ndarray]) -> dict[str, int]:
    return {
        "trajectories": sum(int((x > 0).sum()) for x in length),
        "steps": sum(int(x.sum(dtype=np.int64)) for x in length),
        **{c.name.lower(): sum(int64(x[:, c]) for x in counters) for c in Counter},
    }


def int64(words: np.ndarray) -> int:
    """The sum of 64-bit counters `uint32[..., 2]` as a Python number."""
    words = np.asarray(words).astype(object)
    return int((words[..., 0] * 2**32 + words[..., 1]).sum())


def _own(x: jax.Array | np.ndarray) -> list[np.ndarray]:
    """The shards of an array that this process answers for: each place once, over all processes."""
    if isinstance(x, np.ndarray):
        return [x]
    return [np.asarray(s.data) for s in x.addressable_shards if s.replica_id == 0]


def _over_processes(devices: Iterable[Any], numbers: dict[str, int]) -> dict[str, int]:
    words = np.array([[n >> 32, n & 0xFFFFFFFF] for n in numbers.values()], np.uint32)
    everyone = _processes.share(devices, words)
    return {name: int64(everyone[:, i]) for i, name in enumerate(numbers)}
