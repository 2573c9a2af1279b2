"""`zeros`: memory for a column."""

import jax

from gear_jax.ops import _registry


def zeros(shape: tuple[int, ...], dtype) -> jax.Array:
    """An array of zeros for a column: like `jnp.zeros`, but filled by several threads behind huge pages on a CPU.

    A table of many GB behind 4 KiB pages is slower to fill (a page fault for each) and slower to read at random.

    Transformations: takes no array, so that jit, vmap and shard_map leave it as it is.
    """
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return _registry.call("gear_zeros", [jax.ShapeDtypeStruct(shape, dtype)], [])[0]
