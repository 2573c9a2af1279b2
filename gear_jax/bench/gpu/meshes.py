"""A table over the GPUs of one host: what each reads of its own shard, what selection costs, what crosses over."""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

import gear_jax as gear
from gear_jax import selectors
from gear_jax.bench.gpu import memcpy, tables
from gear_jax.bench.gpu.bench import Bench
from gear_jax.bench.gpu.findings import IN_FLIGHT, SCAN, Findings, Missing, Wrong
from gear_jax.bench.gpu.reading import size_text

_LOCAL = 0.92
_EXCHANGED = 0.8
_SELECTION = 1.5
_PUBLISHED = {1: 17.1, 2: 29.1, 3: 33.5}  # GB/s on so many servers: GEAR, ICML 2023
_KEYS = 16
_SELECTIONS = 64


def meshes(bench: Bench, found: Findings) -> None:
    """A table over 1, 2, 4 ... of this process's devices, each with its shard in host memory."""
    counts = [n for n in bench.sizes.mesh_devices if n <= jax.local_device_count()]
    _same_bits(found, counts)
    speeds: dict[int, float] = {}
    for n in counts:
        bench.check_time()
        speeds[n] = _one(bench, found, n)
    _published(found, speeds, bench)
    _selection(bench, found, counts)


def _same_bits(found: Findings, counts: list[int]) -> None:
    """Draws from one table on n devices. Raises Wrong."""
    layout = tables.Layout(4096, 2, {"x": (0, "int32")})
    wanted: dict[str, np.ndarray] = {}
    for n in counts:
        for exchange in ("peer", "collective"):
            replay = _replay(layout, n, partitions=8, exchange=exchange)
            state, held = _filled(replay, layout, 512)
            handles = gear.Handle(jnp.arange(4096, dtype=jnp.int32), jnp.ones((4096,), jnp.uint32))
            priorities = np.random.default_rng(0).uniform(0, 2, 4096).astype(np.float32)
            state = replay.update_priorities(state, handles, priorities)
            for i in range(4):
                state, sample = replay.sample(state, jax.random.key(i), 1024)
                _check(layout, sample, held)
                got = sample.handles.slot, sample.handles.generation, sample.probability, sample.weight
                bits = np.concatenate([np.asarray(x).view(np.uint32) for x in got])
                if not np.array_equal(wanted.setdefault(str(i), bits), bits):
                    raise Wrong(f"what is drawn on {n} devices ({exchange}) is not what one draws")
                state = replay.update_priorities(state, sample.handles, sample.probability)
    found.note(f"Handles, probabilities and weights of one table on {counts} devices: the same bits.")


def _mesh(n: int) -> jax.sharding.Mesh:
    return jax.make_mesh((n,), ("replay",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def _one(bench: Bench, found: Findings, n: int) -> float:
    """Local reads, and samples out of the whole table, on n devices. Returns GB/s of the latter."""
    s = bench.sizes
    slots, steps, batch = s.mesh
    layout = tables.main_layout(slots * n, steps, s.cell_bytes)
    row = layout.step_bytes() * steps
    size = batch * n * row
    what = f"{n} device(s), {size_text(row)} rows, {size_text(batch * row)} each"
    peak = _peak(bench, found, n)
    replays = {
        "local": _replay(layout, n, selection="decentralized"),
        "peer": _replay(layout, n, exchange="peer"),
        "collective": _replay(layout, n, exchange="collective"),
    }
    state, held = _filled(replays["local"], layout, max(n * 8, slots * n // 16))
    rates: dict[str, float] = {}
    reads = _local_gather(replays["local"], state, batch, slots)
    rates["gather"] = found.rate(f"{what}: ops.gather in shard_map", size, bench.in_flight(reads), IN_FLIGHT)
    keys = list(jax.random.split(jax.random.key(1), _KEYS))
    for name, replay in replays.items():
        state, sample = replay.sample(state, keys[0], batch * n)
        _check(layout, sample, held)
        box = [state]

        def call(i: int, replay: Any = replay, box: list[Any] = box) -> gear.Sample:
            box[0], sample = replay.sample(box[0], keys[i % _KEYS], batch * n)
            return sample

        rates[name] = found.rate(f"{what}: sample, {name}", size, bench.in_flight(call), IN_FLIGHT)
        state = box[0]
    if peak is not None:
        found.at_least(
            f"gather on {n} device(s) at once, each from its own shard", _LOCAL, "of cudaMemcpy H2D on them at once",
            rates["gather"] / peak, f"{rates['gather']:.1f} of {peak:.1f} GB/s", counts=bench.on_gpu,
        )  # fmt: skip
    best = max(("peer", "collective"), key=lambda name: rates[name])
    if n > 1:
        found.at_least(
            f"centralized sample with exchange, {n} devices, trajectories of {size_text(row)}", _EXCHANGED,
            "of the local-only figure", rates[best] / rates["local"],
            f"{rates['peer']:.1f} (peer), {rates['collective']:.1f} (collective) of {rates['local']:.1f} GB/s",
            counts=bench.on_gpu,
        )  # fmt: skip
    return rates[best]


def _peak(bench: Bench, found: Findings, n: int) -> float | None:
    """GB/s of `cudaMemcpy` from page-locked memory to n devices at once; None where it cannot be measured."""
    if not bench.on_gpu:
        return None
    try:
        copies = memcpy.together(n, bench.sizes.copy_bytes, bench.sizes.copies, bench.sizes.rounds)
    except Missing as reason:
        found.note(str(reason))
        return None
    return found.figure(f"cudaMemcpy H2D to {n} device(s) at once", copies, "GB/s")


def _replay(layout: tables.Layout, n: int, **options: Any) -> gear.Replay:
    columns = {name: gear.ColumnSpec((c,) if c else (), jnp.dtype(d)) for name, (c, d) in layout.columns.items()}
    table = gear.TableSpec(columns, layout.steps, layout.slots)
    return gear.make_replay(table, selectors.Prioritized(), anchor="start", mesh=_mesh(n), **options)


def _filled(replay: gear.Replay, layout: tables.Layout, chunk: int) -> tuple[gear.ReplayState, np.ndarray]:
    """A full table, and which trajectory each slot holds."""
    state, held = replay.init(), np.full((layout.slots,), -1, np.int64)
    placement = replay.placement
    assert placement is not None
    rows = placement.sharding(placement.held)
    make = jax.jit(functools.partial(tables.trajectories, layout), out_shardings=rows)
    lengths = jax.device_put(np.full((chunk,), layout.steps, np.int32), rows)
    for first in range(0, layout.slots, chunk):
        numbers = np.arange(first, first + chunk, dtype=np.int32)
        state, handles = replay.add(state, make(jax.device_put(numbers, rows)), lengths)
        held[np.asarray(handles.slot)] = numbers
    if (held < 0).any():
        raise Wrong("rows that fill the table have not filled it")
    return state, held


def _check(layout: tables.Layout, sample: gear.Sample, held: np.ndarray) -> None:
    if not np.asarray(sample.valid).all():
        raise Wrong("a row of a full table is not valid")
    numbers = held[np.asarray(sample.handles.slot)]
    spans = dict.fromkeys(layout.columns, (0, layout.steps))
    tables.check(layout, sample.data, numbers, np.zeros_like(numbers), spans, sample.mask)


def _local_gather(replay: gear.Replay, state: gear.ReplayState, batch: int, slots: int):
    """Calls in which each device gathers `batch` random rows of its own shard."""
    placement = replay.placement
    assert placement is not None
    n, rng = placement.devices, np.random.default_rng(2)
    index = [
        jax.device_put(rng.integers(0, slots, batch * n, np.int32), placement.sharding(placement.held))
        for _ in range(_KEYS)
    ]
    steps = replay.config.steps

    def local(columns, slots):
        zero = jnp.zeros_like(slots)
        return gear.ops.gather(columns, slots, zero, zero + np.int32(steps))[0]

    spec = PartitionSpec(placement.axis)
    run = jax.jit(jax.shard_map(local, mesh=placement.mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))
    return lambda i: run(state.columns, index[i % _KEYS])


def _selection(bench: Bench, found: Findings, counts: list[int]) -> None:
    """Selection alone: C and B on n devices against C / n on one."""
    per_device, batch = bench.sizes.mesh_selection
    for n in counts:
        bench.check_time()
        mine, alone = (_select(bench, n, per_device * n, batch), _select(bench, 1, per_device, batch))
        what = f"selection alone, prioritised, B = {batch:,}"
        found.figure(f"{what}, C = {per_device * n:,} on {n} device(s)", mine * 1e6, "us", SCAN)
        found.figure(f"{what}, C = {per_device:,} on one", alone * 1e6, "us", SCAN)
        if n > 1:
            found.at_most(
                f"{what}, C = {per_device * n:,} on {n} devices", _SELECTION, f"x one device at C = {per_device:,}",
                mine / alone, f"{mine * 1e6:.0f} us against {alone * 1e6:.0f} us", counts=bench.on_gpu,
            )  # fmt: skip


def _select(bench: Bench, n: int, capacity: int, batch: int) -> float:
    """Seconds of one selection in a scan."""
    capacity = -(-capacity // (8 * n)) * 8 * n
    table = gear.TableSpec({"x": gear.ColumnSpec((), jnp.uint8)}, 1, capacity)
    replay = gear.make_replay(table, selectors.Prioritized(), mesh=_mesh(n), partitions=8, memory="device")
    state, rng = replay.init(), np.random.default_rng(3)
    rows = {"x": np.zeros((capacity, 1), np.uint8)}
    priorities = rng.uniform(0.1, 2, capacity).astype(np.float32)
    state, _ = replay.add(state, rows, np.ones((capacity,), np.int32), priorities)
    placement, selector = replay.placement, replay.config.selector
    assert placement is not None
    held, whole = PartitionSpec(placement.axis), PartitionSpec()
    index = selectors.Index(
        state.length, state.sequence, state.priority, state.mass, state.sums, state.clock[1], state.generation,
        state.ticket,
    )  # fmt: skip
    specs: Any = {name: whole if name == "clock" else held for name in index._fields}
    axis = placement.axis if n > 1 else None

    def local(fields, keys):
        index = selectors.Index(**fields)

        def turn(carry, key):
            chosen, _ = selector.select((), index._replace(ticket=carry), key, batch, axis)
            assert chosen.ticket is not None
            weight = selector.weigh(chosen)
            # What was drawn must be made, and the next draw comes behind it.
            behind = chosen.ticket + (jnp.min(weight) > 2).astype(jnp.int32)
            return behind, chosen.slot[0]

        return jax.lax.scan(turn, index.ticket, keys)[1]

    run = jax.jit(jax.shard_map(local, mesh=placement.mesh, in_specs=(specs, whole), out_specs=whole, check_vma=False))
    keys = jax.random.split(jax.random.key(4), _SELECTIONS)
    times = []
    for _ in range(bench.sizes.rounds + 2):
        begin = time.perf_counter()
        jax.block_until_ready(run(index._asdict(), keys))
        times.append((time.perf_counter() - begin) / _SELECTIONS)
    return statistics.median(times[2:])


def _published(found: Findings, speeds: dict[int, float], bench: Bench) -> None:
    """Beside what GEAR's paper says of servers, each of which has several GPUs and one link between any two."""
    most = max(speeds)
    found.figure("samples out of the whole table, scaling over one device", speeds[most] / speeds[1], f"x on {most}")
    servers = max(n for n in _PUBLISHED if n <= most)
    found.at_least(
        f"samples out of the whole table, {most} device(s) of one host, against GEAR's published {_PUBLISHED[3]} GB/s "
        "on 3 servers", _PUBLISHED[3], "GB/s", speeds[most], f"{speeds[most]:.1f} GB/s", counts=bench.on_gpu,
    )  # fmt: skip
    ratio, ours = _PUBLISHED[servers] / _PUBLISHED[1], speeds[most] / speeds[1]
    found.at_least(
        f"scaling to {most} against GEAR's published ratio on {servers}", ratio, "x", ours, f"{ours:.2f} x",
        counts=bench.on_gpu and servers > 1,
    )  # fmt: skip
