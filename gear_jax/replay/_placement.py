"""Where a new trajectory goes: its partition, and the slot there that it takes over.

The rule is the same for every device count. Row a of A may go to partitions floor(aP/A) ... floor((a+1)P/A) - 1 (at
least one) and takes the one with the fewest insertions so far, ties to the lower. Within the partition it takes a free
slot, or the one that the eviction policy names. The slot that a stream has open is never taken.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax.replay._config import Config
from gear_jax.replay._state import Counter, ReplayState, index
from gear_jax.selectors import Fifo


def choose_partitions(config: Config, state: ReplayState, rows: int) -> jax.Array:
    """The partition of each of A = `rows` rows: `int32[A]`, never falling."""
    p = config.partitions
    if p == 1 or rows == 0:
        return jnp.zeros((rows,), jnp.int32)
    a = np.arange(rows)
    low = a * p // rows
    width = np.maximum((a + 1) * p // rows - low, 1)
    candidate = low[:, None] + np.arange(width.max())
    admitted = np.arange(width.max()) < width[:, None]
    inserted = state.counters[np.minimum(candidate, p - 1).astype(np.int32), Counter.INSERTED]
    # The least of 64-bit counts: the least high word, and among those the least low word.
    most = np.uint32(2**32 - 1)
    high = jnp.where(admitted, inserted[..., 0], most)
    least = admitted & (high == jnp.min(high, axis=1, keepdims=True))
    low_word = jnp.where(least, inserted[..., 1], most)
    first = least & (low_word == jnp.min(low_word, axis=1, keepdims=True))
    return jnp.asarray(low, jnp.int32) + jnp.argmax(first, axis=1).astype(jnp.int32)


def choose_slots(
    config: Config, state: ReplayState, partition: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The slot of each row, as if the rows came one by one (an eviction policy by rank goes by what was there before).

    Args:
      config, state: the table.
      partition: `int32[A]`, never falling.
      valid: `bool[A]`; the other rows get none.

    Returns:
      `int32[A]`, partition * S + slot in partition (-1: the row is skipped, or a later row of the same batch takes its
      place), the next cursors `int32[P]`, and how many rows are valid in each partition, `int32[P]`.
    """
    p, s = config.partitions, config.slots
    rows = partition.shape[0]
    if rows == 0:
        return jnp.zeros((0,), jnp.int32), state.cursor, jnp.zeros((p,), jnp.int32)
    so_far = jnp.cumsum(valid, dtype=jnp.int32)
    if p == 1:
        counts = so_far[-1:]
        first = jnp.zeros((1,), jnp.int32)
    else:
        counts = jnp.zeros((p,), jnp.int32).at[partition].add(valid.astype(jnp.int32))
        first = jnp.cumsum(counts, dtype=jnp.int32) - counts
    rank = so_far - 1 - first[partition]
    most = rows if p == 1 else min(rows, -(-rows // p) + 1)  # rows that can fall to one partition
    if isinstance(config.eviction, Fifo) and not (config.streams or config.frees_anywhere):
        available = jnp.full((p,), s, jnp.int32)
        slot = (state.cursor[partition] + rank) % s
        cursor = (state.cursor + counts) % s
    else:
        if isinstance(config.eviction, Fifo) and not config.frees_anywhere:
            victims, available, behind = _in_ring_order(config, state, min(s, most + config.streams), s)
            taken = jnp.where(counts > 0, (counts - 1) % jnp.maximum(available, 1), 0)
            moved = jnp.take_along_axis(behind, taken[:, None], 1)[:, 0]
            cursor = jnp.where(counts > 0, (state.cursor + moved) % s, state.cursor)
        else:
            victims, available = _by_rank(config, state, min(s, most))
            cursor = state.cursor
        slot = victims[partition, rank % jnp.maximum(available, 1)[partition]]
    keep = valid & (rank >= (counts - available)[partition])
    return jnp.where(keep, partition * s + slot, -1), cursor, counts


def _is_open(config: Config, state: ReplayState, slots: jax.Array) -> jax.Array:
    """Whether a stream has each of this device's `slots` open."""
    if state.streams is None:
        return jnp.zeros(slots.shape, bool)
    return jnp.any(config.everywhere(slots)[..., None] == state.streams.slot.reshape(*[1] * slots.ndim, -1), -1)


def _in_ring_order(config: Config, state: ReplayState, width: int, s: int):
    """The next slots that are not open, from the cursor on.

    Returns slots `int32[P, width]`, how many of them count `int32[P]`, and how far the cursor moves with each.
    """
    p = state.cursor.shape[0]
    step = jnp.arange(width, dtype=jnp.int32)
    at = (state.cursor[:, None] + step[None]) % s
    free = ~_is_open(config, state, at + jnp.arange(p, dtype=jnp.int32)[:, None] * s)
    order = jnp.argsort(~free, axis=1, stable=True)
    return jnp.take_along_axis(at, order, 1), jnp.sum(free, 1, dtype=jnp.int32), order.astype(jnp.int32) + 1


def _by_rank(config: Config, state: ReplayState, width: int):
    """The slots that the eviction policy gives up first, free ones before all, and how many there are."""
    p, s = config.partitions, config.slots
    slots = jnp.arange(p * s, dtype=jnp.int32).reshape(p, s)
    never, free = np.int32(-(2**31)), np.int32(2**31 - 1)
    rank = jnp.clip(config.eviction.rank(index(state)), never + 1, free - 1)
    rank = jnp.where(state.length == 0, free, rank)
    rank = jnp.where(_is_open(config, state, slots), never, rank)
    top, slot = jax.lax.top_k(rank, width)
    return slot.astype(jnp.int32), jnp.sum(top > never, 1, dtype=jnp.int32)
