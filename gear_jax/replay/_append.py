"""`append`: steps that arrive one at a time from N streams."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import _axis
from gear_jax._errors import type_error, value_error
from gear_jax.ops._registry import ids
from gear_jax.replay import _limits, _placement
from gear_jax.replay._config import Config
from gear_jax.replay._insert import receive, set_priorities, write_steps
from gear_jax.replay._state import (
    Counter,
    Handle,
    ReplayState,
    Streams,
    add64,
    after_reads,
    note_written,
    read_rows,
    tally,
    write_rows,
)


def append(config: Config, state: ReplayState, stream: Any, step: Any, done: Any, version: Any = None):
    """See `Replay.append`."""
    if state.streams is None:
        raise value_error(
            "append", got="a replay without streams", wanted="streams=N", fix="Write make_replay(..., streams=N)."
        )
    stream = ids("stream", stream)
    k = stream.shape[0]
    values = config.flatten("step", step, "K")
    for name, v in zip(config.names, values, strict=True):
        if v.shape[0] != k:
            raise value_error(
                f"step[{name!r}]", got=f"{v.shape[0]} rows", wanted=f"{k}, as in stream", fix="Match them."
            )
    done = jnp.asarray(done)
    if done.dtype != jnp.bool_:
        raise type_error("done", got=f"dtype {done.dtype}", wanted="bool", fix="Pass done.astype(bool).")
    if done.shape != (k,):
        raise value_error("done", got=f"shape {done.shape}", wanted=f"{(k,)}", fix="Give one flag for each stream.")

    state = receive(config, state)
    version = _limits.versions(config, state, version, k)
    assert state.streams is not None
    opened = Streams(config.held(state.streams.slot), state.streams.length)
    if config.axis is not None:  # of the streams, this device has those that follow each other
        stream = stream - _axis.index(config.axis) * np.int32(config.streams)
    known = (stream >= 0) & (stream < config.streams)
    at = jnp.where(known, stream, 0)
    # Of several steps for one stream only the first counts.
    number = jnp.arange(k, dtype=jnp.int32)
    first = jnp.full((config.streams,), k, jnp.int32).at[at].min(jnp.where(known, number, k))
    known = known & (first[at] == number)
    to = jnp.where(known, stream, config.streams)
    state, opened = _open(config, state, opened, to, known & (opened.slot[at] < 0), version)
    slot = jnp.where(known, opened.slot[at], -1)
    position = opened.length[at]
    rows = config.tree.unflatten([v[:, None] for v in values])
    length = position + 1
    close = (slot >= 0) & (done | (length >= config.steps))
    starts = jnp.where(slot >= 0, position, 0)
    columns, state = write_steps(config, state, slot, rows, starts=starts, whole=close)
    streams = Streams(
        config.everywhere(opened.slot.at[to].set(jnp.where(close, -1, slot), mode="drop")),
        opened.length.at[to].set(jnp.where(close, 0, length), mode="drop"),
    )
    partition = jnp.maximum(slot, 0) // config.slots
    priority = jnp.broadcast_to(state.max_priority, (k,))
    closed = jnp.where(close, slot, -1)
    # The generation rose when the slot was opened.
    _, generation, ticket = read_rows(state, closed)
    state = state.replace(columns=columns, streams=streams, ticket=ticket)
    note_written(jax.tree.leaves(columns)[0])
    state, length = _limits.close(config, state, closed, length)
    there = close & (length > 0)  # one that is too stale leaves a free slot
    state = state.replace(counters=tally(state.counters, partition, {Counter.INSERTED: there}))
    state = write_rows(state, closed, length=length)
    # All devices have all steps; each stream is with one of them.
    kept, generation = jnp.where(there, closed, -1), jnp.where(there, generation, np.uint32(0))
    told, generation = _axis.combine((config.everywhere(kept) + 1, generation), config.axis)
    handles = Handle(told - 1, generation)
    state = set_priorities(config, state, closed, priority, length)
    return state if config.rows is None else after_reads(state), handles


def _open(config: Config, state: ReplayState, streams: Streams, stream, needs, version) -> tuple[ReplayState, Streams]:
    """Gives a slot to each `stream` that `needs` one; what was in it is gone from here on."""
    # The rule of placement with A = N and a = the stream's number: a stream keeps to its own partitions.
    n = config.streams
    needs = jnp.zeros((n,), bool).at[stream].set(needs, mode="drop")
    partition = _placement.choose_partitions(config, state, n)
    slot, cursor, _ = _placement.choose_slots(config, state, partition, needs)
    old_length, generation, ticket = read_rows(state, slot)
    opened, clock = slot >= 0, state.clock
    streams = Streams(jnp.where(opened, slot, streams.slot), jnp.where(opened, 0, streams.length))
    state = state.replace(
        cursor=cursor,
        ticket=ticket,
        clock=add64(state.clock, jnp.uint32(n * _axis.size(config.axis))),
        counters=tally(state.counters, partition, {Counter.EVICTED: old_length > 0}),
    )
    # The generation rises at once: handles of what was there are stale before the slot is closed. A trajectory is as
    # old as the opening of its slot, so that eviction, which goes round the slots, takes the oldest.
    number = clock[1] + jnp.arange(n, dtype=jnp.uint32)
    if config.axis is not None:
        number = number + _axis.index(config.axis).astype(jnp.uint32) * np.uint32(n)
    zero = jnp.zeros((n,), jnp.int32)
    state = write_rows(state, slot, length=zero, generation=generation + np.uint32(1), sequence=number)
    if version is not None:
        version = jnp.zeros((n,), jnp.int32).at[stream].set(version, mode="drop")
    state = _limits.reset(state, slot, version)
    zeros = jnp.zeros((n,), jnp.float32)
    return set_priorities(config, state, slot, zeros, jnp.zeros((n,), jnp.int32)), streams
