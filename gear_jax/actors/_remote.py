"""The learner's end of relays: trajectories from other machines into the learner's ring. No jax in here."""

import threading
import time
import types
from typing import Any

import numpy as np

from gear_jax._errors import value_error
from gear_jax._numbers import is_integer
from gear_jax.actors import _manifest
from gear_jax.actors._errors import RingError, RingForeignError, core, error, translated
from gear_jax.actors._relay import SESSION, acknowledgements
from gear_jax.actors._ring import Ring, open_ring
from gear_jax.transport import Job, Session

_SHORTEST, _LONGEST = 0.0005, 0.01  # seconds between two looks at the relays


class _Source:
    """What is known of one relay."""

    def __init__(self, rank: int):
        self.rank = rank
        self.ring, self.taken = 0, 0  # which it is, and the number of the last commit that is here
        self.offsets: dict[str, int] = {}
        self.slots = 0
        self.problem: RingError | None = None


class RemoteActors:
    """Moves what actors of other machines commit into the learner's ring, where `Ingest.drain` finds it.

    Each of those machines runs a `Relay`. A thread reads their manifests, and then the trajectories, by one-sided reads
    into slots of the ring, in the order in which they were committed there, many at a time; it says what it has once it
    is committed here. Every trajectory arrives once, as long as this process lives; after it has died, those that it
    had committed and not yet acknowledged arrive again. `Drained.actor` is a lane of this object, not the other
    machine's.

    A relay that is lost costs nobody else anything; when it is back, its trajectories are.

    Args:
      ring: the learner's `Ring`, `ingest.ring`, or its name.
      job: the learner's process and the relays.
      lanes: lanes of the ring to take: the most trajectories under way at a time. Make the ring with so many more
        actors.
      transport, deadline, start_timeout, options: as for `gear_jax.transport.Session`.

    Raises:
      RingBusyError: if the ring has not so many free lanes. TransportError: as `Session`.
    """

    def __init__(
        self, ring: Ring | str, job: Job, lanes: int = 4, transport: str | None = None, *, deadline: float = 2.0,
        start_timeout: float = 60.0, **options: Any,
    ):  # fmt: skip
        if not is_integer(lanes) or lanes < 1:
            raise value_error("lanes", got=repr(lanes), wanted="an integer, 1 or more", fix="Leave it out.")
        self.ring = open_ring(ring) if isinstance(ring, str) else ring
        self._actors: list[Any] = []
        self._session: Session | None = None
        try:
            with translated():
                for _ in range(lanes):
                    self._actors.append(core().Actor(self.ring.held, -1))
            self._acks = acknowledgements(len(job.addresses))
            none = np.zeros(0, np.uint8)
            self._session = Session(
                job, [self._acks, none, none], transport, deadline=deadline, start_timeout=start_timeout,
                number=SESSION, **options,
            )  # fmt: skip
        except BaseException:
            self._release()
            raise
        self._sources = [_Source(i) for i in range(len(job.addresses)) if i != job.rank]
        self._next = 0  # the process whose turn it is to be first, so that none waits for ever where slots are few
        self._counts = {"moved": 0, "moved_steps": 0, "reads_failed": 0, "full": 0}
        self._stop, self._problem = threading.Event(), None
        self._thread = threading.Thread(target=self._run, name="gear_jax remote actors", daemon=True)
        self._thread.start()

    def __enter__(self) -> "RemoteActors":
        return self

    def __exit__(self, kind: type | None, error: Any, trace: types.TracebackType | None) -> None:
        self.close()

    def check(self) -> None:
        """Raises what has ended the thread, or a RingForeignError if a relay's ring is not like the learner's."""
        for problem in (self._problem, *(source.problem for source in self._sources)):
            if problem is not None:
                raise problem

    def stats(self) -> dict[str, Any]:
        """moved (trajectories), moved_steps, reads_failed (of trajectories, which are read again), full (how often
        there was no free slot), relays (processes that are there), and the session's counters; numbers of Python.
        """
        self.check()
        session = self._session
        assert session is not None
        relays = int(sum(session.alive[source.rank] for source in self._sources))
        return {**self._counts, "relays": relays, **session.counters()}

    def close(self) -> None:
        """Stops, and gives the lanes up. What the relays still have stays with them."""
        self._stop.set()
        self._thread.join()
        self._release()

    def _release(self) -> None:
        if self._session is not None:
            self._session.close()
        for actor in self._actors:
            actor.leave()

    def _run(self) -> None:
        pause = _SHORTEST
        try:
            while not self._stop.wait(pause) and not self.ring.closed:
                moved = self._turn()
                pause = _SHORTEST if moved else min(2 * pause, _LONGEST)
        except Exception as e:
            self._problem = e

    def _turn(self) -> int:
        """One look at all relays; how many trajectories it moved."""
        session = self._session
        assert session is not None
        alive = session.alive
        there = [s for s in self._sources if alive[s.rank] and session.region_bytes(s.rank, 1)]
        there.sort(key=lambda s: (s.rank - self._next) % len(self._acks))
        raw = [np.zeros(_manifest.HEADER.itemsize, np.uint8) for _ in there]
        states = session.read_into([(s.rank, 1, 0, x) for s, x in zip(there, raw, strict=True)])
        moved = 0
        for source, header, state in zip(there, raw, states, strict=True):
            if state != "ok":
                continue
            try:
                took = self._take(source, header)
                source.problem = None  # it may be another relay by now
                if took:
                    self._next, moved = source.rank + 1, moved + took
            except RingError as e:  # of this relay; the others go on
                source.problem = e
        return moved

    def _take(self, source: _Source, raw: np.ndarray) -> int:
        session = self._session
        assert session is not None
        who = f"relay {source.rank}"
        header = _manifest.read_header(raw, session.region_bytes(source.rank, 1), who)
        if header is None:
            return 0
        if int(header["ring"]) != source.ring and not self._meet(source, int(header["ring"]), who):
            return 0
        capacity, published = int(header["capacity"]), int(header["published"])
        first = max(source.taken, int(header["consumed"])) + 1
        last = min(published, first + len(self._actors) - 1)
        if last < first:
            return 0
        parts = [(at, np.zeros(n, _manifest.ENTRY)) for at, n in _manifest.places(first, last, capacity)]
        states = session.read_into([(source.rank, 1, at, x.view(np.uint8)) for at, x in parts])
        if any(state != "ok" for state in states):
            return 0
        rows = _manifest.good(np.concatenate([x for _, x in parts]), first)
        if not len(rows):
            return 0
        if not ((rows["length"] > 0) & (rows["length"] <= self.ring.steps) & (rows["slot"] < source.slots)).all():
            got = f"trajectories of {rows['length'].min()} to {rows['length'].max()} steps in slot {rows['slot'].max()}"
            wanted = f"1 to {self.ring.steps} steps, slots below {source.slots}"
            raise error(RingForeignError, who, got=got, wanted=wanted, fix="Start the relay anew.")
        return self._move(source, rows)

    def _meet(self, source: _Source, ring: int, who: str) -> bool:
        """Learns what a relay's ring looks like, when it is there for the first time or again."""
        session = self._session
        assert session is not None
        text = np.zeros(min(session.region_bytes(source.rank, 2), _manifest.MOST_JSON), np.uint8)
        if session.read_into([(source.rank, 2, 0, text)]) != ["ok"]:
            return False
        region = session.region_bytes(source.rank, 0)
        source.slots, source.offsets = _manifest.offsets(text.tobytes(), self.ring, who, region)
        source.ring, source.taken = ring, 0
        return True

    def _still(self, source: _Source, first: int) -> bool:
        """Whether the slots of commits from `first` on have not become others' while they were read: an acknowledgement
        to a learner before this one may only now have reached the relay.
        """
        session = self._session
        assert session is not None
        raw = np.zeros(_manifest.HEADER.itemsize, np.uint8)
        if session.read_into([(source.rank, 1, 0, raw)]) != ["ok"]:
            return False
        header = raw.view(_manifest.HEADER)[0]
        return int(header["ring"]) == source.ring and int(header["consumed"]) < first

    def _move(self, source: _Source, rows: np.ndarray) -> int:
        """Reads trajectories into free slots and commits them; how many."""
        session = self._session
        assert session is not None
        now, open_slots, pieces, of = time.monotonic_ns(), [], [], []
        for actor in self._actors:
            if len(open_slots) == len(rows):
                break
            slot = actor.begin(now)
            if slot >= 0:
                open_slots.append((actor, slot))
        if len(open_slots) < len(rows):
            self._counts["full"] += 1
        rows = rows[: len(open_slots)]
        for i, (row, (_, slot)) in enumerate(zip(rows, open_slots, strict=True)):
            length = int(row["length"])
            for name, column in zip(self.ring.names, self.ring.columns, strict=True):
                step = column[0, 0].nbytes
                at = source.offsets[name] + int(row["slot"]) * self.ring.steps * step
                pieces.append((source.rank, 0, at, column[slot, :length].reshape(-1).view(np.uint8)))
                of.append(i)
        states = session.read_into(pieces)
        failed = min([len(rows), *(i for i, state in zip(of, states, strict=True) if state != "ok")])
        if failed and not self._still(source, int(rows["number"][0])):
            failed = 0
        for row, (actor, slot) in zip(rows[:failed], open_slots, strict=False):
            actor.commit(
                slot, int(row["length"]), int(row["flags"]), float(row["priority"]), int(row["version"]),
                int(row["checksum"]),
            )  # fmt: skip
            source.taken = int(row["number"])
            self._counts["moved_steps"] += int(row["length"])
        for actor, slot in open_slots[failed:]:
            actor.abandon(slot)
        self._counts["moved"] += failed
        self._counts["reads_failed"] += len(rows) - failed
        self._acks[source.rank] = _manifest.acknowledged(source.ring, source.taken)
        return failed
