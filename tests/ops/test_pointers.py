"""`ops.pointers`: what it returns, what it follows, its errors; what gathers do with it is in test_gather_shards.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import ops
from gear_jax.specs import Window
from gear_jax.testing.ops import column_sized, place

PLATFORM = jax.default_backend()
HOST = "pinned_host"


def ids(*numbers):
    return jnp.asarray(numbers, jnp.int32)


def wanted(*arrays):
    """The words of where arrays lie."""
    return [list(divmod(x.unsafe_buffer_pointer(), 2**32)) for x in arrays]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_leaves_in_their_order(wrap):
    columns = place({"b": jnp.ones((1, 2, 3), jnp.uint8), "a": (jnp.zeros((1, 2, 3)), jnp.ones((5,), bool))}, HOST)
    words, ticket = wrap(ops.pointers)(columns)
    assert (words.shape, words.dtype) == ((3, 2), jnp.uint32)
    assert words.tolist() == wanted(*jax.tree.leaves(columns))
    assert ticket.tolist() == [0]


def test_more_columns_than_a_kernel_takes():
    columns = place([jnp.full((1, 2, 3), k, jnp.int32) for k in range(501)], HOST)
    assert jax.jit(ops.pointers)(columns)[0].tolist() == wanted(*columns)


def test_empty_arrays_and_no_arrays():
    words, ticket = ops.pointers([jnp.zeros((1, 0, 3))], ticket=ids(7))
    assert (words.tolist(), ticket.tolist()) == ([[0, 0]], [7])
    words, ticket = jax.jit(ops.pointers)([], ticket=ids(7))
    assert (words.shape, ticket.tolist()) == ((0, 2), [7])


def test_scan_and_cond():
    column = place(jnp.ones((1, 4, 2), jnp.float32), HOST)
    both = jax.jit(lambda c: jax.lax.scan(lambda t, _: ops.pointers(c, ticket=t)[::-1], ops.new_ticket(), None, 3))
    assert both(column)[1].tolist() == [wanted(column)] * 3
    either = jax.jit(lambda c, x: jax.lax.cond(x, lambda: ops.pointers(c)[0], lambda: ops.pointers(c)[0] + 1))
    assert either(column, True).tolist() == wanted(column)


def test_it_follows_a_write_and_lets_the_next_one_be_in_place():
    """The column that the write has changed lies where it lay, and nothing of its size is copied."""

    def step(column, ticket):
        column = ops.scatter(column, ids(1), jnp.ones((1, 2, 4000), jnp.float32), ticket=ticket)
        first, ticket = ops.pointers(column, ticket=ticket)
        shards = ops.Shards(first, column.shape, column.dtype)
        seen, _, ticket = ops.gather(shards, ids(1, 2), ids(0, 0), ids(2, 2), Window(0, 2), ticket=ticket)
        column = ops.scatter(column, ids(1, 2), jnp.full((2, 2, 4000), 2, jnp.float32), ticket=ticket)
        second, ticket = ops.pointers(column, ticket=ticket)
        return column, ticket, first, second, seen[..., 0]

    column = place(jnp.zeros((1, 5, 2, 4000), jnp.float32), HOST)
    run = jax.jit(step, donate_argnums=0).lower(column, ops.new_ticket()).compile()
    assert not [x for x in column_sized(run.as_text(), column.nbytes) if "copy" in x]
    at = wanted(column)
    column, _, first, second, seen = run(column, ops.new_ticket())
    assert first.tolist() == second.tolist() == wanted(column) == at
    np.testing.assert_array_equal(seen, [[1, 1], [0, 0]])


@pytest.mark.parametrize("transform", [jax.vmap, lambda f: jax.vmap(f, in_axes=(None, 0))])
def test_vmap_is_refused(transform):
    with pytest.raises(ValueError, match=r"ops.pointers under vmap: got a batch of tables, wanted one"):
        transform(lambda c, t: ops.pointers(c, ticket=t))(jnp.zeros((2, 1, 3, 4)), jnp.zeros((2, 1), jnp.int32))


def test_errors():
    with pytest.raises(TypeError, match=r"ticket: got float32\[1\], wanted int32\[1\]"):
        ops.pointers(jnp.zeros((1, 2, 3)), ticket=jnp.zeros((1,)))
    shards = ops.Shards(jnp.zeros((1, 2), jnp.uint32), (1, 2, 3), jnp.float32)
    with pytest.raises(TypeError, match=r"pointers: columns\[1\]: got Shards, wanted an array"):
        ops.pointers([jnp.zeros((1, 2, 3)), shards])


@pytest.mark.gpu
def test_memory_that_other_devices_do_not_read_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"pointers: columns\[1\]: got memory that other GPUs do not"):
        jax.block_until_ready(ops.pointers([place(jnp.zeros((1, 2, 3)), HOST), jnp.zeros((1, 2, 3))]))


@pytest.mark.gpu
def test_it_is_no_part_of_a_cuda_graph():
    """Where a program runs in one, its other calls do, and pointers are those of each run's own arrays."""
    f = jax.jit(lambda c, x: (ops.pointers(c)[0], jnp.cumsum(jnp.sin(x) @ x.T)))
    for k in range(6):
        column = place(jnp.full((1, 2, 3 + k % 2), k, jnp.float32), HOST)
        assert f(column, jnp.ones((64, 64)))[0].tolist() == wanted(column)
