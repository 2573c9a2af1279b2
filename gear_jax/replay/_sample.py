"""`sample`: select, gather, hand out; in one call or in two."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from gear_jax import _axis, ops
from gear_jax._env import checks
from gear_jax._errors import type_error, value_error
from gear_jax._numbers import is_integer
from gear_jax.ops._gather_start import check_depth, start_in_queue
from gear_jax.replay import _exchange, _exposed, _limits, _remote
from gear_jax.replay._config import Config, check_divides
from gear_jax.replay._state import Handle, ReplayState, Sample, after_reads, count_sampled, index, read_rows
from gear_jax.windows import draw_anchor


class PendingSample(struct.PyTreeNode):
    """A sample in flight: what `Replay.sample_start` returns and `Replay.sample_done` takes.

    Attributes:
      gather: the data, a `gear_jax.ops.Pending`.
      handles, anchor, length, probability, weight, valid: as in `Sample`; they are there already.
      remote: whether some of the data comes from other processes, so that more rows may turn out not to be valid.
    """

    gather: ops.Pending
    handles: Handle
    anchor: jax.Array
    length: jax.Array
    probability: jax.Array
    weight: jax.Array
    valid: jax.Array
    remote: bool = struct.field(pytree_node=False, default=False)


def sample(config: Config, state: ReplayState, key: jax.Array, batch_size: int, out: Any = None):
    """See `Replay.sample`. `out` is (data, mask) of an earlier sample."""
    if out is not None and config.axis is not None and not _exchange.takes_memory(config):
        raise value_error(
            "out", got="a sample to take the memory of", wanted="None: what devices exchange, or repeat, is new",
            fix="Leave it out.",
        )  # fmt: skip
    if config.rows is not None and out is not None:
        raise value_error(
            "out", got="a sample to take the memory of", wanted="None with exchange='rdma': each sample is new",
            fix="Leave it out.",
        )  # fmt: skip
    if config.remote is not None:
        return _sample_remote(config, state, key, batch_size)
    if config.axis is not None and config.selection == "centralized":
        return _sample_together(config, state, key, batch_size, out)
    state, chosen, drawn = _draw(config, state, key, batch_size)
    data, mask, ticket = ops.gather(
        state.columns, *_rows(drawn, config), config.window_tree, ticket=state.ticket, after=chosen, out=out
    )
    sample = Sample(data, mask, **drawn)
    if config.axis is not None:
        sample = jax.tree.map(lambda x: _axis.all_gather(x, _exchange.replicas(config)), sample)
    return after_reads(state.replace(ticket=ticket)), sample


def _sample_together(config: Config, state: ReplayState, key: jax.Array, batch_size: int, out: Any):
    """A sample out of the shards of all devices; this one gets its part of the batch."""
    part = _exchange.Part.of(config, batch_size)
    state, chosen, drawn = _draw(config, state, key, batch_size)
    if config.rows is not None:
        drawn = jax.tree.map(part.cut, drawn)
        data, mask, valid, ticket = _exchange.read(config, part, state, drawn, chosen)
        return after_reads(state.replace(ticket=ticket)), Sample(data, mask, **_kept(valid, drawn))
    data, mask, ticket = _exchange.fetch(config, part, state.columns, *_rows(drawn), state.ticket, chosen, out)
    drawn = jax.tree.map(part.cut, drawn)
    return after_reads(state.replace(ticket=ticket)), Sample(data, mask, **drawn)


def _sample_remote(config: Config, state: ReplayState, key: jax.Array, batch_size: int):
    """A sample out of the tables of all processes of a job."""
    state, chosen, drawn = _draw(config, state, key, batch_size)
    data, mask, valid, ticket = ops.rdma_fetch(
        *_exposed.fetch_of(config, state, drawn), ticket=state.ticket, after=chosen
    )
    return after_reads(state.replace(ticket=ticket)), Sample(data, mask, **_kept(valid, drawn))


def start(
    config: Config, state: ReplayState, key: jax.Array, batch_size: int, queue: int, depth: int, after: Any = ()
) -> tuple[ReplayState, PendingSample]:
    """See `Replay.sample_start`."""
    state, chosen, drawn = _draw(config, state, key, batch_size)
    if config.remote is not None:
        pending, ticket = ops.rdma_fetch_start(
            *_exposed.fetch_of(config, state, drawn), ticket=state.ticket, after=(chosen, after), queue=queue,
            depth=check_depth(depth),
        )  # fmt: skip
        return after_reads(state.replace(ticket=ticket)), PendingSample(pending, **drawn, remote=True)
    pending, ticket = start_in_queue(
        state.columns, *_rows(drawn, config), config.window_tree, ticket=state.ticket, after=(chosen, after),
        queue=queue, depth=check_depth(depth),
    )  # fmt: skip
    return after_reads(state.replace(ticket=ticket)), PendingSample(pending, **drawn)


def done(pending: PendingSample, after: Any = ()) -> Sample:
    """See `Replay.sample_done`."""
    if pending.remote:
        data, mask, valid, ok = ops.rdma_fetch_done(pending.gather, after=after)
        ok = valid & ok
    else:
        data, mask, ok = ops.gather_done(pending.gather, after=after)
    names = ("handles", "anchor", "length", "probability", "weight", "valid")
    return Sample(data, mask, **_kept(ok, {name: getattr(pending, name) for name in names}))


def _kept(ok: jax.Array, drawn: dict[str, Any]) -> dict[str, Any]:
    """What goes with data that is lost must not be taken for a row's: it is as in a sample of an empty table."""

    def kept(x, lost=0):
        return jnp.where(ok, x, jnp.full_like(x, lost))

    handles = Handle(kept(drawn["handles"].slot, -1), kept(drawn["handles"].generation))
    return {**{name: kept(x) for name, x in drawn.items() if name != "handles"}, "handles": handles}


def start_next(
    config: Config,
    state: ReplayState,
    pending: PendingSample,
    columns: Any,
    key: jax.Array,
    batch_size: int,
    queue: int,
    depth: int,
) -> tuple[ReplayState, tuple[Sample, PendingSample]]:
    """Ends one sample and starts another in its place. `columns`: what must live until the first has been read."""
    sample = done(pending, after=columns)
    state, following = start(config, state, key, batch_size, queue, depth, after=sample.valid)
    return state, (sample, following)


def _draw(config: Config, state: ReplayState, key: jax.Array, batch_size: int):
    """The rows of a sample: the state, what the selector chose, and the fields of a `Sample` but for the data.

    Over several devices: of the whole batch, the same on all of them, if selection is centralized; else of this
    device's own part.
    """
    key = check_key(key)
    batch_size = check_batch(batch_size)
    apart = config.axis if config.selection == "decentralized" else None
    together = config.axis if config.selection == "centralized" else None
    selector_state, n = state.selector, _axis.size(apart)
    if apart is not None:
        check_divides("batch_size", batch_size, n, f"the {n} devices that each draw a part")
        batch_size //= n
        key = key if n == 1 else jax.random.fold_in(key, _axis.index(apart))
        selector_state = jax.tree.map(lambda x: x[0], selector_state)
    known = index(state)
    if config.remote is not None:
        known, ticket = _remote.read_index(config.remote, state)
        state = state.replace(ticket=ticket)
    # A selector of one's own that knows nothing of devices will do on one.
    over = () if together is None else (together,)
    chosen, selector_state = config.selector.select(selector_state, known, key, batch_size, *over)
    if config.selector.times is not None:
        state, chosen, selector_state = _limits.use(config, state, chosen, selector_state, key, batch_size, together)
    if apart is not None:
        slot, selector_state = config.everywhere(chosen.slot), jax.tree.map(lambda x: x[None], selector_state)
        least = None if chosen.least is None else chosen.least / np.float32(n)
        chosen = chosen._replace(slot=slot, probability=chosen.probability / np.float32(n), least=least)
    slot = chosen.slot
    valid = slot >= 0
    length, generation, ticket = chosen.length, chosen.generation, chosen.ticket
    if length is None or generation is None or ticket is None:
        if config.remote is not None:
            of_slot = lambda x: jnp.where(valid, x.reshape(-1)[jnp.maximum(slot, 0)], jnp.zeros((), x.dtype))  # noqa: E731
            length, generation, ticket = of_slot(known.length), of_slot(known.generation), state.ticket
        else:
            length, generation, ticket = read_rows(state, config.held(slot))
            length, generation = _axis.combine((length, generation), together)
    anchor = draw_anchor(config.anchor, key, length, config.steps)
    found = jnp.sum(valid, dtype=jnp.uint32) if chosen.found is None else chosen.found
    if together is not None:  # all know it, and one counts it
        found = jnp.where(_axis.index(together) == 0, found, np.uint32(0))
    counters = count_sampled(state.counters, found)
    state = state.replace(ticket=ticket, selector=selector_state, counters=counters)
    weight = config.selector.weigh(chosen, apart)
    drawn = {
        "handles": Handle(slot, generation), "anchor": anchor, "length": length, "probability": chosen.probability,
        "weight": weight, "valid": valid,
    }  # fmt: skip
    # A selector may read the index by other means than ops that take the ticket.
    return state, (slot, chosen.probability, weight), drawn


def _rows(drawn: dict[str, Any], held_by: Config | None = None):
    """Slots, starts and lengths for a gather: of the whole table, or of the device with this config."""
    slot = drawn["handles"].slot
    slot = slot if held_by is None else held_by.held(slot)
    # A row that is not valid has slot -1, which gives padding but is a fault under GEAR_JAX_CHECKS; its length is 0, so
    # that any slot gives padding.
    return jnp.maximum(slot, 0) if checks() else slot, drawn["anchor"], drawn["length"]


def check_key(key: Any) -> jax.Array:
    """A key, typed or legacy."""
    fix = "Pass jax.random.key(0)."
    if not hasattr(key, "dtype"):
        raise type_error("key", got=type(key).__name__, wanted="a jax.random key", fix=fix)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        good = key.shape == ()
    else:
        good = key.dtype == jnp.uint32 and key.shape in ((2,), (4,))
    if not good:
        raise value_error("key", got=f"{key.dtype}{list(key.shape)}", wanted="one jax.random key", fix=fix)
    return key


def check_batch(batch_size: Any) -> int:
    """A batch size: static, and at least 1."""
    fix = "Pass a Python int; under jit mark it static (static_argnames)."
    if not is_integer(batch_size):
        raise type_error("batch_size", got=type(batch_size).__name__, wanted="a static integer", fix=fix)
    if not 1 <= batch_size <= 2**31 - 1:
        raise value_error("batch_size", got=batch_size, wanted="a number in [1, 2**31)", fix=fix)
    return int(batch_size)
