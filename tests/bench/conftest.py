"""Workloads of a few kilobytes with every feature of the real ones."""

import dataclasses

import pytest

from gear_jax.bench.workloads import Column, Row, Workload, workloads


def _tiny(name: str) -> Workload:
    real = workloads(quick=True)[name]
    columns = tuple(dataclasses.replace(c, shape=tuple(min(n, 5) for n in c.shape)) for c in real.columns)
    rows = tuple(dataclasses.replace(row, size=min(row.size, 24)) for row in real.rows)
    steps, window = min(real.steps, 40), real.window and 10
    # Workloads with priorities keep enough trajectories for the statistics of their check.
    stored = 20_000 if real.alpha is not None else 48
    if real.alpha is not None:
        rows = tuple(dataclasses.replace(row, size=512) for row in rows)
    return dataclasses.replace(real, columns=columns, rows=rows, steps=steps, stored=stored, window=window)


@pytest.fixture(params=list(workloads()))
def tiny(request) -> Workload:
    """Each workload, small."""
    return _tiny(request.param)


@pytest.fixture
def windowed() -> Workload:
    """Windows of 4 steps of 8, with padding."""
    columns = (Column("embedding", (3,), "float32"), Column("token", (1,), "int32"))
    rows = (Row("W", "sample", 16, "GB/s"),)
    return Workload("W", columns, 8, 32, "token", window=4, random_lengths=True, rows=rows)
