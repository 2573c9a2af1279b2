"""Real datasets in a temporary folder: Minari in every storage, D4RL-style HDF5."""

import pathlib
import warnings

import gymnasium as gym
import h5py
import minari
import numpy as np
import pytest
from minari.data_collector.episode_buffer import EpisodeBuffer

BOX = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
TORQUE = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def make_episodes(rng):
    """Episodes as dicts of arrays: `observations` has one row more than the others.

    The ends alternate: terminated, truncated, both.
    """

    def make(lengths, space=BOX, action_space=TORQUE):
        space.seed(0)
        action_space.seed(0)
        return [
            {
                "observations": [space.sample() for _ in range(length + 1)],
                "actions": [action_space.sample() for _ in range(length)],
                "rewards": rng.normal(size=length).round(3),
                "terminated": i % 3 != 1,
                "truncated": i % 3 != 0,
            }
            for i, length in enumerate(lengths)
        ]

    return make


def _transpose(samples, space):
    if isinstance(space, gym.spaces.Dict):
        return {k: _transpose([s[k] for s in samples], sub) for k, sub in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_transpose([s[i] for s in samples], sub) for i, sub in enumerate(space.spaces))
    return list(samples)


@pytest.fixture
def make_minari(tmp_path, monkeypatch):
    """Writes episodes as a Minari dataset; returns the folder that holds its metadata.json."""
    root = tmp_path / "minari"
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))

    def make(episodes, storage="hdf5", name="test/case-v0", space=BOX, action_space=TORQUE, **options):
        buffers = []
        for i, episode in enumerate(episodes):
            flags = np.zeros((2, len(episode["rewards"])), bool)
            flags[:, -1:] = [[episode["terminated"]], [episode["truncated"]]]
            buffers.append(
                EpisodeBuffer(
                    id=i,
                    observations=_transpose(episode["observations"], space),
                    actions=_transpose(episode["actions"], action_space),
                    rewards=list(episode["rewards"]),
                    terminations=list(flags[0]),
                    truncations=list(flags[1]),
                    infos={},
                )
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Minari misses the author, the permalink, ...
            minari.create_dataset_from_buffers(
                name,
                buffers,
                observation_space=space,
                action_space=action_space,
                data_format=storage,
                **options,
            )
        return root / name / "data"

    return make


@pytest.fixture
def make_d4rl(tmp_path):
    """Writes episodes as one flat HDF5 file; an array sets a dataset, None drops it."""

    def make(episodes, name="flat.hdf5", timeouts=True, next_observations=False, **replace) -> pathlib.Path:
        def flat(function):
            return np.concatenate([np.asarray(function(e)) for e in episodes])

        def flag(name):
            return flat(lambda e: np.arange(len(e["rewards"])) == (len(e["rewards"]) - 1 if e[name] else -1))

        data = {
            "observations": flat(lambda e: e["observations"][:-1]),
            "actions": flat(lambda e: e["actions"]),
            "rewards": flat(lambda e: e["rewards"]).astype(np.float32),
            "terminals": flag("terminated"),
        }
        if timeouts is True:
            timeouts = flag("truncated")
        if next_observations is True:
            next_observations = flat(lambda e: e["observations"][1:])
        optional = {"timeouts": timeouts, "next_observations": next_observations}
        data.update({key: value for key, value in optional.items() if value is not False})
        data.update(replace)
        path = tmp_path / name
        with h5py.File(path, "w") as file:
            for key, value in data.items():
                if value is not None:
                    file[key] = value
        return path

    return make
