"""A data-parallel train loop with jit and shardings; the table is spread over the devices of a mesh.

    python examples/pjit_train.py                         # all GPUs, or the CPU
    python examples/pjit_train.py --devices 8 --model 2   # a mesh of 4 x 2; on a CPU, 8 devices are made of it

One program inserts, and then scans over train steps, each of them sample, forward and backward pass, update and new
priorities; learner and table are donated. The batch is cut along the mesh's axis "data". The parameters are on all
devices or, with `--model`, cut along the axis "model"; the table is spread over both axes, so that no trajectory is
held twice. See examples/README.md.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import numpy as np
from _loop import make_parser, make_replay, parse, run
from _world import gradient, make_learner
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import gear_jax as gear


class Job:
    """The learner, the table, and the programs that change them."""

    def __init__(self, options: argparse.Namespace, rows: Any, lengths: np.ndarray):
        grid = np.array(options.devices).reshape(-1, options.model)
        mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
        self.replay = make_replay(options, mesh, axis=("data", "model"), batch_axis="data")
        self.state, _ = self.replay.add(self.replay.init(), *self._spread(rows, lengths))

        make = functools.partial(make_learner, options.width, options.layers, options.learning_rate, options.seed)
        shardings = jax.tree.map(functools.partial(layout, mesh), jax.eval_shape(make))
        self.learner = jax.jit(make, out_shardings=shardings)()

        def step(carry: tuple[TrainState, gear.ReplayState], key: jax.Array):
            learner, state = carry
            state, batch = self.replay.sample(state, key, options.batch)
            loss, errors, grads = gradient(learner, batch)
            state = self.replay.update_priorities(state, batch.handles, errors)
            return (learner.apply_gradients(grads=grads), state), loss

        def train(learner: TrainState, state: gear.ReplayState, rows: Any, lengths: jax.Array, keys: jax.Array):
            state, _ = self.replay.add(state, rows, lengths)
            (learner, state), losses = jax.lax.scan(step, (learner, state), keys)
            return learner, state, losses

        lies = jax.tree.map(lambda x: x.sharding, self.state)
        self._train = jax.jit(train, donate_argnums=(0, 1), out_shardings=(shardings, lies, None))

        def replay_step(state: gear.ReplayState, key: jax.Array):
            state, batch = self.replay.sample(state, key, options.batch)
            taken = jax.tree.map(lambda x: x[:, 0, 0], batch.data)  # something of it has to leave the step
            return self.replay.update_priorities(state, batch.handles, 1.0 + batch.weight), taken

        self._replay_alone = jax.jit(
            lambda state, keys: jax.lax.scan(replay_step, state, keys), donate_argnums=0, out_shardings=(lies, None)
        )
        self._checked = False

    def train(self, keys: jax.Array, rows: Any, lengths: np.ndarray) -> jax.Array:
        args = *self._spread(rows, lengths), keys
        if not self._checked:
            gear.assert_in_place(self._train, self.learner, self.state, *args)
            self._checked = True
        self.learner, self.state, losses = self._train(self.learner, self.state, *args)
        return losses

    def replay_alone(self, keys: jax.Array) -> Any:
        self.state, taken = self._replay_alone(self.state, keys)
        return taken

    def _spread(self, rows: Any, lengths: np.ndarray) -> tuple[Any, jax.Array]:
        """Rows on the devices that take them in."""
        rows, lengths, _ = gear.sharding.process_rows(self.replay, rows, lengths)
        return rows, lengths


def layout(mesh: Mesh, x: jax.ShapeDtypeStruct) -> NamedSharding:
    """How a parameter, or what the optimizer keeps of it, lies: its last dimension is cut, if the devices divide it."""
    cut = x.ndim > 0 and x.shape[-1] % mesh.shape["model"] == 0
    return NamedSharding(mesh, PartitionSpec(*(None,) * (x.ndim - 1), "model") if cut else PartitionSpec())


def main(arguments: list[str] | None = None) -> np.ndarray:
    parser = make_parser(__doc__.partition("\n")[0])
    parser.add_argument("--model", type=int, default=1, help="devices that share the parameters; divides --devices")
    options = parse(parser, arguments)
    if options.model < 1 or len(options.devices) % options.model:
        parser.error(f"--model: got {options.model}, wanted a divisor of the {len(options.devices)} devices")
    return run(functools.partial(Job, options), options)


if __name__ == "__main__":
    main()
