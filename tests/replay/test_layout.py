"""The state: shapes, footprint, what `init` gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.selectors import Permutation, Prioritized
from gear_jax.testing.ops import to_numpy


def test_one_array_for_each_column_leaf_with_partitions_first(make):
    replay = make(partitions=2)
    state = replay.init()
    assert isinstance(state, gear.ReplayState)
    assert state.columns["number"].shape == (2, 4, 5) and state.columns["number"].dtype == jnp.int32
    assert state.columns["pair"].shape == (2, 4, 5, 2) and state.columns["pair"].dtype == jnp.float32
    for name in ("length", "generation", "sequence", "priority", "mass"):
        assert getattr(state, name).shape == (2, 4), name
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.columns))


def test_any_tree_of_columns():
    spec = gear.ColumnSpec
    columns = {"a": (spec((), bool), [spec((2, 3), jnp.bfloat16)]), "b": spec((1,), jnp.uint8)}
    replay = gear.make_replay(gear.TableSpec(columns, 4, 3))
    rows = {
        "a": (np.ones((1, 4), bool), [jnp.full((1, 4, 2, 3), 2, jnp.bfloat16)]),
        "b": np.full((1, 4, 1), 3, np.uint8),
    }
    state, _ = replay.add(replay.init(), rows, np.array([4], np.int32))
    state, sample = replay.sample(state, jax.random.key(0), 2)
    assert jax.tree.structure(sample.data) == jax.tree.structure(state.columns) == jax.tree.structure(sample.mask)
    for x, y in zip(jax.tree.leaves(sample.data), jax.tree.leaves(rows), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, np.concatenate([y, y]))
    assert all(m.shape == (2, 4) and m.all() for m in jax.tree.leaves(sample.mask))


def test_trajectories_lie_contiguous_within_a_column(make, filled):
    state, handles = filled(make(partitions=2), 4, [5, 4, 3, 2])
    flat = to_numpy(state.columns)["number"].reshape(8, 5)
    for i, slot in enumerate(np.asarray(handles.slot)):
        np.testing.assert_array_equal(flat[slot][: 5 - i], i * 100 + np.arange(5 - i) + 1)


def test_a_sample_is_made_of_what_the_documentation_says(make, filled):
    replay = make(windows=gear.Window(-1, 3))
    state, _ = filled(replay, 4)
    _, s = replay.sample(state, jax.random.key(0), 6)
    assert s.data["number"].shape == (6, 3) and s.data["pair"].shape == (6, 3, 2)
    assert s.mask["pair"].shape == (6, 3) and s.mask["pair"].dtype == bool
    assert (s.handles.slot.dtype, s.handles.generation.dtype) == (jnp.int32, jnp.uint32)
    kinds = {"anchor": "int32", "length": "int32", "probability": "float32", "weight": "float32", "valid": "bool"}
    for name, dtype in kinds.items():
        assert getattr(s, name).shape == (6,) and getattr(s, name).dtype == dtype, name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partitions": 4},
        {"streams": 3, "partitions": 2},
        {"selector": Permutation()},
        {"selector": Prioritized(), "anchor": "full", "windows": gear.Window(0, 2)},
    ],
)
def test_the_footprint_is_the_bytes_of_the_state(options):
    columns = {"a": gear.ColumnSpec((3, 5), jnp.uint8), "b": gear.ColumnSpec((), jnp.float32)}
    table = gear.TableSpec(columns, trajectory_length=7, capacity=1000)
    state = gear.make_replay(table, **options).init()
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    got = gear.footprint(table, **options)
    assert got.columns == {"a": 1000 * 7 * 15, "b": 1000 * 7 * 4}
    assert got.total == size(state) and got.index == size(state.replace(columns=None))
    assert sum(got.tiers.values()) * got.devices == got.total
    assert "a: 102.5 KiB" in str(got)


def test_the_footprint_of_a_table_that_no_machine_holds():
    table = gear.TableSpec({"a": gear.ColumnSpec((1024,), jnp.float32)}, 1000, 2**30)
    assert gear.footprint(table).columns["a"] == 4096 * 1000 * 2**30


def test_an_empty_table_gives_rows_that_are_not_valid(make):
    for selector in (None, Prioritized(), Permutation()):
        replay = make(selector, windows=gear.Window(-1, 3, pad_value=7))
        state = replay.init()
        assert not replay.can_sample(state)
        state, s = replay.sample(state, jax.random.key(0), 6)
        assert not s.valid.any() and not s.mask["number"].any()
        assert (s.handles.slot == -1).all() and (s.handles.generation == 0).all()
        assert (s.data["number"] == 7).all() and (s.probability == 0).all() and (s.weight == 0).all()
        assert replay.stats(state)["sampled"] == 0


def test_can_sample_is_whether_a_row_would_be_valid(make, filled):
    replay = make(Prioritized())
    state, handles = filled(replay, 2)
    assert replay.can_sample(state) and replay.can_sample(state).shape == ()
    state = replay.update_priorities(state, handles, np.zeros(2, np.float32))
    assert not replay.can_sample(state)
    state, s = replay.sample(state, jax.random.key(0), 6)
    assert not s.valid.any()
