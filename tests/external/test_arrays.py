"""Addresses of JAX's own arrays, what keeps them, and what is left when they are gone."""

import dataclasses
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import external, ops
from gear_jax.external import _registration
from gear_jax.specs import Window
from gear_jax.testing.ops import assert_same_bits, gather_oracle, place, random_rows, random_values

FAILED = (jax.errors.JaxRuntimeError, ValueError)
TABLE = (2, 3, 7)


def ids(*numbers):
    return jnp.asarray(numbers, jnp.int32)


def check(table, column, seed=0):
    """A table reads what the column holds."""
    rows, window = random_rows(np.random.default_rng(seed), column.shape[:3], (9,)), Window(-2, 4, "head", 1)
    data, mask, _ = jax.jit(lambda t, r: ops.gather(t, *r, window))(table, rows)
    assert_same_bits((data, mask), gather_oracle(column, *rows, window))


def read(table):
    """One row."""
    return ops.gather(table, ids(0), ids(0), ids(9))[0]


def fails_in_the_end(call, text):
    """A call fails with a text; on a GPU its kernel cannot, and the next one does."""
    with pytest.raises(FAILED, match=text):
        for _ in range(2):
            jax.block_until_ready(call())


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_addresses_of_an_array(kind):
    column = random_values(np.random.default_rng(0), (*TABLE, 3), np.float32)
    array = place(column, kind)
    if kind == "device" and jax.default_backend() == "gpu":
        with pytest.raises(ValueError, match="addresses: array: got memory 'device', wanted 'pinned_host'"):
            external.addresses(array)
        return
    table = external.addresses(array)
    assert (table.words.shape, table.words.dtype, table.shape, table.dtype) == (
        (4,),
        jnp.uint32,
        (*TABLE, 3),
        np.float32,
    )
    check(table, column)


def test_addresses_keep_the_array():
    array = place(np.full(TABLE, 7, np.float32), "pinned_host")
    gone = weakref.ref(array)
    table = external.addresses(array)
    shard = dataclasses.replace(table, words=table.words[None]).shard(0)
    held = dataclasses.replace(table, owner=None)
    del array, table
    gc.collect()
    external.check()
    assert gone() is not None and (read(shard) == 7).all()
    del shard
    external.check()
    gc.collect()
    assert gone() is None
    fails_in_the_end(lambda: read(held), "closed or freed")


def test_what_has_no_addresses():
    array = place(np.zeros(TABLE, np.float32), "pinned_host")
    for wrong in (np.zeros(TABLE), None, external.addresses(array)):
        with pytest.raises(TypeError, match=r"addresses: array: got (ndarray|NoneType|Addresses), wanted a jax.Array"):
            external.addresses(wrong)
    with pytest.raises(TypeError, match=r"got a traced array, wanted a jax.Array. Take addresses outside of programs"):
        jax.jit(external.addresses)(jnp.zeros(TABLE))
    array.delete()
    with pytest.raises(ValueError, match="addresses: array: got one that was deleted or donated"):
        external.addresses(array)


def test_addresses_of_a_deleted_array():
    array = place(np.zeros(TABLE, np.float32), "pinned_host")
    table = external.addresses(array)
    array.delete()
    for use in (lambda: read(table), lambda: jax.jit(read)(table)):
        with pytest.raises(ValueError, match=r"Addresses: got those of an array that was deleted or donated.*renew"):
            use()


def test_renewed_addresses_are_the_same():
    write = jax.jit(lambda c, v: ops.scatter(c, ids(0), v), donate_argnums=0)
    array = place(np.zeros((1, 4, 2), np.float32), "pinned_host")
    first = table = external.addresses(array)
    for k in range(1, 4):
        array = jax.block_until_ready(write(array, jnp.full((1, 2), k, jnp.float32)))
        with pytest.raises(ValueError, match="deleted or donated"):
            read(table)
        table = external.renew(table, array)
        assert (table.words == first.words).all() and (read(table) == k).all()
    held = dataclasses.replace(table, owner=None)
    gone = weakref.ref(array)
    del array
    external.check()
    assert (read(table) == 3).all()
    del table
    external.check()
    assert gone() is not None  # the first addresses are those of the same memory
    del first
    external.check()
    gc.collect()
    assert gone() is None
    fails_in_the_end(lambda: read(held), "closed or freed")


def test_what_cannot_be_renewed():
    array, other = (place(np.zeros(TABLE, np.float32), "pinned_host") for _ in range(2))
    table = external.addresses(array)
    with pytest.raises(ValueError, match="renew: array: got one that lies elsewhere"):
        external.renew(table, other)
    with pytest.raises(TypeError, match=r"addresses: got Addresses, wanted Addresses of gear_jax.external.addresses"):
        external.renew(dataclasses.replace(table, owner=None), array)
    with pytest.raises(TypeError, match="addresses: got ArrayImpl"):
        external.renew(array, array)
    array.delete()
    with pytest.raises(ValueError, match="got one that was deleted or donated"):
        external.renew(table, array)


@pytest.mark.devices(8)
def test_shards_come_in_the_order_of_the_array():
    devices = np.array(jax.devices()[:8])[::-1].reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("x", "y"))
    column = random_values(np.random.default_rng(0), (8, 3, 5), np.float32)
    spec = jax.sharding.PartitionSpec
    for axes, n in ((spec("x"), 2), (spec(("x", "y")), 8), (spec(("y", "x")), 8), (spec("y", None), 4), (spec(), 1)):
        array = jax.device_put(column, jax.sharding.NamedSharding(mesh, axes))
        table = external.addresses(array)
        assert (table.words.shape, table.shape) == ((n, 4), (8 // n, 3, 5))
        assert len({tuple(w) for w in table.words.tolist()}) == n
        for k in range(n):
            check(table.shard(k), column[8 // n * k : 8 // n * (k + 1)])


@pytest.mark.devices(8)
def test_taking_addresses_does_not_stand_in_the_way_of_writes_in_place():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    kind = "pinned_host" if jax.default_backend() == "gpu" else None
    here = jax.sharding.NamedSharding(mesh, spec, memory_kind=kind)
    array = jax.device_put(jnp.zeros((8, 4, 2), jnp.float32), here)
    table = external.addresses(array)
    local = jax.shard_map(lambda c, v: ops.scatter(c, ids(1), v), mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    array = jax.jit(local, donate_argnums=0, out_shardings=here)(array, jnp.arange(16, dtype=jnp.float32).reshape(8, 2))
    table = external.renew(table, array)  # the same memory on every device
    f = jax.pmap(lambda t: ops.gather(t, ids(1), ids(0), ids(2))[0])
    jax.block_until_ready(array)
    assert f(table).reshape(-1).tolist() == list(range(16))


def test_check_reports_a_fault_once(monkeypatch):
    external.check()  # what earlier tests have left
    faults = ["gather: columns[0] on GPU 0: got this, wanted that. Fix.", ""]
    module = types.SimpleNamespace(take_address_fault=lambda: faults.pop(0))
    monkeypatch.setattr(_registration, "_module", lambda platform: module)
    with pytest.raises(ValueError, match=r"gather: columns\[0\] on GPU 0"):
        external.check()
    external.check()
    monkeypatch.setattr(_registration, "_module", lambda platform: None)
    external.check()  # a build without CUDA


@pytest.mark.gpu
def test_a_fault_on_a_gpu_gives_padding_and_is_reported():
    held = dataclasses.replace(external.addresses(place(np.ones(TABLE, np.float32), "pinned_host")), owner=None)
    external.check()
    data, mask, _ = ops.gather(held, ids(0, 1), ids(0, 0), ids(7, 7), Window(0, 3, pad_value=9))
    assert not mask.any() and (data == 9).all()
    with pytest.raises(ValueError, match=r"gather: columns\[0\] on GPU 0: got the address of a table that was closed"):
        external.check()
    external.check()


def test_what_cannot_be_freed_yet_is_tried_again(monkeypatch):
    external.check()
    gone = weakref.ref(array := place(np.zeros(TABLE, np.float32), "pinned_host"))
    table = external.addresses(array)
    del array, table

    def refuse(registrations):
        raise RuntimeError("a fault of the device")

    with monkeypatch.context() as m:
        m.setattr(_registration.Registration, "release", refuse)
        with pytest.raises(RuntimeError, match="a fault of the device"):
            external.check()
    assert gone() is not None
    external.check()
    gc.collect()
    assert gone() is None
