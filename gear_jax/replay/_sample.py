"""`sample`: select, gather, hand out; in one call or in two."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from gear_jax import ops
from gear_jax._errors import type_error, value_error
from gear_jax.ops._gather_start import check_depth, start_in_queue
from gear_jax.replay._config import Config
from gear_jax.replay._state import Counter, Handle, ReplayState, Sample, after_reads, index, read_rows, tally
from gear_jax.windows import draw_anchor


class PendingSample(struct.PyTreeNode):
    """A sample in flight: what `Replay.sample_start` returns and `Replay.sample_done` takes.

    Attributes:
      gather: the data, a `gear_jax.ops.Pending`.
      handles, anchor, length, probability, weight, valid: as in `Sample`; they are there already.
    """

    gather: ops.Pending
    handles: Handle
    anchor: jax.Array
    length: jax.Array
    probability: jax.Array
    weight: jax.Array
    valid: jax.Array


def sample(config: Config, state: ReplayState, key: jax.Array, batch_size: int, out: Any = None):
    """See `Replay.sample`. `out` is (data, mask) of an earlier sample."""
    state, chosen, drawn = _draw(config, state, key, batch_size)
    data, mask, ticket = ops.gather(
        state.columns, *_rows(drawn), config.window_tree, ticket=state.ticket, after=chosen, out=out
    )
    return after_reads(state.replace(ticket=ticket)), Sample(data, mask, **drawn)


def start(
    config: Config, state: ReplayState, key: jax.Array, batch_size: int, queue: int, depth: int, after: Any = ()
) -> tuple[ReplayState, PendingSample]:
    """See `Replay.sample_start`."""
    state, chosen, drawn = _draw(config, state, key, batch_size)
    pending, ticket = start_in_queue(
        state.columns, *_rows(drawn), config.window_tree, ticket=state.ticket, after=(chosen, after), queue=queue,
        depth=check_depth(depth),
    )  # fmt: skip
    return after_reads(state.replace(ticket=ticket)), PendingSample(pending, **drawn)


def done(pending: PendingSample, after: Any = ()) -> Sample:
    """See `Replay.sample_done`."""
    data, mask, ok = ops.gather_done(pending.gather, after=after)

    # Where the data is lost, what goes with it must not be taken for a row's: it is as in a sample of an empty table.
    def kept(x, lost=0):
        return jnp.where(ok, x, jnp.full_like(x, lost))

    return Sample(
        data, mask, Handle(kept(pending.handles.slot, -1), kept(pending.handles.generation)), kept(pending.anchor),
        kept(pending.length), kept(pending.probability), kept(pending.weight), kept(pending.valid),
    )  # fmt: skip


def start_next(
    config: Config, state: ReplayState, pending: PendingSample, columns: Any, key: jax.Array, batch_size: int,
    queue: int, depth: int,
) -> tuple[ReplayState, tuple[Sample, PendingSample]]:
    """Ends one sample and starts another in its place. `columns`: what must live until the first has been read."""
    sample = done(pending, after=columns)
    state, following = start(config, state, key, batch_size, queue, depth, after=sample.valid)
    return state, (sample, following)


def _draw(config: Config, state: ReplayState, key: jax.Array, batch_size: int):
    """The rows of a sample: the state, what the selector chose, and the fields of a `Sample` but for the data."""
    key = check_key(key)
    batch_size = check_batch(batch_size)
    chosen, selector_state = config.selector.select(state.selector, index(state), key, batch_size)
    slot = chosen.slot
    valid = slot >= 0
    length, generation, ticket = read_rows(state, slot)
    anchor = draw_anchor(config.anchor, key, length, config.steps)
    # Of the table as a whole, so it goes to the first partition.
    counters = tally(state.counters, jnp.zeros_like(slot), {Counter.SAMPLED: valid})
    state = state.replace(ticket=ticket, selector=selector_state, counters=counters)
    drawn = {
        "handles": Handle(slot, generation), "anchor": anchor, "length": length, "probability": chosen.probability,
        "weight": chosen.weight, "valid": valid,
    }  # fmt: skip
    return state, chosen, drawn


def _rows(drawn: dict[str, Any]):
    """Slots, starts and lengths for a gather."""
    # A row that is not valid has length 0, so that any slot gives padding; -1 would be a fault under GEAR_JAX_CHECKS.
    return jnp.maximum(drawn["handles"].slot, 0), drawn["anchor"], drawn["length"]


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
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)):
        raise type_error("batch_size", got=type(batch_size).__name__, wanted="a static integer", fix=fix)
    if not 1 <= batch_size <= 2**31 - 1:
        raise value_error("batch_size", got=batch_size, wanted="a number in [1, 2**31)", fix=fix)
    return int(batch_size)
