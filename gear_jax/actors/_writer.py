"""The actor's side of a ring. No jax in here.

Shapes: T steps of a slot, E rows that an actor asks about at once.
"""

import os
import types
import weakref
from typing import Any

import numpy as np

from gear_jax import _env
from gear_jax._errors import type_error, value_error
from gear_jax.actors import _columns, _wait
from gear_jax.actors._errors import RingBusyError, RingClosedError, RingTimeoutError, core, error, translated
from gear_jax.actors._ring import Ring, open_ring

# What jax makes of 64-bit arrays where x64 is off; for Python's own numbers, which kinds of dtypes take them.
_NARROWED = {"float32": "float64", "int32": "int64", "uint32": "uint64", "complex64": "complex128"}
_TAKEN = {bool: "b", int: "iufcV", float: "fcV", complex: "c"}
HAS_PRIORITY, HAS_VERSION = 1, 2  # flags of a commit (ffi/actors/ring.h)


class Writer:
    """Writes trajectories into a ring, step by step, where the learner reads them. One thread at a time.

    `append` steps, then `commit`; or take the slot's arrays with `begin`, write them in place, and `commit(length)`.
    What is not committed is nobody's: if the process dies, only that is lost. A context manager.

    Args:
      ring: a `Ring`, its name or its path; None: the one that `ActorPool` has told this process of (`GEAR_JAX_RING`).
      actor: the lane to take; None: that of `GEAR_JAX_ACTOR`, else any that is free.
      timeout: seconds that a call waits (for the learner to free a slot, for an answer) unless it says otherwise.

    Attributes:
      actor: the number of the lane.
      length: steps appended since the last commit.

    Raises:
      RingMissingError, RingForeignError: if there is no such ring. RingBusyError: if living processes, stopped ones
        included, hold the lane, or all of them. RingClosedError: if the learner has closed it.
    """

    def __init__(self, ring: Ring | str | None = None, actor: int | None = None, timeout: float = 30.0):
        _wait.deadline("timeout", timeout)
        if ring is None:
            ring = _env.ring()
            if ring is None:
                fix = "Pass ring=ingest.ring.name, or start the process with an ActorPool, which sets GEAR_JAX_RING."
                raise value_error("ring", got="None, and no GEAR_JAX_RING", wanted="a ring's name", fix=fix)
            actor = _env.actor() if actor is None else actor
        self.ring = ring if isinstance(ring, Ring) else open_ring(ring)
        self.timeout = timeout
        self._check_closed(self.ring.closed)
        with translated():
            self._actor = core().Actor(self.ring.held, -1 if actor is None else actor)
        self.actor: int = self._actor.lane
        self.length = 0
        self._slot: int | None = None
        self._views: list[np.ndarray] = []
        self._steps = core().Steps(self.ring.names, self.ring.columns)
        self._left, self._process = False, os.getpid()
        _writers.add(self)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type | None, error: Any, trace: types.TracebackType | None) -> None:
        self.close()

    def begin(self, timeout: float | None = None) -> Any:
        """Opens a slot, unless one is open, and returns its arrays, to be written in place.

        Args:
          timeout: seconds to wait for a free slot: until then the learner has not taken what was committed.

        Returns:
          `[T, *shape]` for each column, in nested dicts by the columns' paths (the array itself if the table has one
          column without a name). They hold what was there before. After `commit` they are the learner's: keep none.

        Raises:
          RingTimeoutError: if the deadline passes. RingClosedError: if the learner has closed the ring.
        """
        self._open(timeout)
        return _columns.unflatten(self.ring.names, self._views)

    def append(self, step: Any, timeout: float | None = None) -> int:
        """Writes one step behind the last one.

        Args:
          step: a tree like the table's columns, leaves `[*shape]` of their dtypes. Python numbers fit any dtype of
            their kind, and 64-bit arrays fit 32-bit columns, as they do in jax where x64 is off.
          timeout: as in `begin`.

        Returns:
          The steps that the trajectory now has.

        Raises:
          TypeError, ValueError: for other columns, shapes or dtypes, and for a step beyond T; the step then does not
            count, and what was appended before is still there.
          RingTimeoutError, RingClosedError: as `begin`.
        """
        if self._slot is None:
            self._open(timeout)
        t = self.length
        if t == self.ring.steps:
            raise value_error(
                "step", got=f"step {t} of a trajectory", wanted=f"at most T = {self.ring.steps} steps",
                fix="Commit, and go on in a new trajectory; or raise TableSpec.trajectory_length.",
            )  # fmt: skip
        if not self._steps.write(step, self._slot, t):  # not nested dicts of arrays that fit at once
            self._append_checked(t, step)
        self.length = t = t + 1
        return t

    def _append_checked(self, t: int, step: Any) -> None:
        leaves = self._leaves("step", step, self.ring.names)
        for name, view, x in zip(self.ring.names, self._views, leaves, strict=True):
            view[t] = _checked("step", name, x, view.shape[1:], view.dtype)

    def commit(
        self, length: int | None = None, priority: float | None = None, version: int | None = None, checksum: int = 0
    ) -> int:
        """Gives the trajectory to the learner, at once and whole.

        Args:
          length: its steps, 1 to T; None: those that were appended.
          priority: as in `Replay.add`; None: the largest that the table has seen.
          version: any 64-bit number, of the policy that acted, say; `Ingest.last.version` has it. None: 0; refused
            where the learner's table has `max_staleness`, which needs it.
          checksum: any unsigned 64-bit number; `Ingest.last.checksum` has it.

        Returns:
          The number of the commit: 1 for the first one on the ring, over all actors.

        Raises:
          ValueError, TypeError: if there is nothing to commit, or more than T steps, or for what is no such number; the
            slot stays open.
          RingClosedError: if the learner has closed the ring.
        """
        length = self.length if length is None else length
        if self._slot is None or not 1 <= length <= self.ring.steps:
            self._check_process()
            got = f"{length} steps" if self._slot is not None else "no open trajectory"
            fix = "Append steps first, or write them into begin()'s arrays and pass length."
            raise value_error("commit: length", got=got, wanted=f"1 to T = {self.ring.steps} steps", fix=fix)
        self._check_closed(self.ring.closed)
        if version is None and self.ring.held.wants_versions:
            raise value_error(
                "commit: version", got=None, wanted="the version of the policy that acted: the learner's table has "
                "max_staleness", fix="Write commit(version=...), or make the table without max_staleness.",
            )  # fmt: skip
        flags = (0 if priority is None else HAS_PRIORITY) | (0 if version is None else HAS_VERSION)
        try:
            value = 0.0 if priority is None else float(priority)
            number = self._actor.commit(self._slot, length, flags, value, version or 0, checksum)
        except (TypeError, ValueError):
            got = f"length {length!r}, priority {priority!r}, version {version!r}, checksum {checksum!r}"
            wanted = "an integer, a number or None, an int64, a uint64"
            raise type_error("commit", got=got, wanted=wanted, fix="Convert them; the slot is still open.") from None
        self._slot, self.length, self._views = None, 0, []
        return number

    def abandon(self) -> None:
        """Drops the steps since the last commit."""
        self._check_process()
        if self._slot is not None:
            self._actor.abandon(self._slot)
        self._slot, self.length, self._views = None, 0, []

    def act(self, observation: Any, timeout: float | None = None) -> Any:
        """Asks the learner, and waits for its answer: observations go out, actions come back.

        Args:
          observation: a tree like the ring's `ask`, leaves `[*shape]`, or `[k, *shape]` with k <= E rows.
          timeout: seconds to wait. When they have passed the question is withdrawn.

        Returns:
          The answer, in nested dicts by the paths of `answer` (the array itself where it has no name): arrays of one's
          own, `[*shape]` or `[k, *shape]` as asked.

        Raises:
          TypeError, ValueError: for what does not fit `ask`, or if the ring has none.
          RingTimeoutError: if the deadline passes. RingClosedError: if the learner has closed the ring.
        """
        self._check_open()
        if not self.ring.rows:
            fix = "Make the ring with ask= and answer=."
            raise value_error("act", got="a ring without ask", wanted="one that answers", fix=fix)
        until = _wait.deadline("timeout", self.timeout if timeout is None else timeout)
        names = list(self.ring.ask)
        leaves = [np.asarray(x) for x in self._leaves("observation", observation, names)]
        arrays = [self.ring.ask[name] for name in names]
        single = leaves[0].ndim == arrays[0].ndim - 2
        rows = 1 if single or not leaves[0].ndim else leaves[0].shape[0]
        if not 1 <= rows <= self.ring.rows:
            fix = "Ask in parts, or make the ring with more rows."
            raise value_error("observation", got=f"{rows} rows", wanted=f"1 to {self.ring.rows}", fix=fix)
        for name, array, x in zip(names, arrays, leaves, strict=True):
            shape = array.shape[2:] if single else (rows, *array.shape[2:])
            array[self.actor, :rows] = _checked("observation", name, x, shape, array.dtype)
        asked = self._actor.ask(rows, until)
        got = _wait.in_slices(lambda end: self._actor.await_answer(asked, end), until, lambda got: got != -1)
        self._check_closed(got == -2)
        if got == -1:
            raise self._timeout("act", "an answer")
        kept = [a[self.actor, 0].copy() if single else a[self.actor, :rows].copy() for a in self.ring.answer.values()]
        return _columns.unflatten(list(self.ring.answer), kept)

    def close(self) -> None:
        """Gives the lane up; an open trajectory is dropped. What was committed stays."""
        if not self._left:
            self._left = True
            self._actor.leave()
            self._slot, self.length, self._views = None, 0, []

    def _open(self, timeout: float | None) -> None:
        if self._slot is not None:
            return
        self._check_open()
        slot = self._actor.begin(0)
        if slot < 0:
            until = _wait.deadline("timeout", self.timeout if timeout is None else timeout)
            slot = _wait.in_slices(self._actor.begin, until, lambda got: got != -1)
            self._check_closed(slot == -2)
            if slot == -1:
                raise self._timeout("begin", f"one of the actor's {self.ring.slots} slots to be free")
        self._slot, self.length = slot, 0
        self._views = [column[slot] for column in self.ring.columns]

    def _leaves(self, what: str, tree: Any, names: list[str]) -> list[Any]:
        if type(tree) is dict and len(tree) == len(names):  # the usual case, at the price of no walk
            leaves = [tree.get(name, self) for name in names]
            if not any(x is self or isinstance(x, (dict, list, tuple)) for x in leaves):
                return leaves
        found = dict(_columns.flatten(what, tree))
        if list(found) != names:
            missing, unknown = sorted(set(names) - set(found)), sorted(set(found) - set(names))
            raise value_error(
                f"{what}: columns", got=f"{list(found)} (missing {missing}, unknown {unknown})", wanted=f"{names}",
                fix="Give a tree like TableSpec.columns." if what == "step" else "Give a tree like `ask`.",
            )  # fmt: skip
        return list(found.values())

    def _check_open(self) -> None:
        if self._left:
            raise error(RingClosedError, "Writer", got="a closed one", wanted="an open one", fix="Make a new Writer.")
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._process:  # two would write to the same slots
            got, wanted = "a call in a forked process", f"one of process {self._process}, which has the lane"
            raise error(RingBusyError, "Writer", got=got, wanted=wanted, fix="Make the Writer after the fork.")

    def _check_closed(self, closed: bool) -> None:
        if closed:
            got = f"ring {self.ring.name!r}, which its learner has closed"
            raise error(RingClosedError, "Writer", got=got, wanted="an open one", fix="End the actor.")

    def _timeout(self, what: str, wanted: str) -> Exception:
        pid, life = self.ring.held.learner()
        learner = "no learner" if life == "free" else f"a learner (process {pid}) that is {life}"
        self.ring.check_whole()
        return error(
            RingTimeoutError, f"{what}: timeout", got=f"{learner} on ring {self.ring.name!r}", wanted=wanted,
            fix="Look after the learner, give the ring more slots, or raise the timeout.",
        )  # fmt: skip


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def _forget_slots() -> None:
    # In a child that was forked: no call there finds an open slot, so that each looks whose writer this is.
    for writer in list(_writers):
        writer._slot, writer.length, writer._views = None, 0, []


os.register_at_fork(after_in_child=_forget_slots)


def _checked(what: str, name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    kinds = _TAKEN.get(type(x))
    if kinds is not None:
        fits, got = dtype.kind in kinds, type(x).__name__
        x_shape: tuple[int, ...] = ()
    else:
        x = np.asarray(x)
        fits, got = x.dtype.name in (dtype.name, _NARROWED.get(dtype.name)), x.dtype.name
        x_shape = x.shape
    if x_shape != shape:
        raise value_error(f"{what}[{name!r}]", got=f"shape {x_shape}", wanted=f"{shape}", fix="Reshape it.")
    if not fits:
        raise type_error(f"{what}[{name!r}]", got=got, wanted=str(dtype), fix=f"Pass it .astype({str(dtype)!r}).")
    return x
