"""cpprb: a trajectory is one entry whose shape is [T, *shape]."""

import importlib.metadata

import cpprb
import numpy as np

from ..check import Batch
from ..workloads import Row
from .base import Call, Engine, Unsupported, cycle


class Cpprb(Engine):
    """`ReplayBuffer`, or `PrioritizedReplayBuffer` for a prioritised workload."""

    @staticmethod
    def versions() -> dict[str, str]:
        return {"cpprb": importlib.metadata.version("cpprb"), "numpy": np.__version__}

    def fill(self) -> None:
        w = self.workload
        if w.window:
            raise Unsupported("has no windows of the last steps with padding")
        entries = {c.name: {"shape": (w.steps, *c.shape), "dtype": np.dtype(c.dtype)} for c in w.columns}
        if w.alpha is None:
            self.buffer = cpprb.ReplayBuffer(w.stored, entries)
        else:
            self.buffer = cpprb.PrioritizedReplayBuffer(w.stored, entries, alpha=w.alpha, eps=0.0)
        for ids in w.chunks():
            self.buffer.add(**w.trajectories(ids))

    def calls(self, row: Row) -> list[Call]:
        buffer, size = self.buffer, row.size
        if row.op == "add":
            source = cycle(self.sources(size))
            return [Call("arrays", lambda: buffer.add(**source()))]
        if row.op == "update":
            return [self._update(size, ascending) for ascending in (False, True)]
        beta = self.workload.beta
        run = (lambda: buffer.sample(size)) if beta is None else (lambda: buffer.sample(size, beta))
        return [Call("sample", run, self._batch)]

    def _update(self, size: int, ascending: bool) -> Call:
        index = self.updated(size, ascending).astype(np.uint64)
        values = cycle([self.rng.uniform(0.1, 1.0, size).astype(np.float32) for _ in range(4)])
        update = self.buffer.update_priorities
        return Call("ascending" if ascending else "arrays", lambda: update(index, values()))

    def _batch(self, result: dict[str, np.ndarray]) -> Batch:
        w = self.workload
        data = {c.name: result[c.name].reshape(-1, w.steps, *c.shape) for c in w.columns}
        return Batch(data, weight=result.get("weights"))

    def set_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        self.buffer.update_priorities(ids.astype(np.uint64), priorities)
