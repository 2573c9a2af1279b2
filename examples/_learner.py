"""What learns: model, optimizer and table as one module, trained by one compiled program."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _model import DecisionTransformer, ModelConfig
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from gear_jax.flax import NNXReplay, ReplayVariable

ACTION_DROPOUT = 0.5
AVERAGE_DECAY = 0.998


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What the dataset says about the problem.

    Attributes:
      mean_return, best_return: over the dataset's episodes.
      observation_mean, observation_std: over its steps, `float32[observation_size]`.
    """

    mean_return: float
    best_return: float
    observation_mean: jax.Array
    observation_std: jax.Array

    def normalise(self, observation: jax.Array) -> jax.Array:
        return (observation - self.observation_mean) / self.observation_std


class Learner(nnx.Module):
    """Everything that a train step changes: model, optimizer, the table, and the random streams.

    Attributes:
      average: a running average of the model, which plays: single steps of the optimizer make returns jump.
      pending: the sample in flight (`options.overlap`), or None.
    """

    def __init__(self, table: NNXReplay, task: Task, options: argparse.Namespace, seed: int):
        self.task = task
        self.batch = options.batch
        columns = table.replay.config.table.columns
        config = ModelConfig(
            observation_size=columns["observation"].shape[0],
            action_size=columns["action"].shape[0],
            context=options.context,
            episode_steps=table.replay.config.table.trajectory_length,
            width=options.width,
            layers=options.layers,
            heads=options.heads,
            conditioned=not options.clone,
            compute=options.compute,
        )
        self.model = DecisionTransformer(config, nnx.Rngs(seed))
        self.average = DecisionTransformer(config, nnx.Rngs(seed))  # the same, in arrays of its own
        self.optimizer = nnx.Optimizer(self.model, make_optimizer(options), wrt=nnx.Param)
        self.table = table
        self.rngs = nnx.Rngs(seed)
        started = table.sample_start(self.batch, key=self.rngs.sample()) if options.overlap else None
        self.pending = None if started is None else nnx.Variable(started)
        # A program with a table in pinned memory, or over a mesh, gives back arrays that are committed to devices; what
        # goes into the first call must be so too, or the second one compiles again.
        mesh = None if table.replay.placement is None else table.replay.placement.mesh
        if mesh is None:
            nnx.update(self, jax.tree.map(lambda x: jax.device_put(x, x.sharding), nnx.state(self)))
        else:  # every device has all but the table
            rest = nnx.state(self, nnx.Not(ReplayVariable))
            nnx.update(self, jax.device_put(rest, NamedSharding(mesh, PartitionSpec())))

    @property
    def parameters(self) -> int:
        """How many numbers the model learns."""
        return sum(x.size for x in jax.tree.leaves(nnx.state(self.model, nnx.Param)))

    def step(self) -> jax.Array:
        """Samples a batch and learns from it; returns the loss, `float32[]`."""
        return self.learn(*self.next())

    def next(self) -> tuple[Any, Any]:
        """Data and mask of the next sample.

        With overlap it is the one that the last step has started; the next one starts here, so that a GPU fetches it
        while this step's forward and backward pass run.
        """
        key = self.rngs.sample()
        if self.pending is None:
            sample = self.table.sample(self.batch, key=key)
        else:
            following = self.table.sample_start(self.batch, key=key)
            sample = self.table.sample_done(self.pending.get_value(), after=following)
            self.pending.set_value(following)
        return sample.data, sample.mask

    def learn(self, data: Any, mask: Any) -> jax.Array:
        """Learns from a batch: the columns' trees of `[B, K, *shape]` and `bool[B, K]`; returns the loss."""
        # Consecutive actions are much alike: a model that always sees the last ones copies them, and drifts when it
        # plays. So half of the windows come without.
        keep = jax.random.bernoulli(self.rngs.dropout(), 1.0 - ACTION_DROPOUT, (self.batch, 1, 1))

        def loss(model: DecisionTransformer) -> jax.Array:
            real = mask["observation"]
            predicted = model(
                data["return_to_go"] / self.task.best_return,
                self.task.normalise(data["observation"]),
                jnp.where(keep, data["action"], 0.0),
                data["timestep"],
                real,
            )
            return jnp.mean((predicted - data["action"]) ** 2, where=real[..., None])

        value, gradient = nnx.value_and_grad(loss)(self.model)
        self.optimizer.update(self.model, gradient)
        steps = self.optimizer.step.get_value().astype(jnp.float32)
        decay = jnp.minimum(AVERAGE_DECAY, (1.0 + steps) / (10.0 + steps))
        average, new = nnx.state(self.average), nnx.state(self.model)
        nnx.update(self.average, jax.tree.map(lambda a, b: decay * a + (1.0 - decay) * b, average, new))
        return value


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW with a warm-up, then a cosine down to zero."""
    warmup = min(100, options.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, warmup, options.steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=options.weight_decay))


@functools.partial(nnx.jit, static_argnames=("steps",), donate_argnames=("learner",))
def train(learner: Learner, steps: int) -> jax.Array:
    """Trains for some steps in one compiled program; returns the losses, `float32[steps]`."""
    return _scan(lambda learner: (learner, learner.step()), steps)(learner)[1]


@functools.partial(nnx.jit, static_argnames=("steps",), donate_argnames=("learner",))
def train_on(learner: Learner, data: Any, mask: Any, steps: int) -> jax.Array:
    """`train` without the replay: every step learns from the same batch, as `Learner.learn` takes it."""

    def step(learner: Learner) -> tuple[Learner, jax.Array]:
        # Tied to the step's number: what follows from the batch alone is computed in each step, as in `train`.
        number = learner.optimizer.step.get_value()
        batch, _ = jax.lax.optimization_barrier(((data, mask), number))
        return learner, learner.learn(*batch)

    return _scan(step, steps)(learner)[1]


def _scan(step: Any, steps: int) -> Any:
    return nnx.scan(step, length=steps, in_axes=nnx.Carry, out_axes=(nnx.Carry, 0))
