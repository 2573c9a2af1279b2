"""The functions under jit, scan, cond and vmap, donated and not, in both kinds of memory; x64; keys of both kinds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.selectors import Permutation, Prioritized
from gear_jax.testing.ops import to_numpy

FOUR = np.full(4, 3, np.int32)


@pytest.fixture
def make(make, memory):
    return functools.partial(make, memory=memory)


def kinds(state):
    """The memory that each column lies in, by its sharding and by its type."""
    types = {"pinned_host": jax.memory.Space.Host, "device": jax.memory.Space.Device}
    columns = jax.tree.leaves(state.columns)
    assert [jax.typeof(x).memory_space for x in columns] == [types[x.sharding.memory_kind] for x in columns]
    return {x.sharding.memory_kind for x in columns}


def a_step(replay, rows):
    values = jax.tree.map(jnp.asarray, rows(range(50, 54)))

    def step(state, key):
        state, s = replay.sample(state, key, 6)
        state, handles = replay.add(state, values, jnp.asarray(FOUR))
        state = replay.update_priorities(state, s.handles, jnp.arange(6, dtype=jnp.float32))
        return state, (s, handles)

    return step


@pytest.fixture(params=[Prioritized(), Permutation()], ids=lambda s: type(s).__name__)
def replay(make, request):
    return make(request.param, partitions=2, windows=gear.Window(-1, 3))


def test_jit_and_scan_equal_calls(replay, rows, filled, same, memory):
    step = a_step(replay, rows)
    keys = jax.random.split(jax.random.key(1), 3)
    state, _ = filled(replay, 8)
    end, scanned = jax.jit(lambda s: jax.lax.scan(step, s, keys))(state)
    outs = []
    for key in keys:
        state, out = step(state, key)
        outs.append(out)
    same(state, end)
    same(jax.tree.map(lambda *x: jnp.stack(x), *outs), scanned)
    assert kinds(state) == kinds(end) == {memory}


def test_cond(make, rows, filled, same, memory):
    replay = make(Prioritized())
    step = a_step(replay, rows)

    def maybe(state, flag, key):
        return jax.lax.cond(flag, lambda s: step(s, key)[0], lambda s: s, state)

    state, _ = filled(replay, 8)
    run = jax.jit(maybe)
    same(run(state, False, jax.random.key(1)), state)
    taken = run(state, True, jax.random.key(1))
    assert kinds(taken) == {memory}
    same(taken, step(state, jax.random.key(1))[0])


def test_vmap_over_states(replay, rows, filled, same, stack, element, memory):
    """One table for each seed."""
    step = a_step(replay, rows)
    keys = jax.random.split(jax.random.key(1), 2)
    states = [filled(replay, 8)[0], filled(replay, 4, [1, 2, 3, 4], key=jax.random.key(9))[0]]
    got = jax.jit(jax.vmap(step))(stack(*states), keys)
    assert kinds(got[0]) == {memory}
    for v in range(2):
        same(element(got, v), step(states[v], keys[v]))


def test_init_under_jit_and_vmap(make, same, element, memory):
    replay = make(Permutation(), partitions=2, windows=gear.Window(-1, 3))
    keys = jax.random.split(jax.random.key(1), 4)
    twice = jax.jit(jax.vmap(jax.vmap(replay.init)))(keys.reshape(2, 2))
    for got in (jax.jit(jax.vmap(replay.init))(keys), jax.vmap(replay.init)(keys), jax.tree.map(_flat, twice)):
        assert kinds(got) == {memory}
        for v in range(4):
            same(element(got, v), jax.jit(replay.init)(keys[v]))
            same(element(got, v), replay.init(keys[v]))
    for got in (replay.init(), jax.jit(replay.init)(), jax.jit(lambda: replay.init(keys[0]))()):
        assert kinds(got) == {memory}


def _flat(x):
    return jax.device_put(to_numpy(x).reshape(-1, *x.shape[2:]), x.sharding)


def test_a_table_that_is_made_and_used_in_one_program(make, rows, same, memory):
    replay = make(Prioritized())
    step = a_step(replay, rows)
    end, _ = jax.jit(lambda: step(replay.init(), jax.random.key(1)))()
    assert kinds(end) == {memory}
    same(end, step(replay.init(), jax.random.key(1))[0])


def test_calls_consume_the_state_and_say_so(make, rows, filled):
    replay = make(Prioritized())
    state, handles = filled(replay, 4)
    pointer = state.columns["pair"].unsafe_buffer_pointer()
    new, s = replay.sample(state, jax.random.key(0), 6)
    assert new.columns["pair"].unsafe_buffer_pointer() == pointer and state.ticket.is_deleted()
    calls = [
        lambda: replay.sample(state, jax.random.key(0), 6),
        lambda: replay.add(state, rows(range(4)), FOUR),
        lambda: replay.update_priorities(state, handles, np.ones(4, np.float32)),
        lambda: replay.can_sample(state),
        lambda: replay.stats(state),
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match=r"a state that an earlier call has consumed, wanted .*Rebind it.*donate=False"
        ):
            call()
    new, _ = replay.add(new, rows(range(4)), FOUR)
    new = replay.update_priorities(new, s.handles, np.ones(6, np.float32))
    assert new.columns["pair"].unsafe_buffer_pointer() == pointer  # in place all the way


def test_a_state_consumed_by_the_users_own_jit_is_recognised(make, filled):
    replay = make(Prioritized())
    state, _ = filled(replay, 4)
    jax.jit(lambda s: s.replace(max_priority=s.max_priority + 1), donate_argnums=0)(state)
    with pytest.raises(ValueError, match="earlier call has consumed"):
        replay.sample(state, jax.random.key(0), 6)


def test_without_donation_old_states_stay(make, rows, same, memory):
    replay = make(Prioritized(), donate=False)
    empty = replay.init()
    state, handles = replay.add(empty, rows(range(4)), FOUR)
    after, s = replay.sample(state, jax.random.key(0), 6)
    again, t = replay.sample(state, jax.random.key(0), 6)
    same((after, s), (again, t))
    changed = replay.update_priorities(state, handles, np.zeros(4, np.float32))
    assert replay.can_sample(state) and not replay.can_sample(changed) and not replay.can_sample(empty)
    assert replay.stats(empty)["trajectories"] == 0
    for one in (empty, state, after, again, changed):
        assert kinds(one) == {memory}


def test_sampling_changes_no_priority_and_no_column(replay, filled, same):
    state, _ = filled(replay, 8)
    before = to_numpy(state)
    state, s = replay.sample(state, jax.random.key(0), 6)
    assert int(s.valid.sum()) == 6
    for name in ("columns", "length", "generation", "sequence", "priority", "mass", "sums", "max_priority", "cursor"):
        same(getattr(state, name), getattr(before, name))


def test_the_memory_of_an_earlier_sample_is_reused(make, filled, same):
    replay = make(Prioritized())
    state, _ = filled(replay, 8)
    state, first = replay.sample(state, jax.random.key(0), 6)
    pointer = first.data["pair"].unsafe_buffer_pointer()
    twin, _ = filled(replay, 8)
    twin, _ = replay.sample(twin, jax.random.key(0), 6)
    _, wanted = replay.sample(twin, jax.random.key(1), 6)
    state, second = replay.sample(state, jax.random.key(1), 6, out=first)
    assert second.data["pair"].unsafe_buffer_pointer() == pointer and first.data["pair"].is_deleted()
    same(second, wanted)


def test_typed_and_legacy_keys_draw_alike(make, filled, same):
    replay = make(Prioritized())
    state, _ = filled(replay, 8)
    state, typed = replay.sample(state, jax.random.key(7), 6)
    state, legacy = replay.sample(state, jax.random.PRNGKey(7), 6)
    same(typed, legacy)
    same(replay.init(jax.random.key(3)), replay.init(jax.random.PRNGKey(3)))
    rbg = jax.random.key(7, impl="rbg")
    state, s = replay.sample(state, rbg, 6)
    assert s.valid.all()


@pytest.mark.parametrize(("selector", "memory"), [(Prioritized(), "device"), (Permutation(), "pinned_host")])
def test_x64(rows, selector, pairs, memory):
    wanted = None
    for x64 in (False, True):
        with jax.enable_x64(x64):
            columns = {"number": gear.ColumnSpec((), np.int32), "pair": gear.ColumnSpec((2,), np.float64)}
            options = {"partitions": 2, "streams": 1, "windows": gear.Window(-1, 3), "memory": memory}
            replay = gear.make_replay(gear.TableSpec(columns, 5, 8), selector, **options)
            state = replay.init()
            assert state.columns["pair"].dtype == (np.float64 if x64 else np.float32)
            values = rows(range(4))
            values["pair"] = values["pair"].astype(np.float64)
            # NumPy's own defaults: int64, float64.
            lengths, priorities = np.array([3, 2**40, -(2**40), 5]), np.arange(4.0) + 1
            state, handles = replay.add(state, values, lengths if x64 else lengths.clip(-9, 9), priorities)
            state, s = replay.sample(state, jax.random.key(0), 6)
            state = replay.update_priorities(state, s.handles, np.arange(6.0))
            one = {"number": np.array([7], np.int32), "pair": np.zeros((1, 2))}
            state, closed = replay.append(state, np.array([0]), one, np.array([True]))
            assert state.length.dtype == np.int32 and s.weight.dtype == np.float32
            got = pairs(handles), pairs(s.handles), pairs(closed), s.anchor.tolist(), replay.stats(state)
        wanted = wanted or got
        assert got == wanted


def test_numpy_float64_is_float32_where_x64_is_off(make, rows, filled, same):
    replay = make()
    values = rows(range(4))
    wanted, _ = filled(replay, 4)
    wide = {"number": values["number"].astype(np.int64), "pair": values["pair"].astype(np.float64)}
    state, _ = replay.add(replay.init(), wide, FOUR.astype(np.int64), np.ones(4))
    same(state, wanted)


def test_short_and_empty_batches(make, rows):
    replay = make()
    state, handles = replay.add(replay.init(), rows(range(2), steps=2), np.array([2, 9], np.int32))  # 9: cut to T' = 2
    assert np.asarray(state.length)[0, :2].tolist() == [2, 2]
    state, handles = replay.add(state, rows(range(2), steps=0), np.array([2, 9], np.int32))
    assert handles.slot.tolist() == [-1, -1]
    state, handles = replay.add(state, rows([]), np.zeros(0, np.int32))
    assert handles.slot.shape == (0,) and replay.stats(state)["trajectories"] == 2


def test_checks_refuse_nothing_that_is_right(rows, monkeypatch, memory):
    """GEAR_JAX_CHECKS=1: the -1s that the library itself makes are no faults."""
    monkeypatch.setenv("GEAR_JAX_CHECKS", "1")
    columns = {"number": gear.ColumnSpec((), np.int32), "pair": gear.ColumnSpec((2,), np.float32)}
    replay = gear.make_replay(gear.TableSpec(columns, 5, 8), Prioritized(), streams=1, memory=memory)
    state = replay.init()
    state, s = replay.sample(state, jax.random.key(0), 6)
    state = replay.update_priorities(state, s.handles, np.ones(6, np.float32))
    state, h = replay.add(state, rows(range(9)), np.array([1, 2, 0, 4, 5, 1, 2, 3, 4], np.int32))
    one = jax.tree.map(lambda x: x[:, 0], rows([3]))
    state, _ = replay.append(state, np.array([0], np.int32), one, np.array([False]))
    state = replay.update_priorities(state, h, np.ones(9, np.float32))
    state, s = replay.sample(state, jax.random.key(0), 6)
    assert s.valid.all()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_every_implementation_give_batches_of_their_own(impl):
    replay = gear.make_replay(gear.TableSpec({"x": gear.ColumnSpec((), jnp.float32)}, 50, 64))
    state, _ = replay.add(replay.init(), {"x": jnp.zeros((64, 50))}, jnp.full((64,), 50, jnp.int32))
    seen = set()
    root = jax.random.key(0, impl=impl)
    for key in [*jax.random.split(root, 4), jax.random.fold_in(root, 7)]:
        state, sample = replay.sample(state, key, 16)
        seen.add((tuple(sample.handles.slot.tolist()), tuple(sample.anchor.tolist())))
    assert len(seen) == 5


def test_out_takes_the_memory_of_the_last_sample_in_jit_and_scan(memory):
    columns = {"x": gear.ColumnSpec((3,), jnp.float32), "y": gear.ColumnSpec((), jnp.int32)}
    replay = gear.make_replay(gear.TableSpec(columns, 5, 16), memory=memory)
    rows = {"x": jnp.arange(16 * 5 * 3, dtype=jnp.float32).reshape(16, 5, 3), "y": jnp.ones((16, 5), jnp.int32)}
    state, _ = replay.add(replay.init(), rows, jnp.full((16,), 5, jnp.int32))
    state, last = replay.sample(state, jax.random.key(0), 8)  # both masks are handed on, so they must be two arrays
    step = jax.jit(lambda state, key, out: replay.sample(state, key, 8, out=out), donate_argnums=(0, 2))
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((last.data, last.mask))]
    state, new = step(state, jax.random.key(1), last)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves((new.data, new.mask))] == pointers
    np.testing.assert_array_equal(new.data["x"], np.asarray(rows["x"])[np.asarray(new.handles.slot)])

    def body(carry, key):
        state, out = carry
        state, out = replay.sample(state, key, 8, out=out)
        return (state, out), (out.data["x"], out.handles.slot)

    (state, _), (data, slots) = jax.lax.scan(body, (state, new), jax.random.split(jax.random.key(2), 3))
    np.testing.assert_array_equal(data, np.asarray(rows["x"])[np.asarray(slots)])
