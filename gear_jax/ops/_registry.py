"""What every op shares: registration of the FFI handlers, and the call itself."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import _native
from gear_jax._errors import type_error, value_error


@functools.cache
def register() -> None:
    """Registers every handler of every platform of this build. Handlers are stateless, so no backend is started."""
    for platform, name, capsule in _native.registrations():
        jax.ffi.register_ffi_target(name, capsule, platform=platform)


def call(
    target: str,
    results: Sequence[Any],
    operands: Sequence[jax.Array],
    *,
    aliases: Mapping[int, int] | None = None,
    vmap_method: str | None = None,
    **attributes,
) -> list[jax.Array]:
    """Calls an FFI handler.

    Args:
      target: the handler's name, the same on every platform.
      results: shapes and dtypes of the results. An aliased result is `jax.typeof(operand)`, which carries the
        operand's memory space.
      operands: the arrays.
      aliases: operand number -> the number of the result that takes its memory.
      vmap_method: as in `jax.ffi.ffi_call`; None raises under `jax.vmap`.
      **attributes: static attributes of the handler.

    Returns:
      The results. Inside `jax.shard_map` each varies over every mesh axis that some operand varies over: a handler's
      result is otherwise taken for the same on all devices, and a wrong `out_specs` would pass.
    """
    register()
    outs = jax.ffi.ffi_call(target, list(results), input_output_aliases=dict(aliases or {}), vmap_method=vmap_method)(
        *operands, **attributes
    )
    axes = frozenset().union(*(_varying(x) for x in operands)) if operands else frozenset()
    return [_vary(x, axes) for x in outs]


def _varying(x) -> frozenset:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _vary(x: jax.Array, axes: frozenset) -> jax.Array:
    missing = tuple(sorted(axes - _varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def ids(what: str, x: Any, shape: tuple[int, ...] | None = None) -> jax.Array:
    """An argument as an int32 vector.

    Raises:
      TypeError: if it does not hold integers.
      ValueError: if it is not of the shape (None: any length, one dimension).
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise type_error(what, got=f"dtype {x.dtype}", wanted="int32", fix=f"Pass {what}.astype(jnp.int32).")
    if (x.ndim != 1) if shape is None else (x.shape != shape):
        wanted = "one dimension" if shape is None else f"shape {shape}"
        raise value_error(what, got=f"shape {x.shape}", wanted=wanted, fix="Give one number for each row.")
    if jnp.iinfo(x.dtype).max > jnp.iinfo(jnp.int32).max:  # a number too large must not wrap round to a slot
        x = jnp.clip(x, max=jnp.iinfo(jnp.int32).max)
        x = jnp.clip(x, min=jnp.iinfo(jnp.int32).min) if jnp.issubdtype(x.dtype, jnp.signedinteger) else x
    return x.astype(jnp.int32)


def batch_all(size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]) -> list[jax.Array]:
    """The arrays of a vmap rule with the batch dimension everywhere: repeated where it was missing."""
    return [x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(arrays, batched, strict=True)]


def new_ticket() -> jax.Array:
    """The ticket of a table that nobody has read yet: `int32[1]`, zero."""
    return jnp.zeros((1,), jnp.int32)


def _whole_bytes(dtype) -> bool:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits % 8 == 0
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.finfo(dtype).bits % 8 == 0
    return dtype == np.dtype(bool)


def table_shape(columns: Sequence[jax.Array]) -> tuple[int, int, int]:
    """(P, S, T), the leading dimensions that all columns share.

    Raises:
      TypeError: if a column's dtype is not one of whole bytes.
      ValueError: if a column has fewer than three dimensions, or if they disagree.
    """
    # Not by a reshape next to the call: XLA copies an array that is reshaped on its way into an aliased call.
    fix = "Make columns of shape [P, S, T, *shape] from the start ([1, C, T, *shape] for one partition)."
    for i, c in enumerate(columns):
        if not _whole_bytes(c.dtype):
            raise type_error(
                f"columns[{i}]", got=f"dtype {c.dtype}", wanted="a bool, integer, float or complex of whole bytes",
                fix="Pack narrow values into uint8; store random keys as jax.random.key_data(keys).",
            )  # fmt: skip
        if c.ndim < 3:
            raise value_error(f"columns[{i}]", got=f"shape {c.shape}", wanted="at least [P, S, T]", fix=fix)
        if c.shape[:3] != columns[0].shape[:3]:
            raise value_error(
                f"columns[{i}]", got=f"shape {c.shape}", wanted=f"leading dimensions {columns[0].shape[:3]}", fix=fix
            )
    if not columns:
        raise value_error("columns", got="none", wanted="at least one array", fix=fix)
    p, s, t = columns[0].shape[:3]
    if p * s > 2**31 - 1 or t > 2**31 - 1:
        raise value_error("columns", got=f"{p * s} slots of {t} steps", wanted="fewer than 2**31 of each", fix=fix)
    return p, s, t
