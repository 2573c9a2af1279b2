"""Actors of other machines: here other processes, each with a ring of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import numpy as np
import pytest

from gear_jax import transport
from gear_jax.actors import (
    RemoteActors,
    RingForeignError,
    RingTimeoutError,
    Writer,
    _manifest,
    _remote,
    make_ring,
    open_ring,
)
from gear_jax.actors._errors import core
from gear_jax.actors._relay import SESSION, Relay
from gear_jax.specs import ColumnSpec, TableSpec
from gear_jax.testing.processes import free_ports

pytestmark = pytest.mark.cpu
SECRET = bytes(range(32))
STEPS = 4

_START = """
import sys, time
import numpy as np
from gear_jax.actors import Relay, Writer, make_ring, open_ring
from gear_jax.specs import ColumnSpec, TableSpec
from gear_jax.transport import Job
directory, rank, addresses = sys.argv[1], int(sys.argv[2]), [tuple(x.split(":")) for x in sys.argv[3].split(",")]
more = {"done": ColumnSpec((), "bool"), "x": ColumnSpec((3,), "float16")}
table = TableSpec({"image": ColumnSpec((3, 5), "uint8"), "more": more}, trajectory_length=4, capacity=32)
job = Job(rank, addresses, bytes(range(32)))

def write(writer, first, last):
    for i in range(first, last):
        v = writer.begin()
        n = i % 4 + 1
        v["image"][:n], v["more"]["done"][:n], v["more"]["x"][:n] = (i + rank) % 251, i % 2, i % 1000 + rank / 4
        writer.commit(n, priority=i + 0.5 if i % 3 else None, version=i * 8 + rank)
"""


@pytest.fixture
def table():
    columns = {
        "image": ColumnSpec((3, 5), "uint8"),
        "more": {"done": ColumnSpec((), "bool"), "x": ColumnSpec((3,), "float16")},
    }
    return TableSpec(columns, trajectory_length=STEPS, capacity=32)


@pytest.fixture
def addresses():
    return [("127.0.0.1", port) for port in free_ports(3)]


@pytest.fixture
def start(shm, addresses):
    """Starts a machine of actors, a program of its own; what still runs at the end is killed."""
    started = []

    def run(rank, code, peers=3):
        words = [sys.executable, "-W", "error", "-c", _START + textwrap.dedent(code), shm, str(rank)]
        words.append(",".join(f"{host}:{port}" for host, port in addresses[:peers]))
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


class Learner:
    """A learner's ring, what it takes out of it, and its lease."""

    def __init__(self, ring):
        self.ring, self._held, self.seen = ring, core().Learner(ring.held), {}

    def take(self, until, seconds=60, check=lambda: None):
        """Takes trajectories until there are so many; checks the bytes of each."""
        deadline = time.monotonic() + seconds
        while sum(map(len, self.seen.values())) < until:
            check()
            assert time.monotonic() < deadline, {k: len(v) for k, v in self.seen.items()}
            batch = self._held.collect(1000)
            fields = batch.fields()
            for k in range(len(batch)):
                i, rank = divmod(int(fields["version"][k]), 8)
                self._check(i, rank, fields["slot"][k], fields["length"][k])
                assert fields["flags"][k] == 2 + (i % 3 > 0) and (not i % 3 or fields["priority"][k] == i + 0.5)
                self.seen.setdefault(rank, []).append(i)
            self._held.consume(batch)
            time.sleep(0.001)

    def _check(self, i, rank, slot, length):
        assert length == i % 4 + 1
        wanted = {"uint8": (i + rank) % 251, "bool": i % 2, "float16": np.float16(i % 1000 + rank / 4)}
        for column in self.ring.columns:
            assert (column[slot, :length] == wanted[column.dtype.name]).all()

    def leave(self):
        self._held.leave()


@pytest.fixture
def learner(shm, table):
    ring = make_ring(table, 3, 2, directory=shm)
    held = Learner(ring)
    yield held
    held.leave()
    ring.unlink()


_WRITE = """
ring = make_ring(table, 2, 3, directory=directory)
with Relay(ring, job) as relay:
    write(Writer(ring), 0, 150)
    assert relay.wait(60), relay.stats()
    assert relay.stats()["consumed"] == relay.stats()["published"] == 150
ring.unlink()
assert "jax" not in sys.modules
"""


def test_two_machines(learner, start, addresses):
    machines = [start(rank, _WRITE) for rank in (1, 2)]
    with RemoteActors(learner.ring, transport.Job(0, addresses, SECRET), lanes=3) as remote:
        learner.take(300, check=remote.check)
        for machine in machines:
            out, _ = machine.communicate(timeout=60)
            assert machine.returncode == 0, out
        stats = remote.stats()
    assert learner.seen == {1: list(range(150)), 2: list(range(150))}
    assert stats["moved"] == 300 and stats["moved_steps"] == 2 * sum(i % 4 + 1 for i in range(150))
    assert stats["reads_failed"] == 0


def test_a_relay_that_is_killed_and_started_again(learner, start, addresses):
    """Each committed trajectory arrives once, in order, whichever relay showed it."""
    first = start(
        1,
        """
        make_ring(table, 2, 3, name="kept", directory=directory)
        relay = Relay(open_ring("kept", directory), job)
        write(Writer(relay.ring), 0, 10**9)
        """,
        peers=2,
    )
    with RemoteActors(learner.ring, transport.Job(0, addresses[:2], SECRET), lanes=2) as remote:
        learner.take(40, check=remote.check)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        ring = open_ring("kept", learner.ring.directory)
        committed = ring.held.committed
        second = start(
            1,
            """
            ring = open_ring("kept", directory)
            begin = ring.report()["committed"]
            with Relay(ring, job) as relay:
                write(Writer(ring), begin, begin + 30)
                assert relay.wait(60), relay.stats()
            ring.unlink()
            """,
            peers=2,
        )
        learner.take(committed + 30, check=remote.check)
        out, _ = second.communicate(timeout=60)
        assert second.returncode == 0, out
        assert remote.stats()["reconnects"] == 1
    assert learner.seen == {1: list(range(committed + 30))}


def test_writers_wait_while_the_learner_does(learner, shm, table, addresses):
    ring = make_ring(table, 1, 2, directory=shm)
    job = lambda rank: transport.Job(rank, addresses[:2], SECRET)  # noqa: E731
    with contextlib.ExitStack() as stack:
        started = []
        stack.callback(lambda: [x.close() for x in started])
        thread = threading.Thread(target=lambda: started.append(Relay(ring, job(1))))
        thread.start()
        with RemoteActors(learner.ring, job(0), lanes=1) as remote:
            thread.join(60)
            writer = Writer(ring, timeout=0.5)
            written = 0
            with pytest.raises(RingTimeoutError):
                for written in range(1000):
                    writer.begin()["image"][:1] = 0
                    writer.commit(1, version=written * 8)
            # The two slots of the lane here, and the two there.
            assert written == 4 and remote.stats()["moved"] == 2 and remote.stats()["full"] > 0
        writer.close()
    ring.unlink()


def test_other_columns_are_refused(learner, start, addresses):
    start(
        1,
        """
        table = TableSpec({"image": ColumnSpec((3, 5), "int8")}, trajectory_length=4, capacity=32)
        ring = make_ring(table, 1, 2, directory=directory)
        with Relay(ring, job) as relay:
            time.sleep(60)
        """,
        peers=2,
    )
    with RemoteActors(learner.ring, transport.Job(0, addresses[:2], SECRET), lanes=1) as remote:
        deadline = time.monotonic() + 30
        with pytest.raises(RingForeignError, match=r"relay 1: got T = 4, image: int8\[3, 5\], wanted T = 4, image: u"):
            while time.monotonic() < deadline:
                remote.check()
                time.sleep(0.01)
    for name in os.listdir(learner.ring.directory):
        path = os.path.join(learner.ring.directory, name)
        if path != learner.ring.path:
            open_ring(path).unlink()


def test_a_relay_holds_the_learners_lease(shm, table, addresses):
    ring = make_ring(table, 1, 2, directory=shm)
    held = Learner(ring)
    with pytest.raises(Exception, match="learner"):
        Relay(ring, transport.Job(0, addresses[:1], SECRET), learner=0)
    held.leave()
    with pytest.raises(ValueError, match="peers: got"):
        Relay(ring, transport.Job(0, addresses[:1], SECRET), learner=0)
    Learner(ring).leave()  # what failed has given it back
    ring.unlink()


def test_a_ring_with_questions_is_refused(shm, table, addresses):
    ask = ColumnSpec((), "int32")
    ring = make_ring(table, 1, 2, ask=ask, answer=ask, directory=shm)
    with pytest.raises(ValueError, match="ring: got one with ask"):
        Relay(ring, transport.Job(1, addresses[:2], SECRET))
    ring.unlink()


@pytest.mark.parametrize("lanes", [0, -1, True, 1.0])
def test_lanes(learner, addresses, lanes):
    with pytest.raises(ValueError, match="lanes: got"):
        RemoteActors(learner.ring, transport.Job(0, addresses[:1], SECRET), lanes=lanes)


# The manifest.


def fields(first, last):
    n = last - first + 1
    numbers = np.arange(first, last + 1)
    return {
        "number": numbers, "version": -numbers, "checksum": numbers * 3, "slot": numbers % 6, "length": numbers % 5,
        "flags": np.ones(n, np.uint32), "priority": numbers / np.float32(2),
    }  # fmt: skip


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 6), (5, 8), (6, 7), (6, 11)])
def test_entries(shm, table, first, last):
    ring = make_ring(table, 3, 2, directory=shm)
    manifest = _manifest.Manifest(ring)
    header = manifest.memory[: _manifest.HEADER.itemsize]
    assert int(_manifest.read_header(header, manifest.memory.size, "x")["published"]) == 0
    manifest.publish(fields(max(1, last - 5), last))
    assert manifest.published == last
    runs = _manifest.places(first, last, 6)
    size = _manifest.ENTRY.itemsize
    rows = np.concatenate([manifest.memory[at : at + n * size].view(_manifest.ENTRY) for at, n in runs])
    assert list(_manifest.good(rows, first)["number"]) == list(range(first, last + 1))
    # One that is being written, and all behind it, have to wait.
    broken = rows.copy()
    broken["length"][-1] += 1
    assert len(_manifest.good(broken, first)) == len(rows) - 1
    assert len(_manifest.good(rows, first + 1)) == 0
    ring.unlink()


def test_headers_are_not_trusted(shm, table):
    ring = make_ring(table, 3, 2, directory=shm)
    memory = _manifest.Manifest(ring).memory
    header = memory[: _manifest.HEADER.itemsize]
    assert _manifest.read_header(np.zeros_like(header), memory.size, "x") is None
    for name, value in (("magic", 1), ("version", 2), ("capacity", 7), ("capacity", 0)):
        wrong = header.copy()
        wrong.view(_manifest.HEADER)[name] = value
        with pytest.raises(RingForeignError, match="relay 3: got a manifest"):
            _manifest.read_header(wrong, memory.size, "relay 3")
    ring.unlink()


def test_descriptions_are_not_trusted(shm, table):
    ring = make_ring(table, 3, 2, directory=shm)
    text = _manifest.describe(ring).tobytes()
    slots, offsets = _manifest.offsets(text, ring, "x", ring.nbytes)
    base = ring.held.bytes().ctypes.data
    assert slots == 6
    assert offsets == {n: c.ctypes.data - base for n, c in zip(ring.names, ring.columns, strict=True)}
    good = json.loads(text)
    wrong = [b"", b"[]", b"\xff", b"{" * 100_000, json.dumps({**good, "steps": 5}).encode()]
    wrong += [json.dumps({**good, "slots": 0}).encode(), json.dumps({**good, "columns": good["columns"][:-1]}).encode()]
    wrong += [json.dumps({**good, "columns": [[*c[:3], -64] for c in good["columns"]]}).encode()]
    wrong += [json.dumps({**good, "columns": [[*c[:3], 2**70] for c in good["columns"]]}).encode()]
    wrong += [json.dumps({**good, "slots": 2**40}).encode()]
    wrong += [json.dumps({**good, "columns": [[1]]}).encode(), json.dumps({**good, "columns": None}).encode()]
    for raw in wrong:
        with pytest.raises(RingForeignError, match="x: got"):
            _manifest.offsets(raw, ring, "x", ring.nbytes)
    ring.unlink()


def test_a_ring_is_known_again(shm, table):
    one, two = make_ring(table, 1, 2, name="one", directory=shm), make_ring(table, 1, 2, directory=shm)
    assert one.held.identity == open_ring("one", shm).held.identity != two.held.identity
    one.unlink()
    two.unlink()


def test_each_relay_has_its_turn_to_be_first():
    """Where there is room for the trajectories of one, the others do not wait for ever."""
    remote, served = object.__new__(RemoteActors), []
    remote._next, remote._acks, remote._sources = 0, np.zeros(4), [_remote._Source(i) for i in (1, 2, 3)]
    remote._session = types.SimpleNamespace(
        alive=[True] * 4, region_bytes=lambda *_: 1, read_into=lambda pieces: ["ok"] * len(pieces)
    )  # fmt: skip
    room = []
    remote._take = lambda source, _: int(bool(room) and room.pop() and not served.append(source.rank))
    for _ in range(7):
        room.append(True)
        assert remote._turn() == 1
    assert served == [1, 2, 3, 1, 2, 3, 1]


def test_half_an_acknowledgement_says_nothing():
    said, later = _manifest.acknowledged(7, 1000), _manifest.acknowledged(8, 3)
    raw = np.array([said]).view(np.uint8)
    assert _manifest.acknowledgement(raw, 7) == 1000 and _manifest.acknowledgement(raw, 8) == 0
    for end in range(1, 24):  # the new ring, or its number, over the old
        torn = raw.copy()
        torn[:end] = np.array([later]).view(np.uint8)[:end]
        assert _manifest.acknowledgement(torn, 8) in (0, 3)
        assert _manifest.acknowledgement(torn, 7) in (0, 1000)
    assert _manifest.acknowledgement(np.zeros_like(raw), 7) == 0


def test_its_session_is_apart_from_those_of_replays():
    # Ops find a session of the process by its number alone.
    from gear_jax.replay import _link

    replays = next(_link._numbers)
    assert not replays <= SESSION < replays + 2**20 and SESSION >= 2**20 and SESSION < 2**31


def test_slots_that_became_others_while_they_were_read(learner, shm, table, addresses, monkeypatch):
    """Nothing of them is taken."""
    ring = make_ring(table, 1, 2, directory=shm)
    job = lambda rank: transport.Job(rank, addresses[:2], SECRET)  # noqa: E731
    started = []
    thread = threading.Thread(target=lambda: started.append(Relay(ring, job(1))))
    thread.start()
    with RemoteActors(learner.ring, job(0), lanes=1) as remote:
        thread.join(60)
        (relay,) = started
        source = remote._sources[0]
        assert remote._still(source, 1) is (source.ring == ring.held.identity)
        deadline = time.monotonic() + 30
        while source.ring != ring.held.identity:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert remote._still(source, 1)
        relay._manifest.consumed = 3
        assert not remote._still(source, 3) and remote._still(source, 4)
        relay._manifest.consumed = 0
        source.ring += 1
        assert not remote._still(source, 1)
        relay.close()
    ring.unlink()
