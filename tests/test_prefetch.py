"""`gear_jax.prefetch`: the samples are those of `sample` at the time of drawing, and it says how long ago that was."""

import gc

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

import gear_jax as gear
from gear_jax import ops
from gear_jax.selectors import Prioritized
from gear_jax.testing.ops import assert_same_bits, to_numpy

B, T, C = 4, 3, 8
KEY = jax.random.key(7)
TABLE = gear.TableSpec({"number": gear.ColumnSpec((), jnp.int32), "pair": gear.ColumnSpec((2,), jnp.float32)}, T, C)
REPLAY = gear.make_replay(TABLE, Prioritized(), gear.Window(-1, 2), streams=1)
KEPT = gear.make_replay(TABLE, Prioritized(), gear.Window(-1, 2), streams=1, donate=False)


def rows(n, first=0):
    number = first + np.arange(n * T, dtype=np.int32).reshape(n, T)
    return {"number": number, "pair": np.stack([number, number], -1).astype(np.float32)}


def filled(replay=REPLAY):
    return replay.add(replay.init(), rows(C), np.full(C, T, np.int32))[0]


def key(n):
    return jax.random.fold_in(KEY, n)


def same(got, wanted):
    assert_same_bits(got, jax.tree.map(np.asarray, wanted))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_samples_are_those_of_sample(size):
    wanted, state = [], filled()
    for n in range(6):
        state, sample = REPLAY.sample(state, key(n), B)
        wanted.append(jax.tree.map(np.asarray, sample))
    with gear.prefetch(REPLAY, filled(), KEY, B, size=size) as loader:
        for n in range(6):
            same(loader.next(), wanted[n])
            assert loader.staleness == (0, 0)
    assert REPLAY.stats(loader.state)["sampled"] == (6 + size) * B


def test_a_loop_that_learns_and_adds():
    """Each sample is as many calls behind as there were between its drawing and its delivery."""
    with gear.prefetch(REPLAY, filled(), KEY, B, size=2) as loader:
        assert loader.staleness is None
        seen = []
        for n, sample in enumerate(loader):
            seen.append(loader.staleness)
            loader.update_priorities(sample.handles, jnp.ones(B))
            if n % 2:
                loader.add(rows(1, 100 * n), np.full(1, T, np.int32))
            if n == 5:
                break
    assert seen == [(0, 0), (1, 0), (2, 1), (2, 1), (2, 1), (2, 1)]
    assert seen[2].updates == 2 and seen[2].adds == 1
    stats = REPLAY.stats(loader.state)
    assert stats["inserted"] == C + 3


def test_append_counts_as_an_addition():
    step = {"number": jnp.zeros(1, jnp.int32), "pair": jnp.zeros((1, 2))}
    with gear.prefetch(REPLAY, filled(), KEY, B, size=1) as loader:
        loader.next()
        handles = loader.append(jnp.zeros(1, jnp.int32), step, jnp.ones(1, bool))
        assert handles.slot[0] >= 0
        loader.next()
        assert loader.staleness == gear.Staleness(0, 1)


def test_what_is_added_before_the_first_sample_is_seen():
    with gear.prefetch(REPLAY, REPLAY.init(), KEY, B) as loader:
        loader.add(rows(2), np.full(2, T, np.int32), np.ones(2, np.float32))
        assert np.asarray(loader.next().valid).all()
        assert REPLAY.stats(loader.state)["trajectories"] == 2


@pytest.mark.parametrize("replay", [REPLAY, KEPT], ids=["donated", "kept"])
def test_samples_in_flight_do_not_see_later_rows(replay):
    with gear.prefetch(replay, filled(replay), KEY, np.int64(B), size=np.int64(3)) as loader:
        loader.next()
        for n in range(1, 8):
            loader.add(rows(C, 1000 * n), np.full(C, T, np.int32))
            sample = jax.tree.map(np.asarray, loader.next())
            assert loader.staleness.adds == min(n, 3)
            drawn = sample.data["number"][sample.mask["number"]] // 1000
            assert (drawn == max(0, n - 3)).all()


def test_closing():
    state = filled()
    loader = gear.prefetch(REPLAY, state, KEY, B, size=3)
    assert "0 of 3 in flight" in repr(loader)
    last = loader.next()
    assert "3 of 3 in flight" in repr(loader)
    queue = loader._queue.number
    loader.close()
    loader.close()
    assert "closed" in repr(loader) and np.asarray(last.valid).all()
    for call in (
        loader.next, loader.__enter__, lambda: next(loader), lambda: loader.add(rows(1), [1]),
        lambda: loader.append([0], rows(1), [True]), lambda: loader.update_priorities(last.handles, jnp.ones(B)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"Prefetcher\.\w+: got a closed loader.*gear_jax.prefetch\(replay"):
            call()
    state, sample = REPLAY.sample(loader.state, KEY, B)  # the state is the caller's again
    assert np.asarray(sample.valid).all()
    # The next loader takes over the queue, for which the programs are compiled already.
    with gear.prefetch(REPLAY, state, KEY, B, size=3) as again, gear.prefetch(REPLAY, filled(), KEY, B) as beside:
        assert again._queue.number == queue != beside._queue.number
        assert np.asarray(again.next().valid).all() and np.asarray(beside.next().valid).all()


def test_closing_without_a_sample_and_after_an_error():
    with gear.prefetch(REPLAY, filled(), KEY, B) as loader:
        pass
    assert REPLAY.stats(loader.state)["sampled"] == 0
    with pytest.raises(KeyError, match="mine"), gear.prefetch(REPLAY, filled(), KEY, B) as loader:
        loader.next()
        jax.tree.leaves(loader._flights[0].pending)[0].delete()  # closing fails too, which is not the news
        raise KeyError("mine")
    assert "closed" in repr(loader)


def test_a_loader_that_is_dropped():
    loader = gear.prefetch(REPLAY, filled(), KEY, B)
    sample = loader.next()
    del loader
    gc.collect()
    assert np.asarray(sample.valid).all()
    with gear.prefetch(REPLAY, filled(), KEY, B) as loader:
        assert np.asarray(loader.next().valid).all()


def test_errors():
    state = filled()
    with pytest.raises(TypeError, match="replay: got int, wanted a Replay"):
        gear.prefetch(1, state, KEY, B)
    for size in (0, 65, 1.0, True):
        with pytest.raises(ValueError, match=r"size: got .*, wanted an integer in \[1, 64\]"):
            gear.prefetch(REPLAY, state, KEY, B, size=size)
    with pytest.raises(TypeError, match="key: got int"):
        gear.prefetch(REPLAY, state, 0, B)
    with pytest.raises(TypeError, match="batch_size: got float"):
        gear.prefetch(REPLAY, state, KEY, 1.5)
    with pytest.raises(TypeError, match="wanted a ReplayState"):
        gear.prefetch(REPLAY, KEY, KEY, B)
    with pytest.raises(TypeError, match=r"prefetch: state: got a traced state.*replay\.sample_start"):
        jax.jit(lambda s: gear.prefetch(REPLAY, s, KEY, B).state)(state)
    with gear.prefetch(REPLAY, state, KEY, B) as loader:
        sample = loader.next()
        with pytest.raises(ValueError, match="missing"):
            loader.add({"number": np.zeros((1, T), np.int32)}, [1])
        with pytest.raises(TypeError, match="handles: got int, wanted a Handle"):
            loader.update_priorities(0, jnp.ones(B))
        loader.next()
        assert loader.staleness == (0, 0)  # calls that fail change nothing
        REPLAY.update_priorities(loader.state, sample.handles, jnp.ones(B))  # not through the loader
        with pytest.raises(ValueError, match="got a state that an earlier call has consumed"):
            loader.next()
    with pytest.raises(ValueError, match="got a state that an earlier call has consumed"):
        gear.prefetch(REPLAY, state, KEY, B)


def test_lost_data_is_not_valid():
    """A queue that somebody else frees: no wrong data."""
    with gear.prefetch(REPLAY, filled(), KEY, B, size=2) as loader:
        loader.next()
        jax.block_until_ready(loader.state)
        ops.release_queue(loader._queue.number)
        assert not np.asarray(loader.next().valid).any()
        loader.next()
        assert np.asarray(loader.next().valid).all()


class Machine(RuleBasedStateMachine):
    """A loader beside a replay without one, which draws each sample when the loader does."""

    def __init__(self):
        super().__init__()
        self.loader, self.state, self.drawn, self.number = None, filled(), 0, 0
        self.expected, self.clock = [], [0, 0]

    def draw(self):
        self.state, sample = REPLAY.sample(self.state, key(self.drawn), B)
        self.drawn += 1
        self.expected.append((jax.tree.map(np.asarray, sample), tuple(self.clock)))

    @precondition(lambda self: self.loader is None)
    @rule(size=st.integers(1, 3))
    def open(self, size):
        state = REPLAY.place(jax.tree.map(jnp.array, to_numpy(self.state)))
        self.loader, self.size, self.drawn, self.expected = gear.prefetch(REPLAY, state, KEY, B, size=size), size, 0, []

    @precondition(lambda self: self.loader is not None)
    @rule()
    def next(self):
        while len(self.expected) < self.size + 1:
            self.draw()
        wanted, clock = self.expected.pop(0)
        same(self.loader.next(), wanted)
        assert self.loader.staleness == tuple(now - then for now, then in zip(self.clock, clock, strict=True))
        self.handles = wanted.handles

    @precondition(lambda self: self.loader is not None and hasattr(self, "handles"))
    @rule(priority=st.sampled_from([0.5, 1.0, 8.0]))
    def update(self, priority):
        given = self.handles, np.linspace(priority, 1, B, dtype=np.float32)
        self.loader.update_priorities(*given)
        self.state = REPLAY.update_priorities(self.state, *given)
        self.clock[0] += 1

    @precondition(lambda self: self.loader is not None)
    @rule(lengths=st.lists(st.integers(0, T), min_size=2, max_size=2))
    def add(self, lengths):
        self.number += 100
        given = rows(2, self.number), np.array(lengths, np.int32)
        handles = self.loader.add(*given)
        self.state, wanted = REPLAY.add(self.state, *given)
        same(handles, wanted)
        self.clock[1] += 1

    @precondition(lambda self: self.loader is not None)
    @rule()
    def close(self):
        self.loader.close()
        if self.expected or self.drawn:
            same(self.loader.state, self.state)
        self.state = REPLAY.place(jax.tree.map(jnp.array, to_numpy(self.loader.state)))
        self.loader = None

    def teardown(self):
        if self.loader is not None:
            self.loader.close()


@pytest.mark.filterwarnings("default::pytest.PytestWarning")
def test_any_sequence_of_calls():
    Machine.TestCase.settings = hypothesis.settings(
        max_examples=20, stateful_step_count=20, deadline=None, derandomize=True, database=None
    )
    Machine.TestCase("runTest").runTest()


def test_trajectories_that_leave_by_themselves():
    """What is in flight has been drawn, and keeps what it drew."""
    replay = gear.make_replay(TABLE, gear.selectors.Queue(), gear.Window(0, 1), anchor="start", max_staleness=1)
    with gear.prefetch(replay, filled(replay), KEY, 2, size=2) as loader:
        first = loader.next()
        loader.expire(9)
        loader.add(rows(2, first=100), np.full(2, T, np.int32), version=8)
        loader.add(rows(2, first=200), np.full(2, T, np.int32), version=7)
        seen = [
            np.asarray(s.data["number"])[np.asarray(s.valid), 0].tolist()
            for s in (first, *(loader.next() for _ in "abc"))
        ]
    assert seen == [[0, T], [2 * T, 3 * T], [4 * T, 5 * T], [100, 100 + T]]
    assert replay.stats(loader.state)["refused_stale"] == 2
