"""Trajectories that leave by themselves: drawn `times` times, or of a policy too far behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from scipy import stats as scipy_stats

import gear_jax as gear
from gear_jax.selectors import Lifo, Prioritized, Queue, Stack, Uniform
from gear_jax.testing.ops import sums_oracle

STEPS = 5


def number_of(sample):
    """The numbers of the trajectories drawn; -1 where there is none."""
    return np.where(np.asarray(sample.valid), np.asarray(sample.data["number"])[:, 0] // 100, -1).tolist()


def drain(replay, state, batch, most=50):
    """Samples until nothing is left: the batches."""
    batches = []
    while bool(replay.can_sample(state)):
        state, sample = replay.sample(state, jax.random.key(len(batches)), batch)
        batches.append(number_of(sample))
        assert len(batches) <= most
    return state, batches


@pytest.fixture
def table(make, filled):
    """table(selector, A=6, capacity=8, **options) -> replay, a state with trajectories 0 ... A - 1."""

    def run(selector, a=6, capacity=8, **options):
        replay = make(selector, capacity, gear.Window(0, 3), anchor="start", **options)
        return replay, filled(replay, a)[0]

    return run


@pytest.mark.parametrize(
    ("selector", "batches"),
    [
        (Queue(), [[0, 1, 2, 3], [4, 5, -1, -1]]),
        (Queue(2), [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, -1, -1], [4, 5, -1, -1]]),
        (Stack(), [[5, 4, 3, 2], [1, 0, -1, -1]]),
        (Stack(2), [[5, 4, 3, 2], [5, 4, 3, 2], [1, 0, -1, -1], [1, 0, -1, -1]]),
    ],
    ids=str,
)
def test_queues_and_stacks_give_each_so_often(table, selector, batches):
    replay, state = table(selector)
    assert replay.stats(state)["trajectories"] == 6
    state, got = drain(replay, state, 4)
    assert got == batches
    numbers = replay.stats(state)
    assert (numbers["trajectories"], numbers["used_up"], numbers["evicted"]) == (0, 6, 0)
    state, sample = replay.sample(state, jax.random.key(9), 3)
    assert not sample.valid.any() and not any(x.any() for x in jax.tree.leaves(sample.mask))
    assert (np.asarray(sample.handles.slot) == -1).all()


def test_the_data_is_there_in_the_sample_that_is_a_trajectory_s_last(table):
    replay, state = table(Queue(), 6)
    _, sample = replay.sample(state, jax.random.key(0), 4)
    wanted = np.arange(4)[:, None] * 100 + np.arange(3)[None] + 1
    np.testing.assert_array_equal(sample.data["number"], wanted)
    assert np.asarray(sample.length).tolist() == [3] * 4


def test_an_overwritten_slot_begins_anew(table, rows):
    replay, state = table(Queue(2), 8)
    state, _ = replay.sample(state, jax.random.key(0), 8)
    state, _ = replay.add(state, rows(range(10, 13)), np.full(3, 3))  # takes the places of 0, 1, 2
    state, got = drain(replay, state, 8)
    assert got == [[3, 4, 5, 6, 7, 10, 11, 12], [10, 11, 12, -1, -1, -1, -1, -1]]
    assert replay.stats(state)["evicted"] == 3


def test_priorities_do_not_bring_back_what_is_used_up(table):
    replay, state = table(Prioritized(times=1))
    state, sample = replay.sample(state, jax.random.key(0), 6)
    assert sorted(number_of(sample)) == list(range(6))
    state = replay.update_priorities(state, sample.handles, jnp.full((6,), 7.0))
    assert not replay.can_sample(state)
    assert replay.stats(state)["trajectories"] == 0


def test_a_stack_fills_the_places_that_are_free_first(table, rows):
    replay, state = table(Stack(), 8)
    state, sample = replay.sample(state, jax.random.key(0), 3)
    assert number_of(sample) == [7, 6, 5]
    state, _ = replay.add(state, rows([10, 11, 12]), np.full(3, 3))
    assert replay.stats(state)["evicted"] == 0
    state, _ = replay.add(state, rows([13]), np.full(1, 3))  # now the oldest has to go
    assert replay.stats(state)["evicted"] == 1
    assert drain(replay, state, 8)[1] == [[13, 12, 11, 10, 4, 3, 2, 1]]


@pytest.mark.parametrize("selector", [Uniform(times=3), Prioritized(times=3), Prioritized(times=3, stratified=True)])
def test_all_are_drawn_exactly_so_often_whatever_the_batches(table, selector):
    replay, state = table(selector)
    _, batches = drain(replay, state, 7)
    drawn = [x for batch in batches for x in batch]
    assert sorted(x for x in drawn if x >= 0) == sorted(list(range(6)) * 3)
    assert len(batches) == 3 and -1 not in batches[0] + batches[1]  # 18 draws: 7, 7, 4


def one_by_one(masses, times, draws):
    """The exact distribution of what `draws` draws take, each from what the ones before have left."""
    states = {(0,) * len(masses): 1.0}
    for _ in range(draws):
        after = {}
        for counts, p in states.items():
            left = [m * (c < times) for m, c in zip(masses, counts, strict=True)]
            for i, m in enumerate(left):
                if m:
                    key = (*counts[:i], counts[i] + 1, *counts[i + 1 :])
                    after[key] = after.get(key, 0.0) + p * m / sum(left)
        states = after
    return states


@pytest.mark.parametrize("times", [1, 2])
def test_draws_are_distributed_as_if_one_came_after_the_other(make, filled, times):
    masses, draws, n = [8.0, 3.0, 1.0, 1.0], 3, 3000
    replay = make(Prioritized(alpha=1.0, times=times), 4, gear.Window(0, 1), anchor="start", donate=False)
    state, _ = filled(replay, 4, priorities=masses)

    def step(key):
        slot = replay.sample(state, key, draws)[1].handles.slot
        return jnp.zeros((4,), jnp.int32).at[slot].add(1)

    keys = jax.random.split(jax.random.key(5), n)
    counts = np.asarray(jax.jit(lambda k: jax.lax.map(step, k))(keys))
    wanted = one_by_one(masses, times, draws)
    seen = dict.fromkeys(wanted, 0)
    for row in counts.tolist():
        seen[tuple(row)] += 1  # a KeyError is a trajectory drawn too often
    expected = np.array([wanted[k] * n for k in seen])
    observed = np.array(list(seen.values()))
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    assert scipy_stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-4


def test_limits_inside_one_program(make, rows):
    replay = make(Queue(2), 8, gear.Window(0, 3), anchor="start", max_staleness=1)

    def step(state, i):
        ids = i * 2 + jnp.arange(2, dtype=jnp.int32)
        number = ids[:, None] * 100 + jnp.arange(STEPS, dtype=jnp.int32)[None] + 1
        pair = jnp.zeros((2, STEPS, 2), jnp.float32)
        state, _ = replay.add(state, {"number": number, "pair": pair}, jnp.full((2,), 3, jnp.int32), version=i)
        state = replay.expire(state, i + 1)
        state, sample = replay.sample(state, jax.random.key(0), 2)
        state = replay.update_priorities(state, sample.handles, jnp.ones((2,), jnp.float32))
        return state, jnp.where(sample.valid, sample.data["number"][:, 0] // 100, -1)

    run = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(6, dtype=jnp.int32)), donate_argnums=0)
    gear.assert_in_place(run, replay.init())
    state, drawn = run(replay.init())
    # Turn i adds 2i and 2i + 1 of version i: each turn uses the oldest not more than one version behind.
    held, wanted = {}, []
    for i in range(6):
        held |= {2 * i: [i, 0], 2 * i + 1: [i, 0]}
        held = {k: v for k, v in held.items() if v[0] >= i}
        batch = sorted(held)[:2]
        for k in batch:
            held[k][1] += 1
        held = {k: v for k, v in held.items() if v[1] < 2}
        wanted.append(batch)
    assert np.asarray(drawn).tolist() == wanted
    assert replay.stats(state)["version"] == 6


@pytest.mark.parametrize("selector", [Queue(2), Stack(), Prioritized(times=2), Uniform(times=1)], ids=str)
def test_in_place(make, filled, selector):
    replay = make(selector, 8, gear.Window(0, 3), anchor="start", max_staleness=3)

    def step(state, key):
        state, sample = replay.sample(state, key, 4)
        state = replay.update_priorities(state, sample.handles, sample.probability)
        return state, sample.data

    state, _ = filled(replay, 6)
    gear.assert_in_place(jax.jit(step, donate_argnums=0), state, jax.random.key(0))
    scan = jax.jit(lambda s, k: jax.lax.scan(step, s, k), donate_argnums=0)
    gear.assert_in_place(scan, state, jax.random.split(jax.random.key(0), 3))


@pytest.mark.parametrize("selector", [Queue(2), Prioritized(times=2)], ids=str)
def test_samples_are_the_same_in_two_calls_and_under_vmap(make, filled, stack, element, same, selector):
    replay = make(selector, 8, gear.Window(0, 3), anchor="start", donate=False)
    states = [filled(replay, a)[0] for a in (6, 3)]
    key = jax.random.key(3)
    each = [replay.sample(s, key, 4) for s in states]
    for s, (after, sample) in zip(states, each, strict=True):
        started, pending = replay.sample_start(s, key, 4)
        same(replay.sample_done(pending), sample)
        same(started, after)
    both = jax.jit(jax.vmap(lambda s: replay.sample(s, key, 4)))(stack(*states))
    for v in range(2):
        same(element(both, v), each[v])


@pytest.mark.parametrize("current", [0, 5, -(2**31) + 1, 2**31 - 1])
def test_what_is_too_stale_leaves_and_does_not_come_in(make, rows, current):
    replay = make(Lifo(), 8, gear.Window(0, 3), anchor="start", max_staleness=2)
    lowest, highest = -(2**31), 2**31 - 1
    versions = np.clip(current + np.arange(-4, 3), lowest, highest).astype(np.int32)
    state, _ = replay.add(replay.init(), rows(range(7)), np.full(7, 3), version=versions)
    before = replay.stats(state)
    assert before["refused_stale"] == sum(int(v) < -2 for v in versions)
    state = replay.expire(state, current)
    learner = max(0, current)
    fresh = [i for i, v in enumerate(versions) if int(v) >= learner - 2]
    numbers = replay.stats(state)
    assert numbers["version"] == learner and numbers["trajectories"] == len(fresh)
    assert numbers["expired"] + numbers["refused_stale"] == 7 - len(fresh)
    state, sample = replay.sample(state, jax.random.key(0), 8)
    assert sorted(x for x in number_of(sample) if x >= 0) == fresh
    state, handles = replay.add(state, rows(range(10, 17)), np.full(7, 3), version=versions)
    assert ((np.asarray(handles.slot) >= 0) == np.isin(np.arange(7), fresh)).all()


def test_versions_rise_and_none_given_is_the_learner_s(make, rows):
    replay = make(Lifo(), 8, gear.Window(0, 3), anchor="start", max_staleness=0)
    state = replay.expire(replay.expire(replay.init(), 7), 3)
    assert replay.stats(state)["version"] == 7
    state, _ = replay.add(state, rows([0]), np.full(1, 3))
    state, handles = replay.add(state, rows([1]), np.full(1, 3), version=6)
    assert np.asarray(handles.slot).tolist() == [-1]
    assert replay.stats(state)["trajectories"] == 1
    assert replay.stats(replay.expire(state, jnp.int32(8)))["trajectories"] == 0


def test_a_stream_has_the_version_of_its_first_step(make):
    replay = make(Lifo(), 8, gear.Window(0, 3), anchor="start", streams=2, max_staleness=1)
    step = {"number": np.array([1, 101], np.int32), "pair": np.zeros((2, 2), np.float32)}
    state, _ = replay.append(replay.init(), np.arange(2), step, np.zeros(2, bool), version=np.array([3, 4]))
    state = replay.expire(state, 5)
    state, _ = replay.append(state, np.arange(2), step, np.ones(2, bool), version=5)
    numbers = replay.stats(state)
    assert (numbers["trajectories"], numbers["refused_stale"], numbers["open_streams"]) == (1, 1, 0)
    _, sample = replay.sample(state, jax.random.key(0), 2)
    assert number_of(sample) == [1, -1]


def test_bad_arguments(make, rows, filled):
    replay, plain = make(Lifo(), 8, max_staleness=1), make(Lifo(), 8)
    with pytest.raises(ValueError, match=r"version: got a version, wanted None.*max_staleness=k"):
        plain.add(plain.init(), rows([0]), np.full(1, 3), version=1)
    with pytest.raises(ValueError, match=r"expire: got a replay without max_staleness"):
        plain.expire(plain.init(), 1)
    with pytest.raises(ValueError, match=r"version: got shape \(2,\), wanted \(\) or \(1,\)"):
        replay.add(replay.init(), rows([0]), np.full(1, 3), version=np.array([1, 2]))
    with pytest.raises(TypeError, match=r"version: got dtype float32, wanted int32"):
        replay.add(replay.init(), rows([0]), np.full(1, 3), version=1.0)
    with pytest.raises(ValueError, match=r"expire: version: got shape \(1,\)"):
        replay.expire(replay.init(), np.array([1]))
    with pytest.raises(ValueError, match=r"max_staleness: got -1, wanted at least 0"):
        make(Lifo(), 8, max_staleness=-1)
    with pytest.raises(ValueError, match=r"sample: state: got a state with limits"):
        plain.sample(replay.init(), jax.random.key(0), 2)


CAPACITY, A = 6, 3


class Machine(RuleBasedStateMachine):
    """A table of one partition against a list of what is in it."""

    def __init__(self):
        super().__init__()
        self.replay, self.rows, self.pairs = self.fixtures
        self.times, self.staleness = self.replay.config.selector.times, self.replay.config.max_staleness
        self.state, self.held, self.seen = self.replay.init(), [], []
        self.number = self.version = self.key = 0
        self.counts = dict.fromkeys(("inserted", "evicted", "used_up", "expired", "refused_stale"), 0)

    def stale(self, version):
        return self.staleness is not None and version < self.version - self.staleness

    @rule(lengths=st.lists(st.integers(0, 3), min_size=A, max_size=A), behind=st.integers(0, 3))
    def add(self, lengths, behind):
        ids, version = list(range(self.number, self.number + A)), self.version - behind
        self.number += A
        given = {} if self.staleness is None else {"version": version}
        self.state, handles = self.replay.add(self.state, self.rows(ids), np.array(lengths, np.int32), **given)
        coming = [(i, n) for i, n in zip(ids, lengths, strict=True) if n > 0]
        if self.stale(version):
            self.counts["refused_stale"] += len(coming)
            coming = []
        for i, n in coming:
            if len(self.held) == CAPACITY:
                self.held.pop(0)  # the oldest; free places go first
                self.counts["evicted"] += 1
            self.held.append({"number": i, "length": n, "times": 0, "version": version})
            self.counts["inserted"] += 1
        self.seen += [h for h in self.pairs(handles) if h[0] >= 0]

    @rule(by=st.integers(-1, 2))
    def expire(self, by):
        if self.staleness is None:
            return
        self.state = self.replay.expire(self.state, self.version + by)
        self.version += max(by, 0)
        left = [h for h in self.held if not self.stale(h["version"])]
        self.counts["expired"] += len(self.held) - len(left)
        self.held = left

    @rule(batch=st.sampled_from([1, 4, 9]))
    def sample(self, batch):
        self.key += 1
        self.state, s = self.replay.sample(self.state, jax.random.key(self.key), batch)
        drawn, valid = number_of(s), np.asarray(s.valid)
        by_number = {h["number"]: h for h in self.held}
        selector = self.replay.config.selector
        if isinstance(selector, (Queue, Stack)):
            order = sorted(by_number, reverse=isinstance(selector, Stack))[:batch]
            assert drawn == order + [-1] * (batch - len(order))
        else:
            room = sum((self.times or batch) - h["times"] for h in self.held)
            assert valid.sum() == (min(batch, room) if self.times else batch * bool(self.held))
        for b in np.flatnonzero(valid):
            held = by_number[drawn[b]]
            held["times"] += 1
            assert s.length[b] == held["length"] and held["times"] <= (self.times or np.inf)
        if self.times is not None:
            left = [h for h in self.held if h["times"] < self.times]
            self.counts["used_up"] += len(self.held) - len(left)
            self.held = left

    @rule(data=st.data())
    def update(self, data):
        some = data.draw(st.lists(st.sampled_from([(-1, 0), *self.seen[-9:]]), min_size=3, max_size=3))
        handles = gear.Handle(np.array([h[0] for h in some], np.int32), np.array([h[1] for h in some], np.uint32))
        self.state = self.replay.update_priorities(self.state, handles, np.full(3, 2.0, np.float32))

    @invariant()
    def agrees(self):
        numbers = self.replay.stats(self.state)
        assert numbers["trajectories"] == len(self.held)
        assert numbers["steps"] == sum(h["length"] for h in self.held)
        assert {k: numbers[k] for k in self.counts} == self.counts
        assert bool(self.replay.can_sample(self.state)) == bool(self.held)
        mass, length = np.asarray(self.state.mass), np.asarray(self.state.length)
        assert ((mass > 0) == (length > 0)).all()
        np.testing.assert_array_equal(np.asarray(self.state.sums), sums_oracle(mass))


@pytest.mark.filterwarnings("default::pytest.PytestWarning")
@pytest.mark.parametrize(
    ("selector", "staleness"),
    [(Queue(2), None), (Stack(2), 1), (Uniform(times=2), 1), (Prioritized(times=1), None), (Uniform(), 0)],
    ids=str,
)
def test_any_sequence_of_calls(make, rows, pairs, selector, staleness):
    replay = make(selector, CAPACITY, gear.Window(0, 3), anchor="start", max_staleness=staleness, partitions=1)
    if selector.times is None:  # limits of staleness alone
        assert replay.init().limits.times is None

    class WithFixtures(Machine):
        fixtures = replay, rows, pairs

    WithFixtures.TestCase.settings = settings(
        max_examples=15, stateful_step_count=30, deadline=None, derandomize=True, database=None
    )
    WithFixtures.TestCase("runTest").runTest()


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "meanwhile"])
def test_a_stream_that_is_too_stale_does_not_get_in(late):
    """No handle, nothing inserted, and it is counted as refused."""
    table = gear.TableSpec({"x": gear.ColumnSpec((), jnp.float32)}, 4, 8)
    replay = gear.make_replay(table, streams=2, max_staleness=0)
    state, one = replay.init(), {"x": np.ones(2, np.float32)}
    if late:
        state, _ = replay.append(state, [0, 1], one, [False, False], version=[0, 5])
    state = replay.expire(state, 5)
    state, handles = replay.append(state, [0, 1], one, [True, True], version=[0, 5])
    assert np.asarray(handles.slot).tolist()[0] == -1 and np.asarray(handles.generation).tolist() == [0, 1]
    numbers = replay.stats(state)
    assert [numbers[x] for x in ("inserted", "refused_stale", "expired", "trajectories")] == [1, 1, 0, 1]
    state = replay.update_priorities(state, handles, np.array([100, 2], np.float32))
    numbers = replay.stats(state)
    assert numbers["max_priority"] == 2 and numbers["stale_updates"] == 0


@pytest.mark.parametrize("leave", ["used up", "expired"])
def test_handles_of_what_has_left_are_stale(leave):
    table = gear.TableSpec({"x": gear.ColumnSpec((), jnp.float32)}, 2, 4)
    selector = gear.selectors.Prioritized(times=1) if leave == "used up" else gear.selectors.Prioritized()
    replay = gear.make_replay(table, selector, max_staleness=0)
    state, handles = replay.add(replay.init(), {"x": np.ones((1, 2), np.float32)}, [2])
    if leave == "used up":
        state, _ = replay.sample(state, jax.random.key(0), 1)
    else:
        state = replay.expire(state, 1)
    for priority in (100, np.nan):
        state = replay.update_priorities(state, handles, np.array([priority], np.float32))
    numbers = replay.stats(state)
    assert [numbers[x] for x in ("stale_updates", "rejected_priorities", "max_priority")] == [2, 0, 1]
