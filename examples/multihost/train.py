"""Trains one model on several processes, out of one replay table that is spread over the devices of all of them.

Every process runs this script with the same flags, but for --process. README.md says how to start them.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gear_jax as gear

OBSERVATION, ACTION, STEPS, WINDOW = 24, 4, 100, 8


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--coordinator", help="HOST:PORT of process 0, as the others reach it; left out: one process")
    add("--processes", type=int, default=1, help="how many there are")
    add("--process", type=int, default=0, help="the number of this one")
    add("--local-device", type=int, help="the GPU of this host that is this process's; left out: all of them")
    add("--timeout", type=int, default=30, help="seconds after which the others are told of a process that died")
    add("--steps", type=int, default=400, help="train steps")
    add("--batch", type=int, default=256, help="rows of a batch, over all devices")
    add("--capacity", type=int, default=4096, help="trajectories in the table, over all devices")
    add("--rows", type=int, default=64, help="most trajectories that a process adds at once")
    add("--add-every", type=int, default=10, help="train steps between two additions")
    add("--report-every", type=int, default=50, help="train steps between two lines")
    return parser.parse_args(arguments)


def connect(options: argparse.Namespace) -> None:
    """Makes the processes one program. Before anything else of JAX."""
    if options.coordinator is None:
        return
    jax.distributed.initialize(
        options.coordinator,
        options.processes,
        options.process,
        local_device_ids=options.local_device,
        # A process that dies is found by its missing heartbeats, one that failed by its waiting to shut down; the
        # others then end too. (100 and 300 s if not given.)
        heartbeat_timeout_seconds=options.timeout,
        shutdown_timeout_seconds=options.timeout,
    )


class Model(nn.Module):
    """Guesses the action of the last step of a window."""

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        x = observation.reshape(observation.shape[0], -1)
        for _ in range(2):
            x = nn.gelu(nn.Dense(128)(x))
        return jnp.tanh(nn.Dense(ACTION)(x))


class Actors:
    """Where trajectories come from: a policy that looks at the last three observations, played by this process."""

    def __init__(self, process: int):
        world = np.random.default_rng(0)  # the same on all processes
        self.policy = world.normal(size=(3, OBSERVATION, ACTION)) / np.sqrt(OBSERVATION)
        self.rng = np.random.default_rng((1, process))

    def play(self, most: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Some trajectories, `most` or fewer, perhaps none: leaves `[a, T, *shape]`, lengths `int32[a]`."""
        a = int(self.rng.integers(0, most + 1))
        observation = self.rng.normal(size=(a, STEPS, OBSERVATION)).astype(np.float32)
        seen = sum(np.roll(observation, k, axis=1) @ self.policy[k] for k in range(3))
        action = np.tanh(seen).astype(np.float32)
        lengths = self.rng.integers(STEPS // 2, STEPS + 1, a).astype(np.int32)
        return {"observation": observation, "action": action}, lengths


def make_replay(mesh: jax.sharding.Mesh, capacity: int) -> gear.Replay:
    columns = {
        "observation": gear.ColumnSpec((OBSERVATION,), jnp.float32),
        "action": gear.ColumnSpec((ACTION,), jnp.float32),
    }
    return gear.make_replay(
        gear.TableSpec(columns, STEPS, capacity),
        selector=gear.selectors.Prioritized(),
        windows={"observation": gear.Window(1 - WINDOW, WINDOW), "action": gear.Window(0, 1)},
        mesh=mesh,
    )


def make_step(replay: gear.Replay, model: Model, optimizer: optax.GradientTransformation, batch: int) -> Any:
    """The train step, a function of global arrays: each device has a part of the batch, and all have the parameters."""

    def step(state, params, moments, key):
        state, sample = replay.sample(state, key, batch)

        def loss(params):
            guess = model.apply(params, sample.data["observation"])
            error = jnp.mean((guess - sample.data["action"][:, 0]) ** 2, axis=-1)
            return jnp.mean(error * sample.weight), error

        (_, error), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        # The trajectories drawn are spread over all processes: the handles find them.
        state = replay.update_priorities(state, sample.handles, jnp.sqrt(error))
        return state, optax.apply_updates(params, updates), moments, jnp.mean(error)

    return step


def train(options: argparse.Namespace) -> list[float]:
    """Trains, and returns the loss of each line that it prints."""
    # Automatic axes: XLA works out how the model's arrays are spread.
    mesh = jax.make_mesh((jax.device_count(),), ("replay",), axis_types=(AxisType.Auto,))
    replay, model, optimizer = make_replay(mesh, options.capacity), Model(), optax.adam(3e-3)
    everywhere = NamedSharding(mesh, PartitionSpec())
    first = jnp.zeros((1, WINDOW, OBSERVATION))
    params = jax.jit(model.init, out_shardings=everywhere)(jax.random.key(0), first)
    moments = jax.jit(optimizer.init, out_shardings=everywhere)(params)
    state = replay.init()
    speak = jax.process_index() == 0
    if speak:
        print(f"{jax.process_count()} processes, {jax.device_count()} devices, {replay}", flush=True)

    actors = Actors(jax.process_index())

    def add(state):
        rows = gear.sharding.process_rows(replay, *actors.play(options.rows), rows=options.rows)
        return replay.add(state, *rows)[0]

    given = jax.tree.map(lambda x: x.sharding, (state, params, moments))
    step = jax.jit(
        make_step(replay, model, optimizer, options.batch), in_shardings=(*given, everywhere),
        out_shardings=(*given, everywhere), donate_argnums=(0, 1, 2),
    )  # fmt: skip
    state = add(state)
    while not replay.can_sample(state):  # the same answer on all processes
        state = add(state)
    window_bytes = 4 * (WINDOW * OBSERVATION + ACTION)
    losses, began = [], time.perf_counter()
    for i in range(1, options.steps + 1):
        if i % options.add_every == 0:
            state = add(state)
        state, params, moments, loss = step(state, params, moments, jax.random.key(i))
        if i % options.report_every == 0 or i == 1:
            losses.append(float(loss))
            seconds = time.perf_counter() - began
            done, began = 1 if i == 1 else options.report_every, time.perf_counter()
            if speak:
                rate = done * options.batch / seconds
                speed = "compiled" if i == 1 else f"{rate:,.0f} windows/s, {rate * window_bytes / 1e6:.1f} MB/s"
                print(f"step {i:5d}  loss {losses[-1]:.4f}  {speed}", flush=True)
    stats = replay.stats(state)  # all processes call it
    if speak:
        print(f"{stats['inserted']} trajectories inserted, {stats['evicted']} evicted, {stats['sampled']} rows sampled")
        print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.4f} at last", flush=True)
    return losses


if __name__ == "__main__":
    flags = parse()
    connect(flags)
    train(flags)
