"""What the actors of both libraries write: the trajectories of workload S5. NumPy only; run by any interpreter.

A trajectory is 20 steps of u8[84,84,4] and i32: 564,560 bytes. Its steps carry codes, so that a table's bytes can be
compared with NumPy (`gear_jax.bench.check`).
"""

import importlib.util
import pathlib
import sys
from typing import Any

EACH = 16  # trajectories that an actor has prepared, and writes over and over


def bench() -> Any:
    """The package `gear_jax.bench`, importable without gear_jax (the peers' environments have none)."""
    name, folder = "gear_jax_bench", pathlib.Path(__file__).resolve().parent.parent
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def workload(quick: bool = False) -> Any:
    """S5."""
    bench()
    return importlib.import_module("gear_jax_bench.workloads").workloads(quick)["S5"]


def trajectories(actor: int) -> dict[str, Any]:
    """What one actor writes: columns `[EACH, 20, *shape]`."""
    import numpy as np

    return workload().trajectories(np.arange(actor * EACH, (actor + 1) * EACH))
