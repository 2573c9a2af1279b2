"""CartPole-v1 in JAX: the dynamics, limits and rewards of Gymnasium's, as pure functions of one environment."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

OBSERVATION, ACTIONS, MOST_STEPS = 4, 2, 500
_GRAVITY, _CART, _POLE, _HALF_LENGTH, _FORCE, _SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
_FARTHEST, _STEEPEST = 2.4, float(np.deg2rad(12))


class Cart(NamedTuple):
    """An environment: position, speed, angle, angular speed `float32[4]`, and the steps of the episode `int32[]`."""

    observation: jax.Array
    steps: jax.Array


class Step(NamedTuple):
    """What a step gave: `float32[]`, and `bool[]` each. The episode is over if it is terminated or truncated."""

    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array


def reset(key: jax.Array) -> Cart:
    """A new episode: all four numbers uniform in [-0.05, 0.05)."""
    return Cart(jax.random.uniform(key, (OBSERVATION,), minval=-0.05, maxval=0.05), jnp.int32(0))


def step(cart: Cart, action: jax.Array) -> tuple[Cart, Step]:
    """A fiftieth of a second: action 0 pushes to the left, 1 to the right."""
    x, speed, angle, turn = cart.observation
    force = jnp.where(action == 1, _FORCE, -_FORCE)
    mass, moment = _CART + _POLE, _POLE * _HALF_LENGTH
    push = (force + moment * turn**2 * jnp.sin(angle)) / mass
    bent = (_GRAVITY * jnp.sin(angle) - jnp.cos(angle) * push) / (
        _HALF_LENGTH * (4.0 / 3.0 - _POLE * jnp.cos(angle) ** 2 / mass)
    )
    pull = push - moment * bent * jnp.cos(angle) / mass
    after = jnp.stack([x + _SECONDS * speed, speed + _SECONDS * pull, angle + _SECONDS * turn, turn + _SECONDS * bent])
    over = (jnp.abs(after[0]) > _FARTHEST) | (jnp.abs(after[2]) > _STEEPEST)
    steps = cart.steps + 1
    return Cart(after, steps), Step(jnp.float32(1), over, steps >= MOST_STEPS)
