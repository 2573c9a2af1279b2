"""Priorities: what is stored, what is seen, what is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.selectors import Fifo, Lifo, Permutation, Prioritized, TopK, Uniform
from gear_jax.testing.ops import sums_oracle

BAD = [np.nan, -1.0, np.inf, -np.inf, -1e-30]


def stored(state, handles):
    return np.asarray(state.priority).reshape(-1)[np.asarray(handles.slot)]


def assert_sums(state):
    np.testing.assert_array_equal(np.asarray(state.sums), sums_oracle(np.asarray(state.mass)))


def test_stored_as_given_and_alpha_applied_once(make, filled):
    given = np.array([4, 9, 0, 0.25], np.float32)
    state, handles = filled(make(Prioritized(alpha=0.5)), 4, priorities=given)
    np.testing.assert_array_equal(stored(state, handles), given)
    np.testing.assert_allclose(np.asarray(state.mass).reshape(-1)[:4], [2, 3, 0, 0.5], rtol=1e-6)
    state = make(Prioritized(alpha=0.5)).update_priorities(state, handles, given[::-1].copy())
    np.testing.assert_array_equal(stored(state, handles), given[::-1])
    np.testing.assert_allclose(np.asarray(state.mass).reshape(-1)[:4], [0.5, 0, 3, 2], rtol=1e-6)


@pytest.mark.parametrize("partitions", [1, 4])
def test_a_new_trajectory_takes_the_largest_seen_so_far(make, rows, filled, partitions):
    replay = make(Prioritized(), partitions=partitions)
    state, handles = filled(replay, 4)
    np.testing.assert_array_equal(stored(state, handles), 1)  # at first
    state, handles = replay.add(state, rows(range(4)), np.full(4, 2, np.int32), np.array([2, 5, 3, 0], np.float32))
    state, new = replay.add(state, rows(range(4)), np.full(4, 2, np.int32))
    np.testing.assert_array_equal(stored(state, new), 5)
    state = replay.update_priorities(state, new, np.array([1, 7, 2, 2], np.float32))
    state = replay.update_priorities(state, new, np.array([1, 1, 2, 2], np.float32))  # what was seen stays seen
    state, new = replay.add(state, rows(range(4)), np.full(4, 2, np.int32))
    np.testing.assert_array_equal(stored(state, new), 7)
    assert replay.stats(state)["max_priority"] == 7


def test_what_is_rejected_or_stale_is_not_seen(make, rows, filled):
    replay = make(Prioritized())
    state, old = filled(replay, 4, priorities=[np.nan, np.inf, -3, 2])
    for _ in range(2):  # all eight slots anew
        state, new = replay.add(state, rows(range(4)), np.array([2, 2, 2, 0], np.int32), np.full(4, 9, np.float32))
    state, new = replay.add(state, rows(range(4)), np.full(4, 2, np.int32))
    np.testing.assert_array_equal(stored(state, new), 9)
    state = replay.update_priorities(state, old, np.full(4, 50, np.float32))
    state = replay.update_priorities(state, new, np.array([np.inf, np.nan, 3, 3], np.float32))
    state, new = replay.add(state, rows(range(4)), np.full(4, 2, np.int32))
    np.testing.assert_array_equal(stored(state, new), 9)


@pytest.mark.parametrize("bad", BAD)
def test_a_rejected_priority(make, filled, bad):
    """Given to add it stores 0; given to update_priorities it leaves the old one; both are counted."""
    replay = make(Prioritized())
    state, handles = filled(replay, 4, priorities=[bad, 2, bad, 3])
    np.testing.assert_array_equal(stored(state, handles), [0, 2, 0, 3])
    assert replay.stats(state)["rejected_priorities"] == 2
    assert_sums(state)
    state = replay.update_priorities(state, handles, np.array([1, bad, 5, bad], np.float32))
    np.testing.assert_array_equal(stored(state, handles), [1, 2, 5, 3])
    assert replay.stats(state)["rejected_priorities"] == 4
    assert_sums(state)


def test_a_skipped_row_counts_nowhere(make, filled):
    replay = make(Prioritized())
    state, handles = filled(replay, 4, lengths=[0, 2, -3, 2], priorities=[np.nan, 1, 99, 1])
    assert handles.slot.tolist() == [-1, 0, -1, 1] and handles.generation.tolist() == [0, 1, 0, 1]
    got = replay.stats(state)
    wanted = {"inserted": 2, "rejected_priorities": 0, "trajectories": 2, "steps": 4, "evicted": 0, "max_priority": 1}
    assert {k: got[k] for k in wanted} == wanted


@pytest.mark.parametrize("selector", [Prioritized(), TopK()])
def test_zero_is_never_drawn(make, filled, selector):
    replay = make(selector)
    state, handles = filled(replay, 4, priorities=[0, 2, np.nan, 0])
    state, s = replay.sample(state, jax.random.key(0), 6)
    assert set(s.handles.slot.tolist()) <= {1, -1} and s.valid[0]
    state = replay.update_priorities(state, handles, np.array([0, 0, -1, 0], np.float32))
    state, s = replay.sample(state, jax.random.key(0), 6)
    assert not s.valid.any()


@pytest.mark.parametrize("selector", [Uniform(), Fifo(), Lifo(), Permutation()])
def test_the_others_ignore_priorities(make, filled, selector):
    replay = make(selector)
    state, _ = filled(replay, 4, priorities=[0, np.nan, 7, 1e-6])
    other, _ = filled(replay, 4)
    _, s = replay.sample(state, jax.random.key(0), 6)
    _, t = replay.sample(other, jax.random.key(0), 6)
    np.testing.assert_array_equal(s.handles.slot, t.handles.slot)
    if not isinstance(selector, Uniform):
        assert set(s.handles.slot.tolist()) - {-1} == {0, 1, 2, 3}


def test_after_a_million_updates_the_root_is_the_sum_of_the_leaves():
    capacity, batch = 1000, 1000
    table = gear.TableSpec({"a": gear.ColumnSpec((), jnp.uint8)}, 1, capacity)
    replay = gear.make_replay(table, Prioritized(alpha=0.7), partitions=2)
    state, handles = replay.add(replay.init(), {"a": np.zeros((capacity, 1), np.uint8)}, np.ones(capacity, np.int32))

    def step(state, key):
        pick, value = jax.random.split(key)
        at = jax.random.randint(pick, (batch,), 0, capacity)
        some = gear.Handle(handles.slot[at], handles.generation[at])
        # Over eight powers of ten, so that sums that were only ever added to would drift.
        priorities = 10 ** jax.random.uniform(value, (batch,), minval=-4, maxval=4)
        return replay.update_priorities(state, some, priorities), None

    state, _ = jax.jit(lambda s: jax.lax.scan(step, s, jax.random.split(jax.random.key(0), 1000)))(state)
    assert replay.stats(state)["stale_updates"] == 0
    assert_sums(state)
    np.testing.assert_allclose(state.sums[:, -16], np.asarray(state.mass, np.float64).sum(1), rtol=1e-6)


@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.4), (1.0, 1.0)])
def test_weights_and_probabilities_of_a_sample(make, filled, alpha, beta):
    replay = make(Prioritized(alpha, beta), partitions=2)
    given = np.array([0.5, 2, 0, 8], np.float32)
    state, handles = filled(replay, 4, priorities=given)
    _, s = replay.sample(state, jax.random.key(3), 64)
    order = {int(c): i for i, c in enumerate(handles.slot)}
    mass = np.where(given > 0, given.astype(np.float64) ** alpha, 0)
    p = (mass / mass.sum())[[order[int(c)] for c in s.handles.slot]]
    np.testing.assert_allclose(s.probability, p, rtol=1e-5)
    weight = (3 * p) ** -beta
    np.testing.assert_allclose(s.weight, weight / weight.max(), rtol=1e-5)
    assert s.weight.max() == 1
