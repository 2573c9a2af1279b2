"""`scatter`: steps written into rows of column tables, in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from gear_jax import _env
from gear_jax._errors import type_error, value_error
from gear_jax.ops import _registry


def scatter(
    columns: Any,
    slots: jax.Array,
    values: Any,
    lengths: jax.Array | None = None,
    starts: jax.Array | None = None,
    *,
    rows: jax.Array | None = None,
    stamps: tuple[jax.Array, jax.Array] | None = None,
    ticket: jax.Array | None = None,
    blocks: int | None = None,
) -> Any:
    """Writes rows of steps into column tables, in place, in one call.

    Row a writes its first `lengths[a]` steps to steps `[starts[a], starts[a] + lengths[a])` of slot `slots[a]`. It
    costs the bytes written, not the table's size, where the columns are donated.

    Args:
      columns: pytree of arrays `[P, S, T, *shape]`. The results take their memory: donate them at the jit boundary (or
        carry them through scan), or XLA copies them first.
      slots: `int32[A]`, partition * S + slot in partition. A slot outside [0, P * S) is skipped (with
        `GEAR_JAX_CHECKS=1` only -1 may be; any other is an error).
      values: a tree like `columns` with leaves `[A, T', *shape]` of the columns' dtypes, T' <= T; `[R, T', *shape]`
        with `rows`.
      lengths: `int32[A]`; None: T'. What reaches beyond T' or T is cut off.
      starts: `int32[A]`; None: 0.
      rows: `int32[A]`, the row of `values` that each row writes, so that they are copied once, from where they lie. A
        row that names one outside [0, R) is skipped (an error with `GEAR_JAX_CHECKS=1`). None: row a writes row a.
      stamps: (stamp, value), `uint32[P, S]` and `uint32[A]`: a seqlock over the slots for readers in other processes,
        which ask nobody (`rdma_fetch`). Before the first byte of a row is written `stamp[slot]` becomes odd, and after
        the last one it is the row's value; an odd value leaves the slot open. Rows of one slot have one value. The
        stamp is written in place, as the columns are: donate it. Rows that are skipped leave it; rows of no steps do
        not. It lies in the kind of memory that all columns lie in.
      ticket: `int32[1]` of the last read of these columns. Without it XLA copies a whole column to keep the values of
        a read in the same program (design: reads return a ticket, writes take it).
      blocks: as in `gather`.

    Returns:
      The columns after the write; with `stamps` (columns, stamp). Rows that overlap leave either of their values.

    Raises:
      TypeError, ValueError: at trace time, for shapes and dtypes that do not fit.

    Transformations: jit, scan, cond, shard_map and pmap as usual. Under vmap columns and stamp must be batched (tables
    become partitions); values batched over one shared table raise a ValueError. Not differentiable.
    """
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, columns))
    p, s, t = _registry.table_shape(leaves)
    try:
        given = [jnp.asarray(v) for v in tree.flatten_up_to(values)]
    except (ValueError, TypeError) as e:
        raise value_error(
            "values",
            got=jax.tree.structure(values),
            wanted=f"a tree like the columns, {tree}",
            fix="Give every column.",
        ) from e
    slots = _registry.ids("slots", slots)
    value_rows = given[0].shape[0] if rows is not None and given[0].ndim else slots.shape[0]
    _check(leaves, given, value_rows, t)
    picks = [] if rows is None else [_registry.ids("rows", rows, slots.shape)]
    stamped = [] if stamps is None else _check_stamps(stamps, leaves, slots.shape)
    starts = _registry.not_given() if starts is None else _registry.ids("starts", starts, slots.shape)
    lengths = _registry.not_given() if lengths is None else _registry.ids("lengths", lengths, slots.shape)
    ticket = _registry.ticket(ticket)
    call = _call(p * s, t, _env.checks(), _registry.check_blocks(blocks))
    written, stamp = _by_memory(call, slots, starts, lengths, ticket, leaves, given, picks, stamped)
    return tree.unflatten(written) if stamps is None else (tree.unflatten(written), *stamp)


def scatter_rows(
    fields: Any, slots: jax.Array, values: Any, *, ticket: jax.Array | None = None, in_flight: bool = True
) -> Any:
    """Writes one entry to each of `slots` of arrays without steps, in place, as `scatter` does with columns.

    Args:
      fields: pytree of arrays `[P, S, *shape]`.
      slots: `int32[A]`; a slot outside [0, P * S) is skipped; none may come twice.
      values: a tree like `fields` with leaves `[A, *shape]` of the same dtypes.
      ticket: `int32[1]` of the last read.
      in_flight: whether a `gather_start` may be reading the arrays, so that the write waits; False saves a launch.

    Returns:
      The arrays after the write. Transformations as `scatter`.
    """
    leaves, tree = jax.tree.flatten(fields)
    p, s = _registry.rows_shape(leaves)
    slots = _registry.ids("slots", slots)
    rows = tree.flatten_up_to(values)
    for i, (f, v) in enumerate(zip(leaves, rows, strict=True)):
        if (v.shape, v.dtype) != ((slots.shape[0], *f.shape[2:]), f.dtype):
            wanted = f"{f.dtype}{[slots.shape[0], *f.shape[2:]]}"
            raise value_error(
                f"values[{i}]", got=f"{v.dtype}{list(v.shape)}", wanted=wanted, fix="Give one entry for each slot."
            )
    call, none = _call(p * s, 1, False, in_flight=in_flight), _registry.not_given()
    return tree.unflatten(_by_memory(call, slots, none, none, _registry.ticket(ticket), leaves, rows)[0])


def seal(columns: Any, ticket: jax.Array) -> Any:
    """The columns, after the reads that the ticket stands for: a write of no rows.

    For the end of a branch of `lax.cond` that reads, writes and reads again: XLA otherwise copies its columns. (It also
    copies them where the branch for False writes, and no seal helps there on JAX 0.10; see `gear_jax.Replay`.) As any
    write it needs the columns donated.

    Args:
      columns: pytree of arrays `[P, S, *shape]`, with steps or without.
      ticket: `int32[1]` of the last read.
    """
    no_rows = jax.tree.map(lambda x: jnp.zeros((0, *x.shape[2:]), x.dtype), columns)
    return scatter_rows(columns, jnp.zeros((0,), jnp.int32), no_rows, ticket=ticket)


def _check(columns, values, rows: int, steps: int) -> None:
    value_steps = values[0].shape[1] if values[0].ndim > 1 else 0
    for i, (c, v) in enumerate(zip(columns, values, strict=True)):
        wanted = (rows, value_steps, *c.shape[3:])
        if v.shape != wanted:
            raise value_error(
                f"values[{i}]", got=f"shape {v.shape}", wanted=f"[A, T', *shape] = {wanted}",
                fix="Give every column the same rows and steps.",
            )  # fmt: skip
        if v.dtype != c.dtype:
            raise type_error(
                f"values[{i}]", got=f"dtype {v.dtype}", wanted=f"{c.dtype}", fix=f"Pass it .astype({c.dtype})."
            )
    if value_steps > steps:
        raise value_error("values", got=f"T' = {value_steps} steps", wanted=f"at most T = {steps}", fix="Cut the rows.")


def _check_stamps(stamps, columns, shape: tuple[int, ...]) -> list[jax.Array]:
    stamp, value = map(jnp.asarray, stamps)
    wanted = ("stamp", stamp, columns[0].shape[:2]), ("value", value, shape)
    for name, x, wanted_shape in wanted:
        if (x.shape, x.dtype) != (wanted_shape, jnp.uint32):
            raise value_error(
                f"stamps: {name}", got=f"{x.dtype}{list(x.shape)}", wanted=f"uint32{list(wanted_shape)}",
                fix="Pass (stamp uint32[P, S], value uint32[A]).",
            )  # fmt: skip
    if {_registry.in_host_memory(x) for x in (stamp, *columns)} == {True, False}:
        raise value_error(
            "stamps", got="columns and stamp in several kinds of memory", wanted="one kind of all of them",
            fix="Put them all in pinned_host, or all in device memory.",
        )  # fmt: skip
    return [stamp, value]


def _by_memory(call, slots, starts, lengths, ticket, columns, values, picks=(), stamps=()):
    """One call for the columns in each kind of memory: XLA takes all results of a call for such as lie in host memory
    where one of them does. Returns the columns and [the stamp] or [].
    """
    host = [_registry.in_host_memory(c) for c in columns]
    written: list[Any] = list(columns)
    stamp: list[Any] = []
    for kind in sorted(set(host)):
        index = [i for i, h in enumerate(host) if h == kind]
        mine = [columns[i] for i in index], [values[i] for i in index]
        got, stamp = call(slots, starts, lengths, ticket, *mine, list(picks), list(stamps))
        for i, x in zip(index, got, strict=True):
            written[i] = x
    return written, stamp


def _call(slots_in_table: int, steps: int, checks: bool, blocks: int | None = None, in_flight: bool = True):
    """The call for one table, with its vmap rule. `in_flight`: whether a `gather_start` may be reading it."""

    @custom_vmap
    def rows(slots, starts, lengths, ticket, columns, values, picks, stamps):
        k, stamped = len(columns), len(stamps) > 0
        aliases = {4 + i: i for i in range(k)}
        if stamped:
            aliases[4 + 2 * k + len(picks)] = k
        got = _registry.call(
            "gear_scatter_checked" if checks else "gear_scatter",
            [jax.typeof(c) for c in (*columns, *stamps[:1])],
            [slots, starts, lengths, ticket, *columns, *values, *picks, *stamps],
            aliases=aliases,
            slots=np.int64(slots_in_table),
            steps=np.int64(steps),
            blocks=np.int64(_registry.blocks(blocks, columns)),
            in_flight=in_flight,
            value_rows=np.int64(values[0].shape[0] if picks and values else -1),
            stamped=stamped,
        )
        return got[:k], got[k:]

    @rows.def_vmap
    def _rule(size, batched, slots, starts, lengths, ticket, columns, values, picks, stamps):
        if slots.shape[-1] == 0:  # nothing is written, so nothing needs a table of its own
            return (list(columns), list(stamps[:1])), (list(batched[4]), list(batched[7][:1]))
        if not all((*batched[4], *batched[7][:1])):
            raise value_error(
                "ops.scatter under vmap: columns",
                got="a table that is not batched",
                wanted="one table for each element of the batch",
                fix="Batch the columns too, or write all rows in one call: scatter takes [A, T', *shape].",
            )
        ids = _registry.batch_all(size, (slots, starts, lengths), batched[:3])
        n = ids[0].shape[1]
        flat = [x.reshape(-1) for x in (_registry.fold_slots(ids[0], slots_in_table), *ids[1:])]
        shared = len(picks) > 0 and not any(batched[5])  # the rows name values that all elements have
        picked = [x if b else x[None] for x, b in zip(picks, batched[6], strict=True)]
        if picks and not shared:  # row r of element v is row v * R + r
            r = values[0].shape[1 if batched[5][0] else 0]
            picked = [_registry.fold_slots(jnp.broadcast_to(x, (size, n)), r) for x in picked]
        picked = [jnp.broadcast_to(x, (size, n)).reshape(size * n) for x in picked]
        if shared:
            vals = list(values)
        else:
            vals = [v.reshape(-1, *v.shape[2:]) for v in _registry.batch_all(size, values, batched[5])]
        stamped = list(stamps[:1])
        if stamps:
            stamped += [x.reshape(size * n) for x in _registry.batch_all(size, stamps[1:], batched[7][1:])]
        # Every element's ticket must be there before the write.
        ticket = ticket.reshape(-1)[:1] + jnp.minimum(ticket.max(), 0) if batched[3] else ticket
        # The tables as they are: XLA copies a donated array that is reshaped on its way into a write. The handler goes
        # by the numbers of slots and steps, not by the leading dimensions.
        again = _call(size * slots_in_table, steps, checks, blocks, in_flight)
        got = again(*flat, ticket, columns, vals, picked, stamped)
        return got, jax.tree.map(lambda _: True, got)

    return rows
