"""Whether the copy engines of a GPU do a gather, or a kernel; and how often each did."""

import functools
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from gear_jax import _cuda, _native
from gear_jax._errors import message, type_error, value_error
from gear_jax.ops import _place, _registry
from gear_jax.ops._addresses import Addresses

ENGINES = ("auto", "kernel", "copy")

COPY_WINDOW_BYTES = 1 << 20
COPY_BATCH_BYTES = 1 << 28
"""Columns whose windows, and whose batch, have so many bytes go by the copy engines where they can.

Each copy costs the host a fixed time, about 2 us, and each call about 1.5 ms for the numbers of its rows: they go into
page-locked memory behind the work that is under way. On an H200 batches of 256 MiB in windows from 1 MiB reach 51 GB/s
by copies and 48 by a kernel that is called the same way, batches of 64 MiB 23 to 36 and 46
(`python -m gear_jax bench --device gpu --rows engine`). Copies leave all multiprocessors to other work.
"""

_PLATFORM = "gpu"
_NAMES = ("slots", "starts", "lengths")
_OUTSIDE = "Call ops.gather outside of jit, vmap, scan and the like, or leave engine out"

_lock = threading.Lock()
_counts = {"kernel": 0, "copy": 0, "copy_bytes": 0}
_fallback: str | None = None


def stats() -> dict[str, Any]:
    """How the gathers of this process went that were called outside of programs.

    Nothing is counted of what runs inside jit (`Replay.sample` among it): there it is always a kernel.

    Returns:
      "kernel": calls of `gather` that a kernel did (on a CPU: its threads). "copy": those whose large windows the copy
      engines did. "copy_bytes": bytes of the windows that they filled, padding included. "fallback": why a kernel did
      what the copy engines would have done, or None where that did not happen.
    """
    with _lock:
        return {**_counts, "fallback": _fallback}


def record(copied: Sequence[bool], sizes: Sequence[int], rows: int) -> None:
    """Counts a call that was made outside of programs: which columns were copied, and the bytes of their windows."""
    with _lock:
        _counts["copy" if any(copied) else "kernel"] += 1
        _counts["copy_bytes"] += rows * sum(size for size, by_copy in zip(sizes, copied, strict=True) if by_copy)


def choose(
    engine: str, columns: Sequence[Any], rows: Sequence[Any], sizes: Sequence[int], others: Any
) -> tuple[bool, ...] | None:
    """Which columns the copy engines take.

    Args:
      engine: as in `gather`.
      columns: arrays and `Addresses`.
      rows: slots, starts and lengths, where they are.
      sizes: bytes of a window of each column.
      others: pytree of what else the call takes.

    Returns:
      For each column whether it is copied; all False: a kernel does all. None: a kernel does all, and a program is
      being traced.

    Raises:
      TypeError, ValueError: if "copy" is asked for what the copy engines cannot do, or `engine` is none of `ENGINES`.
      RuntimeError: if "copy" is asked for where the driver, or this build, is too old.
    """
    if engine not in ENGINES:
        raise value_error("engine", got=repr(engine), wanted=f"one of {ENGINES}", fix="Leave it out.")
    words = [c.words if isinstance(c, Addresses) else c for c in columns]  # to flatten them would check them
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((words, rows, others))) or _place.tracing():
        if engine == "copy":
            raise value_error(
                "engine", got="'copy' in a program, or under a transformation", wanted="'auto' or 'kernel' there",
                fix=f"{_OUTSIDE}: what a program draws is not known on the host.",
            )  # fmt: skip
        return None
    batch = np.shape(rows[0])[0]
    large = [size >= COPY_WINDOW_BYTES and size * batch >= COPY_BATCH_BYTES for size in sizes]
    copied = tuple(
        engine == "copy" or (engine == "auto" and fits and _in_host(c)) for fits, c in zip(large, columns, strict=True)
    )
    if not any(copied):
        return copied
    fault = _fault(columns, copied, rows)
    lacking = None if fault else batch_copy_problem()
    if engine == "copy" and (fault or lacking):
        raise fault or RuntimeError(lacking)
    if lacking:
        _fall_back(lacking)
    return copied if not fault and not lacking else (False,) * len(columns)


def on_host(rows: Sequence[Any], columns: Sequence[jax.Array]) -> list[jax.Array]:
    """Slots, starts and lengths as the handler reads them on the host: in page-locked memory, and there."""
    device = next(iter(columns[0].sharding.device_set))
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    # Copies of our own: JAX may keep the memory of a NumPy array, and the caller may change it meanwhile.
    return jax.block_until_ready(jax.device_put([np.array(x) for x in rows], sharding))


@functools.cache
def batch_copy_problem() -> str | None:
    """Why this process has no use of the copy engines; None if it has."""
    module = _native.load("CUDA")
    if module is None:
        return message("CUDA library", got="none in this build", wanted="one", fix="GEAR_JAX_CUDA=ON pip install .")
    return _cuda.batch_copy_problem(module.driver_version(), module.runtime_version())


def _in_host(column: Any) -> bool:
    return isinstance(column, jax.Array) and _registry.in_host_memory(column)


def _fault(columns: Sequence[Any], copied: Sequence[bool], rows: Sequence[Any]) -> Exception | None:
    """Why these columns cannot be copied for these rows, or None."""
    for i, (c, by_copy) in enumerate(zip(columns, copied, strict=True)):
        what = f"engine='copy': columns[{i}]"
        if not isinstance(c, jax.Array):
            got = type(c).__name__
            return type_error(what, got=got, wanted="an array", fix="Pass the array, or leave engine out.")
        platforms = [d.platform for d in c.sharding.device_set]
        if by_copy and platforms != [_PLATFORM]:
            wanted = "one on a single GPU"
            return value_error(what, got=f"an array on {platforms}", wanted=wanted, fix="Leave engine out.")
        if by_copy and not _in_host(c):
            return value_error(
                what, got="the device's own memory", wanted="page-locked host memory ('pinned_host')",
                fix="Pass jax.device_put(column, jax.memory.Space.Host), or leave engine out.",
            )  # fmt: skip
    for name, x in zip(_NAMES, rows, strict=True):
        if isinstance(x, jax.Array):
            return type_error(
                f"engine='copy': {name}", got="a jax.Array", wanted="a NumPy array, which the host can read",
                fix=f"Pass np.asarray({name}), or leave engine out.",
            )  # fmt: skip
    return None


def _fall_back(reason: str) -> None:
    global _fallback
    with _lock:
        said, _fallback = _fallback, reason
    if said is None:
        warnings.warn(f"gear_jax.ops.gather: {reason}", RuntimeWarning, stacklevel=4)
