"""Any sequence of calls leaves the table as the model has it."""

import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import gear_jax as gear
from gear_jax.selectors import Prioritized
from gear_jax.testing.ops import sums_oracle

PARTITIONS, SLOTS, STREAMS, A, B, STEPS = 2, 4, 2, 3, 6, 5
PRIORITIES = st.one_of(
    st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, -1.0, 1e30]), st.floats(2.0**-20, 2.0**20, width=32)
)
LENGTHS = st.lists(st.integers(-1, STEPS + 1), min_size=A, max_size=A)


class Machine(RuleBasedStateMachine):
    """`start(self)` is set by the test and gives it the fixtures."""

    def __init__(self):
        super().__init__()
        self.replay, model, self.rows, self.pairs = self.fixtures
        self.state, self.model = self.replay.init(), model(PARTITIONS, SLOTS, STREAMS)
        self.handles, self.number, self.running, self.keys = [(-1, 0), (3, 7), (99, 1)], 0, {}, 0

    def new(self, n):
        self.number += n
        return list(range(self.number - n, self.number))

    @rule(lengths=LENGTHS, priorities=st.lists(PRIORITIES, min_size=A, max_size=A))
    def add(self, lengths, priorities):
        ids, clipped = self.new(A), [min(max(n, 0), STEPS) for n in lengths]
        given = np.array(priorities, np.float32)
        self.state, handles = self.replay.add(self.state, self.rows(ids), np.array(lengths, np.int32), given)
        self.expect(handles, self.model.add(ids, clipped, given))

    @rule(lengths=LENGTHS)
    def add_without_priorities(self, lengths):
        ids, clipped = self.new(A), [min(max(n, 0), STEPS) for n in lengths]
        self.state, handles = self.replay.add(self.state, self.rows(ids), np.array(lengths, np.int32))
        self.expect(handles, self.model.add(ids, clipped))

    @rule(order=st.permutations([-1, 0, 1, STREAMS]), done=st.lists(st.booleans(), min_size=2, max_size=2))
    def append(self, order, done):
        order, ids = list(order[:2]), self.new(2)
        for k, i in zip(order, ids, strict=True):
            self.running.setdefault(k, [i, 0])
        now = [self.running[k] for k in order]
        step = {
            "number": np.array([i * 100 + t + 1 for i, t in now], np.int32),
            "pair": np.array(now, np.float32),
        }
        self.state, handles = self.replay.append(self.state, np.array(order, np.int32), step, np.array(done))
        self.expect(handles, self.model.append(order, [i for i, _ in now], done))
        for k, end in zip(order, done, strict=True):
            self.running[k][1] += 1
            if end or self.running[k][1] == STEPS:
                del self.running[k]

    def expect(self, handles, wanted):
        assert self.pairs(handles) == wanted
        self.handles += [h for h in wanted if h[0] >= 0]

    @rule(data=st.data(), priorities=st.lists(PRIORITIES, min_size=4, max_size=4))
    def update(self, data, priorities):
        some = data.draw(st.lists(st.sampled_from(self.handles[-12:] + self.handles[:3]), min_size=4, max_size=4))
        slot, generation = np.array([h[0] for h in some], np.int32), np.array([h[1] for h in some], np.uint32)
        given = np.array(priorities, np.float32)
        self.state = self.replay.update_priorities(self.state, gear.Handle(slot, generation), given)
        self.model.update(some, given)

    @rule()
    def sample(self):
        self.keys += 1
        self.state, s = self.replay.sample(self.state, jax.random.key(self.keys), B)
        s = jax.tree.map(np.asarray, s)
        drawable = {c for c, h in self.model.held.items() if h.priority > 0}
        assert s.valid.all() == bool(drawable) == s.valid.any() == bool(self.replay.can_sample(self.state))
        for b in np.flatnonzero(s.valid):
            held = self.model.held[s.handles.slot[b]]
            assert s.handles.slot[b] in drawable and s.handles.generation[b] == self.model.generation[s.handles.slot[b]]
            assert s.length[b] == held.length and 0 <= s.anchor[b] < held.length
            steps = s.anchor[b] - 1 + np.arange(3)
            inside = (steps >= 0) & (steps < held.length)
            np.testing.assert_array_equal(s.mask["number"][b], inside)
            np.testing.assert_array_equal(s.data["number"][b], np.where(inside, held.trajectory * 100 + steps + 1, 0))

    @invariant()
    def agrees(self):
        self.model.check(self.replay, self.state)
        priority, length = np.asarray(self.state.priority), np.asarray(self.state.length)
        mass = np.asarray(self.state.mass)
        assert ((mass > 0) == ((priority > 0) & (length > 0))).all()
        np.testing.assert_array_equal(np.asarray(self.state.sums), sums_oracle(mass))


@pytest.mark.filterwarnings("default::pytest.PytestWarning")
def test_any_sequence_of_calls(make, model, rows, pairs):
    replay = make(Prioritized(), PARTITIONS * SLOTS, gear.Window(-1, 3), partitions=PARTITIONS, streams=STREAMS)
    given = replay, model, rows, pairs

    class WithFixtures(Machine):
        fixtures = given

    WithFixtures.TestCase.settings = settings(
        max_examples=25, stateful_step_count=40, deadline=None, derandomize=True, database=None
    )
    WithFixtures.TestCase("runTest").runTest()
