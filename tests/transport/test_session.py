"""How sessions come together, what they refuse, and what they leave behind."""

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import time
import types

import numpy as np
import pytest

from gear_jax import transport
from gear_jax.testing.processes import free_ports
from gear_jax.transport import Job, Session, TransportError, _blob, _control, _kinds

SECRET = b"s" * 32
MEMORY = np.arange(1000, dtype=np.int32)


@pytest.fixture(autouse=True)
def ucx():
    if why := transport.missing("ucx"):
        pytest.skip(f"no UCX here: {why}")


@pytest.fixture(autouse=True)
def nothing_is_left():
    def mine():
        return {t for t in threading.enumerate() if t.name.startswith("gear_jax-")}

    before, listening = mine(), dict(_control._listeners)
    yield
    until = time.monotonic() + 10
    while mine() - before or _control._listeners != listening:
        assert time.monotonic() < until, mine() - before
        time.sleep(0.01)


def jobs(n=2, secrets=None):
    addresses = [("127.0.0.1", port) for port in free_ports(n)]
    return [Job(i, addresses, (secrets or {}).get(i, SECRET)) for i in range(n)]


def start(all_jobs, regions=None, **options):
    """The sessions of all, made at once as in processes of their own; or the error of each that has one."""
    arguments = {"start_timeout": 20.0, "number": 0, "transport": "ucx", **options}

    def make(job):
        own = {name: value.get(job.rank) if isinstance(value, dict) else value for name, value in arguments.items()}
        return Session(job, (regions or {}).get(job.rank, [MEMORY + job.rank]), **own)

    with concurrent.futures.ThreadPoolExecutor(len(all_jobs)) as pool:
        made = [pool.submit(make, job) for job in all_jobs]
    return [f.exception() or f.result() for f in made]


@contextlib.contextmanager
def open_sessions(*args, **options):
    sessions = start(*args, **options)
    try:
        for s in sessions:
            if isinstance(s, BaseException):
                raise s
        yield sessions
    finally:
        for s in sessions:
            if isinstance(s, Session):
                s.close()


def errors(*args, **options):
    sessions = start(*args, **options)
    for s in sessions:
        if isinstance(s, Session):
            s.close()
    return [str(s) for s in sessions if isinstance(s, TransportError)]


def test_all_read_all():
    with open_sessions(jobs(3)) as sessions:
        for s in sessions:
            assert s.transport == "ucx" and s.number == 0 and s.alive.tolist() == [True] * 3
            for peer in range(3):
                got = s.read(peer, 0, 40, 400).view(np.int32)
                np.testing.assert_array_equal(got, np.arange(10, 110) + peer)
                assert s.region_bytes(peer, 0) == MEMORY.nbytes
            assert s.region_bytes(0, 1) == s.region_bytes(3, 0) == 0
            counters = s.counters()
            assert counters["reads"] == 2 and counters["bytes"] == 800 and counters["wait_seconds"] > 0
            assert {counters[k] for k in ("refused", "timeouts", "lost", "losses", "reconnects")} == {0}


def test_a_job_of_one():
    with open_sessions(jobs(1)) as (s,):
        np.testing.assert_array_equal(s.read(0, 0, 0, MEMORY.nbytes).view(np.int32), MEMORY)
        with pytest.raises(TransportError, match="Read within") as e:
            s.read(0, 0, 1, MEMORY.nbytes)
        assert e.value.status == "refused"


def test_no_regions_and_empty_ones():
    with open_sessions(jobs(), {0: [], 1: []}) as (a, _):
        assert a.region_bytes(1, 0) == 0
    with open_sessions(jobs(), {0: [MEMORY[:0]], 1: [(0, 0)]}) as (a, b):
        assert a.read(1, 0, 0, 0).size == b.read(0, 0, 0, 0).size == 0


def test_addresses_are_regions_too():
    with open_sessions(jobs(), {1: [(MEMORY.ctypes.data + 4, 8)]}) as (a, _):
        assert a.read(1, 0, 0, 8).view(np.int32).tolist() == [1, 2]


@pytest.mark.parametrize("there", [[0, 1], [0, 1, 2], [0, 1, 2, 3]])
def test_the_wrong_secret_is_told_at_once_and_to_all(there):
    """However long they would wait, and whether all have come or not."""
    of_four = jobs(4, secrets={1: b"t" * 32})
    found = errors([of_four[i] for i in there], start_timeout=3600.0)
    assert len(found) == len(there), found
    for rank, text in enumerate(found):
        assert f"process {1 if rank != 1 else ''}" in text and "got one without the job's secret" in text, found


def test_a_missing_process_is_named():
    (first, _) = jobs()
    (text,) = errors([first], start_timeout=0.5)
    assert "process 1 at 127.0.0.1" in text and "Start all processes" in text


def test_processes_must_agree():
    found = errors(jobs(), {0: [MEMORY], 1: [MEMORY, MEMORY]}, start_timeout=3600.0)
    assert len(found) == 2 and all("regions of process" in text for text in found), found
    found = errors(jobs(), number={0: 0, 1: 1}, start_timeout=1.0)
    # Who ends first leaves the other with nobody to ask.
    assert len(found) == 2 and any("it has not got so far" in text for text in found), found


def test_the_job_uses_what_all_can(monkeypatch):
    monkeypatch.setattr(_kinds, "KINDS", ("ucx",))
    with open_sessions(jobs(), transport={0: None, 1: "ucx"}) as sessions:
        assert [s.transport for s in sessions] == ["ucx", "ucx"]


def test_a_restarted_process_is_taken_back_though_another_is_gone():
    all_jobs = jobs(3)
    a, b, c = start(all_jobs, deadline=1.0)
    try:
        b.close()
        c.close()
        until = time.monotonic() + 10
        while a.alive.tolist() != [True, False, False]:
            assert time.monotonic() < until
            time.sleep(0.01)
        with pytest.raises(TransportError, match="connected again when it is back") as e:
            a.read(1, 0, 0, 4)
        assert e.value.status == "lost"
        (b,) = start([all_jobs[1]])
        assert isinstance(b, Session), b
        assert b.alive.tolist() == [True, True, False]
        while not a.alive[1]:
            assert time.monotonic() < until + 10
            time.sleep(0.01)
        assert a.read(1, 0, 0, 4).view(np.int32)[0] == 1
        assert a.counters()["reconnects"] == 1 and a.counters()["losses"] == 2
    finally:
        for s in (a, b, c):
            s.close()


def test_closing_twice_and_reading_after():
    with open_sessions(jobs()) as (a, _):
        a.close()
        a.close()
        with pytest.raises(TransportError, match="Make a new session") as e:
            a.read(1, 0, 0, 4)
        assert e.value.status == "closed"


def test_reads_that_the_transport_does_not_end_are_told():
    with open_sessions(jobs()) as (a, _):
        native = a._native
        a._native = types.SimpleNamespace(close=lambda: native.close() or 3)
        with pytest.warns(RuntimeWarning, match=r"Session.close: transport 'ucx': got 3 reads under way 2.0 s after"):
            a.close()


def test_many_sessions_leave_no_descriptors():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    with open_sessions(jobs()):
        pass
    time.sleep(0.2)
    before = descriptors()
    for _ in range(20):
        with open_sessions(jobs()) as (a, _):
            a.read(1, 0, 0, 4)
    until = time.monotonic() + 10
    while descriptors() > before:
        assert time.monotonic() < until, (before, descriptors())
        time.sleep(0.05)


def test_a_refused_peer_keeps_nothing():
    with open_sessions(jobs()) as (a, b):
        links = b._links
        with links.paused(0):
            dropped = []
            a._exposer.drop, drop = dropped.append, a._exposer.drop
            b._native.disconnect(0)
            channel, _ = b._dial(0)
            channel.send(_blob.Open("ucx", b"no offer"))
            assert isinstance(channel.receive(), _blob.Refused)
            until = time.monotonic() + 10
            while dropped != [1] or a._inbound:
                assert time.monotonic() < until, (dropped, a._inbound)
                time.sleep(0.01)
            a._exposer.drop = drop
            channel.close()
            channel.release()


def test_a_process_may_end_with_its_session_open():
    program = """
        import atexit, os, sys
        import numpy as np
        from gear_jax.transport import Job, Session
        atexit.register(lambda: print(session._closed[1].is_set(), os.getpid() == first))  # runs last
        session = Session(Job(0, (("127.0.0.1", int(sys.argv[1])),), bytes(32)), [np.zeros(9)], "ucx")
        first = os.getpid()
        if os.fork() == 0:
            sys.exit()  # has none of the session's threads, and closes nothing
        os.wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(free_ports(1)[0])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, sorted(run.stdout.splitlines())) == (0, ["False False", "True True"]), run


def test_the_process_keeps_its_machine_code_and_signals():
    program = """
        import ctypes, sys
        from gear_jax.transport import Job, Session

        def caught():
            return [line for line in open("/proc/self/status") if line.startswith("SigCgt")]

        def code():
            lines = [line.split() for line in open("/proc/self/maps")]
            found = {l[5]: [] for l in lines if len(l) > 5 and l[1] == "r-xp" and l[5].startswith("/")}
            for l in lines:
                if len(l) > 5 and l[5] in found and l[1] == "r-xp":
                    start, stop = (int(x, 16) for x in l[0].split("-"))
                    found[l[5]].append(hash(ctypes.string_at(start, stop - start)))
            return found

        before, signals = code(), caught()
        with Session(Job(0, [("127.0.0.1", int(sys.argv[1]))], b"s" * 32), [], number=0, transport="ucx"):
            after = code()
        assert any("libucp" in name for name in after)
        assert not [name for name, x in before.items() if x != after[name]]
        assert caught() == signals
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(free_ports(1)[0])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and not run.stderr, run.stderr


@pytest.mark.parametrize(
    ("regions", "options", "error", "match"),
    [
        ([MEMORY[::2]], {}, ValueError, "C-contiguous"),
        (["abc"], {}, TypeError, r"regions\[0\]"),
        ([(1, -1)], {}, TypeError, r"regions\[0\]"),
        ([MEMORY], {"deadline": 0.0}, ValueError, "deadline"),
        ([MEMORY], {"on_loss": "cry"}, ValueError, "on_loss"),
        ([MEMORY], {"transport": "pigeon"}, ValueError, "pigeon"),
        ([MEMORY], {"speed": 1}, ValueError, "speed"),
        ([np.array([None])], {}, TypeError, r"regions\[0\]: got an array of object"),
        ([MEMORY], {"deadline": "2"}, ValueError, "deadline: got '2', wanted seconds"),
        ([MEMORY], {"deadline": 1e9}, ValueError, "less than a million"),
        ([MEMORY], {"start_timeout": -1}, ValueError, "start_timeout: got -1"),
        ([MEMORY], {"number": "a"}, ValueError, "number: got 'a', wanted an integer"),
        ([MEMORY], {"number": -1}, ValueError, "number: got -1"),
        ([MEMORY], {"holds": {"x" * 40: "y"}}, ValueError, "holds: got"),
        ([MEMORY], {"holds": {"x": 1}}, TypeError, r"holds\['x'\]: got int, wanted words"),
    ],
)
def test_arguments_are_checked(regions, options, error, match):
    with pytest.raises(error, match=match):
        Session(jobs(1)[0], regions, **options)
    with pytest.raises(ValueError, match="offset"):
        with open_sessions(jobs(1)) as (s,):
            s.read(0, 0, -1, 4)


def test_a_session_is_of_a_job():
    with pytest.raises(TypeError, match="job: got NoneType, wanted a Job"):
        Session(None, [])


@pytest.mark.parametrize(
    ("array", "kind", "words"),
    [
        (np.frombuffer(b"immutable bytes.", np.uint8), ValueError, "read-only"),
        (np.zeros(16, np.uint8)[8:][::-1][:4], ValueError, "strides"),
        (np.zeros(8, np.uint8)[::2], ValueError, "strides"),
        (np.array([None, None]), TypeError, "object"),
        (bytearray(4), TypeError, "bytearray"),
    ],
    ids=["constant", "backwards", "with gaps", "objects", "no array"],
)
def test_only_what_may_be_written_is_filled(array, kind, words):
    with open_sessions(jobs()) as (a, _):
        before = bytes(array)
        with pytest.raises(kind, match=rf"pieces\[0\]: got .*{words}"):
            a.read_into([(1, 0, 0, array)])
        assert bytes(array) == before


def test_pieces_are_integers():
    with open_sessions(jobs()) as (a, _):
        assert a.read(np.int64(1), 0, np.int32(0), np.uint8(4)).size == 4
        for piece in ((1, 0, 1.5, 1), ("1", 0, 0, 1), (1, 0, 0, True)):
            with pytest.raises(TypeError, match="a piece: got"):
                a.read(*piece)


def test_who_holds_something_else_is_refused():
    long = "y float32, " * 100
    found = errors(jobs(), holds={0: {"columns": f"{long}x float32"}, 1: {"columns": f"{long}x int32", "T": "3"}})
    assert len(found) == 2 and all("T of process" in text for text in found), found
    found = errors(jobs(), holds={0: {"columns": f"{long}x float32"}, 1: {"columns": f"{long}x int32"}})
    assert len(found) == 2 and all("columns of process" in text and "sha256" in text for text in found), found
    with open_sessions(jobs(), holds={0: {"columns": long}, 1: {"columns": long}}) as (a, _):
        assert a.alive.all()


def test_a_session_that_failed_does_not_count():
    (first, _), (alone,) = jobs(), jobs(1)
    with Session(alone, [MEMORY]) as before:
        pass
    for _ in range(2):
        with pytest.raises(TransportError, match=f"no session {before.number + 1}|refused"):
            Session(first, [MEMORY], start_timeout=0.3)
        with pytest.raises(ValueError, match="peers"):
            Session(first, [MEMORY], peers=[7])
    with Session(alone, [MEMORY]) as after:
        assert after.number == before.number + 1
        with pytest.raises(TransportError, match=r"number: got .*, of a session that is open"):
            Session(alone, [MEMORY], number=after.number)
