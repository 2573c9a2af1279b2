"""Actors in processes of their own. No jax in here."""

import atexit
import contextlib
import dataclasses
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gear_jax
from gear_jax._errors import type_error, value_error
from gear_jax.actors import _wait
from gear_jax.actors._errors import ActorFailedError, error
from gear_jax.actors._ring import Ring, open_ring

_POLL_SECONDS = 0.05
_STEADY_SECONDS = 1.0  # an actor that ran so long is started again at once
_MOST_DELAY = 5.0
_LAST_WORDS = 20_000


@dataclasses.dataclass
class _Member:
    process: subprocess.Popen[bytes]
    words: Any  # the file in which the actor leaves its traceback
    started: float
    starts: int = 1
    again_at: float | None = None


class ActorPool:
    """Starts actors, each a process with a lane of a ring, and ends them. A context manager.

    Every process is new (nothing of this one is forked), so jax may run here, and is not imported there unless the
    target's module does so: keep it out of the module that holds the target.

    Args:
      target: a function of a module, called as `target(writer, *args)` with the process's `Writer`
        (`writer.actor` is its number); or a command, a list of words, whose process finds `GEAR_JAX_RING` and
        `GEAR_JAX_ACTOR` in its environment and calls `Writer()`.
      ring: a `Ring` or its name.
      actors: how many; None: as many as the ring has lanes.
      args: what the function is given beside the writer; pickled.
      restart: how often an actor that ended with an error, or was killed, is started again; True: always. One that
        comes to its end is not.
      environment: variables of the processes, beside those of this one.
      nice: by how much the processes yield the processor to this one (0 to 19). Where actors are as many as the
        processors or more, a learner that does not compete with them samples as fast as if it were alone.
      timeout: that of the processes' `Writer`, in seconds.

    The processes of a function end with this one, however it ends. Those of a command end when `close` is called, when
    this one comes to its end, or when their writer's deadline passes with no learner there.

    Raises:
      TypeError, ValueError: for arguments that do not fit, or that cannot be pickled.
    """

    def __init__(
        self, target: Callable[..., Any] | Sequence[str], ring: Ring | str, actors: int | None = None, *,
        args: Sequence[Any] = (), restart: int | bool = False, environment: Mapping[str, str] | None = None,
        nice: int = 0, timeout: float = 30.0,
    ):  # fmt: skip
        _wait.deadline("timeout", timeout)
        self.ring = ring if isinstance(ring, Ring) else open_ring(ring)
        actors = int(self.ring.actors) if actors is None else actors
        if not 1 <= actors <= self.ring.actors:
            fix = "Make the ring for more actors."
            raise value_error("actors", got=actors, wanted=f"1 to the ring's {self.ring.actors}", fix=fix)
        if not 0 <= nice <= 19:
            raise value_error("nice", got=nice, wanted="0 to 19", fix="Leave it out, or pass nice=10.")
        self.restarts, self._nice = 0, nice
        self._most = float("inf") if restart is True else int(restart)
        self._variables = {**os.environ, **(environment or {}), "GEAR_JAX_RING": self.ring.path}
        self._payload: Any = None
        self._command = None if callable(target) else [str(word) for word in target]
        if callable(target):
            root = str(pathlib.Path(gear_jax.__file__).parent.parent)
            paths = [root, *filter(None, self._variables.get("PYTHONPATH", "").split(os.pathsep))]
            self._variables["PYTHONPATH"] = os.pathsep.join(paths)
            packed = _packed(target, tuple(args), self.ring, timeout)
            self._payload = tempfile.TemporaryFile()
            self._payload.write(packed)
            self._payload.flush()
        elif args:
            raise value_error("args", got=f"{args!r} for a command", wanted="()", fix="Put them into the command.")
        # The processes hold the other end, and end when this one is gone.
        self._lifeline = os.pipe()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._members: list[_Member] = []
        try:
            self._members.extend(self._start(i) for i in range(actors))
        except BaseException:
            self.close(0)
            raise
        self._thread = threading.Thread(target=self._tend, name="gear_jax actors", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __enter__(self) -> "ActorPool":
        return self

    def __exit__(self, kind: type | None, error: Any, trace: types.TracebackType | None) -> None:
        self.close()

    def _start(self, i: int) -> _Member:
        variables = {**self._variables, "GEAR_JAX_ACTOR": str(i)}
        if self._command is not None:
            process = subprocess.Popen(self._command, env=variables, stdin=subprocess.DEVNULL)
            return self._member(process, None)
        words = tempfile.TemporaryFile()
        descriptors = (self._payload.fileno(), self._lifeline[0], words.fileno())
        code = f"from gear_jax.actors._run import main; main{descriptors}"
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=variables, stdin=subprocess.DEVNULL, pass_fds=descriptors
        )
        return self._member(process, words)

    def _member(self, process: subprocess.Popen[bytes], words: Any) -> _Member:
        if self._nice:
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + self._nice)
        return _Member(process, words, time.monotonic())

    def _tend(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            with self._lock:
                if self._closing.is_set():
                    return
                for i, member in enumerate(self._members):
                    self._tend_one(i, member)

    def _tend_one(self, i: int, member: _Member) -> None:
        if not member.process.poll() or member.starts > self._most:
            return
        now = time.monotonic()
        if member.again_at is None:
            steady = now - member.started > _STEADY_SECONDS
            member.again_at = now + (0.0 if steady else min(_MOST_DELAY, 0.1 * 2 ** min(10, member.starts - 1)))
        if now >= member.again_at:
            try:
                self._members[i] = dataclasses.replace(self._start(i), starts=member.starts + 1)
            except OSError:  # no memory or no process number for it now
                member.again_at = now + _MOST_DELAY
                return
            self.restarts += 1
            if member.words is not None:
                member.words.close()

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes, those that have ended included."""
        return [m.process.pid for m in self._members]

    @property
    def alive(self) -> int:
        """How many processes run, stopped ones included."""
        return sum(m.process.poll() is None for m in self._members)

    def check(self) -> None:
        """Raises an ActorFailedError, with what it said last, if an actor failed and will not be started again."""
        with self._lock:
            for i, member in enumerate(self._members):
                code = member.process.poll()
                if code and member.starts > self._most and not self._closing.is_set():
                    how = f"exit status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
                    fix = f"Mend it, or pass restart= to ActorPool. It said:\n{_tail(member.words)}"
                    raise error(ActorFailedError, f"actor {i}", got=how, wanted="one that runs", fix=fix)

    def wait(self, timeout: float) -> bool:
        """Waits until all actors have come to their end; False if some have not after `timeout` seconds.

        Raises:
          ActorFailedError: as `check`.
        """
        until = _wait.deadline("timeout", timeout)
        while True:
            self.check()
            with self._lock:
                if all(m.process.poll() == 0 for m in self._members):
                    return True
            if time.monotonic_ns() >= until:
                return False
            time.sleep(_POLL_SECONDS)

    def close(self, timeout: float = 5.0) -> None:
        """Ends all actors: SIGTERM, and after `timeout` seconds SIGKILL."""
        until = time.monotonic() + timeout
        self._closing.set()
        atexit.unregister(self.close)
        with self._lock:
            running = [m.process for m in self._members if m.process.poll() is None]
            for process in running if timeout else ():
                process.terminate()
                process.send_signal(signal.SIGCONT)  # one that is stopped would not hear of it
            for process in running:
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            for member in self._members:
                if member.words is not None:
                    member.words.close()
            if self._payload is not None:
                self._payload.close()
            for end in self._lifeline:
                if end >= 0:
                    os.close(end)
            self._lifeline = (-1, -1)


def _packed(target: Callable[..., Any], args: tuple[Any, ...], ring: Ring, timeout: float) -> bytes:
    fix = "Pass a function that is defined at the top of a module, and arguments that can be pickled."
    try:
        work = pickle.dumps((target, args))
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise type_error("target, args", got=str(e), wanted="what can be pickled", fix=fix) from e
    main = None
    if getattr(target, "__module__", None) == "__main__":
        main = getattr(sys.modules["__main__"], "__file__", None)
        if main is None:
            raise type_error("target", got="a function typed into Python", wanted="one of a file", fix=fix)
    found = {"path": list(sys.path), "main": main, "ring": ring.path, "timeout": timeout, "work": work}
    return pickle.dumps(found)


def _tail(words: Any) -> str:
    if words is None:
        return "(a command: what it printed)"
    words.seek(0)
    return words.read(_LAST_WORDS).decode(errors="replace") or "(nothing)"
