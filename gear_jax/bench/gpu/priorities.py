"""Draws by priority and updates of priorities: the sum tree and the replay around it, beside trees on the GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gear_jax as gear
from gear_jax import ops
from gear_jax.bench.gpu import tables, torch_trees
from gear_jax.bench.gpu.bench import Bench
from gear_jax.bench.gpu.findings import IN_FLIGHT, Findings, Wrong, reason
from gear_jax.bench.gpu.sequences import fill, make_replay

_SETS = 8
_FAVOURED = 1000
_FEW = 1e-6  # the priority of those that are not favoured


def priorities(bench: Bench, found: Findings) -> None:
    """N trajectories, B draws and B updates, at every N."""
    for count in bench.sizes.priorities:
        bench.check_time()
        batch = bench.sizes.priority_batch
        rng = np.random.default_rng(0)
        given = rng.uniform(0.1, 1.0, count).astype(np.float32)
        slots = [rng.integers(0, count, batch, np.int32) for _ in range(_SETS)]
        fresh = [rng.uniform(0.1, 1.0, batch).astype(np.float32) for _ in range(_SETS)]
        ours = _tree(bench, found, given, slots, fresh)
        peers = _peers(bench, found, given, slots, fresh, ours)
        _verdict(bench, found, count, batch, ours, peers)
        bench.check_time()
        _replay(bench, found, count, batch)


def _text(count: int, batch: int) -> str:
    return f"N = {count:,}, B = {batch:,}"


def _verdict(
    bench: Bench, found: Findings, count: int, batch: int, ours: dict[str, float], peers: dict[str, Any]
) -> None:
    full = bench.on_gpu and batch >= 65_536
    tree = peers.get(torch_trees.TORCHRL)
    for op in ("sample", "update"):
        ratio = tree[op] / ours[op] if tree else None
        theirs = f"{tree[op] * 1e6:.0f} us" if tree else "not measured"
        shown = f"{ours[op] * 1e6:.0f} us, TorchRL's tree {theirs}"
        found.at_least(f"prioritised, {_text(count, batch)}: {op}", 1.0, "x TorchRL's CUDA tree", ratio, shown, full)


def _tree(
    bench: Bench, found: Findings, given: np.ndarray, slots: list[np.ndarray], fresh: list[np.ndarray]
) -> dict[str, float]:
    """The bare ops on one partition: seconds of "sample" and "update"."""
    count, batch = len(given), len(slots[0])
    nothing = jnp.zeros((1, count), jnp.float32), jnp.zeros((1, ops.sumtree_width(count)), jnp.float32)
    update = jax.jit(ops.sumtree_update, donate_argnums=(0, 1, 2))
    length, generation = jnp.ones((1, count), jnp.int32), jnp.arange(count, dtype=jnp.uint32)[None]
    draw = jax.jit(functools.partial(ops.sumtree_sample, draws=batch))
    everything = jnp.arange(count, dtype=jnp.int32)
    # Three arrays: each is donated, and none may be passed twice.
    held = [update(jnp.copy(nothing[0]), *nothing, everything, jnp.asarray(given), jnp.asarray(given))]
    keys = [jax.random.bits(jax.random.key(i), (2,), jnp.uint32) for i in range(_SETS)]
    at, new = [jnp.asarray(x) for x in slots], [jnp.asarray(x) for x in fresh]
    want = given.copy()

    def sample(i: int):
        return draw(held[0][1], held[0][2], length, generation, keys[i % _SETS])

    _check_draws(sample(0), want)
    held[0] = update(*held[0], at[0], new[0], new[0])
    want[slots[0]] = fresh[0]  # of several writes NumPy, too, keeps the last
    if not np.array_equal(np.asarray(held[0][1])[0], want):
        raise Wrong("sumtree_update: the masses are not those that NumPy has after the same writes")
    _check_draws(sample(1), want)

    def call(i: int):
        held[0] = update(*held[0], at[i % _SETS], new[i % _SETS], new[i % _SETS])
        return held[0]

    seconds = {
        "sample": bench.in_flight(sample),
        "update": bench.in_flight(call),
    }
    for op, value in seconds.items():
        found.figure(f"ops.sumtree_{op}, {_text(count, batch)}", value * 1e6, "us", IN_FLIGHT)
    return seconds


def _check_draws(drawn: ops.Draws, mass: np.ndarray) -> None:
    slot, probability, total = (np.asarray(x) for x in (drawn.slot, drawn.probability, drawn.total))
    if slot.min() < 0 or slot.max() >= len(mass):
        raise Wrong(f"sumtree_sample drew slots {slot.min()}..{slot.max()} of {len(mass)}")
    got = mass[slot]
    if not np.array_equal(probability, got * (np.float32(1) / total)):
        raise Wrong("sumtree_sample: the probabilities are not those of the slots")
    if not np.array_equal(np.asarray(drawn.generation), slot):
        raise Wrong("sumtree_sample: the generations are not those of the slots")
    exact = mass.sum(dtype=np.float64)
    if abs(float(total[0]) - exact) > 1e-4 * exact:
        raise Wrong(f"sumtree_sample: a total of {float(total[0])}, wanted {exact}")
    # E[m] over draws in proportion to m is sum(m^2) / sum(m); 6 standard deviations.
    mean, spread = (mass.astype(np.float64) ** 2).sum() / exact, mass.std()
    if abs(got.mean(dtype=np.float64) - mean) > 6 * spread / np.sqrt(len(got)):
        raise Wrong(f"sumtree_sample: draws have mean mass {got.mean():.4f}, wanted {mean:.4f}")


def _peers(bench: Bench, found: Findings, given, slots, fresh, ours: dict[str, float]) -> dict[str, dict[str, float]]:
    """Name -> seconds of "sample" and "update", for those that could be measured."""
    measured, text = {}, _text(len(given), len(slots[0]))
    for name, make in torch_trees.TREES.items():
        try:
            tree = make(given, slots, fresh, bench.on_gpu)
            tree.check()
            seconds = {
                op: bench.in_flight(lambda i, call=call: call(i), tree.wait)
                for op, call in (("sample", tree.sample), ("update", tree.update))
            }
        except Exception as error:  # whatever a peer does, the others go on, and the table says what it was
            for op in ("sample", "update"):
                found.no_peer(name, f"{op}, {text}", reason(error))
            continue
        measured[name] = seconds
        for op, value in seconds.items():
            found.peer(name, f"{op}, {text}", value * 1e6, "us", ours[op] * 1e6)
    return measured


def _replay(bench: Bench, found: Findings, count: int, batch: int) -> None:
    """`replay.sample` and `replay.update_priorities` on a table with one narrow column."""
    layout = tables.Layout(count, 1, {"x": (0, "int32")})
    replay = make_replay(layout, selector=gear.selectors.Prioritized(alpha=0.7, beta=0.5))
    chunk = count // 10
    state = fill(replay, replay.init(jax.random.key(0)), layout, chunk)
    favoured = np.random.default_rng(1).choice(count, min(_FAVOURED, count // 10), replace=False)
    few = np.full(count, _FEW, np.float32)
    few[favoured] = 1.0
    handles = gear.Handle(jnp.arange(count, dtype=jnp.int32), state.generation.reshape(-1))
    state = replay.update_priorities(state, handles, jnp.asarray(few))
    state, sample = replay.sample(state, jax.random.key(2), batch)
    drawn = np.asarray(sample.handles.slot)
    tables.check(layout, sample.data, drawn, np.zeros_like(drawn), {"x": (0, 1)}, sample.mask)
    share = few**0.7
    wanted = share[favoured].sum() / share.sum()
    got = np.isin(drawn, favoured).mean()
    if abs(got - wanted) > 6 * np.sqrt(wanted * (1 - wanted) / batch) + 1e-3:
        raise Wrong(f"replay.sample: {got:.2%} of the draws have {wanted:.2%} of the mass")
    keys = list(jax.random.split(jax.random.key(3), _SETS))
    new = [jax.random.uniform(key, (batch,), jnp.float32, 0.1, 1.0) for key in keys]
    held = [state]

    def draw(i: int):
        held[0], sample = replay.sample(held[0], keys[i % _SETS], batch)
        return sample

    def update(i: int):
        held[0] = replay.update_priorities(held[0], sample.handles, new[i % _SETS])
        return held[0].ticket, held[0].sums

    for op, call in (("sample", draw), ("update_priorities", update)):
        found.figure(f"replay.{op}, {_text(count, batch)}", bench.in_flight(call) * 1e6, "us", IN_FLIGHT)
