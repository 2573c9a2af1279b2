"""What the data-parallel loops share: the command line, the loop itself, and what it says."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from _devices import first_devices
from _world import System, make_table
from tqdm import trange

import gear_jax as gear


class Job(Protocol):
    """A train loop's programs; each changes what the job holds."""

    def train(self, keys: jax.Array, rows: Any, lengths: np.ndarray) -> jax.Array:
        """Inserts trajectories, then takes one train step for each key; returns the losses, `float32[steps]`."""
        ...

    def replay_alone(self, keys: jax.Array) -> Any:
        """For each key samples and sets priorities, as in a train step; returns arrays to wait for."""
        ...


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of both loops."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--devices", type=int, help="how many; None: all there are. On a CPU as many are made")
    add("--memory", choices=("pinned_host", "device"), help="where the table lies; None: pinned_host on a GPU")
    add("--steps", type=int, default=600, help="train steps")
    add("--chunk", type=int, default=20, help="train steps in one call of the compiled program; divides --steps")
    add("--batch", type=int, default=256, help="windows in a batch, over all devices")
    add("--window", type=int, default=16, help="steps in a window")
    add("--capacity", type=int, default=1024, help="trajectories in the table")
    add("--trajectory", type=int, default=100, help="the most steps of a trajectory")
    add("--insert", type=int, default=16, help="trajectories that come in before each chunk")
    add("--width", type=int, default=128, help="of the model")
    add("--layers", type=int, default=2, help="of the model")
    add("--learning-rate", type=float, default=1e-3, help="of Adam")
    add("--seed", type=int, default=0, help="of model and samples")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line; `options.devices` is then the list of them."""
    options = parser.parse_args(arguments)
    options.devices = first_devices(parser, options.devices)
    if options.steps < 1 or options.steps % options.chunk:
        parser.error(f"--steps: got {options.steps}, wanted a multiple of --chunk {options.chunk}")
    if not 2 <= options.window <= options.trajectory // 2:
        parser.error(f"--window: got {options.window}, wanted 2 to {options.trajectory // 2}, half of --trajectory")
    for name in ("batch", "insert", "capacity"):
        value, n = getattr(options, name), len(options.devices)
        if value < n or value % n:
            parser.error(f"--{name}: got {value}, wanted a multiple of the {n} devices")
    return options


def make_replay(options: argparse.Namespace, mesh: jax.sharding.Mesh, **placement: Any) -> gear.Replay:
    """The table, over the devices of a mesh."""
    return gear.make_replay(
        make_table(options.trajectory, options.capacity),
        selector=gear.selectors.Prioritized(alpha=0.6, beta=0.4),
        windows=gear.Window(offset=0, length=options.window),
        anchor="full",  # every window lies inside its trajectory
        memory=options.memory,
        mesh=mesh,
        **placement,
    )


def run(make_job: Callable[[Any, np.ndarray], Job], options: argparse.Namespace) -> np.ndarray:
    """Fills the table, trains, and says how it went; returns the losses, `float32[steps]`.

    Args:
      make_job: a job, given the table's first trajectories and their lengths.
      options: of `parse`.
    """
    system = System()
    n = len(options.devices)
    job = make_job(*system.play(options.capacity // n // 2 * n or n, options.trajectory))  # half of what it holds
    first = jax.random.key(options.seed)
    losses, seconds, alone = [], [], []

    def keys(call: int) -> jax.Array:
        return jax.random.split(jax.random.fold_in(first, call), options.chunk)

    with trange(options.steps // options.chunk, desc="train", unit="chunk") as bar:
        for i in bar:
            fresh = system.play(options.insert, options.trajectory)
            start = time.perf_counter()
            losses.append(np.asarray(job.train(keys(i), *fresh)))
            seconds.append(time.perf_counter() - start)
            bar.set_postfix({"loss": f"{losses[-1].mean():.5f}"})
    for i in range(6):
        start = time.perf_counter()
        jax.block_until_ready(job.replay_alone(keys(options.steps + i)))
        alone.append(time.perf_counter() - start)
    # The first ones compile.
    step, sample = (statistics.median(x[1:] or x) / options.chunk for x in (seconds, alone))
    print(_table(options, losses, step, sample))
    return np.concatenate(losses)


def _table(options: argparse.Namespace, losses: list[np.ndarray], step: float, sample: float) -> str:
    nbytes = 4 * sum(x.shape[0] for x in make_table(2, 1).columns.values()) * options.batch * options.window
    rows = [
        ("devices", f"{len(options.devices)} ({options.devices[0].device_kind})"),
        ("loss, first and last chunk", f"{losses[0].mean():.5f}, {losses[-1].mean():.5f}"),
        ("train step", f"{step * 1e3:.3f} ms  ({1 / step:,.1f} a second, insertion included)"),
        ("samples (windows) per second", f"{options.batch / step:,.0f}"),
        ("gathered", f"{nbytes / step / 1e6:,.1f} MB/s in training, {nbytes / sample / 1e6:,.1f} MB/s by replay alone"),
        ("share of a step spent in replay", f"{sample / step:.1%}  ({sample * 1e6:.0f} µs)"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}   {value}" for name, value in rows)
