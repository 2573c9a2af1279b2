"""Rows of one column: random rows, small rows over a large table, steps that no load is aligned with."""

from gear_jax.bench.gpu import tables
from gear_jax.bench.gpu.bench import Bench, Reads
from gear_jax.bench.gpu.findings import CALL, IN_FLIGHT, KERNEL, Findings
from gear_jax.bench.gpu.sizes import BATCH_BYTES, GIB, MIB, SPAN_BYTES

_GATHER_SHARE = 0.92
_SMALL_SHARES = ((4, 0.85), (1, 0.7))  # steps of 256 bytes -> share of cudaMemcpy
_ODD_SHARE = 0.8
H2D = "of cudaMemcpy H2D"


def size_text(size: int) -> str:
    """Bytes for people: "4 KiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"


def gather(bench: Bench, found: Findings) -> None:
    """Random windows of the main table, of 4 KiB to 1 MiB, through jit."""
    layout, columns = bench.layouts["main"], bench.table("main")
    worst: tuple[float, str] | None = None
    for steps in bench.sizes.row_steps:
        row = steps * layout.step_bytes()
        for size in bench.sizes.batch_bytes:
            bench.check_time()
            reads = Reads(bench, layout, columns, size // row, {"x": (0, steps)})
            reads.check()
            what = f"{size_text(row)} rows, {size_text(size)} a batch"
            seconds = reads.in_flight()
            more = {"series": "gather", "row_bytes": row} if size == bench.sizes.batch_bytes[0] else {}
            speed = found.rate(what, reads.size, seconds, IN_FLIGHT, "h2d", **more)
            found.rate(what, reads.size, reads.single(), CALL, "h2d")
            if size == bench.sizes.batch_bytes[0]:
                found.rate(what, reads.size, reads.kernel(), KERNEL, "h2d")
            if worst is None or speed < worst[0]:
                worst = (speed, what)
    assert worst is not None
    found.at_least(
        "gather, random rows from 4 KiB, from 64 MiB a batch, through jit; the slowest",
        _GATHER_SHARE,
        H2D,
        found.of_copy(worst[0], "h2d"),
        f"{worst[0]:.1f} GB/s ({worst[1]})",
        counts=min(bench.sizes.batch_bytes) >= BATCH_BYTES,
    )


def small_rows(bench: Bench, found: Findings) -> None:
    """Rows of 1 KiB and 256 B all over a table of 16 GiB, in the order of addresses and as they come."""
    layout, columns = bench.layouts["small"], bench.table("small")
    size = bench.sizes.batch_bytes[0]
    for steps, share in _SMALL_SHARES:
        row = steps * layout.step_bytes()
        what = f"{size_text(row)} rows of {size_text(layout.size)}, {size_text(size)} a batch"
        speeds = {}
        for order, name in ((None, "gather"), (False, "unsorted")):
            bench.check_time()
            reads = Reads(bench, layout, columns, size // row, {"x": (0, steps)}, order=order)
            reads.check()
            text = what if order is None else f"{what}, unsorted"
            place = {"series": name, "row_bytes": row}
            speeds[name] = found.rate(text, reads.size, reads.in_flight(), IN_FLIGHT, "h2d", **place)
            found.rate(text, reads.size, reads.kernel(), KERNEL, "h2d")
        found.at_least(
            f"random rows of {size_text(row)} over 16 GiB, from 64 MiB a batch",
            share,
            H2D,
            found.of_copy(speeds["gather"], "h2d"),
            f"{speeds['gather']:.1f} GB/s (unsorted {speeds['unsorted']:.1f})",
            counts=layout.size >= SPAN_BYTES and size >= BATCH_BYTES,
        )


def misaligned(bench: Bench, found: Findings) -> None:
    """Windows of steps of 17 and of 3 bytes, beside those of 16."""
    size, worst = bench.sizes.batch_bytes[0], None
    speeds: dict[tuple[int, int], float] = {}
    for step in (16, 17, 3):
        steps = max(256, *bench.sizes.odd_windows)
        slots = max(1, bench.sizes.odd_bytes // (steps * step))
        layout = tables.main_layout(slots, steps, step)
        columns = tables.make(layout, "pinned_host")
        for window in bench.sizes.odd_windows:
            bench.check_time()
            length = -(-window // step)
            reads = Reads(bench, layout, columns, max(1, size // (length * step)), {"x": (0, length)})
            reads.check()
            what = f"steps of {step} B, windows of {size_text(length * step)}"
            speeds[step, window] = found.rate(what, reads.size, reads.kernel(), KERNEL, "h2d")
            if step != 16:
                share = speeds[step, window] / speeds[16, window]
                found.figure(f"{what}, of the aligned figure", share, "x")
                if worst is None or share < worst[0]:
                    worst = (share, f"{speeds[step, window]:.1f} of {speeds[16, window]:.1f} GB/s ({what})")
    assert worst is not None
    found.at_least(
        "misaligned steps (17 B, 3 B), windows from 4 KiB; the slowest",
        _ODD_SHARE,
        "of the aligned figure",
        worst[0],
        worst[1],
        counts=min(bench.sizes.odd_windows) >= 4096,
    )
