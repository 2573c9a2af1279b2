"""`gather_start` and `gather_done`: a gather in two halves, between which a GPU does other work."""

import dataclasses
import itertools
import math
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from gear_jax import _native
from gear_jax._errors import type_error, value_error
from gear_jax._numbers import is_integer
from gear_jax.ops import _gather, _registry
from gear_jax.ops._addresses import Addresses
from gear_jax.ops._gather import Plan
from gear_jax.ops._pointers import Shards

MAX_DEPTH = 64
# Queues from here on are given out by `Queue`.
_FIRST_NEW_QUEUE = 1 << 16
# Thread blocks of a gather in flight: no more than fill the link, since other work runs beside it.
_BLOCKS = 8
_queues = itertools.count(_FIRST_NEW_QUEUE)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """A gather in flight: what `gather_start` returns and `gather_done` takes.

    A pytree with one small array, which jit, scan, cond, shard_map and pmap take like any other; the data itself is not
    in it. `jax.tree.map(jnp.zeros_like, pending)` is one of the same type that stands for nothing (`ok` is False).

    Attributes:
      handle: `int32[4]`, names the data to the library.
      tree: the structure of the columns, static.
      shapes: `(B, W, *shape)` of each column's data, static.
      dtypes: of each column, static.
      pad_values: of each column, as 16 bytes, static.
    """

    handle: jax.Array
    tree: Any = dataclasses.field(metadata={"static": True})
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})
    dtypes: tuple[np.dtype, ...] = dataclasses.field(metadata={"static": True})
    pad_values: tuple[bytes, ...] = dataclasses.field(metadata={"static": True})


def gather_start(
    columns: Any,
    slots: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    windows: Any = None,
    *,
    ticket: jax.Array | None = None,
    after: Any = (),
    queue: int = 0,
    depth: int = 2,
    order: bool | None = None,
    blocks: int | None = None,
) -> tuple[Pending, jax.Array]:
    """Begins a `gather`; `gather_done` ends it. On a GPU it runs beside whatever comes in between.

    The data waits in memory of the library's own (of the GPU, beside what XLA has), which a queue keeps for its next
    gathers. The queue holds `depth` of them and takes their places in turn: each start drops what the `depth`-th start
    before it has left there.

    XLA orders calls by data alone. Within one program it may begin the next gather before it ends the last one (give
    the start `after=` the results of the end, or a depth of one more), and it may end a gather right where it began
    (give the end `after=` the handle of the next start, or the results of the work beside it).

    The columns stay in use until the end: what `gear_jax.ops.scatter` writes to them waits for it, but XLA knows
    nothing of it. So they must be arguments of the program, or made from them by `scatter`; not computed in it, not
    changed in place by other means, and not freed before.

    Args:
      columns, slots, starts, lengths, windows: as in `gather`.
      ticket: `int32[1]` of an earlier read, which this one then follows; None for a new one. (Two starts that are the
        same in all arguments may be merged into one; a ticket that is handed on tells them apart.)
      after: pytree of arrays that must be there first; they are only waited for.
      queue: which queue, a static number in [0, 65536). Gathers that may be in flight at the same time, without an
        order between them, need queues of their own. Each device has its own queues.
      depth: how many gathers of the queue may be in flight, static, at most 64; the same in all calls of a queue.
      order, blocks: as in `gather`; 8 blocks for columns in host memory, since other work runs beside them.

    Returns:
      (pending, ticket): the gather in flight, and a ticket `int32[1]` that a write of the same columns takes.

    Raises:
      TypeError, ValueError: at trace time, for arguments that do not fit.
      JaxRuntimeError: when it runs, if there is no memory for the data.

    Transformations: jit, scan, cond, shard_map and pmap as usual; under vmap a ValueError. Not differentiable.
    """
    check_depth(depth)
    if not is_integer(queue) or not 0 <= queue < _FIRST_NEW_QUEUE:
        raise value_error(
            "queue", got=repr(queue), wanted=f"an integer in [0, {_FIRST_NEW_QUEUE})", fix="Leave it out."
        )
    return start_in_queue(
        columns, slots, starts, lengths, windows, ticket=ticket, after=after, queue=int(queue), depth=int(depth),
        order=order, blocks=blocks,
    )  # fmt: skip


def start_in_queue(
    columns, slots, starts, lengths, windows, *, ticket, after, queue: int, depth: int, order=None, blocks=None
) -> tuple[Pending, jax.Array]:
    """`gather_start` in any queue, those of `Queue` too; the queue and the depth are not checked."""
    _check_arrays(columns)
    arrays = [c for c in jax.tree.leaves(columns) if isinstance(c, jax.Array)]
    if blocks is None and any(map(_registry.in_host_memory, arrays)):
        blocks = _BLOCKS
    leaves, tree, rows, plan = _gather.prepare(columns, slots, starts, lengths, windows, order, blocks)
    rows = tuple(map(jnp.asarray, rows))
    n = rows[0].shape[0]
    shapes = tuple((n, w, *c.shape[3:]) for c, w in zip(leaves, plan.lengths, strict=True))
    dtypes = tuple(np.dtype(c.dtype) for c in leaves)
    total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    if total >= 2**60:
        raise value_error(
            "gather_start", got=f"a batch of {total} bytes", wanted="fewer than 2**60", fix="Use a smaller batch."
        )
    call = _start(plan, queue, depth)
    handle, last = call(*rows, _registry.ticket(ticket), leaves, jax.tree.leaves(after))
    return Pending(handle, tree, shapes, dtypes, plan.pad_values), last


def _check_arrays(columns) -> None:
    """A write waits for the gathers in flight of its column, and an address does not say what is in flight."""
    is_leaf = lambda x: isinstance(x, (Addresses, Shards))  # noqa: E731
    for i, c in enumerate(jax.tree.leaves(columns, is_leaf=is_leaf)):
        if is_leaf(c):
            raise type_error(
                f"gather_start: columns[{i}]", got=type(c).__name__, wanted="an array",
                fix="Pass the array itself, or use gear_jax.ops.gather.",
            )  # fmt: skip


def gather_done(pending: Pending, *, after: Any = ()) -> tuple[Any, Any, jax.Array]:
    """Ends a gather that `gather_start` has begun: waits for its data and hands it out.

    Args:
      pending: of `gather_start`, of the same device.
      after: pytree of arrays that must be there first; they are only waited for.

    Returns:
      (data, mask, ok): trees like the columns with leaves `[B, W, *shape]` and `bool[B, W]`, and `bool[1]`. `ok` is
      False, and all is padding, where the data is not there any more: `depth` later starts of the queue have run, or
      it has been handed out (within one program XLA may merge two such calls), or the handle is of another device or
      process.

    Raises:
      TypeError, ValueError: at trace time, if `pending` is not one gather in flight.

    Transformations: jit, scan, cond, shard_map and pmap as usual; under vmap a ValueError. Not differentiable.
    """
    if not isinstance(pending, Pending):
        raise type_error(
            "pending", got=type(pending).__name__, wanted="a Pending", fix="Pass what gather_start returned."
        )
    handle = pending.handle
    if handle.shape != (4,) or handle.dtype != jnp.int32:
        raise value_error(
            "pending.handle", got=f"{handle.dtype}{list(handle.shape)}", wanted="int32[4]",
            fix="Pass one gather at a time; handles that shard_map has joined go back through shard_map.",
        )  # fmt: skip
    got = _done(pending.shapes, pending.dtypes, pending.pad_values)(handle, jax.tree.leaves(after))
    k = len(pending.shapes)
    return pending.tree.unflatten(got[:k]), pending.tree.unflatten(got[k:-1]), got[-1]


def check_depth(depth: Any) -> int:
    """A depth: static, in [1, 64].

    Raises:
      ValueError: if it is anything else.
    """
    if not is_integer(depth) or not 1 <= depth <= MAX_DEPTH:
        raise value_error(
            "depth", got=repr(depth), wanted=f"an integer in [1, {MAX_DEPTH}]",
            fix="Pass the number of gathers that are in flight at once.",
        )  # fmt: skip
    return int(depth)


class Queue:
    """A queue that nobody else in this process has; given up when the object goes.

    Attributes:
      number: the same for the n-th object in every process, because it becomes part of the program.
    """

    def __init__(self):
        self.number = next(_queues)
        weakref.finalize(self, retire_queue, self.number).atexit = False

    def __reduce__(self):
        return Queue, ()  # a copy has a queue of its own


def release_queue(queue: int) -> None:
    """Frees the memory of a queue on all devices, after all that its gathers and other calls still do there.

    Gathers of the queue that are in flight are dropped: `gather_done` says that they are not `ok`. Wait for a call
    (`jax.block_until_ready`) that is under way and should not be. A later start takes new memory.

    Args:
      queue: as in `gather_start`.

    Raises:
      RuntimeError: if a GPU reports an error.
    """
    for module in _native.modules():
        module.release_queue(queue)


def retire_queue(queue: int) -> None:
    """Has the next start of another queue on each device free what the queue has there; it itself waits for nothing."""
    for module in _native.modules():
        module.retire_queue(queue)


def _no_vmap(what: str) -> ValueError:
    return value_error(
        f"ops.{what} under vmap", got="a batch of gathers", wanted="one, of all rows",
        fix="Fold the batch into the rows of one call (slots [V * B]) and reshape the data; or use ops.gather.",
    )  # fmt: skip


def _start(plan: Plan, queue: int, depth: int):
    """The start for one plan."""

    @custom_vmap
    def rows(slots, starts, lengths, ticket, columns, after):
        return tuple(
            _registry.call(
                "gear_gather_start_checked" if plan.checks else "gear_gather_start",
                [jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)],
                [slots, starts, lengths, ticket, *columns, *after],
                **_gather.attributes(plan, columns, slots.shape[0]),
                queue=np.int64(queue),
                depth=np.int64(depth),
            )
        )

    @rows.def_vmap
    def _rule(size, batched, *args):
        raise _no_vmap("gather_start")

    return rows


def _done(shapes, dtypes, pad_values):
    """The end for one kind of data."""

    @custom_vmap
    def copy(handle, after):
        results = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        results += [jax.ShapeDtypeStruct(s[:2], jnp.bool_) for s in shapes]
        return _registry.call(
            "gear_gather_done",
            [*results, jax.ShapeDtypeStruct((1,), jnp.bool_)],
            [handle, *after],
            pad_values=np.frombuffer(b"".join(pad_values), np.int64),
        )

    @copy.def_vmap
    def _rule(size, batched, *args):
        raise _no_vmap("gather_done")

    return copy
