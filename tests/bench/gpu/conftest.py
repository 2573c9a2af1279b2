"""What the rows find, without running them: a result as a GPU would give it."""

import dataclasses

import pytest

from gear_jax.bench.gpu.bench import Bench
from gear_jax.bench.gpu.findings import CALL, IN_FLIGHT, KERNEL, Findings
from gear_jax.bench.gpu.sizes import TINY


@pytest.fixture
def tiny():
    """A run on this machine's backend, with tables of a few KB."""
    return Bench(dataclasses.replace(TINY, rounds=1), lambda _: None)


@pytest.fixture
def copies():
    return {"h2d": 54.0, "d2h": 50.0}


def _gather(copies):
    found = Findings(copies)
    for row, speed in ((4096, 50.0), (1 << 20, 52.0)):
        found.rate(f"{row} B rows", 1 << 26, (1 << 26) / speed / 1e9, IN_FLIGHT, "h2d", series="gather", row_bytes=row)
        found.rate(f"{row} B rows", 1 << 26, 2e-3, CALL, "h2d")
    found.at_least("gather", 0.92, "of cudaMemcpy H2D", found.of_copy(50.0, "h2d"), "50.0 GB/s (4 KiB | rows)")
    return found


def _windows(copies):
    found = Findings(copies)
    place = {"series": "windows, gather", "row_bytes": 1280}
    found.rate("K = 20", 84_000_000, 2.1e-3, KERNEL, "h2d", **place)
    found.at_least("windows", 3.0, "x the unsorted kernel", 2.5, "30 M rows/s")
    found.note("A note.")
    return found


def _priorities(copies):
    found = Findings(copies)
    found.figure("ops.sumtree_sample, N = 1,000, B = 8", 100.0, "us", IN_FLIGHT)
    found.peer("TorchRL, CUDA tree", "sample, N = 1,000, B = 8", 400.0, "us", 100.0)
    found.no_peer("torch.multinomial", "sample, N = 1,000, B = 8", "not installed: No module named 'torch'")
    for op, ratio in (("sample", 4.0), ("update", None)):
        found.at_least(f"prioritised, N = 1,000, B = 8: {op}", 1.0, "x TorchRL's CUDA tree", ratio, "100 us")
    return found


def _peers(copies):
    found = Findings(copies)
    found.peer("NumPy indexing + device_put", "4 KiB rows", 2.5, "GB/s", 50.0, series="gather", row_bytes=4096)
    found.peer("XLA take in HBM", "4 KiB rows", 1000.0, "GB/s", 50.0, series="gather", row_bytes=4096)
    found.peer("NumPy indexing + device_put", "windows", 0.5, "GB/s", 40.0, series="windows", row_bytes=1280)
    found.no_peer("flashbax in HBM", "4 KiB rows", "not installed: No module named 'flashbax'", series="gather")
    return found


@pytest.fixture
def result(copies):
    """Four rows of a run on a GPU, the last one broken off before it found anything."""
    rows = {"gather": _gather, "windows": _windows, "priorities": _priorities, "peers": _peers}
    found = {name: make(copies).as_dict() | {"seconds": 2.0} for name, make in rows.items()}
    found["guard"] = Findings(copies).as_dict() | {"seconds": 0.1, "wrong": "the column lies elsewhere"}
    machine = {
        "processor": "CPU", "cores": 16, "memory_gb": 128.0, "device": "NVIDIA H100", "card": "NVIDIA H100 80GB HBM3",
        "driver": "580.1", "memory": "81559 MiB", "pcie_generation": "5", "pcie_lanes": "16",
        "versions": {"jax": "0.11.2"},
    }  # fmt: skip
    options = {"size": "full", "limit": 240.0, "rows": list(found)}
    return {"machine": machine, "options": options, "memcpy": "measured before each row", "rows": found}
