"""`append`: data that arrives one step at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.selectors import Fifo, LowestPriority, Prioritized, Uniform
from gear_jax.testing.ops import to_numpy


def step_of(number, t):
    """The columns of one step of each of some trajectories."""
    number, t = np.asarray(number, np.int32), np.asarray(t, np.int32)
    return {"number": number * 100 + t + 1, "pair": np.stack([number, t], -1).astype(np.float32)}


@pytest.mark.parametrize(("partitions", "streams"), [(1, 3), (2, 3), (4, 2), (2, 1)])
def test_against_the_model(make, rows, model, pairs, partitions, streams):
    """Random episodes, some longer than T, streams that pause, whole trajectories added between them."""
    replay = make(Prioritized(), capacity=16, partitions=partitions, streams=streams)
    reference = model(partitions, 16 // partitions, streams)
    rng = np.random.default_rng(streams)
    state, number, now = replay.init(), 0, {}  # now: stream -> its trajectory and the step that comes next
    for turn in range(60):
        order = rng.permutation(np.arange(-1, streams + 1))[:streams].tolist()  # some of them unknown
        fresh = list(range(number, number + streams))
        number += streams
        for k, i in zip(order, fresh, strict=True):
            if k not in now:
                now[k] = [i, 0]
        done = rng.uniform(size=streams) < 0.2
        step = step_of([now[k][0] for k in order], [now[k][1] for k in order])
        state, handles = replay.append(state, np.array(order, np.int32), step, done)
        assert pairs(handles) == reference.append(order, [now[k][0] for k in order], done.tolist())
        for k, end in zip(order, done, strict=True):
            now[k][1] += 1
            if end or now[k][1] == 5:
                del now[k]
        if turn % 7 == 3:
            fresh = list(range(number, number + 3))
            number += 3
            state, handles = replay.add(state, rows(fresh), np.array([3, 0, 5], np.int32))
            assert pairs(handles) == reference.add(fresh, [3, 0, 5])
        if turn % 10 == 9 or turn < 8:
            reference.check(replay, state)


@pytest.mark.parametrize("number", [2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63)])
def test_numpy_numbers_beyond_int32_are_unknown(make, number):
    """jit would cut them to the number of another stream, or slot."""
    replay = make(Prioritized(), streams=2, windows=None)
    state, handles = replay.append(replay.init(), np.array([number, 1]), step_of([1, 2], [0, 0]), np.ones(2, bool))
    assert handles.slot[0] == -1 and handles.slot[1] >= 0
    assert replay.stats(state)["trajectories"] == 1 and replay.stats(state)["open_streams"] == 0
    before = to_numpy(state.priority)
    slot = number + int(handles.slot[1]) if abs(number) < 2**62 else number
    wrong = gear.Handle(np.array([slot]), np.asarray(handles.generation)[1:])
    state = replay.update_priorities(state, wrong, np.array([9], np.float32))
    np.testing.assert_array_equal(to_numpy(state.priority), before)


def test_an_open_slot_is_never_drawn(make):
    replay = make(Uniform(), streams=2, windows=None)
    state = replay.init()
    for t in range(3):
        state, handles = replay.append(state, np.arange(2, dtype=np.int32), step_of([1, 2], [t, t]), np.zeros(2, bool))
        assert (handles.slot == -1).all() and not replay.can_sample(state)
    state, s = replay.sample(state, jax.random.key(0), 6)
    assert not s.valid.any()
    state, handles = replay.append(
        state, np.arange(2, dtype=np.int32), step_of([1, 2], [3, 3]), np.array([False, True])
    )
    assert handles.slot[0] == -1 and handles.slot[1] >= 0
    state, s = replay.sample(state, jax.random.key(0), 6)
    assert s.valid.all() and (s.length == 4).all() and (s.handles.slot == handles.slot[1]).all()
    np.testing.assert_array_equal(s.data["number"][0], [201, 202, 203, 204, 0])


def test_what_was_in_a_slot_is_gone_when_a_stream_opens_it(make, filled):
    replay = make(Prioritized(), streams=2)
    state, old = filled(replay, 8, 5)
    state, _ = replay.append(state, np.arange(2, dtype=np.int32), step_of([90, 91], [0, 0]), np.array([False, False]))
    got = replay.stats(state)
    assert (got["trajectories"], got["evicted"], got["inserted"], got["open_streams"]) == (6, 2, 8, 2)
    state = replay.update_priorities(state, old, np.full(8, 3, np.float32))
    assert replay.stats(state)["stale_updates"] == 2
    _, s = replay.sample(state, jax.random.key(0), 64)
    assert set(s.handles.slot.tolist()) == set(range(2, 8))


@pytest.mark.parametrize("eviction", [Fifo(), LowestPriority()])
def test_an_open_slot_is_never_evicted(make, rows, eviction):
    replay = make(Prioritized(), streams=2, eviction=eviction)
    state = replay.init()
    state, _ = replay.append(state, np.arange(2, dtype=np.int32), step_of([90, 91], [0, 0]), np.zeros(2, bool))
    opened = set(state.streams.slot.tolist())
    for _ in range(3):
        state, handles = replay.add(state, rows(range(21)), np.full(21, 3, np.int32))
        assert set(handles.slot.tolist()) == {-1} | (set(range(8)) - opened)
        assert (np.asarray(handles.slot) >= 0).sum() == 6 and (handles.slot[:15] == -1).all()
    state, handles = replay.append(state, np.arange(2, dtype=np.int32), step_of([90, 91], [1, 1]), np.ones(2, bool))
    assert set(handles.slot.tolist()) == opened
    held = to_numpy(state.columns)["number"][0]
    assert [held[c, :2].tolist() for c in handles.slot.tolist()] == [[9001, 9002], [9101, 9102]]


def test_an_episode_longer_than_a_slot_goes_on_in_a_new_one(make):
    replay = make(Uniform(), streams=2)
    state, closed = replay.init(), []
    for t in range(12):
        state, handles = replay.append(
            state, np.array([1, 7], np.int32), step_of([3, 4], [t, t]), np.array([t == 11, True])
        )
        assert handles.slot[1] == -1 and handles.generation[1] == 0  # stream 7 is none
        closed += [c for c in handles.slot[:1].tolist() if c >= 0]
    assert len(closed) == 3
    held, length = to_numpy(state.columns)["number"][0], np.asarray(state.length)[0]
    steps = np.concatenate([held[c, : length[c]] for c in closed])
    np.testing.assert_array_equal(steps, 301 + np.arange(12))
    assert length[closed].tolist() == [5, 5, 2]


def test_a_rollout_inside_scan_equals_one_call_at_a_time(make, same):
    replay = make(Uniform(), streams=2)

    def step(state, t):
        number = jnp.array([1, 2], jnp.int32)
        values = {"number": number * 100 + t, "pair": jnp.stack([number, number], -1).astype(jnp.float32)}
        state, handles = replay.append(
            state, jnp.arange(2, dtype=jnp.int32), values, jnp.stack([t % 3 == 2, t % 4 == 3])
        )
        return state, handles

    start = replay.init()
    end, handles = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(12, dtype=jnp.int32)))(start)
    state = start
    for t in range(12):
        state, h = step(state, np.int32(t))
        same(h, jax.tree.map(lambda x, t=t: x[t], handles))
    same(state, end)
    assert replay.stats(end)["inserted"] == 7
    assert (handles.slot[:, 0] >= 0).tolist() == [t % 3 == 2 for t in range(12)]


def test_an_environment_s_trajectory_takes_the_largest_priority(make, filled):
    replay = make(Prioritized(), streams=2)
    state, _ = filled(replay, 2, priorities=[3, 6])
    state, h = replay.append(state, np.arange(2, dtype=np.int32), step_of([90, 91], [0, 0]), np.array([True, False]))
    assert float(np.asarray(state.priority).reshape(-1)[int(h.slot[0])]) == 6
    state = replay.update_priorities(state, h, np.array([2, 5], np.float32))
    assert float(np.asarray(state.priority).reshape(-1)[int(h.slot[0])]) == 2
    assert replay.stats(state)["stale_updates"] == 0


def test_bad_arguments(make):
    replay = make(Uniform(), streams=2)
    state, ok = replay.init(), step_of([1, 2], [0, 0])
    two, flags = np.arange(2, dtype=np.int32), np.zeros(2, bool)
    with pytest.raises(ValueError, match=r"append: got a replay without streams, wanted streams=N.*make_replay"):
        make().append(make().init(), two, ok, flags)
    with pytest.raises(TypeError, match=r"stream: got dtype float32"):
        replay.append(state, two.astype(np.float32), ok, flags)
    with pytest.raises(ValueError, match=r"step\['number'\]: got shape \(\), wanted \[K\]"):
        replay.append(state, two, {**ok, "number": np.int32(3)}, flags)
    with pytest.raises(ValueError, match=r"step\['number'\]: got 3 rows, wanted 2"):
        replay.append(state, two, step_of([1, 2, 3], [0, 0, 0]), flags)
    with pytest.raises(TypeError, match=r"done: got dtype int32, wanted bool"):
        replay.append(state, two, ok, two)
    with pytest.raises(ValueError, match=r"done: got shape \(1,\), wanted \(2,\)"):
        replay.append(state, two, ok, flags[:1])
    assert not state.ticket.is_deleted()  # what was refused consumed nothing


def test_a_second_step_for_a_stream_in_one_call_is_skipped():
    replay = gear.make_replay(gear.TableSpec({"x": gear.ColumnSpec((), jnp.float32)}, 4, 8), streams=2)
    state = replay.init()
    stream, step = jnp.asarray([1, 1, 0], jnp.int32), {"x": jnp.asarray([1.0, 2.0, 3.0])}
    state, handles = replay.append(state, stream, step, jnp.asarray([True, True, False]))
    assert (handles.slot >= 0).tolist() == [True, False, False]
    stats = replay.stats(state)
    assert (stats["inserted"], stats["trajectories"], stats["steps"], stats["open_streams"]) == (1, 1, 1, 1)
    assert to_numpy(state.columns)["x"].reshape(8, 4)[handles.slot[0], 0] == 1.0


def test_eviction_and_fifo_agree_on_what_is_oldest_with_streams():
    replay = gear.make_replay(gear.TableSpec({"x": gear.ColumnSpec((), jnp.float32)}, 9, 4), Fifo(), streams=2)
    state, key = replay.init(), jax.random.key(0)
    for i in range(40):  # stream 0 closes every step, stream 1 every seventh
        state, oldest = replay.sample(state, key, 1)
        before = state.generation.reshape(-1).copy()
        stream, step = jnp.arange(2, dtype=jnp.int32), {"x": jnp.full((2,), float(i))}
        full = int((np.asarray(state.length) > 0).sum()) + int((np.asarray(state.streams.slot) >= 0).sum()) == 4
        opens = int((np.asarray(state.streams.slot) < 0).sum())
        state, _ = replay.append(state, stream, step, jnp.asarray([True, i % 7 == 6]))
        if full and opens == 1:
            changed = np.flatnonzero(np.asarray(state.generation.reshape(-1)) != np.asarray(before))
            assert changed.tolist() == oldest.handles.slot.tolist()
