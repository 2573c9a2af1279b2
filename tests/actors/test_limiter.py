"""The rate limiter: what it lets do, what it refuses (all of which is tried out), and who waits."""

import collections
import itertools
import json
import os
import pickle
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gear_jax.actors import RateLimiter, RateLimitTimeoutError
from gear_jax.actors._rates import Rates, make_rates

SECONDS = 20.0


class Table:
    """A table of C places whose trajectories leave after `times` draws, oldest first: what draws each has left."""

    def __init__(self, capacity, times, left=(), inserted=0, sampled=0):
        self.capacity, self.times, self.left = capacity, times, tuple(left)
        self.inserted, self.sampled = inserted, sampled

    def insert(self):
        left = (*self.left, self.times or 0)
        return Table(self.capacity, self.times, left[-self.capacity :], self.inserted + 1, self.sampled)

    def sample(self, batch):
        """None if the table does not have a batch."""
        left = self.left
        if self.times is None:
            if not left:
                return None
        elif len(left) < batch:
            return None
        else:
            left = tuple(x for x in (*(x - 1 for x in left[:batch]), *left[batch:]) if x)
        return Table(self.capacity, self.times, left, self.inserted, self.sampled + batch)


def stuck(rates, times, most=4000, highest=60):
    """A state that can be reached and in which neither side may go on; None if there is none among the first `most`.

    What decides is how far inserts are ahead and what the table holds, so states that agree in both are one.
    """
    start = Table(rates.capacity, times)
    seen, queue = {(Fraction(0), (), 0)}, collections.deque([start])
    while queue and len(seen) < most:
        now = queue.popleft()
        following = []
        args = now.inserted, now.sampled, len(now.left)
        if rates.may_insert(*args) > 0:
            following.append(now.insert())
        if rates.may_sample(*args):
            after = now.sample(rates.batch)
            assert after is not None, "a batch was allowed that the table does not have"
            following.append(after)
        if not following:
            return now
        for table in following:
            ahead = rates.difference(table.inserted, table.sampled)
            key = ahead, table.left, min(table.inserted, rates.need)
            if key not in seen and abs(ahead) <= highest:
                seen.add(key)
                queue.append(table)
    return None


RATIOS = [Fraction(1, 3), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3), Fraction(5)]


@pytest.mark.parametrize("ratio", RATIOS, ids=str)
def test_a_buffer_is_refused_just_where_it_can_end_in_a_deadlock(ratio):
    tried = {True: 0, False: 0}
    for batch, need, quarters in itertools.product((1, 2, 3, 4, 6), (1, 2, 5), range(1, 40, 1)):
        buffer = Fraction(quarters, 4)
        try:
            rates = make_rates(ratio, need, buffer, batch, 8, None, None)
        except ValueError as e:
            assert "error_buffer: got" in str(e)
            rates = Rates(ratio, buffer, need, batch, 8, False)
            assert stuck(rates, None) is not None, rates
            tried[False] += 1
        else:
            assert (rates.ratio, rates.buffer) == (ratio, buffer)
            assert stuck(rates, None) is None, rates
            tried[True] += 1
    assert min(tried.values()) > 50


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_queues_are_never_stuck(times, batch):
    for capacity, need in itertools.product((5, 6, 9), (1, 4, 5)):
        assert stuck(make_rates(None, need, None, batch, capacity, times, None), times) is None
        for ratio in (r for r in RATIOS if r <= times):
            assert stuck(make_rates(ratio, need, None, batch, capacity, times, None), times) is None


@pytest.mark.parametrize(("times", "ratio"), [(2, 1), (3, 2), (3, Fraction(1, 2))])
def test_actors_that_wait_for_room_and_a_ratio_end_in_a_deadlock(times, ratio):
    with pytest.raises(ValueError, match=r"when_full: got 'wait' with samples_per_insert.*Leave samples_per_insert"):
        make_rates(ratio, 2, None, 2, 6, times, "wait")

    class Waits(Rates):
        """As the settings that were refused would be kept."""

    rates = Waits(Fraction(ratio), Fraction(ratio) + 2, 2, 2, 6, True)
    assert stuck(rates, times) is not None


def test_more_samples_than_there_will_be_are_out_of_reach():
    with pytest.raises(ValueError, match=r"samples_per_insert: got 3 of trajectories that leave after 2.*at most"):
        make_rates(3, 1, None, 2, 9, 2, None)
    # Drawn as often as can be, the difference grows over all bounds.
    rates, table = Rates(Fraction(3), Fraction(5), 2, 2, 9, False), Table(9, 2)
    for _ in range(400):
        if rates.may_sample(table.inserted, table.sampled, len(table.left)):
            table = table.sample(2)
        elif rates.may_insert(table.inserted, table.sampled, len(table.left)):
            table = table.insert()
    assert rates.difference(table.inserted, table.sampled) > 100 > rates.buffer


@pytest.mark.parametrize(("min_size", "batch", "times"), [(9, 1, None), (9, 1, 2), (1, 9, 2)])
def test_a_table_that_is_too_small_is_refused_and_starves_the_learner(min_size, batch, times):
    what = "min_size" if min_size > 1 else "batch_size"
    with pytest.raises(ValueError, match=rf"{what}: got 9, for a table of 8.*{what}=8 or less.*capacity=9"):
        make_rates(None, min_size, None, batch, 8, times, None)
    rates, table = Rates(None, None, 9, batch, 8, times is not None), Table(8, times)
    for _ in range(100):
        assert not rates.may_sample(table.inserted, table.sampled, len(table.left))
        if rates.may_insert(table.inserted, table.sampled, len(table.left)):
            table = table.insert()


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"samples_per_insert": 0}, ValueError, "samples_per_insert: got 0, wanted more than 0"),
        ({"samples_per_insert": float("nan")}, ValueError, "samples_per_insert: got nan"),
        ({"samples_per_insert": "4"}, TypeError, "samples_per_insert: got '4', wanted a number"),
        ({"samples_per_insert": 1e-9}, ValueError, "wanted 1 / 1000000 or more"),
        ({"batch_size": 0}, ValueError, "batch_size: got 0, wanted at least 1"),
        ({"batch_size": 2.0}, TypeError, "batch_size: got 2.0, wanted an integer"),
        ({"times": 0}, ValueError, "times: got 0"),
        ({"error_buffer": 4}, ValueError, "error_buffer: got 4, wanted None without samples_per_insert"),
        ({"when_full": "block"}, ValueError, "when_full: got 'block', wanted 'wait' or 'evict'"),
        ({"when_full": "wait"}, ValueError, "when_full: got 'wait' for a table that nothing leaves"),
        ({"max_staleness": -1}, ValueError, "max_staleness: got -1"),
        (
            {"samples_per_insert": 8, "batch_size": 256, "error_buffer": 100},
            ValueError,
            r"error_buffer: got 100, wanted at least 128: .*8 and batches of 256 rows.*error_buffer=128 or more.*264",
        ),
    ],
)
def test_bad_arguments(arguments, kind, text):
    with pytest.raises(kind, match=text):
        RateLimiter(**{"batch_size": 4, "capacity": 8, **arguments})


def test_what_an_error_says_will_do_does():
    """The least buffer that the message names is accepted, and none below it."""
    for ratio, batch in itertools.product(RATIOS, (1, 3, 4, 10)):
        with pytest.raises(ValueError, match="at least ") as e:
            make_rates(ratio, 1, Fraction(1, 1000), batch, 8, None, None)
        least = Fraction(str(e.value).split("at least ")[1].split(":")[0]).limit_denominator(100)
        make_rates(ratio, 1, least, batch, 8, None, None)
        with pytest.raises(ValueError, match="error_buffer"):
            make_rates(ratio, 1, least - Fraction(1, 1000), batch, 8, None, None)


class Machine(RuleBasedStateMachine):
    """A limiter that drives a table of draws left, whatever the order of calls, with trajectories that expire."""

    @initialize(
        ratio=st.sampled_from([None, *RATIOS]), batch=st.integers(1, 5), need=st.integers(1, 6),
        times=st.sampled_from([None, 1, 2, 5]), extra=st.integers(0, 12),
    )  # fmt: skip
    def make(self, ratio, batch, need, times, extra):
        if ratio is not None and times is not None:
            ratio = min(ratio, Fraction(times))
        self.limiter = RateLimiter(
            ratio, batch_size=batch, capacity=6, min_size=need, times=times, max_staleness=1,
            error_buffer=None if ratio is None else ratio + batch + extra,
        )  # fmt: skip
        self.table, self.times, self.version, self.versions = Table(6, times), times, 0, []

    def observe(self):
        self.limiter.observe(len(self.table.left))

    @rule(behind=st.integers(0, 3))
    def insert(self, behind):
        if not self.limiter.fresh([self.version - behind]).all():
            assert behind > 1
            return
        assert behind <= 1
        if self.limiter.may_insert():
            if self.limiter.rates.waits_when_full:
                assert len(self.table.left) < 6, "an insert that evicts"
            self.limiter.insert()
            self.table = self.table.insert()

    @rule()
    def sample(self):
        may = self.limiter.may_sample()
        assert self.limiter.sample() == may
        if may:
            self.table = self.table.sample(self.limiter.batch_size)
            assert self.table is not None, "a batch that the table does not have"

    @rule(gone=st.integers(0, 4))
    def expire(self, gone):
        self.version += 1
        self.limiter.advance(self.version)
        t = self.table
        self.table = Table(t.capacity, t.times, t.left[gone:], t.inserted, t.sampled)
        self.observe()

    @rule()
    def look(self):
        self.observe()

    @invariant()
    def somebody_may_go_on(self):
        if not hasattr(self, "limiter"):
            return
        numbers, t = self.limiter.stats(), self.table
        assert (numbers["inserted"], numbers["sampled"]) == (t.inserted, t.sampled)
        assert all(type(x) in (int, float) for name, x in numbers.items() if name not in ("lowest", "highest"))
        if self.times is None:
            assert numbers["size"] == len(t.left)
        elif not (numbers["may_insert"] or numbers["may_sample"]):
            self.observe()  # it may not know yet what has left
            numbers = self.limiter.stats()
        assert numbers["may_insert"] or numbers["may_sample"], numbers


def test_no_order_of_calls_ends_in_a_deadlock():
    Machine.TestCase.settings = settings(
        max_examples=150, stateful_step_count=60, deadline=None, derandomize=True, database=None
    )
    Machine.TestCase("runTest").runTest()


@pytest.mark.parametrize(("ratio", "times"), [(2.0, None), (None, 1), (None, 3), (0.5, None)])
def test_threads_keep_to_the_ratio_and_come_to_an_end(ratio, times):
    limiter = RateLimiter(ratio, batch_size=4, capacity=50, min_size=5, times=times)
    inserts, failed, seen = 300, [], []

    def actor():
        try:
            for _ in range(inserts // 3):
                limiter.await_insert(SECONDS)
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=actor) for _ in range(3)]
    for t in threads:
        t.start()
    until = time.monotonic() + SECONDS
    while True:
        assert time.monotonic() < until
        alive = any(t.is_alive() for t in threads)
        if times is not None:  # what a table with a queue would say
            n = limiter.stats()
            limiter.observe(n["inserted"] - n["sampled"] // times, n["inserted"])
            assert n["size"] <= 50
        if not alive and not limiter.may_sample():
            break
        try:
            limiter.await_sample(0.02)
        except RateLimitTimeoutError:
            continue
        seen.append(limiter.stats())
    for t in threads:
        t.join(SECONDS)
    assert not failed and seen
    last = limiter.stats()
    assert last["inserted"] == inserts
    if ratio is not None:
        assert all(s["lowest"] <= s["difference"] for s in seen)
        assert all(s["difference"] <= s["highest"] for s in seen if s["inserted"] > 10)
        assert abs(last["sampled"] - ratio * (inserts - 5)) <= last["highest"]
    else:
        assert last["sampled"] > times * (inserts - 5) - 4  # what is left is not enough


def test_deadlines_and_what_they_say():
    limiter = RateLimiter(1.0, batch_size=2, capacity=8, min_size=3)
    start = time.monotonic()
    with pytest.raises(RateLimitTimeoutError, match=r"sample after 0\.05 s: got 0 trajectories.*wanted 3 trajectories"):
        limiter.await_sample(0.05)
    for _ in range(6):  # 3, and the buffer of 1 + 2 samples
        limiter.await_insert(0.0)
    with pytest.raises(RateLimitTimeoutError, match=r"insert after 0\.05 s.*6 inserted.*more samples: RateLimiter\(1 "):
        limiter.await_insert(0.05)
    assert 0.1 <= time.monotonic() - start < SECONDS
    for _ in range(3):
        limiter.await_sample(0.0)
    with pytest.raises(RateLimitTimeoutError, match=r"sample after 0 s.*6 rows sampled.*more inserts"):
        limiter.await_sample(0.0)
    numbers = limiter.stats()
    assert (numbers["insert_waits"], numbers["sample_waits"], numbers["inserts_waiting"]) == (1, 2, 0)
    assert numbers["insert_wait_seconds"] >= 0.05 <= numbers["sample_wait_seconds"]
    with pytest.raises(ValueError, match="timeout: got -1"):
        limiter.await_sample(-1)


def test_a_waiting_thread_is_woken():
    limiter = RateLimiter(batch_size=2, capacity=8, min_size=2)
    done = threading.Event()

    def learner():
        limiter.await_sample(SECONDS)
        done.set()

    thread = threading.Thread(target=learner)
    thread.start()
    limiter.insert()
    assert not done.wait(0.05)
    limiter.insert()
    assert done.wait(SECONDS)
    thread.join(SECONDS)
    assert limiter.stats()["sampled"] == 2


def test_versions_that_are_too_old():
    limiter = RateLimiter(batch_size=1, capacity=8, max_staleness=2)
    limiter.advance(5)
    limiter.advance(4)
    np.testing.assert_array_equal(limiter.fresh([2, 3, 4, 9]), [False, True, True, True])
    assert (limiter.version, limiter.stats()["refused_stale"]) == (5, 1)
    assert RateLimiter(batch_size=1, capacity=8).fresh(np.arange(-3, 3)).all()


@pytest.mark.parametrize(("ratio", "times"), [(2.0, None), (None, 2), (2.0, 4)])
def test_a_restored_one_goes_on_where_the_other_was(ratio, times):
    def make():
        return RateLimiter(ratio, batch_size=3, capacity=8, min_size=4, times=times, max_staleness=2)

    limiter = make()
    limiter.advance(3)
    limiter.fresh([0, 3])
    for _ in range(5):
        limiter.insert()
    assert limiter.sample()
    with pytest.raises(RateLimitTimeoutError):
        while True:
            limiter.await_sample(0.0)
    saved = json.loads(json.dumps(limiter.state_dict()))
    other = make()
    assert other.stats() != limiter.stats()
    other.load_state_dict(saved)
    assert other.stats() == limiter.stats() and other.state_dict() == saved
    for _ in range(40):  # and what they let in and out from then on is the same
        assert (other.may_insert(), other.may_sample()) == (limiter.may_insert(), limiter.may_sample())
        for x in (limiter, other):
            x.sample() or x.insert(min(1, x.may_insert()))
    smaller = RateLimiter(batch_size=3, capacity=4)
    smaller.load_state_dict({name: np.asarray(x)[()] for name, x in saved.items()})
    assert smaller.stats()["size"] == 4


@pytest.mark.parametrize("change", [{"inserted": -1}, {"sampled": "3"}, {"more": 1}, {"version": None}])
def test_what_is_no_state_is_refused(change):
    limiter = RateLimiter(batch_size=1, capacity=8)
    with pytest.raises(ValueError, match=r"state(\['\w+'\])?: got .*wanted .*RateLimiter\.state_dict"):
        limiter.load_state_dict({**limiter.state_dict(), **change})
    with pytest.raises(ValueError, match="state: got"):
        limiter.load_state_dict({})
    assert limiter.stats()["inserted"] == 0


def test_it_belongs_to_one_process(monkeypatch):
    limiter = RateLimiter(batch_size=1, capacity=8)
    with pytest.raises(TypeError, match=r"a copy for another process.*Give it to Ingest"):
        pickle.dumps(limiter)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(TypeError, match="a call in a forked process"):
        limiter.insert()


def test_what_a_limiter_does_not_count():
    """What it counts can be loaded again."""
    limiter = RateLimiter(batch_size=1, capacity=16)
    for call, words in (
        (lambda: limiter.insert(1.5), "n: got 1.5"), (lambda: limiter.insert(-1), "n: got -1"),
        (lambda: limiter.observe(-3), "size: got -3"), (lambda: limiter.advance(2.7), "version: got 2.7"),
        (lambda: limiter.waited("x", 1.0), "side: got"), (lambda: limiter.waited("insert", np.nan), "seconds: got nan"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=words):
            call()
    limiter.advance(np.asarray(3))
    assert limiter.version == 3
    limiter.load_state_dict(limiter.state_dict())
