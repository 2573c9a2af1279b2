"""`sumtree_sample`, `sumtree_update`: draws in proportion to mass, out of a tree of sums over blocks of slots.

The layout and the rounding policy are in `ffi/sumtree.h`: fan-out 16, every node the float32 sum of its children in one
fixed order and always formed anew, so that sums do not drift and do not depend on history, threads or devices; draws in
float64 on 53 random bits (children are compared in float32). Source: the sum tree of prioritised replay (Schaul et al.,
ICLR 2016, appendix B.2.1), with wide nodes.
"""

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from gear_jax._errors import value_error
from gear_jax.ops import _registry

FANOUT = 16


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


def sumtree_sample(
    mass: jax.Array,
    sums: jax.Array,
    bits: jax.Array,
    *,
    draws: int | None = None,
    stratified: bool = False,
    roots: jax.Array | None = None,
    first: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws slots, each with probability mass / total, with replacement. O(B log S).

    Args:
      mass: `float32[P, S]`, finite and not negative.
      sums: `float32[P, M]`, as `sumtree_update` keeps them.
      bits: `uint32[B, 2]`, random; or a key `uint32[2]`, of which the handler makes them (Threefry-2x32, in threads).
      draws: B, static; only with a key.
      stratified: draw i falls in the i-th of B even parts of the mass. Each slot is drawn as often on average, with
        less variance, and slots come in ascending order, which is the faster for it.
      roots: `float32[P']`, the mass of every partition of the whole table where only some are held here; None: all are.
      first: the number of the first partition held here.

    Returns:
      slot `int32[B]` (partition * S + slot in partition, of the whole table; -1 where no slot has mass or the drawn
      slot is not held here), its mass `float32[B]` (0 where slot is -1), and the total mass `float32[1]`. A slot
      without mass is never drawn.

    Raises:
      ValueError: at trace time, for shapes and dtypes that do not fit.

    Transformations: under vmap one draw follows another (`vmap_method="sequential"`); nothing is broadcast.
    """
    _check_tree(mass, sums)
    if bits.dtype != jnp.uint32 or bits.shape != ((2,) if draws is not None else (*bits.shape[:1], 2)):
        wanted = "uint32[2] with draws=B" if draws is not None else "uint32[B, 2]"
        raise value_error("bits", got=f"{bits.dtype}{list(bits.shape)}", wanted=wanted, fix="Use jax.random.bits.")
    roots = sumtree_roots(sums) if roots is None else roots
    _check_floats("roots", roots, (roots.size,))
    first = jnp.asarray(first, jnp.int32).reshape(1)
    n = bits.shape[0] if draws is None else draws
    results = [((n,), jnp.int32), ((n,), jnp.float32), ((1,), jnp.float32)]
    slot, drawn, total = _registry.call(
        "gear_sumtree_sample",
        [jax.ShapeDtypeStruct(*r) for r in results],
        [roots, first, mass, sums, bits],
        vmap_method="sequential",
        stratified=stratified,
    )
    return slot, drawn, total


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
    _check_floats("priority", priority, mass.shape)
    slots = _registry.ids("slots", slots)
    _check_floats("new_priority", new_priority, slots.shape)
    _check_floats("new_mass", new_mass, slots.shape)
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
    _check_floats("mass", mass, mass.shape)
    _check_floats("sums", sums, (mass.shape[0], sumtree_width(mass.shape[1])))


def _check_floats(what, x, shape):
    # The handler trusts the sizes: a wrong one would read or write beyond an array.
    if x.shape != shape or x.dtype != jnp.float32:
        raise value_error(
            what, got=f"{x.dtype}{list(x.shape)}", wanted=f"float32{list(shape)}",
            fix="P, S and K come from mass [P, S] and slots [K]; M is sumtree_width(S).",
        )  # fmt: skip
