"""`zeros`: memory for a column."""

import functools

import jax
import numpy as np

from gear_jax.ops import _place, _registry


def zeros(shape: tuple[int, ...], dtype, memory: str | None = None) -> jax.Array:
    """An array of zeros for a column: like `jnp.zeros`, but filled by several threads behind huge pages on a CPU.

    A table of many GB behind 4 KiB pages is slower to fill (a page fault for each) and slower to read at random.

    Args:
      shape: of the array.
      dtype: of the array.
      memory: "pinned_host": page-locked memory of the host. "device" or None: the device's own. Inside a program of a
        GPU, XLA makes an array in the device's memory before it moves it to the host's: call this outside jit where
        the device has no room for it.

    Raises:
      ValueError: for another memory.

    Transformations: takes no array, so that jit, vmap and shard_map leave it as it is.
    """
    _place.check_memory(memory)
    shape, dtype = tuple(shape), jax.dtypes.canonicalize_dtype(dtype)
    if memory != "pinned_host":
        return _device_zeros(shape, dtype)
    return _moved_zeros(shape, dtype) if _place.tracing() else _host_zeros(shape, dtype)


def _host_zeros(shape, dtype) -> jax.Array:
    """Zeros in the host's memory, made where they stay."""
    if _place.default_device().platform == "cpu":
        return _moved_zeros(shape, dtype)  # by all threads; on a CPU the move costs nothing
    return jax.device_put(np.zeros(shape, dtype), _place.host_sharding())


def _device_zeros(shape, dtype) -> jax.Array:
    return _registry.call("gear_zeros", [jax.ShapeDtypeStruct(shape, dtype)], [])[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _moved_zeros(shape, dtype) -> jax.Array:
    # The transfer tells the jit boundary, too, where the result lies; a result type in host memory alone does not.
    return jax.device_put(_device_zeros(shape, dtype), jax.memory.Space.Host)
