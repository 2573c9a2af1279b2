"""torchrl: `TensorDictReplayBuffer` over a `LazyTensorStorage`, with and without background prefetch."""

import importlib.metadata

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, SliceSampler, TensorDictReplayBuffer

from ..check import Batch
from ..workloads import Row
from .base import Call, Engine, Unsupported, cycle

_EPISODE = "episode"


class TorchRL(Engine):
    """An entry is a whole trajectory; for windows it is a step, drawn by `SliceSampler`."""

    def __init__(self, workload):
        super().__init__(workload)
        self.mark = "~" if workload.window else ""

    @staticmethod
    def versions() -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("torchrl", "torch", "tensordict")}

    def fill(self) -> None:
        w = self.workload
        self.storage = LazyTensorStorage(w.stored * (w.steps if w.window else 1))
        self.buffer = TensorDictReplayBuffer(storage=self.storage, **self._sampler())
        for ids in w.chunks():
            self.buffer.extend(self._entries(w.trajectories(ids), ids))

    def _sampler(self) -> dict:
        w = self.workload
        if w.window:
            # Windows anywhere in a trajectory: it has no "the last W steps", and no padding with a mask.
            return {"sampler": SliceSampler(slice_len=w.window, traj_key=_EPISODE, cache_values=True)}
        if w.alpha is None:
            return {}
        try:
            sampler = PrioritizedSampler(w.stored, w.alpha, w.beta, eps=0.0)
        except RuntimeError as error:
            raise Unsupported(f"no prioritised sampler beside torch {torch.__version__}: {error}") from error
        return {"sampler": sampler, "priority_key": "priority"}

    def _entries(self, trajectories: dict[str, np.ndarray], ids: np.ndarray) -> TensorDict:
        if not self.workload.window:
            return TensorDict({k: torch.from_numpy(v) for k, v in trajectories.items()}, batch_size=len(ids))
        steps = {k: torch.from_numpy(v).flatten(0, 1) for k, v in trajectories.items()}
        steps[_EPISODE] = torch.from_numpy(ids).repeat_interleave(self.workload.steps)
        return TensorDict(steps, batch_size=len(steps[_EPISODE]))

    def calls(self, row: Row) -> list[Call]:
        w, buffer = self.workload, self.buffer
        if row.op == "add":
            sources = [self._entries(batch, np.arange(row.size)) for batch in self.sources(row.size)]
            source = cycle(sources)
            return [Call("extend", lambda: buffer.extend(source()))]
        if row.op == "update":
            index = torch.from_numpy(self.rng.integers(0, w.stored, row.size))
            values = cycle([torch.rand(row.size) * 0.9 + 0.1 for _ in range(4)])
            return [Call("update_priority", lambda: buffer.update_priority(index, values()))]
        size = row.size * (w.window or 1)
        found = [Call("sample", lambda: buffer.sample(size), self._batch)]
        if w.alpha is None:
            ahead = TensorDictReplayBuffer(storage=self.storage, **self._sampler(), batch_size=size, prefetch=2)
            found.append(Call("prefetch", ahead.sample, self._batch, pipeline=True))
        return found

    def _batch(self, result: TensorDict) -> Batch:
        w = self.workload
        width = w.window or w.steps
        data = {c.name: result[c.name].numpy().reshape(-1, width, *c.shape) for c in w.columns}
        weight = result["priority_weight"].numpy() if w.alpha is not None else None
        return Batch(data, weight=weight, placement="within" if w.window else "exact")

    def set_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        self.buffer.update_priority(torch.from_numpy(ids), torch.from_numpy(priorities))
