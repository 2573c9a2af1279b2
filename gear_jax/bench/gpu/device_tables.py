"""Tables in the GPU's own memory: `ops.gather` beside XLA's gather of the same rows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import ops
from gear_jax.bench.gpu import tables
from gear_jax.bench.gpu.bench import Bench
from gear_jax.bench.gpu.findings import KERNEL, Findings, Wrong
from gear_jax.bench.gpu.reading import size_text
from gear_jax.bench.gpu.sizes import BATCH_BYTES

_CALLS = 16  # what the longer of two programs does more
_MODES = ("clip", "promise_in_bounds")


def hbm(bench: Bench, found: Findings) -> None:
    """Random rows of a table in HBM. Both sides return every batch, read rows of 4-byte values and find no padding."""
    worst: tuple[float, str] | None = None
    for row in bench.sizes.hbm_rows:
        layout = tables.Layout(bench.sizes.hbm_bytes // row, 1, {"x": (row // 4, "uint32")})
        columns = tables.make(layout, "device")
        for size in bench.sizes.batch_bytes:
            bench.check_time()
            what = f"{size_text(row)} rows of {size_text(layout.size)} in HBM, {size_text(size)} a batch"
            ours, theirs = _compare(bench, layout, columns, size // row)
            speed = found.rate(what, size, ours, KERNEL, series="gather, HBM", row_bytes=row)
            best = min(theirs, key=lambda mode: theirs[mode])
            for mode, seconds in theirs.items():
                found.peer(f"XLA take, mode={mode}", what, size / seconds / 1e9, "GB/s", speed)
            ratio = theirs[best] / ours
            if worst is None or ratio < worst[0]:
                worst = (ratio, f"{speed:.0f} GB/s, XLA {size / theirs[best] / 1e9:.0f} ({what})")
        del columns
    assert worst is not None
    counts = bench.on_gpu and min(bench.sizes.batch_bytes) >= BATCH_BYTES
    found.at_least("HBM table: gather; the slowest", 1.0, "x XLA's take", worst[0], worst[1], counts)


def _compare(
    bench: Bench, layout: tables.Layout, columns: dict[str, jax.Array], batch: int
) -> tuple[float, dict[str, float]]:
    """Seconds of a gather: (ours, mode -> XLA's)."""
    rng = np.random.default_rng(0)
    host = [rng.integers(0, layout.slots, batch, np.int32) for _ in range(1 + _CALLS)]
    index = [jnp.asarray(x) for x in host]
    zero, one = jnp.zeros((batch,), jnp.int32), jnp.ones((batch,), jnp.int32)

    def gathered(number: int, columns, index):
        batches, ticket = [], None
        for i in range(number):
            data, _, ticket = ops.gather(columns, index[i], zero, one, ticket=ticket)
            batches.append(data["x"])
        return batches

    def taken(mode: str, number: int, columns, index):
        rows = columns["x"].reshape(layout.slots, -1)
        return [rows.at[index[i]].get(mode=mode) for i in range(number)]

    def seconds(function: Callable[..., Any]) -> float:
        runs = []
        for number in (1, 1 + _CALLS):
            program = jax.jit(functools.partial(function, number))
            runs.append(lambda program=program: jax.block_until_ready(program(columns, index)))
        got = np.asarray(runs[1]()[-1]).reshape(batch, 1, -1)
        tables.check(layout, {"x": got}, host[-1], np.zeros_like(host[0]), {"x": (0, 1)})
        return bench.between(runs[0], runs[1], _CALLS)

    try:
        return seconds(gathered), {mode: seconds(functools.partial(taken, mode)) for mode in _MODES}
    except Wrong as error:
        raise Wrong(f"HBM table: {error}") from error
