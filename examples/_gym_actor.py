"""What runs in the actors' processes: Gymnasium environments that ask the learner for actions. No jax in here."""

from __future__ import annotations

import gymnasium
import numpy as np

from gear_jax.actors import Writer

ENVIRONMENT = "CartPole-v1"
OBSERVATION, ACTIONS, MOST_STEPS = 4, 2, 500


def make(envs: int) -> gymnasium.vector.VectorEnv:
    """Environments side by side. One that is over is reset by the step after, whose action does not count."""
    made = gymnasium.make_vec(ENVIRONMENT, num_envs=envs, vectorization_mode="vector_entry_point")
    if made.metadata["autoreset_mode"] is not gymnasium.vector.AutoresetMode.NEXT_STEP:
        raise ValueError(f"{ENVIRONMENT}: got {made.metadata['autoreset_mode']}, wanted AutoresetMode.NEXT_STEP.")
    return made


def play(writer: Writer, envs: int, seed: int) -> None:
    """Plays until the learner closes the ring.

    Every step is one question for all environments. Each of them has a segment of at most T steps, which is committed
    when it is full or the episode over.
    """
    environments, longest = make(envs), writer.ring.steps
    segments = {name: np.zeros((envs, longest, *spec.shape), spec.dtype) for name, spec in writer.ring.specs.items()}
    length, every = np.zeros(envs, np.int64), np.arange(envs)
    observation, _ = environments.reset(seed=seed + writer.actor)
    starting = np.zeros(envs, bool)
    while True:
        action = writer.act({"observation": observation})["action"]
        following, reward, terminated, truncated, _ = environments.step(action)
        at = every[~starting], length[~starting]
        for name, values in (
            ("observation", observation), ("action", action), ("reward", reward), ("terminated", terminated)
        ):  # fmt: skip
            segments[name][at] = values[~starting]
        length[~starting] += 1
        over = ~starting & (terminated | truncated)
        for i in np.flatnonzero(over | (length == longest)):
            views, n = writer.begin(), int(length[i])
            for name, view in views.items():
                view[:n] = segments[name][i, :n]
            writer.commit(n)
            length[i] = 0
        observation, starting = following, over
