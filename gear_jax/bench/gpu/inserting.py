"""Insertion: its speed, the table's address, and a step that samples and inserts without a copy of the column."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gear_jax as gear
from gear_jax import ops
from gear_jax.bench.gpu import clock, tables
from gear_jax.bench.gpu.bench import Bench
from gear_jax.bench.gpu.findings import CALL, IN_FLIGHT, KERNEL, Findings, Wrong
from gear_jax.bench.gpu.sequences import fill, make_replay
from gear_jax.bench.gpu.sizes import BATCH_BYTES

_SHARE = 0.90
_COPY_SHARE = 0.1
_KERNEL_CALLS = 4


def insert(bench: Bench, found: Findings) -> None:
    """Whole trajectories written in place, from the GPU's memory into page-locked columns."""
    worst: tuple[float, str] | None = None
    counts = True
    for table, count in zip(("main", "windows"), bench.sizes.inserted, strict=True):
        bench.check_time()
        layout = dataclasses.replace(bench.layouts[table], salt=1)
        size = count * layout.steps * layout.step_bytes()
        what = f"{count:,} trajectories of {size / count / 1e3:,.0f} KB"
        speed = _write(bench, found, layout, bench.take(table), count, what)
        if worst is None or speed < worst[0]:
            worst = (speed, f"{speed:.1f} GB/s ({what})")
        counts = counts and size >= BATCH_BYTES
    assert worst is not None
    share = found.of_copy(worst[0], "d2h")
    found.at_least("in-place insert, from 64 MiB a batch", _SHARE, "of cudaMemcpy D2H", share, worst[1], counts)


def _write(
    bench: Bench, found: Findings, layout: tables.Layout, columns: dict[str, jax.Array], count: int, what: str
) -> float:
    """GB/s of calls in flight. The columns are consumed."""
    rng = np.random.default_rng(2)
    sets = [jnp.asarray(rng.choice(layout.slots, count, replace=False).astype(np.int32)) for _ in range(4)]
    # The same values in every set: what matters to the speed is their size.
    values = jax.block_until_ready(jax.jit(lambda slots: tables.trajectories(layout, slots))(sets[0]))
    before = {name: tables.pointer(x) for name, x in columns.items()}
    scatter = jax.jit(ops.scatter, donate_argnums=0)
    held = [scatter(columns, sets[0], values)]
    _check(layout, held[0], sets[0], count)
    size = count * layout.steps * layout.step_bytes()

    def call(i: int):
        held[0] = scatter(held[0], sets[i % len(sets)], values)
        return held[0]

    speed = found.rate(what, size, bench.in_flight(call), IN_FLIGHT, "d2h", series="insert", row_bytes=size // count)
    seconds = clock.percentile(bench.each(call, 10)[1], 50)
    found.rate(what, size, seconds, CALL, "d2h")

    def chain(number: int):
        def run(columns):
            for i in range(number):
                columns = ops.scatter(columns, sets[i % len(sets)], values)
            return columns

        program = jax.jit(run, donate_argnums=0)

        def go():
            held[0] = jax.block_until_ready(program(held[0]))

        return go

    seconds = bench.between(chain(1), chain(1 + _KERNEL_CALLS), _KERNEL_CALLS)
    found.rate(what, size, seconds, KERNEL, "d2h")
    moved = [name for name, x in held[0].items() if tables.pointer(x) != before[name]]
    if moved:
        raise Wrong(f"columns {moved} lie elsewhere after the inserts: they were copied")
    found.note(f"{what}: every column kept its address.")
    return speed


def _check(layout: tables.Layout, columns: dict[str, jax.Array], slots: jax.Array, count: int) -> None:
    starts = jnp.zeros((count,), jnp.int32)
    data, mask, _ = jax.jit(ops.gather)(columns, slots, starts, jnp.full((count,), layout.steps, jnp.int32))
    tables.check(layout, data, slots, starts, dict.fromkeys(columns, (0, layout.steps)), mask)


def guard(bench: Bench, found: Findings) -> None:
    """A step that samples and inserts, in one program, on a column of 1 GiB: nothing of that size is copied."""
    s = bench.sizes
    layout = tables.Layout(s.guard_slots, 1, {"x": (s.cell_bytes, "uint8")})
    replay, batch = make_replay(layout), min(256, s.guard_slots // 4)
    state = fill(replay, replay.init(jax.random.key(0)), layout, max(1, s.guard_slots // 64))
    fresh = jax.jit(lambda slots: tables.trajectories(layout, slots))(jnp.arange(batch, dtype=jnp.int32))
    lengths = jnp.ones((batch,), jnp.int32)

    def step(state, key, values, lengths):
        state, sample = replay.sample(state, key, batch)
        state, _ = replay.add(state, values, lengths)
        return state, sample.data

    key = jax.random.key(1)
    program = jax.jit(step, donate_argnums=0)
    gear.assert_in_place(program, state, key, fresh, lengths)
    before, held = tables.pointer(state.columns["x"]), [state]
    held_memory = state.columns["x"].sharding.memory_kind

    def call(_: int) -> Any:
        held[0], data = program(held[0], key, fresh, lengths)
        return data

    seconds = bench.in_flight(call)
    found.figure(f"sample {batch} and add {batch} of {s.cell_bytes} B, {layout.size / 1e9:.2f} GB ({held_memory})",
                 seconds * 1e6, "us", IN_FLIGHT)  # fmt: skip
    if tables.pointer(held[0].columns["x"]) != before:
        raise Wrong("the column lies elsewhere after the steps: it was copied")
    found.note("The column kept its address, and the compiled step holds no copy of its size (assert_in_place).")
    slowest = min(found.copies.values(), default=None)
    copy = layout.size / slowest / 1e9 if slowest else None
    found.at_most(
        "a step that samples and inserts, column of 1 GiB",
        _COPY_SHARE,
        "of one copy of the column",
        None if copy is None else seconds / copy,
        f"{seconds * 1e6:.0f} us" + ("" if copy is None else f", a copy {copy * 1e6:,.0f} us"),
        counts=bench.on_gpu and s.name != "tiny",
    )
