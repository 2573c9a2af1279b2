"""`ops.zeros`: zeros, whatever was in the memory before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import ops
from gear_jax.testing.ops import DTYPES, X64_DTYPES, dtype_of


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5, 7)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, shape):
    got = ops.zeros(shape, dtype_of(dtype))
    assert (got.shape, got.dtype) == (shape, dtype_of(dtype))
    assert not np.asarray(got).reshape(-1).view(np.uint8).any()


def test_64_bit_dtypes():
    with jax.enable_x64(True):
        for dtype in X64_DTYPES:
            assert ops.zeros((2, 3), dtype_of(dtype)).dtype == dtype_of(dtype)
    assert ops.zeros((2, 3), np.float64).dtype == jnp.float32


@pytest.mark.parametrize("size", [(4 << 20) - 1, 4 << 20, (4 << 20) + 1, (9 << 20) + 17])
def test_memory_that_was_in_use(size):
    for _ in range(3):
        used = jax.block_until_ready(jnp.full((size,), 255, jnp.uint8) + jnp.uint8(0))
        used.delete()
        assert not np.asarray(ops.zeros((size,), jnp.uint8)).any()


def test_transformations():
    f = lambda: ops.zeros((3, 2), jnp.bfloat16)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(f)(), np.zeros((3, 2)))
    np.testing.assert_array_equal(jax.vmap(lambda x: f() + x)(jnp.ones((4,), jnp.bfloat16)), np.ones((4, 3, 2)))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    got = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=spec))()
    assert got.shape == (12, 2) and not got.any()
    assert jax.lax.scan(lambda c, _: (c, f()), None, length=3)[1].shape == (3, 3, 2)
