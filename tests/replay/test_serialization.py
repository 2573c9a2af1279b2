"""A state that went through flax's bytes is the same table, in the same memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import gear_jax as gear
from gear_jax.selectors import Permutation, Prioritized
from gear_jax.testing.ops import to_numpy


@pytest.mark.parametrize("selector", [Prioritized(), Permutation()], ids=lambda s: type(s).__name__)
def test_the_next_batches_and_handles_are_those_of_the_uninterrupted_table(make, rows, filled, same, selector, memory):
    replay = make(selector, partitions=2, windows=gear.Window(-1, 3), memory=memory)
    state, _ = filled(replay, 8, [1, 2, 3, 4, 5, 1, 2, 3], key=jax.random.key(5))
    state, s = replay.sample(state, jax.random.key(0), 6)
    state = replay.update_priorities(state, s.handles, np.arange(6, dtype=np.float32))
    saved = serialization.to_bytes(state)
    restored = serialization.from_bytes(replay.init(), saved)  # NumPy leaves
    assert bool(replay.can_sample(restored)) and replay.stats(restored) == replay.stats(state)
    for turn in range(3):
        state, s = replay.sample(state, jax.random.key(turn), 6)
        restored, t = replay.sample(restored, jax.random.key(turn), 6)
        same(t, s)
        state, h = replay.add(state, rows([9, 8, 7, 6]), np.full(4, 3, np.int32))
        restored, k = replay.add(restored, rows([9, 8, 7, 6]), np.full(4, 3, np.int32))
        same(k, h)
    same(restored, state)
    assert kinds(restored) == kinds(state) == {memory}


def kinds(state):
    return {x.sharding.memory_kind for x in jax.tree.leaves(state.columns)}


def by_callback(column):
    """As Orbax makes an array: where it should be, with a type that says otherwise."""
    held = to_numpy(column)
    return jax.make_array_from_callback(held.shape, column.sharding, lambda index: held[index])


@pytest.mark.parametrize("other", [to_numpy, by_callback, jnp.asarray], ids=["numpy", "callback", "device"])
def test_place_puts_columns_where_the_table_keeps_them(make, filled, same, other):
    replay = make(memory="pinned_host")
    state, _ = filled(replay, 4)
    assert replay.place(state) is state
    wanted = to_numpy(state)
    held = wanted.columns if other is jnp.asarray else state.columns
    state = state.replace(columns=jax.tree.map(other, held))
    placed = replay.place(state)
    assert kinds(placed) == {"pinned_host"}
    assert {jax.typeof(x).memory_space for x in jax.tree.leaves(placed.columns)} == {jax.memory.Space.Host}
    step = jax.jit(lambda s, k: replay.sample(s, k, 6), donate_argnums=0)
    state, sample = step(placed, jax.random.key(0))
    assert kinds(state) == {"pinned_host"} and sample.valid.all()
    same(state.columns, wanted.columns)
    with pytest.raises(TypeError, match="place: state: got a traced state"):
        jax.jit(replay.place)(state)


def test_streams_go_along(make):
    replay = make(streams=2)
    one = {"number": np.array([5, 6], np.int32), "pair": np.zeros((2, 2), np.float32)}
    two = np.arange(2, dtype=np.int32)
    state, _ = replay.append(replay.init(), two, one, np.zeros(2, bool))
    restored = serialization.from_bytes(replay.init(), serialization.to_bytes(state))
    restored, handles = replay.append(restored, two, one, np.ones(2, bool))
    assert handles.slot.tolist() == [0, 1] and np.asarray(restored.length)[0, :2].tolist() == [2, 2]


def test_a_state_is_a_pytree_with_names():
    state = gear.make_replay(gear.TableSpec({"a": gear.ColumnSpec((), np.int32)}, 2, 4)).init()
    names = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(state)}
    assert {"columns/a", "priority", "generation", "ticket"} <= names
    assert set(serialization.to_state_dict(state)) >= {"columns", "length", "selector"}
