"""Actors on another machine than the learner: the ring there, and what takes it over. No jax in here."""

import threading
import time
import types
import weakref
from typing import Any

import numpy as np

from gear_jax._errors import type_error, value_error
from gear_jax.actors import _manifest, _serve, _wait
from gear_jax.actors._errors import RingClosedError, core, error, translated
from gear_jax.actors._ring import Ring, open_ring
from gear_jax.transport import Job, Session, TransportError

SESSION = 1 << 30
"""The number of the session between relays and their learner, apart from those of replays (`replay._link`), which count
from 2^20 on: ops find a session of this process by its number alone."""

_RECLAIM_SECONDS = 0.25
_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between two looks at what the learner acknowledged


class Relay:
    """Shows a ring on this machine to the learner's, which reads committed trajectories by one-sided reads.

    Actors of this machine write to the ring by `Writer` (or an `ActorPool`), as they would beside the learner. The
    relay takes the learner's place here; `RemoteActors`, there, moves the trajectories into the learner's ring, in the
    order of their commits, and says what it has: only then are their slots free again. While it does not, writers wait,
    and memory does not grow. `Writer.act` has nobody to answer it here: such actors bring their policy with them.

    A thread does the work. A relay that is started again, with the ring's name and the same job, goes on where the last
    one was.

    Args:
      ring: a `Ring` (see `make_ring`; no `ask`) or its name, with the columns and T of the learner's table.
      job: this process, the learner's and the other relays.
      transport, deadline, options: as for `gear_jax.transport.Session`; the same on all machines.
      learner: the learner's rank in the job.
      start_timeout: seconds to wait for the learner.

    Raises:
      TypeError, ValueError: for what is no ring, or one with `ask`.
      RingBusyError: if the ring has a learner, or a relay, that lives. TransportError: as `Session`.
    """

    def __init__(
        self, ring: Ring | str, job: Job, transport: str | None = None, *, learner: int = 0, deadline: float = 2.0,
        start_timeout: float = 60.0, **options: Any,
    ):  # fmt: skip
        self.ring = open_ring(ring) if isinstance(ring, str) else ring
        if not isinstance(self.ring, Ring):
            raise type_error("ring", got=type(ring).__name__, wanted="a Ring or its name", fix="See make_ring.")
        if self.ring.rows:
            fix = "Make it without ask=, and give these actors their own policy."
            raise value_error("ring", got="one with ask", wanted="one without: nobody answers here", fix=fix)
        with translated():
            self._learner = core().Learner(self.ring.held)
        self._manifest = _manifest.Manifest(self.ring)
        self._leave = weakref.finalize(self, self._learner.leave)
        self._publish()
        regions = [self.ring.held.bytes(), self._manifest.memory, _manifest.describe(self.ring)]
        try:
            self._session = Session(
                job,
                regions,
                transport,
                deadline=deadline,
                start_timeout=start_timeout,
                number=SESSION,
                peers=[learner],
                **options,
            )
        except BaseException:
            self._leave()
            raise
        self._rank, self._from = job.rank, learner
        self._stop, self._problem = threading.Event(), None
        self._thread = threading.Thread(target=self._run, name="gear_jax relay", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, kind: type | None, error: Any, trace: types.TracebackType | None) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """`Ring.report` (what the learner has acknowledged is `consumed`), the number of the last commit that was
        `published`, and the session's counters."""
        self.check()
        return {
            **self.ring.report(), "published": self._manifest.published,
            **self._session.counters(),
        }  # fmt: skip

    def check(self) -> None:
        """Raises what has ended the relay's thread, if anything has."""
        if self._problem is not None:
            raise self._problem

    def wait(self, timeout: float) -> bool:
        """Waits until the learner has all that was committed; whether it has.

        Raises:
          What `check` raises.
        """
        until = _wait.deadline("timeout", timeout)
        while self.ring.held.consumed < self.ring.held.committed:
            self.check()
            if time.monotonic_ns() >= until or self._stop.wait(_SHORTEST):
                break
        return self.ring.held.consumed >= self.ring.held.committed

    def close(self) -> None:
        """Stops. The ring stays, and its actors go on until their slots are full; see `Ring.unlink`."""
        self._stop.set()
        self._thread.join()
        self._session.close()
        self._leave()

    def _run(self) -> None:
        pause, rate = _SHORTEST, _serve.Rate(_RECLAIM_SECONDS)
        try:
            while not self._stop.wait(pause):
                if self.ring.closed:
                    fix = "Make a new ring."
                    raise error(RingClosedError, "relay", got="a ring that was closed", wanted="an open one", fix=fix)
                if rate.due():
                    self.ring.check_whole()
                    self._learner.reclaim()
                busy = self._publish() + self._take_acknowledgements()
                # Who waits for slots gets them soon; where nothing happens, the others' machines are left in peace.
                pause = _SHORTEST if busy else min(2 * pause, _LONGEST)
        except Exception as e:
            self._problem = e

    def _publish(self) -> int:
        """Enters what was committed into the manifest; how many there were."""
        done, committed = self._manifest.published, self.ring.held.committed
        if committed <= done:
            return 0
        with translated():
            fields = self._learner.collect(2**31 - 1).fields()
        new = {name: x[fields["number"] > done] for name, x in fields.items()}
        self._manifest.publish(new)
        return len(new["number"])

    def _take_acknowledgements(self) -> int:
        """Frees the slots of what the learner has; how many there were."""
        consumed, published = self._manifest.consumed, self._manifest.published
        if consumed == published or not self._session.alive[self._from]:
            return 0
        size = _manifest.ACKNOWLEDGED.itemsize
        try:
            raw = self._session.read(self._from, 0, self._rank * size, size)
        except TransportError:
            return 0  # the session connects again
        number = min(_manifest.acknowledgement(raw, self._manifest.ring), published)
        count = number - consumed
        if count > 0:
            self._manifest.consumed = number
            with translated():
                self._learner.consume(self._learner.collect(count))
        return max(count, 0)


def acknowledgements(processes: int) -> np.ndarray:
    """What the learner's host exposes: for each process of the job what it has of it."""
    return np.zeros(processes, _manifest.ACKNOWLEDGED)
