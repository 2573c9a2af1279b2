"""Counters as a flat dict, and who is told of them: TensorBoard, Prometheus, `python -m gear_jax top`. No jax in here.

metrics = Metrics([TensorBoardWriter("logs"), PrometheusWriter(9400), FileWriter()])
...
if metrics.due():
    metrics.write(step, replay=replay.stats(state), ingest=ingest.stats(), loss=float(loss))
"""

import contextlib
import json
import os
import pathlib
import re
import sys
import tempfile
import time
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from gear_jax._errors import type_error, value_error
from gear_jax._numbers import is_number

__all__ = ["FileWriter", "Metrics", "PrometheusWriter", "TensorBoardWriter", "flatten", "published"]

# Of what is counted, these only rise. The last word of the name says it, or all of it. A line for each of Replay.stats,
# Ingest.stats, RateLimiter.stats, ops.stats, Session.counters, ops.rdma_counters, and relays.
RISING = frozenset(
    (
        "inserted evicted stale_updates rejected_priorities sampled used_up expired refused_stale missed_updates "
        "committed consumed abandoned waited drains drained refused ingest/steps questions rows_answered held_back "
        "insert_waits sample_waits insert_wait_seconds sample_wait_seconds "
        "kernel copy copy_bytes "
        "bytes reads timeouts lost losses reconnects wait_seconds "
        "rows remote_rows retries torn stale lost_rows refused_rows "
        "published moved moved_steps reads_failed full"
    ).split()
)
_FILES = "gear_jax.metrics."


def flatten(tree: Any, name: str = "") -> dict[str, int | float]:
    """The numbers of nested dicts and lists, by their paths: `{"ingest/actors/0/pending": 3}`.

    Args:
      tree: dicts, lists and tuples of Python's, NumPy's or JAX's numbers (scalars; those on a device are waited for).
        A bool is 0 or 1; what is no number is left out.
      name: the path of the tree.
    """
    if isinstance(tree, Mapping):
        pairs = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, (list, tuple)):
        pairs = [(str(i), value) for i, value in enumerate(tree)]
    else:
        number = _number(tree)
        return {} if number is None else {name: number}
    found = {}
    for key, value in pairs:
        found |= flatten(value, f"{name}/{key}" if name else key)
    return found


def _step(x: Any) -> Any:
    number = _number(x)
    if number is None:
        raise type_error("step", got=repr(x), wanted="a number", fix="Count the train steps: write(step, ...).")
    return number


def _number(x: Any) -> int | float | None:
    if isinstance(x, (bool, int, float)):
        return int(x) if isinstance(x, bool) else x
    if x is None or isinstance(x, (str, bytes)) or np.ndim(x) or not hasattr(x, "dtype"):
        return None
    number = np.asarray(x).item()
    return number if isinstance(number, (int, float)) else None


def rising(name: str) -> bool:
    """Whether what has this name only rises, so that its rate says something."""
    return name in RISING or name.rpartition("/")[2] in RISING


class MetricsWriter(Protocol):
    """Somebody who is told of the counters."""

    def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
        """Takes the counters of a train step."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class Metrics:
    """Tells writers of the counters, every so often. A context manager.

    Args:
      writers: whom to tell.
      every: seconds between two times that `due` says yes.
    """

    def __init__(self, writers: Sequence[MetricsWriter], every: float = 5.0):
        if not every >= 0:
            raise value_error("every", got=every, wanted="seconds, 0 or more", fix="Write every=5.0.")
        for writer in writers:
            if not callable(getattr(writer, "write", None)):
                fix = "Pass FileWriter(), TensorBoardWriter(...), PrometheusWriter(...) or one's own."
                raise type_error("writers", got=repr(writer), wanted="objects with write and close", fix=fix)
        self._writers, self._every, self._next = list(writers), every, 0.0

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type | None, error: Any, trace: types.TracebackType | None) -> None:
        self.close()

    def due(self) -> bool:
        """Whether it is time: at first, and then once in `every` seconds. Ask before you read counters off a device."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._every
        return True

    def write(self, step: int, **sources: Any) -> dict[str, int | float]:
        """Tells all writers of what the sources count: `write(step, replay=replay.stats(state), loss=0.5)`.

        Args:
          step: the train step, a number.
          sources: dicts of numbers, or numbers.

        Returns:
          The flat dict.

        Raises:
          TypeError: for a step that is no number.
        """
        told = _step(step)
        numbers = flatten(sources)
        for writer in self._writers:
            writer.write(told, numbers)
        return numbers

    def close(self) -> None:
        """Closes the writers."""
        with contextlib.ExitStack() as all_of_them:
            for writer in self._writers:
                all_of_them.callback(writer.close)


class TensorBoardWriter:
    """Scalars for TensorBoard. Needs the package tensorboardX.

    Args:
      directory: where the event files go.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        try:
            import tensorboardX
        except ImportError as e:
            raise ImportError("TensorBoardWriter needs tensorboardX: pip install 'gear_jax[metrics]'.") from e
        self._writer = tensorboardX.SummaryWriter(os.fspath(directory))

    def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
        """Adds a point to each curve."""
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def close(self) -> None:
        """Ends the event file."""
        self._writer.close()


class PrometheusWriter:
    """Counters for Prometheus, served over HTTP at /metrics. Needs the package prometheus_client.

    A path becomes a name, `gear_jax_replay_trajectories`, and its numbers a label: `gear_jax_ingest_actors_pending
    {index="0"}`. What only rises is a counter (`..._total`), all else a gauge; `gear_jax_step` is the train step.

    Args:
      port: 0: any that is free; `PrometheusWriter.port` says which.
      address: to listen at; "0.0.0.0": for other machines, who may then read the counters.
    """

    def __init__(self, port: int = 9400, address: str = "127.0.0.1"):
        try:
            import prometheus_client
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        except ImportError as e:
            raise ImportError("PrometheusWriter needs prometheus_client: pip install 'gear_jax[metrics]'.") from e
        self._families: Any = {True: CounterMetricFamily, False: GaugeMetricFamily}
        self._numbers: Mapping[str, int | float] = {}
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, address, registry)
        except OSError as e:
            got = f"{address}:{port}, {e.strerror}"
            raise value_error("PrometheusWriter: port", got=got, wanted="a free one", fix="Use port=0.") from e
        self.port: int = self._server.server_port

    def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
        """Takes what is served from now on."""
        self._numbers = {"step": step, **numbers}  # one assignment: the server's thread sees the old or the new

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks for."""
        families: dict[str, Any] = {}
        for path, number in self._numbers.items():
            words, index = [], []
            for word in path.split("/"):
                (index if word.isdecimal() else words).append(word)
            name = re.sub(r"[^a-zA-Z0-9_]", "_", "_".join(["gear_jax", *words]))
            kind = rising(path), bool(index)
            key = name if (kept := families.get(name)) is None or kept[0] == kind else f"{name}_{'_'.join(index)}"
            if key not in families:
                labels = ["index"] if index else None
                families[key] = kind, self._families[kind[0]](key, path, labels=labels)
            families[key][1].add_metric([".".join(index)] if index else [], number)
        yield from (family for _, family in families.values())

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class FileWriter:
    """A small file with the last counters and their rates, for `python -m gear_jax top`. It goes with its process.

    Args:
      path: None: one that `top` finds by itself, in the directory for temporary files.
      name: what `top` calls the process; None: the script's.

    Raises:
      ValueError: if there is something else at the path: it would be replaced, and removed at the end.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, name: str | None = None):
        if path is None:
            _clear()
            path = pathlib.Path(tempfile.gettempdir()) / f"{_FILES}{os.getuid()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = pathlib.Path(path)
        if self.path.exists():
            _read(self.path)
        self._name = name or pathlib.PurePath(sys.argv[0]).name or "python"
        self._last: tuple[float, dict[str, int | float]] | None = None
        self._leave = weakref.finalize(self, _remove, self.path, os.getpid())

    def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
        """Puts a new file in the place of the last one, at once and whole."""
        now, rates = time.monotonic(), {}
        numbers = {"step": _step(step), **flatten(numbers)}
        if self._last is not None and now > self._last[0]:
            before = self._last[1]
            for name in (n for n in numbers if n in before and (rising(n) or n == "step")):
                rates[name] = (numbers[name] - before[name]) / (now - self._last[0])
        self._last = now, numbers
        said = {"pid": os.getpid(), "name": self._name, "time": time.time(), "numbers": numbers, "rates": rates}
        handle, new = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(said, file)
            os.replace(new, self.path)
        except BaseException:
            os.unlink(new)
            raise

    def close(self) -> None:
        """Removes the file."""
        self._leave()


def _remove(path: pathlib.Path, owner: int) -> None:
    if os.getpid() == owner:  # not a child that was forked
        path.unlink(missing_ok=True)


def published(paths: Sequence[str | os.PathLike[str]] = ()) -> list[dict[str, Any]]:
    """What `FileWriter`s of living processes have written last: dicts of pid, name, time, numbers and rates.

    Args:
      paths: of their files; none: those of this user that are where `FileWriter` puts them.

    Raises:
      ValueError: for a path that is no such file.
    """
    found: list[pathlib.Path] = [pathlib.Path(p) for p in paths]
    if not paths:
        every = pathlib.Path(tempfile.gettempdir()).glob(f"{_FILES}{os.getuid()}.*")
        found = sorted(p for p in every if _is_own(p))
    said = []
    for path in found:
        try:
            words = _read(path)
        except ValueError:
            if paths:
                raise
            continue
        alive = pathlib.Path(f"/proc/{words['pid']}").exists()
        if paths or alive:
            said.append({**words, "alive": alive})
    return said


def _read(path: pathlib.Path) -> dict[str, Any]:
    """What a `FileWriter` has written. Raises a ValueError for another file."""
    try:
        words = json.loads(path.read_text())
        numbers = [words["time"], words["pid"], *words["numbers"].values(), *words["rates"].values()]
        if not all(map(is_number, numbers)) or not isinstance(words["name"], str):
            raise ValueError("not numbers by name")
        return words
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        fix = "Name one that gear_jax.metrics.FileWriter(path) writes, or a new one."
        raise value_error("file", got=f"{path}: {e}", wanted="a file of counters", fix=fix) from e


def _clear() -> None:
    """Removes what processes left that were killed."""
    for path in pathlib.Path(tempfile.gettempdir()).glob(f"{_FILES}{os.getuid()}.*"):
        pid = path.name.removeprefix(f"{_FILES}{os.getuid()}.").partition(".")[0]
        if _is_own(path) and not pathlib.Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


def _is_own(path: pathlib.Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False
