"""Counters and clocks beyond 32 bits, and `stats`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax.selectors import Fifo, Lifo

NEAR = 2**32 - 5


def near_the_edge(state):
    counters = np.asarray(state.counters).copy()
    counters[..., 0], counters[..., 1] = 3, NEAR
    return state.replace(counters=jnp.asarray(counters), clock=jnp.array([3, NEAR], jnp.uint32))


@pytest.mark.parametrize("partitions", [1, 2])
def test_every_counter_carries_over(make, rows, partitions):
    replay = make(partitions=partitions)
    state = near_the_edge(replay.init())
    base = 3 * 2**32 + NEAR
    for turn in range(4):
        priority = np.array([1, np.nan, 1], np.float32)
        state, handles = replay.add(state, rows([turn] * 3), np.full(3, 2, np.int32), priority)
        state, _ = replay.sample(state, jax.random.key(0), 6)
        stale = handles.replace(generation=handles.generation + np.uint32(9))
        state = replay.update_priorities(state, stale, np.ones(3, np.float32))
    got = replay.stats(state)
    assert got["inserted"] == partitions * base + 12
    assert got["rejected_priorities"] == partitions * base + 4
    assert got["stale_updates"] == partitions * base + 12
    assert got["evicted"] == partitions * base + 4
    assert got["sampled"] == partitions * base + 24
    clock = np.asarray(state.clock).tolist()
    assert clock[0] * 2**32 + clock[1] == base + 12


@pytest.mark.parametrize(("selector", "newest_first"), [(Fifo(), False), (Lifo(), True)])
def test_age_is_right_across_the_edge(make, rows, selector, newest_first):
    replay = make(selector)
    state = near_the_edge(replay.init())
    for turn in range(5):
        state, _ = replay.add(state, rows([3 * turn + i for i in range(3)]), np.full(3, 2, np.int32))
    _, s = replay.sample(state, jax.random.key(0), 6)
    numbers = (s.data["number"][:, 0] // 100).tolist()
    assert numbers == (list(range(14, 8, -1)) if newest_first else list(range(7, 13)))


def test_stats_are_python_numbers(make, filled):
    replay = make(partitions=2, streams=2)
    state, _ = filled(replay, 4, [1, 2, 3, 4])
    got = replay.stats(state)
    assert {k: type(v) for k, v in got.items()} == {k: float if k == "max_priority" else int for k in got}
    wanted = {
        "trajectories": 4, "steps": 10, "capacity": 8, "inserted": 4, "evicted": 0, "stale_updates": 0,
        "rejected_priorities": 0, "sampled": 0, "max_priority": 1.0, "open_streams": 0,
    }  # fmt: skip
    assert got == wanted


def test_stats_are_for_the_host(make, filled):
    replay = make()
    with pytest.raises(TypeError, match=r"stats: state: got a traced state, wanted a concrete one.*outside jit"):
        jax.jit(replay.stats)(replay.init())
