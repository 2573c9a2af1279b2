"""Experience replay as a JAX value.

The public names load on first use (PEP 562), so that actor processes can import `gear_jax.specs` without importing jax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gear_jax import checkpoint, datasets, external, flax, ops, selectors, sharding, testing, transport
    from gear_jax._prefetch import Prefetcher, Staleness, prefetch
    from gear_jax.replay import (
        Handle,
        PendingSample,
        Replay,
        ReplayState,
        Sample,
        assert_in_place,
        footprint,
        make_replay,
    )
    from gear_jax.specs import ColumnSpec, TableSpec, Window

__version__ = "0.1.0"

_ATTRIBUTES = {
    "ColumnSpec": "specs",
    "TableSpec": "specs",
    "Window": "specs",
    "Handle": "replay",
    "PendingSample": "replay",
    "Prefetcher": "_prefetch",
    "Replay": "replay",
    "ReplayState": "replay",
    "Sample": "replay",
    "Staleness": "_prefetch",
    "assert_in_place": "replay",
    "footprint": "replay",
    "make_replay": "replay",
    "prefetch": "_prefetch",
}
_MODULES = (
    "bench",
    "checkpoint",
    "cli",
    "datasets",
    "external",
    "flax",
    "ops",
    "replay",
    "selectors",
    "sharding",
    "specs",
    "testing",
    "transport",
    "windows",
)

__all__ = [
    "ColumnSpec",
    "Handle",
    "PendingSample",
    "Prefetcher",
    "Replay",
    "ReplayState",
    "Sample",
    "Staleness",
    "TableSpec",
    "Window",
    "assert_in_place",
    "checkpoint",
    "datasets",
    "external",
    "flax",
    "footprint",
    "make_replay",
    "ops",
    "prefetch",
    "selectors",
    "sharding",
    "testing",
    "transport",
]


def __getattr__(name: str):
    if name in _ATTRIBUTES:
        value = getattr(importlib.import_module(f"gear_jax.{_ATTRIBUTES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"gear_jax.{name}")
    else:
        raise AttributeError(f"module 'gear_jax' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted(set(globals()) | set(__all__))
