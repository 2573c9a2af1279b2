"""`ops.scatter(rows=, stamps=)`: rows picked out of shared values, and the seqlock over slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import ops
from gear_jax.ops import _reference
from gear_jax.testing.ops import (
    DTYPES,
    NOT_PINNED,
    TRANSFORMS,
    assert_same_bits,
    batch_size,
    dtype_of,
    place,
    random_rows,
    random_values,
    scatter_oracle,
)

MEMORIES = ("device", "pinned_host")
PLACED = [(t, m) for t in TRANSFORMS for m in MEMORIES if m == "device" or t not in NOT_PINNED]
TABLE = (2, 3, 7)


def ids(*numbers):
    return jnp.asarray(numbers, jnp.int32)


def words(*numbers):
    return jnp.asarray(numbers, jnp.uint32)


def case(transform, dtypes, rows, values, value_steps=4, step_shape=(3,)):
    """Tables, stamps, values and rows for each element of the batch; a slot at most once an element."""
    rng, k, capacity = np.random.default_rng(rows + values), batch_size(transform), TABLE[0] * TABLE[1]
    tables = {d: random_values(rng, (k, *TABLE, *step_shape), dtype_of(d)) for d in dtypes}
    given = {d: random_values(rng, (k, values, value_steps, *step_shape), dtype_of(d)) for d in dtypes}
    slots, starts, lengths = random_rows(rng, TABLE, (k, rows))
    for row in slots:
        unused = rng.permutation(capacity)[:rows]
        row[:] = np.where((row >= 0) & (row < capacity), np.append(unused, [-1] * (rows - len(unused))), row)
    picks = rng.integers(-1, values + 1, (k, rows)).astype(np.int32)
    stamp = rng.integers(0, 2**32, (k, *TABLE[:2]), dtype=np.uint32)
    return (tables, stamp), (slots, given, lengths, starts, picks, rng.integers(0, 2**32, (k, rows), dtype=np.uint32))


def wanted(tables, rows, i):
    columns, stamp = tables
    slots, values, lengths, starts, picks, value = rows
    out = {}
    for d, column in columns.items():
        r = values[d].shape[1]
        kept = (picks[i] >= 0) & (picks[i] < r)
        source = values[d][i][np.where(kept, picks[i], 0)] if r else np.zeros((len(picks[i]), *values[d].shape[2:]))
        to = np.where(kept, slots[i], -1)
        out[d] = scatter_oracle(column[i], to, source.astype(column.dtype), lengths[i], starts[i])
    new = stamp[i].reshape(-1).copy()
    for slot, kept_row, v in zip(slots[i], kept, value[i], strict=True):
        if kept_row and 0 <= slot < new.size:
            new[slot] = v
    return out, new.reshape(stamp[i].shape)


def run(tables, rows):
    columns, stamp = tables
    slots, values, lengths, starts, picks, value = rows
    return ops.scatter(columns, slots, values, lengths, starts, rows=picks, stamps=(stamp, value))


@pytest.mark.parametrize(("transform", "memory"), PLACED)
def test_transformations(transform, memory):
    tables, rows = case(transform, ("uint8", "float32"), 5, 3)
    got = TRANSFORMS[transform](run, tables, rows, memory)
    for i in range(batch_size(transform)):
        assert_same_bits(jax.tree.map(lambda x: x[i], got), wanted(tables, rows, i), f"{transform} {i}: ")  # noqa: B023


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    tables, rows = case("jit", (dtype,), 6, 4, step_shape=())
    got = TRANSFORMS["jit"](run, tables, rows, "device")
    assert_same_bits(jax.tree.map(lambda x: x[0], got), wanted(tables, rows, 0))


@pytest.mark.parametrize("count", [0, 1, 2, 9])
@pytest.mark.parametrize("values", [0, 1, 5])
def test_sizes(count, values):
    tables, rows = case("jit", ("uint8",), count, values, step_shape=(17,))
    got = TRANSFORMS["vmap"](run, tables, rows, "device")
    assert_same_bits(jax.tree.map(lambda x: x[0], got), wanted(tables, rows, 0))


def test_values_that_all_elements_share_stay_where_they_are():
    tables, rows = case("vmap", ("uint8",), 5, 3)
    rows = (rows[0], jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), rows[1]), *rows[2:])
    one = jax.tree.map(lambda x: x[0], rows[1])
    f = jax.jit(jax.vmap(lambda t, s, rest: run(t, (s, one, *rest)), in_axes=(0, 0, 0)))
    got = f(place(tables), rows[0], rows[2:])
    for i in range(8):
        assert_same_bits(jax.tree.map(lambda x: x[i], got), wanted(tables, rows, i))  # noqa: B023
    call = next(x for x in f.lower(tables, rows[0], rows[2:]).compile().as_text().splitlines() if "gear_scatter" in x)
    assert "u8[3,4,3]" in call, "the values are repeated for each element"


def test_the_reference_agrees():
    (columns, stamp), rows = case("jit", ("uint8",), 6, 4)
    slots, values, lengths, starts, picks, value = (jax.tree.map(lambda x: jnp.asarray(x[0]), x) for x in rows)
    kept = jnp.where((picks >= 0) & (picks < 4), slots, -1)
    column, want = wanted((columns, stamp), rows, 0)
    got = _reference.scatter(jnp.asarray(columns["uint8"][0]), slots, values["uint8"], lengths, starts, picks)
    assert_same_bits((got, _reference.stamps(jnp.asarray(stamp[0]), kept, value)), (column["uint8"], want))


def test_a_row_may_be_written_to_several_slots():
    got = ops.scatter(jnp.zeros((1, 3, 2)), ids(2, 0), jnp.ones((1, 2)), rows=ids(0, 0))
    np.testing.assert_array_equal(got[0], [[1, 1], [0, 0], [1, 1]])


def test_rows_without_steps_are_stamped_and_skipped_rows_are_not():
    stamp = words(0, 2, 4, 6).reshape(2, 2)
    columns, stamp = ops.scatter(
        jnp.zeros((2, 2, 3)), ids(0, -1, 9, 3, 2), jnp.ones((1, 3)), ids(0, 3, 3, 3, 3), rows=ids(0, 0, 0, 1, 0),
        stamps=(stamp, words(3, 9, 9, 9, 10)),
    )  # fmt: skip
    np.testing.assert_array_equal(stamp.reshape(-1), [3, 2, 10, 6])
    np.testing.assert_array_equal(columns.reshape(4, 3).any(1), [False, False, True, False])


def test_stamps_without_rows():
    column, stamp = ops.scatter(jnp.zeros((1, 2, 1)), ids(1), jnp.ones((1, 1)), stamps=(words(8, 8)[None], words(10)))
    np.testing.assert_array_equal((column[0, :, 0], stamp[0]), [[0, 1], [8, 10]])


def test_everything_is_written_in_place(memory):
    columns, stamp = {"a": ops.zeros((2, 2, 3), jnp.float32, memory)}, ops.zeros((2, 2), jnp.uint32, memory)
    before = jax.tree.map(lambda x: x.unsafe_buffer_pointer(), (columns, stamp))
    write = jax.jit(
        lambda c, stamp: ops.scatter(c, ids(3), {"a": jnp.ones((2, 3))}, rows=ids(1), stamps=(stamp, words(2))),
        donate_argnums=(0, 1),
    )
    got = write(columns, stamp)
    assert jax.tree.map(lambda x: x.unsafe_buffer_pointer(), got) == before
    text = write.lower(*got).compile().as_text()
    assert "copy(" not in text, "something is copied"


def test_checks_name_the_row(checks):
    column, value = jnp.zeros((2, 2, 3)), jnp.ones((2, 3))
    text = r"scatter: row 1: got slot 1, start 0, length 3, row 2 of the values, wanted slot -1 or .* rows in \[0, 2\)"
    for row in (2, -1):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text.replace("row 2", f"row {row}")):
            jax.block_until_ready(ops.scatter(column, ids(0, 1), value, rows=ids(1, row)))
    stamp = words(0, 0, 0, 0).reshape(2, 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="scatter: row 0: got slot 4"):
        jax.block_until_ready(ops.scatter(column, ids(4, 1), value, stamps=(stamp, words(2, 2))))
    assert not ops.scatter(column, ids(-1, 1), value, ids(3, 0), rows=ids(7, 7)).any()


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"rows": ids(0)}, r"rows: got shape \(1,\), wanted shape \(2,\)"),
        ({"rows": jnp.zeros((2,))}, "rows: got dtype float32, wanted int32"),
        ({"stamps": (words(0, 0), words(0, 0))}, r"stamps: stamp: got uint32\[2\], wanted uint32\[1, 2\]"),
        ({"stamps": (words(0, 0)[None], words(0))}, r"stamps: value: got uint32\[1\], wanted uint32\[2\]"),
        ({"stamps": (ids(0, 0)[None], words(0, 0))}, r"stamps: stamp: got int32\[1, 2\], wanted uint32\[1, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused(kwargs, text):
    with pytest.raises((TypeError, ValueError), match=text):
        ops.scatter(jnp.zeros((1, 2, 3)), ids(0, 1), jnp.ones((2, 3)), **kwargs)


def test_the_values_of_picked_rows_are_checked():
    with pytest.raises(ValueError, match=r"values\[1\]: got shape \(2, 3\), wanted \[A, T', \*shape\] = \(4, 3\)"):
        ops.scatter([jnp.zeros((1, 2, 3))] * 2, ids(0), [jnp.ones((4, 3)), jnp.ones((2, 3))], rows=ids(0))


def test_unbatched_stamps_under_vmap_are_refused():
    column, stamp = jnp.zeros((4, 1, 2, 3)), jnp.zeros((1, 2), jnp.uint32)
    with pytest.raises(ValueError, match=r"ops\.scatter under vmap: columns"):
        jax.vmap(lambda c: ops.scatter(c, ids(0), jnp.ones((1, 3)), stamps=(stamp, words(2))))(column)
