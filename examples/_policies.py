"""The behaviour policies of the recorded dataset: random ones and scripted gaits of every quality.

The environment is Gymnasium's Swimmer-v5: a chain of three links in a viscous fluid, paid for swimming along +x.
Nothing ever falls over, so every episode is 1000 steps long and ends in a truncation, never in a termination. A
random policy earns about nothing, and a three-link chain swims only when its two joints beat in a travelling wave,
so a policy has to get frequency, amplitude, phase lag and heading right at the same time.

NumPy only: recording needs no jax.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

ENVIRONMENT = "Swimmer-v5"
EPISODES = 160
EPISODE_STEPS = 1000
RANDOM_SHARE = 0.25  # of the episodes


class Policy(Protocol):
    """Maps observations of one episode to actions. One object serves one episode."""

    name: str

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        """Returns the next action, float32[2] within [-1, 1], for `observation`, float64[8]."""


class RandomPolicy:
    """Correlated noise: a torque that wanders with a random memory, from white to slowly drifting."""

    name = "random"

    def __init__(self, rng: np.random.Generator):
        self._rng = rng
        self._memory = rng.uniform(0.0, 0.97)
        self._torque = np.zeros(2)

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        kick = np.sqrt(1.0 - self._memory**2) * self._rng.normal(size=2)
        self._torque = self._memory * self._torque + 0.6 * kick
        return np.clip(self._torque, -1.0, 1.0).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Gait:
    """One way to swim.

    Attributes:
      period: steps per beat.
      amplitude: of the joint angles, in radians.
      lag: of the second joint behind the first, in radians.
      stiffness: torque per radian of error.
      damping: torque per radian per second.
      steer: how strongly the chain bends against its heading, so that it swims along +x.
      noise: standard deviation of the correlated noise on the torques.
    """

    period: float
    amplitude: float
    lag: float
    stiffness: float
    damping: float
    steer: float
    noise: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Gait:
        """A gait of random skill, as if taken from a swimmer at a random point of its training.

        Skill goes from hardly moving to close to the best that Swimmer allows (about 360); all parameters but the
        noise also scatter on their own, so that no two gaits of equal skill are alike.
        """
        skill = rng.uniform()
        return cls(
            period=_blend(skill, 80.0, 34.0) * rng.uniform(0.9, 1.1),
            amplitude=_blend(skill, 0.4, 1.5) * rng.uniform(0.9, 1.1),
            lag=_blend(skill, -1.2, -0.5) + rng.uniform(-0.15, 0.15),
            stiffness=rng.uniform(2.5, 3.5),
            damping=rng.uniform(0.25, 0.35),
            steer=rng.uniform(0.25, 0.4),
            noise=_blend(skill, 0.8, 0.3),
        )


def _blend(skill: float, novice: float, expert: float) -> float:
    return novice + skill * (expert - novice)


class GaitPolicy:
    """Tracks the joint angles of a travelling wave with a noisy proportional-derivative controller."""

    name = "gait"

    def __init__(self, rng: np.random.Generator, gait: Gait | None = None):
        self._rng = rng
        self._gait = Gait.draw(rng) if gait is None else gait
        self._phase = 0.0
        self._noise = np.zeros(2)

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        gait = self._gait
        joints, speeds = observation[1:3], observation[6:8]
        # The first link's angle, corrected to the mean of the three links'.
        heading = observation[0] + joints[0] * 2.0 / 3.0 + joints[1] / 3.0
        wave = np.sin(self._phase + np.array([0.0, gait.lag]))
        target = gait.amplitude * wave + gait.steer * heading
        self._phase += 2.0 * np.pi / gait.period
        # Noise that lasts pushes the swimmer off its course, so that the dataset also shows how to get back on it;
        # white noise averages out before it is felt.
        self._noise = 0.9 * self._noise + 0.435 * self._rng.normal(size=2)
        torque = gait.stiffness * (target - joints) - gait.damping * speeds + gait.noise * self._noise
        return np.clip(torque, -1.0, 1.0).astype(np.float32)


def draw_policy(rng: np.random.Generator) -> Policy:
    """Draws the behaviour policy of one episode: random in `RANDOM_SHARE` of the cases, else a random gait."""
    return RandomPolicy(rng) if rng.random() < RANDOM_SHARE else GaitPolicy(rng)
