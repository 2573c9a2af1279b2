"""The only loader of the shared libraries. No jax in here."""

import functools
import importlib
from typing import Any

# platform name of jax.ffi -> extension module
_MODULES = {"cpu": "_gear_cpu", "CUDA": "_gear_cuda"}


class LibraryMissingError(ImportError):
    """This installation has no library of the CPU."""


@functools.cache
def load(platform: str):
    """The extension module of a platform ("cpu" or "CUDA"), or None where this build has none.

    Raises:
      LibraryMissingError: if there is no library of the CPU.
      ImportError: if a library is there but does not load.
    """
    name = f"gear_jax.{_MODULES[platform]}"
    try:
        module: Any = importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name != name:
            raise
        if platform == "cpu":
            raise LibraryMissingError(
                "gear_jax._gear_cpu: the compiled library is missing from this installation. Run `pip install .` in "
                "the project's root (it needs a C++17 compiler)."
            ) from e
        return None
    if platform != "cpu":  # the sessions of remote reads live in the CPU's library
        cpu: Any = load("cpu")
        module.use_rdma_host(cpu.rdma_host())
    return module


def modules():
    """Yields the extension modules that this build holds."""
    for platform in _MODULES:
        module = load(platform)
        if module is not None:
            yield module


def registrations():
    """Yields (platform, target name, capsule) of every FFI handler that this build holds; C++ owns the table."""
    for platform in _MODULES:
        module = load(platform)
        if module is not None:
            for name, capsule in module.registrations().items():
                yield platform, name, capsule
