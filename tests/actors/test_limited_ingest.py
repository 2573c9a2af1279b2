"""A rate limiter between a ring's actors and its learner."""

import threading
import time

import jax
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.actors import ActorPool, Ingest, RateLimiter, RingClosedError, Writer, make_ring
from gear_jax.selectors import Prioritized, Queue, Uniform

pytestmark = pytest.mark.usefixtures("bridge")
SECONDS = 60.0


@pytest.fixture
def ingest(shm, table):
    """ingest(limiter, selector=None, max_staleness=None, **arguments) -> replay, an open Ingest of 2 actors."""
    opened = []

    def run(limiter, selector=None, max_staleness=None, **arguments):
        replay = gear.make_replay(table, selector, max_staleness=max_staleness)
        opened.append(Ingest(replay, actors=2, slots=4, directory=shm, limiter=limiter, **arguments))
        return replay, opened[-1]

    yield run
    for x in opened:
        x.close()


def write(writer, trajectory, code, version=0):
    views, rows = writer.begin(), trajectory(code, 3)

    def put(view, row):
        view[:3] = row[:3]

    jax.tree.map(put, views, rows)
    writer.commit(3, version=version)


def test_what_is_too_much_stays_in_the_ring(ingest, trajectory):
    replay, ring = ingest(RateLimiter(2.0, batch_size=4, capacity=32, min_size=2))
    state = replay.init()
    with Writer(ring.ring) as writer:
        for code in range(4):
            write(writer, trajectory, code)
        state, n = ring.drain(state)
        assert n == 4  # 2, and those that the buffer of 6 samples lets in
        for code in range(4, 8):
            write(writer, trajectory, code)
        state, n = ring.drain(state)
        assert (n, ring.pending) == (1, 3)
        before = time.monotonic()
        state, n = ring.drain(state, timeout=SECONDS)  # nothing can come in, so there is nothing to wait for
        assert n == 0 and time.monotonic() - before < SECONDS / 2
        numbers = ring.stats()
        assert numbers["held_back"] == 1 and numbers["limiter"]["may_insert"] == 0
        assert numbers["limiter"]["difference"] == 6.0 == numbers["limiter"]["highest"]
        state, ready = ring.await_sample(state, timeout=SECONDS)
        assert ready
        state, _ = replay.sample(state, jax.random.key(0), 4)
        state, n = ring.drain(state)
        assert (n, ring.pending) == (2, 1)
    assert replay.stats(state)["inserted"] == 7 == ring.stats()["limiter"]["inserted"]


def test_what_a_restored_table_holds_counts(ingest, trajectory):
    replay, ring = ingest(RateLimiter(batch_size=4, capacity=32, min_size=3))
    state, ready = ring.await_sample(replay.init(), timeout=0.0)
    assert not ready
    replay, ring = ingest(RateLimiter(batch_size=4, capacity=32, min_size=3))
    rows = jax.tree.map(lambda x: np.stack([x] * 3), trajectory(0, 3))
    state, _ = replay.add(state, rows, np.full(3, 3, np.int32))
    state, ready = ring.await_sample(state, timeout=0.0)
    assert ready and ring.stats()["limiter"]["size"] == 3


def test_the_learner_waits_until_its_deadline(ingest, trajectory):
    replay, ring = ingest(RateLimiter(1.0, batch_size=2, capacity=32, min_size=3))
    state = replay.init()
    start = time.monotonic()
    state, ready = ring.await_sample(state, timeout=0.2)
    assert not ready and 0.2 <= time.monotonic() - start < SECONDS
    assert ring.stats()["limiter"]["sample_waits"] == 1
    with Writer(ring.ring) as writer:

        def actor():
            for code in range(3):
                time.sleep(0.05)
                write(writer, trajectory, code)

        thread = threading.Thread(target=actor)
        thread.start()
        state, ready = ring.await_sample(state, timeout=SECONDS)
        thread.join(SECONDS)
    assert ready and replay.stats(state)["trajectories"] == 3


def test_a_queue_makes_its_actors_wait_for_room(ingest, trajectory):
    replay, ring = ingest(RateLimiter(batch_size=8, capacity=32, times=2), Queue(2))
    state, codes, drawn = replay.init(), iter(range(1000)), []
    with Writer(ring.ring) as writer:
        for _ in range(9):  # 36 trajectories are offered to a table of 32
            for _ in range(4):
                if ring.pending < 4:
                    write(writer, trajectory, next(codes))
            state, _ = ring.drain(state)
        assert (replay.stats(state)["trajectories"], ring.pending) == (32, 4)
        for i in range(40):
            state, ready = ring.await_sample(state, timeout=0.0)
            assert ready
            state, sample = replay.sample(state, jax.random.key(i), 8)
            assert np.asarray(sample.valid).all()
            drawn += np.asarray(sample.data["action"])[:, 0].tolist()
            for _ in range(4):
                if ring.pending < 4:
                    write(writer, trajectory, next(codes))
    numbers = replay.stats(state)
    assert numbers["evicted"] == 0 and numbers["used_up"] == 40 * 8 / 2
    first = [d for i, d in enumerate(drawn) if i // 8 % 2 == 0]
    assert first == sorted(first) and len(set(first)) == len(first)
    assert first == [d for i, d in enumerate(drawn) if i // 8 % 2]
    assert ring.stats()["limiter"]["size"] <= 32


def test_the_size_that_counters_tell(ingest, trajectory):
    """`Ingest` tells the limiter by the counters alone what the table holds."""
    replay, ring = ingest(
        RateLimiter(1.5, batch_size=3, capacity=32, min_size=4, times=2, max_staleness=1), Uniform(times=2), 1
    )
    state, version = replay.init(), 0
    with Writer(ring.ring) as writer:
        for i in range(60):
            while ring.pending < 3:
                write(writer, trajectory, i, version=version - i % 3)
            state, _ = ring.drain(state)
            assert ring.stats()["limiter"]["size"] >= replay.stats(state)["trajectories"]
            state, ready = ring.await_sample(state, timeout=0.0)
            if ready:
                assert ring.stats()["limiter"]["size"] == replay.stats(state)["trajectories"]
                state, sample = replay.sample(state, jax.random.key(i), 3)
                assert np.asarray(sample.valid).all()
            if i % 5 == 4:
                version += 1
                state = ring.expire(state, version)
    numbers, limits = replay.stats(state), ring.stats()["limiter"]
    assert numbers["expired"] and numbers["used_up"] and limits["refused_stale"] and limits["sampled"] > 60
    assert numbers["refused_stale"] == 0 and numbers["version"] == limits["version"] == version
    assert limits["inserted"] == numbers["inserted"]


def test_versions_reach_a_table_that_wants_them(ingest, trajectory):
    replay, ring = ingest(None, max_staleness=3)
    state = replay.expire(replay.init(), 10)
    with Writer(ring.ring) as writer:
        for version in (5, 7, 12, 2**40):
            write(writer, trajectory, 0, version=version)
        state, n = ring.drain(state)
    assert n == 4 and replay.stats(state)["refused_stale"] == 1 == ring.stats()["refused"]
    assert ring.last.admitted.tolist() == [False, True, True, True]
    assert ring.expire(state, 14).limits.current.tolist() == [14]


def test_a_version_that_is_left_out_is_refused_where_it_counts(ingest, trajectory, shm, table):
    replay, ring = ingest(None, max_staleness=3)
    with Writer(ring.ring) as writer:
        writer.begin()
        with pytest.raises(ValueError, match=r"commit: version: got None, wanted .*max_staleness.*commit\(version="):
            writer.commit(3)
        writer.commit(3, version=0)  # the slot is still open
        write(writer, trajectory, 1, version=2)
        _, n = ring.drain(replay.init())
    assert n == 2 and ring.last.has_version.all() and ring.last.version.tolist() == [0, 2]
    _, plain = ingest(None)
    with Writer(plain.ring) as writer:
        write(writer, trajectory, 1, version=None)
        write(writer, trajectory, 1, version=-4)
    plain.drain(plain._replay.init())
    assert plain.last.has_version.tolist() == [False, True] and plain.last.version.tolist() == [0, -4]
    with Writer(make_ring(table, 1, versions=True, directory=shm)) as writer:
        writer.begin()
        with pytest.raises(ValueError, match="commit: version"):
            writer.commit(3)


def test_trajectories_without_a_version_from_before_the_learner(shm, table, trajectory):
    replay = gear.make_replay(table, max_staleness=3)
    made = make_ring(table, 2, directory=shm)
    with Writer(made) as writer:
        for version in (None, 0, None):
            write(writer, trajectory, 1, version=version)
        with Ingest(replay, made) as ring:
            state = replay.init()
            with pytest.raises(ValueError, match=r"drain: version: got 2 trajectories without one, of actor\(s\) 0"):
                ring.drain(state)
            assert ring.pending == 3
            state, n = ring.drain(state, admit=lambda found: found.has_version)
            assert n == 3 and ring.last.admitted.tolist() == [False, True, False]
            assert replay.stats(state)["trajectories"] == 1


def asks(writer, most):
    """An actor that does what the learner says."""
    for code in range(most):
        observation = {"image": np.full((3, 5), code, np.uint8), "position": np.zeros(3, np.float32)}
        answer = writer.act(observation)
        for _ in range(2):
            writer.append({"observation": observation, "action": int(answer[0]), "done": False})
        writer.commit()


def test_actors_that_ask_are_answered_while_the_learner_waits(shm, table):
    import jax.numpy as jnp

    ask = {"image": gear.ColumnSpec((3, 5), "uint8"), "position": gear.ColumnSpec((3,), "float32")}
    replay = gear.make_replay(table)
    limiter = RateLimiter(1.0, batch_size=2, capacity=32, min_size=6)

    @jax.jit
    def policy(observation):
        return jnp.stack([observation["image"][:, 0, 0].astype(jnp.float32) * 2] * 2, 1)

    with Ingest(
        replay, actors=2, ask=ask, answer=gear.ColumnSpec((2,), "float32"), directory=shm, limiter=limiter
    ) as ring:
        state = replay.init()
        with ActorPool(asks, ring.ring, args=(10_000,)) as pool:
            for i in range(30):
                state, ready = ring.await_sample(state, timeout=SECONDS, policy=policy)
                pool.check()
                assert ready
                state, sample = replay.sample(state, jax.random.key(i), 2)
                image, action = np.asarray(sample.data["observation"]["image"]), np.asarray(sample.data["action"])
                np.testing.assert_array_equal(action[:, :2], 2 * image[:, :2, 0, 0].astype(np.int32))
        numbers = ring.stats()
    assert numbers["limiter"]["sampled"] == 60 and numbers["questions"] >= 30
    assert numbers["limiter"]["lowest"] <= numbers["limiter"]["difference"] <= numbers["limiter"]["highest"]


def test_limiters_of_another_table(ingest, table):
    with pytest.raises(ValueError, match=r"limiter: capacity: got 64, wanted the table's, 32.*capacity=32"):
        ingest(RateLimiter(batch_size=1, capacity=64))
    with pytest.raises(ValueError, match=r"limiter: times: got None, wanted the table's, 2.*times=2"):
        ingest(RateLimiter(batch_size=1, capacity=32), Queue(2))
    with pytest.raises(ValueError, match=r"limiter: max_staleness: got 3, wanted the table's, 1"):
        ingest(RateLimiter(batch_size=1, capacity=32, max_staleness=3), max_staleness=1)
    for selector, anchor, text in (
        (Queue(2), "full", r"anchor='full' never draws trajectories of fewer than 2 steps"),
        (Prioritized(times=2), "uniform", r"Prioritized\(.*\) never draws a priority of 0"),
    ):
        replay = gear.make_replay(table, selector, gear.Window(0, 2), anchor=anchor)
        with pytest.raises(ValueError, match=rf"limiter: when_full: got 'wait', wanted 'evict': {text}.*'evict'\)"):
            Ingest(replay, actors=1, limiter=RateLimiter(batch_size=1, capacity=32, times=2))
        Ingest(replay, actors=1, limiter=RateLimiter(batch_size=1, capacity=32, times=2, when_full="evict")).close()
    replay, ring = ingest(None)
    with pytest.raises(ValueError, match="await_sample: got an Ingest without a limiter"):
        ring.await_sample(replay.init())
    ring.close()
    with pytest.raises(RingClosedError):
        ring.drain(replay.init())
