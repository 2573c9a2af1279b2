"""`add`: whole trajectories into the table, in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import _axis, ops
from gear_jax._errors import type_error, value_error
from gear_jax.ops._registry import int32
from gear_jax.replay import _exposed, _limits, _placement, _remote
from gear_jax.replay._config import Config
from gear_jax.replay._state import (
    Counter,
    Handle,
    ReplayState,
    add64,
    after_reads,
    note_written,
    read_rows,
    tally,
    write_rows,
)


def add(
    config: Config, state: ReplayState, trajectories: Any, lengths: Any, priorities: Any = None, rows: Any = None,
    version: Any = None,
) -> tuple[ReplayState, Handle]:  # fmt: skip
    """See `Replay.add`."""
    state = receive(config, state)
    values = config.flatten("trajectories", trajectories, "A, T'")
    lengths = _lengths(values, config, lengths, rows)
    valid = lengths > 0
    partition = _placement.choose_partitions(config, state, valid.shape[0])
    version = _limits.versions(config, state, version, valid.shape[0])
    if version is not None:
        state, valid, lengths = _limits.refuse(config, state, partition, version, lengths)
    slot, cursor, inserted = _placement.choose_slots(config, state, partition, valid)
    if priorities is None:
        priority = jnp.broadcast_to(state.max_priority, valid.shape)
        rejected = jnp.zeros(valid.shape, bool)
    else:
        priority = floats("priorities", priorities, valid.shape)
        rejected = valid & ~acceptable(priority)
        priority = jnp.where(rejected, np.float32(0), priority)
    rows_here = valid.shape[0]
    number = state.clock[1] + jnp.arange(rows_here, dtype=jnp.uint32)
    if config.axis is not None:  # each device has as many rows
        number = number + _axis.index(config.axis).astype(jnp.uint32) * np.uint32(rows_here)
    max_priority = state.max_priority
    if priorities is not None:  # what is not given raises nothing, and then the devices need not speak
        max_priority = raise_max(config, max_priority, priority, valid & ~rejected)
    columns, state = write_steps(config, state, slot, config.tree.unflatten(values), lengths, rows=rows)
    state = state.replace(
        cursor=cursor,
        clock=add64(state.clock, jnp.uint32(rows_here * _axis.size(config.axis))),
        max_priority=max_priority,
        columns=columns,
    )
    note_written(jax.tree.leaves(state.columns)[0])
    counts = {Counter.INSERTED: inserted, Counter.REJECTED_PRIORITIES: rejected}
    displaced = valid & (slot < 0)  # by later rows of the same batch
    old_length, old_generation, ticket = read_rows(state, slot)
    counts[Counter.EVICTED] = displaced | (old_length > 0)
    state = state.replace(ticket=ticket, counters=tally(state.counters, partition, counts))
    generation = jnp.where(slot >= 0, old_generation + np.uint32(1), np.uint32(0))
    state = write_rows(state, slot, length=lengths, generation=generation, sequence=number)
    state = _limits.reset(state, slot, version)
    handles = Handle(config.everywhere(slot), generation)
    state = set_priorities(config, state, slot, priority, lengths)
    return state if config.rows is None else after_reads(state), handles


def write_steps(config: Config, state: ReplayState, slot, values, lengths=None, starts=None, whole=None, rows=None):
    """The columns after rows of steps were written to slots `int32[A]` of this device, and the state beside them.

    `lengths`, `starts` and `rows` are as in `ops.scatter`.

    Where other processes read the table the rows get their stamps. A slot that is written anew has the next generation;
    with `whole` `bool[A]` it has it already, and is left open unless the row makes it whole.
    """
    if config.rows is None:
        return ops.scatter(state.columns, slot, values, lengths, starts, rows=rows, ticket=state.ticket), state
    assert state.stamp is not None
    _, generation, ticket = read_rows(state, slot)
    value = generation + generation
    value = value + np.uint32(2) if whole is None else jnp.where(whole, value, value - np.uint32(1))
    stamps = state.stamp, value
    columns, stamp = ops.scatter(state.columns, slot, values, lengths, starts, rows=rows, stamps=stamps, ticket=ticket)
    if len(set(config.rows.peers)) > 1:
        # A fetch of no rows fails where XLA has moved what the others read: bytes that it copies have no stamps.
        none, rows_of_none = jnp.zeros((0,), jnp.int32), _exposed.for_no_rows(config.rows)
        *_, ticket = ops.rdma_fetch(rows_of_none, columns, stamp, none, none, none, none, ticket=ticket)
    return columns, state.replace(ticket=ticket, stamp=note_written(stamp))


def set_priorities(config: Config, state: ReplayState, slot, priority, lengths) -> ReplayState:
    """Sets priorities `float32[K]`, and the masses that follow, of slots `int32[K]` (-1: none) with `lengths`."""
    mass = config.selector.mass(priority, lengths >= config.anchor.min_length)
    priority, mass, sums = ops.sumtree_update(
        state.priority, state.mass, state.sums, slot, priority, mass, ticket=state.ticket
    )
    state = state.replace(priority=priority, mass=mass, sums=note_written(sums))
    return state if config.remote is None else _publish(state, slot)


def _publish(state: ReplayState, slot: jax.Array) -> ReplayState:
    state = _remote.publish(state, slot)
    assert state.remote is not None
    note_written(state.remote.record)
    return state


def update_priorities(config: Config, state: ReplayState, handles: Handle, priorities: Any) -> ReplayState:
    """See `Replay.update_priorities`."""
    slot, generation, shape = check_handles(handles)
    priority = floats("priorities", priorities, shape).reshape(-1)
    if config.remote is not None:
        return _update_remote(config, state, slot, generation, priority)
    # Every device has all handles, and minds those of its own slots; one outside the table is stale on the nearest.
    here = config.held(slot)
    lengths, fresh, ticket = _read_fresh(state, here, generation)
    good = acceptable(priority)
    all_partitions = config.partitions * _axis.size(config.axis)
    partition = jnp.clip(slot // config.slots, 0, all_partitions - 1)
    mine = partition // config.partitions == _axis.index(config.axis)
    partition = partition % config.partitions
    stale = mine & (slot != -1) & ~fresh
    counts = {Counter.STALE_UPDATES: stale, Counter.REJECTED_PRIORITIES: fresh & ~good}
    state = state.replace(
        ticket=ticket,
        counters=tally(state.counters, partition, counts),
        max_priority=raise_max(config, state.max_priority, priority, fresh & good),
    )
    return after_reads(set_priorities(config, state, jnp.where(fresh & good, here, -1), priority, lengths))


def _update_remote(config: Config, state: ReplayState, slot, generation, priority) -> ReplayState:
    """The same over processes: own slots at once, those of others by way of the outbox."""
    remote = config.remote
    assert remote is not None
    state = receive(config, state)
    here, good = config.held(slot), acceptable(priority)
    of_others = (slot >= 0) & (slot < remote.processes * config.partitions * config.slots) & (here < 0)
    rejected = of_others & ~good
    state = state.replace(
        counters=tally(state.counters, jnp.zeros_like(slot), {Counter.REJECTED_PRIORITIES: rejected}),
        max_priority=raise_max(config, state.max_priority, priority, of_others & good),
    )
    if remote.processes > 1 and slot.shape[0] > 0:
        state = _remote.send(state, slot, generation, priority, of_others & good)
        assert state.remote is not None
        note_written(state.remote.outbox)
    return after_reads(_update_own(config, state, here, (slot != -1) & ~of_others, generation, priority))


def receive(config: Config, state: ReplayState) -> ReplayState:
    """Applies what the other processes have for slots of this one."""
    if config.remote is None or config.remote.processes == 1:
        return state
    state, slot, generation, priority = _remote.received(config.remote, state)
    here = config.held(slot)
    return _update_own(config, state, here, here >= 0, generation, priority)


def _read_fresh(state: ReplayState, slots: jax.Array, generation: jax.Array):
    """Lengths of slots, `bool[K]`: whether what has a generation is there still, and the ticket."""
    lengths, now, ticket = read_rows(state, slots)
    return lengths, (now == generation) & (generation > 0) & (lengths > 0), ticket  # of length 0: it has left by itself


def _update_own(config: Config, state: ReplayState, here, meant, generation, priority) -> ReplayState:
    """Sets priorities of slots of this process; `meant`: which rows count as stale if they do not fit."""
    lengths, fresh, ticket = _read_fresh(state, here, generation)
    good = acceptable(priority)
    counts = {Counter.STALE_UPDATES: meant & ~fresh, Counter.REJECTED_PRIORITIES: meant & fresh & ~good}
    state = state.replace(
        ticket=ticket,
        counters=tally(state.counters, jnp.maximum(here, 0) // config.slots, counts),
        max_priority=raise_max(config, state.max_priority, priority, fresh & good),
    )
    return set_priorities(config, state, jnp.where(fresh & good, here, -1), priority, lengths)


def check_handles(handles: Handle) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """Slot `int32[K]` and generation `uint32[K]` of handles, and the shape that they had.

    Raises:
      TypeError, ValueError: if they are none.
    """
    fix = "Pass Sample.handles."
    slot, generation = jnp.asarray(handles.slot), jnp.asarray(handles.generation)
    if (slot.dtype, generation.dtype) != (jnp.int32, jnp.uint32):
        got = f"slot {slot.dtype}, generation {generation.dtype}"
        raise type_error("handles", got=got, wanted="int32 and uint32", fix=fix)
    if slot.shape != generation.shape:
        got = f"slot {slot.shape}, generation {generation.shape}"
        raise value_error("handles", got=got, wanted="one shape", fix=fix)
    return slot.reshape(-1), generation.reshape(-1), slot.shape


def acceptable(priority: jax.Array) -> jax.Array:
    """Whether each priority is finite and not negative."""
    return (priority >= 0) & (priority < np.inf)


def raise_max(config: Config, max_priority, priority, flags):
    """The largest priority seen, after more were seen where `flags` is set, on this device or another."""
    seen = jnp.max(jnp.where(flags, priority, np.float32(0)), initial=np.float32(0))
    return jnp.maximum(max_priority, _axis.greatest(seen, config.axis))


def floats(what: str, x: Any, shape: tuple[int, ...]) -> jax.Array:
    """An argument as `float32` of a shape."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise type_error(what, got=f"dtype {x.dtype}", wanted="float32", fix=f"Pass {what}.astype(jnp.float32).")
    if x.shape != shape:
        raise value_error(what, got=f"shape {x.shape}", wanted=f"{shape}", fix="Give one priority for each row.")
    return jax.lax.stop_gradient(x.astype(jnp.float32))


def _lengths(values, config: Config, lengths, rows) -> jax.Array:
    given, steps = values[0].shape[:2]
    for name, r in zip(config.names, values, strict=True):
        if r.shape[:2] != (given, steps):
            raise value_error(
                f"trajectories[{name!r}]", got=f"[A, T'] = {r.shape[:2]}", wanted=f"{(given, steps)}",
                fix="Give every column the same rows and steps.",
            )  # fmt: skip
    if steps > config.steps:
        raise value_error(
            "trajectories", got=f"T' = {steps} steps", wanted=f"at most trajectory_length = {config.steps}",
            fix="Split the trajectories, or raise TableSpec.trajectory_length.",
        )  # fmt: skip
    lengths = int32("lengths", lengths)
    if rows is not None and rows.ndim != 1:
        raise value_error("rows", got=f"shape {rows.shape}", wanted="[A]", fix="Give one for each trajectory.")
    a = given if rows is None else rows.shape[0]
    if lengths.shape != (a,):
        raise value_error("lengths", got=f"shape {lengths.shape}", wanted=f"[A] = {(a,)}", fix="Give one for each row.")
    lengths = jnp.clip(lengths, 0, steps)
    return lengths if rows is None else jnp.where((rows >= 0) & (rows < given), lengths, 0)
