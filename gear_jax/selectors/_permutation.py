import dataclasses
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from gear_jax import _axis, ops
from gear_jax.selectors import _base

_ROUNDS = 8


class PermutationState(struct.PyTreeNode):
    """`seed` `uint32[4]`; `epoch` and `position` `uint32[]`: where the walk stands."""

    seed: jax.Array
    epoch: jax.Array
    position: jax.Array


@final
@dataclasses.dataclass(frozen=True)
class Permutation(_base.Selector):
    """Without replacement: every trajectory exactly once an epoch, in an order drawn anew for each epoch.

    The order comes from the key given to `init` and from the epoch's number alone; the keys given to `sample` do not
    matter. It is a keyed permutation of the slots' numbers (a Feistel network over the least power of two above C),
    walked position by position; slots that may not be drawn are passed over. Nothing of size C is stored. A trajectory
    that arrives during an epoch is met in it if the walk has not passed its slot. A batch goes on into the next epoch.

    O(B * C / N) a sample, N being the number of trajectories. Source: Luby and Rackoff, "How to construct pseudorandom
    permutations from pseudorandom functions" (SIAM J. Comput. 1988).
    """

    def init(self, seed):
        return PermutationState(seed, jnp.uint32(0), jnp.uint32(0))

    def mass(self, priority, selectable):
        del priority
        return selectable.astype(jnp.float32)

    def select(self, state, index, key, batch_size, axis=None):
        del key
        held = index.mass.size
        capacity = held * _axis.size(axis)
        has_mass = _drawable(index.mass.reshape(-1), axis)
        bits = max(2, (capacity - 1).bit_length())
        domain = 1 << bits
        stride = min(domain, 1 << max(8, (2 * batch_size - 1).bit_length()))
        count = jnp.sum(_axis.all_gather(ops.sumtree_roots(index.sums), axis))
        drawable = count > 0

        def walk(carry):
            slots, got, epoch, position = carry
            at = position + jnp.arange(stride, dtype=jnp.uint32)
            slot = permute(at, bits, state.seed, epoch)
            inside = (at < np.uint32(domain)) & (slot < np.uint32(capacity))
            slot = jnp.where(inside, slot, np.uint32(0)).astype(jnp.int32)
            hit = inside & has_mass(slot)
            number = got + jnp.cumsum(hit, dtype=jnp.int32) - 1
            taken = hit & (number < batch_size)
            slots = slots.at[jnp.where(taken, number, batch_size)].set(slot, mode="drop")
            got = got + jnp.sum(taken, dtype=jnp.int32)
            # Stand behind the last slot taken if the batch is full, else behind this stride.
            last = jnp.max(jnp.where(taken, at, position)) + np.uint32(1)
            position = jnp.where(got == batch_size, last, position + np.uint32(stride))
            over = position >= np.uint32(domain)
            return slots, got, epoch + over.astype(jnp.uint32), jnp.where(over, np.uint32(0), position)

        start = (jnp.full((batch_size,), -1, jnp.int32), jnp.int32(0), state.epoch, state.position)
        slots, _, epoch, position = jax.lax.while_loop(lambda c: drawable & (c[1] < batch_size), walk, start)
        found = (slots >= 0).astype(jnp.float32)
        probability = found / jnp.maximum(count, np.float32(1))
        return _base.Selection(slots, probability), state.replace(epoch=epoch, position=position)


def _drawable(mass: jax.Array, axis: _axis.Axis):
    """Whether slots of the whole table may be drawn, as a function; `mass` is that of this device's slots.

    The devices exchange a bit for each slot.
    """
    if axis is None:
        return lambda slot: mass[slot] > 0
    held = mass.shape[0]
    words = -(-held // 32)
    flags = jnp.pad(mass > 0, (0, words * 32 - held)).reshape(words, 32).astype(jnp.uint32)
    packed = jnp.sum(flags << jnp.arange(32, dtype=jnp.uint32)[None], axis=1, dtype=jnp.uint32)
    packed = _axis.all_gather(packed, axis)

    def has_mass(slot):
        place = slot % np.int32(held)
        word = packed[slot // np.int32(held) * np.int32(words) + place // 32]
        return (word >> (place % 32).astype(jnp.uint32)) & np.uint32(1) > 0

    return has_mass


def permute(x: jax.Array, bits: int, seed: jax.Array, epoch: jax.Array) -> jax.Array:
    """A bijection of [0, 2**bits), `uint32[...]` -> `uint32[...]`, keyed by seed `uint32[4]` and epoch `uint32[]`."""
    low_bits = bits // 2
    low_mask, high_mask = np.uint32((1 << low_bits) - 1), np.uint32((1 << (bits - low_bits)) - 1)

    def two_rounds(i, carry):
        low, high, key = carry
        key = _mix(key + seed[2 * i % 4] + np.uint32(0x9E3779B9))
        high = high ^ (_mix(low ^ key) & high_mask)
        key = _mix(key + seed[(2 * i + 1) % 4] + np.uint32(0x9E3779B9))
        low = low ^ (_mix(high ^ key) & low_mask)
        return low, high, key

    # A loop, because XLA repeats unrolled rounds wherever their result is used (under vmap, 20 s of compilation).
    start = x & low_mask, (x >> np.uint32(low_bits)) & high_mask, _mix(epoch ^ seed[0])
    low, high, _ = jax.lax.fori_loop(0, _ROUNDS // 2, two_rounds, start)
    return (high << np.uint32(low_bits)) | low


def _mix(x):
    """The finalizer of MurmurHash3: every bit of the input reaches every bit of the output."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
