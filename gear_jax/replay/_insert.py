"""`add`: whole trajectories into the table, in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import ops
from gear_jax._errors import type_error, value_error
from gear_jax.replay import _placement
from gear_jax.replay._config import Config
from gear_jax.replay._state import Counter, Handle, ReplayState, add64, count, join


def add(config: Config, state: ReplayState, trajectories: Any, lengths: Any, priorities: Any = None):
    """See `Replay.add`."""
    rows = config.flatten("trajectories", trajectories, "A, T'")
    lengths = _lengths(rows, config, lengths)
    valid = lengths > 0
    partition = _placement.choose_partitions(config, state, valid.shape[0])
    slot, cursor = _placement.choose_slots(config, state, partition, valid)
    if priorities is None:
        priority = jnp.broadcast_to(jnp.max(state.max_priority), valid.shape)
        rejected = jnp.zeros(valid.shape, bool)
    else:
        priority = floats("priorities", priorities, valid.shape)
        rejected = valid & ~acceptable(priority)
        priority = jnp.where(rejected, np.float32(0), priority)
    stored = slot >= 0
    number = state.clock[1] + jnp.arange(valid.shape[0], dtype=jnp.uint32)
    counters = count(state.counters, Counter.INSERTED, partition, valid)
    counters = count(counters, Counter.EVICTED, partition, valid & ~stored)
    counters = count(counters, Counter.REJECTED_PRIORITIES, partition, rejected)
    state = state.replace(
        cursor=cursor,
        counters=counters,
        clock=add64(state.clock, jnp.uint32(valid.shape[0])),
        max_priority=raise_max(state.max_priority, partition, priority, valid & ~rejected),
    )
    columns = ops.scatter(
        state.columns, slot, config.tree.unflatten(rows), jnp.minimum(lengths, rows[0].shape[1]), ticket=state.ticket
    )
    state, handles = fill(config, state.replace(columns=columns), slot, lengths, number, priority)
    return state, handles


def fill(
    config: Config, state: ReplayState, slot, lengths, number, priority, *, reopened: bool = False
) -> tuple[ReplayState, Handle]:
    """Enters trajectories into the index: rows with slot -1 are skipped.

    Args:
      config, state: the table; the columns are written already.
      slot: `int32[A]`, no slot twice.
      lengths: `int32[A]`.
      number: `uint32[A]`, the rows' numbers.
      priority: `float32[A]`.
      reopened: the slots' generations have risen already, when a stream opened them.
    """
    flat = lambda x: x.reshape(-1)  # noqa: E731
    capacity = config.partitions * config.slots
    stored = slot >= 0
    at = jnp.maximum(slot, 0)
    old = jnp.where(stored, flat(state.length)[at], 0)
    generation = flat(state.generation)[at] + np.uint32(0 if reopened else 1)
    # What is read of the index, here and by earlier samples, comes before what is written to it.
    after = join(state.ticket, old)[0]
    to = jnp.where(stored, slot, capacity) + after
    write = lambda x, values: flat(x).at[to].set(values, mode="drop").reshape(x.shape)  # noqa: E731
    priorities, mass, sums = ops.sumtree_update(
        state.priority, state.mass, state.sums, slot, priority, _mass(config, priority, lengths), ticket=state.ticket
    )
    counters = count(state.counters, Counter.EVICTED, at // config.slots, old > 0)
    state = state.replace(
        length=write(state.length, lengths),
        generation=write(state.generation, generation),
        sequence=write(state.sequence, number),
        priority=priorities,
        mass=mass,
        sums=sums,
        counters=counters,
    )
    return state, Handle(slot, jnp.where(stored, generation, np.uint32(0)))


def update_priorities(config: Config, state: ReplayState, handles: Handle, priorities: Any) -> ReplayState:
    """See `Replay.update_priorities`."""
    if not isinstance(handles, Handle):
        raise type_error("handles", got=type(handles).__name__, wanted="a Handle", fix="Pass Sample.handles.")
    slot, generation = handles.slot.reshape(-1), handles.generation.reshape(-1)
    if slot.shape != generation.shape:
        raise value_error(
            "handles", got=f"slot {slot.shape}, generation {generation.shape}", wanted="one shape", fix="Pass Sample.handles."
        )
    priority = floats("priorities", priorities, handles.slot.shape).reshape(-1)
    capacity = config.partitions * config.slots
    inside = (slot >= 0) & (slot < capacity)
    at = jnp.where(inside, slot, 0)
    fresh = inside & (state.generation.reshape(-1)[at] == generation) & (generation > 0)
    good = acceptable(priority)
    apply = fresh & good
    lengths = state.length.reshape(-1)[at]
    new = ops.sumtree_update(
        state.priority, state.mass, state.sums, jnp.where(apply, slot, -1), priority, _mass(config, priority, lengths),
        ticket=state.ticket,
    )  # fmt: skip
    partition = at // config.slots
    counters = count(state.counters, Counter.STALE_UPDATES, partition, (slot != -1) & ~fresh)
    counters = count(counters, Counter.REJECTED_PRIORITIES, partition, fresh & ~good)
    return state.replace(
        priority=new[0],
        mass=new[1],
        sums=new[2],
        counters=counters,
        max_priority=raise_max(state.max_priority, partition, priority, apply),
        ticket=join(state.ticket, fresh.astype(jnp.int32), lengths),
    )


def acceptable(priority: jax.Array) -> jax.Array:
    """Whether each priority is finite and not negative."""
    return (priority >= 0) & (priority < np.inf)


def raise_max(max_priority, partition, priority, flags):
    """The largest priority seen in each partition, after more were seen where `flags` is set."""
    seen = jnp.where(flags, priority, np.float32(0))
    if max_priority.shape[0] == 1:
        return jnp.maximum(max_priority, jnp.max(seen, initial=np.float32(0)))
    return max_priority.at[partition].max(seen, mode="drop")


def floats(what: str, x: Any, shape: tuple[int, ...]) -> jax.Array:
    """An argument as `float32` of a shape."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise type_error(what, got=f"dtype {x.dtype}", wanted="float32", fix=f"Pass {what}.astype(jnp.float32).")
    if x.shape != shape:
        raise value_error(what, got=f"shape {x.shape}", wanted=f"{shape}", fix="Give one priority for each row.")
    return x.astype(jnp.float32)


def _mass(config: Config, priority, lengths):
    return config.selector.mass(priority, lengths >= config.anchor.min_length)


def _lengths(rows, config: Config, lengths) -> jax.Array:
    a, steps = rows[0].shape[:2]
    for name, r in zip(config.names, rows, strict=True):
        if r.shape[:2] != (a, steps):
            raise value_error(
                f"trajectories[{name!r}]", got=f"[A, T'] = {r.shape[:2]}", wanted=f"{(a, steps)} as in {config.names[0]!r}",
                fix="Give every column the same rows and steps.",
            )  # fmt: skip
    if steps > config.steps:
        raise value_error(
            "trajectories", got=f"T' = {steps} steps", wanted=f"at most trajectory_length = {config.steps}",
            fix="Split the trajectories, or raise TableSpec.trajectory_length.",
        )  # fmt: skip
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise type_error("lengths", got=f"dtype {lengths.dtype}", wanted="int32", fix="Pass lengths.astype(jnp.int32).")
    if lengths.shape != (a,):
        raise value_error("lengths", got=f"shape {lengths.shape}", wanted=f"[A] = {(a,)}", fix="Give one for each row.")
    return jnp.clip(lengths.astype(jnp.int32), 0, steps)
