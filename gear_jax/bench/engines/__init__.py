"""One file per engine: a library that stores a workload and runs its rows. It imports only itself."""

import importlib
from typing import Any

# Name on the command line -> (module here, class, the module that must be importable).
ENGINES = {
    "gear_jax": ("on_gear_jax", "GearJax", "gear_jax"),
    "flashbax": ("on_flashbax", "Flashbax", "flashbax"),
    "flashbax_async": ("on_flashbax", "FlashbaxAsync", "flashbax"),
    "cpprb": ("on_cpprb", "Cpprb", "cpprb"),
    "torchrl": ("on_torchrl", "TorchRL", "torchrl"),
    "reverb": ("on_reverb", "Reverb", "reverb"),
    "numpy": ("on_numpy", "NumPy", "numpy"),
    "memcpy": ("on_memcpy", "Memcpy", "numpy"),
}


def load(name: str) -> Any:
    """The engine's class; imports its library."""
    module, attribute, _ = ENGINES[name]
    return getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
