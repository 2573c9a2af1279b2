"""`sample_start` and `sample_done`: the same batch as `sample`, whatever happens in between."""

import copy
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.selectors import Fifo, Permutation, Prioritized, TopK, Uniform
from gear_jax.testing.ops import column_sized, to_numpy

B = 6
WINDOW = gear.Window(-1, 3)


def key(n=0):
    return jax.random.key(n)


def two_calls(replay, state, k, batch_size=B, **options):
    state, pending = replay.sample_start(state, k, batch_size, **options)
    return state, replay.sample_done(pending)


def copied(replay, state):
    return replay.place(jax.tree.map(jnp.array, to_numpy(state)))


@pytest.fixture(scope="module")
def replay(make):
    return make(Prioritized(), 8, WINDOW)


@pytest.mark.parametrize("selector", [Uniform(), Prioritized(), TopK(), Fifo(), Permutation()], ids=repr)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
def test_equals_sample(make, filled, same, selector, traced):
    """Every field of the batch and of the state; TopK and Fifo have rows that are not valid."""
    replay = make(selector, 8, WINDOW)
    state, _ = filled(replay, 5, [1, 5, 3, 2, 4], [1, 2, 0.5, 3, 1])
    for batch_size in (1, B):
        f, g = replay.sample, lambda s, k, b: two_calls(replay, s, k, b)
        if traced:
            f, g = jax.jit(f, static_argnums=2), jax.jit(g, static_argnums=2)
        wanted = f(copied(replay, state), key(batch_size), batch_size)
        state, got = g(state, key(batch_size), batch_size)
        same((state, got), wanted)


def test_an_empty_table(replay, same):
    wanted = replay.sample(replay.init(), key(), B)
    same(two_calls(replay, replay.init(), key()), wanted)
    assert not np.asarray(wanted[1].valid).any()


def test_calls_in_between_do_not_change_it(replay, filled, rows, same):
    state, _ = filled(replay, 8)
    _, wanted = replay.sample(copied(replay, state), key(), B)
    state, pending = replay.sample_start(state, key(), B)
    state, _ = replay.add(state, rows(range(100, 108)), np.full(8, 4, np.int32))
    state = replay.update_priorities(state, pending.handles, jnp.full(B, 9.0))
    state, other = replay.sample(state, key(1), B)
    same(replay.sample_done(pending), wanted)
    assert (np.asarray(other.data["number"])[np.asarray(other.mask["number"])] >= 10_000).all()
    assert replay.stats(state)["stale_updates"] == B  # all were evicted in between


def test_overlapped_in_a_scan(replay, filled, rows, same):
    """The loop that a GPU overlaps: end a sample, start the next, learn, add."""
    state, _ = filled(replay, 8)
    keys = jax.random.split(key(), 6)

    def learn(state, sample, k):
        state = replay.update_priorities(state, sample.handles, jax.random.uniform(k, (B,)))
        number = jnp.broadcast_to(jax.random.randint(k, (), 0, 99, jnp.int32), (1, 5))
        values = {"number": number, "pair": jnp.zeros((1, 5, 2), jnp.float32)}
        return replay.add(state, values, jnp.full((1,), 5, jnp.int32))[0]

    def overlapped(carry, k):
        state, pending = carry
        state, following = replay.sample_start(state, k, B)
        sample = replay.sample_done(pending, after=following)
        return (learn(state, sample, k), following), sample

    def serial(carry, k):
        state, sample = carry
        state, following = replay.sample(state, k, B)
        return (learn(state, sample, k), following), sample

    run = jax.jit(lambda s, ks: jax.lax.scan(serial, replay.sample(s, ks[0], B), ks[1:]))
    wanted = run(copied(replay, state), keys)
    run = jax.jit(lambda s, ks: jax.lax.scan(overlapped, replay.sample_start(s, ks[0], B), ks[1:]))
    (state, pending), samples = run(state, keys)
    same((state, replay.sample_done(pending)), wanted[0])
    same(samples, wanted[1])


def test_lost_samples_are_not_valid(replay, filled):
    state, _ = filled(replay, 8)
    state, first = replay.sample_start(state, key(0), B)
    state, second = replay.sample_start(state, key(1), B)
    state, third = replay.sample_start(state, key(2), B)
    for lost in (first, first):
        sample = jax.tree.map(np.asarray, replay.sample_done(lost))
        assert not sample.valid.any() and (sample.handles.slot == -1).all() and not sample.handles.generation.any()
        assert not any(x.any() for x in jax.tree.leaves((sample.data, sample.mask, sample.anchor, sample.length)))
        assert not sample.probability.any() and not sample.weight.any()
        before = np.asarray(state.priority)
        state = replay.update_priorities(state, jax.tree.map(jnp.asarray, sample.handles), jnp.full(B, 7.0))
        np.testing.assert_array_equal(state.priority, before)
    for kept in (third, second):
        assert np.asarray(replay.sample_done(kept).valid).all()
        assert not np.asarray(replay.sample_done(kept).valid).any()


def test_depth(replay, filled):
    state, _ = filled(replay, 8)
    flying = []
    for i in range(4):
        state, pending = replay.sample_start(state, key(i), B, depth=3)
        flying.append(pending)
    assert [bool(replay.sample_done(p).valid.all()) for p in flying] == [False, True, True, True]


def test_each_replay_has_a_queue_of_its_own(filled):
    table = gear.TableSpec({"number": gear.ColumnSpec((), jnp.int32), "pair": gear.ColumnSpec((2,), jnp.float32)}, 5, 8)
    replays = [gear.make_replay(table) for _ in range(3)]
    replays.append(copy.deepcopy(replays[0]))
    flying = []
    for i, r in enumerate(replays):
        state, _ = filled(r, 8, lengths=i + 1)
        for k in range(2):
            state, pending = r.sample_start(state, key(k), B)
            flying.append((r, i + 1, pending))
    for r, length, pending in reversed(flying):
        sample = r.sample_done(pending)
        assert np.asarray(sample.valid).all() and (np.asarray(sample.length) == length).all()
    del replays, flying, r
    gc.collect()


def test_pending_samples_are_a_pytree(replay, filled, same):
    state, _ = filled(replay, 8)
    _, wanted = replay.sample(copied(replay, state), key(), B)
    state, pending = replay.sample_start(state, key(), B)
    assert max(x.size for x in jax.tree.leaves(pending)) == B
    leaves, tree = jax.tree.flatten(jax.jit(lambda p: p)(pending))
    same(jax.jit(replay.sample_done)(tree.unflatten(leaves)), wanted)
    del state


def test_errors(make, replay, filled):
    state, _ = filled(replay, 8)
    with pytest.raises(ValueError, match=r"depth: got 0, wanted an integer in \[1, 64\]"):
        replay.sample_start(state, key(), B, depth=0)
    with pytest.raises(TypeError, match="batch_size: got float"):
        replay.sample_start(state, key(), 1.5)
    with pytest.raises(ValueError, match=r"key: got int32\[\], wanted one jax.random key"):
        replay.sample_start(state, 0, B)
    with pytest.raises(TypeError, match="sample_start: state: got int, wanted a ReplayState"):
        replay.sample_start(0, key(), B)
    with pytest.raises(TypeError, match=r"pending: got tuple, wanted a PendingSample\. Pass what sample_start"):
        replay.sample_done(replay.sample_start(state, key(), B))
    with pytest.raises(ValueError, match="sample_start: state: got a state that an earlier call has consumed"):
        replay.sample_start(state, key(), B)
    other, _ = filled(make(Uniform(), 16, WINDOW), 3)
    with pytest.raises(ValueError, match=r"sample_start: state: got .*wanted"):
        replay.sample_start(other, key(), B)


def test_without_donation_the_state_stays(make, filled, same):
    replay = make(Prioritized(), 8, WINDOW, donate=False)
    state, _ = filled(replay, 8)
    _, wanted = replay.sample(state, key(), B)
    _, first = replay.sample_start(state, key(), B)
    same(replay.sample_done(first), wanted)
    same(replay.sample_done(replay.sample_start(state, key(), B)[1]), wanted)


def test_under_checks(checks, make, filled):
    """Rows that are not valid are no fault."""
    del checks
    replay = make(TopK(), 8, WINDOW, streams=1)
    state, _ = filled(replay, 2)
    _, sample = two_calls(replay, state, key())
    assert np.asarray(sample.valid).tolist() == [True] * 2 + [False] * (B - 2)


TABLE = gear.TableSpec({"a": gear.ColumnSpec((5,), jnp.float32), "b": gear.ColumnSpec((), jnp.int32)}, 3, 16_384)


# In a scan one order is nearly that of its rotations: all that begin with S, and all rotations of two.
ORDERS = ["SDAU", "SDUA", "SADU", "SAUD", "SUDA", "SUAD", "DAUS", "AUSD", "USDA", "ADUS", "DUSA", "USAD"]


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_of_the_tables_size_moves(order):
    """S starts, D ends, A adds, U updates, in any order."""
    replay = gear.make_replay(TABLE, Prioritized(), WINDOW)
    values = {"a": jnp.ones((2, 3, 5), jnp.float32), "b": jnp.ones((2, 3), jnp.int32)}

    def step(carry, k):
        state, pending = carry
        out = jnp.zeros(())
        for call in order:
            if call == "S":
                state, pending = replay.sample_start(state, k, B, depth=3)
            elif call == "D":
                out += replay.sample_done(pending).data["a"].sum()
            elif call == "A":
                state, _ = replay.add(state, values, jnp.full((2,), 3, jnp.int32))
            else:
                state = replay.update_priorities(state, pending.handles, pending.weight)
        return (state, pending), out

    def run(state, k):
        return jax.lax.scan(step, replay.sample_start(state, k, B, depth=3), jax.random.split(k, 3))

    state = jax.eval_shape(replay.init)
    gear.assert_in_place(run, state, key())
    text = jax.jit(run, donate_argnums=0).lower(state, key()).compile().as_text()
    index = (state.length, state.priority, state.sums, *jax.tree.leaves(state.columns))
    assert column_sized(text, min(x.size * x.dtype.itemsize for x in index)) == []
