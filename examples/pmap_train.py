"""A classic data-parallel train loop with pmap; each device samples inside the step, from a table spread over all.

    python examples/pmap_train.py               # all GPUs, or the CPU
    python examples/pmap_train.py --devices 4   # on a CPU, 4 devices are made of it

The learner is stacked, one copy for each device, and `lax.pmean` keeps the copies the same. pmap takes no array that
lies in the host's memory, so the step gets the table's columns by address, and reads them where they are. Between the
steps the table takes in new trajectories, in place, through the replay over the mesh. See examples/README.md.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _loop import make_parser, make_replay, parse, run
from _world import gradient, make_learner
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gear_jax as gear

AXIS = "devices"


class Job:
    """The learner, the table, and the programs that change them."""

    def __init__(self, options: argparse.Namespace, rows: Any, lengths: np.ndarray):
        mesh = Mesh(np.array(options.devices), (AXIS,))
        self.replay = make_replay(options, mesh, axis=AXIS)
        self.state = self.replay.init()
        self.columns = None
        self._add(rows, lengths)
        self.index, self.columns = gear.sharding.lend(self.state)

        learner = make_learner(options.width, options.layers, options.learning_rate, options.seed)
        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(options.devices), *jnp.shape(x))), learner)
        self.learner = jax.device_put(copies, NamedSharding(mesh, PartitionSpec(AXIS)))

        local = self.replay.per_device(AXIS)
        pmap = functools.partial(jax.pmap, axis_name=AXIS, devices=options.devices)

        @functools.partial(pmap, in_axes=(0, 0, 0, None), donate_argnums=(0, 1))
        def train(learner: TrainState, index: gear.ReplayState, columns: Any, keys: jax.Array):
            def step(carry, key):
                learner, index = carry
                state, batch = local.sample(index.replace(columns=columns), key, options.batch)
                loss, errors, grads = gradient(learner, batch)
                loss, grads = jax.lax.pmean((loss, grads), AXIS)
                state = local.update_priorities(state, batch.handles, errors)
                return (learner.apply_gradients(grads=grads), state.replace(columns=None)), loss

            (learner, index), losses = jax.lax.scan(step, (learner, index), keys)
            return learner, index, losses

        @functools.partial(pmap, in_axes=(0, 0, None), donate_argnums=0)
        def replay_alone(index: gear.ReplayState, columns: Any, keys: jax.Array):
            def step(index, key):
                state, batch = local.sample(index.replace(columns=columns), key, options.batch)
                taken = jax.tree.map(lambda x: x[:, 0, 0], batch.data)  # something of it has to leave the step
                state = local.update_priorities(state, batch.handles, 1.0 + batch.weight)
                return state.replace(columns=None), taken

            return jax.lax.scan(step, index, keys)

        self._train, self._replay_alone = train, replay_alone

    def train(self, keys: jax.Array, rows: Any, lengths: np.ndarray) -> jax.Array:
        self.state = gear.sharding.take_back(self.state, self.index)
        self._add(rows, lengths)
        self.index, self.columns = gear.sharding.lend(self.state, self.columns)
        self.learner, self.index, losses = self._train(self.learner, self.index, self.columns, keys)
        return losses[0]  # the same on all devices

    def replay_alone(self, keys: jax.Array) -> Any:
        self.index, taken = self._replay_alone(self.index, self.columns, keys)
        return taken

    def _add(self, rows: Any, lengths: np.ndarray) -> None:
        rows, lengths, _ = gear.sharding.process_rows(self.replay, rows, lengths)
        self.state, _ = self.replay.add(self.state, rows, lengths)


def main(arguments: list[str] | None = None) -> np.ndarray:
    options = parse(make_parser(__doc__.partition("\n")[0]), arguments)
    return run(functools.partial(Job, options), options)


if __name__ == "__main__":
    main()
