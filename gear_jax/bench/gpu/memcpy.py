"""`cudaMemcpy` between page-locked host memory and the GPU: the speed of the link, which nothing here can beat."""

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gear_jax.bench.gpu.findings import Missing


class Copies:
    """Two buffers and the copies between them, timed with CUDA events on a stream of their own.

    Args:
      size: bytes of a copy.
      number: copies in a repetition.
      rounds: repetitions; the median counts.

    Raises:
      Missing: if CuPy is not installed.
    """

    def __init__(self, size: int, number: int, rounds: int):
        try:
            self.cuda: Any = importlib.import_module("cupy").cuda
        except ImportError as error:
            raise Missing(f"cudaMemcpy is not measured: {error}. Install cupy-cuda13x.") from error
        self.size, self.number, self.rounds = size, number, rounds
        self.stream = self.cuda.Stream(non_blocking=True)
        self.host = self.cuda.alloc_pinned_memory(size)
        self.device = self.cuda.alloc(size)
        np.frombuffer(self.host, np.uint32, size // 4)[:] = np.arange(size // 4, dtype=np.uint32)

    def upload(self) -> None:
        """Enqueues one copy to the GPU."""
        kind = self.cuda.runtime.memcpyHostToDevice
        self.cuda.runtime.memcpyAsync(self.device.ptr, self.host.ptr, self.size, kind, self.stream.ptr)

    def measure(self) -> dict[str, float]:
        """GB/s to the GPU ("h2d") and from it ("d2h")."""
        runtime = self.cuda.runtime
        up = self._speed(self.device.ptr, self.host.ptr, runtime.memcpyHostToDevice)
        down = self._speed(self.host.ptr, self.device.ptr, runtime.memcpyDeviceToHost)
        return {"h2d": up, "d2h": down}

    def _speed(self, target: int, source: int, kind: int) -> float:
        begin, end = self.cuda.Event(), self.cuda.Event()
        found = []
        for _ in range(self.rounds + 1):
            begin.record(self.stream)
            for _ in range(self.number):
                self.cuda.runtime.memcpyAsync(target, source, self.size, kind, self.stream.ptr)
            end.record(self.stream)
            end.synchronize()
            found.append(self.cuda.get_elapsed_time(begin, end) / 1e3)
        return self.size * self.number / statistics.median(found[1:]) / 1e9


def together(devices: int, size: int, number: int, rounds: int) -> float:
    """GB/s of copies from page-locked memory to several GPUs at once, all of them together.

    Args:
      devices: how many, the first ones.
      size, number, rounds: as in `Copies`, for each of them.

    Raises:
      Missing: if CuPy is not installed.
    """
    held = []
    for k in range(devices):
        copies = _on(k, lambda: Copies(size, number, rounds))
        held.append(copies)
    found = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        for _ in range(number):
            for k, copies in enumerate(held):
                _on(k, copies.upload)
        for copies in held:
            copies.stream.synchronize()
        found.append(time.perf_counter() - begin)
    return devices * size * number / statistics.median(found[1:]) / 1e9


def _on(device: int, run: Callable[[], Any]) -> Any:
    cupy = importlib.import_module("cupy") if importlib.util.find_spec("cupy") else None
    if cupy is None:
        return run()  # which says what is missing
    with cupy.cuda.Device(device):
        return run()
