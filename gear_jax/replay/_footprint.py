"""`footprint`: what a table will take, before anything is allocated."""

import dataclasses
import math

import jax

from gear_jax.replay import _state
from gear_jax.replay._make import make_replay


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of a table.

    Attributes:
      columns: of each column, by its path.
      index: of all the rest: lengths, generations, priorities, sums, counters.
      tiers: by memory kind, on each device.
      devices: how many devices the table is spread over.
    """

    columns: dict[str, int]
    index: int
    tiers: dict[str, int]
    devices: int

    @property
    def total(self) -> int:
        """Bytes over all devices."""
        return sum(self.columns.values()) + self.index

    def __str__(self):
        lines = [f"{name}: {_human(n)}" for name, n in self.columns.items()] + [f"index: {_human(self.index)}"]
        lines += [f"{tier}, each of {self.devices} device(s): {_human(n)}" for tier, n in self.tiers.items()]
        return "\n".join(lines)


def footprint(table, *args, **kwargs) -> Footprint:
    """The bytes that `make_replay(table, ...).init()` will take. Takes the same arguments; allocates nothing.

    Raises:
      TypeError, ValueError: as `make_replay`.
    """
    config = make_replay(table, *args, **kwargs).config
    state = jax.eval_shape(lambda: _state.init(config, jax.random.key(0)))
    size = lambda x: math.prod(x.shape) * x.dtype.itemsize  # noqa: E731
    columns = {n: size(x) for n, x in zip(config.names, jax.tree.leaves(state.columns), strict=True)}
    index = sum(size(x) for x in jax.tree.leaves(state.replace(columns=None)))
    tiers = {"device": index}
    kind = config.memory or "device"
    tiers[kind] = tiers.get(kind, 0) + sum(columns.values())
    return Footprint(columns, index, tiers, devices=1)


def _human(n: int) -> str:
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
