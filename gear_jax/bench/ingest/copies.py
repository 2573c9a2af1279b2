"""The machine's memcpy: S5's trajectories into memory that is used again, on one thread and on two; its cudaMemcpy."""

import time

import numpy as np

from gear_jax.bench.engines.on_memcpy import Memcpy
from gear_jax.bench.gpu.memcpy import Copies
from gear_jax.bench.gpu.sizes import FULL, QUICK
from gear_jax.bench.workloads import Row, workloads


def rates(seconds: float, quick: bool) -> dict[str, float]:
    """Bytes a second by "1 thread" and "2 threads"."""
    engine = Memcpy(workloads(quick)["S5"])
    engine.fill()
    row = Row("S5", "sample", 32, "GB/s")
    found = {}
    for call in engine.calls(row):
        call.run()
        times, begin = [], time.perf_counter()
        while time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            call.run()
            times.append(time.perf_counter() - start)
        found[call.variant] = engine.workload.row_bytes(row) / float(np.median(times))
    return found


def gpu_rates(quick: bool) -> dict[str, float]:
    """Bytes a second of `cudaMemcpy` from page-locked memory "to the GPU" and "from the GPU"."""
    sizes = QUICK if quick else FULL
    found = Copies(sizes.copy_bytes, sizes.copies, sizes.rounds).measure()
    return {"to the GPU": found["h2d"] * 1e9, "from the GPU": found["d2h"] * 1e9}
