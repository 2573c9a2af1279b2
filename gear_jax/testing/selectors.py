"""The contract of a selector, as a check that any implementation must pass.

`check_selector(MySelector())` raises an `AssertionError` that names the clause. What a strategy prefers is its own
affair; this is what the replay table relies on.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import ops
from gear_jax.selectors import Index, Selection, Selector


def make_index(
    selector: Selector,
    priority: Any,
    selectable: Any = True,
    *,
    length: Any = 1,
    sequence: Any = None,
    clock: Any = None,
) -> Index:
    """An `Index` as a replay table keeps it.

    Args:
      selector: whose masses to form.
      priority: `float32[P, S]`.
      selectable: `bool[P, S]`, or one for all.
      length: `int32[P, S]`, or one for all; 0 is stored where `selectable` is False.
      sequence: `uint32[P, S]`; None: slot c holds row c.
      clock: `uint32[]`; None: P * S.
    """
    priority = np.asarray(priority, np.float32)
    selectable = np.broadcast_to(np.asarray(selectable, bool), priority.shape)
    length = np.where(selectable, np.broadcast_to(length, priority.shape), 0).astype(np.int32)
    if sequence is None:
        sequence = np.arange(priority.size, dtype=np.uint32).reshape(priority.shape)
    mass = selector.mass(jnp.asarray(priority), jnp.asarray(selectable))
    zeros = jnp.zeros(priority.shape, jnp.float32)
    sums = jnp.zeros((priority.shape[0], ops.sumtree_width(priority.shape[1])), jnp.float32)
    slots = jnp.arange(priority.size, dtype=jnp.int32)
    _, mass, sums = ops.sumtree_update(zeros, zeros, sums, slots, jnp.asarray(priority).reshape(-1), mass.reshape(-1))
    return Index(
        jnp.asarray(length),
        jnp.asarray(sequence, jnp.uint32),
        jnp.asarray(priority),
        mass,
        sums,
        jnp.uint32(priority.size if clock is None else clock),
        jnp.asarray(np.where(selectable, 1 + np.arange(priority.size).reshape(priority.shape), 0), jnp.uint32),
        ops.new_ticket(),
    )


def check_selector(selector: Selector, *, partitions: int = 2, slots: int = 37, batch_size: int = 16, seed: int = 0):
    """Holds a selector to the contract of `gear_jax.selectors.Selector`.

    Args:
      selector: the one to check.
      partitions, slots: P and S of the tables it is tried on.
      batch_size: B of the draws; one draw asks for more than P * S.
      seed: of the tables.

    Raises:
      AssertionError: naming the clause that does not hold.
    """
    _check_static(selector)
    rng = np.random.default_rng(seed)
    shape = (partitions, slots)
    priority = rng.uniform(0.1, 3, shape).astype(np.float32)
    priority[rng.uniform(size=shape) < 0.2] = 0
    _check_mass(selector, priority, rng.uniform(size=shape) < 0.5)

    select = jax.jit(selector.select, static_argnums=3)
    state = selector.init(jnp.arange(4, dtype=jnp.uint32))
    one = np.zeros(shape, bool)
    one[-1, -1] = True
    tables = {
        "all": np.ones(shape, bool),
        "some": rng.uniform(size=shape) < 0.5,
        "few": rng.uniform(size=shape) < 0.1,
        "one": one,
        "none": np.zeros(shape, bool),
    }
    for name, selectable in tables.items():
        index = make_index(selector, np.maximum(priority, 0.1) if name == "one" else priority, selectable)
        for size in (batch_size, partitions * slots + 3):
            got, after = select(state, index, jax.random.key(seed), size)
            _check_selection(f"{type(selector).__name__}, table {name!r}, B = {size}", selector, got, index, size)
            _check_state(state, after)
            again = select(state, index, jax.random.key(seed), size)
            _assert_equal("select is a pure function of (state, index, key)", (got, after), again)
    index = make_index(selector, priority, tables["some"])
    _check_transforms(selector, select, state, index, batch_size)
    _check_devices(selector, state, index, batch_size)


def _check_static(selector):
    assert isinstance(selector, Selector), f"{selector!r} is not a Selector"
    assert hash(selector) == hash(selector), "a selector is static: it must be hashable"
    assert type(selector).__eq__ is not object.__eq__, "equal settings must compare equal: make it a frozen dataclass"
    assert selector.times is None or (type(selector.times) is int and selector.times >= 1), "times: None, or 1 or more"


def _check_mass(selector, priority, selectable):
    mass = np.asarray(selector.mass(jnp.asarray(priority), jnp.asarray(selectable)))
    assert (mass.dtype, mass.shape) == (np.dtype(np.float32), priority.shape), "mass: float32 of the priorities' shape"
    assert np.isfinite(mass).all() and (mass >= 0).all(), "mass is finite and not negative"
    assert (mass[~selectable] == 0).all(), "mass is 0 where selectable is False"
    order = np.random.default_rng(1).permutation(priority.size)
    flat = priority.reshape(-1)[order], selectable.reshape(-1)[order]
    turned = np.asarray(selector.mass(*map(jnp.asarray, flat)))
    assert (turned == mass.reshape(-1)[order]).all(), "mass depends on one slot alone"
    extreme = np.array([0.0, 1e-45, 1e-38, 1e-20, 1.0, 1e20, np.finfo(np.float32).max], np.float32)
    mass = np.asarray(selector.mass(jnp.asarray(extreme), jnp.ones(extreme.shape, bool)))
    assert np.isfinite(mass).all() and (mass >= 0).all(), f"mass of {extreme} is {mass}: not finite or negative"


def _check_selection(what: str, selector: Selector, got: Selection, index: Index, size: int):
    fields = {"slot": got.slot, "probability": got.probability, "weight": selector.weigh(got)}
    for name, x in fields.items():
        dtype = jnp.int32 if name == "slot" else jnp.float32
        assert (x.shape, x.dtype) == ((size,), dtype), f"{what}: {name} is {x.dtype}{x.shape}"
    slot, probability, weight = map(np.asarray, fields.values())
    mass = np.asarray(index.mass).reshape(-1)
    drawn = slot >= 0
    assert (slot >= -1).all() and (slot < mass.size).all(), f"{what}: a slot outside the table"
    assert (mass[slot[drawn]] > 0).all(), f"{what}: a slot without mass was drawn"
    there = int((mass > 0).sum())
    if not drawn.all():
        assert not drawn[np.argmin(drawn) :].any(), f"{what}: slot -1 before the end of what was drawn"
        assert drawn.sum() == there, f"{what}: -1 although {there - drawn.sum()} more could be drawn"
        assert len(set(slot[drawn])) == there, f"{what}: a slot twice and -1 in one batch"
    for name, x in (("probability", probability), ("weight", weight)):
        assert ((x[drawn] > 0) & (x[drawn] <= 1)).all(), f"{what}: {name} outside (0, 1]"
        assert (x[~drawn] == 0).all(), f"{what}: {name} is not 0 where slot is -1"
    assert selector.repeats or len(set(slot[drawn])) == drawn.sum(), f"{what}: a slot twice, although not repeats"
    assert not drawn.any() or weight.max() == 1, f"{what}: the largest weight of a batch is 1"
    _check_read(what, got, index, drawn)


def _check_read(what: str, got: Selection, index: Index, drawn: np.ndarray):
    read = (got.length, got.generation, got.ticket)
    assert len({x is None for x in read}) == 1, f"{what}: length, generation and ticket are given all or none"
    for name, x, field in (("length", got.length, index.length), ("generation", got.generation, index.generation)):
        if x is not None:
            assert (x.shape, x.dtype) == (drawn.shape, field.dtype), f"{what}: {name} is {x.dtype}{x.shape}"
            of_slot = np.where(drawn, np.asarray(field).reshape(-1)[np.asarray(got.slot)], 0)
            assert (np.asarray(x) == of_slot).all(), f"{what}: {name} is not that of the slot"
    if got.ticket is not None:
        kind = got.ticket.shape, got.ticket.dtype
        assert kind == ((1,), jnp.int32), f"{what}: ticket is {got.ticket.dtype}{got.ticket.shape}"
    if got.found is not None:
        assert (got.found.shape, got.found.dtype) == ((), jnp.uint32), f"{what}: found is not uint32[]"
        assert int(got.found) == drawn.sum(), f"{what}: found is not the number of slots that are not -1"
    if got.least is not None:
        positive = np.asarray(got.probability)[drawn]
        least = positive.min(initial=np.inf)
        assert float(got.least) == least, f"{what}: least is {got.least}, not the least probability, {least}"


def _check_devices(selector, state, index, size):
    """Over two devices the same as on one, on both."""
    if jax.device_count() < 2 or index.mass.shape[0] % 2:
        return
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    held, whole = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()
    specs: Any = {name: whole if name in ("clock", "ticket") else held for name in Index._fields}

    def run(state, index):
        got, after = selector.select(state, Index(**index), jax.random.key(2), size, "i")
        kept = got.slot, got.probability, selector.weigh(got), after
        return jax.tree.map(lambda x: x[None], kept)

    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(whole, specs), out_specs=held, check_vma=False))
    got, after = jax.jit(selector.select, static_argnums=3)(state, index, jax.random.key(2), size)
    wanted = got.slot, got.probability, selector.weigh(got), after
    both = run(state, index._asdict())
    for k in range(2):
        each = jax.tree.map(lambda x, k=k: np.asarray(x)[k], both)
        _assert_equal(f"select over two devices, on device {k}, against select on one", each, wanted)


def _check_state(before, after):
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), s) for s in (before, after)]
    assert kinds[0] == kinds[1], f"the selector's state changes its type: {kinds[0]} becomes {kinds[1]}"


def _check_transforms(selector, select, state, index, size):
    keys = jax.random.split(jax.random.key(3), 3)
    now, one_by_one = state, []
    for key in keys:
        got, now = select(now, index, key, size)
        one_by_one.append(got)

    def step(carry, key):
        got, carry = selector.select(carry, index, key, size)
        return carry, got

    end, scanned = jax.jit(lambda s: jax.lax.scan(step, s, keys))(state)
    _assert_equal("select inside lax.scan", (end, scanned), (now, _stack(one_by_one)))

    two = _stack([index, index._replace(clock=index.clock + np.uint32(1))])
    states = _stack([state, now])
    batched = jax.jit(jax.vmap(lambda s, i, k: selector.select(s, i, k, size)))(states, two, keys[:2])
    each = [select(s, jax.tree.map(lambda x, v=v: x[v], two), keys[v], size) for v, s in enumerate([state, now])]
    _assert_equal("select under vmap over states", batched, _stack(each))


def _stack(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _assert_equal(what, got, wanted):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(np.asarray(g), np.asarray(w)), f"{what}: {g} is not {w}"
