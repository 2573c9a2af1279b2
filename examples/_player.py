"""What plays: the policy in a batch of environments, asked for a return."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from _learner import Task
from _model import DecisionTransformer
from _policies import ENVIRONMENT
from flax import nnx


class Player:
    """Plays in a batch of environments, asking the model for a return."""

    def __init__(self, model: DecisionTransformer, task: Task, options: argparse.Namespace):
        self._envs = gym.make_vec(ENVIRONMENT, num_envs=options.envs, vectorization_mode="sync")
        sizes = self._envs.observation_space.shape[1], self._envs.action_space.shape[1]
        self._empty = functools.partial(empty_context, options.envs, options.context, *sizes)
        graph = nnx.graphdef(model)

        def act(parameters, context, observation, return_to_go, timestep):
            now = (return_to_go / task.best_return, task.normalise(observation), 0.0, timestep, True)
            context = [push(old, new) for old, new in zip(context, now, strict=True)]
            action = nnx.merge(graph, parameters)(*context)[:, -1]
            context[2] = context[2].at[:, -1].set(action)
            return tuple(context), action

        self._act = jax.jit(act, donate_argnums=1)

    def play(self, model: DecisionTransformer, target: float, seed: int) -> np.ndarray:
        """Returns each environment's return, `float64[environments]`, of one episode."""
        parameters = nnx.state(model)
        # Committed to the device like the parameters and like what `_act` returns, so that it is compiled once.
        context = jax.device_put(self._empty(), jax.tree.leaves(parameters)[0].sharding)
        observation, _ = self._envs.reset(seed=seed)
        total, playing = np.zeros(len(observation)), np.ones(len(observation), bool)
        timestep = 0
        while playing.any():
            to_go = np.asarray(target - total, np.float32)
            context, action = self._act(parameters, context, np.asarray(observation, np.float32), to_go, timestep)
            observation, reward, terminated, truncated, _ = self._envs.step(np.asarray(action))
            total += np.where(playing, reward, 0.0)
            playing &= ~(terminated | truncated)
            timestep += 1
        return total

    def close(self) -> None:
        self._envs.close()


def empty_context(batch: int, context: int, observation_size: int, action_size: int) -> tuple[jax.Array, ...]:
    """The model's arguments before the first step: padding throughout."""
    return (
        jnp.zeros((batch, context)),
        jnp.zeros((batch, context, observation_size)),
        jnp.zeros((batch, context, action_size)),
        jnp.zeros((batch, context), jnp.int32),
        jnp.zeros((batch, context), bool),
    )


def push(old: jax.Array, new: Any) -> jax.Array:
    """Drops the oldest step of `[B, K, ...]` and appends `new`, broadcast to `[B, ...]`."""
    new = jnp.broadcast_to(jnp.asarray(new, old.dtype), old[:, 0].shape)
    return jnp.concatenate([old[:, 1:], new[:, None]], axis=1)
