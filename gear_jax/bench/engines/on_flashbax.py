"""flashbax: every function jitted, the state donated where it is written.

All trajectories lie one after the other along the time axis of a trajectory buffer, and the period T makes a
sample one whole trajectory. That is flashbax's fastest way here: an item buffer whose entries are whole
trajectories makes XLA gather on one thread (1.2 GB/s where this gives 7.5). Windows may cross the end of a
trajectory.

It is measured with JAX's asynchronous dispatch off, as gear_jax is, and on: off makes small calls faster, and some
large ones several times slower.
"""

import importlib.metadata

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

from ..check import Batch
from ..workloads import Row
from .base import Call, Engine, cycle, dispatch_at_once

_KEYS = 64


class Flashbax(Engine):
    """A trajectory buffer, prioritised where the workload is."""

    def __init__(self, workload):
        super().__init__(workload)
        self.mark = "~" if workload.window else ""

    @staticmethod
    def prepare() -> None:
        dispatch_at_once()

    @staticmethod
    def versions() -> dict[str, str]:
        return {"flashbax": importlib.metadata.version("flashbax"), "jax": jax.__version__}

    def _make(self, size: int):
        w = self.workload
        length = w.window or w.steps
        options = {
            "add_batch_size": 1,
            "sample_batch_size": size,
            "sample_sequence_length": length,
            "period": 1 if w.window else length,
            "min_length_time_axis": length,
            "max_length_time_axis": w.stored * w.steps,
        }
        if w.alpha is None:
            return flashbax.make_trajectory_buffer(**options)
        return flashbax.make_prioritised_trajectory_buffer(**options, priority_exponent=w.alpha)

    def fill(self) -> None:
        w = self.workload
        buffer = self._make(w.rows[0].size)
        self.state = buffer.init({c.name: jnp.zeros(c.shape, c.dtype) for c in w.columns})
        self.add = jax.jit(buffer.add, donate_argnums=0)
        for ids in w.chunks():
            self.state = self.add(self.state, self._steps(w.trajectories(ids)))
        jax.block_until_ready(self.state)

    @staticmethod
    def _steps(trajectories: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """[A, T, *shape] to one run of steps, [1, A T, *shape]."""
        return {name: values.reshape(1, -1, *values.shape[2:]) for name, values in trajectories.items()}

    def calls(self, row: Row) -> list[Call]:
        buffer = self._make(row.size)
        if row.op == "add":
            return [self._add(row.size, on_device) for on_device in (False, True)]
        if row.op == "update":
            return [self._update(row.size, ascending) for ascending in (False, True)]
        sample = jax.jit(buffer.sample)
        keys = cycle(list(jax.random.split(jax.random.key(0), _KEYS)))
        return [Call("jit", lambda: jax.block_until_ready(sample(self.state, keys())), self._batch)]

    def _batch(self, result) -> Batch:
        w = self.workload
        data = {c.name: np.asarray(result.experience[c.name]) for c in w.columns}
        if w.alpha is None:
            return Batch(data, placement="loose" if w.window else "exact")
        weight = (np.asarray(result.probabilities) * w.stored) ** -(w.beta or 0.0)
        return Batch(data, weight=weight)

    def _add(self, size: int, on_device: bool) -> Call:
        add = self.add
        sources = [self._steps(batch) for batch in self.sources(size)]
        source = cycle([jax.device_put(batch) for batch in sources] if on_device else sources)

        def run():
            self.state = jax.block_until_ready(add(self.state, source()))

        return Call("jit, JAX arrays" if on_device else "jit, NumPy arrays", run)

    def _setter(self, size: int):
        return jax.jit(self._make(size).set_priorities, donate_argnums=0)

    def _update(self, size: int, ascending: bool) -> Call:
        update = self._setter(size)
        index = jnp.asarray(self.updated(size, ascending), jnp.int32)
        values = cycle([jnp.asarray(self.rng.uniform(0.1, 1.0, size), jnp.float32) for _ in range(4)])

        def run():
            self.state = jax.block_until_ready(update(self.state, index, values()))

        return Call("jit, ascending" if ascending else "jit", run)

    def set_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        update = self._setter(len(ids))
        self.state = update(self.state, jnp.asarray(ids, jnp.int32), jnp.asarray(priorities))


class FlashbaxAsync(Flashbax):
    """The same with asynchronous dispatch, JAX's default."""

    @staticmethod
    def prepare() -> None:
        return None
