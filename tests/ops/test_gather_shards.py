"""`ops.gather` of columns in shards of several devices: what it reads, under every transformation, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import external, ops
from gear_jax.ops import _gather
from gear_jax.specs import PADS, Window
from gear_jax.testing.ops import (
    DTYPES,
    X64_DTYPES,
    assert_same_bits,
    column_sized,
    dtype_of,
    gather_oracle,
    pick,
    place,
    random_rows,
    random_values,
)

FAILED = (jax.errors.JaxRuntimeError, ValueError)
P = jax.sharding.PartitionSpec("x")
SHARD = (2, 3, 7)  # P / n, S, T
MEMORY = "pinned_host" if jax.default_backend() == "gpu" else "device"
COUNTS = [pytest.param(n, marks=pytest.mark.devices(n)) for n in (1, 2, 4, 8)]


def ids(*numbers):
    return jnp.asarray(numbers, jnp.int32)


def mesh_of(n):
    return jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:n])


def spread(tree, n, memory=MEMORY):
    """Arrays split over n devices, in memory that can be donated."""
    sharding = jax.sharding.NamedSharding(mesh_of(n), P, memory_kind=memory)
    return jax.tree.map(lambda x: jax.device_put(jnp.array(x), sharding), tree)


def on_all(f, n, **options):
    return jax.jit(jax.shard_map(f, mesh=mesh_of(n), in_specs=P, out_specs=P), **options)


def shards(columns, ticket):
    """In a program over an axis "x": the columns of all devices."""
    words, ticket = ops.pointers(columns, ticket=ticket)
    words = jax.lax.all_gather(words, "x")
    leaves, tree = jax.tree.flatten(columns)
    return tree.unflatten([ops.Shards(words[:, i], c.shape, c.dtype) for i, c in enumerate(leaves)]), ticket


def read(columns, rows, window, **options):
    """Rows of all devices' columns, and a barrier behind the reads: a result, or no device would wait for it."""
    table, ticket = shards(columns, ops.new_ticket())
    data, mask, ticket = ops.gather(table, *rows, window, ticket=ticket, **options)
    return data, mask, jax.lax.pcast(jax.lax.psum(ticket, "x"), "x", to="varying")


def table_of(columns):
    """Columns as the shards of one device: the first dimension is that of the shards."""
    arrays = {name: [place(jnp.asarray(x), "pinned_host") for x in c] for name, c in columns.items()}
    words = {name: ops.pointers(parts)[0] for name, parts in arrays.items()}
    jax.block_until_ready(words)
    return arrays, {name: ops.Shards(words[name], a[0].shape, a[0].dtype) for name, a in arrays.items()}


def whole(column, n):
    """`[n * P, ...]` as the shards `[n, P, ...]`."""
    return column.reshape(n, column.shape[0] // n, *column.shape[1:])


def check(got, columns, rows, window):
    for name, column in columns.items():
        wanted = gather_oracle(column, *map(np.asarray, rows), window)
        assert_same_bits(jax.tree.map(np.asarray, (got[0][name], got[1][name])), wanted, f"{name}: ")


def check_devices(n, *, dtypes=("float32", "uint8"), step_shape=(3,), rows=5, window=Window(-2, 4), **options):  # noqa: B008
    """Each of n devices gathers rows of the whole table."""
    rng, table = np.random.default_rng(n), (n * SHARD[0], *SHARD[1:])
    columns = {d: random_values(rng, (*table, *step_shape), dtype_of(d)) for d in dtypes}
    numbers = random_rows(rng, table, (n * rows,))
    f = on_all(lambda c, r: read(c, r, window, **options), n)
    check(f(spread(columns, n), spread(numbers, n, "device")), columns, numbers, window)


@pytest.mark.parametrize("window", [Window(-2, 4), None], ids=["window", "whole"])
@pytest.mark.parametrize("n", COUNTS)
def test_every_device_reads_the_whole_table(n, window):
    check_devices(n, window=window)
    check_devices(n, window=window, order=True, rows=33)


@pytest.mark.devices(4)
@pytest.mark.parametrize("pad", PADS)
def test_dtypes_with_every_padding(pad):
    check_devices(4, dtypes=DTYPES, window=Window(-3, 6, pad, 1))
    check_devices(4, dtypes=DTYPES, step_shape=(), window=Window(-3, 6, pad, 1))


@pytest.mark.devices(2)
def test_64_bit_dtypes():
    with jax.enable_x64(True):
        check_devices(2, dtypes=X64_DTYPES, window=Window(-2, 5, "head", 3))


# No steps without elements: JAX 0.11.2 crashes if a shard_map's arguments are empty (see test_gather.py).
@pytest.mark.devices(4)
@pytest.mark.parametrize("step_shape", [(), (3,), (16,), (17,), (128,), (4099,)], ids=str)
def test_step_sizes(step_shape):
    check_devices(4, dtypes=("uint8",), step_shape=step_shape, rows=7)
    check_devices(4, dtypes=("uint8",), step_shape=step_shape, rows=1, window=None)


def check_pmap(n, f):
    """`f(column, rows)` gives what each of n devices gathers of the whole column."""
    column = random_values(np.random.default_rng(n), (n * SHARD[0], *SHARD[1:], 5), np.int16)
    rows = random_rows(np.random.default_rng(1), column.shape[:3], (n, 6))
    got = f(column, rows)
    for k in range(n):
        wanted = gather_oracle(column, *(x[k] for x in rows), Window(-1, 3))
        assert_same_bits(jax.tree.map(np.asarray, pick(got, k)), wanted)


@pytest.mark.cpu  # pmap takes no arrays in host memory
@pytest.mark.parametrize("n", COUNTS)
def test_pmap(n):
    devices = jax.devices()[:n]
    f = jax.pmap(lambda c, r: read(c, r, Window(-1, 3)), axis_name="x", devices=devices)
    check_pmap(n, lambda column, rows: f(whole(column, n), rows)[:2])


@pytest.mark.parametrize("n", COUNTS)
def test_pmap_with_pointers_from_outside(n):
    """Each device waits for its own reads only, so the caller keeps the columns until all are done."""
    f = jax.pmap(lambda t, r: ops.gather(t, *r, Window(-1, 3))[:2], in_axes=(None, 0), devices=jax.devices()[:n])

    def run(column, rows):
        column = spread(column, n)
        words = np.asarray(on_all(lambda c: ops.pointers(c)[0], n)(column))
        got = jax.block_until_ready(f(ops.Shards(words, (SHARD[0], *column.shape[1:]), column.dtype), rows))
        assert not column.is_deleted()
        return got

    check_pmap(n, run)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("n", COUNTS)
def test_writes_in_place_before_and_behind_the_reads(n, memory):
    """In a scan of steps that write, read everywhere, and write again: each read sees what its step wrote."""
    if jax.default_backend() == "gpu" and memory == "device":
        pytest.skip("GPUs read each other's columns in host memory")
    slots, steps, window = 6, 5, Window(0, 7)

    def step(carry, x):
        column, ticket = carry
        k, rows = x
        own = jnp.arange(slots, dtype=jnp.int32)
        here = jnp.float32(slots) * jax.lax.axis_index("x").astype(jnp.float32)
        value = (here + own.astype(jnp.float32) + 1000 * k.astype(jnp.float32))[:, None, None]
        column = ops.scatter(column, own, jnp.broadcast_to(value, (slots, 7, 4)), ticket=ticket)
        table, ticket = shards(column, ticket)
        data, mask, ticket = ops.gather(table, *rows, window, ticket=ticket)
        barrier = jax.lax.pcast(jax.lax.psum(ticket, "x"), "x", to="varying")
        column = ops.scatter(column, own, jnp.broadcast_to(-value, (slots, 7, 4)), ticket=barrier)
        return (column, barrier), (data, mask)

    def run(column, rows):
        ticket = jax.lax.pcast(ops.new_ticket(), "x", to="varying")
        (column, ticket), got = jax.lax.scan(step, (column, ticket), (jnp.arange(1, steps + 1), rows))
        return column, ticket, got

    column = spread(jnp.zeros((n * SHARD[0], *SHARD[1:], 4), jnp.float32), n, memory)
    rows = random_rows(np.random.default_rng(n), (n * SHARD[0], *SHARD[1:]), (n * steps, 9))
    f = on_all(run, n, donate_argnums=0).lower(column, spread(rows, n, "device")).compile()
    assert not [x for x in column_sized(f.as_text(), column.nbytes // n) if " copy" in x]
    before = [x.data.unsafe_buffer_pointer() for x in column.addressable_shards]
    column, _, got = f(column, spread(rows, n, "device"))
    assert [x.data.unsafe_buffer_pointer() for x in column.addressable_shards] == before
    for i in range(n * steps):
        value = np.arange(n * slots, dtype=np.float32) + 1000 * (i % steps + 1)
        written = np.broadcast_to(value.reshape(n * 2, 3, 1, 1), (n * 2, 3, 7, 4))
        wanted = gather_oracle(written, *(x[i] for x in rows), window)
        assert_same_bits(jax.tree.map(lambda x: np.asarray(x[i]), got), wanted, f"step {i}: ")  # noqa: B023


@pytest.mark.cpu
@pytest.mark.devices(4)
def test_columns_that_are_neither_arguments_nor_results():
    """A call behind the barrier keeps them, and what is made behind it may take their memory."""

    def f(x, rows):
        column = x * 2
        table, ticket = shards(column, ops.new_ticket())
        data, mask, ticket = ops.gather(table, *rows, Window(0, 7), ticket=ticket)
        ticket = jax.lax.psum(ticket, "x")
        _, ticket = ops.pointers(column, ticket=ticket)
        return data, mask, jnp.flip(x + ticket.astype(x.dtype)[0], 0)

    x = np.arange(4 * 2 * 3 * 7 * 999, dtype=np.float32).reshape(8, 3, 7, 999)
    rows = random_rows(np.random.default_rng(0), x.shape[:3], (4 * 50,))
    data, mask, _ = on_all(f, 4)(spread(x, 4), spread(rows, 4, "device"))
    check(({"c": data}, {"c": mask}), {"c": x * 2}, rows, Window(0, 7))


@pytest.mark.parametrize("rows", [0, 1, 300])
@pytest.mark.parametrize("n", [1, 3, 64])
def test_shards_of_one_device(n, rows):
    rng, table = np.random.default_rng(n), (n, 2, 5)
    columns = {str(w): random_values(rng, (*table, w), np.uint8) for w in (0, 1, 3, 16, 160)}
    arrays, given = table_of({k: whole(c, n) for k, c in columns.items()})
    numbers = random_rows(rng, table, (rows,))
    for order in (False, True):
        got = jax.jit(lambda t, r: ops.gather(t, *r, Window(-1, 3, "tail", 9), order=order)[:2])(given, numbers)  # noqa: B023
        check(got, columns, numbers, Window(-1, 3, "tail", 9))
    assert arrays


def test_rows_of_one_step():
    for step in (1, 2, 4, 8, 12):
        column = random_values(np.random.default_rng(step), (6, 5, 1, step), np.uint8)
        arrays, given = table_of({"c": whole(column, 3)})
        numbers = random_rows(np.random.default_rng(0), (6, 5, 1), (99,))
        check(ops.gather(given, *numbers)[:2], {"c": column}, numbers, None)
        assert arrays


def test_a_batch_that_several_threads_read():
    column = random_values(np.random.default_rng(0), (4, 5, 101, 1031), np.uint8)
    arrays, given = table_of({"c": whole(column, 4)})
    numbers = random_rows(np.random.default_rng(1), column.shape[:3], (50,))
    check(ops.gather(given, *numbers, Window(-50, 97, "head", 200))[:2], {"c": column}, numbers,
          Window(-50, 97, "head", 200))  # fmt: skip
    assert arrays


def test_arrays_addresses_and_shards_in_one_call():
    rng, table = np.random.default_rng(0), (4, 3, 7)
    columns = {str(k): random_values(rng, (*table, k % 5 + 1), np.uint16) for k in range(40)}
    arrays, given = table_of({k: whole(c, 2) for k, c in columns.items() if int(k) % 3 == 0})
    others = {k: place(jnp.asarray(c), "pinned_host") for k, c in columns.items() if int(k) % 3}
    given |= {k: external.addresses(x) if int(k) % 3 == 1 else x for k, x in others.items()}
    numbers = random_rows(rng, table, (9,))
    check(jax.jit(lambda t, r: ops.gather(t, *r, Window(-2, 4))[:2])(given, numbers), columns, numbers, Window(-2, 4))
    assert arrays


def test_vmap_makes_rows_of_a_batch_and_takes_a_batch_of_tables():
    rng, table = np.random.default_rng(0), (4, 3, 7)
    columns = random_values(rng, (3, *table, 5), np.int32)
    numbers = random_rows(rng, table, (3, 6))
    kept = [table_of({"c": whole(c, 2)}) for c in columns]
    f = lambda t, r: ops.gather(t, *r, Window(-1, 3))[:2]  # noqa: E731
    shared = jax.jit(jax.vmap(f, (None, 0)))(kept[0][1], numbers)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(given for _, given in kept))
    own = jax.jit(jax.vmap(f))(stacked, numbers)
    for k in range(3):
        rows = tuple(x[k] for x in numbers)
        check(pick(shared, k), {"c": columns[0]}, rows, Window(-1, 3))
        check(pick(own, k), {"c": columns[k]}, rows, Window(-1, 3))


def test_an_empty_table_gives_padding():
    for shape in ((1, 0, 4, 3), (0, 2, 4, 3), (1, 2, 0, 3)):
        given = ops.Shards(jnp.zeros((2, 2), jnp.uint32), shape, jnp.float32)
        data, mask, _ = ops.gather(given, ids(0, 1), ids(0, 0), ids(4, 4), Window(0, 2, "head", 5))
        assert not mask.any()
        np.testing.assert_array_equal(data, np.full((2, 2, 3), 5, np.float32))


def test_out_and_ticket():
    column = random_values(np.random.default_rng(0), (4, 3, 7), np.float32)
    arrays, given = table_of({"c": whole(column, 2)})
    numbers = random_rows(np.random.default_rng(1), column.shape, (6,))
    old = {"c": jnp.zeros((6, 3), jnp.float32)}, {"c": jnp.zeros((6, 3), jnp.bool_)}
    at = old[0]["c"].unsafe_buffer_pointer()
    f = jax.jit(lambda t, r, out: ops.gather(t, *r, Window(-1, 3), out=out, ticket=ids(41)), donate_argnums=2)
    data, mask, ticket = f(given, numbers, old)
    assert (data["c"].unsafe_buffer_pointer(), ticket.tolist()) == (at, [41])
    check((data, mask), {"c": column}, numbers, Window(-1, 3))
    assert arrays


def test_checks_name_the_slots_of_all_shards(checks):
    arrays, given = table_of({"c": np.ones((2, 2, 3, 7), np.float32)})
    assert ops.gather(given, ids(11), ids(0), ids(7))[1]["c"].all()
    with pytest.raises(FAILED, match=r"slots\[1\]: got 12, wanted a slot in \[0, 12\)"):
        jax.block_until_ready(ops.gather(given, ids(0, 12), ids(0, 0), ids(7, 7)))
    assert arrays


def test_address_order_pays_by_the_table_of_all_shards():
    words, many = jnp.zeros((4, 2), jnp.uint32), _gather._ORDER_ROWS
    lowered = lambda t: jax.jit(lambda t, s: ops.gather(t, s, s, s)[0]).lower(t, jnp.zeros(many, jnp.int32)).as_text()  # noqa: E731
    assert "ordered = true" in lowered(ops.Shards(words, (1, 1 << 18, 8, 300), jnp.uint8))
    assert "ordered = false" in lowered(ops.Shards(words, (1, 1 << 10, 8, 300), jnp.uint8))


def of_zeros(*words, shape=(1, 2, 3), dtype=np.float32):
    return ops.Shards(np.zeros(words, np.uint32), shape, dtype)


@pytest.mark.parametrize(
    ("columns", "error", "text"),
    [
        (ops.Shards(np.zeros((2, 2), np.int32), (1, 2, 3), np.int8), TypeError, r"\[0\].pointers: got int32\[2, 2\]"),
        (ops.Shards((0, 0), (1, 2, 3), np.int8), TypeError, r"\[0\].pointers: got tuple, wanted uint32\[n, 2\]"),
        (of_zeros(2, 3, 2), ValueError, r"words\[:, i\]"),
        (of_zeros(0, 2), ValueError, r"got uint32\[0, 2\]"),
        (of_zeros(2, 2, shape=()), ValueError, r"\[0\].shape: got \(\)"),
        (of_zeros(2, 2, shape=(1, 2)), ValueError, r"wanted at least \[P, S, T\]"),
        (of_zeros(2, 2, dtype="int4"), TypeError, "whole bytes"),
        ([of_zeros(2, 2, shape=(2, 2, 3)), of_zeros(4, 2)], ValueError, r"columns: got Shards of \[2, 4\], wanted"),
        ([of_zeros(2, 2), np.zeros((1, 2, 3))], ValueError, r"columns\[1\]: got shape \(1, 2, 3\), wanted leading"),
        (of_zeros(2, 2, shape=(1, 2**30, 3)), ValueError, "fewer than 2"),
    ],
)
def test_errors(columns, error, text):
    with pytest.raises(error, match=text):
        ops.gather(columns, ids(0), ids(0), ids(1))


def test_gather_start_takes_arrays_only():
    shards = ops.Shards(jnp.zeros((1, 2), jnp.uint32), (1, 2, 3), jnp.float32)
    with pytest.raises(TypeError, match=r"gather_start: columns\[0\]: got Shards, wanted an array"):
        ops.gather_start(shards, ids(0), ids(0), ids(1))


@pytest.mark.gpu
def test_more_shards_than_a_kernel_takes():
    shards = ops.Shards(jnp.zeros((65, 2), jnp.uint32), (1, 2, 3), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="shards: got 65, wanted at most 64 on a GPU"):
        jax.block_until_ready(ops.gather(shards, ids(-1), ids(0), ids(1)))
