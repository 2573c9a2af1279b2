"""NumPy indexing: one array per column, [N, T, *shape]."""

import numpy as np

from ..check import Batch
from ..workloads import Row
from .base import Call, Engine, Unsupported, cycle


class NumPy(Engine):
    """Whole trajectories by `np.take`, windows by slices or one fancy index, priorities by a running sum."""

    @staticmethod
    def versions() -> dict[str, str]:
        return {"numpy": np.__version__}

    def fill(self) -> None:
        w = self.workload
        self.table = {c.name: np.empty((w.stored, w.steps, *c.shape), c.dtype) for c in w.columns}
        for ids in w.chunks():
            for name, values in w.trajectories(ids).items():
                self.table[name][ids] = values
        self.length = w.lengths(np.arange(w.stored))
        self.mass = np.ones(w.stored, np.float64)
        self.next = 0

    def calls(self, row: Row) -> list[Call]:
        if row.op == "add":
            return [self._add(row.size)]
        if row.op == "update":
            return [self._update(row.size, ascending) for ascending in (False, True)]
        if self.workload.alpha is not None:
            return [self._prioritised(row.size)]
        if self.workload.window:
            return [self._slices(row.size), self._fancy(row.size)]
        return self._whole(row.size)

    def _whole(self, size: int) -> list[Call]:
        table, stored, rng = self.table, self.workload.stored, self.rng
        out = {name: np.empty((size, *column.shape[1:]), column.dtype) for name, column in table.items()}

        def fresh():
            index = rng.integers(0, stored, size)
            return {name: column[index] for name, column in table.items()}

        def reused():
            index = rng.integers(0, stored, size)
            # mode="clip" writes straight into `out`; the default mode buffers it.
            return {name: np.take(column, index, 0, out[name], "clip") for name, column in table.items()}

        return [Call("fresh", fresh, Batch), Call("reused", reused, Batch)]

    def _slices(self, size: int) -> Call:
        table, stored, rng, lengths = self.table, self.workload.stored, self.rng, self.length
        width = self.workload.window or 0
        out = {name: np.zeros((size, width, *column.shape[2:]), column.dtype) for name, column in table.items()}
        mask = np.empty((size, width), bool)
        steps = np.arange(width)

        def run():
            index = rng.integers(0, stored, size)
            length = lengths[index]
            np.greater_equal(steps, width - length[:, None], out=mask)
            rows = list(zip(range(size), index.tolist(), length.tolist(), strict=True))
            for name, column in table.items():
                batch = out[name]
                for row, slot, end in rows:
                    if end >= width:
                        batch[row] = column[slot, end - width : end]
                    else:
                        batch[row, : width - end] = 0
                        batch[row, width - end :] = column[slot, :end]
            return out

        return Call("slices, reused", run, lambda data: Batch(data, mask))

    def _fancy(self, size: int) -> Call:
        table, stored, rng, lengths = self.table, self.workload.stored, self.rng, self.length
        steps = np.arange(-(self.workload.window or 0), 0)

        def run():
            index = rng.integers(0, stored, size)
            place = lengths[index][:, None] + steps
            mask = place >= 0
            data = {name: column[index[:, None], place] for name, column in table.items()}
            for values in data.values():
                values[~mask] = 0
            return data, mask

        return Call("fancy index, fresh", run, lambda result: Batch(*result))

    def _prioritised(self, size: int) -> Call:
        w, table, rng = self.workload, self.table, self.rng
        if w.beta is None:
            raise Unsupported("no beta")
        beta = w.beta

        def run():
            mass = self.mass
            running = np.cumsum(mass)
            # Stratified: sorted queries keep the search in the cache.
            query = (np.arange(size) + rng.random(size)) * (running[-1] / size)
            index = np.minimum(np.searchsorted(running, query, side="right"), w.stored - 1)
            weight = (mass[index] * (w.stored / running[-1])) ** -beta
            weight /= weight.max()
            self.drawn = index
            return {name: column[index] for name, column in table.items()}, weight

        return Call("cumsum, stratified", run, lambda result: Batch(result[0], weight=result[1]))

    def set_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        self.mass[ids] = priorities**self.workload.alpha

    def _update(self, size: int, ascending: bool) -> Call:
        index = self.updated(size, ascending)
        values = cycle([self.rng.uniform(0.1, 1.0, size).astype(np.float32) for _ in range(4)])
        name = "assignment, ascending" if ascending else "assignment"
        return Call(name, lambda: self.set_priorities(index, values()))

    def _add(self, size: int) -> Call:
        table, stored = self.table, self.workload.stored
        source = cycle(self.sources(size))

        def run():
            values, start = source(), self.next
            self.next = (start + size) % stored
            end = start + size
            for name, column in table.items():
                if end <= stored:
                    column[start:end] = values[name]
                else:
                    column[start:] = values[name][: stored - start]
                    column[: end - stored] = values[name][stored - start :]

        return Call("assignment", run)
