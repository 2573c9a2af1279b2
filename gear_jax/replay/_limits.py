"""Trajectories that leave the selection by themselves: drawn as often as they may be, or of too old a policy.

Such a trajectory's length becomes 0, as if its slot had never been filled: it has no mass, `update_priorities` cannot
bring it back, and the slot is free.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import _axis, ops
from gear_jax._axis import Axis
from gear_jax._errors import value_error
from gear_jax.ops._registry import int32, int32_where_it_is
from gear_jax.replay._config import Config
from gear_jax.replay._state import Limits, ReplayState, add64, index
from gear_jax.selectors import Selection


class Left(enum.IntEnum):
    """Rows of `Limits.counters`."""

    USED_UP = 0
    EXPIRED = 1
    REFUSED = 2


def each(version: Any, rows: int) -> jax.Array | np.ndarray:
    """A version, or one for each of the rows, as `int32[rows]`, where it is."""
    version = int32_where_it_is("version", version)
    if version.shape not in ((), (rows,)):
        fix = "Give one version for each row, or one for all."
        raise value_error("version", got=f"shape {version.shape}", wanted=f"() or {(rows,)}", fix=fix)
    return (jnp if isinstance(version, jax.Array) else np).broadcast_to(version, (rows,))


def versions(config: Config, state: ReplayState, version: Any, rows: int) -> jax.Array | None:
    """The versions of added rows, `int32[rows]`: the learner's own where none are given. None: none is kept."""
    if config.max_staleness is None:
        if version is None:
            return None
        fix = "Write make_replay(..., max_staleness=k)."
        raise value_error("version", got="a version", wanted="None: this replay has no max_staleness", fix=fix)
    return jnp.asarray(each(_kept(state).current[0] if version is None else version, rows))


def refuse(config: Config, state: ReplayState, partition: jax.Array, version: jax.Array, lengths: jax.Array):
    """Leaves out rows that are too stale already: the state that counts them, which rows are left, their lengths."""
    refused = (lengths > 0) & (version < _oldest(config, state))
    lengths = jnp.where(refused, 0, lengths)
    return _count(state, Left.REFUSED, partition, refused), lengths > 0, lengths


def reset(state: ReplayState, slots: jax.Array, version: jax.Array | None) -> ReplayState:
    """Begins with new trajectories in slots `int32[K]` (-1: none): never drawn, of versions `int32[K]`."""
    limits = state.limits
    if limits is None:
        return state
    rows = {}
    if limits.times is not None:
        rows["times"] = jnp.zeros(slots.shape, jnp.uint32)
    if version is not None:
        rows["version"] = version
    fields = {name: getattr(limits, name) for name in rows}
    written = ops.scatter_rows(fields, slots, rows, ticket=state.ticket, in_flight=False)
    return state.replace(limits=limits.replace(**written))


def close(config: Config, state: ReplayState, slots: jax.Array, lengths: jax.Array) -> tuple[ReplayState, jax.Array]:
    """The lengths of trajectories that are complete, 0 for those grown stale meanwhile, which do not get in."""
    if config.max_staleness is None:
        return state, lengths
    limits = _kept(state)
    version, ticket = ops.gather_rows(limits.version, slots, ticket=state.ticket)
    stale = (slots >= 0) & (version < _oldest(config, state))
    state = _count(state.replace(ticket=ticket), Left.REFUSED, jnp.maximum(slots, 0) // config.slots, stale)
    return state, jnp.where(stale, 0, lengths)


def expire(config: Config, state: ReplayState, version: Any) -> tuple[ReplayState, tuple[()]]:
    """See `Replay.expire`."""
    if config.max_staleness is None:
        fix = "Write make_replay(..., max_staleness=k)."
        raise value_error("expire", got="a replay without max_staleness", wanted="one with it", fix=fix)
    version = int32("version", version)
    if version.shape != ():
        fix = "Give the learner's version."
        raise value_error("expire: version", got=f"shape {version.shape}", wanted="one number", fix=fix)
    limits = _kept(state)
    limits = limits.replace(current=jnp.maximum(limits.current, version))
    state = state.replace(limits=limits)
    stale = ((state.length > 0) & (limits.version < _oldest(config, state))).reshape(-1)
    number = jnp.arange(stale.size, dtype=jnp.int32)
    state = _count(state, Left.EXPIRED, number // config.slots, stale)
    return _without(state, jnp.where(stale, number, -1), state.ticket), ()


def use(config: Config, state: ReplayState, chosen: Selection, own: Any, key: jax.Array, batch_size: int, axis: Axis):
    """Counts what a selector drew, and has it draw again what may not be drawn so often.

    A selector with replacement may draw a trajectory several times in one batch, and more often than it may be. Row by
    row the first draws count; those rows that come too late draw anew from what is left, until all have something or
    nothing is left. So every trajectory is met with the probabilities it would have if one row were drawn after the
    other.

    Args:
      config: of this device.
      state: the table.
      chosen: the draws.
      own: the selector's state.
      key: what they were drawn with.
      batch_size: B.
      axis: the devices that make the same draws from parts of the table; None: all of the table is here.

    Returns:
      The state, the draws (lengths and generations among them), and the selector's state.
    """
    over = () if axis is None else (axis,)
    state, chosen, missing = _use_once(config, state, chosen, jnp.ones((batch_size,), bool), axis)
    if not config.selector.repeats:
        return state, chosen, own

    def again(carry):
        fields, own, chosen, missing, turn = carry
        now = state.replace(**fields)
        more, own = config.selector.redraw(own, index(now), jax.random.fold_in(key, turn), batch_size, *over)
        now, more, still = _use_once(config, now, more, missing, axis)
        rows = {
            name: jnp.where(missing, getattr(more, name), getattr(chosen, name))
            for name in ("slot", "probability", "length", "generation")
        }
        return _drawn(now), own, chosen._replace(**rows), still, turn + np.uint32(1)

    chosen = chosen._replace(ticket=None, found=None, least=None)
    carry = _drawn(state), own, chosen, missing, jnp.uint32(1)
    fields, own, chosen, _, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[3]), again, carry)
    return state.replace(**fields), chosen._replace(ticket=fields["ticket"]), own


def _drawn(state: ReplayState) -> dict[str, Any]:
    """What drawing changes."""
    return {name: getattr(state, name) for name in ("limits", "length", "priority", "mass", "sums", "ticket")}


def _use_once(config: Config, state: ReplayState, chosen: Selection, wanted: jax.Array, axis: Axis):
    """Counts the draws in the rows `wanted`, `bool[B]`. Also returns the draws, with -1 where one is not wanted or
    comes too late, and `bool[B]`: those that came too late."""
    limits, most = _kept(state), np.uint32(config.selector.times or 0)
    slot = jnp.where(wanted, chosen.slot, -1)
    here = slot if axis is None else config.held(slot)
    ticket = state.ticket if chosen.ticket is None else chosen.ticket
    fields = state.length, state.generation, limits.times
    read, ticket = ops.gather_rows(fields, here, ticket=ticket)
    length, generation, times = _axis.combine(read, axis)
    before, last = _repeats(slot) if config.selector.repeats else (jnp.uint32(0), jnp.ones(slot.shape, bool))
    # In a state of a selector with more times there are some that have no draw left: they go now, or the rows that draw
    # them would draw for ever.
    over = (slot >= 0) & (times >= most) & last
    times = times + before
    taken = (slot >= 0) & (times < most)
    times = times + np.uint32(1)
    spent = (taken & (times == most)) | over
    # Of the rows with one slot, that which brings the number it will have.
    written = jnp.where(taken & (last | spent), here, -1)
    counted = ops.scatter_rows(limits.times, written, times, ticket=ticket, in_flight=False)
    state = state.replace(limits=limits.replace(times=counted), ticket=ticket)
    gone = jnp.where(spent, here, -1)
    state = _count(state, Left.USED_UP, jnp.maximum(gone, 0) // config.slots, gone >= 0)
    state = _without(state, gone, ticket)
    chosen = Selection(
        jnp.where(taken, slot, -1), jnp.where(taken, chosen.probability, np.float32(0)), jnp.where(taken, length, 0),
        jnp.where(taken, generation, np.uint32(0)), ticket, None, None,
    )  # fmt: skip
    return state, chosen, (slot >= 0) & ~taken


def _repeats(slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many earlier rows have the same slot, `uint32[B]`, and whether no later one has it, `bool[B]`."""
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)
    order = jnp.argsort(slots, stable=True).astype(jnp.int32)
    ordered = slots[order]
    differs = ordered[1:] != ordered[:-1]
    edge = jnp.ones((1,), bool)
    first = jnp.concatenate([edge, differs])
    start = jax.lax.cummax(jnp.where(first, rows, 0))
    before = jnp.zeros(slots.shape, jnp.uint32).at[order].set((rows - start).astype(jnp.uint32))
    last = jnp.zeros(slots.shape, bool).at[order].set(jnp.concatenate([differs, edge]))
    return before, last


def _without(state: ReplayState, slots: jax.Array, ticket: jax.Array) -> ReplayState:
    """The state without the trajectories in slots `int32[K]` (-1: none)."""
    zeros = jnp.zeros(slots.shape, jnp.float32)
    tree = state.priority, state.mass, state.sums
    priority, mass, sums = ops.sumtree_update(*tree, slots, zeros, zeros, ticket=ticket)
    none = jnp.zeros(slots.shape, jnp.int32)
    length = ops.scatter_rows(state.length, slots, none, ticket=ticket, in_flight=False)
    return state.replace(priority=priority, mass=mass, sums=sums, length=length)


def _count(state: ReplayState, what: Left, partition: jax.Array, flags: jax.Array) -> ReplayState:
    """Adds the flags, `bool[K]`, to the counters of their `partition`, `int32[K]`."""
    limits = state.limits
    assert limits is not None
    counters = limits.counters
    add = jnp.zeros(counters.shape[:2], jnp.uint32).at[partition, int(what)].add(flags.astype(jnp.uint32), mode="drop")
    return state.replace(limits=limits.replace(counters=add64(counters, add)))


def _oldest(config: Config, state: ReplayState) -> jax.Array:
    """The oldest version that is not too stale: `int32[]`."""
    # A version may be any int32: the difference must not wrap round.
    now = _kept(state).current[0]
    behind = np.int32(min(config.max_staleness or 0, 2**31 - 1))
    return jnp.where(now < np.int32(-(2**31)) + behind, np.int32(-(2**31)), now - behind)


def _kept(state: ReplayState) -> Any:
    """The limits, whose fields the replay's settings say are there."""
    assert isinstance(state.limits, Limits)
    return state.limits
