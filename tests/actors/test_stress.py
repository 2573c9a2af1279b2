"""The stress test in short; `python -m gear_jax.testing.actors` is the long form."""

import os
import subprocess
import sys
import time

import actor_targets as targets
import pytest

import gear_jax as gear
from gear_jax.actors import ActorPool, make_ring
from gear_jax.testing import actors

pytestmark = pytest.mark.usefixtures("bridge")


def test_actors_killed_and_stopped_at_random():
    report = actors.stress(4000, actors=3, slots=4, seed=1, every=0.25)
    assert report.trajectories >= 4000 and report.compared > 0 and report.killed + report.stopped > 0
    assert report.steps > 4 * report.trajectories


def test_it_finds_what_is_wrong():
    """Each check of the stress test fails for what it is there for."""
    report = actors.Report(killed=1)
    learner = object.__new__(actors._Learner)
    learner.report = report
    import numpy as np

    said = np.array([[2, 2, 1, 0]], np.uint8)
    for arrived, text in (([1, 0, 0, 0], "was lost"), ([1, 2, 0, 0], "came twice"), ([1, 1, 1, 1], "was never tried")):
        learner.arrived = np.array([arrived], np.uint8)
        with pytest.raises(actors.Wrong, match=text):
            learner.finish(said)
    learner.arrived = np.array([[1, 1, 0, 0]], np.uint8)
    learner.finish(said)
    assert report.lost == 1
    report.killed = 0
    with pytest.raises(actors.Wrong, match="by 0 kills"):
        learner.finish(said)


def test_a_fast_producer_without_a_consumer_takes_no_more_memory(shm):
    columns = {"x": gear.ColumnSpec((), "int32"), "actor": gear.ColumnSpec((), "int32")}
    ring = make_ring(gear.TableSpec(columns, 2, 8), 1, 4, directory=shm)
    code = (
        "import sys, resource; from gear_jax.actors import Writer, RingTimeoutError\n"
        "with Writer(sys.argv[1], timeout=0.001) as w:\n"
        "    for i in range(2500):\n"
        "        try: w.append({'x': i, 'actor': 0}); w.commit()\n"
        "        except RingTimeoutError: pass\n"
        "        if i == 500: before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    room = os.statvfs(shm).f_bavail
    run = subprocess.run([sys.executable, "-c", code, ring.path], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 2000  # KiB
    assert ring.report()["committed"] == 4
    assert os.path.getsize(ring.path) == ring.nbytes and room - os.statvfs(shm).f_bavail < 2**14
    ring.unlink()


def test_no_wait_outlasts_its_deadline_when_the_other_side_is_gone(shm):
    columns = {"x": gear.ColumnSpec((), "int32"), "actor": gear.ColumnSpec((), "int32")}
    replay = gear.make_replay(gear.TableSpec(columns, 2, 8))
    with gear.actors.Ingest(replay, actors=1, slots=2, directory=shm) as ingest:
        with ActorPool(targets.count, ingest.ring, args=(2,)) as pool:
            assert pool.wait(60)
        state = replay.init()
        state, n = ingest.drain(state, timeout=10)
        start = time.monotonic()
        state, more = ingest.drain(state, timeout=0.2)
        while n + more < 2:
            n, (state, more) = n + more, ingest.drain(state, timeout=0.2)
        assert ingest.drain(state, timeout=0.2)[1] == 0
        assert time.monotonic() - start < 20
