"""What a replay table is made of. Everything is an array, so that jit, scan, flax and Orbax take it as it is."""

import enum
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.custom_batching import custom_vmap

from gear_jax import ops
from gear_jax._errors import value_error
from gear_jax.ops._place import memory_kind
from gear_jax.replay import _remote
from gear_jax.replay._config import Config
from gear_jax.replay._remote import RemoteState
from gear_jax.selectors import Index


class Counter(enum.IntEnum):
    """Rows of `ReplayState.counters`."""

    INSERTED = 0
    EVICTED = 1
    STALE_UPDATES = 2
    REJECTED_PRIORITIES = 3
    SAMPLED = 4


class Handle(struct.PyTreeNode):
    """Names a trajectory for as long as it is there.

    Attributes:
      slot: `int32[B]`, partition * S + slot in partition; -1: none.
      generation: `uint32[B]`, how often the slot has been filled (see `ReplayState`); 0: none.
    """

    slot: jax.Array
    generation: jax.Array


class Sample(struct.PyTreeNode):
    """A batch.

    Attributes:
      data: the columns' pytree, leaves `[B, W, *shape]`.
      mask: the same tree, `bool[B, W]`: which steps are steps of the trajectory, and not padding.
      handles: `Handle`, for `update_priorities`.
      anchor: `int32[B]`, the step the windows are placed at.
      length: `int32[B]`, the trajectory's steps.
      probability: `float32[B]`, of the trajectory (not of the step within it).
      weight: `float32[B]`, importance weight over the largest of the batch.
      valid: `bool[B]`; False only where nothing selectable was left, or, with `exchange="rdma"`, where the row was
        overwritten before it had been read, or its process was lost. Such a row is padding throughout.
    """

    data: Any
    mask: Any
    handles: Handle
    anchor: jax.Array
    length: jax.Array
    probability: jax.Array
    weight: jax.Array
    valid: jax.Array


class Streams(struct.PyTreeNode):
    """The open slots of `append`.

    Attributes:
      slot: `int32[N]`, the slot of the whole table that each stream writes to; -1: none open.
      length: `int32[N]`, steps written to it.
    """

    slot: jax.Array
    length: jax.Array


class Limits(struct.PyTreeNode):
    """What is known of trajectories that leave the selection by themselves (`gear_jax.replay._limits`).

    Attributes:
      times: `uint32[P, S]`, how often each trajectory has been drawn; None: any number of times will do.
      version: `int32[P, S]`, the policy version that made each; None: they do not grow stale.
      current: `int32[P]`, the learner's own version, everywhere the same; None with `version`.
      counters: `uint32[P, 3, 2]`, trajectories that were drawn for the last time, that grew stale in the table, that
        came too stale to be let in; (high, low) words.
    """

    times: jax.Array | None
    version: jax.Array | None
    current: jax.Array | None
    counters: jax.Array


class ReplayState(struct.PyTreeNode):
    """A replay table.

    Attributes:
      columns: the table's pytree, leaves `[P, S, T, *shape]`.
      length: `int32[P, S]`, steps of each trajectory; 0: the slot is still open, or empty (never filled, or what was
        there has been drawn as often as it may be, or has grown too stale).
      generation: `uint32[P, S]`, how often each slot has been filled; with `exchange="rdma"`, without a mesh, over
        several processes counted on from a random number at each `connect`.
      sequence: `uint32[P, S]`, the number of the row in each slot, mod 2**32.
      priority: `float32[P, S]`, as given.
      mass: `float32[P, S]`, the selector's leaves.
      sums: `float32[P, M]`, the sum tree over them.
      max_priority: `float32[1]`, the largest priority seen.
      cursor: `int32[P]`, where FIFO eviction stands.
      counters: `uint32[P, 5, 2]`, see `Counter`; (high, low) words.
      clock: `uint32[2]`, rows offered so far; (high, low) words.
      selector: the selector's own state.
      streams: `Streams`, or None.
      ticket: `int32[1]`, always 0: what orders reads of the table before later writes.
      stamp: `uint32[P, S]`, with `exchange="rdma"`: whether a slot's bytes are whole, for others that read them. Else
        None.
      remote: `RemoteState`, with `exchange="rdma"` without a mesh; P is then that of this process, and N its own
        streams. Else None.
      limits: `Limits`, or None.

    Over the n devices of a mesh these are global arrays. Those with a P are cut along it, and the streams' along N; the
    ticket is `int32[n]`, one for each device; the rest every device has. (With decentralized selection, so is the
    selector's state, one for each device, stacked.)
    """

    columns: Any
    length: jax.Array
    generation: jax.Array
    sequence: jax.Array
    priority: jax.Array
    mass: jax.Array
    sums: jax.Array
    max_priority: jax.Array
    cursor: jax.Array
    counters: jax.Array
    clock: jax.Array
    selector: Any
    streams: Streams | None
    ticket: jax.Array
    stamp: jax.Array | None = None
    remote: RemoteState | None = None
    limits: Limits | None = None


def with_fields(state: ReplayState, names: Iterable[str], values: Iterable[Any]) -> ReplayState:
    """`state.replace`, which goes through all fields in Python, for the way of every call."""
    new = object.__new__(ReplayState)
    vars(new).update(vars(state))
    vars(new).update(zip(names, values, strict=True))
    return new


def init(config: Config, key: jax.Array) -> ReplayState:
    """An empty table, as part of a program. `key` feeds the selector's own state (the order of a `Permutation`)."""
    return init_index(config, key).replace(columns=config.tree.unflatten(_columns(config, ())(key)))


def init_index(config: Config, key: jax.Array) -> ReplayState:
    """An empty table without its columns."""
    p, s = config.partitions, config.slots
    seed = jax.random.bits(key, (4,), jnp.uint32)
    streams = None
    if config.streams:
        streams = Streams(jnp.full((config.streams,), -1, jnp.int32), jnp.zeros((config.streams,), jnp.int32))
    selector = config.selector.init(seed)
    if config.axis is not None and config.selection == "decentralized":  # each device has its own, stacked
        selector = jax.tree.map(lambda x: x[None], selector)
    return ReplayState(
        columns=None,
        length=jnp.zeros((p, s), jnp.int32),
        generation=jnp.zeros((p, s), jnp.uint32),
        sequence=jnp.zeros((p, s), jnp.uint32),
        priority=jnp.zeros((p, s), jnp.float32),
        mass=jnp.zeros((p, s), jnp.float32),
        sums=jnp.zeros((p, ops.sumtree_width(s)), jnp.float32),
        max_priority=jnp.ones((1,), jnp.float32),
        cursor=jnp.zeros((p,), jnp.int32),
        counters=jnp.zeros((p, len(Counter), 2), jnp.uint32),
        clock=jnp.zeros((2,), jnp.uint32),
        selector=selector,
        streams=streams,
        ticket=ops.new_ticket(),
        stamp=None if config.rows is None else ops.zeros((p, s), jnp.uint32, memory_kind(config.memory)),
        remote=None if config.remote is None else _remote.init(config.remote, p, s),
        limits=_limits(config) if config.limited else None,
    )


def _limits(config: Config) -> Limits:
    p, s = config.partitions, config.slots
    stale = config.max_staleness is not None
    return Limits(
        times=None if config.selector.times is None else jnp.zeros((p, s), jnp.uint32),
        version=jnp.zeros((p, s), jnp.int32) if stale else None,
        current=jnp.zeros((p,), jnp.int32) if stale else None,
        counters=jnp.zeros((p, 3, 2), jnp.uint32),
    )


def column_shapes(config: Config) -> list[tuple[int, ...]]:
    """`[P, S, T, *shape]` of each column."""
    return [(config.partitions, config.slots, config.steps, *c.shape) for c in config.columns]


def _columns(config: Config, lead: tuple[int, ...]):
    """Makes the columns of a table for each key, as a function of the keys: vmap would repeat one table's columns."""

    @custom_vmap
    def make(key):
        del key
        memory = memory_kind(config.memory)
        shapes = zip(column_shapes(config), config.columns, strict=True)
        return [ops.zeros((*lead, *shape), c.dtype, memory) for shape, c in shapes]

    @make.def_vmap
    def _rule(size, batched, key):
        if not batched[0]:
            return make(key), [False] * len(config.columns)
        return _columns(config, (size, *lead))(key), [True] * len(config.columns)

    return make


def check_table(name: str, config: Config, state: ReplayState, devices: int = 1) -> None:
    """Refuses the state of another table, or of another number of devices.

    Raises:
      ValueError: if the columns have other names, shapes or dtypes than `init` gives them, or the streams are others.
    """

    def describe(leaves, streams):
        return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in leaves) + f" and {streams} streams"

    if state.ticket.shape != (devices,):
        raise value_error(
            f"{name}: state", got=f"a state of {state.ticket.shape[0]} device(s)", wanted=f"one of {devices}",
            fix="Pass a state that this replay's own init made, or a checkpoint restored with it.",
        )  # fmt: skip
    wanted = [(x, jnp.dtype(c.dtype)) for x, c in zip(column_shapes(config), config.columns, strict=True)]
    leaves, tree = jax.tree.flatten(state.columns, is_leaf=lambda x: isinstance(x, ops.Addresses))
    got = [(x.shape, jnp.dtype(x.dtype)) for x in leaves]
    streams = 0 if state.streams is None else state.streams.slot.shape[0]
    own = jax.eval_shape(config.selector.init, jax.ShapeDtypeStruct((4,), jnp.uint32))
    if jax.tree.structure(state.selector) != jax.tree.structure(own):
        raise value_error(
            f"{name}: state", got=f"the state of another selector, {jax.tree.structure(state.selector)}",
            wanted=f"that of {config.selector!r}", fix="Pass a state that this replay's own init made.",
        )  # fmt: skip
    limits = jax.tree.structure(state.limits), jax.tree.structure(jax.eval_shape(lambda: _limits(config)))
    if limits[0] != (limits[1] if config.limited else jax.tree.structure(None)):
        raise value_error(
            f"{name}: state", got=f"a state with limits {state.limits!r}",
            wanted=f"one of {config.selector!r}, max_staleness={config.max_staleness}",
            fix="Pass a state that this replay's own init made.",
        )  # fmt: skip
    if (tree, got, streams) != (config.tree, wanted, config.streams):
        raise value_error(
            f"{name}: state", got=f"columns {describe(got, streams)}", wanted=describe(wanted, config.streams),
            fix="Pass a state that this replay's own init made, or one restored into it.",
        )  # fmt: skip


def index(state: ReplayState) -> Index:
    """What selectors see of a state."""
    return Index(
        state.length, state.sequence, state.priority, state.mass, state.sums, state.clock[1], state.generation,
        state.ticket,
    )  # fmt: skip


def read_rows(state: ReplayState, slots: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Length `int32[K]` and generation `uint32[K]` of slots `int32[K]` (0 where outside), and the next ticket.

    An FFI call and not plain indexing: XLA may fuse plain reads into several places, some of them behind a later write,
    and then copies the whole array to keep them right.
    """
    (length, generation), ticket = ops.gather_rows((state.length, state.generation), slots, ticket=state.ticket)
    return length, generation, ticket


# Arrays that were written in the program being traced, by id; they leave with their tracers.
_written: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def note_written(x: jax.Array) -> jax.Array:
    """Remembers that an array is the result of a write in this program."""
    _written[id(x)] = x
    return x


def after_reads(state: ReplayState) -> ReplayState:
    """The state with all that was written and then read of it made to wait for the ticket.

    Where a branch of `lax.cond` reads, writes, and reads again, XLA copies the whole array out of the branch unless the
    array that leaves it depends on the last read. Hence writes of no rows, which take the ticket and cost nothing. (An
    optimization barrier does the same on JAX 0.11, but not on 0.10.) What was not written in this program is left
    alone: it may not be donated, and a write of no rows would then copy it.
    """
    fields = {}
    if id(jax.tree.leaves(state.columns)[0]) in _written:
        fields["columns"] = state.columns
    if id(state.generation) in _written:
        fields |= {name: getattr(state, name) for name in ("length", "generation", "sequence")}
    if fields:
        state = state.replace(**ops.seal(fields, state.ticket))
        note_written(jax.tree.leaves(state.columns)[0])
        note_written(state.generation)
    if id(state.stamp) in _written:
        state = state.replace(stamp=note_written(ops.seal(state.stamp, state.ticket)))
    if state.remote is not None:
        written = {name: getattr(state.remote, name) for name in ("record", "outbox")}
        written = {name: x for name, x in written.items() if id(x) in _written}
        sealed = {name: note_written(ops.seal(x, state.ticket)) for name, x in written.items()}
        state = state.replace(remote=state.remote.replace(**sealed))
    if id(state.sums) in _written:
        tree = state.priority, state.mass, state.sums
        none, nothing = jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.float32)
        priority, mass, sums = ops.sumtree_update(*tree, none, nothing, nothing, ticket=state.ticket)
        state = state.replace(priority=priority, mass=mass, sums=note_written(sums))
    return state


def write_rows(state: ReplayState, slots: jax.Array, **rows: jax.Array) -> ReplayState:
    """Sets fields of `[P, S]` at slots `int32[K]` (-1: none), in place, after all reads that the ticket stands for."""
    fields = {name: getattr(state, name) for name in rows}
    state = state.replace(**ops.scatter_rows(fields, slots, rows, ticket=state.ticket, in_flight=False))
    note_written(state.generation)
    return state


def tally(counters: jax.Array, partition: jax.Array, counts: dict[Counter, jax.Array]) -> jax.Array:
    """Adds the numbers of set flags, `bool[K]` each, to the 64-bit counters of the flags' `partition` `int32[K]`; where
    the numbers of the partitions are known already, they stand for the flags, `int32[P]`."""
    p = counters.shape[0]
    add = [jnp.zeros((p,), jnp.uint32)] * len(Counter)
    for counter, flags in counts.items():
        if flags.dtype != jnp.bool_:
            add[counter] = flags.astype(jnp.uint32)
        elif p == 1:
            add[counter] = jnp.sum(flags, dtype=jnp.uint32)[None]
        else:
            add[counter] = jnp.zeros((p,), jnp.uint32).at[partition].add(flags.astype(jnp.uint32), mode="drop")
    return add64(counters, jnp.stack(add, -1))


def count_sampled(counters: jax.Array, found: jax.Array) -> jax.Array:
    """Adds `uint32[]` to `Counter.SAMPLED`: of the table as a whole, so it goes to the first partition."""
    here = np.zeros(counters.shape[:2], bool)
    here[0, Counter.SAMPLED] = True
    return add64(counters, jnp.where(here, found, np.uint32(0)))


def add64(words: jax.Array, add: jax.Array) -> jax.Array:
    """`uint32[..., 2]` (high, low) plus `uint32[...]`."""
    low = words[..., 1] + add
    return jnp.stack([words[..., 0] + (low < add).astype(jnp.uint32), low], -1)
