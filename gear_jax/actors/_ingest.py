"""The learner's side of a ring: what actors committed goes into the table.

Shapes: R slots of the ring, n trajectories of a drain, A of the call that adds them (n and padding), T steps.
"""

import contextlib
import dataclasses
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from gear_jax._errors import type_error, value_error
from gear_jax._numbers import is_integer
from gear_jax.actors import _limited, _match, _ring, _serve, _views, _wait
from gear_jax.actors._errors import RingClosedError, RingForeignError, RingMissingError, core, error, translated
from gear_jax.actors._limiter import RateLimiter
from gear_jax.actors._ring import Ring, open_ring
from gear_jax.actors._rows import bucket, places
from gear_jax.actors._writer import HAS_PRIORITY, HAS_VERSION
from gear_jax.replay import Handle, Replay, ReplayState, _statistics

_RECLAIM_SECONDS = 0.25


@dataclasses.dataclass(frozen=True)
class Drained:
    """The trajectories of a drain, in the order of their commits. NumPy arrays `[n]`.

    Attributes:
      number: `int64`, of the commit: 1, 2, ... over all actors, without a gap.
      actor: `int32`, the lane it came from.
      sequence: `int64`, which of its writer's trajectories it is: 0, 1, ...
      length: `int32`, its steps.
      priority: `float32`, as committed; meaningless where `has_priority` is False.
      has_priority: `bool`.
      version: `int64`, as committed; 0 where `has_version`, `bool`, is False.
      checksum: `uint64`, as committed.
      slot: `int32`, of the ring; `Ingest.ring.columns[i][slot]` is valid only inside `admit`.
      admitted: `bool`, whether it was added.
      handles: of the trajectories in the table (slot -1 where there is none); None before they are added.
    """

    number: np.ndarray
    actor: np.ndarray
    sequence: np.ndarray
    length: np.ndarray
    priority: np.ndarray
    has_priority: np.ndarray
    version: np.ndarray
    has_version: np.ndarray
    checksum: np.ndarray
    slot: np.ndarray
    admitted: np.ndarray
    handles: Handle | None = None


class Ingest:
    """Takes committed trajectories out of a ring into a table: the one learner of the ring. A context manager.

    A call of `drain` adds all that has been committed by one `Replay.add`, which reads the ring's memory as it is: each
    trajectory's bytes are copied once, from the actor's slot to the table's. The slots are free again after that. For a
    table on a GPU the ring is page-locked, through CuPy, and the GPU reads it where it is.

    If the learner dies, what was committed is still in the ring, and its actors wait. A new one with the same `name`
    goes on from the last drain that was complete; the table is what its checkpoint says.

    Args:
      replay: the table. Without a mesh; otherwise see `copy`.
      ring: a `Ring` or its name; None: the ring of the other arguments.
      actors, slots, ask, answer, rows, directory: as in `make_ring`, for a ring of this table.
      name: as in `make_ring`. If there is a ring of the name, it is taken, provided that it was made for the same
        columns, T, actors and slots, and that its learner is dead.
      copy: pick the trajectories out of the ring with NumPy, into new arrays that are then given to `add`. One more
        copy, on a GPU by way of its own memory; needed over a mesh, and on a GPU where the ring cannot be page-locked.
      limiter: of this table. `drain` then takes no more out of the ring than it lets in, and the actors wait once
        their slots are full; `await_sample` waits for it. None: all that is committed comes in.

    One thread may `drain` while another one calls `serve`.

    Attributes:
      ring: the `Ring`; actors need `ring.name`.
      last: the `Drained` of the last drain that found anything, or None.

    Raises:
      TypeError, ValueError: for arguments that do not fit; for a table over a mesh without `copy`.
      ImportError, MemoryError, RuntimeError, TypeError: on a GPU without `copy`, if CuPy is not there, if the ring's
        memory cannot be page-locked, and for columns of a dtype that CuPy does not have.
      RingForeignError: for a ring of other columns. RingBusyError: if the ring has a living learner.
      RingClosedError: if its learner has closed it. RingSpaceError, RingMissingError: as `make_ring`, `open_ring`.
    """

    def __init__(
        self, replay: Replay, ring: Ring | str | None = None, *, actors: int | None = None, slots: int = 4,
        name: str | None = None, ask: Any = None, answer: Any = None, rows: int = 1, copy: bool = False,
        directory: str = _ring.DIRECTORY, limiter: RateLimiter | None = None,
    ):  # fmt: skip
        if not isinstance(replay, Replay):
            fix = "Pass what gear_jax.make_replay returned."
            raise type_error("replay", got=type(replay).__name__, wanted="a Replay", fix=fix)
        self._replay, self._copy, self.limiter = replay, copy, limiter
        if limiter is not None:
            _limited.check(limiter, replay)
        if not copy:
            _views.check_place(replay)
        new = False
        if ring is None:
            ring, new = _own_ring(replay, actors, slots, name, ask, answer, rows, directory)
        self.ring = open_ring(ring, directory) if isinstance(ring, str) else ring
        _match.check_columns(self.ring, replay.config)
        if self.ring.closed:
            fix = "Make another, with another name, or remove it: open_ring(name).unlink()."
            got = f"ring {self.ring.name!r}, which its learner has closed"
            raise error(RingClosedError, "Ingest", got=got, wanted="an open one", fix=fix)
        with translated():
            self._learner = core().Learner(self.ring.held)
        self.ring.held.wants_versions = replay.config.max_staleness is not None
        self._leave = weakref.finalize(self, self._learner.leave)
        self._mapped, self._tree = contextlib.ExitStack(), None
        try:
            if not copy:
                self._mapped, arrays = _views.arrays(self.ring)
                self._tree = replay.config.tree.unflatten([arrays[name] for name in replay.config.names])
        except BaseException:
            self.close(keep=not new)
            raise
        self._rate = _serve.Rate(_RECLAIM_SECONDS)
        names = "drains", "drained", "refused", "steps", "questions", "rows_answered", "held_back"
        self._counts = dict.fromkeys(names, 0)
        self._devices = 1 if replay.placement is None else replay.placement.devices
        self.last: Drained | None = None
        self._observed = False
        self._taking = threading.RLock()  # a thread that serves must not `reclaim` meanwhile

    def __enter__(self) -> "Ingest":
        return self

    def __exit__(self, kind: type | None, error: Any, trace: types.TracebackType | None) -> None:
        self.close()

    @property
    def pending(self) -> int:
        """Trajectories that are committed and not drained."""
        self._check_open()
        return self._learner.pending

    def drain(
        self, state: ReplayState, most: int | None = None, timeout: float = 0.0,
        admit: Callable[[Drained], np.ndarray] | None = None, *, least: int = 1, linger: float = 0.0,
    ) -> tuple[ReplayState, int]:  # fmt: skip
        """Adds what has been committed to the table, by one call of `Replay.add`, and frees its slots.

        Call it outside jit. It returns when the table has been written. It compiles for a few numbers of rows (powers
        of 4 up to R); padding costs no bytes.

        Args:
          state: the last state; consumed, if anything is added, as by `add`.
          most: how many at most, the oldest first; None: all.
          timeout: seconds to wait for the first one; 0 where the limiter lets none in (`await_sample` waits for it).
          admit: called with what is there, before it is added; returns `bool[n]`: the others are dropped (too stale,
            say). It may look at the trajectories in `ring.columns`.
          least: once there is one, how many to wait for, for at most `linger` seconds, 1 to R; no more than `most` and
            the limiter let in. A drain costs the learner some 0.1 ms whatever it brings: where actors want the
            processor too, fewer and larger ones leave them more of it. Half of the slots of the actors that run is a
            good number, and a few milliseconds; not where this thread also serves them.
          linger: see `least`.

        Returns:
          The next state and n, the trajectories taken out of the ring. `last` says more about them.

        Raises:
          TypeError, ValueError: for a traced state, and for arguments out of their range.
          RingForeignError: if somebody else has written to the ring's memory, or cut it short. RingClosedError: after
            `close`. ValueError: for trajectories that lack a version that `max_staleness` needs. What `Replay.add`
            raises. The ring is then as before, so nothing is lost.
        """
        self._check_open()
        if isinstance(state.ticket, Tracer):
            raise type_error("drain: state", got="a traced state", wanted="a concrete one", fix="Call it outside jit.")
        if most is not None and (not is_integer(most) or most < 1):
            raise value_error("most", got=repr(most), wanted="an integer, 1 or more", fix="Leave it out.")
        most = 2**31 - 1 if most is None else int(most)  # the core takes no NumPy number
        until = _wait.deadline("timeout", timeout)
        _wait.deadline("linger", linger)
        least = _wait.least(least, self.ring.actors * self.ring.slots, "slots")
        self._tend()
        if self.limiter is not None:
            # Once at least: a state that was restored holds what the limiter has not seen come in.
            if self._replay.config.limited or not self._observed:
                self.limiter.observe(_statistics.trajectories(state))
            self._observed = True
            most = min(self.limiter.may_insert(), most)
            if not most:
                self._counts["held_back"] += bool(self._learner.pending)
                return state, 0
        if timeout and not self._learner.pending:
            _wait.in_slices(self._learner.await_commit, until, bool)
            self._tend()
        least = min(least, most)
        if linger and least > self._learner.pending > 0:
            until = _wait.deadline("linger", linger)
            _wait.in_slices(lambda end: self._linger(least, end), until, bool)
        with self._taking:
            return self._take(state, most, admit)

    def _linger(self, least: int, until: int) -> bool:
        """Whether `least` trajectories are there by then."""
        over = self._learner.await_commits(least, until)
        self._check_open()
        self._tend()  # a dead actor's slots are of use to nobody
        return over

    def _take(
        self, state: ReplayState, most: int, admit: Callable[[Drained], np.ndarray] | None
    ) -> tuple[ReplayState, int]:
        with translated():
            batch = self._learner.collect(most)
        if not len(batch):
            return state, 0
        found = _drained(batch.fields())
        if admit is not None:
            found = dataclasses.replace(found, admitted=_admitted(admit(found), found))
        _limited.check_versions(self._replay.config, found)
        if self.limiter is not None:
            found = dataclasses.replace(found, admitted=found.admitted & self.limiter.fresh(found.version))
        if found.admitted.any():
            state, handles = self._add(state, found)
            # What the table itself finds too stale gets no slot.
            there = handles.slot >= 0 if self._replay.config.max_staleness is not None else True
            found = dataclasses.replace(found, handles=handles, admitted=found.admitted & there)
        self._learner.consume(batch)
        self.last = found
        if self.limiter is not None:
            self.limiter.insert(int(found.admitted.sum()))
        self._counts["drains"] += 1
        self._counts["drained"] += len(batch)
        self._counts["refused"] += int(len(batch) - found.admitted.sum())
        self._counts["steps"] += int(found.length[found.admitted].sum())
        return state, len(batch)

    def _add(self, state: ReplayState, found: Drained) -> tuple[ReplayState, Handle]:
        n = len(found.slot)
        a = bucket(n, self.ring.actors * self.ring.slots, self._devices)
        # With one partition any rows will do.
        at = places(n, a, self._counts["drains"]) if self._replay.config.partitions > 1 else np.arange(n)
        rows, lengths = np.zeros(a, np.int32), np.zeros(a, np.int32)
        rows[at], lengths[at] = found.slot, np.where(found.admitted, found.length, 0)
        priorities = None
        if found.has_priority.any():
            # The rows that have none get what `add` gives them: the largest so far.
            priorities = np.full(a, np.float32(state.max_priority), np.float32)
            priorities[at] = np.where(found.has_priority, found.priority, priorities[at])
        versions = None
        if self._replay.config.max_staleness is not None:
            versions = np.zeros(a, np.int64)
            versions[at] = found.version
        if self._copy:
            state, handles = self._replay.add(state, self._picked(found, at, a), lengths, priorities, None, versions)
        else:
            state, handles = self._replay.add(state, self._tree, lengths, priorities, rows, versions)
        # The slots are the actors' again when this returns, and programs run when they like: the columns are what has
        # been read out of them.
        handles.slot.copy_to_host_async()  # both beside the rest: a GPU takes as long for one as for a small batch
        handles.generation.copy_to_host_async()
        jax.block_until_ready(state.columns)
        return state, jax.tree.map(lambda x: np.asarray(x)[at], handles)

    def _picked(self, found: Drained, at: np.ndarray, a: int) -> Any:
        """The trajectories in rows of their own: `[A, T, *shape]` for each column, copied once; zeros elsewhere."""
        values = {}
        for name, column in zip(self.ring.names, self.ring.columns, strict=True):
            values[name] = out = np.zeros((a, *column.shape[1:]), column.dtype)
            for row, slot, length in zip(at.tolist(), found.slot.tolist(), found.length.tolist(), strict=True):
                out[row, :length] = column[slot, :length]
        config = self._replay.config
        return config.tree.unflatten([values[name] for name in config.names])

    def serve(self, policy: Callable[[Any], Any], timeout: float = 0.0, *, least: int = 1, linger: float = 0.0) -> int:
        """Answers what actors ask (`Writer.act`), with one call of `policy` for all.

        Args:
          policy: from observations to actions: trees of arrays `[B, *shape]`, in nested dicts by the paths of the
            ring's `ask` and `answer`. It is given NumPy arrays of zeros behind the rows that were asked, so that B is a
            power of two and a jitted policy compiles few times; what it returns for those is dropped.
          timeout: seconds to wait for the first question.
          least: how many actors to wait for then, for at most `linger` seconds; 1 to all that the ring has room for.
          linger: see `least`.

        Returns:
          The rows answered; 0 if nobody asked within `timeout`. Questions whose deadline has passed are left out.

        Raises:
          TypeError, ValueError: for arguments out of their range, and if the answer does not fit; the actors then wait
            on. What `policy` raises.
        """
        self._check_open()
        least = _wait.least(least, self.ring.actors, "actors")
        self._tend()
        rows, actors = _serve.serve(self.ring, self._learner, policy, timeout, least, linger)
        self._counts["questions"] += actors
        self._counts["rows_answered"] += rows
        return rows

    def await_sample(
        self, state: ReplayState, timeout: float = 30.0, policy: Callable[[Any], Any] | None = None
    ) -> tuple[ReplayState, bool]:
        """Drains until the limiter lets a batch be drawn, and counts that batch as drawn.

        Args:
          state: the last state; consumed if anything is added.
          timeout: seconds to wait.
          policy: as in `serve`, called meanwhile: actors that wait for answers commit nothing.

        Returns:
          The next state, and whether a batch may be drawn; False when the time is over.

        Raises:
          ValueError: without a limiter. What `drain` and `serve` raise.
        """
        return _limited.await_sample(self, state, timeout, policy)

    def expire(self, state: ReplayState, version: int) -> ReplayState:
        """`Replay.expire`, and the same version for the limiter, so that nothing staler comes in."""
        if self.limiter is not None:
            self.limiter.advance(version)
        return self._replay.expire(state, version)

    def stats(self) -> dict[str, Any]:
        """`Ring.report`, and what this learner did: drains, drained and refused trajectories, steps, questions and
        rows_answered, drains that the limiter `held_back`; its own `RateLimiter.stats` as `limiter`. Numbers of Python.
        """
        limiter = {} if self.limiter is None else {"limiter": self.limiter.stats()}
        return {**self.ring.report(), **self._counts, **limiter}

    def reclaim(self) -> int:
        """Takes back the lanes and open slots of dead actors, as `drain` and `serve` do; returns how many slots."""
        self._check_open()
        with self._taking, translated():
            return self._learner.reclaim()

    def close(self, keep: bool = False) -> None:
        """Ends the ring: its actors get a `RingClosedError`, and its name goes. What was not drained is dropped.

        Args:
          keep: only leave the ring, so that another learner can take it, as if this one had died.
        """
        if not self._leave.alive:
            return
        if not keep:
            self.ring.held.close()
            self.ring.unlink()
        try:
            self._mapped.close()  # waits for programs that may read them
        finally:
            self._leave()

    def _tend(self) -> None:
        if self._rate.due():
            self.ring.check_whole()
            self.reclaim()

    def _check_open(self) -> None:
        if not self._leave.alive:
            raise error(RingClosedError, "Ingest", got="a closed one", wanted="an open one", fix="Make a new Ingest.")


def _drained(fields: dict[str, np.ndarray]) -> Drained:
    flags, lane = fields.pop("flags"), fields.pop("lane")
    has = {"has_priority": (flags & HAS_PRIORITY) != 0, "has_version": (flags & HAS_VERSION) != 0}
    every: Any = {**fields, **has, "actor": lane, "admitted": np.ones(len(lane), bool)}
    return Drained(**every)


def _admitted(answer: Any, found: Drained) -> np.ndarray:
    answer = np.asarray(answer)
    if answer.shape != found.slot.shape or answer.dtype != bool:
        got, wanted = f"{answer.dtype}{list(answer.shape)}", f"bool[{len(found.slot)}]"
        raise value_error("admit", got=got, wanted=wanted, fix="Return whether each is to be added.")
    return answer


def _own_ring(replay, actors, slots, name, ask, answer, rows, directory) -> tuple[Ring, bool]:
    """The ring of the name, or a new one, and whether it is new."""
    if actors is None:
        fix = "Pass actors=8, the most at a time, or a ring."
        raise value_error("actors", got=None, wanted="an integer, 1 or more", fix=fix)
    config = replay.config
    columns = list(zip(config.names, config.columns, strict=True))
    if name is not None:
        with contextlib.suppress(RingMissingError):
            ring = open_ring(name, directory)
            got = (ring.actors, ring.slots, ring.rows)
            wanted = (actors, slots, 0 if ask is None else rows)
            if got != wanted:
                raise error(
                    RingForeignError, f"ring {name!r}", got=f"actors, slots, rows = {got}", wanted=f"{wanted}",
                    fix="Pass what it was made with, or another name, or remove it: open_ring(name).unlink().",
                )  # fmt: skip
            _match.check_asked(ring, ask, answer)
            return ring, False
    return _ring.create(columns, config.steps, actors, slots, name, ask, answer, rows, directory), True
