"""`gather`: windows of trajectories out of column tables."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from gear_jax import _env
from gear_jax._errors import type_error, value_error
from gear_jax.ops import _addresses, _gather_engine, _registry
from gear_jax.ops._addresses import Addresses, Layout
from gear_jax.ops._pointers import Shards, shards_layout

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
    tables: int = 0  # how many dimensions of batches of tables come before [P, S]
    order: bool | None = None
    blocks: int | None = None
    layouts: tuple[Layout | None, ...] = ()  # of the columns that are given by address or in shards; (): none is
    copied: tuple[bool, ...] = ()  # which columns the copy engines take; (): kernels take all

    @property
    def lead(self) -> int:
        """The dimensions of a column before a step's own."""
        return self.tables + (2 if self.rows else 3)

    def layout(self, i: int) -> Layout | None:
        """That of column i, or None if it is an array."""
        return self.layouts[i] if self.layouts else None


def gather(
    columns: Any,
    slots: jax.Array | np.ndarray,
    starts: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    windows: Any = None,
    *,
    ticket: jax.Array | None = None,
    after: Any = (),
    out: Any = None,
    order: bool | None = None,
    blocks: int | None = None,
    engine: str = "auto",
) -> tuple[Any, Any, jax.Array]:
    """Reads windows of rows of column tables, with padding and masks, in one call.

    Element w of a window is step `start + offset + w` of its row; steps outside [0, length) are padding.

    Args:
      columns: pytree of arrays `[P, S, T, *shape]` of any dtypes of whole bytes, or of `Addresses` of such arrays
        (`gear_jax.external`), or of `Shards` that are such an array together (`pointers`), in any mixture. XLA does not
        know what is read by address or pointer: for a write to come before the read, pass `after=` what the write
        returned (`pointers` sees to it), and for one to come after it, pass it the ticket.
      slots: `int32[B]`, partition * S + slot in partition. A slot outside [0, P * S) gives a row of padding (an error
        with `GEAR_JAX_CHECKS=1`).
      starts: `int32[B]`, the step each row's windows are anchored at; any value.
      lengths: `int32[B]`, the steps each row holds; clipped to [0, T].
      windows: a tree like `columns` of `gear_jax.Window` or None, or one for all columns. None: all T steps.
      ticket: `int32[1]` of an earlier read, which this one then follows; None for a new one.
      after: pytree of arrays that must be there first; they are only waited for. An array that a later in-place write
        replaces, and that was read by something else than this call, belongs here (the reads' results, that is).
      out: None, or a pair (data, mask) of an earlier call with the same shapes, whose memory the results then take.
        They are consumed; donate them at the jit boundary, or XLA copies them first. Without effect under vmap, and
        where the copy engines are used.
      order: whether a GPU reads the rows in the order of their slots (each still lands in its own place): many small
        rows of a table of many GB are bound by the translation of their addresses otherwise. Takes 4 * B bytes while
        it runs. None: where that pays. Without effect on a CPU.
      blocks: thread blocks that the kernel takes on a GPU (of 512 threads, one a multiprocessor at most); what is left
        stays free for other work. None: 12 for columns in host memory, which fill a PCIe link, all for others.
      engine: what moves the data on a GPU: "kernel", or "copy": the copy engines, which take no multiprocessor. They
        need a call outside of programs, columns in `pinned_host`, slots, starts and lengths in NumPy, which the host
        can read, and a driver for CUDA 12.8. "auto": where that is so, large batches of large windows go by the copy
        engines, others by a kernel; else all by a kernel. `gear_jax.ops.stats()` says what was used. Static.

    Returns:
      (data, mask, ticket): trees like `columns` with leaves `[B, W, *shape]` and `bool[B, W]`, and a ticket `int32[1]`
      that a write of the same columns (`gear_jax.ops.scatter`) takes, so that XLA need not copy a column to keep this
      read's values.

    Raises:
      TypeError, ValueError: at trace time, for shapes, dtypes and windows that do not fit, for addresses of memory
        that is known to be gone, and for `engine="copy"` where it cannot be had (RuntimeError: for want of a driver;
        "auto" warns of that).
      JaxRuntimeError, ValueError: when it runs, for addresses of memory that is not there. A GPU's kernel cannot raise:
        all rows of that column are padding, and the next gather by address, or `gear_jax.external.check()`, raises
        (with `GEAR_JAX_CHECKS=1` this one does; a gather that XLA replays in a CUDA graph does not look, so check).

    Transformations: jit, scan, cond, shard_map and pmap as usual. Under vmap with unbatched columns the batch becomes
    rows; with batched columns the tables become partitions, and batched addresses are read one after another; a column
    is never broadcast. Not differentiable.
    """
    leaves, tree, rows, plan = prepare(columns, slots, starts, lengths, windows, order, blocks)
    n = rows[0].shape[0]
    outs = () if out is None else _recycled(out, leaves, tree, n, plan)
    ticket, after = _registry.ticket(ticket), jax.tree.leaves(after)
    sizes = [w * math.prod(c.shape[3:]) * c.dtype.itemsize for c, w in zip(leaves, plan.lengths, strict=True)]
    copied = _gather_engine.choose(engine, leaves, rows, sizes, (ticket, after, outs))
    if copied is None:
        data, masks, last = _call(plan)(*map(jnp.asarray, rows), ticket, _operands(leaves), after, list(outs))
    else:
        if any(copied):
            rows, outs, plan = _gather_engine.on_host(rows, leaves), (), dataclasses.replace(plan, copied=copied)
        data, masks, last = _outside(plan, *rows, ticket, _operands(leaves), after, list(outs))
        _gather_engine.record(copied, sizes, n)
    return tree.unflatten(data), tree.unflatten(masks), last


def prepare(columns: Any, slots, starts, lengths, windows: Any, order: bool | None, blocks: int | None):
    """Checks the arguments of `gather`: (columns as leaves, their tree, the rows where they are, the plan)."""
    given, tree = jax.tree.flatten(columns, is_leaf=lambda x: isinstance(x, (Addresses, Shards)))
    leaves: list[Any] = [c if isinstance(c, (Addresses, Shards)) else jnp.asarray(c) for c in given]
    layouts = _layouts(leaves)
    tables: list[Any] = [layout or c for layout, c in zip(layouts, leaves, strict=True)]
    rows, plan = prepare_rows(tables, tree, slots, starts, lengths, windows)
    plan = dataclasses.replace(plan, order=order, blocks=_registry.check_blocks(blocks), layouts=layouts)
    return leaves, tree, rows, plan


def prepare_rows(tables: list[Any], tree: Any, slots, starts, lengths, windows: Any):
    """The same of columns of which only shapes and dtypes matter: (the rows where they are, the plan)."""
    p, s, t = _registry.table_shape(tables)
    slots = _registry.where_they_are("slots", slots)
    starts = _registry.where_they_are("starts", starts, slots.shape)
    lengths = _registry.where_they_are("lengths", lengths, slots.shape)
    return (slots, starts, lengths), _plan(tables, tree, windows, p * s, t)


def _layouts(leaves) -> tuple[Layout | None, ...]:
    """Of the columns that are no arrays."""
    layouts = tuple(
        shards_layout(i, c) if isinstance(c, Shards) else _addresses.layout(c) for i, c in enumerate(leaves)
    )
    shards = sorted({x.shards for x in layouts if x is not None and x.shards})
    if len(shards) > 1:
        raise value_error(
            "columns", got=f"Shards of {shards}", wanted="the same number in each column",
            fix="Gather the columns of each table in a call of its own.",
        )  # fmt: skip
    return layouts


def _operands(leaves) -> list[jax.Array]:
    """What the handler gets for each column."""
    words = lambda i, c: jnp.asarray(c.pointers) if isinstance(c, Shards) else _addresses.words_of(i, c)  # noqa: E731
    return [words(i, c) if isinstance(c, (Addresses, Shards)) else c for i, c in enumerate(leaves)]


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
    none = _registry.not_given()  # starts and lengths, which rows without steps have not
    data, _, last = _call(plan)(slots, none, none, _registry.ticket(ticket), leaves, [], [])
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
        given = np.asarray(value)
        if given.ndim or given.dtype.kind not in "biufcV" or (given.dtype.kind == "c" and dtype.kind != "c"):
            raise ValueError
        with np.errstate(all="raise"):
            cell = given.astype(dtype)
        if cell != given if dtype.kind in "iub" else _became_another(given, cell):
            raise ValueError
    except (ValueError, TypeError, FloatingPointError, OverflowError):
        raise value_error(
            "Window.pad_value",
            got=repr(value),
            wanted=f"a scalar of {dtype}",
            fix="Give a value that the column can hold.",
        ) from None
    return cell.tobytes().ljust(16, b"\0")


def _became_another(given: np.ndarray, cell: np.ndarray) -> bool:
    """Whether a number is none any more, or infinite: casts to the small floats of ml_dtypes do not say so. 0, which is
    what padding is by default, may be anything: one of them has none."""
    given, cell = given.astype(np.complex128), cell.astype(np.complex128)
    return bool(given != 0) and bool(np.isnan(cell) != np.isnan(given) or np.isinf(cell) != np.isinf(given))


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
        flat = [x.reshape(-1) for x in ids_in]
        # One of the tickets carries on; the rest are waited for.
        first = ticket[0] if batched[3] else ticket
        # Batched addresses name tables that cannot be made one: a kind of their own.
        kinds = [int(b) + int(b and plan.layout(i) is not None) for i, b in enumerate(batched[4])]
        data: list[Any] = [None] * len(columns)
        masks: list[Any] = [None] * (0 if plan.rows else len(columns))
        for kind in sorted(set(kinds)):
            index = [i for i, k in enumerate(kinds) if k == kind]
            sub = _sub_plan(plan, index)
            cols = [columns[i] for i in index]
            if kind == 2:
                got, got_masks, first = _one_by_one(sub, ids_in, cols, first, [ticket, *after])
                for i, x in zip(index, got, strict=True):
                    data[i] = x
                for i, x in zip(index, got_masks, strict=False):
                    masks[i] = x
                continue
            slots_now = flat[0]
            if kind:  # tables become partitions: slot c of table v is slot v * C + c
                # As they are, not reshaped: in host memory nothing but our own calls may touch them.
                slots_now = _registry.fold_slots(ids_in[0], plan.slots).reshape(size * n)
                sub = dataclasses.replace(sub, slots=size * plan.slots, tables=plan.tables + 1)
            got, got_masks, first = _call(sub)(slots_now, flat[1], flat[2], first, cols, [ticket, *after], [])
            for i, x in zip(index, got, strict=True):
                data[i] = x.reshape(size, n, *x.shape[1:])
            for i, x in zip(index, got_masks, strict=False):
                masks[i] = x.reshape(size, n, x.shape[1])
        result = data, masks, jnp.broadcast_to(first, (size, 1))
        return result, jax.tree.map(lambda _: True, result)

    return rows


def _one_by_one(plan: Plan, rows, columns, ticket, after):
    """A batch of calls with addresses of their own: data, masks, and the last call's ticket."""
    call = lambda x: _call(plan)(*x[0], ticket, x[1], after, [])  # noqa: E731
    data, masks, tickets = jax.lax.map(call, (tuple(rows), columns))
    return data, masks, tickets[-1] if tickets.shape[0] else ticket


def _sub_plan(plan: Plan, index: list[int]) -> Plan:
    names = ("offsets", "lengths", "anchored", "pads", "pad_values") + (("layouts",) if plan.layouts else ())
    return dataclasses.replace(plan, **{n: tuple(getattr(plan, n)[i] for i in index) for n in names})


@functools.partial(jax.jit, static_argnums=0)
def _outside(plan: Plan, slots, starts, lengths, ticket, columns, after, out):
    """A call outside of programs: one that is compiled once."""
    return _ffi(plan, slots, starts, lengths, ticket, columns, after, out)


def _ffi(plan: Plan, slots, starts, lengths, ticket, columns, after, out):
    n = slots.shape[0]
    tables = [plan.layout(i) or c for i, c in enumerate(columns)]
    results = [
        jax.ShapeDtypeStruct((n, *([] if plan.rows else [w]), *c.shape[plan.lead :]), c.dtype)
        for c, w in zip(tables, plan.lengths, strict=True)
    ]
    results += [] if plan.rows else [jax.ShapeDtypeStruct((n, w), jnp.bool_) for w in plan.lengths]
    results += [jax.ShapeDtypeStruct((1,), jnp.int32)]
    given = attributes(plan, columns, n)
    results += [jax.ShapeDtypeStruct((n + _ORDER_SCRATCH,), jnp.int32)] if given["ordered"] else []
    if plan.copied:
        given["copied"] = np.asarray(plan.copied, np.int64)
    else:
        layouts = [plan.layout(i) for i in range(len(columns))]
        given["addresses"] = np.asarray([_numbers(x) for x in layouts], np.int64).reshape(-1)
        given["shards"] = np.asarray([x.shards if x else 0 for x in layouts], np.int64)
    first_out = 4 + len(columns) + len(after)
    got = _registry.call(
        ("gear_gather_engine" if plan.copied else "gear_gather") + ("_checked" if plan.checks else ""),
        results,
        [slots, starts, lengths, ticket, *columns, *after, *out],
        aliases={first_out + i: i for i in range(len(out))},
        **given,
    )
    k = len(columns)
    last = k + (0 if plan.rows else k)
    return got[:k], got[k:last], got[last]


def _numbers(layout: Layout | None) -> tuple[int, int, int]:
    """What the handler is told of a column's layout (`GatherAttributes::addresses`)."""
    if layout is None:
        return -1, 1, 1
    width = layout.dtype.itemsize
    return width * math.prod(layout.shape[3:]), width, layout.alignment


def attributes(plan: Plan, columns, rows: int) -> dict[str, Any]:
    """The attributes of the handler for a plan (ffi/gather_call.h)."""
    by_address = any(plan.layouts)
    blocks = _registry.HOST_BLOCKS if plan.blocks is None and by_address else _registry.blocks(plan.blocks, columns)
    return {
        "slots": np.int64(plan.slots),
        "steps": np.int64(plan.steps),
        "offsets": np.asarray(plan.offsets, np.int64),
        "lengths": np.asarray(plan.lengths, np.int64),
        "anchored": np.asarray(plan.anchored, np.int64),
        "pads": np.asarray(plan.pads, np.int64),
        "pad_values": np.frombuffer(b"".join(plan.pad_values), np.int64),
        "lead": np.int64(plan.lead),
        "masks": not plan.rows,
        "ordered": _order_pays(plan, columns, rows) if plan.order is None else plan.order,
        "blocks": np.int64(blocks),
    }


# Where the rows' order costs more than it saves (docs/benchmarks): few rows; rows of several pages' worth of requests;
# a table that the translation caches of the GPU cover.
_ORDER_SCRATCH = (1 << 14) + 3  # as in ffi/gather.h
_ORDER_ROWS = 4096
_ORDER_ROW_BYTES = 4096
_ORDER_TABLE_BYTES = 1 << 30


def _order_pays(plan: Plan, columns, rows: int) -> bool:
    if rows < _ORDER_ROWS:
        return False
    for i, (c, w) in enumerate(zip(columns, plan.lengths, strict=True)):
        if plan.copied and plan.copied[i]:
            continue
        in_host, c = plan.layout(i) is not None or _registry.in_host_memory(c), plan.layout(i) or c
        table_bytes = c.size * c.dtype.itemsize
        row_bytes = w * (table_bytes // max(1, plan.slots * plan.steps))
        if in_host and table_bytes >= _ORDER_TABLE_BYTES and 0 < row_bytes < _ORDER_ROW_BYTES:
            return True
    return False
