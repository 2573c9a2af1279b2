"""Columns that no file holds: return-to-go, the step's number, the end flags."""

import dataclasses
from collections.abc import Collection

import numpy as np

from gear_jax._errors import value_error
from gear_jax.datasets._episode import Episode

DERIVED_COLUMNS = ("return_to_go", "timestep", "terminated", "truncated")


def return_to_go(rewards: np.ndarray, *, gamma: float = 1.0, bootstrap: float = 0.0) -> np.ndarray:
    """What is still to come at every step: g[t] = r[t] + gamma * g[t + 1].

    Behind the last step stands `bootstrap`, the value of the state an episode was cut off in. After a
    termination it is 0. After a truncation 0 means that the return is of the recorded rewards alone, and so
    falls short of what the policy would have got; give a value estimate to mend that.

    Args:
      rewards: real numbers `[L]`.
      gamma: the discount, in [0, 1].
      bootstrap: the value behind the last step.

    Returns:
      float64 `[L]`, summed from the end in float64.
    """
    if not 0.0 <= gamma <= 1.0:
        raise value_error("gamma", got=gamma, wanted="a discount in [0, 1]", fix="Pass gamma=1.0 for undiscounted.")
    rewards = np.asarray(rewards, np.float64)
    if gamma == 1.0:
        return np.cumsum(np.append(rewards, bootstrap)[::-1])[:0:-1]
    result = np.empty_like(rewards)
    value = float(bootstrap)
    for t in range(len(rewards) - 1, -1, -1):
        value = rewards[t] + gamma * value
        result[t] = value
    return result


def derive(episode: Episode, names: Collection[str], *, gamma: float = 1.0, bootstrap: float = 0.0) -> Episode:
    """The episode with derived columns added.

    Args:
      episode: what a `Source` yielded.
      names: which of `DERIVED_COLUMNS`; other names are left alone. "timestep" is int32 `[L]` from 0;
        "terminated" and "truncated" are bool `[L]`, True at most at the last step.
      gamma: the discount of "return_to_go".
      bootstrap: the value behind the last step; ignored where the episode terminated.
    """
    columns = dict(episode.columns)
    length = episode.length
    if "return_to_go" in names:
        tail = 0.0 if episode.terminated else bootstrap
        columns["return_to_go"] = return_to_go(columns["reward"], gamma=gamma, bootstrap=tail)
    if "timestep" in names:
        columns["timestep"] = np.arange(length, dtype=np.int32)
    for name in ("terminated", "truncated"):
        if name in names:
            columns[name] = np.zeros(length, bool)
            columns[name][-1] = getattr(episode, name)
    return dataclasses.replace(episode, columns=columns)
