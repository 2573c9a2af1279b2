"""`ops.zeros`: zeros, whatever was in the memory before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import ops
from gear_jax.testing.ops import DTYPES, X64_DTYPES, column_sized, dtype_of, place


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5, 7)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, shape, memory):
    got = ops.zeros(shape, dtype_of(dtype), memory)
    assert (got.shape, got.dtype, got.sharding.memory_kind) == (shape, dtype_of(dtype), memory)
    assert not np.asarray(got).reshape(-1).view(np.uint8).any()


def test_64_bit_dtypes():
    with jax.enable_x64(True):
        for dtype in X64_DTYPES:
            assert ops.zeros((2, 3), dtype_of(dtype)).dtype == dtype_of(dtype)
    assert ops.zeros((2, 3), np.float64).dtype == jnp.float32


@pytest.mark.parametrize("size", [(4 << 20) - 1, 4 << 20, (4 << 20) + 1, (9 << 20) + 17])
def test_memory_that_was_in_use(size, memory):
    for _ in range(3):
        used = jax.block_until_ready(place(np.full((size,), 255, np.uint8), memory))
        used.delete()
        assert not np.asarray(ops.zeros((size,), jnp.uint8, memory)).any()


def test_transformations():
    f = lambda: ops.zeros((3, 2), jnp.bfloat16)  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(lambda x: f() + x)(jnp.ones((4,), jnp.bfloat16)), np.ones((4, 3, 2)))
    assert jax.lax.scan(lambda c, _: (c, f()), None, length=3)[1].shape == (3, 3, 2)


def test_in_a_program(memory):
    f = lambda: ops.zeros((3, 2), jnp.bfloat16, memory)  # noqa: E731
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    local = jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=jax.sharding.PartitionSpec("x"))
    for run in (f, jax.jit(f), jax.jit(local)):
        got = run()
        space = {"device": jax.memory.Space.Device, "pinned_host": jax.memory.Space.Host}[memory]
        assert got.sharding.memory_kind == memory and jax.typeof(got).memory_space == space
        np.testing.assert_array_equal(got, np.zeros((3, 2)))
    if jax.default_backend() == "cpu":  # where moving it to the host's memory is no copy
        assert column_sized(jax.jit(f).lower().compile().as_text(), 12) == []


def test_outside_a_program_it_follows_the_default_device(memory):
    device = jax.devices()[-1]
    with jax.default_device(device):
        assert ops.zeros((3,), jnp.float32, memory).devices() == {device}


def test_another_memory():
    with pytest.raises(ValueError, match=r"memory: got 'disk', wanted None or one of \('pinned_host', 'device'\)"):
        ops.zeros((3,), jnp.float32, "disk")
