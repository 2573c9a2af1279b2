"""The selector interface: which trajectories a sample takes.

A selector is a frozen dataclass of static settings; what it must remember is a pytree in the replay state. It sees an
`Index`, never columns, and is pure JAX. Every class here is abstract or final.
"""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import _axis, _random, ops
from gear_jax._axis import Axis

NEVER = np.int32(-(2**31))
"""The rank of a slot that may not be taken."""


class Index(NamedTuple):
    """What is known of every slot.

    Attributes:
      length: `int32[P, S]`, steps; 0 where nothing selectable is.
      sequence: `uint32[P, S]`, the number of the slot's row, counted over all rows ever offered, mod 2**32.
      priority: `float32[P, S]`, as given; finite and not negative.
      mass: `float32[P, S]`, from `Selector.mass`; 0 where the selector may not draw.
      sums: `float32[P, M]`, the sum tree over `mass` (`gear_jax.ops.sumtree_update`).
      clock: `uint32[]`, the number that the next row will get.
      generation: `uint32[P, S]`, how often each slot has been filled.
      ticket: `int32[1]`, for an op that reads these arrays (`gear_jax.ops`).
    """

    length: jax.Array
    sequence: jax.Array
    priority: jax.Array
    mass: jax.Array
    sums: jax.Array
    clock: jax.Array
    generation: jax.Array
    ticket: jax.Array


class Selection(NamedTuple):
    """What a selector drew.

    Attributes:
      slot: `int32[B]`, partition * S + slot in partition, of the whole table; -1 where there was nothing to draw.
      probability: `float32[B]`, of the trajectory in each draw; 0 where slot is -1.
      length, generation: `int32[B]` and `uint32[B]`, of the slots; 0 where slot is -1. Both, or None, and the table
        reads them.
      ticket: `int32[1]`, of the read that gave them; None with them.
      found: `uint32[]`, how many slots are not -1; None, and they are counted.
      least: `float32[]`, the least probability that is not 0 (infinite if there is none); None, and who wants it looks.
    """

    slot: jax.Array
    probability: jax.Array
    length: jax.Array | None = None
    generation: jax.Array | None = None
    ticket: jax.Array | None = None
    found: jax.Array | None = None
    least: jax.Array | None = None


class Selector(abc.ABC):
    """Draws trajectories.

    Contract (`gear_jax.testing.check_selector` tests it):
      - `select` is a pure function of (state, index, key); the same inputs give the same bits.
      - It draws a slot only where `mass` is positive; it says -1 only where nothing (more) is to be had.
      - What it says of `length`, `generation`, `found` and `least`, if anything, is what the index says of the slots.
      - `mass` depends on one slot alone, is finite and not negative, and is 0 where `selectable` is False.
      - Over n devices each has the index of its own P / n partitions. With their `axis`, `select` gives the same on
        all of them, bit for bit what it gives for the whole index on one device: what one device alone knows goes
        through collectives over that axis (`jax.lax`).
      - Without `repeats` it draws no slot twice in one batch.

    Attributes:
      times: how often a trajectory may be drawn, over all samples and within one, before it is gone and its slot free;
        None: any number of times. The table keeps count.
      repeats: whether a batch may hold a slot twice.
    """

    times: int | None = None
    repeats: bool = True

    def init(self, seed: jax.Array) -> Any:
        """The state to begin with, a pytree of arrays; `seed` is `uint32[4]`, random."""
        del seed
        return ()

    @abc.abstractmethod
    def mass(self, priority: jax.Array, selectable: jax.Array) -> jax.Array:
        """`float32[...]` in proportion to the chance of each slot; 0 means that it may not be drawn.

        Args:
          priority: `float32[...]`, finite and not negative.
          selectable: `bool[...]`, whether the slot holds a trajectory that the anchor admits.
        """

    @abc.abstractmethod
    def select(
        self, state: Any, index: Index, key: jax.Array, batch_size: int, axis: Axis = None
    ) -> tuple[Selection, Any]:
        """Draws `batch_size` slots. Returns them and the next state.

        Args:
          state: the selector's own.
          index: of the partitions that this device holds.
          key: a `jax.random` key, the same on all devices.
          batch_size: B, static.
          axis: name or names of the mesh axes that the partitions are spread over; None: they are all here.
        """

    def redraw(
        self, state: Any, index: Index, key: jax.Array, batch_size: int, axis: Axis = None
    ) -> tuple[Selection, Any]:
        """As `select`, where only some rows of the result, whichever they are, will be used: no row may tell more than
        another of what is drawn."""
        return self.select(state, index, key, batch_size, *(() if axis is None else (axis,)))

    def weigh(self, selection: Selection, axis: Axis = None) -> jax.Array:
        """The importance weights of what was drawn: `float32[B]` in (0, 1], 1 for the largest; 0 where slot is -1.

        Args:
          selection: the draws, with the probability they had after all.
          axis: devices that have drawn parts of one batch each; None: the batch is all here.
        """
        del axis
        return (selection.slot >= 0).astype(jnp.float32)


class Ranked(Selector):
    """Takes the slots of the highest rank, without chance. O(C log C) a sample. Also serves as an eviction policy.

    Ties go to the lower slot. Asked for more than there is, it marks the surplus with slot -1.
    """

    repeats = False

    def mass(self, priority, selectable):
        del priority
        return selectable.astype(jnp.float32)

    @abc.abstractmethod
    def rank(self, index: Index) -> jax.Array:
        """`int32[P, S]`, above `NEVER`; the highest is taken first. What mass a slot has does not matter here."""

    def select(self, state, index, key, batch_size, axis=None):
        del key
        rank = jnp.where(index.mass > 0, self.rank(index), NEVER).reshape(-1)
        top, slot = jax.lax.top_k(rank, min(batch_size, rank.shape[0]))
        if axis is not None:  # the highest of all are among the highest of each; a tie goes to the lower device
            slot = slot + _axis.index(axis) * np.int32(rank.shape[0])
            top, slot = _axis.all_gather(top, axis), _axis.all_gather(slot, axis)
            top, place = jax.lax.top_k(top, min(batch_size, top.shape[0]))
            slot = slot[place]
        slot = jnp.where(top > NEVER, slot, -1).astype(jnp.int32)
        slot = jnp.pad(slot, (0, batch_size - slot.shape[0]), constant_values=-1)
        return Selection(slot, (slot >= 0).astype(jnp.float32)), state


def age_rank(index: Index) -> jax.Array:
    """Rows offered since each slot was filled, as an `int32` rank above `NEVER` (exact up to 2**32 - 2 rows)."""
    age = index.clock - index.sequence
    return jax.lax.bitcast_convert_type(jnp.maximum(age, 1) ^ np.uint32(1 << 31), jnp.int32)


def priority_rank(index: Index) -> jax.Array:
    """Priorities as an `int32` rank, not negative: floats that are not negative order like their bits."""
    return jnp.maximum(jax.lax.bitcast_convert_type(index.priority, jnp.int32), 0)  # -0.0 is a zero like any other


def draw_by_mass(
    index: Index, key: jax.Array, batch_size: int, stratified: bool = False, axis: Axis = None
) -> Selection:
    """Draws with probability mass / total.

    The devices of `axis` exchange the P roots, and then what each has drawn from its own partitions.
    """
    roots, first = None, 0
    if axis is not None:
        roots = _axis.all_gather(ops.sumtree_roots(index.sums), axis)
        first = _axis.index(axis) * np.int32(index.mass.shape[0])
    draws = ops.sumtree_sample(
        index.mass, index.sums, index.length, index.generation, _random.fold(key),
        draws=batch_size, stratified=stratified, roots=roots, first=first, ticket=index.ticket,
    )  # fmt: skip
    # All are drawn or none is. To say so costs no pass over the batch.
    found = jnp.where(draws.total[0] > 0, np.uint32(batch_size), np.uint32(0))
    slot, probability, length, generation = draws.slot, draws.probability, draws.length, draws.generation
    least = None
    if axis is None:
        least = jnp.min(draws.least, initial=np.float32(np.inf))
    else:
        known = _axis.combine((slot + 1, probability, length, generation), axis)
        slot, probability, length, generation = known[0] - 1, *known[1:]
    return Selection(slot, probability, length, generation, draws.ticket, found, least)
