"""What every op shares: registration of the FFI handlers, and the call itself."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import _cuda, _native
from gear_jax._errors import message, type_error, value_error
from gear_jax._numbers import is_integer


@functools.cache
def register() -> None:
    """Registers every handler of every platform of this build. Handlers are stateless, so no backend is started."""
    for platform, name, capsule in _native.registrations():
        jax.ffi.register_ffi_target(name, capsule, platform=platform)


@functools.cache
def check_platform() -> None:
    """Raises a RuntimeError if this build cannot work on jax's default backend: no handlers, or too old a driver."""
    backend = jax.default_backend()
    held = {platform for platform, _, _ in _native.registrations()}
    platform = {"gpu": "CUDA"}.get(backend, backend)
    if platform not in held:
        wanted = f"one of {sorted(held)}, which this build has handlers for"
        build = "Build with CUDA: `GEAR_JAX_CUDA=ON pip install .` in the project's root (it needs nvcc); or set "
        fix = f"{build if backend == 'gpu' else 'Set '}JAX_PLATFORMS=cpu before jax is imported."
        raise RuntimeError(message("default backend", got=repr(backend), wanted=wanted, fix=fix))
    module = _native.load("CUDA") if platform == "CUDA" else None
    driver = _cuda.library() if module else None
    problem = _cuda.driver_problem(driver, module.runtime_version()) if module and driver else None
    if problem:
        raise RuntimeError(problem)


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


HOST_BLOCKS = 12
"""Thread blocks that fill a PCIe link with reads or writes of host memory: 8 for aligned rows (docs/benchmarks)."""


def in_host_memory(x: jax.Array) -> bool:
    """Whether an array lies in the host memory of an accelerator."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def check_blocks(blocks: Any) -> int | None:
    """A number of thread blocks, or None.

    Raises:
      ValueError: if it is anything else.
    """
    if blocks is not None and (not is_integer(blocks) or not 1 <= blocks <= 65535):
        raise value_error("blocks", got=repr(blocks), wanted="None or an integer in [1, 65535]", fix="Leave it out.")
    return None if blocks is None else int(blocks)


def blocks(wanted: int | None, columns: Sequence[jax.Array]) -> int:
    """The attribute of a handler: a number of thread blocks, or 0 for all multiprocessors."""
    if wanted is not None:
        return wanted
    return HOST_BLOCKS if any(in_host_memory(c) for c in columns) else 0


def ids(what: str, x: Any, shape: tuple[int, ...] | None = None) -> jax.Array:
    """An argument as an int32 vector.

    Raises:
      TypeError: if it does not hold integers.
      ValueError: if it is not of the shape (None: any length, one dimension).
    """
    return jnp.asarray(where_they_are(what, x, shape))


def where_they_are(what: str, x: Any, shape: tuple[int, ...] | None = None) -> jax.Array | np.ndarray:
    """The same, on the host as long as it was nowhere else: a NumPy array unless `x` is JAX's."""
    x = int32_where_it_is(what, x)
    if (x.ndim != 1) if shape is None else (x.shape != shape):
        wanted = "one dimension" if shape is None else f"shape {shape}"
        raise value_error(what, got=f"shape {x.shape}", wanted=wanted, fix="Give one number for each row.")
    return x


def int32(what: str, x: Any) -> jax.Array:
    """Integers of any width as int32; a number too large must not wrap round to a small one.

    Raises:
      TypeError: if it does not hold integers.
    """
    return jnp.asarray(int32_where_it_is(what, x))


def int32_where_it_is(what: str, x: Any) -> jax.Array | np.ndarray:
    """The same, a NumPy array of its own unless `x` is JAX's: jit takes one in less time than JAX makes an array."""
    xp = jnp if isinstance(x, jax.Array) else np  # jax would cut a NumPy int64 before we see it
    x = xp.asarray(x)
    if x.dtype == np.int32:
        return x if xp is jnp else x.copy()
    if not jnp.issubdtype(x.dtype, jnp.integer):
        if x.size or xp is jnp:
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            raise type_error(what, got=f"dtype {dtype}", wanted="int32", fix=f"Pass {what}.astype(jnp.int32).")
        x = x.astype(np.int32)  # an empty list
    limits = jnp.iinfo(jnp.int32)
    if jnp.iinfo(x.dtype).max > limits.max:
        x = xp.clip(x, None, xp.asarray(limits.max, x.dtype))
        if jnp.issubdtype(x.dtype, jnp.signedinteger):
            x = xp.clip(x, xp.asarray(limits.min, x.dtype), None)
    return x.astype(jnp.int32)


def not_given() -> jax.Array:
    """Starts or lengths of rows that have none of their own: the handler takes 0, and all steps. Numbers for each row
    would be a kernel of the program."""
    # Not a NumPy constant: shard_map makes an operand of it, and XLA crashes on one without elements.
    return jnp.zeros((0,), jnp.int32)


def batch_all(size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]) -> list[jax.Array]:
    """The arrays of a vmap rule with the batch dimension everywhere: repeated where it was missing."""
    return [x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(arrays, batched, strict=True)]


def new_ticket() -> jax.Array:
    """The ticket of a table that nobody has read yet: `int32[1]`, zero."""
    return jnp.zeros((1,), jnp.int32)


def ticket(x: Any) -> jax.Array:
    """A ticket argument: `int32[1]`, or None for a new one.

    Raises:
      TypeError: if it is anything else.
    """
    if x is None:
        return new_ticket()
    if getattr(x, "shape", None) != (1,) or x.dtype != jnp.int32:
        got = f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__
        raise type_error("ticket", got=got, wanted="int32[1]", fix="Pass the ticket that the last read returned.")
    return jnp.asarray(x)


def fold_slots(slots: jax.Array, slots_in_table: int) -> jax.Array:
    """Slots `int32[V, B]` of V tables as slots of one: slot c of table v is v * C + c. What is outside stays outside.

    Raises:
      ValueError: if all tables together have 2**31 slots or more.
    """
    size = slots.shape[0]
    if size * slots_in_table > 2**31 - 1:
        raise value_error(
            "vmap over tables", got=f"{size} of {slots_in_table} slots", wanted="fewer than 2**31 slots together",
            fix="Map over fewer tables, or scan over them.",
        )  # fmt: skip
    inside = (slots >= 0) & (slots < slots_in_table)
    shift = jnp.arange(size, dtype=jnp.int32)[:, None] * np.int32(slots_in_table)
    # -1 means "none"; any other number outside must not become a slot of the next table, and is a fault when checked.
    outside = jnp.where(slots == -1, np.int32(-1), np.int32(2**31 - 1))
    return jnp.where(inside, slots + shift, outside)


def rows_shape(fields: Sequence[jax.Array]) -> tuple[int, int]:
    """(P, S), the leading dimensions that all fields share.

    Raises:
      ValueError: if there is no field, or if one has fewer dimensions or others.
    """
    shapes = {x.shape[:2] for x in fields}
    if len(shapes) != 1 or len(min(shapes)) != 2:
        raise value_error(
            "fields", got=[x.shape for x in fields], wanted="the same [P, S] in each", fix="Pass arrays [P, S, *shape]."
        )
    p, s = shapes.pop()
    return p, s


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
