"""`ops.gather_start` and `ops.gather_done`: the gather in two halves, and what becomes of handles that are stale."""

import functools
import itertools
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import ops
from gear_jax.ops import _gather_start
from gear_jax.specs import PADS, Window
from gear_jax.testing.ops import (
    DTYPES,
    TRANSFORMS,
    X64_DTYPES,
    assert_same_bits,
    check_gather,
    random_rows,
    random_values,
)

WINDOW = Window(-2, 5, pad_value=3)
SHAPE = (2, 4, 6)
queues = itertools.count(100)


@pytest.fixture
def queue():
    """A queue that no other test has used."""
    number = next(queues)
    yield number
    ops.release_queue(number)


def whole(columns, slots, starts, lengths, windows=None, **options):
    """`ops.gather`, by way of `gather_start` and `gather_done`."""
    pending, ticket = ops.gather_start(columns, slots, starts, lengths, windows, **options)
    data, mask, _ = ops.gather_done(pending)
    return data, mask, ticket


def table(seed=0, dtype=np.float32, steps=(3,)):
    rng = np.random.default_rng(seed)
    return {"a": jnp.asarray(random_values(rng, (*SHAPE, *steps), dtype)), "b": jnp.arange(48).reshape(SHAPE)}


def rows(seed=0, n=7):
    return jax.tree.map(jnp.asarray, random_rows(np.random.default_rng(seed), SHAPE, (n,)))


def start(columns, seed, queue, **options):
    return ops.gather_start(columns, *rows(seed), WINDOW, queue=queue, **options)


def check(columns, seed, pending, good=True):
    """The end of a gather is that of `ops.gather`, or all padding."""
    data, mask, ok = ops.gather_done(pending)
    wanted, wanted_mask, _ = ops.gather(columns, *rows(seed), WINDOW)
    if not good:
        wanted = jax.tree.map(lambda x: jnp.full_like(x, 3), wanted)
        wanted_mask = jax.tree.map(jnp.zeros_like, wanted_mask)
    assert_same_bits((data, mask), (wanted, wanted_mask))
    np.testing.assert_array_equal(ok, [good])


@pytest.mark.parametrize("window", [Window(-2, 4), None], ids=["window", "whole"])
@pytest.mark.parametrize("transform", [t for t in TRANSFORMS if "vmap" not in t])
def test_transformations(transform, window, queue):
    check_gather(functools.partial(whole, queue=queue), transform, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_with_every_padding(dtype, queue):
    for seed, pad in enumerate(PADS):
        check_gather(
            functools.partial(whole, queue=queue),
            dtypes=(dtype,),
            step_shape=(),
            window=Window(-3, 6, pad, 1),
            seed=seed,
        )


def test_64_bit_dtypes(queue):
    with jax.enable_x64(True):
        check_gather(functools.partial(whole, queue=queue), dtypes=X64_DTYPES, window=Window(-2, 5, "head", 3))


@pytest.mark.parametrize("n", [0, 1, 2, 7])
@pytest.mark.parametrize("step_shape", [(), (17,), (4099,)], ids=str)
def test_step_and_batch_sizes(step_shape, n, queue):
    check_gather(functools.partial(whole, queue=queue), dtypes=("uint8",), step_shape=step_shape, rows=n)


def test_a_batch_that_is_split_over_threads(queue):
    rng = np.random.default_rng(0)
    columns = {"a": jnp.asarray(random_values(rng, (2, 5, 101, 1031), np.uint8)), "b": jnp.zeros((2, 5, 101))}
    given = jax.tree.map(jnp.asarray, random_rows(rng, (2, 5, 101), (67,)))
    wanted = ops.gather(columns, *given, Window(-50, 97, "head"))[:2]
    got = jax.jit(lambda c, r: whole(c, *r, Window(-50, 97, "head"), queue=queue)[:2])(columns, given)
    assert_same_bits(got, wanted)


def test_the_start_takes_a_copy(queue):
    """What is written after the start, and what becomes of its arguments, does not show."""
    columns = table()
    wanted = ops.gather(columns, *rows(1), WINDOW)[:2]
    pending, ticket = start(columns, 1, queue)
    values = jax.tree.map(lambda x: jnp.zeros((8, *x.shape[2:]), x.dtype), columns)
    write = jax.jit(lambda c, t: ops.scatter(c, jnp.arange(8, dtype=jnp.int32), values, ticket=t), donate_argnums=0)
    columns = write(columns, ticket)
    data, mask, ok = ops.gather_done(pending)
    assert_same_bits((data, mask), wanted)
    assert ok[0] and not np.asarray(columns["b"]).any()


def test_in_the_carry_of_a_scan(queue):
    columns = table()
    slots = jnp.stack([rows(s)[0] for s in range(6)])
    others = rows(0)[1:]

    def step(carry, now):
        pending, ticket = carry
        data, mask, ok = ops.gather_done(pending)
        return ops.gather_start(columns, now, *others, WINDOW, ticket=ticket, queue=queue), (data, mask, ok)

    def run(slots):
        first = ops.gather_start(columns, slots[0], *others, WINDOW, queue=queue)
        (pending, _), got = jax.lax.scan(step, first, slots[1:])
        return got, ops.gather_done(pending)

    got, last = jax.jit(run)(slots)
    for i in range(5):
        data, mask, _ = ops.gather(columns, slots[i], *others, WINDOW)
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], got), (data, mask, jnp.ones(1, bool)))
    assert_same_bits(last[:2], ops.gather(columns, slots[5], *others, WINDOW)[:2])


def test_several_in_the_carry_of_a_scan_in_the_order_of_the_source(queue):
    """With `after`, a depth of the gathers in the carry is enough, whatever XLA would like."""
    columns = table()

    def step(carry, slots):
        (first, second), ticket = carry
        data, mask, ok = ops.gather_done(first)
        third, ticket = ops.gather_start(
            columns, slots, *rows(0)[1:], WINDOW, ticket=ticket, after=(data, ok), queue=queue, depth=2
        )
        return ((second, third), ticket), (data, mask, ok)

    slots = jnp.stack([rows(s)[0] for s in range(9)])

    def run(slots):
        flying, ticket = [], None
        for s in slots[:2]:
            pending, ticket = ops.gather_start(columns, s, *rows(0)[1:], WINDOW, ticket=ticket, queue=queue)
            flying.append(pending)
        return jax.lax.scan(step, (tuple(flying), ticket), slots[2:])[1]

    data, mask, ok = jax.jit(run)(slots)
    assert np.asarray(ok).all()
    for i in range(7):
        wanted = ops.gather(columns, slots[i], *rows(0)[1:], WINDOW)[:2]
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], (data, mask)), wanted)


def test_across_programs(queue):
    columns = table()
    pending, ticket = jax.jit(lambda c: start(c, 2, queue))(columns)
    leaves, tree = jax.tree.flatten(pending)
    assert [x.shape for x in leaves] == [(4,)] and hash(tree) == hash(jax.tree.structure(pending))
    carried = jax.jit(lambda p: jax.tree.map(lambda x: x + 0, p))(tree.unflatten(leaves))
    got = jax.jit(ops.gather_done)(carried)
    assert_same_bits(got[:2], ops.gather(columns, *rows(2), WINDOW, ticket=ticket)[:2])
    assert got[2][0]


def test_in_a_branch(queue):
    columns = table()
    nothing = jax.tree.map(jnp.zeros_like, start(columns, 0, queue)[0])

    @jax.jit
    def run(flag, pending):
        pending = jax.lax.cond(flag, lambda: start(columns, 3, queue)[0], lambda: pending)
        return jax.lax.cond(flag, ops.gather_done, lambda p: ops.gather_done(nothing), pending)

    assert_same_bits(run(True, nothing)[:2], ops.gather(columns, *rows(3), WINDOW)[:2])
    assert not run(False, nothing)[2][0]


def sharded(f, in_specs, out_specs):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


@pytest.mark.devices(8)
def test_shard_map_over_programs(queue):
    """Each device has queues and handles of its own; a handle on another device is stale."""
    spec = jax.sharding.PartitionSpec("x")
    rng = np.random.default_rng(0)
    columns = {"a": jnp.asarray(random_values(rng, (8, 4, 6, 3), np.float32))}
    given = jax.tree.map(jnp.asarray, random_rows(rng, (1, 4, 6), (8 * 5,)))
    pending = sharded(lambda c, r: ops.gather_start(c, *r, WINDOW, queue=queue, depth=1)[0], spec, spec)(columns, given)
    assert pending.handle.shape == (32,)
    assert len(np.unique(pending.handle.reshape(8, 4)[:, 0])) == 8
    with pytest.raises(ValueError, match=r"pending.handle: got int32\[32\], wanted int32\[4\].*shard_map"):
        ops.gather_done(pending)
    data, mask, ok = sharded(ops.gather_done, spec, spec)(pending)
    assert np.asarray(ok).all()
    wanted = sharded(lambda c, r: ops.gather(c, *r, WINDOW)[:2], spec, spec)(columns, given)
    assert_same_bits((data, mask), wanted)
    assert not np.asarray(sharded(ops.gather_done, spec, spec)(pending)[2]).any()


def test_each_handle_once(queue):
    columns = table()
    pending, _ = start(columns, 0, queue)
    check(columns, 0, pending)
    check(columns, 0, pending, good=False)


def test_the_oldest_is_dropped_beyond_the_depth(queue):
    columns, ticket = table(), None
    for depth in (1, 2, 5):
        flying = []
        for seed in range(8):
            pending, ticket = start(columns, seed, queue + 1000 * depth, depth=depth, ticket=ticket)
            flying.append(pending)
        jax.block_until_ready(flying)
        for seed in reversed(range(8)):
            check(columns, seed, flying[seed], good=seed >= 8 - depth)
        ops.release_queue(queue + 1000 * depth)


def test_a_gather_that_nobody_ends(queue):
    columns, ticket = table(), None
    for seed in range(20):
        pending, ticket = start(columns, seed, queue, ticket=ticket)
        if seed % 5 == 4:
            check(columns, seed, pending)
        del pending


def test_a_batch_that_grows_and_shrinks(queue):
    columns, ticket = table(), None
    for n in (3, 40, 1, 0, 41, 7):
        pending, ticket = ops.gather_start(columns, *rows(n, n), WINDOW, queue=queue, ticket=ticket, depth=1)
        assert_same_bits(ops.gather_done(pending)[:2], ops.gather(columns, *rows(n, n), WINDOW)[:2])


def test_tables_and_queues_in_any_order():
    numbers = [next(queues) for _ in range(3)]
    for order in itertools.permutations(range(3)):
        tables = [table(seed) for seed in range(3)]
        flying = [start(tables[k], k, numbers[k], depth=1)[0] for k in range(3)]
        for k in order:
            check(tables[k], k, flying[k])
    for number in numbers:
        ops.release_queue(number)


def test_foreign_handles_are_stale(queue):
    columns = table()
    pending, _ = start(columns, 0, queue)
    word = np.asarray(pending.handle)
    for i, change in ((0, 1), (0, -5), (0, 2**31 - 1 - word[0]), (1, 1), (2, 1), (3, 1)):
        forged = word.copy()
        forged[i] = np.int32(forged[i] ^ np.int32(1)) if change == 1 else np.int32(forged[i] + change)
        check(columns, 0, jax.tree.map(lambda _, f=forged: jnp.asarray(f), pending), good=False)
    check(columns, 0, jax.tree.map(jnp.zeros_like, pending), good=False)
    # Another batch size, of which there is less in staging.
    shapes = tuple((s[0] + 100, *s[1:]) for s in pending.shapes)
    larger = _gather_start.Pending(pending.handle, pending.tree, shapes, pending.dtypes, pending.pad_values)
    assert not ops.gather_done(larger)[2][0]
    check(columns, 0, pending)


@pytest.mark.devices(2)
def test_a_handle_of_another_device_is_stale(queue):
    columns = table()
    one, other = jax.devices()[:2]
    pendings = {d: start(jax.device_put(columns, d), 0, queue)[0] for d in (one, other)}
    assert all(p.handle.devices() == {d} for d, p in pendings.items())
    check(columns, 0, jax.device_put(pendings[other], one), good=False)
    check(columns, 0, pendings[one])
    assert ops.gather_done(pendings[other])[2][0]


def test_release(queue):
    columns = table()
    pending, _ = start(columns, 0, queue)
    jax.block_until_ready(pending)
    ops.release_queue(queue)
    check(columns, 0, pending, good=False)
    check(columns, 1, start(columns, 1, queue)[0])
    ops.release_queue(queue)
    ops.release_queue(queue)


def test_a_queue_that_nobody_holds_is_freed_by_the_next_start(queue):
    columns = table()
    held = _gather_start.Queue()

    def begin(number):
        given = {"ticket": None, "after": (), "queue": number, "depth": 2}
        return jax.block_until_ready(_gather_start.start_in_queue(columns, *rows(0), WINDOW, **given)[0])

    first, second = begin(held.number), begin(held.number)
    another = pickle.loads(pickle.dumps(held))
    assert another.number != held.number
    del held
    check(columns, 0, first)  # not by the retiring itself
    check(columns, 0, begin(another.number))
    check(columns, 0, second, good=False)


def test_threads_with_queues_of_their_own():
    columns, failed = table(), []

    def work(seed):
        try:
            number, ticket = next(queues), None
            for i in range(20):
                pending, ticket = start(columns, seed + i, number, ticket=ticket)
                check(columns, seed + i, pending)
            ops.release_queue(number)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(100 * k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed


@pytest.mark.parametrize("f", [ops.gather_start, ops.gather_done], ids=["start", "done"])
def test_vmap_says_what_to_do(f, queue):
    columns = table()
    if f is ops.gather_done:
        pending, _ = start(columns, 0, queue)
        given, call = jax.tree.map(lambda x: jnp.stack([x, x]), pending), f
    else:
        given, call = jnp.stack([rows(0)[0]] * 2), lambda s: f(columns, s, *rows(0)[1:], queue=queue)
    with pytest.raises(ValueError, match=r"under vmap: got a batch of gathers.*Fold the batch into the rows"):
        jax.vmap(call)(given)


def test_bad_arguments(queue):
    columns = table()
    for depth in (0, 65, 1.0, True, None):
        with pytest.raises(ValueError, match=r"depth: got .*, wanted an integer in \[1, 64\]"):
            start(columns, 0, queue, depth=depth)
    for number in (-1, 1 << 16, "a", False):
        with pytest.raises(ValueError, match=r"queue: got .*, wanted an integer in \[0, 65536\)"):
            start(columns, 0, number)
    with pytest.raises(TypeError, match=r"pending: got tuple, wanted a Pending\. Pass what gather_start returned"):
        ops.gather_done(start(columns, 0, queue))
    with pytest.raises(TypeError, match="slots: got dtype float32"):
        ops.gather_start(columns, jnp.zeros(3), *rows(0, 3)[1:], queue=queue)
    with pytest.raises(ValueError, match=r"gather_start: got a batch of \d+ bytes, wanted fewer than 2\*\*60"):
        ops.gather_start(jnp.zeros((1, 1, 1, 1 << 14)), *rows(0, 1 << 14), Window(0, 2**31 - 1), queue=queue)


def test_checks(checks, queue):
    del checks
    bad = jnp.full(7, 99, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"gather: slots\[0\]: got 99, wanted a slot in \[0, 8\)"):
        jax.block_until_ready(ops.gather_start(table(), bad, *rows(0)[1:], WINDOW, queue=queue))


def test_no_memory(queue):
    """880 TB of staging, which no XLA array has to hold."""
    given = rows(0, 100)
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=rf"staging memory: got none .*wanted 87982405017\d{{4}} bytes of .* of queue {queue}.*a smaller batch",
    ):
        jax.block_until_ready(ops.gather_start(jnp.zeros((1, 1, 1, 1024)), *given, Window(0, 2**31 - 1), queue=queue))
