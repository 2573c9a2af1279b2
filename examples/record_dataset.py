"""Records a Minari dataset from a real Gymnasium environment, so that nothing has to be downloaded.

    python examples/record_dataset.py --out datasets --episodes 160 --seed 0 --storage hdf5

Every episode is played by a policy of its own, random or scripted (`_policies.py`), so that the dataset holds
every quality of behaviour. A recording is complete or not there: it is moved into place when the last episode
is written.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import pathlib
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import minari
import numpy as np
from _policies import ENVIRONMENT, EPISODES, Policy, draw_policy
from minari.data_collector.episode_buffer import EpisodeBuffer
from tqdm import tqdm

DrawPolicy = Callable[[np.random.Generator], Policy]


class UniformPolicy:
    """Independent uniform actions: what there is for an environment that nobody wrote a script for."""

    name = "uniform"

    def __init__(self, space: gym.spaces.Box, rng: np.random.Generator):
        self._space, self._rng = space, rng

    def __call__(self, observation: Any) -> np.ndarray:
        return self._rng.uniform(self._space.low, self._space.high).astype(self._space.dtype)


def record(
    out: str | os.PathLike,
    *,
    environment: str = ENVIRONMENT,
    episodes: int = EPISODES,
    seed: int = 0,
    storage: str = "hdf5",
    draw: DrawPolicy | None = None,
    dataset_id: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> pathlib.Path:
    """Records a dataset, or finds the same one recorded before.

    Args:
      out: folder for datasets (what `MINARI_DATASETS_PATH` names).
      environment: a Gymnasium environment id with a Box action space.
      episodes: how many episodes.
      seed: decides everything: the same arguments record the same dataset.
      storage: "hdf5" or "arrow".
      draw: makes the policy of one episode from a generator. None: `_policies.draw_policy` for its
        environment, uniform actions for any other.
      dataset_id: Minari id; None: "swimmer/mixed-hdf5-v0" and the like.
      overwrite: replace a dataset that was recorded with other arguments or by other policies.
      progress: show a progress bar.

    Returns:
      The dataset's folder, which `gear_jax.datasets` opens.

    Raises:
      ValueError: the arguments are wrong, or `out` holds a dataset of this id recorded with other arguments.
    """
    if storage not in ("hdf5", "arrow"):
        raise ValueError(f"storage: got {storage!r}, wanted 'hdf5' or 'arrow'.")
    if episodes < 1:
        raise ValueError(f"episodes: got {episodes}, wanted at least 1.")
    dataset_id = dataset_id or f"{environment.split('-')[0].lower()}/mixed-{storage}-v0"
    out = pathlib.Path(out).resolve()  # Minari joins a relative folder to itself
    folder = out / dataset_id
    recipe = {
        "environment": environment,
        "episodes": episodes,
        "seed": seed,
        "policies": _fingerprint(draw or draw_policy),
    }
    if folder.exists():
        found = minari.MinariDataset(folder / "data").storage.metadata.get("recipe")
        if found == recipe:
            return folder
        if not overwrite:
            raise ValueError(f"{folder}: holds a dataset recorded with {found}, not {recipe}. Pass overwrite=True.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".recording-") as scratch:
        env = gym.make(environment)
        try:
            draw = draw or _default_policies(env)
            played = _episodes(env, draw, episodes, seed)
            if progress:
                played = tqdm(played, total=episodes, desc=f"record {dataset_id}", unit="episode")
            _write(scratch, dataset_id, environment, played, storage, recipe)
        finally:
            env.close()
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(pathlib.Path(scratch) / dataset_id, folder)
    return folder


def _fingerprint(draw: DrawPolicy) -> str:
    """Changes when the policies' source does, so that a recording by older policies is not taken for the same."""
    module = inspect.getmodule(draw)
    source = "" if module is None else inspect.getsource(module)
    return f"{getattr(draw, '__qualname__', type(draw).__name__)}-{zlib.crc32(source.encode()):08x}"


def _default_policies(env: gym.Env) -> DrawPolicy:
    if env.spec is not None and env.spec.id == ENVIRONMENT:
        return draw_policy
    space = env.action_space
    if not isinstance(space, gym.spaces.Box):
        raise ValueError(f"environment: got the action space {space}, wanted a Box. Pass `draw` for this one.")
    return lambda rng: UniformPolicy(space, rng)


def _episodes(env: gym.Env, draw: DrawPolicy, episodes: int, seed: int) -> Iterator[EpisodeBuffer]:
    for i in range(episodes):
        rng = np.random.default_rng([seed, i])
        policy = draw(rng)
        reset_seed = int(rng.integers(2**31))
        observation, _ = env.reset(seed=reset_seed)
        observations, actions, rewards, terminations, truncations = [observation], [], [], [], []
        done = False
        while not done:
            action = policy(observation)
            observation, reward, terminated, truncated, _ = env.step(action)
            observations.append(observation)
            actions.append(action)
            rewards.append(float(reward))
            terminations.append(bool(terminated))
            truncations.append(bool(truncated))
            done = terminated or truncated
        yield EpisodeBuffer(
            id=i,
            seed=reset_seed,
            observations=observations,
            actions=actions,
            rewards=rewards,
            terminations=terminations,
            truncations=truncations,
            infos={},
        )


def _write(root: str, dataset_id: str, environment: str, played, storage: str, recipe: dict[str, Any]) -> None:
    with _datasets_path(root), warnings.catch_warnings():
        # Minari warns for every piece of bibliography that is left out.
        warnings.filterwarnings("ignore", message=r".*is set to None")
        dataset = minari.create_dataset_from_buffers(
            dataset_id,
            played,
            env=environment,
            eval_env=environment,
            algorithm_name="scripted and random policies",
            description=f"{recipe['episodes']} episodes of {environment} by policies of every quality",
            data_format=storage,
        )
        dataset.storage.update_metadata({"recipe": recipe})


@contextlib.contextmanager
def _datasets_path(path: str) -> Iterator[None]:
    """Minari takes its folder from the environment only."""
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = path
    try:
        yield
    finally:
        if before is None:
            del os.environ["MINARI_DATASETS_PATH"]
        else:
            os.environ["MINARI_DATASETS_PATH"] = before


def _describe(folder: pathlib.Path) -> str:
    dataset = minari.MinariDataset(folder / "data")
    returns = np.array([episode.rewards.sum() for episode in dataset.iterate_episodes()])
    ends = [bool(episode.terminations[-1]) for episode in dataset.iterate_episodes()]
    return (
        f"{folder}\n{len(returns)} episodes, {dataset.total_steps} steps, {sum(ends)} terminated\n"
        f"return: mean {returns.mean():.2f}, best {returns.max():.2f}, worst {returns.min():.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default=ENVIRONMENT, help="Gymnasium environment id (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--storage", choices=("hdf5", "arrow"), default="hdf5", help="default: %(default)s")
    parser.add_argument("--out", default="datasets", help="folder for datasets (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset recorded otherwise")
    args = parser.parse_args()
    folder = record(
        args.out,
        environment=args.env,
        episodes=args.episodes,
        seed=args.seed,
        storage=args.storage,
        overwrite=args.overwrite,
    )
    print(_describe(folder))


if __name__ == "__main__":
    main()
