"""`sumtree_sample`, `sumtree_update`: draws in proportion to mass, out of a tree of sums over blocks of slots.

The layout and the rounding policy are in `ffi/sumtree.h`: fan-out 16, every node the float32 sum of its children in one
fixed order and always formed anew, so that sums do not drift and do not depend on history, threads or devices; draws in
float64 on 53 random bits (children are compared in float32). Source: the sum tree of prioritised replay (Schaul et al.,
ICLR 2016, appendix B.2.1), with wide nodes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from gear_jax._errors import value_error
from gear_jax.ops import _registry

FANOUT = 16
_GROUP = 512  # kDrawGroup in ffi/sumtree_math.h


class Draws(NamedTuple):
    """What `sumtree_sample` drew.

    Attributes:
      slot: `int32[B]`, partition * S + slot in partition, of the whole table; -1 where nothing has mass or the slot is
        not held here.
      partition: `int32[B]`, of the whole table, also where it is not held here; -1 where nothing has mass.
      probability: `float32[B]`, mass / total (as mass * (1 / total) where neither total nor reciprocal is denormal);
        0 where slot is -1, as are length and generation. One that would be denormal is 0 too.
      length: `int32[B]`, of the slot.
      generation: `uint32[B]`, of the slot.
      least: `float32[ceil(B / 512)]`, the least positive probability of each 512 draws; inf where there is none.
      total: `float32[1]`, the mass of the whole table; 0 where nothing was drawn.
      ticket: `int32[1]`, for the next read or write of any of the arrays that were read.
    """

    slot: jax.Array
    partition: jax.Array
    probability: jax.Array
    length: jax.Array
    generation: jax.Array
    least: jax.Array
    total: jax.Array
    ticket: jax.Array


def sumtree_width(slots: int) -> int:
    """M, the floats of all levels of a tree over S = `slots` leaves; the last level starts at M - 16.

    Raises:
      ValueError: if there are no leaves.
    """
    if slots < 1:
        raise value_error("slots", got=slots, wanted="at least 1", fix="Give the table a slot: a tree needs a leaf.")
    width, count = 0, slots
    while True:
        count = -(-count // FANOUT)
        width += -(-count // FANOUT) * FANOUT
        if count == 1:
            return width


def sumtree_roots(sums: jax.Array) -> jax.Array:
    """The mass of each partition: `float32[P, M]` -> `float32[P]`."""
    return sums[:, -FANOUT]


def sumtree_sums(mass: jax.Array) -> jax.Array:
    """The sum tree over masses that come from elsewhere: `float32[P, S]` -> `float32[P, M]`, as updates would leave it.

    Plain `jax.numpy`, and so under all transformations. O(P * S).
    """
    levels, below = [], mass
    while True:
        below = jnp.pad(below, ((0, 0), (0, -below.shape[1] % FANOUT)))
        child = below.reshape(below.shape[0], -1, FANOUT)
        half = FANOUT
        while half > 1:
            half //= 2
            child = child[..., :half] + child[..., half:]
        below = child[..., 0]
        levels.append(jnp.pad(below, ((0, 0), (0, -below.shape[1] % FANOUT))))
        if below.shape[1] == 1:
            return jnp.concatenate(levels, 1)


def sumtree_sample(
    mass: jax.Array,
    sums: jax.Array,
    length: jax.Array,
    generation: jax.Array,
    bits: jax.Array,
    *,
    draws: int | None = None,
    stratified: bool = False,
    roots: jax.Array | None = None,
    first: jax.Array | int = 0,
    ticket: jax.Array | None = None,
) -> Draws:
    """Draws slots, each with probability mass / total, with replacement, and reads what is known of them. O(B log S).

    One kernel on a GPU. A slot without mass is never drawn.

    Args:
      mass: `float32[P, S]`, finite and not negative.
      sums: `float32[P, M]`, as `sumtree_update` keeps them.
      length: `int32[P, S]`.
      generation: `uint32[P, S]`.
      bits: `uint32[B, 2]`, random; or a key `uint32[2]`, of which the handler makes them (Threefry-2x32, in threads).
      draws: B, static; only with a key.
      stratified: draw i falls in the i-th of B even parts of the mass. Each slot is drawn as often on average, with
        less variance, and slots come in ascending order, which is the faster for it.
      roots: `float32[P']`, the mass of every partition of the whole table where only some are held here; None: all are.
      first: the number of the first partition held here.
      ticket: `int32[1]` of the last read of the table.

    Returns:
      `Draws`.

    Raises:
      TypeError, ValueError: at trace time, for shapes and dtypes that do not fit.

    Transformations: under vmap one draw follows another (`vmap_method="sequential"`); nothing is broadcast.
    """
    _check_tree(mass, sums)
    _check("length", length, mass.shape, jnp.int32)
    _check("generation", generation, mass.shape, jnp.uint32)
    if bits.dtype != jnp.uint32 or bits.shape != ((2,) if draws is not None else (*bits.shape[:1], 2)):
        wanted = "uint32[2] with draws=B" if draws is not None else "uint32[B, 2]"
        raise value_error("bits", got=f"{bits.dtype}{list(bits.shape)}", wanted=wanted, fix="Use jax.random.bits.")
    if roots is not None:
        _check("roots", roots, (roots.size,))
    first = jnp.asarray(first, jnp.int32).reshape(1)
    b = bits.shape[0] if draws is None else draws
    results = [((b,), jnp.int32), ((b,), jnp.int32), ((b,), jnp.float32), ((b,), jnp.int32), ((b,), jnp.uint32)]
    results += [((-(-b // _GROUP),), jnp.float32), ((1,), jnp.float32), ((1,), jnp.int32)]
    got = _registry.call(
        "gear_sumtree_sample",
        [jax.ShapeDtypeStruct(*r) for r in results],
        [sums if roots is None else roots, first, mass, sums, length, generation, bits, _registry.ticket(ticket)],
        vmap_method="sequential",
        stratified=stratified,
    )
    return Draws(*got)


def sumtree_update(
    priority: jax.Array,
    mass: jax.Array,
    sums: jax.Array,
    slots: jax.Array,
    new_priority: jax.Array,
    new_mass: jax.Array,
    *,
    ticket: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sets priorities and masses of slots in order, and forms the sums above them anew, in place. O(K log S).

    Args:
      priority: `float32[P, S]`.
      mass: `float32[P, S]`.
      sums: `float32[P, M]`.
      slots: `int32[K]`; a slot outside [0, P * S) is skipped; of several writes to a slot the last one stays.
      new_priority: `float32[K]`.
      new_mass: `float32[K]`.
      ticket: `int32[1]` of the last read of the table.

    Returns:
      (priority, mass, sums).

    Raises:
      TypeError, ValueError: at trace time, for shapes and dtypes that do not fit.

    Transformations: under vmap the trees become partitions; a batch over one shared tree gives a copy for each element.
    """
    _check_tree(mass, sums)
    _check("priority", priority, mass.shape)
    slots = _registry.ids("slots", slots)
    _check("new_priority", new_priority, slots.shape)
    _check("new_mass", new_mass, slots.shape)
    update = _update(mass.shape[0] * mass.shape[1])
    return update((priority, mass, sums), slots, new_priority, new_mass, _registry.ticket(ticket))


def _update(slots_in_tree: int):
    """The call for one tree, with its vmap rule."""

    @custom_vmap
    def rows(tree, slots, new_priority, new_mass, ticket):
        return tuple(
            _registry.call(
                "gear_sumtree_update",
                [jax.typeof(x) for x in tree],
                [*tree, slots, new_priority, new_mass, ticket],
                aliases={0: 0, 1: 1, 2: 2},
            )
        )

    @rows.def_vmap
    def _rule(size, batched, tree, slots, new_priority, new_mass, ticket):
        if slots.shape[-1] == 0:  # nothing is written, so nothing needs a tree of its own
            return tree, batched[0]
        tree = tuple(_registry.batch_all(size, tree, batched[0]))
        columns = _registry.batch_all(size, (slots, new_priority, new_mass), batched[1:4])
        columns[0] = _registry.fold_slots(columns[0], slots_in_tree)
        ticket = ticket.reshape(-1)[:1] + jnp.minimum(ticket.max(), 0) if batched[4] else ticket
        # The trees as they are, [V, P, S]: their partitions are the handler's partitions.
        got = _update(size * slots_in_tree)(tree, *(x.reshape(-1) for x in columns), ticket)
        return got, (True,) * 3

    return rows


def _check_tree(mass, sums):
    if mass.ndim != 2:
        fix = "Reshape one of [C] to [1, C]."
        raise value_error("mass", got=f"shape {mass.shape}", wanted="[P, S]", fix=fix)
    _check("mass", mass, mass.shape)
    _check("sums", sums, (mass.shape[0], sumtree_width(mass.shape[1])))


def _check(what, x, shape, dtype=jnp.float32):
    # The handler trusts the sizes: a wrong one would read or write beyond an array.
    if x.shape != shape or x.dtype != dtype:
        raise value_error(
            what, got=f"{x.dtype}{list(x.shape)}", wanted=f"{jnp.dtype(dtype)}{list(shape)}",
            fix="P, S and K come from mass [P, S] and slots [K]; M is sumtree_width(S).",
        )  # fmt: skip
