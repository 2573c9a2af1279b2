"""`add` with `rows`: the same as adding the rows themselves, for every number of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.testing.ops import assert_same_bits

R, T = 5, 4


@pytest.fixture
def replay(memory):
    columns = {"x": gear.ColumnSpec((3,), jnp.float32), "y": gear.ColumnSpec((), jnp.uint8)}
    return gear.make_replay(gear.TableSpec(columns, T, 12), memory=memory)


@pytest.fixture
def values():
    rng = np.random.default_rng(0)
    return {
        "x": jnp.asarray(rng.random((R, T, 3), np.float32)),
        "y": jnp.asarray(rng.integers(0, 256, (R, T), np.uint8)),
    }


@pytest.mark.parametrize("rows", [[], [3], [4, 0, 0, 2], [1] * 9])
@pytest.mark.parametrize("priorities", [False, True])
def test_picked_rows_are_the_rows(replay, values, rows, priorities):
    rows, lengths = np.array(rows, np.int32), np.arange(len(rows), dtype=np.int32) % (T + 1)
    given = np.linspace(0.5, 2, len(rows)).astype(np.float32) if priorities else None
    wanted = replay.add(replay.init(), jax.tree.map(lambda v: v[rows], values), lengths, given)
    assert_same_bits(replay.add(replay.init(), values, lengths, given, rows=rows), wanted)
    inside = jax.jit(lambda s, v, r: replay.add(s, v, lengths, given, rows=r))(replay.init(), values, rows)
    assert_same_bits(inside, wanted)


def test_rows_outside_count_for_nothing_if_they_have_no_steps(replay, values):
    state, handles = replay.add(replay.init(), values, [2, 0, 0], rows=[1, R, -1])
    assert handles.slot.tolist() == [0, -1, -1] and replay.stats(state)["inserted"] == 1


def test_faults(replay, values):
    state = replay.init()
    with pytest.raises(ValueError, match=r"lengths: got shape \(3,\), wanted \[A\] = \(2,\)"):
        replay.add(state, values, [1, 1, 1], rows=[0, 1])
    with pytest.raises(ValueError, match=r"rows: got shape \(1, 2\), wanted \[A\]"):
        replay.add(state, values, [1, 1], rows=[[0, 1]])
    with pytest.raises(TypeError, match="rows"):
        replay.add(state, values, [1, 1], rows=np.array([0.0, 1.0]))


@pytest.mark.parametrize("row", [-1, 1, 2**31 - 1])
def test_a_row_that_is_none_is_skipped(row):
    """It does not make a trajectory of what was in the slot before."""
    replay = gear.make_replay(gear.TableSpec({"x": gear.ColumnSpec((), jnp.float32)}, 2, 2))
    state, _ = replay.add(replay.init(), {"x": np.array([[1, 1], [2, 2]], np.float32)}, [2, 2])
    state, handles = replay.add(state, {"x": np.full((1, 2), 9, np.float32)}, [2, 2], rows=[row, 0])
    assert np.asarray(handles.slot).tolist() == [-1, 0]
    assert np.asarray(state.columns["x"])[0, :, 0].tolist() == [9, 2] and replay.stats(state)["inserted"] == 3
