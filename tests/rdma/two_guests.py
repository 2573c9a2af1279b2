"""Two machines, one job over verbs: run in both guests at once by `tools/softroce/run2.sh` (make test-rdma).

Guest 1 reads guest 2, whose process is killed and started again, and which is then gone without a word. The same
secret must be in `GEAR_JAX_SECRET` (hex) of both. Imports no jax.
"""

import os
import pathlib
import subprocess
import sys
import time

import numpy as np

from gear_jax.transport import Job, Session, TransportError

MIB = 1 << 20
SIZES = (8 * MIB, 5, 0)
PORT, DEADLINE, SECONDS = 7100, 4.0, 90.0  # seconds: that any step may take
NODE = int(os.environ["NODE"])
RUN, KILL_PROCESS, KILL_GUEST = 0, 1, 2  # what guest 1 tells guest 2, in its last region


def pattern(rank, region):
    return np.random.default_rng([rank, region]).integers(0, 256, SIZES[region], np.uint8)


def make(phase):
    """The session of this guest, and what it exposes."""
    ips = (os.environ["SELF_IP"], os.environ["PEER_IP"])[:: 1 if NODE == 1 else -1]
    job = Job(NODE - 1, tuple((ip, PORT) for ip in ips), bytes.fromhex(os.environ["GEAR_JAX_SECRET"]))
    memory = [pattern(NODE - 1, i) for i in range(len(SIZES))]
    return Session(job, [*memory, phase], deadline=DEADLINE, start_timeout=SECONDS, number=0)


def status(session, *piece):
    try:
        session.read(1, *piece)
    except TransportError as e:
        return e.status
    return "ok"


def until(what, wanted, *, seconds=SECONDS):
    """Waits until `what()` is wanted; the seconds that it took."""
    start = time.monotonic()
    while (got := what()) != wanted:
        assert time.monotonic() < start + seconds, f"{got} after {seconds} s, wanted {wanted}"
        time.sleep(0.05)
    return time.monotonic() - start


def say(text):
    print(f"two guests: {text}", flush=True)


def reading_guest():
    phase = np.zeros(1, np.uint8)
    with make(phase) as session:
        assert session.transport == "verbs", "nobody asked for a transport: verbs come first"
        whole = pattern(1, 0)
        for size in (0, 1, 7, 4096, 4097, MIB, 5 * MIB + 3):
            for offset in (0, 1, SIZES[0] - size):
                assert np.array_equal(session.read(1, 0, offset, size), whole[offset : offset + size]), (offset, size)
        pieces = [(1, 0, i * 4099, 4096) for i in range(256)]
        for (_, _, offset, size), got in zip(pieces, session.read_many(pieces), strict=True):
            assert np.array_equal(got, whole[offset : offset + size])
        for piece in ((0, SIZES[0], 1), (1, 0, 6), (9, 0, 1)):
            assert status(session, *piece) == "refused"
        counters = session.counters()
        assert counters["timeouts"] == counters["lost"] == counters["losses"] == 0, counters
        say(f"{counters['bytes'] / 1e6:.1f} MB read, nothing lost")

        phase[:] = KILL_PROCESS
        took = until(lambda: session.counters()["losses"], 1)
        phase[:] = RUN
        say(f"the killed process was seen to be lost {took:.1f} s after the word for it")
        took = until(lambda: status(session, 0, 0, MIB), "ok")
        assert session.counters()["reconnects"] >= 1 and np.array_equal(session.read(1, 0, 0, MIB), whole[:MIB])
        say(f"it is read again {took:.1f} s later")

        phase[:] = KILL_GUEST
        ended, took = "ok", 0.0
        while ended == "ok":
            start = time.monotonic()
            ended = status(session, 0, 0, MIB)
            took = time.monotonic() - start
        assert ended in ("timeout", "lost") and took < DEADLINE + 3, (ended, took)
        assert not session.alive[1] and status(session, 0, 0, 1) == "lost"
        assert np.array_equal(session.read(0, 1, 0, 5), pattern(0, 1)), "its own memory it reads still"
        say(f"the guest that is gone: {ended} after {took:.1f} s")
        start = time.monotonic()
    took = time.monotonic() - start
    assert took < 10, f"closing took {took:.1f} s"


def read_guest():
    """Starts the process that is read, and does to it and to the guest what guest 1 says."""
    command = [sys.executable, __file__, "child"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        while (word := child.stdout.readline().strip()) != str(KILL_PROCESS):
            assert child.poll() is None, "the process that is read has ended"
        child.kill()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        while (word := child.stdout.readline().strip()) != str(KILL_GUEST):
            assert child.poll() is None, f"the process that is read has ended, after {word!r}"
        pathlib.Path("/run/softroce/rc").write_text("0\n")  # the guest's exit status: it ends as it should
        os.sync()
        pathlib.Path("/proc/sysrq-trigger").write_text("b")  # no goodbye to anybody


def child():
    with make(np.zeros(1, np.uint8)) as session:
        until(lambda: session.alive.all(), True)
        whole, end, last = pattern(0, 0), time.monotonic() + 4 * SECONDS, None
        assert np.array_equal(session.read(0, 0, 3, 2 * MIB), whole[3 : 3 + 2 * MIB]), "both ways at once"
        while time.monotonic() < end:
            word = int(session.read(0, 3, 0, 1)[0])
            if word != last:
                print(word, flush=True)
            last = word
            time.sleep(0.05)
    raise SystemExit("guest 1 said nothing more")


if __name__ == "__main__":
    if sys.argv[1:] == ["child"]:
        child()
    elif NODE == 1:
        reading_guest()
    else:
        read_guest()
