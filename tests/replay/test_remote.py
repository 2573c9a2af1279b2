"""`exchange="rdma"` in one process: alone, and as several "processes" whose memory is all here."""

import functools
import re
import secrets
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax import _native, ops, selectors
from gear_jax.ops import _reference
from gear_jax.replay import _connected, _exposed, _link, _remote
from gear_jax.testing.ops import assert_same_bits
from gear_jax.transport import Job

STEPS, CAPACITY, EACH, BATCH = 5, 48, 6, 16
TABLE = gear.TableSpec(
    {"number": gear.ColumnSpec((), jnp.int32), "vector": gear.ColumnSpec((3,), jnp.float32)}, STEPS, CAPACITY
)
WINDOWS = {"number": gear.Window(-2, 3), "vector": gear.Window(0, 2, pad="head", pad_value=7)}
COLLECTIVE = re.compile(r"= .+? ((?:all|collective|reduce-scatter|ragged)[\w-]*)\(")
FAILED = (jax.errors.JaxRuntimeError, ValueError)


def job(rank, processes):
    return Job(rank, tuple(("127.0.0.1", 40_000 + i) for i in range(processes)), secrets.token_bytes(32))


def rows(turn, n=EACH):
    rng = np.random.default_rng(turn)
    columns = {
        "number": rng.integers(1, 99, (n, STEPS)).astype(np.int32),
        "vector": rng.normal(size=(n, STEPS, 3)).astype(np.float32),
    }
    return columns, rng.integers(0, STEPS + 1, n).astype(np.int32), rng.uniform(0, 3, n).astype(np.float32)


def like(values, x):
    """An array in the kind of memory that another lies in."""
    return jax.device_put(values, x.sharding)


def addresses(state):
    return [x.unsafe_buffer_pointer() for x in _exposed.arrays(state)]


def check_exposed(state, first=0):
    """Stamps and records are what the index says."""
    p, s = state.length.shape
    generation, length = np.asarray(state.generation), np.asarray(state.length)
    opened = np.zeros(p * s, bool)
    if state.streams is not None:
        slots = np.asarray(state.streams.slot)
        opened[slots[slots >= 0] - first] = True
    opened = opened.reshape(p, s)
    np.testing.assert_array_equal(state.stamp, 2 * generation - opened)
    assert (length[opened] == 0).all()
    touched = generation > 0
    record = np.asarray(state.remote.record)
    fields = (state.generation, state.length, state.sequence, state.priority, state.mass)
    for i, field in enumerate(fields):
        np.testing.assert_array_equal(record[..., i][touched], np.asarray(field).view(np.uint32)[touched])
    assert np.asarray(_remote._whole(jnp.asarray(record)))[touched].all()


@pytest.fixture
def single():
    """make(selector, **options): (a replay with exchange="rdma", the same without), of one process."""
    made = []

    def make(selector=None, **options):
        remote = gear.make_replay(TABLE, selector, WINDOWS, exchange="rdma", partitions=8, **options)
        made.append(remote)
        return remote, gear.make_replay(TABLE, selector, WINDOWS, partitions=8, **options)

    yield make
    for replay in made:
        replay.close()


def play(replay, streams, turns=6):
    """Adds, appends, samples and updates; the samples and the last state."""
    state, got = replay.init(jax.random.key(3)), []
    for turn in range(turns):
        columns, lengths, priorities = rows(turn)
        state, handles = replay.add(state, columns, lengths, priorities if turn % 2 else None)
        got.append(handles)
        if streams:
            step = jax.tree.map(lambda x: x[:2, 0], columns)
            done = np.array([turn % 3 == 2, False])
            state, handles = replay.append(state, np.array([turn % 2, 2], np.int32), step, done)
            got.append(handles)
        state, sample = replay.sample(state, jax.random.key(turn), BATCH)
        got.append(sample)
        new = np.random.default_rng(turn).uniform(-0.3, 3, BATCH).astype(np.float32)
        state = replay.update_priorities(state, sample.handles, new)
    return got, state


@pytest.mark.parametrize(
    "selector",
    [
        selectors.Prioritized(1.0, 1.0, stratified=True), selectors.LowestPriority(), selectors.Fifo(),
        selectors.Permutation(),
    ],
    ids=repr,
)  # fmt: skip
def test_alone_it_draws_the_same(single, selector):
    remote, plain = single(selector, streams=8)
    (got, state), (wanted, other) = play(remote, True), play(plain, True)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert_same_bits(a, b, f"{i}: ")
    check_exposed(state)
    counts = remote.stats(state)
    assert counts.pop("missed_updates") == 0
    assert counts == plain.stats(other)
    assert bool(remote.can_sample(state)) == bool(plain.can_sample(other))


def a_step(replay, state, key):
    columns, lengths, priorities = jax.tree.map(jnp.asarray, rows(7))
    state, sample = replay.sample(state, key, BATCH)
    state = replay.update_priorities(state, sample.handles, sample.probability)
    state, handles = replay.add(state, columns, lengths, priorities)
    return state, (sample, handles)


@pytest.mark.parametrize("how", ["jit", "scan", "cond"])
def test_in_programs_everything_stays_where_it_is_exposed(single, how):
    remote, plain = single(selectors.Prioritized())

    def wrapped(replay):
        step = functools.partial(a_step, replay)
        if how == "scan":
            return lambda state, key: jax.lax.scan(step, state, jax.random.split(key, 3))
        if how == "cond":
            idle = lambda state, key: (state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype),  # noqa: E731
                                                           jax.eval_shape(step, state, key)[1]))  # fmt: skip
            return lambda state, key: jax.lax.cond(jnp.sum(state.cursor) >= 0, step, idle, state, key)
        return step

    states, results = [], []
    for replay in (remote, plain):
        run, state = jax.jit(wrapped(replay), donate_argnums=0), replay.init()
        state, _ = replay.add(state, *rows(1))
        before = addresses(state) if replay is remote else None
        for i in range(3):
            state, out = run(state, jax.random.key(i))
            results.append(out)
        if replay is remote:
            assert addresses(state) == before, "something that is exposed has moved"
            check_exposed(state)
            text = run.lower(state, jax.random.key(0)).compile().as_text()
            assert not COLLECTIVE.search(text), COLLECTIVE.search(text)
        gear.assert_in_place(run, state, jax.random.key(0))
        states.append(state)
    assert_same_bits(results[:3], results[3:])


def test_no_call_has_a_collective(single):
    remote, _ = single(streams=8)
    state = remote.init()
    columns, lengths, _ = jax.tree.map(jnp.asarray, rows(0))
    handles = gear.Handle(jnp.zeros(4, jnp.int32), jnp.ones(4, jnp.uint32))
    step = jax.tree.map(lambda x: x[:1, 0], columns)
    for f, *args in (
        (lambda s: remote.sample(s, jax.random.key(0), BATCH),),
        (remote.add, columns, lengths),
        (remote.append, jnp.zeros(1, jnp.int32), step, jnp.ones(1, bool)),
        (remote.update_priorities, handles, jnp.ones(4, jnp.float32)),
    ):
        text = jax.jit(f, donate_argnums=0).lower(state, *args).compile().as_text()
        assert "custom-call" in text and not COLLECTIVE.search(text)


@pytest.mark.parametrize("slots", [1, 15, 16, 17, 300])
def test_sums_of_masses_from_elsewhere(slots):
    mass = jnp.asarray(np.random.default_rng(slots).uniform(size=(3, slots)), jnp.float32)
    assert_same_bits(ops.sumtree_sums(mass), _reference.sums(mass))


class Processes:
    """n "processes" in this one: each has its part of the table, and reads the others' memory."""

    def __init__(self, n, selector=None, **options):
        self.replays = [
            gear.make_replay(TABLE, selector, WINDOWS, exchange="rdma", job=job(r, n), partitions=12, **options)
            for r in range(n)
        ]
        self.states = [
            r._empty().replace(remote=r._empty().remote.replace(incarnation=jnp.full((1,), 100 + i, jnp.uint32)))
            for i, r in enumerate(self.replays)
        ]
        self.expose()

    def expose(self):
        regions = [
            [(x.unsafe_buffer_pointer(), x.nbytes) for x in jax.block_until_ready(_exposed.arrays(s))]
            for s in self.states
        ]
        for rank, replay in enumerate(self.replays):
            _native.load("cpu").add_memory_reader(replay._link.number, rank, regions)

    def call(self, rank, name, *args):
        self.replays[rank]._link.session = types.SimpleNamespace(counters=dict)  # as if it was open
        self.replays[rank]._link._regions = _link._regions(_exposed.arrays(self.states[rank]))
        got = getattr(self.replays[rank], name)(self.states[rank], *args)
        self.states[rank], rest = got if isinstance(got, tuple) else (got, None)
        jax.block_until_ready(self.states[rank])
        return rest

    def set_alive(self, rank, alive):
        for replay in self.replays:
            _native.load("cpu").set_peer_alive(replay._link.number, rank, alive)

    def close(self):
        for replay in self.replays:
            _native.load("cpu").remove_reader(replay._link.number)


@pytest.fixture
def processes():
    made = []

    def make(*args, **kwargs):
        made.append(Processes(*args, **kwargs))
        return made[-1]

    yield make
    for p in made:
        p.close()


def test_several_draw_as_one_that_holds_all(processes):
    n = 3
    group = processes(n, selectors.Prioritized())
    one = gear.make_replay(TABLE, selectors.Prioritized(), WINDOWS, partitions=12)
    state = one.init()
    for turn in range(5):
        parts = [rows(10 * turn + r) for r in range(n)]
        state, wanted = one.add(state, *jax.tree.map(lambda *x: np.concatenate(x), *parts))
        handles = [group.call(r, "add", *parts[r]) for r in range(n)]
        assert_same_bits(jax.tree.map(lambda *x: np.concatenate(x), *handles), jax.tree.map(np.asarray, wanted))
        state, wanted = one.sample(state, jax.random.key(turn), BATCH)
        for r in range(n):
            assert_same_bits(group.call(r, "sample", jax.random.key(turn), BATCH), wanted, f"{turn}, {r}: ")
        new = np.random.default_rng(turn).uniform(0, 3, BATCH).astype(np.float32)
        state = one.update_priorities(state, wanted.handles, new)
        group.call(turn % n, "update_priorities", wanted.handles, new)
        assert bool(group.replays[0].can_sample(group.states[0]))
    for r in range(n):
        check_exposed(group.states[r], r * CAPACITY // n)


def test_streams_are_those_of_each_process(processes):
    group = processes(2, streams=3)
    step = jax.tree.map(lambda x: x[:3, 0], rows(0)[0])
    for r in range(2):
        group.call(r, "append", np.arange(3, dtype=np.int32), step, np.zeros(3, bool))
        check_exposed(group.states[r], r * CAPACITY // 2)
        assert not group.call(0, "sample", jax.random.key(0), 4).valid.any(), "an open slot was drawn"
    handles = group.call(1, "append", np.arange(3, dtype=np.int32), step, np.array([True, False, True]))
    slot = np.asarray(handles.slot)
    assert (slot[[0, 2]] >= CAPACITY // 2).all() and slot[1] == -1
    check_exposed(group.states[1], CAPACITY // 2)
    sample = group.call(0, "sample", jax.random.key(0), 12)
    assert sample.valid.all() and set(np.asarray(sample.handles.slot).tolist()) == set(slot[[0, 2]].tolist())
    assert (np.asarray(sample.length) == 2).all()


def test_a_lost_process_leaves_the_selection_and_comes_back(processes):
    group = processes(3)
    for r in range(3):
        group.call(r, "add", rows(r)[0], np.full(EACH, STEPS, np.int32))
    held = CAPACITY // 3

    def draw(key):
        sample = group.call(0, "sample", jax.random.key(key), 200)
        assert sample.valid.all()
        return set((np.asarray(sample.handles.slot) // held).tolist()), np.asarray(sample.probability)

    everyone, probability = draw(0)
    assert everyone == {0, 1, 2} and np.allclose(probability, 1 / (3 * EACH))
    group.set_alive(1, False)
    left, probability = draw(1)
    assert left == {0, 2} and np.allclose(probability, 1 / (2 * EACH))
    group.set_alive(1, True)
    assert draw(2)[0] == {0, 1, 2}


def test_a_sample_in_two_halves_is_the_same(processes):
    group = processes(3, selectors.Prioritized())
    for r in range(3):
        group.call(r, "add", *rows(r))
    replay, held = group.replays[0], CAPACITY // 3
    for _ in range(2):  # then without one of them
        wanted = group.call(0, "sample", jax.random.key(1), BATCH)
        pending = group.call(0, "sample_start", jax.random.key(1), BATCH)
        assert_same_bits(replay.sample_done(pending), wanted)
        pending = group.call(0, "sample_start", jax.random.key(1), BATCH)
        replay.sample_done(pending)
        sample = replay.sample_done(pending)  # handed out already
        assert not sample.valid.any() and (np.asarray(sample.handles.slot) == -1).all()
        group.set_alive(2, False)
    assert (np.asarray(wanted.handles.slot) < 2 * held).all()
    jitted = jax.jit(lambda s, k: (lambda s, p: (s, replay.sample_done(p)))(*replay.sample_start(s, k, BATCH)))
    assert_same_bits(jitted(group.states[0], jax.random.key(1))[1], wanted)


def test_prefetch_of_remote_samples(processes):
    group = processes(2)
    for r in range(2):
        group.call(r, "add", rows(r)[0], np.full(EACH, STEPS, np.int32))
    replay = group.replays[0]
    wanted = [group.call(0, "sample", jax.random.fold_in(jax.random.key(5), i), BATCH) for i in range(3)]
    with gear.prefetch(replay, group.states[0], jax.random.key(5), BATCH) as loader:
        for i in range(3):
            assert_same_bits(loader.next(), wanted[i], f"{i}: ")
        loader.update_priorities(wanted[0].handles, jnp.ones(BATCH, jnp.float32))
        assert loader.next().valid.all()


def test_a_record_that_is_torn_counts_as_empty(processes):
    group = processes(2)
    for r in range(2):
        group.call(r, "add", rows(r)[0], np.full(EACH, STEPS, np.int32))
    remote = group.states[1].remote
    record = np.array(remote.record)
    filled = np.argwhere(record[..., 0] > 0)
    for word, at in enumerate(filled[:EACH]):
        record[(*at, word)] ^= np.uint32(1 << word)
    group.states[1] = group.states[1].replace(remote=remote.replace(record=like(record, remote.record)))
    group.expose()
    sample = group.call(0, "sample", jax.random.key(0), 200)
    assert (np.asarray(sample.handles.slot) < CAPACITY // 2).all() and np.allclose(sample.probability, 1 / EACH)


def test_a_row_that_is_overwritten_meanwhile_is_padding(processes):
    group = processes(2)
    group.call(1, "add", rows(1)[0], np.full(EACH, STEPS, np.int32))
    stamp = np.asarray(group.states[1].stamp)
    stamp = stamp + (stamp > 0).astype(np.uint32)  # all are being written
    group.states[1] = group.states[1].replace(stamp=like(stamp, group.states[1].stamp))
    group.expose()
    sample = jax.tree.map(np.asarray, group.call(0, "sample", jax.random.key(0), 8))
    assert not sample.valid.any() and not sample.mask["number"].any() and (sample.data["vector"] == 7).all()
    assert (sample.handles.slot == -1).all() and (sample.handles.generation == 0).all()
    for x in (sample.probability, sample.weight, sample.length, sample.anchor):
        assert (x == 0).all()
    assert ops.rdma_counters(group.replays[0]._link.number)["stale"] == 8


def test_updates_reach_their_owner_and_old_ones_do_not(processes):
    group = processes(2, selectors.Prioritized())
    handles = group.call(1, "add", rows(1)[0], np.full(EACH, STEPS, np.int32))
    old = gear.Handle(handles.slot, handles.generation + np.uint32(1))
    group.call(0, "update_priorities", handles, np.arange(EACH, dtype=np.float32))
    group.call(0, "update_priorities", old, np.full(EACH, 50, np.float32))
    outside = gear.Handle(jnp.asarray([CAPACITY, -1, 2**31 - 1], jnp.int32), jnp.ones(3, jnp.uint32))
    group.call(0, "update_priorities", outside, np.ones(3, np.float32))
    group.call(0, "update_priorities", handles, np.full(EACH, np.nan, np.float32))
    counts = group.replays[0].stats(group.states[0])
    assert (counts["stale_updates"], counts["rejected_priorities"]) == (2, EACH)
    group.call(1, "add", rows(2)[0], np.zeros(EACH, np.int32))
    own = np.asarray(group.states[1].priority).reshape(-1)
    np.testing.assert_array_equal(own[np.asarray(handles.slot) - CAPACITY // 2], np.arange(EACH))
    counts = group.replays[1].stats(group.states[1])
    assert (counts["stale_updates"], counts["missed_updates"]) == (EACH, 0)
    assert counts["max_priority"] == EACH - 1
    # Nothing is applied twice.
    group.call(1, "update_priorities", handles, np.full(EACH, 9, np.float32))
    group.call(1, "add", rows(2)[0], np.zeros(EACH, np.int32))
    assert (np.asarray(group.states[1].priority).reshape(-1)[np.asarray(handles.slot) - CAPACITY // 2] == 9).all()


def test_the_last_update_of_a_trajectory_wins(processes):
    group = processes(2)
    handles = group.call(1, "add", rows(1)[0], np.full(EACH, STEPS, np.int32))
    one = gear.Handle(jnp.repeat(handles.slot[:1], 5), jnp.repeat(handles.generation[:1], 5))
    for base in (0, 10):
        group.call(0, "update_priorities", one, np.arange(base, base + 5, dtype=np.float32))
    group.call(1, "add", rows(2)[0], np.zeros(EACH, np.int32))
    assert np.asarray(group.states[1].priority).reshape(-1)[int(one.slot[0]) - CAPACITY // 2] == 14


def test_an_outbox_keeps_the_last_entries_and_counts_the_rest(processes, monkeypatch):
    monkeypatch.setattr(_remote, "OUTBOX", 8)
    group = processes(2)
    handles = group.call(1, "add", rows(1)[0], np.full(EACH, STEPS, np.int32))
    take = lambda k, at: gear.Handle(handles.slot[jnp.asarray(at)], handles.generation[jnp.asarray(at)])  # noqa: E731
    group.call(0, "update_priorities", take(6, [0, 1, 2, 3, 4, 5]), np.arange(6, dtype=np.float32))
    group.call(0, "update_priorities", take(6, [0, 1, 2, 3, 4, 5]), np.arange(10, 16, dtype=np.float32))
    group.call(1, "add", rows(2)[0], np.zeros(EACH, np.int32))
    here = np.asarray(handles.slot) - CAPACITY // 2
    np.testing.assert_array_equal(np.asarray(group.states[1].priority).reshape(-1)[here], np.arange(10, 16))
    assert group.replays[1].stats(group.states[1])["missed_updates"] == 4
    # More than there is room for in one call.
    many = take(20, [i % 6 for i in range(20)])
    group.call(0, "update_priorities", many, np.arange(20, 40, dtype=np.float32))
    group.call(1, "add", rows(2)[0], np.zeros(EACH, np.int32))
    np.testing.assert_array_equal(np.asarray(group.states[1].priority).reshape(-1)[here], [38, 39, 34, 35, 36, 37])
    assert group.replays[1].stats(group.states[1])["missed_updates"] == 4 + 12


@pytest.mark.parametrize(
    ("sent", "seen"), [(2**31 - 3, True), (2**31 + 7, True), (2**32 - 4, True), (2**32 - 4, False)], ids=str
)
def test_the_numbers_of_entries_wrap_round(processes, sent, seen):
    group = processes(2)
    handles = group.call(1, "add", rows(1)[0], np.full(EACH, STEPS, np.int32))
    words = jnp.full((1,), sent, jnp.uint32)
    group.states[0] = group.states[0].replace(remote=group.states[0].remote.replace(sent=words))
    if seen:
        last = jnp.asarray([[100, sent], [0, 0]], jnp.uint32)
        group.states[1] = group.states[1].replace(remote=group.states[1].remote.replace(seen=last))
    group.expose()
    here = np.asarray(handles.slot) - CAPACITY // 2
    for value in (1, 2):
        group.call(0, "update_priorities", handles, np.arange(value, value + EACH, dtype=np.float32))
        group.call(1, "add", rows(2)[0], np.zeros(EACH, np.int32))
        own = np.asarray(group.states[1].priority).reshape(-1)[here]
        np.testing.assert_array_equal(own, np.arange(value, value + EACH))
    if seen:
        assert group.replays[1].stats(group.states[1])["missed_updates"] == 0


def test_checks_find_nothing_wrong(single, checks):
    remote, plain = single(selectors.Prioritized(), streams=8)
    assert_same_bits(play(remote, True, 3)[0], play(plain, True, 3)[0])


def test_a_process_that_was_started_again_counts_from_0(processes):
    group = processes(2)
    handles = group.call(1, "add", rows(1)[0], np.full(EACH, STEPS, np.int32))
    for value in (1, 2, 3):
        group.call(0, "update_priorities", handles, np.full(EACH, value, np.float32))
    group.call(1, "add", rows(2)[0], np.zeros(EACH, np.int32))
    fresh = group.replays[0]._empty()
    fresh = fresh.replace(remote=fresh.remote.replace(incarnation=jnp.full((1,), 7, jnp.uint32)))
    group.states[0] = fresh
    group.expose()
    group.call(1, "add", rows(2)[0], np.zeros(EACH, np.int32))
    group.call(0, "update_priorities", handles, np.full(EACH, 4, np.float32))
    group.call(1, "add", rows(2)[0], np.zeros(EACH, np.int32))
    here = np.asarray(handles.slot) - CAPACITY // 2
    assert (np.asarray(group.states[1].priority).reshape(-1)[here] == 4).all()
    assert group.replays[1].stats(group.states[1])["missed_updates"] == 0


def test_a_closed_replay_says_what_to_do_and_can_be_connected_again(single):
    remote, _ = single()
    state = remote.init()
    state, _ = remote.add(state, *rows(0))
    assert remote.session.alive.tolist() == [True] and remote.exchange == "rdma"
    remote.close()
    assert remote.session is None
    for call in (remote.sample, jax.jit(remote.sample, static_argnums=2)):
        with pytest.raises(FAILED, match=r"replay\.connect\(state\)"):
            jax.block_until_ready(call(state, jax.random.key(0), 4)[1])
    state = remote.connect(state)
    assert remote.sample(state, jax.random.key(0), 4)[1].valid.all()
    remote.close()
    remote.close()


def test_a_state_that_is_not_exposed_is_found_out(single):
    remote, _ = single()
    state = remote.init()
    other = jax.tree.map(lambda x: like(np.array(x), x), state)
    with pytest.raises(FAILED, match=r"rdma_read: operand 0: got an array at .*replay\.connect\(state\)"):
        jax.block_until_ready(jax.jit(remote.sample, static_argnums=2)(other, jax.random.key(0), 4)[1])
    for call, *args in ((remote.sample, jax.random.key(0), 4), (remote.add, *rows(0))):
        with pytest.raises(ValueError, match=r"state: got one that other processes do not read.*replay\.connect\("):
            call(other, *args)
    other = remote.connect(other)  # nothing has consumed it
    assert not remote.sample(other, jax.random.key(0), 4)[1].valid.any()


@pytest.mark.parametrize("name", ["add", "append"])
def test_an_insertion_that_moves_what_others_read_is_found_out(processes, name):
    group = processes(2, streams=3)
    state, call = group.states[0], getattr(group.replays[0], name)
    columns, lengths, _ = jax.tree.map(jnp.asarray, rows(0))
    step = jax.tree.map(lambda x: x[:1, 0], columns)
    args = {"add": (columns, lengths), "append": (jnp.zeros(1, jnp.int32), step, jnp.ones(1, bool))}[name]
    with pytest.raises(FAILED, match=r"rdma_(read|fetch): operand 0: got an array at .*donate the state"):
        jax.block_until_ready(jax.jit(call)(state, *args)[0])
    before = addresses(state)  # nothing has consumed it
    state, _ = jax.jit(call, donate_argnums=0)(state, *args)
    assert addresses(jax.block_until_ready(state)) == before
    check_exposed(state)
    run = jax.jit(lambda columns, rest: call(rest.replace(columns=columns), *args), donate_argnums=1)
    with pytest.raises(FAILED, match=r"rdma_fetch: operand 0: got an array at .*donate the state"):
        jax.block_until_ready(run(state.columns, state.replace(columns=None))[0])


@pytest.mark.parametrize("how", ["scan", "cond"])
def test_in_programs_of_several_everything_stays_where_it_is_exposed(processes, how):
    group = processes(2, selectors.Prioritized())
    step = functools.partial(a_step, group.replays[0])

    def run(state, key):
        if how == "scan":
            return jax.lax.scan(step, state, jax.random.split(key, 3))[0]
        return jax.lax.cond(jnp.sum(state.cursor) >= 0, lambda s, k: step(s, k)[0], lambda s, _: s, state, key)

    run, state = jax.jit(run, donate_argnums=0), group.states[0]
    before = addresses(state)
    for i in range(2):
        state = jax.block_until_ready(run(state, jax.random.key(i)))
    assert addresses(state) == before
    check_exposed(state)


def test_connect_makes_anew_what_is_exposed(single):
    remote, _ = single(selectors.Prioritized(), streams=8)
    _, state = play(remote, True)
    wanted = jax.tree.map(np.asarray, (state.stamp, state.remote.record))
    touched = np.asarray(state.generation) > 0
    state = remote.connect(state)
    check_exposed(state)
    got = jax.tree.map(np.asarray, (state.stamp, state.remote.record))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a[touched], b[touched])


def test_x64(single):
    with jax.enable_x64(True):
        remote, plain = single(selectors.Prioritized(), streams=8)
        (got, state), (wanted, _) = play(remote, True, 3), play(plain, True, 3)
        assert_same_bits(got, wanted)
        check_exposed(state)


def test_exports_show_in_the_text():
    assert "process 1 of 2, exchange='rdma'" in repr(gear.make_replay(TABLE, exchange="rdma", job=job(1, 2)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"selection": "decentralized"}, "selection: got 'decentralized' with exchange='rdma', wanted 'centralized'"),
        ({"donate": False}, "donate: got False with exchange='rdma'"),
        ({"job": 3}, "job: got int, wanted a Job or None"),
        ({"on_loss": "ignore"}, "on_loss: got 'ignore', wanted one of"),
        ({"deadline": 0}, "deadline: got 0, wanted seconds"),
        ({"partitions": 3, "job": job(0, 2)}, "partitions: got 3 over 2 devices"),
        ({"selector": selectors.Fifo(), "job": job(0, 2)}, "selector: got Fifo.* does? ?n?o?t?.*compare the ages"),
        ({"selector": selectors.Lifo(), "job": job(0, 2)}, "selector: got Lifo"),
        ({"streams": 30, "job": job(0, 2)}, "streams: got 30 streams on 24 slots"),
    ],
)
def test_what_does_not_fit_is_refused(options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        gear.make_replay(TABLE, exchange="rdma", **options)


def test_arguments_of_rdma_are_for_rdma():
    for options in ({"job": job(0, 1)}, {"transport": "ucx"}, {"on_loss": "error"}, {"deadline": 1.0}):
        with pytest.raises(ValueError, match="with exchange=None, wanted exchange='rdma'"):
            gear.make_replay(TABLE, **options)


def test_calls_that_it_has_not(single):
    remote, plain = single()
    state = remote.init()
    with pytest.raises(ValueError, match="per_device: got a replay with exchange='rdma'"):
        remote.per_device()
    state, sample = remote.sample(state, jax.random.key(0), 4)
    with pytest.raises(ValueError, match="out: got a sample to take the memory of, wanted None with exchange='rdma'"):
        remote.sample(state, jax.random.key(0), 4, sample)
    with pytest.raises(ValueError, match="connect: got exchange='collective', wanted exchange='rdma'"):
        plain.connect(plain.init())
    assert plain.session is None and plain.counters() == {}
    plain.close()


def test_memory_of_a_gpu_is_refused(monkeypatch):
    class Gpu:
        platform = "gpu"

    monkeypatch.setattr(_connected, "default_device", Gpu)
    with pytest.raises(ValueError, match="memory: got 'device' with exchange='rdma', wanted None: others read"):
        gear.make_replay(TABLE, exchange="rdma", memory="device")
