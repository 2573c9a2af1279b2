"""`footprint`: what a table will take, before anything is allocated."""

import dataclasses
import math

import jax

from gear_jax._host_memory import human
from gear_jax.ops._place import memory_kind
from gear_jax.replay import _memory, _state
from gear_jax.replay._make import make_replay


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of a table.

    Attributes:
      columns: of each column, by its path.
      index: of all the rest: lengths, generations, priorities, sums, counters.
      tiers: by memory kind, on each device.
      devices: how many devices hold a part of the table.
      copies: how many of them hold each part.
      problem: why `Replay.init` would refuse the table (it does not fit the host's page-locked memory), and what to
        do; None: nothing is known against it.
    """

    columns: dict[str, int]
    index: int
    tiers: dict[str, int]
    devices: int
    copies: int = 1
    problem: str | None = None

    @property
    def total(self) -> int:
        """Bytes over all devices."""
        return self.copies * (sum(self.columns.values()) + self.index)

    def __str__(self):
        lines = [f"{name}: {human(n)}" for name, n in self.columns.items()] + [f"index: {human(self.index)}"]
        lines += [f"{tier}, each of {self.devices} device(s): {human(n)}" for tier, n in self.tiers.items()]
        return "\n".join(lines + ([self.problem] if self.problem else []))


def footprint(table, *args, **kwargs) -> Footprint:
    """The bytes that `make_replay(table, ...).init()` will take. Takes the same arguments; allocates nothing.

    Starts jax's backend: where the columns lie depends on it, unless `memory` says so.

    Raises:
      TypeError, ValueError: as `make_replay`.
    """
    replay = make_replay(table, *args, **kwargs)
    config, placement = replay.config, replay.placement
    devices = 1 if placement is None else placement.devices
    state = jax.eval_shape(lambda: _state.init_index(config, jax.random.key(0)))
    columns = dict(zip(config.names, _memory.column_bytes(config), strict=True))
    index = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    tiers, kind = {"device": -(-index // devices)}, memory_kind(config.memory)
    tiers[kind] = tiers.get(kind, 0) + sum(columns.values()) // devices
    copies = 1 if placement is None else placement.mesh.size // devices
    problem = _memory.problem(config, placement)
    return Footprint(columns, index, tiers, devices=copies * devices, copies=copies, problem=problem)
