"""What an engine is, and the checks that every engine passes before it is timed."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ..check import Batch, WrongBatch, check_batch, check_priorities
from ..workloads import Row, Workload

_TINY = 1e-6  # priority of the trajectories that are not favoured in the check
_FAVOURED = 1000
_SOURCES = 4  # batches prepared for an add; calls take them in turn


class Unsupported(Exception):
    """The library cannot do this; the text says why and is shown in the table."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One way to run a row.

    Attributes:
        variant: Its name.
        run: Does the operation once and returns when it is done.
        batch: Turns what `run` of a sample returned into NumPy (not timed); None for other operations.
        pipeline: Batches are prepared in the background: the mean over a run counts, not the median of calls.
    """

    variant: str
    run: Callable[[], Any]
    batch: Callable[[Any], Batch] | None = None
    pipeline: bool = False


class Engine(abc.ABC):
    """A library that holds one workload.

    `mark` is shown behind the figures: "~" for the nearest thing that the library has.
    """

    mark = ""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.rng = np.random.default_rng(0)

    @staticmethod
    def prepare() -> None:
        """Settings of the process, made before anything else."""
        return None

    @staticmethod
    @abc.abstractmethod
    def versions() -> dict[str, str]:
        """Versions of the libraries that matter."""

    @abc.abstractmethod
    def fill(self) -> None:
        """Makes the table and stores the workload's trajectories. Raises `Unsupported`."""

    @abc.abstractmethod
    def calls(self, row: Row) -> list[Call]:
        """The ways to run a row. Raises `Unsupported`."""

    def set_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities float32[U] of the trajectories `ids` int64[U] (prioritised workloads)."""
        raise Unsupported("has no priorities")

    def close(self) -> None:
        """Ends threads and servers."""
        return None

    def sources(self, size: int) -> list[dict[str, np.ndarray]]:
        """Batches of `size` trajectories [A, T, *shape] that are not in the table yet."""
        first = self.workload.stored
        return [
            self.workload.trajectories(first + np.arange(i * size, (i + 1) * size) % self.added)
            for i in range(_SOURCES)
        ]

    def updated(self, size: int, ascending: bool) -> np.ndarray:
        """Trajectories int64[U] whose priorities an update sets: random ones, `ascending` as of a stratified sample."""
        ids = self.rng.integers(0, self.workload.stored, size)
        return np.sort(ids) if ascending else ids

    @property
    def added(self) -> int:
        """Trajectories that adding can bring in, beyond those stored at first."""
        return _SOURCES * max((row.size for row in self.workload.rows if row.op == "add"), default=0)

    def check(self, row: Row, call: Call) -> None:
        """Runs the call once or more and checks what it did. Raises `WrongBatch`."""
        if row.op == "sample":
            self._sampled(row, call)
        elif row.op == "add":
            self._check_add(row, call)
        else:
            call.run()
            self.check_update()

    def _sampled(self, row: Row, call: Call, added: int = 0) -> np.ndarray:
        if call.batch is None:
            raise TypeError(f"the variant {call.variant!r} of a sample has no batch")
        batch = call.batch(call.run())
        return check_batch(self.workload, row.size, batch, self.workload.stored + added, spread=not added)

    def _first_sample(self) -> tuple[Row, Call]:
        row = next(row for row in self.workload.rows if row.op == "sample")
        return row, self.calls(row)[0]

    def _check_add(self, row: Row, call: Call) -> None:
        """Adds 2 % of the table, then looks for the new trajectories among twenty samples."""
        for _ in range(max(_SOURCES, self.workload.stored // 50 // row.size)):
            call.run()
        sample, sample_call = self._first_sample()
        drawn = [self._sampled(sample, sample_call, self.added) for _ in range(20)]
        if not (np.concatenate(drawn) >= self.workload.stored).any():
            raise WrongBatch("trajectories that were added never appear in a sample")

    def check_update(self) -> None:
        """Gives nearly all of the mass to a few trajectories, and looks whether samples follow."""
        stored = self.workload.stored
        favoured = self.rng.choice(stored, _FAVOURED, replace=False)
        priorities = np.full(stored, _TINY, np.float32)
        priorities[favoured] = 1.0
        self.set_priorities(np.arange(stored), priorities)
        _, call = self._first_sample()
        batch = call.batch(call.run()) if call.batch else None
        if batch is None:
            raise TypeError("a sample has no batch")
        drawn = self.workload.codes(batch.data)[:, 0]
        check_priorities(favoured, drawn, batch.weight)
        self.set_priorities(np.arange(stored), self.rng.uniform(0.1, 1.0, stored).astype(np.float32))


def dispatch_at_once() -> None:
    """JAX runs a program in the thread that calls it (see docs/benchmarks); to be called before its backend starts."""
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)


def cycle(items: list[Any]) -> Callable[[], Any]:
    """A function that returns the items in turn, cheaper than a generator expression in a timed call."""
    import itertools

    return itertools.cycle(items).__next__
