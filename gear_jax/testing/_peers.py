"""Processes that expose memory, for tests of transports: started, told what to do, stopped, killed. No jax.

`python -m gear_jax.testing._peers` is such a process: it reads its job from its standard input, then a command a line.
"""

import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gear_jax.testing.processes import free_ports
from gear_jax.transport import Job, Session, TransportError

SECONDS = 60.0  # that a command may take; under emulation everything is slow


def pattern(rank: int, region: int, size: int) -> np.ndarray:
    """What a process exposes, uint8[size]."""
    return np.random.default_rng([rank, region]).integers(0, 256, size, dtype=np.uint8)


def resources() -> dict[str, int]:
    """What this process holds: file descriptors, threads, and resident memory in bytes."""
    with open("/proc/self/statm", encoding="ascii") as f:
        pages = int(f.read().split()[1])
    descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return {"descriptors": descriptors, "threads": threads, "memory": pages * os.sysconf("SC_PAGE_SIZE")}


def _states(pid: int) -> list[str]:
    """Of each thread of a process, the letter that /proc has for what it does."""
    states = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/stat", encoding="ascii", errors="replace") as f:
            states.append(f.read().rpartition(")")[2].split()[0])
    return states


class Peers:
    """Process 0 of a job in this process, and the others beside it. A context manager that leaves nothing behind.

    Args:
      transport: its name, or None.
      sizes: bytes of each region that every process exposes.
      processes: how many, this one included.
      deadline: of the reads.
      environment: variables of all processes, this one included while sessions are made.
      options: of the transport.
      host: by which the processes reach each other.
      start_timeout: seconds that they may take to come together.
      memory: what this process exposes, as `Session` takes it; None: `pattern`s, in NumPy arrays.
    """

    def __init__(
        self, transport: str | None, sizes: Sequence[int], processes: int = 2, *, deadline: float = 10.0,
        environment: dict[str, str] | None = None, options: dict[str, Any] | None = None, host: str = "127.0.0.1",
        start_timeout: float = SECONDS, memory: Sequence[Any] | None = None,
    ):  # fmt: skip
        self._secret = secrets.token_bytes(32)
        self._addresses = [(host, port) for port in free_ports(processes)]
        self._environment = environment or {}
        self._job = {
            "addresses": self._addresses, "secret": self._secret.hex(), "transport": transport, "sizes": list(sizes),
            "deadline": deadline, "options": options or {}, "start_timeout": start_timeout,
        }  # fmt: skip
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self.memory = list(memory or (pattern(0, i, size) for i, size in enumerate(sizes)))
        before = {name: os.environ.get(name) for name in self._environment}
        try:
            for rank in range(1, processes):
                self.start(rank)
            os.environ.update(self._environment)
            self.session = _session(0, self._job, self.memory)
            for rank in self._processes:
                self.answer(rank)
        except BaseException:
            self._kill_all()
            raise
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
        self._kill_all()

    def _kill_all(self) -> None:
        for rank in list(self._processes):
            self.kill(rank)

    def start(self, rank: int) -> None:
        """Starts process `rank`; it says that it is ready by an `answer`."""
        process = subprocess.Popen(
            [sys.executable, "-m", "gear_jax.testing._peers"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **self._environment, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self._processes[rank] = process
        self.tell(rank, **self._job, rank=rank)

    def tell(self, rank: int, /, **command: Any) -> None:
        """Sends a command to a process."""
        stdin = self._processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()

    def answer(self, rank: int, seconds: float = SECONDS) -> Any:
        """Waits for what a process says next. Raises AssertionError if it says nothing or fails."""
        process, lines = self._processes[rank], []
        reader = threading.Thread(target=lambda: lines.append(process.stdout.readline() if process.stdout else ""))
        reader.daemon = True
        reader.start()
        reader.join(seconds)
        assert lines and lines[0], f"process {rank} says nothing within {seconds} s (exit status {process.poll()})"
        answer = json.loads(lines[0])
        assert "error" not in answer, f"process {rank}: {answer['error']}"
        return answer["value"]

    def ask(self, rank: int, /, **command: Any) -> Any:
        """Sends a command and waits for its answer."""
        self.tell(rank, **command)
        return self.answer(rank)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a process; returns when all of its threads are stopped, if they are to be."""
        process = self._processes[rank]
        process.send_signal(number)
        if number == signal.SIGSTOP:
            until = time.monotonic() + SECONDS
            while set(_states(process.pid)) != {"T"}:
                assert time.monotonic() < until, f"process {rank} is not stopped after {SECONDS} s"
                time.sleep(0.001)

    def kill(self, rank: int) -> None:
        """Ends a process at once (SIGKILL)."""
        process = self._processes.pop(rank)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def wait_until(self, rank: int, alive: bool, seconds: float = SECONDS) -> None:
        """Waits until this process takes another for alive, or for lost."""
        until = time.monotonic() + seconds
        while bool(self.session.alive[rank]) != alive:
            assert time.monotonic() < until, f"process {rank} is not {'back' if alive else 'lost'} after {seconds} s"
            time.sleep(0.005)


def _session(rank: int, job: dict[str, Any], memory: list[Any]) -> Session:
    addresses = tuple((host, port) for host, port in job["addresses"])
    return Session(
        Job(rank, addresses, bytes.fromhex(job["secret"])), memory, job["transport"], deadline=job["deadline"],
        start_timeout=job["start_timeout"], number=0, **job["options"],
    )  # fmt: skip


def _main() -> None:
    job = json.loads(sys.stdin.readline())
    memory = [pattern(job["rank"], i, size) for i, size in enumerate(job["sizes"])]
    try:
        session = _session(job["rank"], job, memory)
    except Exception as e:
        _say(error=str(e))
        raise
    _say(value="ready")
    with session:
        for line in sys.stdin:
            try:
                _say(value=_obey(session, memory, json.loads(line)))
            except Exception as e:
                _say(error=f"{type(e).__name__}: {e}")


def _obey(session: Session, memory: list[np.ndarray], command: dict[str, Any]) -> Any:
    match command.pop("do"):
        case "hold the GIL":  # as a call into C that does not let go of it
            ctypes.PyDLL(None).usleep(int(command["seconds"] * 1e6))
        case "fill":
            memory[command["region"]][:] = command["value"]
        case "read":
            try:
                got = session.read(command["peer"], command["region"], command["offset"], command["bytes"])
            except TransportError as e:
                return e.status
            offset = command["offset"]
            whole = pattern(command["peer"], command["region"], offset + command["bytes"])
            return "ok" if np.array_equal(got, whole[offset:]) else "wrong"
        case "resources":
            return resources()
        case "alive":
            return session.alive.tolist()
        case "close":
            session.close()
    return None


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
