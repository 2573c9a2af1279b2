"""Counters by their paths, and what writers make of them."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax import metrics
from gear_jax.metrics import FileWriter, Metrics, PrometheusWriter, TensorBoardWriter, flatten
from gear_jax.testing.processes import free_ports


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A directory for temporary files of the test's own, empty at the end."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert list(directory.iterdir()) == []


def test_numbers_of_a_tree_by_their_paths():
    tree = {
        "a": 1, "b": {"c": 2.5, "d": [True, {"e": np.float32(0.5)}, ()]}, "word": "x", "none": None, 7: jnp.int32(3),
        "array": np.zeros(3), "nan": float("nan"), "time": np.datetime64("2020-01-01"), "big": 2**70,
    }  # fmt: skip
    found = flatten(tree)
    assert np.isnan(found.pop("nan"))
    assert found == {"a": 1, "b/c": 2.5, "b/d/0": 1, "b/d/1/e": 0.5, "7": 3, "big": 2**70}
    assert all(type(x) in (int, float) for x in found.values())
    assert flatten({}) == {} and flatten(3, "x") == {"x": 3}


def test_the_counters_there_are():
    """Of a table, an ingest and ops: all that only rises is known to do so."""
    table = gear.TableSpec({"a": gear.ColumnSpec((), jnp.int32)}, 2, 4)
    replay = gear.make_replay(table, gear.selectors.Queue(2), max_staleness=1, streams=1)
    state = replay.init()
    limiter = gear.actors.RateLimiter(2, batch_size=2, capacity=4, times=2, max_staleness=1)
    with gear.actors.Ingest(replay, actors=1, limiter=limiter) as ingest:
        numbers = flatten({"replay": replay.stats(state), "ingest": ingest.stats(), "ops": gear.ops.stats()})
    assert {"replay/trajectories", "ingest/limiter/difference", "ingest/actors/0/pending", "ops/copy"} <= set(numbers)
    gauges = {name.rpartition("/")[2] for name in numbers if not metrics.rising(name)}
    assert gauges == {
        "trajectories", "steps", "open_streams", "version", "capacity", "max_priority", "pid", "incarnation", "open",
        "pending", "size", "min_size", "difference", "lowest", "highest", "may_insert", "may_sample", "inserts_waiting",
        "samples_waiting",
    }  # fmt: skip
    assert metrics.rising("ingest/steps") and not metrics.rising("replay/steps")


@pytest.mark.skipif(gear.transport.missing("ucx") != "", reason="no UCX here")
def test_the_counters_of_what_is_between_processes():
    """Of a session, a replay's part of a table, a relay and what it relays to: the same."""
    table = gear.TableSpec({"a": gear.ColumnSpec((), jnp.int32)}, 2, 8)
    replay = gear.make_replay(table, exchange="rdma")
    addresses, secret = [("127.0.0.1", port) for port in free_ports(2)], secrets.token_bytes(32)
    jobs = [gear.transport.Job(rank, addresses, secret) for rank in range(2)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        started = pool.submit(gear.actors.Relay, gear.actors.make_ring(table, 1), jobs[1])
        with (
            contextlib.closing(replay),
            gear.actors.RemoteActors(gear.actors.make_ring(table, 1), jobs[0], lanes=1) as remote,
            started.result() as relay,
        ):
            state = replay.init()
            told = {"replay": {**replay.stats(state), **replay.counters()}}
            numbers = flatten({**told, "relay": relay.stats(), "remote": remote.stats()})
    assert {"replay/lost_rows", "replay/missed_updates", "relay/reads", "remote/losses", "remote/moved"} <= set(numbers)
    gauges = {name.rpartition("/")[2] for name in numbers if not metrics.rising(name)}
    assert gauges == {
        "trajectories", "steps", "capacity", "max_priority", "pid", "incarnation", "open", "pending", "relays",
    }  # fmt: skip


class Kept:
    def __init__(self):
        self.seen, self.closed = [], 0

    def write(self, step, numbers):
        self.seen.append((step, dict(numbers)))

    def close(self):
        self.closed += 1


def test_all_writers_are_told_and_closed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    one, two = Kept(), Kept()
    with Metrics([one, two], every=2.0) as told:
        seen = []
        for _ in range(7):
            seen.append(told.due())
            now[0] += 0.9
        assert told.write(4, replay={"steps": 3}, loss=jnp.float32(0.5)) == {"replay/steps": 3, "loss": 0.5}
    assert seen == [True, False, False, True, False, False, True]
    assert one.seen == two.seen == [(4, {"replay/steps": 3, "loss": 0.5})]
    assert (one.closed, two.closed) == (1, 1)
    with pytest.raises(TypeError, match=r"writers: got 'x', wanted objects with write and close"):
        Metrics(["x"])
    with pytest.raises(ValueError, match="every: got -1"):
        Metrics([], every=-1)


def test_one_that_fails_keeps_no_other_from_being_closed():
    class Fails(Kept):
        def close(self):
            raise OSError("no")

    one, two = Kept(), Kept()
    with pytest.raises(OSError, match="no"):
        Metrics([one, Fails(), two]).close()
    assert (one.closed, two.closed) == (1, 1)


def test_curves_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    writer = TensorBoardWriter(tmp_path / "logs")
    writer.write(3, {"replay/steps": 10, "loss": 0.5})
    writer.write(4, {"replay/steps": 2**40})
    writer.close()
    (file,) = (tmp_path / "logs").iterdir()
    data, seen = file.read_bytes(), []
    while data:  # records: length, its checksum, event, its checksum
        n = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + n])
        seen += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
        data = data[16 + n :]
    assert seen == [(3, "replay/steps", 10), (3, "loss", 0.5), (4, "replay/steps", 2**40)]


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
        lines = page.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#")), lines


def test_a_page_for_prometheus():
    pytest.importorskip("prometheus_client")
    writer = PrometheusWriter(0)
    try:
        assert scrape(writer.port)[0] == {}
        numbers = {"replay/inserted": 5, "actors/0/pending": 1, "actors/11/pending": 2, "loss-a": 0.5, "loss.a/0": 1.0}
        writer.write(7, numbers)
        values, lines = scrape(writer.port)
        assert values == {
            "gear_jax_step": "7.0",
            "gear_jax_replay_inserted_total": "5.0",
            'gear_jax_actors_pending{index="0"}': "1.0",
            'gear_jax_actors_pending{index="11"}': "2.0",
            "gear_jax_loss_a": "0.5",
            'gear_jax_loss_a_0{index="0"}': "1.0",
        }
        assert "# TYPE gear_jax_replay_inserted_total counter" in lines
        assert "# TYPE gear_jax_actors_pending gauge" in lines
        with pytest.raises(ValueError, match=rf"port: got 127\.0\.0\.1:{writer.port}, Address already in use.*port=0"):
            PrometheusWriter(writer.port)
    finally:
        writer.close()
    with pytest.raises(OSError, match="refused"):
        scrape(writer.port)


@pytest.mark.parametrize(
    ("module", "make"), [("tensorboardX", lambda: TensorBoardWriter("x")), ("prometheus_client", PrometheusWriter)]
)
def test_what_is_not_installed(monkeypatch, module, make):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {module}: pip install 'gear_jax\[metrics\]'"):
        make()


def test_a_file_for_top(monkeypatch, temporary):
    now = [50.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    writer = FileWriter(name="learner")
    writer.write(10, {"replay/inserted": 100, "replay/trajectories": 5})
    assert [p.name for p in temporary.iterdir()] == [writer.path.name]
    now[0] += 4.0
    writer.write(30, {"replay/inserted": 300, "replay/trajectories": 7, "replay/sampled": 9})
    (said,) = metrics.published()
    assert (said["pid"], said["name"], said["alive"]) == (os.getpid(), "learner", True)
    assert said["numbers"] == {"step": 30, "replay/inserted": 300, "replay/trajectories": 7, "replay/sampled": 9}
    assert said["rates"] == {"step": 5.0, "replay/inserted": 50.0}
    assert metrics.published([writer.path])[0]["numbers"] == said["numbers"]
    assert os.stat(writer.path).st_mode & 0o077 == 0
    writer.close()
    writer.close()
    assert metrics.published() == []
    with pytest.raises(ValueError, match=r"file: got .*No such file.*wanted a file of counters"):
        metrics.published([writer.path])


def test_what_a_killed_process_left_is_no_learner_and_goes(temporary):
    root = str(pathlib.Path(gear.__file__).parent.parent)
    code = (
        f"import tempfile, os; tempfile.tempdir = {str(temporary)!r}\n"
        "from gear_jax.metrics import FileWriter; w = FileWriter(); w.write(1, {'a': 1}); print(w.path); os._exit(9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=60
    )
    path = pathlib.Path(done.stdout.strip())
    assert path.exists() and metrics.published() == []
    assert metrics.published([path])[0]["alive"] is False
    (temporary / f"{metrics._FILES}{os.getuid()}.x").write_text(json.dumps([]))
    assert metrics.published() == []
    FileWriter().close()
    assert not path.exists()


@jax.jit
def _twice(x):
    return 2 * x


def test_a_number_on_a_device_is_waited_for():
    assert flatten({"x": _twice(jnp.float32(1.5))}) == {"x": 3.0}


@pytest.mark.parametrize("step", ["a", None, [1]])
def test_a_step_is_a_number(tmp_path, step):
    writer = FileWriter(tmp_path / "file")
    for write in (lambda: writer.write(step, {"x": 1}), lambda: Metrics([writer]).write(step, x=1)):
        with pytest.raises(TypeError, match=r"step: got .*, wanted a number"):
            write()
    writer.write(np.int64(3), {"x": 1, "y": "no number"})
    assert metrics.published([writer.path])[0]["numbers"] == {"step": 3, "x": 1}
    writer.close()


def test_another_file_stays(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text('{"pid": 3}')
    with pytest.raises(ValueError, match=r"file: got .*mine.*, wanted a file of counters"):
        FileWriter(mine)
    assert mine.read_text() == '{"pid": 3}'
    mine.unlink()
    FileWriter(mine).write(1, {})
    again = FileWriter(mine)  # of an earlier life, say
    again.write(2, {})
    assert metrics.published([mine])[0]["numbers"] == {"step": 2}
    again.close()
