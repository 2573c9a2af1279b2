"""UCX, of the package libucx or the system: a session's worker exposes memory and reads it (ffi/transport/ucx.h)."""

import contextlib
import functools
import importlib
import os
from typing import Any

from gear_jax import _native
from gear_jax.transport._errors import TransportError

# UCX reads these when it is loaded. Its own defaults rewrite the machine code of munmap, brk, madvise and others in the
# process, while XLA's threads may be running it, for a cache of registrations that nothing here needs; take SIGHUP for
# themselves; and write to the standard output.
_DEFAULTS = {"UCX_MEM_EVENTS": "n", "UCX_DEBUG_SIGNO": "0", "UCX_LOG_FILE": "stderr"}


@functools.cache
def _load() -> None:
    """Loads the package's libraries, which C++ finds by name; without the package, the system's."""
    ours = {name: value for name, value in _DEFAULTS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("libucx").load_library()
        library: Any = _native.load("cpu")
        library.ucx_version()
    finally:
        for name in ours:
            del os.environ[name]


def missing(options: dict[str, Any]) -> str:
    """See `Kind`."""
    _load()
    library: Any = _native.load("cpu")
    return library.transport_missing("ucx", options)


def version() -> str:
    """The version of the library; "": there is none that can be used."""
    _load()
    library: Any = _native.load("cpu")
    return library.ucx_version()


def expose(native: Any, memory: list[tuple[int, int]], options: dict[str, Any]) -> "_UcxExposer":
    """See `Kind`."""
    del options  # the worker was made with them
    return _UcxExposer(native, memory)


class _UcxExposer:
    def __init__(self, native: Any, memory: list[tuple[int, int]]):
        self._native = native
        try:
            self._regions = native.expose(memory)
        except RuntimeError as e:
            raise TransportError(str(e)) from None

    def regions(self) -> list[tuple[int, int, bytes]]:
        return self._regions

    def accept(self, peer: int, offer: bytes) -> bytes:
        try:
            return self._native.accept(peer, offer)
        except RuntimeError as e:
            raise TransportError(str(e)) from None

    def drop(self, peer: int) -> None:
        """UCX keeps nothing for a reader that it would not free by itself."""

    def close(self) -> None:
        """The worker went with the session."""
