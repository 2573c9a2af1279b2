"""`rdma_read`, `rdma_fetch`: tables of other processes, read by one-sided reads.

A session (`gear_jax.transport`) exposes arrays of each process of a job, as numbered regions, and reads those of the
others. The ops find it by its number, which is part of the program, and which is why it is the same in all processes.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from gear_jax import _env, _native
from gear_jax._errors import type_error, value_error
from gear_jax._numbers import is_integer
from gear_jax.ops import _gather, _place, _registry
from gear_jax.ops._addresses import Addresses
from gear_jax.ops._gather import Plan
from gear_jax.ops._gather_start import Pending, check_depth
from gear_jax.ops._pointers import Shards

ON_LOSS = ("invalid", "error")


@dataclasses.dataclass(frozen=True)
class Remote:
    """Where the parts of a table, its shards, are exposed. Static: it becomes part of the program.

    Attributes:
      session: the session's number.
      peers: of each shard, the process that has it.
      regions: of each shard, the number of its first region there: one for each array, in the order of the leaves.
      on_loss: what a peer that does not answer within the session's deadline means: "invalid" rows, or an "error". On a
        GPU a call that meets a loss has returned by then, with rows that are not valid: the error is that of the first
        call with "error" that is dispatched when the loss is known, and of each one as long as the peer is gone.
    """

    session: int
    peers: tuple[int, ...]
    regions: tuple[int, ...]
    on_loss: str = "invalid"

    def __post_init__(self):
        if len(self.peers) != len(self.regions) or not self.peers:
            raise value_error(
                "Remote.regions", got=f"{len(self.regions)} for {len(self.peers)} shards", wanted="one for each shard",
                fix="Give the first region of each shard, and at least one shard.",
            )  # fmt: skip
        if self.on_loss not in ON_LOSS:
            raise value_error("on_loss", got=repr(self.on_loss), wanted=f"one of {ON_LOSS}", fix="Leave it out.")

    def attributes(self) -> dict[str, Any]:
        """Those of the handlers (ffi/rdma_operands.h)."""
        return {
            "session": np.int64(self.session),
            "peers": np.asarray(self.peers, np.int64),
            "regions": np.asarray(self.regions, np.int64),
            "error_on_loss": self.on_loss == "error",
        }


def rdma_read(
    remote: Remote, fields: Any, *, ticket: jax.Array | None = None, after: Any = ()
) -> tuple[Any, jax.Array, jax.Array]:
    """Reads whole arrays of all shards of a job: small ones, such as what is known of each row.

    The processes that are read take no part. An array may change while it is read: what must not be torn needs a check
    of its own in each row.

    Args:
      remote: where they are.
      fields: pytree of this device's own arrays, of the same shapes and dtypes as every other shard's; exposed as
        they are. On a GPU in `pinned_host`. Or of `jax.ShapeDtypeStruct`s, as in `rdma_fetch`.
      ticket: `int32[1]` of the last read.
      after: pytree of arrays that must be there first.

    Returns:
      (fields, here, ticket): leaves `[n, *shape]` for n shards, and `bool[n]`: False where a shard could not be read,
      and is zeros. The session's deadline holds; a peer known to be lost is not asked.

    Raises:
      ValueError: at trace time, for arrays in a GPU's memory.
      JaxRuntimeError: when it runs: for a number without a session, arrays that are not those exposed, shards of
        another size, a session closed meanwhile; for a lost peer with `on_loss="error"`.

    Transformations: jit, scan, cond, shard_map and pmap as usual (on a GPU pmap takes no arrays in `pinned_host`: pass
    `jax.ShapeDtypeStruct`s). Under vmap the arrays must not be batched, and are read once. Not differentiable.
    """
    _check_remote("rdma_read", remote)
    leaves, tree = jax.tree.flatten(fields)
    specs = _specs("rdma_read", {f"fields[{i}]": x for i, x in enumerate(leaves)})
    given = [] if _exposed(leaves) else leaves
    _check_memory("rdma_read", {f"fields[{i}]": x for i, x in enumerate(given)})
    got, here, last = _read(remote, specs)(_registry.ticket(ticket), given, jax.tree.leaves(after))
    return tree.unflatten(got), here, last


def rdma_fetch(
    remote: Remote,
    columns: Any,
    stamp: jax.Array,
    shards: jax.Array,
    slots: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    windows: Any = None,
    generations: jax.Array | None = None,
    *,
    tries: int = 8,
    ticket: jax.Array | None = None,
    after: Any = (),
) -> tuple[Any, Any, jax.Array, jax.Array]:
    """Reads windows of rows of the tables of all shards of a job, with padding and masks, as `gather` does of one.

    Rows of this process are gathered where they lie, without a copy between, while the others travel, of which only
    the steps that the windows show are read. The processes that are read take no part. A row's stamp, which
    `scatter(stamps=)` keeps, is read before its bytes and after: bytes that changed meanwhile are never handed out.

    Args:
      remote: where the shards are: each exposes the leaves of `columns`, then the stamp.
      columns: pytree of this device's own arrays `[P, S, T, *shape]`; exposed as they are, and of the same shapes and
        dtypes as every other shard's. On a GPU in `pinned_host`, and so is the stamp. Or, where a program cannot take
        them as arguments, of `jax.ShapeDtypeStruct`s, all of them and the stamp: what this process exposes is read
        then, and `ticket` and `after` alone say which writes come before. Nothing checks then that the arrays have
        stayed where they are exposed.
      stamp: `uint32[P, S]`, this device's own.
      shards: `int32[B]`, the shard of each row.
      slots: `int32[B]`, partition * S + slot in partition, in that shard. A row with a shard or slot outside is
        padding and not valid (an error with `GEAR_JAX_CHECKS=1`, but for -1).
      starts, lengths, windows: as in `gather`.
      generations: `uint32[B]`, which trajectory of the slot is meant: a row is valid if its stamp is twice that, before
        and after. None: whichever is there, if it is whole.
      tries: how often a row is read that is being written and may still become what is wanted; static, at least 1.
      ticket, after: as in `gather`.

    Returns:
      (data, mask, valid, ticket): trees like `columns` with leaves `[B, W, *shape]` and `bool[B, W]`, `bool[B]`, and a
      ticket for a write of the same columns. A row that is not valid (overwritten, torn, or of a peer that is lost or
      did not answer within the session's deadline) is padding throughout. `rdma_counters` tells them apart.

    Raises:
      TypeError, ValueError: at trace time, for what does not fit, and for tables in a GPU's memory.
      JaxRuntimeError: when it runs, as `rdma_read`.

    Transformations: jit, scan, cond, shard_map and pmap as usual (on a GPU pmap takes no arrays in `pinned_host`: pass
    `jax.ShapeDtypeStruct`s). Under vmap columns must not be batched; the batch becomes rows. Not differentiable.
    """
    _check_remote("rdma_fetch", remote)
    tables, specs, tree, rows, plan = _prepare(
        "rdma_fetch", columns, stamp, shards, slots, starts, lengths, windows, generations
    )
    call = _fetch(remote, plan, specs, generations is None, _check_tries(tries))
    data, masks, valid, last = call(rows, _registry.ticket(ticket), tables, jax.tree.leaves(after))
    return tree.unflatten(data), tree.unflatten(masks), valid, last


def rdma_fetch_start(
    remote: Remote,
    columns: Any,
    stamp: jax.Array,
    shards: jax.Array,
    slots: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    windows: Any = None,
    generations: jax.Array | None = None,
    *,
    tries: int = 8,
    ticket: jax.Array | None = None,
    after: Any = (),
    queue: int = 0,
    depth: int = 2,
) -> tuple[Pending, jax.Array]:
    """Begins an `rdma_fetch`; `rdma_fetch_done` ends it. Rows travel while whatever comes in between runs.

    The rows of this device are read at once, and a later write of the columns waits for that, not for what travels.

    Args:
      remote, ..., after: as in `rdma_fetch`.
      queue, depth: as in `gather_start`. A fetch that is dropped goes on to its end, which the deadline bounds; on a
        GPU the stream waits for that, so give a queue the depth that it needs.

    Returns:
      (pending, ticket): the fetch in flight, and a ticket `int32[1]` that a write of the same columns takes.

    Raises:
      As `rdma_fetch`; what goes wrong on the way is raised by `rdma_fetch_done` (on a GPU as `Remote` says).

    Transformations: as `rdma_fetch`, but under vmap a ValueError.
    """
    _check_remote("rdma_fetch_start", remote)
    depth = check_depth(depth)
    tables, specs, tree, rows, plan = _prepare(
        "rdma_fetch_start", columns, stamp, shards, slots, starts, lengths, windows, generations
    )
    call = _start(remote, plan, specs, generations is None, _check_tries(tries), int(queue), depth)
    handle, last = call(rows, _registry.ticket(ticket), tables, jax.tree.leaves(after))
    n = rows[0].shape[0]
    shapes = tuple((n, w, *spec.shape[3:]) for spec, w in zip(specs, plan.lengths, strict=True))
    return Pending(handle, tree, shapes, tuple(np.dtype(spec.dtype) for spec in specs), plan.pad_values), last


def rdma_fetch_done(pending: Pending, *, after: Any = ()) -> tuple[Any, Any, jax.Array, jax.Array]:
    """Ends a fetch that `rdma_fetch_start` has begun: waits for its rows and hands them out.

    Args:
      pending: of `rdma_fetch_start`, of the same device.
      after: pytree of arrays that must be there first.

    Returns:
      (data, mask, valid, ok): as of `rdma_fetch`, and `bool[1]`: False, and all is padding, where the fetch is not
      there any more, as in `gather_done`.

    Raises:
      TypeError, ValueError: at trace time, if `pending` is not one fetch in flight.
      JaxRuntimeError: when it runs, as `rdma_fetch`; on a GPU never: what is lost, or cut short by the end of the
        session, is not valid.

    Transformations: jit, scan, cond, shard_map and pmap as usual; under vmap a ValueError. Not differentiable.
    """
    if not isinstance(pending, Pending) or pending.handle.shape != (4,):
        raise type_error(
            "pending", got=type(pending).__name__, wanted="one Pending", fix="Pass what rdma_fetch_start returned."
        )
    got = _done(pending.shapes, pending.dtypes, pending.pad_values)(pending.handle, jax.tree.leaves(after))
    k = len(pending.shapes)
    return pending.tree.unflatten(got[:k]), pending.tree.unflatten(got[k : 2 * k]), got[2 * k], got[2 * k + 1]


def rdma_counters(session: int) -> dict[str, int]:
    """What has become of the rows fetched through a session of this process, since it started.

    `rows` asked for, `remote_rows` of other processes among them, `retries`; and of the rows that were not valid:
    `torn` (being written until the last try), `stale` (overwritten), `lost_rows`, `refused_rows`.
    """
    counters = {}
    for module in _native.modules():
        if hasattr(module, "rdma_counters"):
            counters = module.rdma_counters(int(session))
    return counters


def _check_remote(what: str, remote: Any) -> None:
    if not isinstance(remote, Remote):
        fix = "Write ops.Remote(session.number, ...)."
        raise type_error(f"{what}: remote", got=type(remote).__name__, wanted="a Remote", fix=fix)


def _check_memory(what: str, arrays: dict[str, Any]) -> None:
    """Raises a ValueError for arrays that other processes cannot read: those in a GPU's memory."""
    if _place.default_device().platform == "cpu":
        return
    for name, x in arrays.items():
        if isinstance(x, jax.Array) and not _registry.in_host_memory(x):
            raise value_error(
                f"{what}: {name}", got="an array in the GPU's memory", wanted="one in pinned_host",
                fix="Make it with gear_jax.ops.zeros(shape, dtype, 'pinned_host'), or move it by jax.device_put.",
            )  # fmt: skip


def _check_tries(tries: Any) -> int:
    if not is_integer(tries) or not 1 <= tries <= 1 << 20:
        raise value_error("tries", got=repr(tries), wanted="an integer in [1, 2**20]", fix="Leave it out.")
    return int(tries)


def _exposed(leaves: list[Any]) -> bool:
    """Whether arguments stand for what the session exposes."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)


def _specs(what: str, named: dict[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of arrays, or of what stands for them all."""
    leaves = list(named.values())
    exposed = _exposed(leaves)
    for name, x in named.items():
        if not isinstance(x, jax.ShapeDtypeStruct) if exposed else isinstance(x, (Addresses, Shards)):
            wanted = "a jax.ShapeDtypeStruct, as others are" if exposed else "an array, or a jax.ShapeDtypeStruct"
            fix = "Pass arrays, or jax.ShapeDtypeStruct(x.shape, x.dtype) for all of them and the stamp."
            raise type_error(f"{what}: {name}", got=type(x).__name__, wanted=wanted, fix=fix)
    arrays = [x if exposed else jnp.asarray(x) for x in leaves]
    return tuple(jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in arrays)


def _prepare(what, columns, stamp, shards, slots, starts, lengths, windows, generations):
    """The arguments, checked: (columns and stamp or nothing, what columns are, their tree, rows, the plan)."""
    leaves, tree = jax.tree.flatten(columns, is_leaf=lambda x: isinstance(x, (Addresses, Shards)))
    named = {**{f"columns[{i}]": x for i, x in enumerate(leaves)}, "stamp": stamp}
    *specs, of_stamp = _specs(what, named)
    rows, plan = _gather.prepare_rows(specs, tree, slots, starts, lengths, windows)
    slots, starts, lengths = map(jnp.asarray, rows)
    shards = _registry.ids("shards", shards, slots.shape)
    if (of_stamp.shape, of_stamp.dtype) != (specs[0].shape[:2], jnp.uint32):
        raise value_error(
            "stamp", got=f"{of_stamp.dtype}{list(of_stamp.shape)}", wanted=f"uint32{list(specs[0].shape[:2])}",
            fix="Pass the stamp that scatter(stamps=) returns.",
        )  # fmt: skip
    tables = [] if _exposed(leaves) else [jnp.asarray(x) for x in named.values()]
    _check_memory(what, dict(zip(named, tables, strict=False)))
    if generations is None:
        generations = jnp.zeros_like(slots).astype(jnp.uint32)
    generations = jnp.asarray(generations)
    if (generations.shape, generations.dtype) != (slots.shape, jnp.uint32):
        raise value_error(
            "generations", got=f"{generations.dtype}{list(generations.shape)}", wanted=f"uint32{list(slots.shape)}",
            fix="Give one for each row, or None.",
        )  # fmt: skip
    return tables, tuple(specs), tree, (slots, starts, lengths, shards, generations), plan


def _no_vmap(what: str, got: str, fix: str) -> ValueError:
    return value_error(f"ops.{what} under vmap", got=got, wanted="one", fix=fix)


def _read(remote: Remote, specs: tuple[jax.ShapeDtypeStruct, ...]):
    """The call for one session, with its vmap rule."""
    n = len(remote.peers)

    @custom_vmap
    def call(ticket, fields, after):
        results: list[Any] = [jax.ShapeDtypeStruct((n, *x.shape), x.dtype) for x in specs]
        results += [jax.ShapeDtypeStruct((n,), jnp.bool_), jax.ShapeDtypeStruct((1,), jnp.int32)]
        got = _registry.call(
            "gear_rdma_read", results, [*fields, ticket, *after],
            fields=np.int64(len(specs)), exposed=len(fields) < len(specs), **remote.attributes(),
        )  # fmt: skip
        return got[:-2], got[-2], got[-1]

    @call.def_vmap
    def _rule(size, batched, ticket, fields, after):
        if any(batched[1]):
            raise _no_vmap("rdma_read", "batched arrays", "Expose the batch as one array.")
        first = ticket[0] if batched[0] else ticket
        got = call(first, fields, [ticket, *after])
        everywhere = jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), got)
        return everywhere, jax.tree.map(lambda _: True, everywhere)

    return call


def _attributes(remote: Remote, plan: Plan, specs, tables, any_generation: bool, tries: int) -> dict[str, Any]:
    given = _gather.attributes(plan, specs, 0)
    # Where there are no operands these say what a column is (ffi/gather_call.h).
    layouts = [] if tables else [[math.prod(x.shape[3:]) * x.dtype.itemsize, x.dtype.itemsize] for x in specs]
    names = ("slots", "steps", "offsets", "lengths", "anchored", "pads", "pad_values", "lead")
    return {
        **{name: given[name] for name in names}, **remote.attributes(),
        "layouts": np.asarray(layouts, np.int64).reshape(-1),
        "tries": np.int64(tries), "any": any_generation, "checks": _env.checks(),
    }  # fmt: skip


def _operands(rows, ticket, tables, after):
    slots, starts, lengths, shards, generations = rows
    return [slots, starts, lengths, ticket, *tables, shards, generations, *after]


def _fetch(remote: Remote, plan: Plan, specs, any_generation: bool, tries: int):
    """The call for one plan, with its vmap rule. `tables`: columns and stamp, or nothing."""

    @custom_vmap
    def call(rows, ticket, tables, after):
        n, k = rows[0].shape[0], len(specs)
        results: list[Any] = [
            jax.ShapeDtypeStruct((n, w, *c.shape[3:]), c.dtype) for c, w in zip(specs, plan.lengths, strict=True)
        ]
        results += [jax.ShapeDtypeStruct((n, w), jnp.bool_) for w in plan.lengths]
        results += [jax.ShapeDtypeStruct((n,), jnp.bool_), jax.ShapeDtypeStruct((1,), jnp.int32)]
        got = _registry.call(
            "gear_rdma_fetch", results, _operands(rows, ticket, tables, after),
            **_attributes(remote, plan, specs, tables, any_generation, tries),
        )  # fmt: skip
        return got[:k], got[k : 2 * k], got[-2], got[-1]

    @call.def_vmap
    def _rule(size, batched, rows, ticket, tables, after):
        if any(batched[2]):
            fix = "Expose the batch as partitions of one table, and fold it into the rows of one call."
            raise _no_vmap("rdma_fetch", "batched columns", fix)
        n = rows[0].shape[1 if batched[0][0] else 0]
        flat = tuple(x.reshape(size * n) for x in _registry.batch_all(size, rows, batched[0]))
        first = ticket[0] if batched[1] else ticket
        data, masks, valid, last = call(flat, first, tables, [ticket, *after])
        unfold = lambda x: x.reshape(size, n, *x.shape[1:])  # noqa: E731
        got = (*jax.tree.map(unfold, (data, masks, valid)), jnp.broadcast_to(last, (size, 1)))
        return got, jax.tree.map(lambda _: True, got)

    return call


def _start(remote: Remote, plan: Plan, specs, any_generation: bool, tries: int, queue: int, depth: int):
    @custom_vmap
    def call(rows, ticket, tables, after):
        return tuple(
            _registry.call(
                "gear_rdma_fetch_start",
                [jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)],
                _operands(rows, ticket, tables, after),
                **_attributes(remote, plan, specs, tables, any_generation, tries),
                queue=np.int64(queue), depth=np.int64(depth),
            )
        )  # fmt: skip

    @call.def_vmap
    def _rule(size, batched, *args):
        raise _no_vmap("rdma_fetch_start", "a batch of fetches", "Fold the batch into the rows of one call.")

    return call


def _done(shapes, dtypes, pad_values):
    @custom_vmap
    def call(handle, after):
        results = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        results += [jax.ShapeDtypeStruct(s[:2], jnp.bool_) for s in shapes]
        results += [jax.ShapeDtypeStruct((shapes[0][0],), jnp.bool_), jax.ShapeDtypeStruct((1,), jnp.bool_)]
        pads = np.frombuffer(b"".join(pad_values), np.int64)
        return _registry.call("gear_rdma_fetch_done", results, [handle, *after], pad_values=pads)

    @call.def_vmap
    def _rule(size, batched, *args):
        raise _no_vmap("rdma_fetch_done", "a batch of fetches", "Fold the batch into the rows of one call.")

    return call
