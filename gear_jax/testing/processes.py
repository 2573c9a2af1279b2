"""Several processes on one machine, as if each were a host: for tests of what runs over them."""

import collections
import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\d+")


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody uses: where there are enough, such as the kernel does not hand out, so that no
    connection takes one before it is used. Raises OSError if there are none."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as f:
            low, high = map(int, f.read().split())
    except OSError:
        low, high = 1024, 2**16
    kept = [p for p in range(1024, 2**16) if not low <= p <= high]
    random.SystemRandom().shuffle(kept)
    with contextlib.ExitStack() as held:  # until all are found
        sockets: list[socket.socket] = []
        for port in kept[: 64 * count]:
            if len(sockets) == count:
                break
            with contextlib.suppress(OSError):  # somebody has it
                sockets.append(held.enter_context(socket.create_server(("127.0.0.1", port))))
        while len(sockets) < count:  # any that the kernel likes
            sockets.append(held.enter_context(socket.create_server(("127.0.0.1", 0))))
        return [s.getsockname()[1] for s in sockets]


class Processes:
    """N processes that run one command. A context manager: what still runs at its end is killed.

    Args:
      command: the words of the command. `{coordinator}`, `{processes}` and `{process}` in them stand for the arguments
        of `jax.distributed.initialize`: a free port of this machine, N, and the process's number.
      processes: N.
      devices: the CPU devices of each process; None: whatever devices JAX finds.
      environment: variables beside those of this process.
      echo: whether to print what the processes print, each line with the process's number.
    """

    def __init__(
        self, command: Sequence[str], processes: int, devices: int | None = None,
        environment: dict[str, str] | None = None, echo: bool = False,
    ):  # fmt: skip
        names = {"coordinator": f"127.0.0.1:{free_ports(1)[0]}", "processes": str(processes)}
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        if devices is not None:
            flags = _DEVICES.sub("", variables.get("XLA_FLAGS", ""))
            variables["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
            variables["JAX_PLATFORMS"] = "cpu"
        self._lines: list[collections.deque[str]] = [collections.deque(maxlen=10_000) for _ in range(processes)]
        self._started: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        for i in range(processes):
            words = [_filled(word, {**names, "process": str(i)}) for word in command]
            self._started.append(
                subprocess.Popen(
                    words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
                )
            )
            reader = threading.Thread(target=self._read, args=(i, echo), daemon=True)
            reader.start()
            self._readers.append(reader)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: Any) -> None:
        for i in range(len(self._started)):
            self.kill(i)

    def _read(self, i: int, echo: bool) -> None:
        stream = self._started[i].stdout
        assert stream is not None
        with stream:
            for line in stream:
                self._lines[i].append(line)
                if echo:
                    sys.stdout.write(f"[{i}] {line}")
                    sys.stdout.flush()

    def output(self, i: int) -> str:
        """What process i has printed so far, its last 10,000 lines."""
        return "".join(self._lines[i].copy())

    def report(self) -> str:
        """How far all processes are and what they have printed, for the text of a failure."""
        return "\n".join(
            f"--- process {i}: {'running' if p.poll() is None else f'ended with {p.returncode}'}\n{self.output(i)}"
            for i, p in enumerate(self._started)
        )

    def kill(self, i: int) -> None:
        """Ends process i at once (SIGKILL) if it still runs."""
        self._started[i].kill()
        self._started[i].wait()
        self._readers[i].join(5)

    def wait_for(self, text: str, seconds: float, among: Sequence[int] | None = None) -> None:
        """Waits until all processes (or those `among` them) have printed a text.

        Raises:
          TimeoutError: with what all have printed. RuntimeError: the same, if one has ended before it did so.
        """
        deadline = time.monotonic() + seconds
        for i in range(len(self._started)) if among is None else among:
            while text not in self.output(i):
                if self._started[i].poll() is not None and not self._readers[i].is_alive():
                    if text in self.output(i):
                        break
                    raise RuntimeError(f"process {i} ended before it printed {text!r}\n{self.report()}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"process {i} did not print {text!r} within {seconds} s\n{self.report()}")
                time.sleep(0.02)

    def wait(self, seconds: float, among: Sequence[int] | None = None) -> list[int]:
        """Waits for the end of all processes (or those `among` them). Returns their exit codes; -N: ended by signal N.

        Raises:
          TimeoutError: with what all have printed, if one still runs after `seconds`.
        """
        deadline, codes = time.monotonic() + seconds, []
        for i in range(len(self._started)) if among is None else among:
            try:
                codes.append(self._started[i].wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"process {i} still runs after {seconds} s\n{self.report()}") from None
            self._readers[i].join(1)
        return codes


def run_processes(
    command: Sequence[str], processes: int, devices: int | None = None, *, seconds: float,
    environment: dict[str, str] | None = None, echo: bool = False,
) -> list[str]:  # fmt: skip
    """Runs a command in N processes (see `Processes`) and returns what each has printed.

    Args:
      seconds: how long they may take.

    Raises:
      TimeoutError, RuntimeError: if they take longer, or one fails; with what all have printed.
    """
    with Processes(command, processes, devices, environment, echo) as started:
        if any(started.wait(seconds)):
            raise RuntimeError(f"a process failed\n{started.report()}")
        return [started.output(i) for i in range(processes)]


def _filled(word: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        word = word.replace(f"{{{name}}}", value)
    return word
