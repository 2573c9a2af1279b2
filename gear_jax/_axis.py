"""Mesh axes as a function of one device sees them, under `jax.shard_map` and `jax.pmap` alike.

An axis is a name, a tuple of names (the first is the slowest), or None: there is one device, and all of these are the
identity.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

Axis = str | tuple[str, ...] | None


def names(axis: Axis) -> tuple[str, ...]:
    """The names of an axis."""
    return () if axis is None else (axis,) if isinstance(axis, str) else axis


def size(axis: Axis) -> int:
    """How many devices it has."""
    return math.prod(jax.lax.axis_size(name) for name in names(axis))


def index(axis: Axis) -> jax.Array:
    """The number of this device on it: `int32[]`."""
    number = jnp.int32(0)
    for name in names(axis):
        number = number * jax.lax.axis_size(name) + jax.lax.axis_index(name).astype(jnp.int32)
    return number


def all_gather(x: jax.Array, axis: Axis) -> jax.Array:
    """`[n * k, ...]` from each device's `[k, ...]`, in the order of the devices."""
    return x if not names(axis) else jax.lax.all_gather(x, names(axis), tiled=True)


def total(x: jax.Array, axis: Axis) -> jax.Array:
    """The sum over the devices."""
    return x if not names(axis) else jax.lax.psum(x, names(axis))


def least(x: jax.Array, axis: Axis) -> jax.Array:
    """The least over the devices."""
    return x if not names(axis) else jax.lax.pmin(x, names(axis))


def greatest(x: jax.Array, axis: Axis) -> jax.Array:
    """The greatest over the devices."""
    return x if not names(axis) else jax.lax.pmax(x, names(axis))


def combine(tree: Any, axis: Axis) -> Any:
    """Vectors of 32-bit numbers of which each device knows some elements, and has zeros for all others.

    Every element is known to one device at most. One collective for all of them; exact, since it adds words.

    Args:
      tree: arrays `[B]` of 4-byte dtypes.
      axis: the devices.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not names(axis) or not leaves:
        return tree
    words = total(jnp.stack([jax.lax.bitcast_convert_type(x, jnp.uint32) for x in leaves]), axis)
    return structure.unflatten([jax.lax.bitcast_convert_type(w, x.dtype) for w, x in zip(words, leaves, strict=True)])
