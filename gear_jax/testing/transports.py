"""The contract of a transport, with real processes on one machine. No jax.

Each check makes a job of two or three processes over the transport named; `CHECKS` has them by name, for
`pytest.mark.parametrize`. A check fails by AssertionError; what it starts it ends, whatever happens.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from gear_jax.testing._peers import SECONDS, Peers, pattern, resources
from gear_jax.transport import TransportError, _blob

MEBIBYTE = 1 << 20
SIZES = (0, 1, 7, 4096, 4097, 12345, MEBIBYTE, 5 * MEBIBYTE + 3)
_REGIONS = (8 * MEBIBYTE, 5, 0)


def check_sizes(make: Callable[..., Peers]) -> None:
    """Reads of every size arrive whole, from a peer and from oneself, in both directions; nothing around is touched."""
    with make(_REGIONS) as peers:
        for rank in (0, 1):
            whole = pattern(rank, 0, _REGIONS[0])
            for size in SIZES:
                for offset in (0, 1, _REGIONS[0] - size):
                    got = peers.session.read(rank, 0, offset, size)
                    assert np.array_equal(got, whole[offset : offset + size]), f"{size} bytes at {offset} of {rank}"
                assert peers.ask(1, do="read", peer=1 - rank, region=0, offset=3, bytes=size) == "ok"
            assert np.array_equal(peers.session.read(rank, 1, 0, 5), pattern(rank, 1, 5))
            assert peers.session.read(rank, 2, 0, 0).size == 0


def check_window(make: Callable[..., Peers]) -> None:
    """Reads larger than chunk × window, and many at once, arrive whole."""
    with make(_REGIONS, options={"chunk": 4096, "window": 3}) as peers:
        whole = pattern(1, 0, _REGIONS[0])
        assert np.array_equal(peers.session.read(1, 0, 5, 3 * MEBIBYTE), whole[5 : 5 + 3 * MEBIBYTE])
        rng = np.random.default_rng(0)
        sizes = rng.integers(0, 20000, 300)
        offsets = rng.integers(0, _REGIONS[0] - sizes)
        pieces = [(1, 0, int(o), int(s)) for o, s in zip(offsets, sizes, strict=True)]
        for (_, _, offset, size), got in zip(pieces, peers.session.read_many(pieces), strict=True):
            assert np.array_equal(got, whole[offset : offset + size])


def check_fresh(make: Callable[..., Peers]) -> None:
    """A read returns what the memory holds now: nothing is cached."""
    with make((100_000,)) as peers:
        for value in (1, 2, 255):
            peers.ask(1, do="fill", region=0, value=value)
            assert (peers.session.read(1, 0, 0, 100_000) == value).all()


def check_out_of_range(make: Callable[..., Peers]) -> None:
    """What lies outside is refused, touches no wire, and hurts nobody."""
    with make((4096, 5)) as peers:
        before = peers.session.counters()
        for piece in ((1, 0, 0, 4097), (1, 0, 4096, 1), (1, 0, 2**62, 1), (1, 1, 5, 1), (1, 2, 0, 1), (1, -1, 0, 1),
                      (2, 0, 0, 1), (-1, 0, 0, 1), (0, 0, 4096, 1)):  # fmt: skip
            assert _status(peers, *piece) == "refused", piece
        after = peers.session.counters()
        assert after["bytes"] == before["bytes"] and after["refused"] > before["refused"]
        assert _status(peers, 1, 0, 4096, 0) == "ok" and _status(peers, 1, 0, 4095, 1) == "ok"


def check_wrong_key(make: Callable[..., Peers]) -> None:
    """A wrong key reads nothing: it is refused when it is taken up, or when it is used. The right one still works."""
    with make((4096,)) as peers:
        with _answer_of(peers) as opened:
            regions = [(a, n, bytes(b ^ 0x5A for b in key)) for a, n, key in opened.regions]
            try:
                peers.session._native.connect(1, opened.blob, regions)
            except RuntimeError:
                pass
            else:
                assert _status(peers, 1, 0, 0, 4096) in ("refused", "lost")
        peers.session._native.disconnect(1)
        _comes_back(peers, 1, 4096)


def check_key_bounds(make: Callable[..., Peers]) -> None:
    """Where the exposing side checks keys by itself, a reader that lies about the bounds reads nothing beyond."""
    with make((8192,)) as peers:
        if not peers.session._native.checks_keys():
            return
        with _answer_of(peers) as opened:
            peers.session._native.connect(1, opened.blob, [(a, n + 65536, key) for a, n, key in opened.regions])
            assert _status(peers, 1, 0, 8192, 4096) in ("refused", "lost")
        peers.session._native.disconnect(1)
        _comes_back(peers, 1, 8192)


def check_malformed(make: Callable[..., Peers]) -> None:
    """Blobs that no peer has made are refused with an error, and the peer is lost no longer than until the next try."""
    with make((4096,)) as peers:
        rng = np.random.default_rng(0)
        with _answer_of(peers) as opened:
            blobs = [b"", b"\0", rng.bytes(64), rng.bytes(4096), opened.blob[:-1], opened.blob + b"\0"]
            for i in range(0, len(opened.blob), max(1, len(opened.blob) // 20)):
                blobs.append(opened.blob[:i] + bytes([opened.blob[i] ^ 0x80]) + opened.blob[i + 1 :])
            for blob in blobs:
                with _raises(RuntimeError):
                    peers.session._native.connect(1, blob, opened.regions)
        for offer in (b"", b"x" * 64, rng.bytes(64)):
            with _raises(TransportError):
                peers.session._exposer.accept(1, offer)
        peers.session._native.disconnect(1)
        _comes_back(peers, 1, 4096)


def check_asleep(make: Callable[..., Peers]) -> None:
    """A peer whose Python does nothing, and lets nobody else run, is read all the same."""
    with make((4 * MEBIBYTE,), deadline=30.0) as peers:
        peers.tell(1, do="hold the GIL", seconds=1.0)
        time.sleep(0.2)
        start, reads = time.monotonic(), 0
        while time.monotonic() < start + 0.4:
            assert _status(peers, 1, 0, 0, MEBIBYTE) == "ok"
            reads += 1
        slept_on = time.monotonic()
        peers.answer(1)
        assert reads > 0
        assert time.monotonic() - slept_on > 0.1, "the peer was awake"


def check_killed(make: Callable[..., Peers]) -> None:
    """A killed process: its reads end by the deadline, it is lost at once, the others go on, and it may come back."""
    deadline = 2.0
    with make((4 * MEBIBYTE,), processes=3, deadline=deadline) as peers:
        ends: list[tuple[str, float]] = []
        started = threading.Event()

        def read_on() -> None:
            while not ends:
                start = time.monotonic()
                status = _status(peers, 2, 0, 0, 4 * MEBIBYTE)
                started.set()
                if status != "ok":
                    ends.append((status, time.monotonic() - start))

        reader = threading.Thread(target=read_on, daemon=True)
        reader.start()
        assert started.wait(SECONDS)
        peers.kill(2)
        peers.wait_until(2, alive=False)
        reader.join(SECONDS)
        assert ends and ends[0][0] in ("lost", "timeout"), ends
        assert ends[0][1] < deadline + 3, "a read outlived its deadline"
        assert _status(peers, 2, 0, 0, 1) == "lost"
        assert _status(peers, 1, 0, 0, MEBIBYTE) == "ok"
        assert peers.ask(1, do="read", peer=0, region=0, offset=0, bytes=MEBIBYTE) == "ok"
        assert peers.ask(1, do="read", peer=2, region=0, offset=0, bytes=1) in ("lost", "timeout")
        assert peers.session.counters()["losses"] == 1
        peers.start(2)
        assert peers.answer(2) == "ready"
        _comes_back(peers, 2, MEBIBYTE)
        assert peers.session.counters()["reconnects"] == 1
        for other in (0, 1):
            assert peers.ask(2, do="read", peer=other, region=0, offset=0, bytes=MEBIBYTE) == "ok"


def check_killed_reader(make: Callable[..., Peers], kills: int = 1) -> None:
    """A process that is killed while it reads takes nobody with it: whom it read goes on, and is read by the others."""
    size = MEBIBYTE
    with make((size,), processes=3) as peers:
        for kill in range(kills):
            for _ in range(100):
                peers.tell(2, do="read", peer=1, region=0, offset=0, bytes=size)
            time.sleep(0.01 * (kill % 5 + 1))
            peers.kill(2)
            peers.wait_until(2, alive=False)
            assert peers.ask(1, do="read", peer=0, region=0, offset=0, bytes=MEBIBYTE) == "ok"
            assert _status(peers, 1, 0, 0, MEBIBYTE) == "ok"
            peers.start(2)
            assert peers.answer(2) == "ready"
            peers.wait_until(2, alive=True)
        assert peers.session.counters()["losses"] >= kills


def check_stopped(make: Callable[..., Peers]) -> None:
    """A process that stands still (SIGSTOP): reads of it end by the deadline, and work again when it goes on."""
    with make((MEBIBYTE,), deadline=1.0) as peers:
        peers.signal(1, signal.SIGSTOP)
        try:
            start = time.monotonic()
            assert _status(peers, 1, 0, 0, MEBIBYTE) in ("ok", "timeout", "lost")  # ok: the hardware or kernel reads it
            assert time.monotonic() - start < 4
        finally:
            peers.signal(1, signal.SIGCONT)
        _comes_back(peers, 1, MEBIBYTE)


def check_late_answers(make: Callable[..., Peers]) -> None:
    """What a peer answers after the deadline is written nowhere: the memory may be another's by then."""
    size = 16 * MEBIBYTE
    with make((size,), deadline=0.5) as peers:
        to = np.zeros(size, np.uint8)
        pieces = [(1, 0, at, MEBIBYTE // 2, to.ctypes.data + at) for at in range(0, size, MEBIBYTE // 2)]
        for pause in (0.0, 0.001, 0.003):
            reader = threading.Thread(target=peers.session._native.read, args=(pieces,), daemon=True)
            reader.start()
            time.sleep(pause)
            peers.signal(1, signal.SIGSTOP)
            try:
                reader.join(SECONDS)
                assert not reader.is_alive(), "reads of a stopped process do not end"
                to[:] = 0xA5
            finally:
                peers.signal(1, signal.SIGCONT)
            time.sleep(0.2)
            _comes_back(peers, 1, MEBIBYTE)
            assert (to == 0xA5).all(), "an answer came late and was written"


def check_lost_while_it_runs(make: Callable[..., Peers], losses: int = 8) -> None:
    """A peer that is lost again and again though it runs: its own reads go on, and descriptors stay as many."""
    with make((MEBIBYTE,)) as peers:

        def lose() -> tuple[int, int]:
            peers.session._native.disconnect(1)
            _comes_back(peers, 1, MEBIBYTE)
            assert peers.ask(1, do="read", peer=0, region=0, offset=0, bytes=4096) == "ok", "it has lost this process"
            return resources()["descriptors"], peers.ask(1, do="resources")["descriptors"]

        lose()
        before = lose()
        held = [lose() for _ in range(losses)]
        until = time.monotonic() + 10  # a library may close what it opened a little later
        while any(a > b for a, b in zip(held[-1], before, strict=True)):
            assert time.monotonic() < until, (before, held)
            time.sleep(0.1)
            held.append((resources()["descriptors"], peers.ask(1, do="resources")["descriptors"]))


def check_close(make: Callable[..., Peers]) -> None:
    """Closing while others read: each read ends, once, and the session reads no more."""
    with make((4 * MEBIBYTE,)) as peers:
        statuses: list[str] = []

        def read_on() -> None:
            status = "ok"
            while status == "ok":
                status = _status(peers, 1, 0, 0, 4 * MEBIBYTE)
            statuses.append(status)

        readers = [threading.Thread(target=read_on, daemon=True) for _ in range(3)]
        for reader in readers:
            reader.start()
        time.sleep(0.1)
        peers.session.close()
        for reader in readers:
            reader.join(SECONDS)
        assert statuses == ["closed"] * 3, statuses
        assert _status(peers, 1, 0, 0, 1) == "closed"


def check_closed_peer(make: Callable[..., Peers]) -> None:
    """A peer that has closed its session is lost, and its memory is read no more."""
    with make((MEBIBYTE,)) as peers:
        peers.ask(1, do="close")
        peers.wait_until(1, alive=False)
        assert _status(peers, 1, 0, 0, 1) == "lost"


def check_steady(make: Callable[..., Peers], reads: int = 5000) -> None:
    """Thousands of reads leave descriptors, threads and memory as they were, in reader and peer."""
    with make((4 * MEBIBYTE,)) as peers:
        to = np.empty(MEBIBYTE, np.uint8)
        rng = np.random.default_rng(0)

        def read(count: int) -> None:
            for i in range(count):
                size = (1, 4096, 65537)[i % 3] if i % 100 else MEBIBYTE
                piece = (1, 0, int(rng.integers(0, 3 * MEBIBYTE)), size, to.ctypes.data)
                assert peers.session._native.read([piece]) == ["ok"]

        read(reads // 5)
        before = resources(), peers.ask(1, do="resources")
        read(reads)
        allowed = [{**b, "memory": b["memory"] + 4 * MEBIBYTE} for b in before]
        until = time.monotonic() + 10  # a library may close what it opened a little later
        while True:
            after = resources(), peers.ask(1, do="resources")
            if all(a[what] <= most[what] for a, most in zip(after, allowed, strict=True) for what in a):
                break
            assert time.monotonic() < until, (before, after)
            time.sleep(0.1)


CHECKS: dict[str, Callable[[Callable[..., Peers]], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def check(
    name: str, transport: str | None, environment: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Runs a check of `CHECKS` over a transport.

    Args:
      name: of the check.
      transport: its name; None: the one that is chosen by itself.
      environment: variables of all processes.
      options: of the transport; a check may set others.
    """

    def make(sizes: tuple[int, ...], processes: int = 2, **arguments: Any) -> Peers:
        all_options = {**(options or {}), **arguments.pop("options", {})}
        return Peers(transport, sizes, processes, environment=dict(environment or {}), options=all_options, **arguments)

    CHECKS[name](make)


def _status(peers: Peers, peer: int, region: int, offset: int, size: int) -> str:
    """How a read ends; "wrong" if it brings other bytes than the peer has."""
    try:
        got = peers.session.read(peer, region, offset, size)
    except TransportError as e:
        return e.status
    return "ok" if np.array_equal(got, pattern(peer, region, offset + size)[offset:]) else "wrong"


def _comes_back(peers: Peers, peer: int, size: int) -> None:
    """Waits until a peer is read again: it may be lost once more meanwhile."""
    until = time.monotonic() + SECONDS
    while (status := _status(peers, peer, 0, 0, size)) != "ok":
        assert status != "wrong" and time.monotonic() < until, f"process {peer} is not back: {status}"
        time.sleep(0.01)


@contextlib.contextmanager
def _answer_of(peers: Peers) -> Iterator[_blob.Opened]:
    """What process 1 answers to a reader that wants to connect; meanwhile the session itself leaves it alone."""
    session = peers.session
    links = session._links
    assert links is not None
    with links.paused(1):
        session._native.disconnect(1)
        while 1 not in links.waiting():
            links.wait_for_change(SECONDS)
        until = time.monotonic() + SECONDS
        while True:
            try:
                channel, _ = session._dial(1)
                break
            except (OSError, EOFError):  # a machine that is busy
                assert time.monotonic() < until, "process 1 does not answer"
        try:
            channel.send(_blob.Open(session.transport, session._native.offer(1)))
            opened = channel.receive()
            assert isinstance(opened, _blob.Opened), opened
            yield opened
        finally:
            channel.close()
            channel.release()


@contextlib.contextmanager
def _raises(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind as e:
        assert str(e), "an error without a text"
    else:
        raise AssertionError(f"no {kind.__name__}")
