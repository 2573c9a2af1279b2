"""A session: memory that this process exposes to its job, and what it reads of the others'."""

import atexit
import contextlib
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gear_jax import _native
from gear_jax._errors import message, type_error, value_error
from gear_jax._numbers import check_seconds, is_integer
from gear_jax.transport import _blob, _control, _kinds, _pieces
from gear_jax.transport._errors import TransportError, transport_error
from gear_jax.transport._job import Job
from gear_jax.transport._links import Links
from gear_jax.transport._meeting import RETRY, Meeting, NotYet


class _Numbers:
    """Of sessions, one after another."""

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), 0

    @contextlib.contextmanager
    def take(self) -> Iterator[int]:
        """The next number, of a session that is made within. One that comes to nothing does not count, so that it may
        be tried again."""
        with self._lock:
            number, self._next = self._next, self._next + 1
        try:
            yield number
        except BaseException:
            with self._lock:
                if self._next == number + 1:
                    self._next = number
            raise


_numbers = _Numbers()


class Session:
    """Exposes memory to the processes of a job, read-only, and reads theirs. A context manager.

    Every process of the job makes its sessions in the same order, each with the same number of regions; the constructor
    returns when all are connected. One that fails does not count, and may be tried again. A process that is started
    again makes them again, and the others take it back.

    A peer whose process ends is lost at once, one that does not answer by the deadline with it; its reads then fail
    until it is back. Connections are renewed in the background.

    Args:
      job: the processes.
      regions: what this process exposes: C-contiguous NumPy arrays, or (address, bytes) of host memory, which must stay
        until `close`. They are exposed where they lie.
      transport: "verbs" or "ucx"; None: the first of these that all processes can use. Those that ask must agree.
      deadline: seconds that a read may take, waiting its turn included.
      on_loss: what a replay does with rows of a lost peer: "invalid" (marks them) or "error" (raises).
      start_timeout: seconds to wait for the other processes.
      number: of the session; None: how many this process has made before it. For processes that make different ones.
      peers: the processes to read from; None: all others. Any may read this one's regions.
      holds: what the regions hold, by name, in words, such as {"columns": "x float32[3]"}; who says otherwise is
        refused.
      options: of the transport: `chunk` (bytes), `window` (chunks under way for each peer), `device`, and for verbs
        `queue_pairs`, `port`, `gid_index`, `mtu`, `traffic_class`, `retries`, `ack_timeout`. See docs/transport.md.

    Attributes:
      number: by which ops find the session; the same in every process.
      transport: the name of the transport in use.
      job, deadline, on_loss: as given.

    Raises:
      ValueError, TypeError: for what the arguments should not be.
      TransportError: if a process is missing, or they do not agree.
    """

    def __init__(
        self, job: Job, regions: Sequence[np.ndarray | tuple[int, int]], transport: str | None = None, *,
        deadline: float = 2.0, on_loss: Literal["invalid", "error"] = "invalid", start_timeout: float = 60.0,
        number: int | None = None, peers: Sequence[int] | None = None, holds: Mapping[str, str] | None = None,
        **options: Any,
    ):  # fmt: skip
        if not isinstance(job, Job):
            fix = "Write gear_jax.transport.Job(rank, addresses, secret)."
            raise type_error("job", got=type(job).__name__, wanted="a Job", fix=fix)
        if transport is not None:
            _kinds.check_name(transport)
        if on_loss not in ("invalid", "error"):
            raise value_error("on_loss", got=repr(on_loss), wanted='"invalid" or "error"', fix="Choose one.")
        self.deadline = check_seconds("deadline", deadline, "The default is 2.0.")
        check_seconds("start_timeout", start_timeout, "The default is 60.0.")
        if number is not None and (not is_integer(number) or not 0 <= number < 2**31):
            raise value_error("number", got=repr(number), wanted="an integer in [0, 2**31)", fix="Leave it out.")
        self.job, self.on_loss = job, on_loss
        self._kept = list(regions)  # the arrays stay alive with the session
        self._memory = [_pieces.address_of(region, i) for i, region in enumerate(self._kept)]
        if len(self._memory) > _blob.MAX_REGIONS:
            fix = "Expose fewer, larger ones."
            raise value_error("regions", got=len(self._memory), wanted=f"at most {_blob.MAX_REGIONS}", fix=fix)
        self._options = {"timeout": self.deadline, **_kinds.check_options(options)}
        self._library: Any = _native.load("cpu")
        self._wants = transport
        self._can = {name: _kinds.kind(name).missing(self._options) for name in _kinds.KINDS}
        self._chosen: str | None = None
        self._closed = threading.Lock(), threading.Event()
        self._inbound: dict[int, _control.Channel] = {}
        self._inbound_lock = threading.Lock()
        self._native: Any = None
        self._exposer: Any = None
        self._links: Links | None = None
        self._holds = _blob.cut_words(holds or {})
        self._peers = [i for i in range(len(job.addresses)) if i != job.rank] if peers is None else list(peers)
        if job.rank in self._peers or not set(self._peers) <= set(range(len(job.addresses))):
            wanted = f"ranks of other processes, below {len(job.addresses)} and not {job.rank}"
            raise value_error("peers", got=self._peers, wanted=wanted, fix="Leave it out.")
        self._address = job.addresses[job.rank]
        self._pid = os.getpid()
        self._meeting = Meeting(job, self._peers, self._ask, self._closed[1])
        with _numbers.take() if number is None else contextlib.nullcontext(int(number)) as self.number:
            _control.listen(self._address, job.secret, self.number, self._serve)
            # Its threads must not run on while libraries that they use are torn down.
            atexit.register(self._close_at_exit)
            try:
                self._start(time.monotonic() + start_timeout)
            except BaseException:
                self.close()
                raise

    # ---- What users call

    @property
    def transport(self) -> str:
        assert self._chosen is not None
        return self._chosen

    @property
    def alive(self) -> np.ndarray:
        """bool[n]: which processes are there, as far as is known; this one is."""
        return np.asarray(self._native.alive(), np.bool_)

    def region_bytes(self, peer: int, region: int) -> int:
        """Bytes of a region of a process; 0 where there is none, or nothing is known of it yet."""
        return self._native.region_bytes(peer, region)

    def read(self, peer: int, region: int, offset: int, bytes: int) -> np.ndarray:
        """Reads `bytes` bytes at `offset` of a region of a process, and waits for them: for tests and tools.

        Returns:
          uint8[bytes].

        Raises:
          TransportError: with the status: "refused" (there is no such region, or it ends before), "timeout", "lost" or
            "closed".
        """
        (result,) = self.read_many([(peer, region, offset, bytes)])
        return result

    def read_many(self, pieces: Sequence[tuple[int, int, int, int]]) -> list[np.ndarray]:
        """Reads several (peer, region, offset, bytes) at once; see `read`."""
        wanted = [_pieces.of_bytes(piece) for piece in pieces]
        arrays = [np.empty(size, np.uint8) for *_, size in wanted]
        wanted = [(*piece, a.ctypes.data) for piece, a in zip(wanted, arrays, strict=True)]
        for piece, status in zip(pieces, self._native.read(wanted), strict=True):
            if status != "ok":
                what = "read of peer {}, region {}, offset {}, {} bytes".format(*piece)
                raise transport_error(what, got=status, wanted="its bytes", fix=_FIXES[status], status=status)
        return arrays

    def read_into(self, pieces: Sequence[tuple[int, int, int, np.ndarray]]) -> list[str]:
        """Reads several (peer, region, offset, C-contiguous array to fill) at once, and waits for them.

        Returns:
          Of each "ok", or how it failed: the statuses of `read`. What an array that failed holds is undefined.

        Raises:
          TypeError, ValueError: for an array that cannot be filled.
        """
        return self._native.read([_pieces.to_fill(piece, i) for i, piece in enumerate(pieces)])

    def counters(self) -> dict[str, int | float]:
        """What has happened so far.

        Returns:
          bytes: that peers have delivered. reads: asked of them. refused, timeouts, lost: reads that ended so.
          losses: how often a peer was lost. reconnects: how often one came back. wait_seconds: from each batch of reads
          to its end, summed up.
        """
        return self._native.counters()

    def close(self) -> None:
        """Ends all reads ("closed") and lets nobody read any more. The others see this process as lost.

        Takes half a second and one deadline at most. A RuntimeWarning if the transport has not ended what it was told
        to end by then, which none should.
        """
        lock, closed = self._closed
        with lock:
            if closed.is_set():
                return
            closed.set()
        atexit.unregister(self._close_at_exit)
        _control.stop_listening(self._address, self.number)
        with self._inbound_lock:
            for channel in self._inbound.values():
                channel.close()
        if self._links is not None:
            self._links.close()
        unended = 0
        if self._native is not None:
            self._library.remove_reader(self.number)
            unended = self._native.close()
        if self._exposer is not None:
            self._exposer.close()
        if unended:
            got = f"{unended} reads under way {self.deadline} s after the end of their connections"
            fix = "They are given up. Look for faults of the device or its driver (`dmesg`)."
            text = message(f"Session.close: transport {self._chosen!r}", got=got, wanted="none", fix=fix)
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _close_at_exit(self) -> None:
        if os.getpid() == self._pid:  # a forked child has none of the threads
            self.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session(number={self.number}, rank={self.job.rank} of {len(self.job.addresses)}, {self._chosen})"

    # ---- How processes come together

    def _hello(self) -> _blob.Hello:
        processes = len(self.job.addresses)
        return _blob.Hello(
            self.job.rank, processes, self.number, len(self._memory), self._holds, self._can, self._wants, self._chosen
        )

    def _start(self, until: float) -> None:
        chosen, first = self._meeting.agree(self._hello(), until)
        module = _kinds.kind(chosen)
        try:
            self._native = self._library.TransportSession(
                chosen, self.job.rank, len(self.job.addresses), self._memory, self._options
            )
        except RuntimeError as e:
            raise TransportError(str(e)) from None
        self._exposer = module.expose(self._native, self._memory, self._options)
        self._chosen = chosen
        self._native.add(self.number)
        self._links = Links(self._native, self._peers, self._open)
        while waits := {p: why for p, why in self._links.waiting().items() if p in first}:
            if time.monotonic() > until:
                self._meeting.raise_missing(waits)
            self._links.wait_for_change(RETRY)

    def _ask(self, peer: int) -> _blob.Hello:
        """What a peer says of itself. Raises as `_dial`."""
        channel, hello = self._dial(peer)
        channel.close()
        channel.release()
        return hello

    def _dial(self, peer: int) -> tuple[_control.Channel, _blob.Hello]:
        """A channel to a peer that has said who it is, and fits.

        Raises:
          OSError, EOFError, NotYet: try again. TransportError: do not.
        """
        address = self.job.addresses[peer]
        channel = _control.dial(address, self.job.secret, "process {} at {}:{}".format(peer, *address))
        try:
            channel.send(self._hello())
            return channel, self._fits(_answer(channel, _blob.Hello, self.number), peer)
        except BaseException:
            channel.close()
            channel.release()
            raise

    def _open(self, peer: int) -> _control.Channel:
        """Connects the C++ side to a peer; the channel lasts as long as the peer does. Raises as `_dial`."""
        channel, _ = self._dial(peer)
        try:
            try:
                channel.send(_blob.Open(self.transport, self._native.offer(peer)))
                opened = _answer(channel, _blob.Opened, self.number)
                if len(opened.regions) != len(self._memory):
                    raise _mismatch("regions", peer, len(opened.regions), len(self._memory))
                self._native.connect(peer, opened.blob, opened.regions)
            except RuntimeError as e:
                raise e if isinstance(e, TransportError) else TransportError(str(e)) from None
            return channel
        except BaseException:
            channel.close()
            channel.release()
            raise

    def _fits(self, hello: _blob.Hello, peer: int | None) -> _blob.Hello:
        if peer is None:
            if hello.rank == self.job.rank:
                raise _mismatch("rank", hello.rank, hello.rank, "another than this process's")
        elif hello.rank != peer:
            raise _mismatch("rank", peer, hello.rank, peer)
        for what, got, wanted in (
            ("processes", hello.processes, len(self.job.addresses)),
            ("session", hello.session, self.number),
            ("regions", hello.regions, len(self._memory)),
            *((name, hello.holds.get(name), self._holds.get(name)) for name in sorted({*hello.holds, *self._holds})),
        ):
            if got != wanted:
                raise _mismatch(what, hello.rank, got, wanted)
        return hello

    def _serve(self, channel: _control.Channel, hello: _blob.Hello) -> None:
        """A peer's side of `_dial` and `_open`, then waits for its end; in a thread of its own."""
        try:
            self._fits(hello, None)
        except TransportError as e:
            channel.send(_blob.Refused(str(e)))
            return self._meeting.told(hello.rank)
        channel.send(self._hello())
        self._meeting.told(hello.rank)
        try:
            wish = channel.receive()
        except EOFError:
            return None  # it wanted to know no more
        if not isinstance(wish, _blob.Open):
            return None
        if self._chosen is None:
            return channel.send(_blob.Wait())
        if wish.transport != self._chosen:
            return channel.send(_blob.Refused(str(_mismatch("transport", hello.rank, wish.transport, self._chosen))))
        try:
            with self._inbound_lock:
                if self._closed[1].is_set():
                    return channel.send(_blob.Wait())
                before, self._inbound[hello.rank] = self._inbound.get(hello.rank), channel
                if before is not None:  # it was started again
                    before.close()
                try:
                    blob = self._exposer.accept(hello.rank, wish.offer)
                except TransportError as e:
                    return channel.send(_blob.Refused(str(e)))
                channel.send(_blob.Opened(blob, self._exposer.regions()))
            if self._links is not None:
                self._links.hurry(hello.rank)
            channel.wait_for_end()
        finally:  # a peer that has gone, or was refused, keeps nothing here
            with self._inbound_lock:
                if self._inbound.get(hello.rank) is channel:
                    del self._inbound[hello.rank]
                    self._exposer.drop(hello.rank)
        return None


_FIXES = {
    "refused": "Read within `region_bytes(peer, region)`.",
    "timeout": "The peer counts as lost until it is connected again; a larger deadline= waits longer.",
    "lost": "It is connected again when it is back; see `alive`.",
    "closed": "Make a new session.",
}


def _answer(channel: _control.Channel, kind: type, number: int) -> Any:
    answer = channel.receive()
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, _blob.Wait):
        raise NotYet(f"it has not got so far: it has no session {number}, or is still making it")
    why = answer.why if isinstance(answer, _blob.Refused) else f"{type(answer).__name__} instead of {kind.__name__}"
    raise TransportError(f"peer refuses: {why}")


def _mismatch(what: str, peer: int, got: object, wanted: object) -> TransportError:
    fix = "Run the same program in every process of the job."
    return transport_error(f"{what} of process {peer}", got=got, wanted=wanted, fix=fix)
