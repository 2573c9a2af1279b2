"""Each device draws its part from its own partitions."""

import jax
import numpy as np
import pytest
from scipy import stats

from gear_jax import selectors
from gear_jax.testing.ops import to_numpy


def filled(case, replay, priorities=None):
    rows = {
        "number": np.arange(320, dtype=np.int32).reshape(64, 5),
        "vector": np.zeros((64, 5, 3), np.float32),
    }
    return replay.add(replay.init(), rows, np.full((64,), 5, np.int32), priorities)[0]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_probabilities_and_weights_are_those_of_the_draw(case, n):
    alpha, beta = 0.7, 0.5
    selector = selectors.Prioritized(alpha, beta)
    replay = case.make(case.mesh(n), selector=selector, selection="decentralized")
    assert replay.exchange is None
    priorities = np.random.default_rng(0).uniform(0.1, 3, 64).astype(np.float32)
    state = filled(case, replay, priorities)
    mass = np.asarray(state.priority).reshape(n, -1).astype(np.float64) ** alpha
    wanted = mass / mass.sum(1, keepdims=True) / n
    batch = 4096
    state, sample = replay.sample(state, jax.random.key(1), batch)
    slot = np.asarray(sample.handles.slot)
    # Rows B / n * k ... of the batch are device k's own.
    assert (slot // (64 // n) == np.repeat(np.arange(n), batch // n)).all()
    np.testing.assert_allclose(np.asarray(sample.probability), wanted.reshape(-1)[slot], rtol=1e-5)
    weight = wanted.reshape(-1)[slot] ** -beta
    np.testing.assert_allclose(np.asarray(sample.weight), weight / weight.max(), rtol=1e-4)
    for k in range(n):
        count = np.bincount(slot[k * batch // n : (k + 1) * batch // n] % (64 // n), minlength=64 // n)
        assert stats.chisquare(count, count.sum() * mass[k] / mass[k].sum()).pvalue > 1e-4
    data = to_numpy(sample.data["number"])
    stored = to_numpy(state.columns["number"]).reshape(64, 5)
    at = np.asarray(sample.anchor)
    for row in range(0, batch, 97):
        steps = np.arange(at[row] - 2, at[row] + 1)
        np.testing.assert_array_equal(data[row], np.where(steps >= 0, stored[slot[row]][np.maximum(steps, 0)], 0))
    assert replay.stats(state)["sampled"] == batch


def test_devices_draw_with_keys_of_their_own(case):
    replay = case.make(case.mesh(4), selector=selectors.Uniform(), selection="decentralized")
    _, sample = replay.sample(filled(case, replay), jax.random.key(1), 64)
    local = np.asarray(sample.handles.slot).reshape(4, 16) % 16
    assert len({tuple(x) for x in local.tolist()}) == 4


def test_a_device_with_nothing_gives_rows_that_are_not_valid(case):
    replay = case.make(case.mesh(4), selector=selectors.Prioritized(), selection="decentralized")
    state = replay.init()
    rows = {"number": np.ones((4, 5), np.int32), "vector": np.ones((4, 5, 3), np.float32)}
    state, _ = replay.add(state, rows, np.array([5, 0, 0, 5], np.int32))
    _, sample = replay.sample(state, jax.random.key(0), 16)
    valid = np.asarray(sample.valid).reshape(4, 4)
    assert valid.all(1).tolist() == [True, False, False, True] and valid.any(1).tolist() == [True, False, False, True]
    slot, weight = np.asarray(sample.handles.slot).reshape(4, 4), np.asarray(sample.weight).reshape(4, 4)
    assert (slot[1:3] == -1).all() and (weight[1:3] == 0).all() and weight.max() == 1
    assert not to_numpy(sample.mask["number"]).reshape(4, -1)[1:3].any()
    assert (to_numpy(sample.data["vector"]).reshape(4, -1)[1:3] == 7).all()  # padding


def test_every_device_walks_its_own_permutation(case):
    replay = case.make(case.mesh(4), selector=selectors.Permutation(), selection="decentralized")
    state, seen = filled(case, replay), []
    for i in range(4):
        state, sample = replay.sample(state, jax.random.key(i), 16)
        seen.append(np.asarray(sample.handles.slot).reshape(4, 4))
    seen = np.concatenate(seen, 1)
    for k in range(4):
        assert sorted(seen[k].tolist()) == list(range(16 * k, 16 * k + 16))
    assert state.selector.position.shape == (4,)


def test_updates_reach_whoever_holds_the_trajectory(case):
    replay = case.make(case.mesh(4), selector=selectors.Prioritized(), selection="decentralized")
    state, sample = replay.sample(filled(case, replay), jax.random.key(0), 32)
    slot = np.asarray(sample.handles.slot)
    turned = jax.tree.map(lambda x: x[::-1], sample.handles)
    state = replay.update_priorities(state, turned, np.arange(32, dtype=np.float32) + 2)
    wanted = np.ones(64, np.float32)
    wanted[slot[::-1]] = np.arange(32) + 2
    np.testing.assert_array_equal(np.asarray(state.priority).reshape(-1), wanted)
    assert float(state.max_priority[0]) == 33


def test_a_batch_over_one_axis_of_two(case):
    """The devices that share a part of the batch give it together."""
    mesh = case.mesh(8, ("data", "model"), (2, 4))
    replay = case.make(mesh, ("data", "model"), selector=selectors.Uniform(), selection="decentralized")
    _, sample = replay.sample(filled(case, replay), jax.random.key(0), 32)
    slot = np.asarray(sample.handles.slot)
    assert (slot // 8 == np.repeat(np.arange(8), 4)).all()
    shards = {s.data.shape for s in sample.data["vector"].addressable_shards}
    assert shards == {(16, 2, 3)}
    assert np.asarray(sample.valid).all()
