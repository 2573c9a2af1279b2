"""`ops.gather` against the oracle, under every transformation, dtype and size; its options and its errors."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import ops
from gear_jax.specs import PADS, Window
from gear_jax.testing.ops import (
    DTYPES,
    NOT_PINNED,
    SHARED_TRANSFORMS,
    TRANSFORMS,
    X64_DTYPES,
    assert_same_bits,
    check_gather,
    dtype_of,
    gather_oracle,
    place,
    random_rows,
    random_values,
)

MEMORIES = ("device", "pinned_host")
PLACED = [(t, m) for t in (*TRANSFORMS, *SHARED_TRANSFORMS) for m in MEMORIES if m == "device" or t not in NOT_PINNED]


def ids(*numbers):
    return jnp.asarray(numbers, jnp.int32)


def check_one(column, rows, window, got):
    data, mask = got
    assert_same_bits((data, mask), gather_oracle(np.asarray(column), *map(np.asarray, rows), window))


@pytest.mark.parametrize("window", [Window(-2, 4), None], ids=["window", "whole"])
@pytest.mark.parametrize(("transform", "memory"), PLACED)
def test_transformations(transform, memory, window):
    check_gather(ops.gather, transform, window=window, memory=memory)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_with_every_padding(dtype, memory):
    for seed, pad in enumerate(PADS):
        window = Window(-3, 6, pad, 1)
        check_gather(ops.gather, dtypes=(dtype,), step_shape=(), window=window, seed=seed, memory=memory)


@pytest.mark.parametrize("transform", ["eager", "jit", "vmap", "shared_vmap", "scan", "shard_map", "pmap"])
def test_64_bit_dtypes(transform):
    with jax.enable_x64(True):
        check_gather(ops.gather, transform, dtypes=X64_DTYPES, window=Window(-2, 5, "head", 3))


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
@pytest.mark.parametrize("step_shape", [(), (3,), (17,), (4099,)], ids=str)
def test_step_and_batch_sizes(step_shape, rows, memory):
    options = {"dtypes": ("uint8",), "step_shape": step_shape, "rows": rows, "memory": memory}
    check_gather(ops.gather, "jit", **options)
    check_gather(ops.gather, "jit", **options, window=None)


# Not shard_map, nor pmap: JAX 0.11.2 crashes (Shardy's ManualComputationUnusedInputsPattern) if arguments are empty.
@pytest.mark.parametrize("transform", ["vmap", "nested_vmap", "shared_vmap", "scan"])
def test_an_empty_batch_under_transformations(transform):
    check_gather(ops.gather, transform, rows=0)


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("step", [1, 3, 17, 1031])
def test_large_results_split_over_threads(step, pad, memory):
    """Rows, steps and the bytes of a pad value all straddle the limits between two tasks."""
    rng = np.random.default_rng(step)
    columns = {
        "bytes": random_values(rng, (2, 5, 101, step), np.uint8),
        "words": random_values(rng, (2, 5, 101, 3), np.int32),
    }
    count = (3 << 20) // (step * 97) + 1
    rows = random_rows(rng, (2, 5, 101), (count,))
    windows = {"bytes": Window(-50, 97, pad, 200), "words": Window(-7, 13, pad, 0x01020304)}
    data, mask, _ = jax.jit(lambda c, r: ops.gather(c, *r, windows))(place(columns, memory), rows)
    for k, column in columns.items():
        check_one(column, rows, windows[k], (data[k], mask[k]))


def test_a_row_longer_than_a_task(memory):
    column = random_values(np.random.default_rng(0), (1, 2, 3, 1 << 20), np.uint8)
    rows = ids(1, 0), ids(1, 1), ids(3, 2)
    check_one(column, rows, Window(-1, 3), ops.gather(place(column, memory), *rows, Window(-1, 3))[:2])


def test_more_than_two_gib_of_a_column(memory):
    """Every slot beyond 2 GiB is at its own address, in reading and in writing."""
    slots, row = 640, 1 << 22  # 2.5 GiB
    column = ops.zeros((5, slots // 5, 4, row // 4), jnp.uint8, memory)
    far = ids(0, 511, 512, 513, 639)
    value = jnp.arange(1, 21, dtype=jnp.uint8).reshape(5, 4, 1) * jnp.ones((1, 1, row // 4), jnp.uint8)
    before = column.unsafe_buffer_pointer()
    column = jax.jit(ops.scatter, donate_argnums=0)(column, far, value)
    assert column.unsafe_buffer_pointer() == before
    seen = ids(639, 0, 1, 511, 512, 513, 638)
    got, _, _ = jax.jit(lambda c: ops.gather(c, seen, seen * 0, seen * 0 + 4, Window(1, 2)))(column)
    column.delete()
    wanted = [[18, 19], [2, 3], [0, 0], [6, 7], [10, 11], [14, 15], [0, 0]]
    np.testing.assert_array_equal(got[..., 0], wanted)
    np.testing.assert_array_equal(got[..., -1], wanted)


def test_windows_that_show_nothing():
    column = jnp.arange(24, dtype=jnp.float32).reshape(2, 3, 4)
    far = np.iinfo(np.int32)
    for offset, pad in itertools.product((-(2**31) + 1, -4, 4, 2**31 - 1), PADS):
        for start in (far.min, 0, far.max):
            if abs(start + offset) < 4:
                continue
            window = Window(offset, 3, pad, -1.5)
            data, mask, _ = ops.gather(column, ids(0, 5), ids(start, start), ids(4, 0), window)
            assert not np.asarray(mask).any()
            np.testing.assert_array_equal(data, np.full((2, 3), -1.5, np.float32))


def test_a_whole_window_does_not_depend_on_the_anchor():
    column = jnp.arange(24, dtype=jnp.int32).reshape(2, 3, 4)
    for window in (None, Window(), Window(pad="head"), Window(pad="tail", pad_value=7)):
        rows = ids(2, 2, 2), ids(0, 3, -9), ids(3, 3, 3)
        check_one(column, rows, window, ops.gather(column, *rows, window)[:2])


def test_windows_longer_than_the_trajectory():
    column = jnp.arange(24, dtype=jnp.int32).reshape(2, 3, 4)
    for pad in PADS:
        rows, window = (ids(1, 4), ids(0, 2), ids(4, 9)), Window(-10, 25, pad, 9)
        check_one(column, rows, window, ops.gather(column, *rows, window)[:2])


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", float("nan")), ("float16", -0.5), ("bfloat16", float("inf")), ("int16", -2), ("uint32", 2**32 - 1),
     ("bool", True), ("complex64", 1 - 2j), ("float8_e4m3fn", 0.5), ("int8", np.int8(-128))],
)  # fmt: skip
def test_pad_values(dtype, value):
    check_gather(ops.gather, dtypes=(dtype,), window=Window(-3, 9, "around", value), rows=9)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
def test_the_bits_of_a_nan_are_kept(dtype):
    bits = np.arange(256, dtype=np.uint8)
    column = np.stack([bits, bits[::-1], bits | 0x7F, bits | 0x80], -1).view(dtype_of(dtype)).reshape(1, 4, 64, -1)
    got, _, _ = ops.gather(jnp.asarray(column), ids(0, 1, 2, 3), ids(0, 0, 0, 0), ids(64, 64, 64, 64))
    assert_same_bits(got, column[0])


def test_trees_of_columns_and_windows():
    rng = np.random.default_rng(0)
    shape = (2, 3, 5)
    columns = {"a": random_values(rng, shape, np.int8), "b": (random_values(rng, (*shape, 2), np.float32), [
        random_values(rng, (*shape, 1), np.uint16)])}  # fmt: skip
    rows = ids(0, 5, 3), ids(1, 2, 3), ids(5, 2, 4)
    deep = {"a": None, "b": (Window(-1, 2), [Window(0, 3, "head")])}
    shallow = {"a": Window(-1, 2), "b": Window(-1, 2)}
    for windows in (deep, shallow):
        data, mask, _ = ops.gather(columns, *rows, windows)
        assert jax.tree.structure(data) == jax.tree.structure(mask) == jax.tree.structure(columns)
        inner = windows["b"] if windows is shallow else windows["b"][0]
        check_one(columns["a"], rows, windows["a"], (data["a"], mask["a"]))
        check_one(columns["b"][0], rows, inner, (data["b"][0], mask["b"][0]))
        innermost = windows["b"] if windows is shallow else windows["b"][1][0]
        check_one(columns["b"][1][0], rows, innermost, (data["b"][1][0], mask["b"][1][0]))


@pytest.mark.parametrize("nested", [False, True])
def test_vmap_over_some_columns_and_some_rows(nested, memory):
    rng = np.random.default_rng(3)
    own = random_values(rng, (4, 2, 3, 7, 2), np.int16)
    shared = random_values(rng, (2, 3, 7), np.float32)
    slots, starts, lengths = random_rows(rng, (2, 3, 7), (4, 5))
    windows = {"own": Window(-1, 3), "shared": Window(-1, 3)}
    table = place(shared, memory)
    f = lambda a, s, t: ops.gather({"own": a, "shared": table}, s, t, lengths[0], windows)[:2]  # noqa: E731
    if nested:
        split = lambda x: x.reshape(2, 2, *x.shape[1:])  # noqa: E731
        owns = place(split(own), memory)
        data, mask = jax.vmap(jax.vmap(f, (0, 0, None)), (0, 0, None))(owns, split(slots), starts[0])
        data, mask = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), (data, mask))
    else:
        data, mask = jax.vmap(f, (0, 0, None))(place(own, memory), slots, starts[0])
    for k in range(4):
        rows = slots[k], starts[0], lengths[0]
        check_one(own[k], rows, windows["own"], (data["own"][k], mask["own"][k]))
        check_one(shared, rows, windows["shared"], (data["shared"][k], mask["shared"][k]))


def test_vmap_does_not_repeat_a_column():
    column = jnp.zeros((1, 64, 64), jnp.float32)
    f = jax.vmap(lambda s: ops.gather(column, s, s * 0, s * 0 + 64, Window(0, 1))[0])
    jaxpr = str(jax.make_jaxpr(f)(jnp.zeros((9, 2), jnp.int32)))
    assert "9,1,64,64" not in jaxpr


@hypothesis.given(
    st.integers(1, 5), st.integers(-9, 9), st.integers(1, 8), st.sampled_from(PADS), st.booleans(), st.data()
)
def test_random_windows(steps, offset, width, pad, whole, data):
    count = 6
    numbers = lambda low, high: data.draw(  # noqa: E731
        st.lists(st.integers(low, high), min_size=count, max_size=count).map(lambda x: np.asarray(x, np.int32))
    )
    column = np.arange(2 * 2 * steps * 3, dtype=np.uint8).reshape(2, 2, steps, 3)
    rows = numbers(-1, 4), numbers(-steps - 12, steps + 12), numbers(-1, steps + 1)
    window = Window(pad=pad, pad_value=77) if whole else Window(offset, width, pad, 77)
    check_one(column, rows, window, ops.gather(column, *rows, window)[:2])


def test_slots_outside_the_table_are_padding():
    column = jnp.ones((2, 3, 4), jnp.int32)
    data, mask, _ = ops.gather(column, ids(-1, 0, 6, 2**31 - 1), ids(0, 0, 0, 0), ids(4, 4, 4, 4))
    np.testing.assert_array_equal(mask, np.repeat([[0], [1], [0], [0]], 4, 1).astype(bool))
    np.testing.assert_array_equal(data, mask.astype(jnp.int32))


def test_numbers_too_large_for_int32_do_not_wrap_round():
    with jax.enable_x64(True):
        column = jnp.ones((2, 3, 4), jnp.int32)
        far = jnp.asarray([2**32, 2**32 + 1, -(2**32)], jnp.int64)
        assert not ops.gather(column, far, ids(0, 0, 0), ids(4, 4, 4))[1].any()
        assert not ops.gather(column, ids(0, 1, 2), far, ids(4, 4, 4), Window(0, 2))[1].any()
        mask = ops.gather(column, ids(0, 1, 2), ids(0, 0, 0), far)[1]
        np.testing.assert_array_equal(mask.all(1), [True, True, False])
        assert not ops.gather(column, jnp.asarray([2**32 - 1], jnp.uint32), ids(0), ids(4))[1].any()


@pytest.mark.parametrize("run", [lambda f: f(), lambda f: jax.jit(f)()], ids=["eager", "jit"])
def test_slots_outside_the_table_are_an_error_with_checks(checks, run):
    column = jnp.ones((2, 3, 4), jnp.int32)
    text = r"gather: slots\[1\]: got 6, wanted a slot in \[0, 6\)\. Pass slots of the table, or unset GEAR_JAX_CHECKS"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(run(lambda: ops.gather(column, ids(5, 6, -1), ids(0, 0, 0), ids(4, 4, 4))))
    assert run(lambda: ops.gather(column, ids(0, 5), ids(9, -9), ids(-3, 9)))[1].shape == (2, 4)


def test_checks_must_be_zero_or_one(monkeypatch):
    monkeypatch.setenv("GEAR_JAX_CHECKS", "yes")
    with pytest.raises(ValueError, match="GEAR_JAX_CHECKS: got 'yes', wanted '0' or '1'"):
        ops.gather(jnp.ones((1, 1, 1)), ids(0), ids(0), ids(1))


def test_an_empty_table_gives_padding():
    window = Window(0, 2, "head", 5)
    for shape in ((1, 0, 4, 3), (1, 2, 0, 3), (0, 2, 4, 3)):
        data, mask, _ = ops.gather(jnp.ones(shape, jnp.float32), ids(0, 1), ids(0, 0), ids(4, 4), window)
        assert not mask.any()
        np.testing.assert_array_equal(data, np.full((2, 2, 3), 5, np.float32))
    assert ops.gather(jnp.ones((1, 2, 4, 0)), ids(0), ids(0), ids(4))[0].shape == (1, 4, 0)


def test_numpy_columns_become_what_jax_makes_of_them():
    column = np.arange(8.0).reshape(1, 2, 4)  # float64, float32 where x64 is off
    data, _, _ = ops.gather(column, [1], [0], [2], Window(0, 4, pad_value=7.5))
    assert data.dtype == jnp.float32
    np.testing.assert_array_equal(data, [[4, 5, 7.5, 7.5]])


def _pointers(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("same_window", [True, False])
def test_out_is_overwritten_in_place(same_window, memory):
    rng = np.random.default_rng(5)
    shape = (2, 3, 7)
    columns = {"a": random_values(rng, (*shape, 5), np.float32), "b": random_values(rng, shape, np.uint8)}
    columns = place(columns, memory)
    windows = {"a": Window(-2, 4), "b": Window(-2, 4) if same_window else Window(0, 3, "head", 9)}
    first = tuple(map(jnp.asarray, random_rows(rng, (2, 3, 7), (6,))))
    second = tuple(map(jnp.asarray, random_rows(rng, (2, 3, 7), (6,))))
    fresh = jax.jit(lambda c, r: ops.gather(c, *r, windows)[:2])
    again = jax.jit(lambda c, r, out: ops.gather(c, *r, windows, out=out)[:2], donate_argnums=2)
    old = fresh(columns, first)
    data_before, b_mask_before = _pointers(old[0]), old[1]["b"].unsafe_buffer_pointer()
    got = again(columns, second, old)
    assert _pointers(got[0]) == data_before
    if not same_window:
        assert got[1]["b"].unsafe_buffer_pointer() == b_mask_before
    assert all(x.is_deleted() for x in jax.tree.leaves(old[0]))
    assert_same_bits(got, fresh(columns, second))
    assert_same_bits(again(columns, first, got), fresh(columns, first))


def test_out_without_donation_is_kept():
    column = jnp.arange(12, dtype=jnp.float32).reshape(1, 3, 4)
    out = jax.jit(lambda: ops.gather(column, ids(0), ids(0), ids(4))[:2])()
    got = jax.jit(lambda o: ops.gather(column, ids(2), ids(0), ids(4), out=o)[:2])(out)
    np.testing.assert_array_equal(out[0], [[0, 1, 2, 3]])
    np.testing.assert_array_equal(got[0], [[8, 9, 10, 11]])


def test_out_under_vmap_gives_the_same_values():
    column = jnp.arange(12, dtype=jnp.float32).reshape(1, 3, 4)
    f = jax.vmap(lambda s, o: ops.gather(column, s, s * 0, s * 0 + 4, out=o)[:2])
    slots = jnp.arange(3, dtype=jnp.int32)[:, None]
    out = jnp.zeros((3, 1, 4), jnp.float32), jnp.zeros((3, 1, 4), bool)
    np.testing.assert_array_equal(f(slots, out)[0][:, 0], column[0])


def test_out_of_another_shape():
    column = jnp.ones((1, 3, 4), jnp.float32)
    out = ops.gather(column, ids(0), ids(0), ids(4))[:2]
    with pytest.raises(ValueError, match=r"out: got float32\[1, 4\], wanted float32\[2, 4\]"):
        ops.gather(column, ids(0, 1), ids(0, 0), ids(4, 4), out=out)
    with pytest.raises(ValueError, match="out: got another tree"):
        ops.gather({"a": column}, ids(0), ids(0), ids(4), out=out)
    with pytest.raises(ValueError, match=r"out: got int32\[1, 4\], wanted float32"):
        ops.gather(column, ids(0), ids(0), ids(4), out=(out[0].astype(jnp.int32), out[1]))


def test_the_ticket_is_handed_on():
    column = jnp.ones((1, 3, 4), jnp.float32)
    ticket = ops.gather(column, ids(0), ids(0), ids(4))[2]
    assert (ticket.shape, ticket.dtype) == ((1,), jnp.int32)
    given = ids(41)
    assert ops.gather(column, ids(0), ids(0), ids(4), ticket=given)[2][0] == 41
    f = lambda s, t: ops.gather(column, s, s, s + 4, ticket=t)[2]  # noqa: E731
    assert jax.vmap(f, (0, None))(jnp.zeros((3, 2), jnp.int32), given).shape == (3, 1)
    assert jax.vmap(f)(jnp.zeros((3, 2), jnp.int32), jnp.zeros((3, 1), jnp.int32)).shape == (3, 1)


@pytest.mark.parametrize("batched", [False, True])
def test_after_is_waited_for_and_changes_nothing(batched):
    column = jnp.arange(12, dtype=jnp.float32).reshape(1, 3, 4)
    after = {"x": jnp.ones((3, 5), jnp.float32), "y": [jnp.zeros((3, 2), jnp.int8)]}
    f = lambda s, a: ops.gather(column, s, s * 0, s * 0 + 4, after=a)[0]  # noqa: E731
    slots = jnp.arange(3, dtype=jnp.int32)
    if batched:
        f, slots = jax.vmap(f), slots[:, None]
    np.testing.assert_array_equal(f(slots, after).reshape(3, 4), column[0])
    text = str(jax.make_jaxpr(f)(slots, after))
    call = text[text.index("ffi_call") :]
    assert "f32[3,5]" in text.split("ffi_call")[0] and call  # both are operands, not dropped
    dced = jax.jit(f).lower(slots, after).as_text()
    operands = next(x for x in dced.splitlines() if "gear_gather" in x)
    assert "tensor<3x5xf32>" in operands and "tensor<3x2xi8>" in operands


@pytest.mark.devices(4)
def test_a_wrong_out_spec_of_shard_map_raises():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, everywhere = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    column, slots = jnp.ones((4, 3, 2), jnp.float32), jnp.zeros((8,), jnp.int32)
    for pick in (0, 1, 2):
        f = lambda c, s: ops.gather(c, s, s, s + 2)[pick]  # noqa: B023, E731
        jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=spec))(column, slots)
        with pytest.raises(ValueError, match="out_specs"):
            jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=everywhere))(column, slots)


def test_it_is_not_differentiable():
    f = lambda c: ops.gather(c, ids(0), ids(0), ids(2))[0].sum()  # noqa: E731
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(f)(jnp.ones((1, 2, 2), jnp.float32))


_COLUMN = np.ones((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, r"columns: got none", lambda: ops.gather({}, ids(0), ids(0), ids(1))),
        (ValueError, r"columns\[0\]: got shape \(3, 4\), wanted at least \[P, S, T\]",
         lambda: ops.gather(_COLUMN[0], ids(0), ids(0), ids(1))),
        (ValueError, r"columns\[1\]: got shape \(2, 3, 2\), wanted leading dimensions \(2, 3, 4\)",
         lambda: ops.gather([_COLUMN, _COLUMN[..., :2]], ids(0), ids(0), ids(1))),
        (TypeError, "columns.0.: got dtype int4, wanted .* whole bytes",
         lambda: ops.gather(jnp.ones((1, 1, 1), jnp.int4), ids(0), ids(0), ids(1))),
        (TypeError, "columns.0.: got dtype key",
         lambda: ops.gather(jax.random.split(jax.random.key(0), (1, 1, 1)), ids(0), ids(0), ids(1))),
        (TypeError, "slots: got dtype float32, wanted int32", lambda: ops.gather(_COLUMN, [0.0], ids(0), ids(1))),
        (ValueError, r"slots: got shape \(1, 1\), wanted one dimension",
         lambda: ops.gather(_COLUMN, ids([0]), ids(0), ids(1))),
        (ValueError, r"starts: got shape \(2,\), wanted shape \(1,\)",
         lambda: ops.gather(_COLUMN, ids(0), ids(0, 1), ids(1))),
        (ValueError, r"lengths: got shape \(\)", lambda: ops.gather(_COLUMN, ids(0), ids(0), 1)),
        (ValueError, "windows: got", lambda: ops.gather({"a": _COLUMN}, ids(0), ids(0), ids(1), {"b": None})),
        (TypeError, "windows: got 4, wanted a Window or None",
         lambda: ops.gather({"a": _COLUMN}, ids(0), ids(0), ids(1), {"a": 4})),
        (ValueError, "Window.pad_value: got 300, wanted a scalar of uint8",
         lambda: ops.gather(_COLUMN.astype(np.uint8), ids(0), ids(0), ids(1), Window(0, 1, pad_value=300))),
        (ValueError, "Window.pad_value: got 0.5", lambda: ops.gather(
            _COLUMN.astype(np.int8), ids(0), ids(0), ids(1), Window(0, 1, pad_value=0.5))),
        (ValueError, "Window.pad_value: got 1e.300",
         lambda: ops.gather(_COLUMN, ids(0), ids(0), ids(1), Window(0, 1, pad_value=1e300))),
        (ValueError, "Window.pad_value: got .1, 2., wanted a scalar",
         lambda: ops.gather(_COLUMN, ids(0), ids(0), ids(1), Window(0, 1, pad_value=[1, 2]))),
    ],
)  # fmt: skip
def test_bad_arguments(error, text, call):
    with pytest.raises(error, match=text):
        call()


def test_dtypes_are_all_that_jax_has():
    """A dtype that a new JAX brings must be added to the contract."""
    ours = {dtype_of(d) for d in (*DTYPES, *X64_DTYPES)}
    for name in dir(jnp):
        if not isinstance(getattr(jnp, name), type(jnp.float32)):
            continue
        dtype = np.dtype(getattr(jnp, name))
        narrow = dtype.itemsize == 1 and name.startswith(
            ("int1", "int2", "int4", "uint1", "uint2", "uint4", "float4", "float6")
        )
        assert narrow or dtype in ours, name


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1e6, "float8_e4m3fn"), (1e6, "float8_e5m2"), (np.inf, "float8_e4m3fn"), (-2.0, "float8_e8m0fnu"),
        (None, "float32"), (3j, "float32"), ("1", "float32"), (1e39, "float32"), (1e6, "float16"), (2.5, "int32"),
    ],
)  # fmt: skip
def test_padding_that_a_column_cannot_hold_is_refused(value, dtype):
    with pytest.raises(ValueError, match=r"Window\.pad_value: got .*, wanted a scalar of"):
        ops.gather(jnp.zeros((1, 2, 2), dtype), ids(0), ids(0), ids(1), Window(-1, 2, pad_value=value))


@pytest.mark.parametrize(
    ("value", "dtype"), [(np.nan, "float32"), (-np.inf, "float8_e5m2"), (448, "float8_e4m3fn"), (0, "float8_e8m0fnu")]
)
def test_padding_that_a_column_can_hold(value, dtype):
    data, *_ = ops.gather(jnp.zeros((1, 2, 2), dtype), ids(0), ids(0), ids(1), Window(-1, 2, pad_value=value))
    wanted = np.asarray(value).astype(jnp.dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(data)[0, 0].astype(np.float32), wanted)
