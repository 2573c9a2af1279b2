"""Rows of several columns: windows of a Decision Transformer, and whole trajectories."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import gear_jax as gear
from gear_jax.bench.gpu import tables
from gear_jax.bench.gpu.bench import Bench, Reads
from gear_jax.bench.gpu.findings import CALL, IN_FLIGHT, KERNEL, SCAN, Findings
from gear_jax.bench.gpu.reading import size_text
from gear_jax.bench.gpu.sizes import SPAN_BYTES

_UNSORTED = 3.0
_SPREAD = 0.9  # of the best speed over all batches
_SPREAD_FROM = 2_000_000  # bytes of a batch from which on that is asked
_BEYOND_US = 20.0
_SHORT = ("observation", "action", "reward")  # 60 KB of 1000 steps


def windows(bench: Bench, found: Findings) -> None:
    """Windows of K steps of four narrow columns, all over a table of 16 GiB."""
    s, layout, columns = bench.sizes, bench.layouts["windows"], bench.table("windows")
    spans = dict.fromkeys(columns, (1 - s.context, s.context))
    rows: dict[str, float] = {}
    for order, name in ((None, "gather"), (False, "unsorted")):
        bench.check_time()
        reads = Reads(bench, layout, columns, s.window_batch, spans, order=order)
        reads.check()
        what = f"K = {s.context}, B = {s.window_batch:,} of {size_text(layout.size)}"
        what = what if order is None else f"{what}, unsorted"
        found.rate(what, reads.size, reads.in_flight(), IN_FLIGHT, "h2d")
        found.rate(what, reads.size, reads.single(), CALL, "h2d")
        seconds = reads.kernel()
        found.rate(
            what, reads.size, seconds, KERNEL, "h2d", series=f"windows, {name}", row_bytes=reads.size // reads.batch
        )
        rows[name] = found.figure(f"{what}: rows", s.window_batch / seconds / 1e6, "M rows/s", KERNEL)
    found.at_least(
        f"Decision-Transformer windows (K = {s.context}), B = {s.window_batch:,} over 16 GiB",
        _UNSORTED,
        "x the unsorted kernel",
        rows["gather"] / rows["unsorted"],
        f"{rows['gather']:.1f} M rows/s (unsorted {rows['unsorted']:.1f})",
        counts=layout.size >= SPAN_BYTES and s.window_batch >= 65_536,
    )


def trajectories(bench: Bench, found: Findings) -> None:
    """Whole trajectories of 60 KB and 12 MB at many batch sizes, and the first of them in a scan."""
    s = bench.sizes
    for table, names, batches in (("windows", _SHORT, s.short_batches), ("main", ("x",), s.long_batches)):
        layout = bench.layouts[table]
        columns = {name: bench.table(table)[name] for name in names}
        kind = "60 KB" if table == "windows" else "12 MB"
        speeds: dict[int, float] = {}
        for batch in batches:
            bench.check_time()
            reads = Reads(bench, layout, columns, batch)
            if batch in (batches[0], batches[-1]):
                reads.check()
            what = f"trajectories of {kind}, B = {batch:,}"
            place = {"series": f"trajectories of {kind}", "row_bytes": reads.size // batch, "batch": batch}
            speed = found.rate(what, reads.size, reads.kernel(), KERNEL, "h2d", **place)
            if reads.size >= _SPREAD_FROM:
                speeds[batch] = speed
        _spread(found, kind, speeds, counts=s.name != "tiny")
    _in_scan(bench, found)


def _spread(found: Findings, kind: str, speeds: dict[int, float], counts: bool) -> None:
    best, worst = max(speeds.values(), default=None), min(speeds, key=lambda b: speeds[b], default=None)
    found.at_least(
        f"trajectories of {kind}: every B from 2 MB a batch up",
        _SPREAD,
        "of the best",
        None if best is None or worst is None else speeds[worst] / best,
        "-" if best is None or worst is None else f"{speeds[worst]:.1f} (B = {worst:,}) of {best:.1f} GB/s",
        counts=counts and len(speeds) > 1,
    )


def _in_scan(bench: Bench, found: Findings) -> None:
    """Time of a sample in a scan, less that of the kernel: `ops.gather` alone, and `replay.sample`."""
    s, layout = bench.sizes, bench.layouts["windows"]
    columns = {name: bench.table("windows")[name] for name in _SHORT}
    beyond: dict[str, tuple[float, str]] = {}

    def note(kind: str, batch: int, whole: float, kernel: float) -> None:
        what = f"{kind}, 60 KB trajectories, B = {batch:,}"
        found.figure(what, whole * 1e6, "us a sample", SCAN, kernel_us=kernel * 1e6)
        extra = found.figure(f"{what}: beyond the kernel's {kernel * 1e6:.0f} us", (whole - kernel) * 1e6, "us", SCAN)
        if kind not in beyond or extra > beyond[kind][0]:
            beyond[kind] = (extra, f"{whole * 1e6:.1f} us, kernel {kernel * 1e6:.1f} us (B = {batch:,})")

    replay, state, small = _replay(bench, layout)
    for batch in s.scan_batches:
        bench.check_time()
        reads = Reads(bench, layout, columns, batch)
        note("ops.gather", batch, reads.scan(s.scan), reads.kernel())
        kernel = Reads(bench, small, state.columns, batch).kernel()
        state, seconds = _sample_scan(bench, replay, state, batch)
        note("replay.sample", batch, seconds, kernel)
    for kind, (extra, shown) in beyond.items():
        found.at_most(f"{kind} in a scan of {s.scan}, beyond the kernel", _BEYOND_US, "us", extra, shown, bench.on_gpu)


def _replay(bench: Bench, layout: tables.Layout):
    """A replay of 60 KB trajectories, filled: (replay, state, its layout)."""
    s = bench.sizes
    small = tables.Layout(s.scan_slots, layout.steps, {name: layout.columns[name] for name in _SHORT})
    replay = make_replay(small)
    return replay, fill(replay, replay.init(jax.random.key(0)), small, s.scan_slots // 8), small


def make_replay(layout: tables.Layout, **options: Any) -> gear.Replay:
    """A replay with the layout's columns in the memory that `make_replay` takes by itself."""
    columns = {n: gear.ColumnSpec((c,) if c else (), jnp.dtype(d)) for n, (c, d) in layout.columns.items()}
    table = gear.TableSpec(columns=columns, trajectory_length=layout.steps, capacity=layout.slots)
    return gear.make_replay(table, **options)


def fill(replay: gear.Replay, state: gear.ReplayState, layout: tables.Layout, rows: int) -> gear.ReplayState:
    """Fills an empty replay of one partition, `rows` at a time: slot i then holds what the layout says of slot i."""
    if layout.slots % rows:
        raise ValueError(f"{layout.slots} slots cannot be filled {rows} at a time")
    make = jax.jit(functools.partial(tables.trajectories, layout))
    lengths = jnp.full((rows,), layout.steps, jnp.int32)
    for first in range(0, layout.slots, rows):
        state, _ = replay.add(state, make(jnp.arange(first, first + rows, dtype=jnp.int32)), lengths)
    return jax.block_until_ready(state)


def _sample_scan(bench: Bench, replay: gear.Replay, state: gear.ReplayState, batch: int):
    """(state, seconds of a `replay.sample` in a scan)."""

    def run(state, keys):
        def step(state, key):
            state, sample = replay.sample(state, key, batch)
            return state, sample.handles.slot[0]

        return jax.lax.scan(step, state, keys)

    program = jax.jit(run, donate_argnums=0)
    keys = jax.random.split(jax.random.key(1), bench.sizes.scan)
    held = [state]

    def call(_: int):
        held[0], last = program(held[0], keys)
        return last

    seconds = bench.in_flight(call) / bench.sizes.scan
    return held[0], seconds
