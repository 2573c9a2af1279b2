"""Other ways to the same batches: JAX's own host gather, NumPy, torch, and tables in the GPU's memory."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax.bench.gpu import tables
from gear_jax.bench.gpu.bench import Bench, Reads
from gear_jax.bench.gpu.findings import IN_FLIGHT, Findings, Missing, reason
from gear_jax.bench.gpu.reading import size_text
from gear_jax.bench.gpu.torch_trees import load_torch

HOST_GATHER = "JAX compute_on('device_host')"
NUMPY = "NumPy indexing + device_put"
_HOST_FACTOR, _NUMPY_FACTOR = 3.0, 15.0
_SETS = 4


@dataclasses.dataclass(frozen=True)
class Job:
    """One gather that all peers do: windows that lie inside the trajectories, so that none needs padding.

    Attributes:
      bench: the run.
      layout: the table's.
      columns: the table in page-locked memory, `[1, S, T, *cells]`.
      spans: name -> (offset, length).
      index: sets of (slots, starts), `int32[B]` each, in NumPy.
    """

    bench: Bench
    layout: tables.Layout
    columns: Mapping[str, jax.Array]
    spans: Mapping[str, tuple[int, int]]
    index: list[tuple[np.ndarray, np.ndarray]]

    def steps(self, name: str, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots `int32[B, 1]` and steps `int32[B, W]` of a column's windows in the i-th set."""
        slots, starts = self.index[i % len(self.index)]
        offset, length = self.spans[name]
        return slots[:, None], starts[:, None] + np.arange(offset, offset + length, dtype=np.int32)[None]

    def check(self, data: Mapping[str, Any], i: int, layout: tables.Layout | None = None) -> None:
        """Compares the i-th batch with NumPy."""
        tables.check(layout or self.layout, data, *self.index[i % len(self.index)], self.spans)


def peers(bench: Bench, found: Findings) -> None:
    """The main gather (4 KiB rows), and windows of a Decision Transformer, by everything that can do them."""
    s = bench.sizes
    layout, size = bench.layouts["main"], s.batch_bytes[0]
    reads = Reads(bench, layout, bench.table("main"), size // layout.step_bytes(), {"x": (0, 1)})
    ratios = _measure(
        bench, found, reads, f"{size_text(layout.step_bytes())} rows, {size_text(size)} a batch", "gather"
    )
    layout, columns = bench.layouts["windows"], bench.table("windows")
    spans = dict.fromkeys(columns, (1 - s.context, s.context))
    reads = Reads(bench, layout, columns, s.window_batch, spans)
    also = _measure(bench, found, reads, f"windows of K = {s.context}, B = {s.window_batch:,}", "windows")
    for name, factor, what in ((HOST_GATHER, _HOST_FACTOR, "JAX's own host gather"), (NUMPY, _NUMPY_FACTOR, NUMPY)):
        ratio = ratios.get(name)
        rest = f"; windows {also[name]:.1f} x" if name in also else ""
        shown = f"{ratio:.1f} x{rest}" if ratio is not None else "not measured"
        found.at_least(f"against {what}, 4 KiB rows", factor, "x", ratio, shown, bench.on_gpu and s.name != "tiny")


def _measure(bench: Bench, found: Findings, reads: Reads, what: str, series: str) -> dict[str, float]:
    """Peer -> how many times faster we are."""
    reads.check()
    place = {"row_bytes": reads.size // reads.batch}
    ours = found.rate(what, reads.size, reads.in_flight(), IN_FLIGHT, "h2d")
    index = [(np.asarray(slots), np.asarray(starts)) for slots, starts in reads.index]
    job, ratios = Job(bench, reads.layout, reads.columns, reads.spans, index), {}
    for name, make in PEERS.items():
        bench.check_time()
        try:
            call, wait = make(job)
            speed = reads.size / bench.in_flight(call, wait) / 1e9
        except Exception as error:  # whatever a peer does, the others go on, and the table says what it was
            found.no_peer(name, what, reason(error), series=series)
            continue
        found.peer(name, what, speed, "GB/s", ours, series=series, **place)
        ratios[name] = ours / speed
    return ratios


Ways = tuple[Callable[[int], Any], Callable[[Any], Any]]


def _host_gather(job: Job) -> Ways:
    """XLA:CPU's gather inside the GPU's program, from page-locked memory into page-locked memory, then a copy."""
    compute_on: Any = importlib.import_module("jax.experimental.compute_on")
    decorate = getattr(compute_on, "compute_on2", compute_on.compute_on)  # 0.10 and 0.11
    host = jax.memory.Space.Host

    def pick(columns, places):
        return {name: _rows(column, places[name]) for name, column in columns.items()}

    def run(columns, places):
        rows = decorate(pick, compute_type="device_host", out_memory_spaces=host)(columns, places)
        return jax.device_put(rows, jax.memory.Space.Device)

    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def places(name: str, i: int) -> jax.Array:
        slots, steps = np.broadcast_arrays(*job.steps(name, i))
        return jax.device_put(np.stack([np.zeros_like(slots), slots, steps], -1), pinned)

    sets = [{name: places(name, i) for name in job.columns} for i in range(_SETS)]
    program = jax.jit(run)
    job.check(program(job.columns, sets[1]), 1)
    return lambda i: program(job.columns, sets[i % _SETS]), jax.block_until_ready


def _rows(column: jax.Array, places: jax.Array) -> jax.Array:
    """`[1, S, T, *cells]` at `int32[B, W, 3]`: one gather, whose operands are all in one memory."""
    cells = column.shape[3:]
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(2, 2 + len(cells))), collapsed_slice_dims=(0, 1, 2), start_index_map=(0, 1, 2)
    )
    mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return jax.lax.gather(column, places, numbers, slice_sizes=(1, 1, 1, *cells), mode=mode)


def _numpy(job: Job) -> Ways:
    """One thread of NumPy into new memory, then a copy from it."""
    views = {name: tables.host_view(column)[0] for name, column in job.columns.items()}

    def call(i: int):
        return {name: jax.device_put(view[job.steps(name, i)]) for name, view in views.items()}

    job.check(call(1), 1)
    return call, jax.block_until_ready


def _torch(job: Job, reuse: bool) -> Ways:
    """torch's indexing of page-locked memory, with torch's threads, and `.to(non_blocking=True)`.

    `reuse`: into page-locked memory that is there already, whose copy is waited for before it is written again.
    """
    torch = load_torch(job.bench.on_gpu)
    device = "cuda" if job.bench.on_gpu else "cpu"
    steps = job.layout.steps
    flat = {n: torch.from_numpy(tables.host_view(c).reshape(-1, *c.shape[3:])) for n, c in job.columns.items()}
    sets = [{n: torch.from_numpy(_flat(job, n, i, steps)) for n in flat} for i in range(_SETS)]
    shapes = {n: (*job.steps(n, 0)[1].shape, *job.columns[n].shape[3:]) for n in flat}
    kept = {}
    if reuse:
        kept = {
            n: torch.empty(len(sets[0][n]), *x.shape[1:], dtype=x.dtype, pin_memory=job.bench.on_gpu)
            for n, x in flat.items()
        }

    def wait(_: Any) -> None:
        if job.bench.on_gpu:
            torch.cuda.synchronize()

    def call(i: int):
        if reuse:
            wait(None)
        found = {}
        for name, table in flat.items():
            index = sets[i % _SETS][name]
            rows = torch.index_select(table, 0, index, out=kept[name]) if reuse else table[index]
            found[name] = rows.to(device, non_blocking=True)
        return found

    result = call(1)
    wait(result)
    job.check({n: x.cpu().numpy().reshape(shapes[n]) for n, x in result.items()}, 1)
    return call, wait


def _flat(job: Job, name: str, i: int, steps: int) -> np.ndarray:
    slots, at = job.steps(name, i)
    return (slots.astype(np.int64) * steps + at).reshape(-1)


def _in_hbm(job: Job) -> Job:
    """The same job on a smaller table in the GPU's memory, where a table must be smaller."""
    slots = max(1, min(job.layout.slots, job.bench.sizes.peer_bytes // (job.layout.steps * job.layout.step_bytes())))
    layout = dataclasses.replace(job.layout, slots=slots)
    index = [(at % np.int32(slots), starts) for at, starts in job.index]
    return dataclasses.replace(job, layout=layout, columns=tables.make(layout, "device"), index=index)


def _xla_take(job: Job) -> Ways:
    """XLA's gather of a table in HBM."""
    job = _in_hbm(job)

    def run(columns, places):
        return {n: c.reshape(c.shape[1:]).at[places[n]].get(mode="promise_in_bounds") for n, c in columns.items()}

    sets = [{n: tuple(map(jnp.asarray, job.steps(n, i))) for n in job.columns} for i in range(_SETS)]
    program = jax.jit(run)
    job.check(program(job.columns, sets[1]), 1)
    return lambda i: program(job.columns, sets[i % _SETS]), jax.block_until_ready


def _flashbax(job: Job) -> Ways:
    """flashbax's trajectory buffer in HBM: it draws the places itself, anywhere in its one run of steps."""
    try:
        flashbax: Any = importlib.import_module("flashbax")
    except ImportError as error:
        raise Missing(f"not installed: {error}") from error
    job = _in_hbm(job)
    lengths = {length for _, length in job.spans.values()}
    length, stored = lengths.pop(), job.layout.slots * job.layout.steps
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=len(job.index[0][0]),
        sample_sequence_length=length,
        period=1,
        min_length_time_axis=length,
        max_length_time_axis=stored,
    )
    state = buffer.init({n: jnp.zeros(c.shape[3:], c.dtype) for n, c in job.columns.items()})
    add = jax.jit(buffer.add, donate_argnums=0)
    # A slot at a time would be slow to add, and all at once needs the memory twice.
    for part in range(_parts(job.layout.slots)):
        chosen = slice(*(job.layout.slots * k // _parts(job.layout.slots) for k in (part, part + 1)))
        steps = {n: c[0, chosen].reshape(1, -1, *c.shape[3:]) for n, c in job.columns.items()}
        state = add(state, steps)
    sample = jax.jit(buffer.sample)
    keys = list(jax.random.split(jax.random.key(0), _SETS))
    _check_runs(job, sample(state, keys[1]).experience)
    return lambda i: sample(state, keys[i % _SETS]), jax.block_until_ready


def _parts(slots: int) -> int:
    return next(n for n in (8, 4, 2, 1) if slots % n == 0)


def _check_runs(job: Job, data: Mapping[str, Any]) -> None:
    """Every run of steps must be stored somewhere: its first step's bytes name a step, and the rest must follow."""
    name = max(job.columns, key=lambda n: job.layout.step_bytes((n,)))
    stored = np.asarray(job.columns[name]).reshape(job.layout.slots * job.layout.steps, -1)
    got = np.asarray(data[name])[:16].reshape(min(16, len(data[name])), job.spans[name][1], -1)
    for run in got:
        at = np.flatnonzero((stored[:, :2] == run[0, :2]).all(1))
        if not any(np.array_equal(stored[k : k + len(run)], run) for k in at):
            raise AssertionError("a batch holds steps that were not stored")


PEERS: dict[str, Callable[[Job], Ways]] = {
    HOST_GATHER: _host_gather,
    NUMPY: _numpy,
    "torch pinned indexing + .to('cuda')": functools.partial(_torch, reuse=False),
    "torch index_select into pinned + .to('cuda')": functools.partial(_torch, reuse=True),
    "XLA take in HBM": _xla_take,
    "flashbax in HBM": _flashbax,
}
