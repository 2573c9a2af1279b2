"""Trains a Decision Transformer from a replay table of recorded MuJoCo episodes, and plays with it.

    python examples/decision_transformer.py                # one seed, at the size that suits the machine
    python examples/decision_transformer.py --seeds 3      # the spread over seeds
    python examples/decision_transformer.py --preset cpu   # the small job, on any machine
    python examples/decision_transformer.py --devices 4    # data-parallel, the table spread over 4 devices

Records the dataset (once), loads it into a table, and trains. The table is part of the learner: sampling, forward and
backward pass and the update are one jitted program that scans over steps, with everything donated. On a GPU the table
stays in the host's memory, and each sample is fetched beside the train step before it. Then the policy is asked for the
best return of the dataset and swims in a batch of environments. With `--devices` each device holds a part of the table
and learns from its part of every batch. See examples/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from _learner import Learner, Task, train, train_on
from _options import parse
from _player import Player
from _report import ASKED, Result, Size, plot, table_of
from jax.sharding import Mesh, PartitionSpec
from record_dataset import record
from tqdm import tqdm

import gear_jax as gear
from gear_jax.flax import NNXReplay

COLUMNS = ("observation", "action", "return_to_go", "timestep")


def load(options: argparse.Namespace) -> tuple[NNXReplay, Task]:
    """Records the dataset unless it is there, and loads it into a table."""
    folder = record(options.datasets, episodes=options.episodes, seed=options.recording_seed, overwrite=True)
    spec = gear.datasets.table_spec(folder, columns={name: name for name in COLUMNS})
    mesh = None
    if options.devices is not None:
        mesh = Mesh(np.array(options.devices), ("replay",))
        # As many slots for each device, and as many for each of the table's partitions.
        partitions = -(-8 // mesh.size) * mesh.size
        spec = dataclasses.replace(spec, capacity=-(-spec.capacity // partitions) * partitions)
    replay = gear.make_replay(
        spec,
        # Good episodes are drawn more often. That is meant, so the loss takes no importance weights.
        selector=gear.selectors.Prioritized(alpha=options.alpha),
        # The step t and the K - 1 before it; near the start, padding comes first.
        windows=gear.Window(offset=1 - options.context, length=options.context, pad="head"),
        memory=options.memory,
        mesh=mesh,
    )
    table = NNXReplay(replay)
    state, summary = gear.datasets.load(
        replay, table(), folder, priority=lambda episode: max(episode.episode_return, 1.0)
    )
    measure = moments
    if mesh is not None:
        held, everywhere = PartitionSpec("replay"), PartitionSpec()
        measure = functools.partial(moments, axis="replay")
        measure = jax.shard_map(measure, mesh=mesh, in_specs=held, out_specs=everywhere, check_vma=False)
    mean, std = jax.jit(measure)(state.columns["observation"], state.length)
    table.state.set_value(state)
    return table, Task(summary.mean_return, summary.best_return, mean, std)


def moments(column: jax.Array, length: jax.Array, axis: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Mean and standard deviation over all steps of a column, `[P, S, T, size]`, given lengths `[P, S]`.

    With `axis`, those of one device of several; the result is that of all.
    """

    def total(x: jax.Array) -> jax.Array:
        x = jnp.sum(x, axis=(0, 1), where=mask[..., None])
        return x if axis is None else jax.lax.psum(x, axis)

    # Nothing but a gather reads a column that lies in the host's memory.
    slots = jnp.arange(length.size, dtype=jnp.int32)
    steps, mask, _ = gear.ops.gather(column, slots, jnp.zeros_like(slots), length.reshape(-1))
    count = total(jnp.ones_like(steps))
    mean = total(steps) / count
    return mean, jnp.sqrt(total((steps - mean) ** 2) / count) + 1e-6


def train_seed(table: NNXReplay, task: Task, options: argparse.Namespace, seed: int) -> tuple[Result, Size]:
    """Trains and evaluates with one seed."""
    learner = Learner(table, task, options, seed)
    player = Player(learner.average, task, options)
    steps, returns, losses, seconds = [], [], [], []

    def play(share: float, start: int) -> np.ndarray:
        return player.play(learner.average, share * task.best_return, seed=1_000_000 * seed + start)

    def evaluate(step: int) -> None:
        steps.append(step)
        returns.append(play(1.0, step))

    with tqdm(total=options.steps, desc=f"train seed {seed}", unit="step") as bar:
        bar.set_postfix_str("compiling")
        evaluate(0)
        while bar.n < options.steps:
            elapsed, got = timed(lambda: train(learner, options.chunk))
            seconds.append(elapsed)
            losses.append(got)
            bar.update(options.chunk)
            if bar.n % options.evaluate_every == 0 or bar.n >= options.steps:
                evaluate(bar.n)
            bar.set_postfix({"loss": f"{losses[-1].mean():.4f}", "return": f"{returns[-1].mean():.0f}"})
    final = play(1.0, 500_000)
    asked = [(share, float(play(share, 600_000).mean())) for share in ASKED]
    player.close()
    step, fixed = statistics.median(seconds[1:] or seconds) / options.chunk, None  # the first one compiles
    if options.compare:
        step, fixed = compare(learner, options)
    sample = time_sampling(table, options)
    result = Result(steps, returns, np.concatenate(losses), final, asked, step, sample, fixed)
    return result, size_of(learner, options)


def timed(run: Callable[[], jax.Array]) -> tuple[float, np.ndarray]:
    """Runs a program; returns seconds and what it gives."""
    start = time.perf_counter()
    result = np.asarray(run())
    return time.perf_counter() - start, result


def compare(learner: Learner, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a train step, and of one that learns from the same batch every time; measured in turn."""
    batch = learner.next()
    with_replay, without = [], []
    for _ in tqdm(range(1 + options.compare), desc="compare with a fixed batch", unit="turn"):
        with_replay.append(timed(lambda: train(learner, options.chunk))[0])
        without.append(timed(lambda: train_on(learner, *batch, options.chunk))[0])
    # The first ones compile.
    return statistics.median(with_replay[1:]) / options.chunk, statistics.median(without[1:]) / options.chunk


def time_sampling(table: NNXReplay, options: argparse.Namespace) -> float:
    """Seconds of one sample in a scan that does nothing else."""

    def step(state: gear.ReplayState, key: jax.Array):
        state, sample = table.replay.sample(state, key, options.batch)
        # Something of every column has to leave the step, as it does in training.
        return state, jax.tree.map(lambda x: x[0, 0], (sample.data, sample.mask))

    scan = jax.jit(lambda state, keys: jax.lax.scan(step, state, keys), donate_argnums=0)
    keys = jax.random.split(jax.random.key(0), options.chunk)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        state, taken = scan(table(), keys)
        jax.block_until_ready(taken)
        seconds.append(time.perf_counter() - start)
        table.state.set_value(state)
    return statistics.median(seconds[1:]) / options.chunk


def size_of(learner: Learner, options: argparse.Namespace) -> Size:
    """How large the job is, and where its table lies."""
    state = learner.table()
    sample = jax.eval_shape(
        lambda state, key: learner.table.replay.sample(state, key, options.batch)[1], state, jax.random.key(0)
    )
    columns = jax.tree.leaves(state.columns)
    return Size(
        parameters=learner.parameters,
        compute=options.compute,
        batch=options.batch,
        context=options.context,
        sample_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((sample.data, sample.mask))),
        table_bytes=sum(x.nbytes for x in columns),
        memory=" and ".join(sorted({x.sharding.memory_kind for x in columns})),
        devices=len(columns[0].sharding.device_set),
    )


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    start = time.perf_counter()
    table, task = load(options)
    outcomes = [train_seed(table, task, options, seed) for seed in range(options.seeds)]
    results = [result for result, _ in outcomes]
    plot(options.plot, task, results)
    print(table_of(task, results, outcomes[0][1]))
    print(f"learning curve in {options.plot}; {time.perf_counter() - start:.0f} s in all, preset {options.preset}")


if __name__ == "__main__":
    main()
