"""Actors in processes: they start, are started again, and none is left."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import actor_targets as targets
import pytest

import gear_jax as gear
from gear_jax.actors import ActorFailedError, ActorPool, make_ring
from gear_jax.actors._errors import core

HERE = str(pathlib.Path(__file__).parent)


@pytest.fixture
def ring(shm):
    columns = {"x": gear.ColumnSpec((), "int32"), "actor": gear.ColumnSpec((), "int32")}
    made = make_ring(gear.TableSpec(columns, 2, 8), 3, 4, directory=shm)
    yield made
    made.unlink()


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(pid):
    return not pathlib.Path(f"/proc/{pid}").exists() or core().owner_of(pid) == 0


def lives(ring):
    return [a["life"] for a in ring.report()["actors"]]


def test_functions(ring):
    with ActorPool(targets.count, ring, args=(4,)) as pool:
        assert pool.wait(60) and pool.alive == 0 and pool.restarts == 0
        pool.check()
    assert [a["committed"] for a in ring.report()["actors"]] == [4, 4, 4]
    assert ring.names == ["actor", "x"]
    assert ring.columns[0][:, 0].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert ring.columns[1][:, 0].tolist() == [0, 1, 2, 3] * 3


def test_commands(ring):
    code = "from gear_jax.actors import Writer\nwith Writer() as w: w.append({'x': 5, 'actor': w.actor}); w.commit()"
    with ActorPool([sys.executable, "-c", code], ring, actors=2) as pool:
        assert pool.wait(60)
    assert [a["committed"] for a in ring.report()["actors"]] == [1, 1, 0]


def test_one_that_fails_is_started_again_as_often_as_asked(ring, tmp_path):
    with ActorPool(targets.fail, ring, actors=1, args=(str(tmp_path / "a"),), restart=1) as pool:
        with pytest.raises(ActorFailedError, match=r"actor 0: got exit status 1(.|\n)*ValueError: no such luck"):
            pool.wait(60)
        assert pool.restarts == 1
    with ActorPool(targets.fail, ring, actors=1, args=(str(tmp_path / "b"),), restart=True) as pool:
        assert pool.wait(60) and pool.restarts == 2
    assert ring.report()["committed"] == 1


def test_one_that_is_killed_gives_its_lane_to_the_next(ring):
    learner = core().Learner(ring.held)
    with ActorPool(targets.sleep, ring, actors=1, restart=True) as pool:
        until(lambda: ring.report()["actors"][0]["open"] == 1)
        first = pool.pids[0]
        os.kill(first, signal.SIGKILL)
        until(lambda: pool.restarts == 1 and lives(ring)[0] == "running" and pool.pids[0] != first)
        until(lambda: ring.report()["actors"][0]["open"] == 2)
        assert learner.reclaim() == 1
        assert ring.report()["actors"][0] | {"waited": 0} == {
            "pid": pool.pids[0], "life": "running", "committed": 0, "abandoned": 1, "waited": 0, "incarnation": 2,
            "open": 1, "pending": 0,
        }  # fmt: skip
    until(lambda: gone(first))
    learner.leave()


def test_one_that_is_stopped_keeps_its_lane(ring):
    learner = core().Learner(ring.held)
    with ActorPool(targets.sleep, ring, actors=1) as pool:
        until(lambda: ring.report()["actors"][0]["open"] == 1)
        os.kill(pool.pids[0], signal.SIGSTOP)
        until(lambda: lives(ring)[0] == "stopped")
        assert learner.reclaim() == 0 and ring.report()["actors"][0]["open"] == 1
        assert pool.alive == 1
        os.kill(pool.pids[0], signal.SIGCONT)
        until(lambda: lives(ring)[0] == "running")
        os.kill(pool.pids[0], signal.SIGSTOP)
        pids = pool.pids
        start = time.monotonic()
    assert time.monotonic() - start < 30
    assert gone(pids[0])  # close ends stopped ones too
    learner.leave()


def test_a_closed_ring_ends_its_actors(ring):
    with ActorPool(targets.count, ring, args=(1000,)) as pool:
        until(lambda: sum(a["pending"] for a in ring.report()["actors"]) == 12)
        ring.held.close()
        assert pool.wait(30)


def test_close_ends_them(ring):
    pool = ActorPool(targets.sleep, ring, nice=3)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pool.pids} == {min(19, mine + 3)}
    pids = pool.pids
    until(lambda: lives(ring) == ["running"] * 3)
    pool.close()
    pool.close()
    assert all(map(gone, pids)) and pool.alive == 0 and lives(ring) == ["free"] * 3


_POOL = """
import sys
sys.path.insert(0, sys.argv[2])
import actor_targets as targets, time
from gear_jax.actors import ActorPool, open_ring
pool = ActorPool(targets.sleep, sys.argv[1])
print(*pool.pids, flush=True)
time.sleep(60)
"""


def test_they_end_with_a_pool_that_is_killed(ring):
    words = [sys.executable, "-c", _POOL, ring.path, HERE]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        until(lambda: lives(ring) == ["running"] * 3)
        process.send_signal(signal.SIGKILL)
    until(lambda: all(map(gone, pids)))


_LEAVE = """
import sys
from gear_jax.actors import ActorPool, open_ring
pool = ActorPool([sys.executable, "-c", "import time; time.sleep(60)"], sys.argv[1])
print(*pool.pids, flush=True)
"""


def test_commands_end_with_a_program_that_comes_to_its_end(ring):
    run = subprocess.run([sys.executable, "-c", _LEAVE, ring.path], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and not run.stderr
    until(lambda: all(gone(int(pid)) for pid in run.stdout.split()))


_SCRIPT = """
import sys
from gear_jax.actors import ActorPool
print("read", __name__, flush=True)
def play(writer, n):
    assert writer.actor == 0
    for i in range(n):
        writer.append({"x": i, "actor": 7}); writer.commit()
if __name__ == "__main__":
    with ActorPool(play, sys.argv[1], actors=1, args=(3,)) as pool:
        assert pool.wait(60)
"""


def test_a_function_of_the_script_itself(ring, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    run = subprocess.run([sys.executable, str(script), ring.path], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["read", "__main__", "read", "__mp_main__"]
    assert ring.report()["committed"] == 3


@pytest.mark.parametrize(
    "target, options, error, text",
    [
        (lambda w: None, {}, TypeError, "target, args: got .*wanted what can be pickled"),
        (targets.count, {"args": (lambda: 1,)}, TypeError, "target, args"),
        (targets.count, {"actors": 4}, ValueError, "actors: got 4, wanted 1 to the ring's 3"),
        (targets.count, {"timeout": -1}, ValueError, "timeout: got -1"),
        (targets.count, {"nice": 20}, ValueError, "nice: got 20"),
        (["true"], {"args": (1,)}, ValueError, r"args: got \(1,\) for a command"),
    ],
)
def test_arguments(ring, target, options, error, text):
    with pytest.raises(error, match=text):
        ActorPool(target, ring, **options)


def test_a_command_that_is_not_there(ring):
    with pytest.raises(FileNotFoundError):
        ActorPool(["/no/such/command"], ring)
