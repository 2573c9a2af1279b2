"""The problem of the data-parallel loops: to learn how a system moves, from trajectories of it in a replay table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import gear_jax as gear

OBSERVATION, ACTION = 24, 8


def make_table(steps: int, capacity: int) -> gear.TableSpec:
    """Trajectories of observations and actions."""
    columns = {
        "observation": gear.ColumnSpec((OBSERVATION,), jnp.float32),
        "action": gear.ColumnSpec((ACTION,), jnp.float32),
    }
    return gear.TableSpec(columns, trajectory_length=steps, capacity=capacity)


class System:
    """A nonlinear system, x' = tanh(W x + V u), that is pushed about at random."""

    def __init__(self, seed: int = 0):
        self._rng = np.random.default_rng(seed)
        self._move = self._rng.normal(size=(OBSERVATION, OBSERVATION)) / np.sqrt(OBSERVATION)
        self._push = self._rng.normal(size=(ACTION, OBSERVATION)) / np.sqrt(ACTION)

    def play(self, count: int, steps: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Trajectories of half of `steps` or more: the columns, `float32[count, steps, size]`, and `int32[count]`."""
        action = self._rng.uniform(-1.0, 1.0, (count, steps, ACTION))
        observation = np.empty((count, steps, OBSERVATION))
        observation[:, 0] = self._rng.uniform(-1.0, 1.0, (count, OBSERVATION))
        for t in range(1, steps):
            observation[:, t] = np.tanh(observation[:, t - 1] @ self._move + action[:, t - 1] @ self._push)
        rows = {"observation": observation.astype(np.float32), "action": action.astype(np.float32)}
        return rows, self._rng.integers(steps // 2, steps + 1, count).astype(np.int32)


class Model(nn.Module):
    """Predicts the next observation, `[..., OBSERVATION]`, from this one and the action."""

    width: int
    layers: int

    @nn.compact
    def __call__(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        x = jnp.concatenate([observation, action], axis=-1)
        for _ in range(self.layers):
            x = nn.gelu(nn.Dense(self.width)(x))
        return observation + nn.Dense(OBSERVATION)(x)


def make_learner(width: int, layers: int, learning_rate: float, seed: int) -> TrainState:
    """Model and optimizer."""
    model = Model(width, layers)
    params = model.init(jax.random.key(seed), jnp.zeros((OBSERVATION,)), jnp.zeros((ACTION,)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(learning_rate))


def gradient(learner: TrainState, batch: gear.Sample) -> tuple[jax.Array, jax.Array, Any]:
    """The loss of a batch, `float32[]`, the error of each row, `float32[B]`, and the gradient."""

    def loss(params):
        observation, action = batch.data["observation"], batch.data["action"]
        predicted = learner.apply_fn(params, observation[:, :-1], action[:, :-1])
        errors = jnp.mean((predicted - observation[:, 1:]) ** 2, axis=(1, 2))
        # Rows with large errors are drawn more often; the weights take that back in part.
        return jnp.mean(batch.weight * errors), errors

    (value, errors), grads = jax.value_and_grad(loss, has_aux=True)(learner.params)
    return value, errors, grads
