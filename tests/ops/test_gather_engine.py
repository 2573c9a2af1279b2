"""`ops.gather(engine=)`: who does a gather, what is asked of its arguments, and what the copy engines bring.

On a CPU the engine's target reads all columns alike, so that all but the engines is tested there.
"""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import _cuda, _native, ops
from gear_jax.external import addresses
from gear_jax.ops import _gather, _gather_engine
from gear_jax.specs import PADS, Window
from gear_jax.testing.ops import (
    DTYPES,
    X64_DTYPES,
    assert_same_bits,
    dtype_of,
    gather_oracle,
    place,
    random_rows,
    random_values,
    to_numpy,
)

SHAPE = (2, 3, 7)
WINDOW = Window(-2, 4, pad_value=1)


@pytest.fixture(autouse=True)
def _counted_from_zero(monkeypatch):
    monkeypatch.setattr(_gather_engine, "_counts", {"kernel": 0, "copy": 0, "copy_bytes": 0})
    monkeypatch.setattr(_gather_engine, "_fallback", None)


@pytest.fixture
def engines(monkeypatch):
    """This machine has copy engines; where it is a CPU that is a fake, and the CPU's handler does what they would."""
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(_gather_engine, "_PLATFORM", "cpu")
        monkeypatch.setattr(_gather_engine, "batch_copy_problem", lambda: None)


@pytest.fixture
def plans(monkeypatch):
    """The plans of the calls that went to the copy engines."""
    found, call = [], _gather._outside

    def outside(plan, *args):
        if plan.copied:
            found.append(plan)
        return call(plan, *args)

    outside.lower = call.lower
    monkeypatch.setattr(_gather, "_outside", outside)
    return found


def table(shape=(*SHAPE, 3), dtype=np.float32, memory="pinned_host", seed=0):
    values = random_values(np.random.default_rng(seed), shape, dtype)
    return values, place(values, memory)


def rows(count=5, seed=1, shape=SHAPE):
    return random_rows(np.random.default_rng(seed), shape, (count,))


def take_from(monkeypatch, window, batch=1):
    """Lets "auto" take smaller windows and batches than it is made for."""
    monkeypatch.setattr(_gather_engine, "COPY_WINDOW_BYTES", window)
    monkeypatch.setattr(_gather_engine, "COPY_BATCH_BYTES", batch)


def sliced(values, slots, starts, lengths, window):
    """The oracle for windows of many steps."""
    table = values.reshape(-1, *values.shape[2:])
    data = np.full((len(slots), window.length, *table.shape[2:]), window.pad_value, values.dtype)
    mask = np.zeros(data.shape[:2], bool)
    for b, (slot, start, length) in enumerate(zip(slots.tolist(), starts.tolist(), lengths.tolist(), strict=True)):
        first, end = start + window.offset, min(length, table.shape[1])
        seen = range(max(first, 0), min(first + window.length, end))
        if len(seen) == 0 or not 0 <= slot < len(table):
            continue
        at = {"around": seen.start - first, "head": window.length - len(seen), "tail": 0}[window.pad]
        data[b, at : at + len(seen)] = table[slot, seen.start : seen.stop]
        mask[b, at : at + len(seen)] = True
    return data, mask


def check(values, column, ids, window, engine, oracle=gather_oracle, **options):
    data, mask, ticket = ops.gather(column, *ids, window, engine=engine, **options)
    assert ticket.shape == (1,) and ticket.dtype == jnp.int32 and int(ticket[0]) == 0
    assert data.sharding.memory_kind == mask.sharding.memory_kind == "device" == ticket.sharding.memory_kind
    assert_same_bits(to_numpy((data, mask)), oracle(values, *ids, window), f"{engine}: ")


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_with_every_padding(engines, dtype, pad):
    values, column = table(SHAPE, dtype_of(dtype))
    check(values, column, rows(9), Window(-3, 6, pad, 1), "copy")


@pytest.mark.parametrize("dtype", X64_DTYPES)
def test_64_bit_dtypes(engines, dtype):
    with jax.enable_x64(True):
        values, column = table(SHAPE, dtype_of(dtype))
        check(values, column, rows(), Window(-2, 5, "head", 3), "copy")


@pytest.mark.parametrize("count", [0, 1, 2, 37])
@pytest.mark.parametrize("step_shape", [(), (3,), (17,), (4099,), (0,)], ids=str)
@pytest.mark.parametrize("window", [WINDOW, None], ids=["window", "whole"])
def test_step_and_batch_sizes(engines, step_shape, count, window):
    values, column = table((*SHAPE, *step_shape), np.uint8)
    check(values, column, rows(count), window, "copy")
    check(values, column, rows(count), window, "kernel")


def test_empty_tables_are_padding(engines):
    for shape in ((1, 0, 4, 3), (1, 2, 0, 3), (0, 2, 4, 3)):
        values, column = table(shape)
        check(values, column, rows(4, shape=(1, 2, 4)), Window(0, 2, "head", 5), "copy")


def test_trees_and_windows_of_all_columns(engines, plans):
    names = {"a": (), "b": (3,), "c": (2, 5)}
    made = {k: table((*SHAPE, *shape), np.int16, seed=i) for i, (k, shape) in enumerate(names.items())}
    windows = {"a": None, "b": WINDOW, "c": Window(0, 3, "tail", -1)}
    ids = rows(11)
    data, mask, _ = ops.gather({k: c for k, (_, c) in made.items()}, *ids, windows, engine="copy")
    for k, (values, _) in made.items():
        assert_same_bits(to_numpy((data[k], mask[k])), gather_oracle(values, *ids, windows[k]), f"{k}: ")
    assert [plan.copied for plan in plans] == [(True, True, True)]


def test_large_windows_go_by_copy_engines(engines, plans, monkeypatch):
    take_from(monkeypatch, 4 * 64)
    made = {"wide": table((*SHAPE, 16)), "narrow": table(SHAPE), "near": table((*SHAPE, 16), memory="device")}
    columns, ids = {k: c for k, (_, c) in made.items()}, rows()
    data, mask, _ = ops.gather(columns, *ids, WINDOW)
    for k, (values, _) in made.items():
        assert_same_bits(to_numpy((data[k], mask[k])), gather_oracle(values, *ids, WINDOW), f"{k}: ")
    assert [plan.copied for plan in plans] == [(False, False, True)]  # in the order of their names
    assert ops.stats() == {"kernel": 0, "copy": 1, "copy_bytes": 5 * 4 * 64, "fallback": None}
    ops.gather(columns, *ids, Window(-2, 3, pad_value=1))
    ops.gather(columns, *ids, WINDOW, engine="kernel")
    take_from(monkeypatch, 4 * 64, 5 * 4 * 64 + 1)  # the batch is too small then
    ops.gather(columns, *ids, WINDOW)
    take_from(monkeypatch, 4 * 64, 5 * 4 * 64)
    assert len(plans) == 1 and ops.stats()["kernel"] == 3
    ops.gather({k: columns[k] for k in ("wide", "narrow")}, *map(list, ids), WINDOW, engine="copy")
    assert plans[-1].copied == (True, True)
    assert ops.stats() == {"kernel": 3, "copy": 2, "copy_bytes": 2 * 5 * 4 * 64 + 5 * 4 * 4, "fallback": None}


def test_what_auto_leaves_to_the_kernel(engines, plans, monkeypatch):
    take_from(monkeypatch, 1)
    values, column = table()
    ids = rows()
    check(values, column, [jnp.asarray(x) for x in ids], WINDOW, "auto")
    check(values, column, [ids[0], ids[1], jnp.asarray(ids[2])], WINDOW, "auto")
    check(values, table(memory="device")[1], ids, WINDOW, "auto")
    ops.gather({"x": column, "y": addresses(column)}, *ids, WINDOW)
    assert ops.stats() == {"kernel": 4, "copy": 0, "copy_bytes": 0, "fallback": None}
    monkeypatch.setattr(_gather_engine, "_PLATFORM", "tpu")
    check(values, column, ids, WINDOW, "auto")
    assert ops.stats()["kernel"] == 5 and not plans


def test_programs_use_the_kernel_and_are_not_counted(engines, plans, monkeypatch):
    take_from(monkeypatch, 1)
    values, column = table()
    ids = rows()
    wanted = gather_oracle(values, *ids, WINDOW)
    inside = [
        jax.jit(lambda c, *ids: ops.gather(c, *ids, WINDOW)[:2])(column, *ids),
        jax.jit(lambda c: ops.gather(c, *ids, WINDOW)[:2])(column),
        jax.jit(lambda: ops.gather(jnp.asarray(values), *ids, WINDOW)[:2])(),
    ]
    for got in inside:
        assert_same_bits(to_numpy(got), wanted)
    stacked = jax.vmap(lambda s: ops.gather(column, s, *ids[1:], WINDOW)[:2])(jnp.asarray(ids[0])[None])
    assert_same_bits(to_numpy(stacked), jax.tree.map(lambda x: x[None], wanted))
    assert not plans and ops.stats() == {"kernel": 0, "copy": 0, "copy_bytes": 0, "fallback": None}


@pytest.mark.parametrize(
    "run",
    [
        lambda column, ids: jax.jit(lambda c: ops.gather(c, *ids, engine="copy"))(column),
        lambda column, ids: jax.jit(lambda: ops.gather(np.ones((1, 2, 3)), *ids, engine="copy"))(),
        lambda column, ids: jax.jit(lambda s: ops.gather(column, s, *ids[1:], engine="copy"))(ids[0]),
        lambda column, ids: jax.vmap(lambda s: ops.gather(column, s, *ids[1:], engine="copy"))(ids[0][None]),
        lambda column, ids: jax.jit(lambda t: ops.gather(column, *ids, ticket=t, engine="copy"))(ops.new_ticket()),
    ],
    ids=["columns", "nothing traced", "slots", "vmap", "ticket"],
)
def test_copy_is_refused_in_programs(engines, run):
    with pytest.raises(ValueError, match=r"engine: got 'copy' in a program, .* Call ops.gather outside of jit, vmap"):
        run(table()[1], rows())


def test_copy_says_what_it_cannot_have(engines, monkeypatch):
    ids, (_, column) = rows(), table()
    with pytest.raises(ValueError, match=r"engine: got 'dma', wanted one of \('auto', 'kernel', 'copy'\)"):
        ops.gather(column, *ids, engine="dma")
    with pytest.raises(ValueError, match=r"columns\[1\]: got the device's own memory, wanted page-locked host memory"):
        ops.gather([column, table(memory="device")[1]], *ids, engine="copy")
    with pytest.raises(TypeError, match=r"engine='copy': columns\[0\]: got Addresses, wanted an array"):
        ops.gather(addresses(column), *ids, engine="copy")
    for i, name in enumerate(("slots", "starts", "lengths")):
        given = [jnp.asarray(x) if k == i else x for k, x in enumerate(ids)]
        with pytest.raises(TypeError, match=rf"{name}: got a jax.Array, wanted a NumPy array.*np.asarray\({name}\)"):
            ops.gather(column, *given, engine="copy")
    monkeypatch.setattr(_gather_engine, "_PLATFORM", "tpu")
    with pytest.raises(ValueError, match=r"columns\[0\]: got an array on \['(cpu|gpu)'\], wanted one on a single GPU"):
        ops.gather(column, *ids, engine="copy")
    assert ops.stats()["copy"] == 0


@pytest.mark.devices(2)
def test_a_sharded_column_is_not_copied(engines):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"), memory_kind="pinned_host")
    with pytest.raises(ValueError, match="wanted one on a single GPU"):
        ops.gather(jax.device_put(table()[0], sharding), *rows(), engine="copy")


@pytest.mark.cpu
def test_a_cpu_has_no_copy_engines(plans, monkeypatch):
    take_from(monkeypatch, 1)
    values, column = table()
    check(values, column, rows(), WINDOW, "auto")
    assert not plans and ops.stats() == {"kernel": 1, "copy": 0, "copy_bytes": 0, "fallback": None}
    with pytest.raises(ValueError, match=r"got an array on \['cpu'\], wanted one on a single GPU"):
        ops.gather(column, *rows(), engine="copy")


def test_a_driver_that_is_too_old_is_said_once(engines, plans, monkeypatch):
    monkeypatch.setattr(_gather_engine, "batch_copy_problem", lambda: "CUDA driver: got 550, wanted 570.")
    take_from(monkeypatch, 1)
    values, column = table()
    with pytest.warns(RuntimeWarning, match="gear_jax.ops.gather: CUDA driver: got 550"):
        check(values, column, rows(), WINDOW, "auto")
    check(values, column, rows(), WINDOW, "auto")  # a second warning would be an error
    assert not plans
    assert ops.stats() == {"kernel": 2, "copy": 0, "copy_bytes": 0, "fallback": "CUDA driver: got 550, wanted 570."}
    with pytest.raises(RuntimeError, match="CUDA driver: got 550"):
        ops.gather(column, *rows(), engine="copy")


@pytest.mark.parametrize(
    ("driver", "runtime", "said"),
    [
        (13000, 13000, None),
        (12080, 12080, None),
        (12040, 12090, r"CUDA driver: got 1\.2, for CUDA up to 12\.4, wanted one for CUDA 12\.8 or newer"),
        (13000, 12040, r"CUDA library of gear_jax: got one for CUDA 12\.4, wanted one for CUDA 12\.8"),
        (None, None, "CUDA library: got none in this build"),
    ],
)
def test_what_batches_of_copies_take(monkeypatch, driver, runtime, said):
    module = SimpleNamespace(driver_version=lambda: driver, runtime_version=lambda: runtime)
    monkeypatch.setattr(_native, "load", lambda platform: module if driver else None)
    monkeypatch.setattr(_cuda, "driver_version", lambda: "1.2")
    found = _gather_engine.batch_copy_problem.__wrapped__()
    assert found is None if said is None else re.match(said, found)


def test_slots_outside_the_table(engines, checks):
    _, column = table()
    ids = np.asarray([5, 6, -1], np.int32), np.zeros(3, np.int32), np.full(3, 7, np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"gather: slots\[1\]: got 6, wanted a slot in \[0, 6\)"):
        jax.block_until_ready(ops.gather(column, *ids, engine="copy"))


def test_numbers_of_any_width_and_lists(engines):
    values, column = table()
    data, mask, _ = ops.gather(column, [0, 2**40, 1], np.zeros(3, np.int64), np.full(3, 2**33), engine="copy")
    np.testing.assert_array_equal(to_numpy(mask), [[True] * 7, [False] * 7, [True] * 7])
    np.testing.assert_array_equal(to_numpy(data)[[0, 2]], values.reshape(6, 7, 3)[:2])


def test_the_rows_may_be_changed_when_the_call_returns(engines):
    values, column = table((2, 300, 7, 64))
    for seed in range(3):
        ids = rows(400, seed, (2, 300, 7))
        wanted = gather_oracle(values, *ids, WINDOW)
        got = ops.gather(column, *ids, WINDOW, engine="copy")[:2]
        for x in ids:
            x[:] = -1
        assert_same_bits(to_numpy(got), wanted)


def test_out_is_kept_and_after_is_waited_for(engines):
    values, column = table()
    ids = rows()
    old = ops.gather(column, *rows(seed=2), WINDOW, engine="copy")
    kept = to_numpy(old[:2])
    check(values, column, ids, WINDOW, "copy", out=old[:2], ticket=old[2], after=[jnp.ones(3)])
    assert_same_bits(to_numpy(old[:2]), kept)
    with pytest.raises(ValueError, match="out: got float32"):
        ops.gather(column, *ids, Window(0, 2), out=old[:2], engine="copy")


def test_a_write_in_place_comes_behind(engines):
    values, column = table((1, 8, 7, 1 << 10))
    write = jax.jit(ops.scatter, donate_argnums=0)
    slots, full = np.arange(8, dtype=np.int32), np.full(8, 7, np.int32)
    held, results = column, []
    for i in range(4):
        data, _, ticket = ops.gather(held, slots, slots * 0, full, engine="copy")
        results.append(data)
        before = held.unsafe_buffer_pointer()
        held = write(held, slots, jnp.full((8, 7, 1 << 10), i, jnp.float32), ticket=ticket)
        assert held.unsafe_buffer_pointer() == before
    np.testing.assert_array_equal(to_numpy(results[0]), values[0])
    for i, data in enumerate(results[1:]):
        assert (to_numpy(data) == i).all()


def test_rows_reach_the_handler_in_host_memory(engines, plans):
    values, column = table()
    ids = rows()
    check(values, column, ids, WINDOW, "copy")
    (plan,) = plans
    held = _gather_engine.on_host(ids, [column])
    assert {x.sharding.memory_kind for x in held} == {"pinned_host"}
    text = _gather._outside.lower(plan, *held, ops.new_ticket(), [column], [], []).compile().as_text()
    assert f"entry_computation_layout={{({', '.join(['s32[5]{0:S(5)}'] * 3)}, " in text
    assert "gear_gather_engine" in text and " copy(" not in text and "copy-start" not in text


@pytest.mark.parametrize("pad", PADS)
def test_the_two_oracles_agree(pad):
    values, ids = table()[0], rows(200)
    for window in (Window(-2, 4, pad, 7), Window(-10, 25, pad), Window(3, 2, pad)):
        assert_same_bits(sliced(values, *ids, window), gather_oracle(values, *ids, window))


@pytest.mark.gpu
@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("step", [1, 3, 17, 4096])
def test_the_copy_engines_of_this_gpu(step, pad, monkeypatch):
    """Windows around the limit, trajectories of all lengths, rows outside the table."""
    take_from(monkeypatch, 1 << 20)
    shape = (2, 5, (3 << 20) // step)
    values, column = table((*shape, step), np.uint8)
    ids = rows(24, 3, shape)
    for size in (1 << 12, (1 << 20) - 1, 1 << 20, 2 << 20):
        window = Window(-(size // step) // 3, -(-size // step), pad, 200)
        before = ops.stats()["copy"]
        check(values, column, ids, window, "copy", sliced)
        check(values, column, ids, window, "auto", sliced)
        large = window.length * step >= _gather_engine.COPY_WINDOW_BYTES
        assert ops.stats()["copy"] == before + 1 + large


@pytest.mark.gpu
def test_the_copy_engines_see_the_last_write(monkeypatch):
    take_from(monkeypatch, 1 << 20)
    shape = (1, 16, 4, 1 << 20)
    column = ops.zeros(shape, jnp.uint8, "pinned_host")
    write = jax.jit(ops.scatter, donate_argnums=0)
    slots, ticket = np.arange(16, dtype=np.int32), ops.new_ticket()
    for i in range(1, 6):
        column = write(column, slots, jnp.full((16, 4, 1 << 20), i, jnp.uint8), ticket=ticket)
        data, _, ticket = ops.gather(column, slots, slots * 0, slots * 0 + 4)
        assert bool((data == i).all())
    assert ops.stats()["copy"] == 5
