"""`sample`: select, gather, hand out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import ops
from gear_jax._errors import type_error, value_error
from gear_jax.replay._config import Config
from gear_jax.replay._state import Counter, Handle, ReplayState, Sample, after_reads, index, read_rows, tally
from gear_jax.windows import draw_anchor


def sample(config: Config, state: ReplayState, key: jax.Array, batch_size: int, out: Any = None):
    """See `Replay.sample`. `out` is (data, mask) of an earlier sample."""
    key = check_key(key)
    batch_size = check_batch(batch_size)
    chosen, selector_state = config.selector.select(state.selector, index(state), key, batch_size)
    slot = chosen.slot
    valid = slot >= 0
    length, generation, ticket = read_rows(state, slot)
    anchor = draw_anchor(config.anchor, key, length, config.steps)
    # A row that is not valid has length 0, so that any slot gives padding; -1 would be a fault under GEAR_JAX_CHECKS.
    at = jnp.maximum(slot, 0)
    data, mask, ticket = ops.gather(
        state.columns, at, anchor, length, config.window_tree, ticket=ticket, after=chosen, out=out
    )
    # Of the table as a whole, so it goes to the first partition.
    counters = tally(state.counters, jnp.zeros_like(slot), {Counter.SAMPLED: valid})
    state = after_reads(state.replace(ticket=ticket, selector=selector_state, counters=counters))
    handles = Handle(slot, generation)
    return state, Sample(data, mask, handles, anchor, length, chosen.probability, chosen.weight, valid)


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
