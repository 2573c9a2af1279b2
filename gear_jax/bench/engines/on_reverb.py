"""dm-reverb: a server in the same process and a dataset that samples in the background.

A trajectory is one element of shape [T, *shape], so that the server never joins chunks. A window is cut and
padded when it is written, the only time reverb can do it. Every read is a running pipeline's mean.
"""

import importlib.metadata
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import reverb
import tensorflow as tf

from ..check import Batch, check_priorities
from ..workloads import Row
from .base import Call, Engine, cycle

_TABLE = "table"
_IN_FLIGHT = 100  # items that a writer sends before it waits for the server


class Reverb(Engine):
    """One table; `Uniform` or `Prioritized` selection, FIFO removal."""

    @staticmethod
    def versions() -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("dm-reverb", "tensorflow")}

    def fill(self) -> None:
        w = self.workload
        width = w.window or w.steps
        self.signature = {c.name: tf.TensorSpec((1, width, *c.shape), c.dtype, c.name) for c in w.columns}
        if w.window:
            self.signature["mask"] = tf.TensorSpec((1, width), tf.bool, "mask")
        sampler = reverb.selectors.Uniform() if w.alpha is None else reverb.selectors.Prioritized(w.alpha)
        table = reverb.Table(
            _TABLE,
            sampler=sampler,
            remover=reverb.selectors.Fifo(),
            max_size=w.stored,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature=self.signature,
        )
        self.server = reverb.Server([table], port=None)
        self.client = reverb.Client(f"localhost:{self.server.port}")
        self.writer = self.client.trajectory_writer(num_keep_alive_refs=1)
        for ids in w.chunks():
            self._write(self._entries(w.trajectories(ids), ids))

    def _entries(self, trajectories: dict[str, np.ndarray], ids: np.ndarray) -> list[dict[str, np.ndarray]]:
        w = self.workload
        if not w.window:
            return [{name: values[row] for name, values in trajectories.items()} for row in range(len(ids))]
        entries = []
        for row, length in enumerate(w.lengths(ids).tolist()):
            kept = min(length, w.window)
            entry = {"mask": np.arange(w.window) >= w.window - kept}
            for name, values in trajectories.items():
                entry[name] = np.zeros((w.window, *values.shape[2:]), values.dtype)
                entry[name][w.window - kept :] = values[row, length - kept : length]
            entries.append(entry)
        return entries

    def _write(self, entries: list[dict[str, np.ndarray]]) -> None:
        writer = self.writer
        for count, entry in enumerate(entries, 1):
            writer.append(entry)
            writer.create_item(_TABLE, 1.0, {name: column[-1:] for name, column in writer.history.items()})
            if count % _IN_FLIGHT == 0:
                writer.flush()
        writer.flush()

    def calls(self, row: Row) -> list[Call]:
        if row.op == "add":
            entries = [self._entries(batch, np.arange(row.size)) for batch in self.sources(row.size)]
            source = cycle(entries)
            return [Call("trajectory_writer", lambda: self._write(source()))]
        if row.op == "update":
            return [self._update(row.size)]
        return [Call("dataset", self._dataset(row.size), self._batch, pipeline=True)]

    def _dataset(self, size: int):
        dataset = reverb.TrajectoryDataset.from_table_signature(
            server_address=f"localhost:{self.server.port}",
            table=_TABLE,
            max_in_flight_samples_per_worker=2 * size,
        )
        batches = dataset.batch(size, drop_remainder=True).prefetch(1)
        return iter(batches.as_numpy_iterator()).__next__

    def _batch(self, result) -> Batch:
        w = self.workload
        data = {name: values[:, 0] for name, values in result.data.items()}
        self.keys = np.asarray(result.info.key)
        mask = data.pop("mask", None)
        weight = None
        if w.alpha is not None:
            probability = np.asarray(result.info.probability, np.float64)
            weight = (probability * w.stored) ** -(w.beta or 0.0)
        return Batch(data, mask, weight)

    def _known_keys(self, count: int) -> np.ndarray:
        """Keys of different items uint64[K], K >= count: reverb tells them only with samples."""
        row = min((row for row in self.workload.rows if row.op == "sample"), key=lambda row: row.size)
        self.small = self.calls(row)[0]
        keys = np.zeros(0, np.uint64)
        while len(keys) < count:
            self._batch(self.small.run())
            keys = np.union1d(keys, self.keys)
        return keys

    def _mutate(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        self.client.mutate_priorities(_TABLE, dict(zip(keys.tolist(), priorities.tolist(), strict=True)))

    def _update(self, size: int) -> Call:
        keys = self.rng.choice(self._known_keys(min(size, 4096)), size)
        values = cycle([self.rng.uniform(0.1, 1.0, size) for _ in range(4)])
        return Call("mutate_priorities", lambda: self._mutate(keys, values()))

    def check_update(self) -> None:
        """Raises a few known items to 94 % of the mass; the base's check would need the keys of all."""
        w = self.workload
        favoured = self._known_keys(1000)
        raised = (16 * w.stored / len(favoured)) ** (1 / (w.alpha or 1.0))
        self._mutate(favoured, np.full(len(favoured), raised))
        for _ in range(12):  # what was in flight was drawn before
            result = self.small.run()
        weight = self._batch(result).weight
        check_priorities(favoured, self.keys, weight)
        self._mutate(favoured, np.ones(len(favoured)))

    def close(self) -> None:
        self.server.stop()
