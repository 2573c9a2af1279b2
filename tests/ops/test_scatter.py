"""`ops.scatter` against the oracle, under every transformation, dtype and size; in place; its options and errors."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import ops
from gear_jax.testing.ops import (
    DTYPES,
    NOT_PINNED,
    TRANSFORMS,
    X64_DTYPES,
    assert_same_bits,
    check_scatter,
    place,
    random_values,
    scatter_oracle,
)

MEMORIES = ("device", "pinned_host")
PLACED = [(t, m) for t in TRANSFORMS for m in MEMORIES if m == "device" or t not in NOT_PINNED]


def ids(*numbers):
    return jnp.asarray(numbers, jnp.int32)


@pytest.mark.parametrize(("transform", "memory"), PLACED)
def test_transformations(transform, memory):
    check_scatter(ops.scatter, transform, memory=memory)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, memory):
    check_scatter(ops.scatter, dtypes=(dtype,), step_shape=(), memory=memory)


@pytest.mark.parametrize("transform", ["eager", "jit", "vmap", "scan", "shard_map", "pmap"])
def test_64_bit_dtypes(transform):
    with jax.enable_x64(True):
        check_scatter(ops.scatter, transform, dtypes=X64_DTYPES)


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
@pytest.mark.parametrize("step_shape", [(), (3,), (17,), (4099,)], ids=str)
def test_step_and_batch_sizes(step_shape, rows, memory):
    check_scatter(ops.scatter, dtypes=("uint8",), step_shape=step_shape, rows=rows, memory=memory)


@pytest.mark.parametrize("value_steps", [0, 1, 7])
def test_steps_of_the_values(value_steps):
    check_scatter(ops.scatter, dtypes=("uint8", "float32"), value_steps=value_steps)


# Not shard_map, nor pmap: JAX 0.11.2 crashes (Shardy's ManualComputationUnusedInputsPattern) if arguments are empty.
@pytest.mark.parametrize("transform", ["vmap", "nested_vmap", "scan"])
def test_an_empty_batch_under_transformations(transform):
    check_scatter(ops.scatter, transform, rows=0, dtypes=("uint8", "float32"))


@pytest.mark.parametrize("step", [1, 3, 17, 1031])
def test_large_values_split_over_threads(step, memory):
    check_scatter(
        ops.scatter, dtypes=("uint8",), step_shape=(step,), table=(2, 9, (4 << 20) // (18 * step)), rows=17,
        value_steps=(3 << 20) // (17 * step), memory=memory,
    )  # fmt: skip


def test_a_row_longer_than_a_task(memory):
    rng = np.random.default_rng(0)
    column, value = random_values(rng, (1, 2, 3, 1 << 21), np.uint8), random_values(rng, (1, 2, 1 << 21), np.uint8)
    got = jax.jit(ops.scatter)(place(column, memory), ids(1), value, ids(2), ids(1))
    assert_same_bits(got, scatter_oracle(column, np.array([1]), value, np.array([2]), np.array([1])))


@hypothesis.given(st.integers(1, 5), st.integers(0, 5), st.data())
def test_random_rows(steps, value_steps, data):
    count, value_steps = 4, min(steps, value_steps)
    numbers = lambda low, high: data.draw(  # noqa: E731
        st.lists(st.integers(low, high), min_size=count, max_size=count).map(lambda x: np.asarray(x, np.int32))
    )
    slots = np.asarray(data.draw(st.permutations(range(-2, 6)))[:count], np.int32)
    starts, lengths = numbers(-7, 7), numbers(-1, 7)
    column = np.arange(4 * steps * 3, dtype=np.uint8).reshape(2, 2, steps, 3)
    values = np.arange(count * value_steps * 3, dtype=np.uint8).reshape(count, value_steps, 3) + np.uint8(100)
    got = ops.scatter(jnp.asarray(column), slots, values, lengths, starts)
    assert_same_bits(got, scatter_oracle(column, slots, values, lengths, starts))


def test_rows_of_one_slot_that_do_not_overlap():
    column = jnp.zeros((1, 2, 6), jnp.int32)
    values = jnp.arange(1, 9, dtype=jnp.int32).reshape(4, 2)
    got = ops.scatter(column, ids(1, 1, 1, 0), values, ids(2, 1, 2, 1), ids(4, 0, 2, 5))
    np.testing.assert_array_equal(got[0], [[0, 0, 0, 0, 0, 7], [3, 0, 5, 6, 1, 2]])


def test_rows_that_overlap_leave_one_of_their_values():
    column, values = jnp.zeros((1, 1, 1, 64), jnp.int32), jnp.asarray([[1], [2]], jnp.int32)[..., None]
    got = ops.scatter(column, ids(0, 0), values * jnp.ones((1, 1, 64), jnp.int32))
    assert set(np.unique(got)) <= {1, 2}


def test_lengths_and_starts_have_defaults():
    column = jnp.zeros((1, 3, 4), jnp.float32)
    got = ops.scatter(column, ids(2), jnp.ones((1, 3), jnp.float32))
    np.testing.assert_array_equal(got[0], [[0] * 4, [0] * 4, [1, 1, 1, 0]])


def test_slots_outside_the_table_are_skipped():
    column = jnp.zeros((2, 2, 3), jnp.float32)
    got = ops.scatter(column, ids(-1, 4, 2**31 - 1, -(2**31)), jnp.ones((4, 3), jnp.float32))
    assert not got.any()


def test_numbers_too_large_for_int32_do_not_wrap_round():
    with jax.enable_x64(True):
        column, value = jnp.zeros((2, 2, 3), jnp.float32), jnp.ones((2, 3), jnp.float32)
        assert not ops.scatter(column, jnp.asarray([2**32, -(2**32)]), value).any()
        assert not ops.scatter(column, ids(0, 1), value, starts=jnp.asarray([2**32, 2**33])).any()


def test_checks_name_the_row(checks):
    column, value = jnp.zeros((2, 2, 3), jnp.float32), jnp.ones((2, 3), jnp.float32)
    text = (
        r"scatter: row 1: got slot 4, start 0, length 3, wanted slot -1 or in \[0, 4\) and steps in \[0, 3\)\. "
        "Pass rows of the table, or unset GEAR_JAX_CHECKS"
    )
    for run in (lambda f: f, jax.jit):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(run(ops.scatter)(column, ids(0, 4), value))
        for slots, lengths, starts in [
            (ids(0, -2), ids(3, 1), ids(0, 0)),
            (ids(0, 1), ids(3, 3), ids(0, 1)),
            (ids(0, 1), ids(3, 1), ids(0, -1)),
            (ids(0, 1), ids(3, -1), ids(0, 0)),
        ]:
            with pytest.raises(jax.errors.JaxRuntimeError, match="scatter: row 1: got"):
                jax.block_until_ready(run(ops.scatter)(column, slots, value, lengths, starts))
    skipped = ops.scatter(column, ids(-1, 3), value, ids(9, 0), ids(9, 9))
    assert not skipped.any()


def test_the_columns_own_memory_is_written(memory):
    columns = {"a": ops.zeros((2, 2, 3), jnp.float32, memory), "b": ops.zeros((2, 2, 3, 5), jnp.uint8, memory)}
    values = {"a": jnp.ones((1, 2), jnp.float32), "b": jnp.full((1, 2, 5), 7, jnp.uint8)}
    before = jax.tree.map(lambda x: x.unsafe_buffer_pointer(), columns)
    got = jax.jit(ops.scatter, donate_argnums=0)(columns, ids(3), values)
    assert jax.tree.map(lambda x: x.unsafe_buffer_pointer(), got) == before
    assert all(x.is_deleted() for x in jax.tree.leaves(columns))
    np.testing.assert_array_equal(np.asarray(got["a"])[1, 1], [1, 1, 0])
    assert {x.sharding.memory_kind for x in got.values()} == {memory}


def test_columns_that_are_not_donated_stay(memory):
    column = ops.zeros((1, 2, 3), jnp.float32, memory)
    for run in (ops.scatter, jax.jit(ops.scatter)):
        got = run(column, ids(0), jnp.ones((1, 3), jnp.float32))
        assert got.sharding.memory_kind == memory
        assert np.asarray(got).any() and not np.asarray(column).any()


def test_vmap_of_the_values_alone():
    column, value = jnp.zeros((1, 2, 3), jnp.float32), jnp.ones((4, 1, 3), jnp.float32)
    with pytest.raises(ValueError, match="scatter under vmap: columns: got a table that is not batched"):
        jax.vmap(lambda v: ops.scatter(column, ids(0), v))(value)


def test_vmap_with_some_arguments_batched(memory):
    column, value = ops.zeros((3, 1, 2, 3), jnp.float32, memory), jnp.ones((1, 3), jnp.float32)
    got = jax.vmap(lambda c, n, t: ops.scatter(c, ids(1), value, n, ticket=t))(
        column, jnp.asarray([[0], [1], [3]], jnp.int32), jnp.zeros((3, 1), jnp.int32)
    )
    got = np.asarray(got)
    np.testing.assert_array_equal(got[:, 0, 1], [[0, 0, 0], [1, 0, 0], [1, 1, 1]])
    assert not got[:, 0, 0].any()


def test_a_slot_outside_does_not_reach_the_next_table_under_vmap():
    column = jnp.zeros((3, 1, 2, 3), jnp.float32)
    got = jax.vmap(lambda c: ops.scatter(c, ids(2, -1), jnp.ones((2, 3), jnp.float32)))(column)
    assert not got.any()


@pytest.mark.devices(4)
def test_a_wrong_out_spec_of_shard_map_raises():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, everywhere = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    column, value = jnp.zeros((4, 3, 2), jnp.float32), jnp.ones((4, 2), jnp.float32)
    f = lambda c, v: ops.scatter(c, ids(1), v)  # noqa: E731
    got = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=spec))(column, value)
    np.testing.assert_array_equal(got[:, 1], np.ones((4, 2)))
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=everywhere))(column, value)


_COLUMN = np.ones((2, 3, 4), np.float32)
_VALUE = np.ones((1, 4), np.float32)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, "columns: got none", lambda: ops.scatter({}, ids(0), {})),
        (ValueError, "values: got", lambda: ops.scatter({"a": _COLUMN}, ids(0), {"b": _VALUE})),
        (ValueError, r"values\[0\]: got shape \(\)", lambda: ops.scatter(_COLUMN, ids(0), 1.0)),
        (ValueError, r"values\[0\]: got shape \(2, 4\), wanted \[A, T', \*shape\] = \(1, 4\)",
         lambda: ops.scatter(_COLUMN, ids(0), np.ones((2, 4), np.float32))),
        (ValueError, r"values\[1\]: got shape \(1, 3\), wanted",
         lambda: ops.scatter([_COLUMN, _COLUMN], ids(0), [_VALUE, _VALUE[:, :3]])),
        (TypeError, r"values\[0\]: got dtype int32, wanted float32. Pass it .astype\(float32\)",
         lambda: ops.scatter(_COLUMN, ids(0), _VALUE.astype(np.int32))),
        (ValueError, "values: got T' = 5 steps, wanted at most T = 4",
         lambda: ops.scatter(_COLUMN, ids(0), np.ones((1, 5), np.float32))),
        (TypeError, "slots: got dtype float32", lambda: ops.scatter(_COLUMN, [0.0], _VALUE)),
        (ValueError, r"starts: got shape \(2,\)", lambda: ops.scatter(_COLUMN, ids(0), _VALUE, starts=ids(0, 1))),
        (ValueError, r"lengths: got shape \(\)", lambda: ops.scatter(_COLUMN, ids(0), _VALUE, 3)),
    ],
)  # fmt: skip
def test_bad_arguments(error, text, call):
    with pytest.raises(error, match=text):
        call()


def test_numpy_arrays_become_what_jax_makes_of_them():
    got = ops.scatter(np.zeros((1, 2, 3)), np.array([1]), np.ones((1, 3)))  # float64, float32 where x64 is off
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got[0, 1], [1, 1, 1])
