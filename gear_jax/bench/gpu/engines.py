"""Who moves a batch of windows: the kernel, or the copy engines; and what work beside it pays for that."""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gear_jax import ops
from gear_jax.bench.gpu import clock, tables
from gear_jax.bench.gpu.bench import Bench, Reads
from gear_jax.bench.gpu.findings import CALL, IN_FLIGHT, Findings, Missing
from gear_jax.bench.gpu.reading import size_text
from gear_jax.bench.gpu.torch_trees import load_torch
from gear_jax.ops._gather_engine import COPY_BATCH_BYTES, COPY_WINDOW_BYTES

_BOUND = 1.0
_NEARLY = 0.95  # a batch of whole windows may be a little smaller than what it stands for
_COVER = 1.5  # gathers last so many times as long as the work beside them, so that all of it has them beside it


def engines(bench: Bench, found: Findings) -> None:
    """Windows of 4 KiB to 12 MB by the kernel and by the copy engines, called outside of programs."""
    layout, columns = bench.layouts["main"], bench.table("main")
    beside = _beside(bench, found)
    names = ["kernel", "copy"] if bench.on_gpu else ["kernel"]
    if not bench.on_gpu:
        found.note("The copy engines are not measured: there are none on this backend.")
    ratios: dict[int, float] = {}
    for size in bench.sizes.batch_bytes:
        first = size == bench.sizes.batch_bytes[0]
        for steps in bench.sizes.engine_steps:
            row = steps * layout.step_bytes()
            if not first and row < COPY_WINDOW_BYTES:
                continue
            bench.check_time()
            reads = Reads(bench, layout, columns, max(1, size // row), {"x": (0, steps)})
            ratio = _compare(bench, found, reads, names, row, beside if first else None)
            if reads.size >= COPY_BATCH_BYTES * _NEARLY or not bench.on_gpu:
                ratios[row] = min(ratios.get(row, ratio), ratio)
    _judge(found, ratios if bench.on_gpu else {})


def _compare(bench: Bench, found: Findings, reads: Reads, names: list[str], row: int, beside: Any) -> float:
    """The speed of the copy engines (if they are among `names`) over that of the kernel, called the same way."""
    what = f"windows of {size_text(row)}, {size_text(reads.size)} a batch"
    in_jit = found.rate(f"{what}, kernel in jit", reads.size, reads.in_flight(), IN_FLIGHT, "h2d")
    speeds = {}
    for name in names:
        call = _calls(reads, name)
        _check(reads, call)
        place = {"series": f"engine={name}", "row_bytes": row}
        speeds[name] = found.rate(f"{what}, {name}", reads.size, bench.in_flight(call), IN_FLIGHT, "h2d", **place)
        found.rate(f"{what}, {name}", reads.size, clock.percentile(bench.each(call, 10)[1], 50), CALL, "h2d")
        if beside is not None:
            # The kernel in its fastest form: what Python costs would leave gaps between its calls.
            fastest, speed = (reads.call, in_jit) if name == "kernel" else (call, speeds[name])
            slower = beside(fastest, reads.size / speed / 1e9)
            found.figure(f"{what}, {name}: a bf16 matmul beside it", slower, "x its time alone", IN_FLIGHT)
    return speeds[names[-1]] / speeds["kernel"]


def _calls(reads: Reads, engine: str) -> Callable[[int], Any]:
    """Calls outside of programs, with rows that the host knows."""
    index = [(np.asarray(slots), np.asarray(starts)) for slots, starts in reads.index]
    lengths = np.asarray(reads.lengths)

    def call(i: int) -> Any:
        return ops.gather(reads.columns, *index[i % len(index)], lengths, reads.windows, engine=engine)

    return call


def _check(reads: Reads, call: Callable[[int], Any]) -> None:
    data, mask, _ = call(1)
    tables.check(reads.layout, data, *reads.index[1], reads.spans, mask)


def _judge(found: Findings, ratios: dict[int, float]) -> None:
    """From which window on the copy engines are at least as fast; whether that is where they are used."""
    good = [row for row in ratios if all(ratios[other] >= _BOUND for other in ratios if other >= row)]
    if good:
        found.figure("windows from which on the copy engines are as fast as the kernel", min(good) / 1024, "KiB")
    elif ratios:
        found.note("The copy engines are slower than the kernel at the largest windows.")
    used = {row: ratio for row, ratio in ratios.items() if row >= COPY_WINDOW_BYTES}
    worst = min(used, key=used.__getitem__, default=None)
    found.at_least(
        f"copy engines, windows from {size_text(COPY_WINDOW_BYTES)} in batches from {size_text(COPY_BATCH_BYTES)}, "
        "where `engine='auto'` takes them; the slowest",
        _BOUND, "x the kernel, called the same way", None if worst is None else used[worst],
        "not on this backend" if worst is None else f"windows of {size_text(worst)}",
    )  # fmt: skip


def _beside(bench: Bench, found: Findings) -> Callable[[Callable[[int], Any], float], float] | None:
    """What measures a matmul beside gathers; None, with a note why, where it cannot be had.

    It runs in torch: JAX has one stream for the programs of a GPU, so that nothing of its own is beside a gather.
    """
    try:
        torch = load_torch(bench.on_gpu)
    except Missing as reason:
        found.note(f"The matmul beside a gather is torch's: {reason}.")
        return None
    if not bench.on_gpu:
        found.note("The matmul beside a gather is not measured: there is no GPU.")
        return None
    width, number = bench.sizes.beside
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        a, b, c = (torch.ones((width, width), dtype=torch.bfloat16, device="cuda") for _ in range(3))

    def run() -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record()
            for _ in range(number):
                torch.matmul(a, b, out=c)
            end.record()
        return begin, end

    def elapsed(events: Any) -> float:
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3

    return functools.partial(_slower, bench.sizes.rounds, run, elapsed)


def _slower(
    rounds: int, run: Callable[[], Any], elapsed: Callable[[Any], float], call: Callable[[int], Any], seconds: float
) -> float:
    """Time of the work beside gathers over its time alone, the median.

    Args:
      rounds: repetitions.
      run: enqueues the work.
      elapsed: waits for what `run` has enqueued; the seconds it took.
      call: does the i-th gather.
      seconds: of a gather.
    """
    found = []
    for _ in range(rounds + 1):
        alone = elapsed(run())
        calls = 3 + int(_COVER * alone / max(seconds, 1e-7))
        results = [call(0)]  # under way when the work begins
        work = run()
        for i in range(1, calls):
            results = [call(i)]
        beside = elapsed(work)
        jax.block_until_ready(results)
        found.append(beside / alone)
    return statistics.median(found[1:])
