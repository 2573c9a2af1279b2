"""`replay.sample` as a user calls it: how long it takes from Python, and the GPU memory it needs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gear_jax as gear
from gear_jax.bench.gpu import clock, tables
from gear_jax.bench.gpu.bench import Bench
from gear_jax.bench.gpu.findings import CALL, Findings, Wrong
from gear_jax.bench.gpu.sequences import fill, make_replay
from gear_jax.bench.gpu.sizes import MIB

_P50_US = 100.0
_HBM_MIB = 1.0
_KEYS = 64


def check_sample(layout: tables.Layout, sample: gear.Sample) -> None:
    """Compares a sample of whole trajectories, of a table filled in order, with NumPy. Raises Wrong."""
    if not np.asarray(sample.valid).all():
        raise Wrong("a row of a full table is not valid")
    slots = np.asarray(sample.handles.slot)
    spans = dict.fromkeys(layout.columns, (0, layout.steps))
    tables.check(layout, sample.data, slots, np.zeros_like(slots), spans, sample.mask)


def latency(bench: Bench, found: Findings) -> None:
    """One sample of 256 rows of 4 KiB, uniform, called from Python; with and without the last sample's memory."""
    s = bench.sizes
    slots, batch, calls = s.latency
    layout = tables.Layout(slots, 1, {"x": (s.cell_bytes, "uint8")})
    replay = make_replay(layout)
    state = fill(replay, replay.init(jax.random.key(0)), layout, max(1, slots // 32))
    state, first = replay.sample(state, jax.random.key(3), batch)
    check_sample(layout, first)
    keys = list(jax.random.split(jax.random.key(1), _KEYS))
    jax.block_until_ready(keys)
    held: list[Any] = [state, first]

    def fresh(i: int) -> gear.Sample:
        held[0], sample = replay.sample(held[0], keys[i % _KEYS], batch)
        return sample

    def recycled(i: int) -> gear.Sample:
        held[0], held[1] = replay.sample(held[0], keys[i % _KEYS], batch, out=held[1])
        return held[1]

    best: tuple[float, str] | None = None
    kind = state.columns["x"].sharding.memory_kind
    for name, call in (("new memory", fresh), ("out=last sample", recycled)):
        bench.check_time()
        handed, done = bench.each(call, calls)
        what = f"sample {batch} x {s.cell_bytes} B ({kind}), {name}"
        p50 = found.figure(f"{what}: p50", clock.percentile(done, 50) * 1e6, "us", CALL)
        p99 = found.figure(f"{what}: p99", clock.percentile(done, 99) * 1e6, "us", CALL)
        sent = found.figure(f"{what}: p50 of the dispatch alone", clock.percentile(handed, 50) * 1e6, "us", CALL)
        if best is None or p50 < best[0]:
            best = (p50, f"{p50:.0f} us, p99 {p99:.0f}, dispatch alone {sent:.0f} ({name})")
    assert best is not None
    found.at_most(
        f"sample (uniform select and gather of {batch} x {s.cell_bytes} B) from Python, p50",
        _P50_US, "us", best[0], best[1], counts=bench.on_gpu,
    )  # fmt: skip


def memory(bench: Bench, found: Findings) -> None:
    """GPU memory that a sample needs beyond what it returns. First of all rows: the peak of a process never falls."""
    s = bench.sizes
    width = 16 * s.cell_bytes if s.name == "tiny" else 64 * MIB
    rows = tables.Layout(max(64, width // (2 * s.cell_bytes)), 1, {"x": (s.cell_bytes, "uint8")})
    steps = bench.layouts["windows"].steps
    sequences = tables.window_layout(max(8, width // (2 * 64 * steps)), steps)
    window = gear.Window(offset=1 - s.context, length=s.context)
    worst: tuple[float, str] | None = None
    for layout, options, batch, what in (
        (rows, {}, width // s.cell_bytes, f"rows of {s.cell_bytes} B"),
        (sequences, {"windows": window}, s.window_batch, f"windows of K = {s.context}"),
    ):
        extra, exact = _beyond(layout, options, batch)
        what = f"{what}, B = {batch:,}"
        kind = "peak of the GPU's allocator beyond the sample" if exact else "temporary memory of the compiled sample"
        found.figure(f"{what}: {kind}", extra / MIB, "MiB")
        if exact and (worst is None or extra > worst[0]):
            worst = (extra, what)
    shown = "not on this backend" if worst is None else f"{worst[0] / MIB:.2f} MiB ({worst[1]})"
    value = None if worst is None else worst[0] / MIB
    found.at_most("HBM used by a sample beyond its output", _HBM_MIB, "MiB", value, shown)


def _beyond(layout: tables.Layout, options: dict[str, Any], batch: int) -> tuple[int, bool]:
    """Bytes that a sample takes beyond the state and itself, and whether the allocator says so (or else XLA)."""
    device = jax.devices()[0]
    replay = make_replay(layout, **options)
    state = replay.init(jax.random.key(0))
    few = max(1, layout.slots // 64)  # trajectories that can be drawn: writing them must take far less than a sample
    values = jax.jit(functools.partial(tables.trajectories, layout))(jnp.arange(few, dtype=jnp.int32))
    state, _ = replay.add(state, values, jnp.full((few,), layout.steps, jnp.int32))
    del values
    key = jax.random.key(1)
    jax.block_until_ready((state, key))
    before = device.memory_stats()
    if not before:
        program = jax.jit(replay.sample, static_argnums=2, donate_argnums=0).lower(state, key, batch).compile()
        analysis = program.memory_analysis()
        return (analysis.temp_size_in_bytes if analysis else 0), False
    state, sample = replay.sample(state, key, batch)
    jax.block_until_ready(sample)
    after = device.memory_stats()
    size = sum(x.nbytes for x in jax.tree.leaves(sample))
    if before["peak_bytes_in_use"] > before["bytes_in_use"] + size:
        raise Wrong("the allocator's peak before the sample was above what the sample needs: nothing can be seen")
    # Against what is held now, and not the arrays' bytes: the allocator may give an array a larger piece than it needs.
    return after["peak_bytes_in_use"] - after["bytes_in_use"], True
