"""`gather`: windows of trajectories out of column tables."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from gear_jax import _env
from gear_jax._errors import type_error, value_error
from gear_jax.ops import _registry

# The numbers are part of the C++ side (ffi/gather.h).
PAD_NUMBERS = {"around": 0, "head": 1, "tail": 2}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static side of a call; one entry a column."""

    slots: int
    steps: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    anchored: tuple[bool, ...]
    pads: tuple[int, ...]
    pad_values: tuple[bytes, ...]
    checks: bool
    rows: bool = False  # columns are [P, S, *shape]: no steps, so no window dimension and no masks in the result


def gather(
    columns: Any,
    slots: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    windows: Any = None,
    *,
    ticket: jax.Array | None = None,
    after: Any = (),
    out: Any = None,
) -> tuple[Any, Any, jax.Array]:
    """Reads windows of rows of column tables, with padding and masks, in one call.

    Element w of a window is step `start + offset + w` of its row; steps outside [0, length) are padding.

    Args:
      columns: pytree of arrays `[P, S, T, *shape]` of any dtypes of whole bytes.
      slots: `int32[B]`, partition * S + slot in partition. A slot outside [0, P * S) gives a row of padding (an error
        with `GEAR_JAX_CHECKS=1`).
      starts: `int32[B]`, the step each row's windows are anchored at; any value.
      lengths: `int32[B]`, the steps each row holds; clipped to [0, T].
      windows: a tree like `columns` of `gear_jax.Window` or None, or one for all columns. None: all T steps.
      ticket: `int32[1]` of an earlier read, which this one then follows; None for a new one.
      after: pytree of arrays that must be there first; they are only waited for. An array that a later in-place write
        replaces, and that was read by something else than this call, belongs here (the reads' results, that is).
      out: None, or a pair (data, mask) of an earlier call with the same shapes, whose memory the results then take.
        They are consumed; donate them at the jit boundary, or XLA copies them first. Without effect under vmap.

    Returns:
      (data, mask, ticket): trees like `columns` with leaves `[B, W, *shape]` and `bool[B, W]`, and a ticket `int32[1]`
      that a write of the same columns (`gear_jax.ops.scatter`) takes, so that XLA need not copy a column to keep this
      read's values.

    Raises:
      TypeError, ValueError: at trace time, for shapes, dtypes and windows that do not fit.

    Transformations: jit, scan, cond, shard_map and pmap as usual. Under vmap with unbatched columns the batch becomes
    rows; with batched columns the tables become partitions; a column is never broadcast. Not differentiable.
    """
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, columns))
    p, s, t = _registry.table_shape(leaves)
    slots = _registry.ids("slots", slots)
    starts = _registry.ids("starts", starts, slots.shape)
    lengths = _registry.ids("lengths", lengths, slots.shape)
    plan = _plan(leaves, tree, windows, p * s, t)
    outs = () if out is None else _recycled(out, leaves, tree, slots.shape[0], plan)
    ticket = _registry.ticket(ticket)
    data, masks, last = _call(plan)(slots, starts, lengths, ticket, leaves, jax.tree.leaves(after), list(outs))
    return tree.unflatten(data), tree.unflatten(masks), last


def gather_rows(fields: Any, slots: jax.Array, *, ticket: jax.Array | None = None) -> tuple[Any, jax.Array]:
    """Reads one entry of each of `slots` out of arrays without steps, as `gather` does with columns.

    Args:
      fields: pytree of arrays `[P, S, *shape]`.
      slots: `int32[B]`; zeros come where a slot is outside [0, P * S).
      ticket: as in `gather`.

    Returns:
      (entries, ticket): a tree like `fields` with leaves `[B, *shape]`, and the next ticket.
      Transformations as `gather`.
    """
    leaves, tree = jax.tree.flatten(fields)
    p, s = _registry.rows_shape(leaves)
    slots = _registry.ids("slots", slots)
    k = len(leaves)
    plan = Plan(p * s, 1, (0,) * k, (1,) * k, (False,) * k, (0,) * k, (bytes(16),) * k, checks=False, rows=True)
    zero = jnp.zeros_like(slots)
    data, _, last = _call(plan)(slots, zero, zero + 1, _registry.ticket(ticket), leaves, [], [])
    return tree.unflatten(data), last


def broadcast_windows(tree, windows) -> list[Any]:
    """One window (or None) for each leaf of `tree`. A window stands for all columns below it.

    Raises:
      ValueError: if the trees do not match.
    """
    if windows is None or hasattr(windows, "pad_value"):
        return [windows] * tree.num_leaves
    is_leaf = lambda x: x is None or hasattr(x, "pad_value")  # noqa: E731
    try:
        spread = jax.tree.map(
            lambda w, sub: jax.tree.map(lambda _: _Box(w), sub),
            windows,
            tree.unflatten(range(tree.num_leaves)),
            is_leaf=is_leaf,
        )
    except (ValueError, TypeError) as e:
        raise value_error(
            "windows",
            got=jax.tree.structure(windows, is_leaf=is_leaf),
            wanted=f"a tree like the columns, {tree}",
            fix="Give a Window (or None for the whole trajectory) for every column.",
        ) from e
    boxes = jax.tree.leaves(spread)
    for box in boxes:
        if box.value is not None and not hasattr(box.value, "pad_value"):
            raise type_error(
                "windows", got=repr(box.value), wanted="a Window or None", fix="Pass gear_jax.Window(...)."
            )
    return [b.value for b in boxes]


@dataclasses.dataclass(frozen=True)
class _Box:
    value: Any


def _plan(leaves, tree, windows, slots: int, steps: int) -> Plan:
    offsets, lengths, anchored, pads, values = [], [], [], [], []
    for leaf, window in zip(leaves, broadcast_windows(tree, windows), strict=True):
        if window is None or window.length is None:
            offset, length, placed = 0, steps, False
        else:
            offset, length, placed = window.offset, window.length, True
        offsets.append(offset)
        lengths.append(length)
        anchored.append(placed)
        pads.append(PAD_NUMBERS["around" if window is None else window.pad])
        values.append(pad_bytes(0 if window is None else window.pad_value, leaf.dtype))
    fields = (tuple(x) for x in (offsets, lengths, anchored, pads, values))
    return Plan(slots, steps, *fields, checks=_env.checks())


def pad_bytes(value, dtype) -> bytes:
    """A padding value as 16 bytes, the value first.

    Raises:
      TypeError, ValueError: if a column of `dtype` cannot hold it.
    """
    dtype = np.dtype(dtype)
    if dtype.itemsize > 16 or dtype.kind == "O":
        raise type_error("columns", got=f"dtype {dtype}", wanted="a dtype of at most 16 bytes", fix="Cast it.")
    try:
        with np.errstate(all="raise"):
            cell = np.asarray(value).astype(dtype)
        if cell.ndim or (dtype.kind in "iub" and cell != np.asarray(value)):
            raise ValueError
    except (ValueError, TypeError, FloatingPointError, OverflowError):
        raise value_error(
            "Window.pad_value",
            got=repr(value),
            wanted=f"a scalar of {dtype}",
            fix="Give a value that the column can hold.",
        ) from None
    return cell.tobytes().ljust(16, b"\0")


def _recycled(out, leaves, tree, rows: int, plan: Plan):
    """The arrays of an earlier result, checked: data, then masks."""
    try:
        data, mask = out
        data, mask = tree.flatten_up_to(data), tree.flatten_up_to(mask)
    except (ValueError, TypeError) as e:
        raise value_error(
            "out", got="another tree", wanted=f"(data, mask) like {tree}", fix="Pass an earlier result."
        ) from e
    wanted = [((rows, w, *c.shape[3:]), c.dtype) for c, w in zip(leaves, plan.lengths, strict=True)]
    wanted += [((rows, w), np.dtype(bool)) for w in plan.lengths]
    arrays = data + mask
    for a, (shape, dtype) in zip(arrays, wanted, strict=True):
        if a.shape != shape or a.dtype != dtype:
            raise value_error(
                "out", got=f"{a.dtype}{list(a.shape)}", wanted=f"{dtype}{list(shape)}",
                fix="Pass the result of a call with the same batch size and windows, or leave it out.",
            )  # fmt: skip
    return arrays


def _call(plan: Plan):
    """The call for one plan, with its vmap rule."""

    @custom_vmap
    def rows(slots, starts, lengths, ticket, columns, after, out):
        return _ffi(plan, slots, starts, lengths, ticket, columns, after, out)

    @rows.def_vmap
    def _rule(size, batched, slots, starts, lengths, ticket, columns, after, out):
        del out  # the rows of all elements need memory of another shape
        ids_in = _registry.batch_all(size, (slots, starts, lengths), batched[:3])
        n = ids_in[0].shape[1]
        flat = [x.reshape(size * n) for x in ids_in]
        # One of the tickets carries on; the rest are waited for.
        first = ticket[0] if batched[3] else ticket
        kinds = batched[4]
        data: list[Any] = [None] * len(columns)
        masks: list[Any] = [None] * (0 if plan.rows else len(columns))
        for kind in sorted(set(kinds)):
            index = [i for i, k in enumerate(kinds) if k == kind]
            sub = _sub_plan(plan, index)
            cols = [columns[i] for i in index]
            slots_now = flat[0]
            if kind:  # tables become partitions: slot c of table v is slot v * C + c
                slots_now = _registry.fold_slots(ids_in[0], plan.slots).reshape(size * n)
                cols = [c.reshape(size * c.shape[1], *c.shape[2:]) for c in cols]
                sub = dataclasses.replace(sub, slots=size * plan.slots)
            got, got_masks, first = _call(sub)(slots_now, flat[1], flat[2], first, cols, [ticket, *after], [])
            for i, x in zip(index, got, strict=True):
                data[i] = x.reshape(size, n, *x.shape[1:])
            for i, x in zip(index, got_masks, strict=False):
                masks[i] = x.reshape(size, n, x.shape[1])
        result = data, masks, jnp.broadcast_to(first, (size, 1))
        return result, jax.tree.map(lambda _: True, result)

    return rows


def _sub_plan(plan: Plan, index: list[int]) -> Plan:
    names = ("offsets", "lengths", "anchored", "pads", "pad_values")
    return dataclasses.replace(plan, **{n: tuple(getattr(plan, n)[i] for i in index) for n in names})


def _ffi(plan: Plan, slots, starts, lengths, ticket, columns, after, out):
    n = slots.shape[0]
    results = [
        jax.ShapeDtypeStruct((n, *c.shape[2:]) if plan.rows else (n, w, *c.shape[3:]), c.dtype)
        for c, w in zip(columns, plan.lengths, strict=True)
    ]
    results += [] if plan.rows else [jax.ShapeDtypeStruct((n, w), jnp.bool_) for w in plan.lengths]
    results += [jax.ShapeDtypeStruct((1,), jnp.int32)]
    first_out = 4 + len(columns) + len(after)
    got = _registry.call(
        "gear_gather",
        results,
        [slots, starts, lengths, ticket, *columns, *after, *out],
        aliases={first_out + i: i for i in range(len(out))},
        slots=np.int64(plan.slots),
        steps=np.int64(plan.steps),
        offsets=np.asarray(plan.offsets, np.int64),
        lengths=np.asarray(plan.lengths, np.int64),
        anchored=np.asarray(plan.anchored, np.int64),
        pads=np.asarray(plan.pads, np.int64),
        pad_values=np.frombuffer(b"".join(plan.pad_values), np.int64),
        lead=np.int64(2 if plan.rows else 3),
        masks=not plan.rows,
        checks=plan.checks,
    )
    k = len(columns)
    return got[:k], got[k:-1], got[-1]
