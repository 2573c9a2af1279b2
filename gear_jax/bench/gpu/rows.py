"""The rows, in the order in which they run."""

import dataclasses
from collections.abc import Callable

from gear_jax.bench.gpu import (
    calling,
    device_tables,
    engines,
    inserting,
    meshes,
    peers,
    priorities,
    reading,
    remote,
    sequences,
    training,
)
from gear_jax.bench.gpu.bench import Bench
from gear_jax.bench.gpu.findings import Findings


@dataclasses.dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
      name: for `--rows`.
      run: adds what it finds.
      tables: names in `Bench.layouts` of the tables that it uses; freed behind the last row that does.
    """

    name: str
    run: Callable[[Bench, Findings], None]
    tables: tuple[str, ...] = ()

    @property
    def about(self) -> str:
        """What it measures, in a sentence."""
        return (self.run.__doc__ or "").splitlines()[0]


# `memory` reads a peak that never falls, so it is the first. The table of `small_rows` is freed before that of
# `windows` is made, in its place. `peers` runs code that is not ours in this process, so it is the last.
ROWS = (
    Row("memory", calling.memory),
    Row("small_rows", reading.small_rows, ("small",)),
    Row("gather", reading.gather, ("main",)),
    Row("windows", sequences.windows, ("windows",)),
    Row("trajectories", sequences.trajectories, ("windows", "main")),
    Row("engine", engines.engines, ("main",)),
    Row("latency", calling.latency),
    Row("priorities", priorities.priorities),
    Row("hbm", device_tables.hbm),
    Row("misaligned", reading.misaligned),
    Row("insert", inserting.insert, ("main", "windows")),
    Row("guard", inserting.guard),
    Row("training", training.training),
    Row("mesh", meshes.meshes),
    Row("remote", remote.remote),
    Row("peers", peers.peers, ("main", "windows")),
)
NAMES = tuple(row.name for row in ROWS)
