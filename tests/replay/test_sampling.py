"""What samples are distributed like, through the whole replay."""

import jax
import numpy as np
import pytest
from scipy import stats

import gear_jax as gear
from gear_jax.selectors import Fifo, Lifo, Permutation, Prioritized, TopK, Uniform

B = 64
LENGTHS = [5, 1, 3, 4, 2, 5]


def draws(replay, state, turns):
    """Handles' slots, anchors and probabilities of turns * B rows, drawn inside scan."""

    def step(state, key):
        state, s = replay.sample(state, key, B)
        return state, (s.handles.slot, s.anchor, s.probability)

    run = jax.jit(lambda s: jax.lax.scan(step, s, jax.random.split(jax.random.key(5), turns)))
    return [np.asarray(x).reshape(-1) for x in run(state)[1]]


def assert_spread(count, probability):
    count, wanted = np.asarray(count, np.float64), np.asarray(probability, np.float64)
    assert count[wanted == 0].sum() == 0
    count, wanted = count[wanted > 0], wanted[wanted > 0]
    assert len(count) == 1 or stats.chisquare(count, wanted / wanted.sum() * count.sum()).pvalue > 1e-4


@pytest.mark.parametrize("partitions", [1, 4])
def test_uniform_over_trajectories_and_then_over_steps(make, filled, partitions):
    replay = make(Uniform(), partitions=partitions)
    state, handles = filled(replay, 6, LENGTHS)
    slot, anchor, probability = draws(replay, state, 200)
    there = handles.slot.tolist()
    assert_spread(np.bincount(slot, minlength=8), [(c in there) / 6 for c in range(8)])
    np.testing.assert_allclose(probability, 1 / 6, rtol=1e-6)
    for c, n in zip(there, LENGTHS, strict=True):
        count = np.bincount(anchor[slot == c], minlength=n)
        assert len(count) == n
        assert_spread(count, np.full(n, 1 / n))
    # Which trajectory and which step are independent: of two long ones, the same steps equally often.
    table = [np.bincount(anchor[slot == there[i]], minlength=5) for i in (0, 5)]
    assert stats.chi2_contingency(table).pvalue > 1e-4


@pytest.mark.parametrize("partitions", [1, 4])
def test_prioritized_by_priority_to_the_alpha(make, filled, partitions):
    replay = make(Prioritized(alpha=0.6), partitions=partitions)
    given = np.array([0.1, 1, 0, 3, 5, 0.7], np.float32)
    state, handles = filled(replay, 6, LENGTHS, priorities=given)
    slot, _, probability = draws(replay, state, 200)
    wanted = np.zeros(8)
    wanted[np.asarray(handles.slot)] = np.where(given > 0, given.astype(np.float64) ** 0.6, 0)
    wanted /= wanted.sum()
    assert_spread(np.bincount(slot, minlength=8), wanted)
    np.testing.assert_allclose(probability, wanted[slot], rtol=1e-5)


def test_rows_of_a_batch_are_independent(make, filled):
    replay = make(Uniform())
    state, _ = filled(replay, 6, LENGTHS)
    slot, _, _ = draws(replay, state, 400)
    pairs = slot.reshape(-1, B)
    for first, second in ((0, 1), (0, 63), (17, 18)):
        table = np.zeros((6, 6))
        np.add.at(table, (pairs[:, first], pairs[:, second]), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-4
    between = np.zeros((6, 6))  # one batch and the next
    np.add.at(between, (pairs[:-1, 0], pairs[1:, 0]), 1)
    assert stats.chi2_contingency(between).pvalue > 1e-4


@pytest.mark.parametrize("selector", [TopK(), Fifo(), Lifo()])
def test_more_rows_than_there_are_without_replacement(make, filled, selector):
    replay = make(selector)
    state, handles = filled(replay, 6, LENGTHS, priorities=[3, 1, 2, 2, 9, 4])
    state, s = replay.sample(state, jax.random.key(0), B)
    wanted = {TopK: [4, 5, 0, 2, 3, 1], Fifo: [0, 1, 2, 3, 4, 5], Lifo: [5, 4, 3, 2, 1, 0]}[type(selector)]
    assert s.handles.slot.tolist() == np.asarray(handles.slot)[wanted].tolist() + [-1] * (B - 6)
    assert s.valid.tolist() == [True] * 6 + [False] * (B - 6)
    assert not s.mask["number"][6:].any() and not s.data["number"][6:].any()
    assert (s.length[6:] == 0).all() and (s.anchor[6:] == 0).all() and (s.handles.generation[6:] == 0).all()
    again = replay.sample(state, jax.random.key(1), B)[1]  # nothing is consumed
    assert again.handles.slot.tolist() == s.handles.slot.tolist()


@pytest.mark.parametrize("selector", [Uniform(), Prioritized()])
def test_more_rows_than_there_are_with_replacement(make, filled, selector):
    state, _ = filled(replay := make(selector), 2)
    _, s = replay.sample(state, jax.random.key(0), B)
    assert s.valid.all() and set(s.handles.slot.tolist()) == {0, 1}


def test_permutation_meets_every_trajectory_once_an_epoch(make, filled):
    """Whatever the keys; through add, sample and the whole state."""
    replay = make(Permutation(), partitions=2, windows=gear.Window(-1, 3))
    orders = []
    for init, first in ((1, 0), (1, 500), (2, 0)):
        state, _ = filled(replay, 8, key=jax.random.key(init))
        slots = []
        for i in range(4):
            state, s = replay.sample(state, jax.random.key(first + i), 6)
            assert s.valid.all()
            slots += s.handles.slot.tolist()
        epochs = [slots[i : i + 8] for i in (0, 8, 16)]
        assert all(sorted(e) == list(range(8)) for e in epochs)
        assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
        orders.append(slots)
    assert orders[0] == orders[1] != orders[2]


def test_the_same_state_and_key_draw_the_same(make, filled, same):
    replay = make(Prioritized())
    state, _ = filled(replay, 8)
    twin, _ = filled(replay, 8)
    same(replay.sample(state, jax.random.key(3), 6), replay.sample(twin, jax.random.key(3), 6))


@pytest.mark.parametrize("selection", ["centralized", "decentralized"])
def test_on_one_device_both_kinds_of_selection_are_one(make, filled, same, selection):
    plain, _ = filled(make(Prioritized()), 8)
    other = make(Prioritized(), selection=selection)
    wanted = make(Prioritized()).sample(plain, jax.random.key(3), 6)
    same(other.sample(filled(other, 8)[0], jax.random.key(3), 6), wanted)
