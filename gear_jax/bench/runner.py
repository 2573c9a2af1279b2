"""The parent's side: one process per engine and workload, timed in turns so that ratios are fair.

Between its turns a process is stopped (SIGSTOP), so that servers, prefetch threads and spinning thread pools
of one library do not run beside another's timing.
"""

import contextlib
import json
import os
import pathlib
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .engines import ENGINES
from .workloads import Workload

_LOAD_SECONDS = 1200
_TIME_SECONDS = 300
_END_SECONDS = 20
_HERE = pathlib.Path(__file__).resolve().parent
_ENVIRONMENT_OF = {  # the folders that envs.sh makes
    "flashbax": "bench-jax-peers",
    "flashbax_async": "bench-jax-peers",
    "cpprb": "bench-jax-peers",
    "torchrl": "bench-torchrl",
    "reverb": "bench-reverb",
}


def interpreters(engines: Sequence[str], folder: str | None, given: Mapping[str, str]) -> dict[str, str]:
    """The Python of each engine: as given, else of the environment in `folder`, else this one.

    Args:
        engines: Names of engines.
        folder: Where `envs.sh` made the peers' environments, or None.
        given: Engine name to interpreter.
    """
    found = {}
    for engine in engines:
        environment = _ENVIRONMENT_OF.get(engine)
        made = pathlib.Path(folder, environment, "bin", "python") if folder and environment else None
        found[engine] = given.get(engine) or (str(made) if made and made.exists() else sys.executable)
    return found


def missing(engine: str, python: str) -> str | None:
    """Why an engine's library cannot be imported there, or None."""
    module = ENGINES[engine][2]
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        done = subprocess.run([python, "-c", code], env=_environment(engine), capture_output=True, timeout=120)
    except OSError as error:
        return f"cannot run {python}: {error.strerror}"
    return f"{module} is not installed for {engine}'s interpreter (see --make-envs)" if done.returncode else None


def _environment(engine: str) -> dict[str, str]:
    found = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if engine == "gear_jax":  # only here: this folder may be a site-packages with libraries the peers must not see
        paths = [str(_HERE.parent.parent), *filter(None, found.get("PYTHONPATH", "").split(os.pathsep))]
        found["PYTHONPATH"] = os.pathsep.join(paths)
    return found


class EngineFailed(Exception):
    """The process ended, hung or raised; the text is for the table."""


class Process:
    """One engine's process with one workload, stopped unless it is its turn."""

    def __init__(self, engine: str, python: str, workload: str, quick: bool):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [python, str(_HERE / "worker.py"), engine, workload, "quick" if quick else "full"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=_environment(engine),
        )
        self.pending = b""
        self.info = self._read(_LOAD_SECONDS)
        self.process.send_signal(signal.SIGSTOP)

    def time(self, row: int, seconds: float) -> list[dict[str, Any]]:
        """Times every variant of a row for `seconds` each."""
        self.process.send_signal(signal.SIGCONT)
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"row": row, "seconds": seconds}).encode() + b"\n")
            self.process.stdin.flush()
            return self._read(_TIME_SECONDS)["times"]
        except BrokenPipeError as error:
            raise EngineFailed(self._tail()) from error
        finally:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGSTOP)

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        pipe, end = self.process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self.pending:
            ready = select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]
            chunk = os.read(pipe, 1 << 16) if ready else b""
            if not chunk:
                reason = self._tail() if ready else f"no answer in {seconds:.0f} s"
                self.end()
                raise EngineFailed(reason)
            self.pending += chunk
        line, self.pending = self.pending.split(b"\n", 1)
        answer = json.loads(line)
        if "failed" in answer:
            self.end()
            raise EngineFailed(answer["failed"].splitlines()[0])
        return answer

    def _tail(self) -> str:
        self.log.seek(0)
        lines = self.log.read().strip().splitlines()
        return lines[-1] if lines else f"ended with status {self.process.poll()}"

    def end(self) -> None:
        """Ends the process, at first by closing its input. May be called again."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            try:
                self.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()
        self.log.close()


def _available_bytes() -> int:
    with open("/proc/meminfo") as info:
        return next(int(line.split()[1]) * 1024 for line in info if line.startswith("MemAvailable"))


def run_workload(
    workload: Workload,
    pythons: Mapping[str, str],
    quick: bool,
    rounds: int,
    seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Checks and times every engine on a workload.

    Args:
        workload: The workload.
        pythons: Engine name to interpreter.
        quick: Make the tables small.
        rounds: Times that each row is timed with each engine, in turns.
        seconds: Length of each of these.
        say: Shows progress.

    Returns:
        `{"engines": {name: info}, "rows": {row name: {engine: {...}}}}`. A row's entry has "seconds" of its
        best variant, "variant", "variants" with the median and all rounds of each, "mark" and "pipeline"; or
        one of "unsupported", "wrong", "failed" with the reason.
    """
    processes: dict[str, Process] = {}
    result: dict[str, Any] = {"engines": {}, "rows": {row.name: {} for row in workload.rows}}
    try:
        for engine, python in pythons.items():
            say(f"{workload.name}: {engine} fills and checks")
            _start(engine, python, workload, quick, processes, result)
        for turn in range(rounds):
            say(f"{workload.name}: round {turn + 1} of {rounds}")
            for index in range(len(workload.rows)):
                for engine in list(processes):
                    _time(engine, index, seconds, processes, result)
    finally:
        for process in processes.values():
            process.end()
    for cells in result["rows"].values():
        for cell in cells.values():
            _summarise(cell)
    return result


def _start(
    engine: str,
    python: str,
    workload: Workload,
    quick: bool,
    processes: dict[str, Process],
    result: dict[str, Any],
) -> None:
    needed = workload.table_bytes + 2 * max(workload.row_bytes(row) for row in workload.rows) + (1 << 29)
    reason = missing(engine, python)
    if reason is None and _available_bytes() < needed:
        reason = f"needs {needed / 1e9:.1f} GB; {_available_bytes() / 1e9:.1f} GB of memory are free"
    try:
        if reason:
            raise EngineFailed(reason)
        process = Process(engine, python, workload.name, quick)
    except EngineFailed as error:
        key = "unsupported" if reason else "failed"
        for cells in result["rows"].values():
            cells[engine] = {key: str(error)}
        result["engines"][engine] = {key: str(error)}
        return
    processes[engine] = process
    result["engines"][engine] = process.info["versions"]
    for row, cell in zip(workload.rows, process.info["rows"], strict=True):
        if "variants" in cell:
            pipeline = dict(zip(cell["variants"], cell["pipeline"], strict=True))
            cell = {"mark": process.info["mark"], "pipeline_of": pipeline, "rounds": {}}
        result["rows"][row.name][engine] = cell


def _time(engine: str, index: int, seconds: float, processes: dict[str, Process], result: dict[str, Any]) -> None:
    cell = list(result["rows"].values())[index][engine]
    if "rounds" not in cell:
        return
    try:
        for timed in processes[engine].time(index, seconds):
            cell["rounds"].setdefault(timed["variant"], []).append(timed["seconds"])
    except EngineFailed as error:
        processes.pop(engine).end()
        for cells in result["rows"].values():
            if "rounds" in cells[engine]:
                cells[engine] = {"failed": str(error)}


def _summarise(cell: dict[str, Any]) -> None:
    """Replaces the rounds by medians and the best variant."""
    if "rounds" not in cell:
        return
    rounds, pipeline = cell.pop("rounds"), cell.pop("pipeline_of")
    cell["variants"] = {
        name: {"seconds": statistics.median(times), "rounds": times, "pipeline": pipeline[name]}
        for name, times in rounds.items()
    }
    best = min(cell["variants"], key=lambda name: cell["variants"][name]["seconds"])
    cell |= {"variant": best, "seconds": cell["variants"][best]["seconds"], "pipeline": pipeline[best]}


def run_own_checks(python: str, quick: bool) -> dict[str, Any]:
    """Runs `own_checks` in its own process."""
    done = subprocess.run(
        [python, "-m", "gear_jax.bench.own_checks", "quick" if quick else "full"],
        env=_environment("gear_jax"),
        capture_output=True,
        text=True,
        timeout=_LOAD_SECONDS,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"failed": lines[-1] if lines else f"status {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])
