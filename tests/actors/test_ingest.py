"""What the learner takes out of a ring is what is in the table, once, in order, whatever happens in between."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.actors import (
    Ingest,
    RateLimiter,
    RingBusyError,
    RingClosedError,
    RingForeignError,
    Writer,
    make_ring,
    open_ring,
)
from gear_jax.testing.ops import to_numpy

pytestmark = pytest.mark.usefixtures("bridge")


@pytest.fixture
def replay(table):
    return gear.make_replay(table, windows=gear.Window(), anchor="start")


@pytest.fixture
def ingest(replay, shm):
    with Ingest(replay, actors=2, slots=3, directory=shm) as made:
        yield made


def write(writer, step, code, length, **options):
    for t in range(length):
        writer.append(step(code + t), timeout=0)
    return writer.commit(**options)


def assert_stored(state, handles, trajectory, codes, lengths):
    got = jax.tree.map(lambda c: c.reshape(-1, *c.shape[2:])[handles.slot], to_numpy(state.columns))
    for i, (code, length) in enumerate(zip(codes, lengths, strict=True)):
        jax.tree.map(
            lambda g, w, i=i, n=length: np.testing.assert_array_equal(g[i, :n], w), got, trajectory(code, length)
        )


def test_a_drain_is_one_add(replay, ingest, step, trajectory):
    with Writer(ingest.ring) as a, Writer(ingest.ring) as b:
        write(b, step, 100, 4)
        write(a, step, 200, 1)
        write(b, step, 300, 3)
        write(a, step, 400, 2)
        assert ingest.pending == 4
        state, n = ingest.drain(replay.init())
        assert n == 4 and ingest.pending == 0
        last = ingest.last
        assert last.number.tolist() == [1, 2, 3, 4]
        assert last.actor.tolist() == [1, 0, 1, 0] and last.sequence.tolist() == [0, 0, 1, 1]
        assert last.length.tolist() == [4, 1, 3, 2]
        assert_stored(state, last.handles, trajectory, [100, 200, 300, 400], [4, 1, 3, 2])
        assert np.asarray(state.length)[0, :5].tolist() == [4, 1, 3, 2, 0]
        # The slots are free, and full of other bytes soon.
        for code in (500, 600, 700):
            write(a, step, code, 4)
        assert_stored(state, last.handles, trajectory, [100, 200, 300, 400], [4, 1, 3, 2])
        state, n = ingest.drain(state)
        assert n == 3 and replay.stats(state)["inserted"] == 7
        assert_stored(state, ingest.last.handles, trajectory, [500, 600, 700], [4] * 3)
        state, n = ingest.drain(state)
        assert n == 0 and ingest.last.number.tolist() == [5, 6, 7]
        assert ingest.stats()["drained"] == 7 and ingest.stats()["steps"] == 22


def test_a_drain_waits_for_more(replay, ingest, step):
    state = replay.init()
    with Writer(ingest.ring) as writer:
        assert ingest.drain(state, least=3, linger=60)[1] == 0  # there is none: that is for timeout
        write(writer, step, 1, 1)
        state, n = ingest.drain(state, least=3)
        assert n == 1  # without linger, what is there
        write(writer, step, 2, 1)
        state, n = ingest.drain(state, least=2, linger=0.01)
        assert n == 1  # what has come by then
        write(writer, step, 3, 1)
        state, n = ingest.drain(state, most=np.int64(1), least=np.int64(3), linger=60)
        assert n == 1  # more would not be taken
        write(writer, step, 4, 1)

        def later():
            time.sleep(0.05)
            write(writer, step, 5, 1)
            write(writer, step, 6, 1)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            written = pool.submit(later)
            state, n = ingest.drain(state, timeout=60, least=3, linger=60, admit=lambda found: found.number != 5)
            written.result()
        assert n == 3 and ingest.last.number.tolist() == [4, 5, 6]
        assert ingest.last.admitted.tolist() == [True, False, True]


def test_a_drain_waits_for_no_more_than_the_limiter_lets_in(replay, shm, step):
    limiter = RateLimiter(1.0, batch_size=1, capacity=replay.config.table.capacity)
    with Ingest(replay, actors=1, slots=6, directory=shm, limiter=limiter) as ingest, Writer(ingest.ring) as writer:
        for code in range(5):
            write(writer, step, code, 1)
        let_in = limiter.may_insert()
        assert 0 < let_in < 5
        assert ingest.drain(replay.init(), least=6, linger=60)[1] == let_in


def test_a_drain_that_waits_for_more_sees_that_the_ring_is_closed(replay, shm, step):
    with Ingest(replay, actors=2, slots=3, directory=shm) as ingest, Writer(ingest.ring) as writer:
        write(writer, step, 1, 1)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waits = pool.submit(ingest.drain, replay.init(), least=6, linger=60)
            time.sleep(0.05)
            ingest.close()
            with pytest.raises(RingClosedError):
                waits.result(timeout=30)


def test_a_drain_that_waits_for_more_looks_after_the_ring(replay, shm, step):
    """Slots of the dead are taken back meanwhile, and memory that goes away is an error."""
    with Ingest(replay, actors=2, slots=3, directory=shm) as ingest, Writer(ingest.ring) as writer:
        write(writer, step, 1, 1)
        tended, tend = [], ingest._tend

        def looks():
            tended.append(time.monotonic())
            if len(tended) > 2:
                os.truncate(ingest.ring.path, 4096)
            tend()

        ingest._tend = looks
        ingest._rate._ns = 0
        with pytest.raises(RingForeignError):
            ingest.drain(replay.init(), least=6, linger=60)
        assert tended[-1] - tended[0] < 30


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"least": 0}, ValueError, "least: got 0, wanted 1 to 6, the slots of the ring"),
        ({"least": 7}, ValueError, "least: got 7, wanted 1 to 6"),
        ({"least": "3"}, TypeError, "least: got '3', wanted an integer"),
        ({"least": 2.5}, TypeError, "least: got 2.5, wanted an integer"),
        ({"most": 0}, ValueError, "most: got 0, wanted an integer, 1 or more"),
        ({"most": 2.5}, ValueError, "most: got 2.5, wanted an integer, 1 or more"),
        ({"linger": -1}, ValueError, "linger: got -1.*linger=30"),
        ({"linger": "1"}, TypeError, "linger: got '1'"),
    ],
)
def test_what_a_drain_cannot_wait_for(replay, ingest, options, kind, words):
    with pytest.raises(kind, match=words):
        ingest.drain(replay.init(), **options)


def test_slots_are_free_only_when_the_columns_are_written(replay, ingest, step, monkeypatch):
    """Where programs run when they like, what reads the ring is waited for itself."""
    waited, left, wait, learner = [], [], jax.block_until_ready, ingest._learner

    class Watched:
        def __getattr__(self, name):
            return getattr(learner, name)

        def consume(self, batch):
            left.extend(map(id, waited))
            return learner.consume(batch)

    monkeypatch.setattr(jax, "block_until_ready", lambda x: (waited.extend(jax.tree.leaves(x)), wait(x))[1])
    ingest._learner = Watched()
    with Writer(ingest.ring) as writer:
        write(writer, step, 1, 2)
        state, n = ingest.drain(replay.init())
    assert n == 1 and {id(x) for x in jax.tree.leaves(state.columns)} <= set(left)


def test_it_compiles_for_few_numbers_of_rows(shm, table, step):
    replay = gear.make_replay(table)
    with Ingest(replay, actors=1, slots=16, directory=shm) as ingest, Writer(ingest.ring) as writer:
        state = replay.init()
        for n in range(1, 17):
            for k in range(n):
                write(writer, step, k, 1)
            state, got = ingest.drain(state)
            assert got == n
        assert replay._calls._compiled["add"]._cache_size() <= 3  # of 1, 4 and 16 rows
        assert replay.stats(state)["inserted"] == sum(range(17))


@pytest.mark.parametrize("copy", [False, True])
def test_tables_in_any_memory(shm, table, step, trajectory, memory, copy):
    replay = gear.make_replay(table, memory=memory, partitions=2)
    with Ingest(replay, actors=1, slots=4, copy=copy, directory=shm) as ingest, Writer(ingest.ring) as writer:
        state = replay.init()
        for turn in range(3):
            codes, lengths = range(50 * turn, 50 * turn + 40, 10), [4, 1, 3, 2]
            for code, length in zip(codes, lengths, strict=True):
                write(writer, step, code, length)
            state, n = ingest.drain(state)
            assert n == 4
            assert_stored(state, ingest.last.handles, trajectory, codes, lengths)


def test_most_and_priorities(shm, table, step):
    replay = gear.make_replay(table, selector=gear.selectors.Prioritized())
    with Ingest(replay, actors=1, slots=8, directory=shm) as ingest, Writer(ingest.ring) as writer:
        state = replay.init()
        for i, priority in enumerate([3.0, None, 0.25, float("nan"), None]):
            write(writer, step, i, 1, priority=priority, version=i)
        state, n = ingest.drain(state, most=2)
        assert n == 2 and ingest.pending == 3
        np.testing.assert_array_equal(np.asarray(state.priority)[0, :2], [3.0, 1.0])
        state, n = ingest.drain(state)
        assert n == 3 and ingest.last.version.tolist() == [2, 3, 4]
        np.testing.assert_array_equal(np.asarray(state.priority)[0, 2:5], [0.25, 0.0, 3.0])
        assert replay.stats(state)["rejected_priorities"] == 1
        with pytest.raises(ValueError, match="most: got 0"):
            ingest.drain(state, most=0)


def test_admit(replay, ingest, step, trajectory):
    with Writer(ingest.ring) as writer:
        for i in range(3):
            write(writer, step, 10 * i, 2, version=i)
        seen = []

        def admit(found):
            seen.append(ingest.ring.columns[0][found.slot, 0].tolist())
            return found.version != 1

        state, n = ingest.drain(replay.init(), admit=admit)
        assert n == 3 and seen == [[0, 10, 20]]
        assert ingest.last.admitted.tolist() == [True, False, True]
        assert ingest.last.handles.slot.tolist()[1] == -1
        assert replay.stats(state)["inserted"] == 2 and ingest.stats()["refused"] == 1
        write(writer, step, 0, 1)
        state, n = ingest.drain(state, admit=lambda found: np.zeros(1, bool))
        assert n == 1 and ingest.last.handles is None and replay.stats(state)["inserted"] == 2
        write(writer, step, 0, 1)
        with pytest.raises(ValueError, match=r"admit: got int64\[1\], wanted bool\[1\]"):
            ingest.drain(state, admit=lambda found: np.zeros(1, np.int64))
        assert ingest.pending == 1


def test_nothing_is_reclaimed_while_a_drain_takes_it(replay, ingest, step):
    # A thread that serves does so too: a slot may have been freed and committed anew between its two looks.
    threads = []

    def admit(found):
        threads.append(threading.Thread(target=ingest.reclaim))
        threads[0].start()
        threads[0].join(0.2)
        assert threads[0].is_alive()
        return found.admitted

    with Writer(ingest.ring) as writer:
        write(writer, step, 1, 2)
        assert ingest.drain(replay.init(), admit=admit)[1] == 1
    threads[0].join(30)
    assert not threads[0].is_alive()


def test_what_add_refuses_is_still_in_the_ring(replay, ingest, step, trajectory):
    with Writer(ingest.ring) as writer:
        write(writer, step, 1, 2)
        state = replay.init()
        following, _ = replay.add(state, jax.tree.map(lambda x: x[None], trajectory(0, 1)), [0])
        with pytest.raises(ValueError, match="an earlier call has consumed"):
            ingest.drain(state)
        with pytest.raises(TypeError, match="a traced state"):
            jax.jit(lambda s: ingest.drain(s)[0])(following)
        other = gear.make_replay(gear.TableSpec({"x": gear.ColumnSpec((), jnp.int32)}, 4, 4))
        with pytest.raises((ValueError, TypeError)):
            ingest.drain(other.init())
        assert ingest.pending == 1
        state, n = ingest.drain(following)
        assert n == 1 and replay.stats(state)["inserted"] == 1


def test_it_waits_for_the_first_and_no_longer_than_told(replay, ingest, step):
    state = replay.init()
    start = time.monotonic()
    state, n = ingest.drain(state, timeout=0.3)
    assert n == 0 and 0.29 < time.monotonic() - start < 20
    code = (
        "import sys, time, numpy as np; from gear_jax.actors import Writer\n"
        "with Writer(sys.argv[1]) as w:\n"
        "    time.sleep(0.2); w.begin(); w.commit(length=2, version=9); print('done')"
    )
    with subprocess.Popen([sys.executable, "-c", code, ingest.ring.path], stdout=subprocess.PIPE) as process:
        state, n = ingest.drain(state, timeout=30)
        assert n == 1 and ingest.last.version.tolist() == [9]
        assert process.wait(30) == 0
    assert ingest.stats()["actors"][0]["life"] == "free"


def test_partitions_fill_evenly(shm, table, step):
    replay = gear.make_replay(table, partitions=8)
    with Ingest(replay, actors=1, slots=8, directory=shm) as ingest, Writer(ingest.ring) as writer:
        state = replay.init()
        for i in range(40):
            for k in range(1 + i % 3):
                write(writer, step, i + k, 1)
            state, _ = ingest.drain(state)
        filled = np.asarray(state.length > 0).sum(axis=1)
        assert filled.tolist() == [4] * 8


@pytest.mark.devices(2)
def test_over_a_mesh_it_copies_when_told_to(shm, table, step, trajectory):
    mesh = jax.make_mesh((2,), ("replay",))
    replay = gear.make_replay(table, mesh=mesh)
    with pytest.raises(ValueError, match=r"Ingest: replay: got a table over a mesh.*copy=True"):
        Ingest(replay, actors=1, directory=shm)
    with pytest.raises(ValueError, match="add: rows"):
        replay.add(replay.init(), {}, [1], rows=jnp.zeros(1, jnp.int32))
    with Ingest(replay, actors=1, slots=3, copy=True, directory=shm) as ingest, Writer(ingest.ring) as writer:
        for code in (10, 20, 30):
            write(writer, step, code, 2)
        state, n = ingest.drain(replay.init())
        assert n == 3
        assert_stored(state, ingest.last.handles, trajectory, [10, 20, 30], [2] * 3)
        assert replay.stats(state)["inserted"] == 3


def test_a_second_learner_is_refused(replay, ingest):
    with pytest.raises(RingBusyError, match="another Ingest of this process"):
        Ingest(replay, ingest.ring)
    code = (
        "import sys; from gear_jax.actors import open_ring; from gear_jax.actors._errors import core, translated\n"
        "with translated(): core().Learner(open_ring(sys.argv[1]).held)"
    )
    run = subprocess.run([sys.executable, "-c", code, ingest.ring.path], capture_output=True, text=True, timeout=60)
    assert f"RingBusyError: learner: got the ring {ingest.ring.path} that process {os.getpid()} has" in run.stderr


def test_close(replay, shm, step):
    ingest = Ingest(replay, actors=1, directory=shm)
    path = ingest.ring.path
    ingest.close(keep=True)
    with pytest.raises(RingClosedError, match="got a closed one"):
        ingest.drain(replay.init())
    second = Ingest(replay, path)
    with Writer(path) as writer:
        second.close()
        second.close()
        with pytest.raises(RingClosedError):
            writer.append(step(0))
    with pytest.raises(RingClosedError, match="its learner has closed"):
        Ingest(replay, second.ring)


@pytest.mark.parametrize(
    "columns, steps",
    [
        ({"x": gear.ColumnSpec((2,), "float32")}, 4),
        ({"x": gear.ColumnSpec((3,), "int32")}, 4),
        ({"y": gear.ColumnSpec((3,), "float32")}, 4),
        ({"x": gear.ColumnSpec((3,), "float32"), "z": gear.ColumnSpec((), "int32")}, 4),
        ({"x": gear.ColumnSpec((3,), "float32")}, 5),
    ],
)
def test_a_ring_of_another_table(shm, columns, steps):
    replay = gear.make_replay(gear.TableSpec({"x": gear.ColumnSpec((3,), jnp.float32)}, 4, 8))
    ring = make_ring(gear.TableSpec(columns, steps, 8), 1, name="other", directory=shm)
    with pytest.raises(RingForeignError, match=r"ring 'other': (columns|T): got .*, wanted .*float32\[3\]|T: 4"):
        Ingest(replay, ring)
    with pytest.raises(RingForeignError):
        Ingest(replay, actors=1, name="other", directory=shm)
    ring.unlink()


def test_64_bit_columns_are_what_jax_makes_of_them(shm):
    replay = gear.make_replay(gear.TableSpec({"x": gear.ColumnSpec((), np.float64)}, 4, 8))
    with Ingest(replay, actors=1, directory=shm) as ingest:
        assert ingest.ring.columns[0].dtype == jnp.zeros((), jax.dtypes.canonicalize_dtype(np.float64)).dtype


def test_arguments(replay, shm, table):
    with pytest.raises(TypeError, match="replay: got TableSpec"):
        Ingest(table, actors=1)
    with pytest.raises(ValueError, match="actors: got None"):
        Ingest(replay)
    ring = make_ring(table, 2, 3, name="mine", directory=shm)
    with pytest.raises(RingForeignError, match=r"actors, slots, rows = \(2, 3, 0\), wanted \(2, 4, 0\)"):
        Ingest(replay, actors=2, name="mine", directory=shm)
    Ingest(replay, actors=2, slots=3, name="mine", directory=shm).close()
    assert not os.path.exists(ring.path)


_LEARNER = """
import sys, jax, numpy as np, gear_jax as gear
from gear_jax.actors import Ingest
table = gear.TableSpec({"x": gear.ColumnSpec((), "int32")}, 2, 64)
replay = gear.make_replay(table)
state = replay.init()
ingest = Ingest(replay, actors=2, slots=16, name="again", directory=sys.argv[1])
print("ready", flush=True)
while True:
    state, n = ingest.drain(state, timeout=1, most=3)
    if n:
        print(*ingest.last.number.tolist(), flush=True)
"""
_ACTOR = """
import sys, time
from gear_jax.actors import Writer
with Writer(sys.argv[1], timeout=60) as writer:
    for i in range(int(sys.argv[2])):
        writer.append({"x": i}); writer.commit(version=i); time.sleep(0.002)
"""


def test_a_learner_that_is_killed_loses_nothing_that_was_committed(shm):
    """Three learners, killed one after the other while an actor writes: their numbers follow on each other."""
    numbers = []
    actor = None
    try:
        for turn in range(3):
            words = [sys.executable, "-c", _LEARNER, shm]
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as learner:
                assert learner.stdout is not None and learner.stdout.readline() == "ready\n"
                consumed = open_ring("again", shm).report()["consumed"]
                # A drain may be complete, and the process killed before it says so: one of 3 at most.
                assert not numbers or numbers[-1] <= consumed <= numbers[-1] + 3
                numbers = numbers[: consumed or None] or numbers
                if actor is None:
                    words = [sys.executable, "-c", _ACTOR, open_ring("again", shm).path, "300"]
                    actor = subprocess.Popen(words)
                first = int(learner.stdout.readline().split()[0])
                assert first == consumed + 1
                numbers.append(first)
                while numbers[-1] < 100 * (turn + 1):
                    found = [int(n) for n in learner.stdout.readline().split()]
                    assert turn == 0 or found[0] > consumed
                    numbers.append(found[-1])
                learner.send_signal(signal.SIGKILL)
        assert actor.wait(60) == 0
    finally:
        if actor is not None:
            actor.kill()
            actor.wait(30)
        ring = open_ring("again", shm)
        report = ring.report()
        ring.unlink()
    assert report["learner"] == "dead" and report["committed"] == 300 and report["actors"][0]["committed"] == 300
