"""What the DQN examples share: the table of steps, the network, and the loss on windows of n + 1 steps."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import gear_jax as gear


class Learner(NamedTuple):
    """Parameters, those of the target network (a running average), and the optimizer's state."""

    params: optax.Params
    target: optax.Params
    optimizer: optax.OptState


class Settings(NamedTuple):
    """What is learnt with.

    Attributes:
      batch: windows in a batch.
      n: rewards in a return before the target network's value.
      discount: of a reward one step later.
      average: share of the target network that a step replaces.
      learning_rate: Adam's.
      width: of the two layers.
    """

    batch: int
    n: int
    discount: float
    average: float
    learning_rate: float
    width: int


class Network(nn.Module):
    """The values of all actions."""

    actions: int
    width: int

    @nn.compact
    def __call__(self, observation):
        x = observation
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.actions)(x)


def table(observation: int, segment: int, capacity: int) -> gear.TableSpec:
    """Segments of at most `segment` steps; what ends a segment early has ended the episode."""
    columns = {
        "observation": gear.ColumnSpec((observation,), jnp.float32),
        "action": gear.ColumnSpec((), jnp.int32),
        "reward": gear.ColumnSpec((), jnp.float32),
        "terminated": gear.ColumnSpec((), jnp.bool_),
    }
    return gear.TableSpec(columns, segment, capacity)


class Dqn:
    """Double DQN with returns over n steps. Source: van Hasselt et al., AAAI 2016; Sutton, 1988, for the returns."""

    def __init__(self, network: Network, settings: Settings):
        self.network, self.settings = network, settings
        self.optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(settings.learning_rate))

    def init(self, key: jax.Array, observation: int) -> Learner:
        """A new learner."""
        params = self.network.init(key, jnp.zeros((1, observation)))
        return Learner(params, jax.tree.map(jnp.copy, params), self.optimizer.init(params))

    def act(self, params: optax.Params, observation: jax.Array, key: jax.Array, random: jax.Array) -> jax.Array:
        """Actions `int32[N]` for observations `float32[N, D]`: the best, or with probability `random` any."""
        best = jnp.argmax(self.network.apply(params, observation), -1).astype(jnp.int32)
        coin, other = jax.random.split(key)
        anything = jax.random.randint(other, best.shape, 0, self.network.actions, jnp.int32)
        return jnp.where(jax.random.uniform(coin, best.shape) < random, anything, best)

    def learn(self, learner: Learner, batch: gear.Sample) -> tuple[Learner, jax.Array]:
        """One step of the optimizer. Returns the loss too."""
        value, grads = jax.value_and_grad(self._loss)(learner.params, learner.target, batch)
        updates, state = self.optimizer.update(grads, learner.optimizer, learner.params)
        params = optax.apply_updates(learner.params, updates)
        target = optax.incremental_update(params, learner.target, self.settings.average)
        return Learner(params, target, state), value

    def _loss(self, params, target, batch):
        data, there = batch.data, batch.mask["reward"]
        observation, last = data["observation"], jnp.sum(there, 1) - 1
        # A window that a segment's end cuts short is bootstrapped from its last step, unless the episode ended there.
        ended = jnp.any(data["terminated"] & there, 1)
        counted = there & (jnp.arange(there.shape[1])[None] < jnp.where(ended, last + 1, last)[:, None])
        powers = self.settings.discount ** jnp.arange(there.shape[1])
        reward = jnp.sum(jnp.where(counted, data["reward"] * powers, 0.0), 1)
        at = jnp.take_along_axis(observation, last[:, None, None], 1)[:, 0]
        best = jnp.argmax(self.network.apply(params, at), -1)
        value = jnp.take_along_axis(self.network.apply(target, at), best[:, None], 1)[:, 0]
        wanted = jax.lax.stop_gradient(reward + jnp.where(ended, 0.0, self.settings.discount**last * value))
        got = jnp.take_along_axis(self.network.apply(params, observation[:, 0]), data["action"][:, :1], 1)[:, 0]
        # The last step of a segment that goes on says nothing.
        weight = (batch.valid & (ended | (last > 0))).astype(jnp.float32)
        return jnp.sum(weight * optax.huber_loss(got, wanted)) / jnp.maximum(jnp.sum(weight), 1.0)
