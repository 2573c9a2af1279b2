"""Handles: stale ones, duplicates, and what is no handle at all."""

import jax
import jax.numpy as jnp
import numpy as np

import gear_jax as gear
from gear_jax.selectors import Prioritized


def test_a_generation_rises_with_each_overwrite(make, rows):
    replay = make()
    state = replay.init()
    for turn in range(1, 4):
        state, handles = replay.add(state, rows(range(8)), np.full(8, turn, np.int32))
        assert handles.generation.tolist() == [turn] * 8
    _, s = replay.sample(state, jax.random.key(0), 6)
    assert (s.handles.generation == 3).all() and (s.length == 3).all()


def test_an_update_through_a_stale_handle_changes_nothing_and_is_counted(make, rows, filled, same):
    replay = make(Prioritized())
    state, old = filled(replay, 8)
    state, new = replay.add(state, rows([20, 21, 22]), np.full(3, 2, np.int32))
    assert new.slot.tolist() == old.slot[:3].tolist()
    before = jax.tree.map(np.asarray, (state.priority, state.mass, state.sums, state.max_priority))
    three = gear.Handle(old.slot[:3], old.generation[:3])
    state = replay.update_priorities(state, three, np.array([9, 9, 9], np.float32))
    same((state.priority, state.mass, state.sums, state.max_priority), before)
    assert replay.stats(state)["stale_updates"] == 3
    state = replay.update_priorities(state, new, np.array([9, 8, 7], np.float32))
    assert np.asarray(state.priority)[0, :3].tolist() == [9, 8, 7]
    assert replay.stats(state)["stale_updates"] == 3


def test_of_duplicate_handles_the_last_one_wins(make, filled):
    replay = make(Prioritized())
    state, h = filled(replay, 4)
    at = np.array([1, 2, 1, 0, 1, 2])
    six = gear.Handle(h.slot[at], h.generation[at])
    state = replay.update_priorities(state, six, np.array([5, 6, 7, 8, 9, np.nan], np.float32))
    # The last good one: a rejected priority leaves the old one.
    assert np.asarray(state.priority)[0, :4].tolist() == [8, 9, 6, 1]


def test_what_is_no_handle_of_this_table(make, filled):
    replay = make(Prioritized())
    state, _ = filled(replay, 4)
    slot = jnp.array([-1, -2, 8, 2**31 - 1, 6, 0], jnp.int32)  # -1: none; 6: never filled
    generation = jnp.array([0, 1, 1, 1, 0, 0], jnp.uint32)
    state = replay.update_priorities(state, gear.Handle(slot, generation), np.full(6, 5, np.float32))
    assert (np.asarray(state.priority)[0] == [1] * 4 + [0] * 4).all()
    assert replay.stats(state)["stale_updates"] == 5


def test_a_sample_with_rows_that_are_not_valid_can_be_updated(make, filled):
    replay = make(Prioritized())
    state = replay.init()
    state, s = replay.sample(state, jax.random.key(0), 6)
    state = replay.update_priorities(state, s.handles, np.ones(6, np.float32))
    assert replay.stats(state)["stale_updates"] == 0 and not replay.can_sample(state)


def test_handles_of_any_shape(make, filled):
    replay = make(Prioritized())
    state, h = filled(replay, 4)
    square = jax.tree.map(lambda x: x.reshape(2, 2), h)
    state = replay.update_priorities(state, square, np.array([[1, 2], [3, 4]], np.float32))
    assert np.asarray(state.priority)[0, :4].tolist() == [1, 2, 3, 4]
