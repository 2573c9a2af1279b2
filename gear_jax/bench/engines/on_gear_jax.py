"""gear_jax, called outside jit as a user would, with and without the last sample's memory given back.

A table with priorities is sampled both ways, with independent draws and with stratified ones, as flashbax draws them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gear_jax as gear

from ..check import Batch
from ..workloads import Row, Workload
from .base import Call, Engine, cycle, dispatch_at_once

_KEYS = 64


def make(workload: Workload, stratified: bool = False) -> Any:
    """The replay that holds a workload, `stratified` where it has priorities."""
    w = workload
    table = gear.TableSpec(
        columns={c.name: gear.ColumnSpec(c.shape, jnp.dtype(c.dtype)) for c in w.columns},
        trajectory_length=w.steps,
        capacity=w.stored,
    )
    options: dict[str, Any] = {}
    if w.alpha is not None:
        options["selector"] = gear.selectors.Prioritized(alpha=w.alpha, beta=w.beta, stratified=stratified)
    if w.window:
        options |= {"windows": gear.Window(offset=-w.window, length=w.window), "anchor": "end"}
    return gear.make_replay(table, **options)


class GearJax(Engine):
    """One table, one state."""

    @staticmethod
    def prepare() -> None:
        dispatch_at_once()

    @staticmethod
    def versions() -> dict[str, str]:
        return {"gear_jax": gear.__version__, "jax": jax.__version__}

    def fill(self) -> None:
        w = self.workload
        self.replay = make(w)
        # Name -> the replay that samples; they share one state.
        self.samplers = {"": self.replay}
        if w.alpha is not None:
            self.samplers["stratified, "] = make(w, stratified=True)
        self.state = self.replay.init(jax.random.key(0))
        for ids in w.chunks():
            self.state, _ = self.replay.add(self.state, w.trajectories(ids), w.lengths(ids))
        jax.block_until_ready(self.state)

    def calls(self, row: Row) -> list[Call]:
        if row.op == "add":
            return [self._add(row.size, on_device) for on_device in (False, True)]
        if row.op == "update":
            return [self._update(row.size, name) for name in self.samplers]
        return [self._sample(row.size, name, recycle) for name in self.samplers for recycle in (False, True)]

    def _sample(self, size: int, name: str, recycle: bool) -> Call:
        sample, ready = self.samplers[name].sample, jax.block_until_ready
        keys = cycle(list(jax.random.split(jax.random.key(1), _KEYS)))

        def fresh():
            self.state, batch = sample(self.state, keys(), size)
            return ready(batch)

        last: Any = None

        def recycled():
            nonlocal last
            self.state, last = sample(self.state, keys(), size, out=last)
            return ready(last)

        if recycle:
            return Call(f"{name}out=last sample", recycled, _batch)
        return Call(f"{name}new memory", fresh, _batch)

    def _add(self, size: int, on_device: bool) -> Call:
        add, ready = self.replay.add, jax.block_until_ready
        lengths: Any = np.full(size, self.workload.steps, np.int32)
        sources: list[Any] = self.sources(size)
        if on_device:
            sources, lengths = [jax.device_put(batch) for batch in sources], jnp.asarray(lengths)
        source = cycle(sources)

        def run():
            self.state, _ = add(self.state, source(), lengths)
            ready(self.state)

        return Call("JAX arrays" if on_device else "NumPy arrays", run)

    def _update(self, size: int, name: str) -> Call:
        update, ready = self.replay.update_priorities, jax.block_until_ready
        self.state, drawn = self.samplers[name].sample(self.state, jax.random.key(2), size)
        handles = drawn.handles
        values = cycle([jnp.asarray(self.rng.uniform(0.1, 1.0, size), jnp.float32) for _ in range(4)])

        def run():
            self.state = update(self.state, handles, values())
            ready(self.state)

        return Call(f"{name}JAX arrays", run)

    def set_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        # The table was filled in order and nothing was evicted: trajectory i is in slot i.
        generation = np.asarray(self.state.generation).reshape(-1)[ids]
        handles = gear.Handle(slot=jnp.asarray(ids, jnp.int32), generation=jnp.asarray(generation))
        self.state = self.replay.update_priorities(self.state, handles, jnp.asarray(priorities))


def _batch(sample: Any) -> Batch:
    """A sample as NumPy; the columns' masks must be one another's equal, and every row valid."""
    data = {name: np.asarray(values) for name, values in sample.data.items()}
    masks = [np.asarray(mask) for mask in sample.mask.values()]
    if not all(np.array_equal(masks[0], mask) for mask in masks) or not np.asarray(sample.valid).all():
        raise AssertionError("masks of equal windows differ, or a row is not valid")
    return Batch(data, masks[0], np.asarray(sample.weight))
