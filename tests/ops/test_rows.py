"""`gather_rows` and `scatter_rows`: the ops on arrays without steps; and what every op asks of a ticket."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import ops

P, S = 2, 5
SLOTS = jnp.asarray([3, 9, -1, 0, 10, 3], jnp.int32)


def fields():
    rng = np.random.default_rng(0)
    return {
        "word": jnp.asarray(rng.integers(0, 99, (P, S)), jnp.int32),
        "wide": jnp.asarray(rng.normal(size=(P, S, 3)), jnp.float32),
        "byte": jnp.asarray(rng.integers(0, 9, (P, S, 1)), jnp.uint8),
    }


def rows_of(tree, slots):
    """What the rows should be, in NumPy: zeros outside."""
    outside = (np.asarray(slots) < 0) | (np.asarray(slots) >= P * S)

    def rows(x):
        x = np.asarray(x).reshape(P * S, *x.shape[2:])[np.where(outside, 0, slots)]
        x[outside] = 0
        return x

    return jax.tree.map(rows, tree)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gather_rows(wrap):
    got, ticket = wrap(ops.gather_rows)(fields(), SLOTS)
    jax.tree.map(np.testing.assert_array_equal, got, rows_of(fields(), SLOTS))
    assert ticket.tolist() == [0]


def test_gather_rows_of_batched_and_of_shared_fields():
    slots = jnp.stack([SLOTS, SLOTS[::-1]])
    got, _ = jax.vmap(ops.gather_rows, (None, 0))(fields(), slots)
    two = jax.tree.map(lambda x: jnp.stack([x, x + x]), fields())
    batched, _ = jax.vmap(ops.gather_rows)(two, slots)
    for v in range(2):
        one = jax.tree.map(lambda x, v=v: x[v], two)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, v=v: x[v], got), rows_of(fields(), slots[v]))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, v=v: x[v], batched), rows_of(one, slots[v]))


@pytest.mark.parametrize("batched", [False, True])
def test_scatter_rows(batched):
    slots = jnp.asarray([4, -1, 7, 10], jnp.int32)
    values = jax.tree.map(lambda x: jnp.ones((4, *x.shape[2:]), x.dtype) * 7, fields())

    def wanted(x):
        x = np.array(x).reshape(P * S, *x.shape[2:])
        x[[4, 7]] = 7
        return x.reshape(P, S, *x.shape[1:])

    if batched:
        two = jax.tree.map(lambda x: jnp.stack([x, x]), fields())
        got = jax.vmap(ops.scatter_rows, (0, None, None))(two, slots, values)
        for v in range(2):
            jax.tree.map(lambda g, x, v=v: np.testing.assert_array_equal(g[v], wanted(x)), got, fields())
    else:
        got = jax.jit(ops.scatter_rows)(fields(), slots, values)
        jax.tree.map(lambda g, x: np.testing.assert_array_equal(g, wanted(x)), got, fields())


def test_rows_that_do_not_fit_are_refused():
    slots = jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match=r"fields: got .*, wanted the same \[P, S\] in each"):
        ops.gather_rows([jnp.ones((1, 9)), jnp.ones((1, 8))], slots)
    with pytest.raises(ValueError, match="fields: got"):
        ops.gather_rows([], slots)
    for values in (jnp.ones((2,)), jnp.ones((1,), jnp.bfloat16), jnp.ones((1, 1))):
        with pytest.raises(ValueError, match=r"values\[0\]: got .*, wanted float32\[1\]"):
            ops.scatter_rows([jnp.ones((1, 9))], slots, [values])


@pytest.mark.parametrize("ticket", [jnp.zeros((0,), jnp.int32), jnp.zeros((1,)), jnp.int32(0), 0])
def test_a_ticket_that_is_none(ticket):
    column, slots, one = jnp.ones((1, 4, 2)), jnp.zeros((1,), jnp.int32), jnp.ones((1,))
    tree = jnp.zeros((1, 4)), jnp.zeros((1, 4)), jnp.zeros((1, ops.sumtree_width(4)))
    for call in (
        lambda: ops.gather(column, slots, slots, slots, ticket=ticket),
        lambda: ops.scatter(column, slots, jnp.ones((1, 2)), ticket=ticket),
        lambda: ops.gather_rows([tree[0]], slots, ticket=ticket),
        lambda: ops.scatter_rows([tree[0]], slots, [one], ticket=ticket),
        lambda: ops.sumtree_update(*tree, slots, one, one, ticket=ticket),
    ):
        with pytest.raises(TypeError, match=r"ticket: got .*, wanted int32\[1\]"):
            call()


def test_a_slot_outside_is_a_fault_under_vmap_too(checks):
    columns = jnp.zeros((2, 1, 4, 3))
    slots = jnp.asarray([[0], [4]], jnp.int32)
    with pytest.raises(Exception, match="scatter: row 1"):
        jax.block_until_ready(jax.vmap(ops.scatter)(columns, slots, jnp.ones((2, 1, 3))))
    ok = jax.vmap(ops.scatter)(columns, slots.at[1].set(-1), jnp.ones((2, 1, 3)))
    assert ok.sum() == 3


def test_tables_with_too_many_slots_together_are_refused():
    columns = jax.ShapeDtypeStruct((3, 2**10, 2**20, 1), jnp.uint8)
    slots = jax.ShapeDtypeStruct((3, 1), jnp.int32)
    with pytest.raises(ValueError, match=r"vmap over tables: got 3 of 1073741824 slots"):
        jax.eval_shape(jax.vmap(lambda c, s: ops.gather(c, s, s, s)), columns, slots)


def test_updates_of_batched_trees_are_one_call_and_the_same():
    rng = np.random.default_rng(0)
    v, s, k = 3, 40, 9
    mass = jnp.asarray(rng.uniform(size=(v, 1, s)), jnp.float32)
    sums = jnp.zeros((v, 1, ops.sumtree_width(s)))
    slots = jnp.asarray(rng.integers(-1, s + 1, (v, k)), jnp.int32)
    new = jnp.asarray(rng.uniform(size=(v, k)), jnp.float32)
    got = jax.vmap(ops.sumtree_update)(mass, mass, sums, slots, new, new)
    for i in range(v):
        wanted = ops.sumtree_update(mass[i], mass[i], sums[i], slots[i], new[i], new[i])
        np.testing.assert_array_equal(got[0][i], wanted[0])
        np.testing.assert_array_equal(got[1][i], wanted[1])
    text = jax.jit(jax.vmap(ops.sumtree_update)).lower(mass, mass, sums, slots, new, new).compile().as_text()
    assert text.count('custom_call_target="gear_sumtree_update"') == 1 and " while(" not in text
