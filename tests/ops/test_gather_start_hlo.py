"""What XLA makes of programs that start gathers, write the column and end them, in any order: no copy of the column."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import ops
from gear_jax.specs import Window
from gear_jax.testing.ops import column_sized

SHAPE = (2, 32, 64, 64)  # 1 MiB
NBYTES = 4 * 2 * 32 * 64 * 64
ROWS, WINDOW = 4, Window(-1, 3)
DEPTH = 4


def ids(shift=0):
    return jnp.arange(ROWS, dtype=jnp.int32) * 7 + jnp.int32(shift)


def start(carry, shift=0):
    column, ticket, flying, out = carry
    slots = ids(shift)
    pending, ticket = ops.gather_start(column, slots, slots, slots * 0 + 64, WINDOW, ticket=ticket, depth=DEPTH)
    return column, ticket, (*flying[1:], pending), out


def write(carry, value=1.0):
    column, ticket, flying, out = carry
    values = jnp.full((ROWS, 2, 64), value, jnp.float32)
    column = ops.scatter(column, ids(), values, starts=ids(), ticket=ticket)
    return column, ticket, flying, out


def done(carry):
    """Ends the youngest; `nothing` takes its place."""
    column, ticket, flying, out = carry
    data, _, ok = ops.gather_done(flying[-1])
    return (
        column,
        ticket,
        (jax.tree.map(jnp.zeros_like, flying[-1]), *flying[:-1]),
        out + data.sum() + ok[0].astype(jnp.float32),
    )


def read(carry):
    column, ticket, flying, out = carry
    data, _, ticket = ops.gather(column, ids(), ids(), ids() + 64, WINDOW, ticket=ticket)
    return column, ticket, flying, out + data.sum()


CALLS = {"S": start, "W": write, "D": done, "R": read}


def program(letters):
    def run(carry):
        for letter in letters:
            carry = CALLS[letter](carry)
        return carry

    return run


def in_scan(f):
    return lambda carry: jax.lax.scan(lambda c, _: (f(c), None), carry, length=3)[0]


def in_cond(f):
    return lambda carry: jax.lax.cond(carry[1][0] == 0, f, lambda c: c, carry)


def once(f):
    return f


def given():
    column = jnp.arange(np.prod(SHAPE), dtype=jnp.float32).reshape(SHAPE) % 7
    slots = ids()
    pending, _ = ops.gather_start(column, slots, slots, slots * 0 + 64, WINDOW, depth=DEPTH)
    nothing = tuple(jax.tree.map(jnp.zeros_like, pending) for _ in range(2))
    return column, jnp.zeros(1, jnp.int32), nothing, jnp.zeros(())


@pytest.fixture(autouse=True, scope="module")
def _release():
    yield
    ops.release_queue(0)


ORDERS = ["".join(p) for p in itertools.permutations("SWD")] + ["SWDSW", "SSWDD", "DSWR", "RWSD", "SWSWDD", "WSDW"]
# As with `gather`: XLA copies a column that a branch reads, writes and reads again, unless a write ends the branch.
IN_COND = [o for o in ORDERS if not ("W" in o and o.rstrip("D")[-1] in "SR" and set("SR") & set(o.split("W")[0]))]


@pytest.mark.parametrize(
    ("letters", "around"),
    [(o, a) for a in (once, in_scan) for o in ORDERS] + [(o, in_cond) for o in IN_COND],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_no_copy_of_a_column(letters, around):
    carry = given()
    f = around(program(letters))
    wanted = f(jax.tree.map(jnp.array, carry))
    run = jax.jit(f, donate_argnums=0).lower(carry).compile()
    assert column_sized(run.as_text(), NBYTES) == []
    before = carry[0].unsafe_buffer_pointer()
    got = run(carry)
    assert got[0].unsafe_buffer_pointer() == before
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[3], wanted[3])


@pytest.mark.cpu
def test_without_the_ticket_there_is_a_copy():
    def f(carry):
        column, _, flying, out = start(carry)
        return write((column, carry[1], flying, out))

    assert column_sized(jax.jit(f, donate_argnums=0).lower(given()).compile().as_text(), NBYTES)


def test_the_end_takes_no_column():
    carry = given()
    pending = carry[2][0]
    text = jax.jit(functools.partial(ops.gather_done, after=carry[1])).lower(pending).compile().as_text()
    assert text.count('custom_call_target="gear_gather_done"') == 1
    assert column_sized(text, NBYTES) == []


@pytest.mark.parametrize("around", [once, in_scan])
def test_a_column_in_pinned_memory_stays_there(around):
    """The compiled program takes the column as it is, in its own memory space, and copies none of it."""
    column, *rest = given()
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    carry = (jax.device_put(column, pinned), *rest)
    f = around(program("SWDSR"))
    wanted = f((column, *jax.tree.map(jnp.array, rest)))
    run = jax.jit(f, donate_argnums=0).lower(carry).compile()
    text = run.as_text()
    assert column_sized(text, NBYTES) == [] and "copy-start" not in text
    starts = [line for line in text.splitlines() if 'custom_call_target="gear_gather_start"' in line]
    assert len(starts) == 2
    before = carry[0].unsafe_buffer_pointer()
    got = run(carry)
    assert got[0].unsafe_buffer_pointer() == before and got[0].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(got[3], wanted[3])
