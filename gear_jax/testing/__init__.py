"""Contract suites: what an implementation must do to count as one. Tests of this package and of others call them.

They load on first use: processes of actors import a module of this package, and no jax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gear_jax.testing import actors, ops, processes, selectors
    from gear_jax.testing.selectors import check_selector

__all__ = ["actors", "check_selector", "ops", "processes", "selectors"]


def __getattr__(name: str):
    if name == "check_selector":
        value = importlib.import_module("gear_jax.testing.selectors").check_selector
    elif name in __all__:
        value = importlib.import_module(f"gear_jax.testing.{name}")
    else:
        raise AttributeError(f"module 'gear_jax.testing' has no attribute {name!r}")
    globals()[name] = value
    return value
