"""Reading keeps one episode, loading one chunk: not the file."""

import tracemalloc

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pytest

import gear_jax as gear
from gear_jax.datasets import open_source

EPISODES, STEPS, WIDTH = 40, 200, 64
EPISODE_BYTES = STEPS * (WIDTH + 2) * 4
SPACE = gym.spaces.Box(-np.inf, np.inf, (WIDTH,), np.float32)


@pytest.fixture(params=["hdf5", "arrow", "flat", "flat, by next observations"])
def dataset(request, rng, make_minari, make_d4rl, monkeypatch):
    """A dataset of 40 episodes and 2 MB."""
    monkeypatch.setattr("gear_jax.datasets._d4rl._BLOCK_BYTES", 2 * EPISODE_BYTES)
    episodes = [
        {
            "observations": rng.normal(size=(STEPS + 1, WIDTH)).astype(np.float32),
            "actions": np.zeros((STEPS, 2), np.float32),
            "rewards": rng.normal(size=STEPS),
            "terminated": request.param == "flat, by next observations",
            "truncated": True,
        }
        for _ in range(EPISODES)
    ]
    if request.param.startswith("flat"):
        by_next = request.param != "flat"
        return make_d4rl(episodes, timeouts=not by_next, next_observations=by_next)
    return make_minari(episodes, request.param, space=SPACE)


def peak_of(function):
    """Most bytes that NumPy and Arrow held at once on top of what they held before."""
    before = pa.total_allocated_bytes()
    arrow = 0
    tracemalloc.start()
    try:
        for _ in function():
            arrow = max(arrow, pa.total_allocated_bytes() - before)
        return tracemalloc.get_traced_memory()[1] + arrow
    finally:
        tracemalloc.stop()


def test_reading_keeps_an_episode_or_two(dataset):
    list(open_source(dataset))  # imports and caches are not the reader's
    peak = peak_of(lambda: open_source(dataset))
    assert EPISODE_BYTES / 2 < peak < 10 * EPISODE_BYTES < EPISODES * EPISODE_BYTES / 3


@pytest.mark.parametrize("chunk", [1, 4])
def test_loading_keeps_a_chunk(dataset, chunk):
    replay = gear.make_replay(gear.datasets.table_spec(dataset))

    def run():
        gear.datasets.load(replay, replay.init(), dataset, chunk=chunk, progress=False)
        return ()

    run()
    assert peak_of(run) < (10 + chunk) * EPISODE_BYTES < EPISODES * EPISODE_BYTES / 2
