"""How the processes of a job find each other when their sessions start."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from gear_jax.transport import _blob, _control, _kinds
from gear_jax.transport._errors import TransportError, transport_error
from gear_jax.transport._job import Job

RETRY = 0.05  # seconds between two looks at a peer that is not ready
_READERS = 32  # peers greeted at a time
_LINGER = 1.0  # seconds that one which cannot start stays for the others


class NotYet(Exception):
    """The peer is there, but not ready."""


class Meeting:
    """Asks the peers what they are, and says what this process is.

    Args:
      job: the processes.
      peers: whom to ask.
      ask: asks one; raises OSError, EOFError, NotYet: try again; TransportError: do not.
      closed: set when this process wants no more.
    """

    def __init__(self, job: Job, peers: Sequence[int], ask: Callable[[int], _blob.Hello], closed: threading.Event):
        self._job, self._peers, self._ask, self._closed = job, peers, ask, closed
        self._known = threading.Event()  # what the job uses: then who is missing now may come later
        self._failed = threading.Event()
        self._told: set[int] = set()

    def agree(self, own: _blob.Hello, until: float) -> tuple[str, list[int]]:
        """The transport that the job uses, and the peers that are there.

        Args:
          own: what this process is.
          until: when to stop waiting for the peers; for none where one of them knows what the job uses.

        Raises:
          TransportError: if a peer is missing; at once, if one does not fit.
        """
        try:
            hellos, missing = self._greet_all(until)
            if self._known.is_set() or not missing:
                said = {own.rank: own, **hellos}
                chosen = _kinds.choose(
                    {i: h.can for i, h in said.items()}, {i: h.wants for i, h in said.items()},
                    {i: h.chosen for i, h in said.items()},
                )  # fmt: skip
                return chosen, list(hellos)
        except TransportError:
            self._linger()
            raise
        self.raise_missing(missing)

    def _greet_all(self, until: float) -> tuple[dict[int, _blob.Hello], dict[int, str]]:
        """What the peers say of themselves, and why the others say nothing."""
        with ThreadPoolExecutor(max(1, min(len(self._peers), _READERS))) as pool:
            greeted = dict(zip(self._peers, pool.map(lambda p: self._greet(p, until), self._peers), strict=True))
        hellos = {peer: got for peer, got in greeted.items() if isinstance(got, _blob.Hello)}
        return hellos, {peer: got for peer, got in greeted.items() if not isinstance(got, _blob.Hello)}

    def _greet(self, peer: int, until: float) -> _blob.Hello | str:
        """What a peer says of itself, or why it says nothing."""
        why = "not asked"
        while not self._failed.is_set():
            try:
                hello = self._ask(peer)
                if hello.chosen is not None:
                    self._known.set()
                return hello
            except TransportError:
                self._failed.set()
                raise
            except (OSError, EOFError, NotYet) as e:
                why = str(e) or type(e).__name__
            if self._known.is_set() or time.monotonic() > until or self._closed.wait(RETRY):
                break
        return why

    def told(self, peer: int) -> None:
        """Notes that a peer has heard from this process what it is, or why it is refused."""
        self._told.add(peer)

    def _linger(self) -> None:
        """Waits a moment, in a process that cannot start, so that each peer hears why by itself instead of finding
        nobody: those that have asked, and those that could not because they have another secret."""
        until = time.monotonic() + _LINGER
        address = self._job.addresses[self._job.rank]
        while len(self._told) + _control.refused(address) < len(self._peers) and time.monotonic() < until:
            if self._closed.wait(RETRY):
                return

    def raise_missing(self, missing: dict[int, str]) -> NoReturn:
        """Raises the TransportError for peers that are not there."""
        addresses = self._job.addresses
        got = ", ".join(f"process {i} at {'{}:{}'.format(*addresses[i])}: {why}" for i, why in missing.items())
        fix = "Start all processes of the job, with one secret; each makes its sessions in the same order."
        raise transport_error("processes of the job", got=got, wanted="all of them", fix=fix)
