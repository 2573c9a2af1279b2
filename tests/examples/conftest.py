import importlib
import pathlib

import jax
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.flax import NNXReplay

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports a file of the examples folder, as the scripts in it do."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture(autouse=True)
def usual_promotion():
    """Examples are written for JAX's defaults."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


T, EPISODES = 30, 8


@pytest.fixture
def make_learner(example):
    """make(*arguments, memory=, seed=, **placement) -> the learner of the Decision Transformer, small, on a full table.

    The observations are of 8 numbers, the actions of 2; the batch is of 4 windows unless the arguments say otherwise.
    """

    def make(*arguments, memory="device", seed=0, **placement):
        given = ["--preset", "cpu", "--batch", "4", "--context", "20", "--width", "16", "--layers", "1"]
        given += ["--chunk", "2", "--steps", "4", "--evaluate-every", "2", *arguments]
        options = example("_options").parse(given)
        columns = {
            "observation": gear.ColumnSpec((8,), np.float32),
            "action": gear.ColumnSpec((2,), np.float32),
            "return_to_go": gear.ColumnSpec((), np.float32),
            "timestep": gear.ColumnSpec((), np.int32),
        }
        window = gear.Window(offset=1 - options.context, length=options.context)
        spec = gear.TableSpec(columns, T, capacity=EPISODES)
        table = NNXReplay(gear.make_replay(spec, windows=window, memory=memory, **placement))
        rng = np.random.default_rng(0)
        rows = {
            "observation": rng.normal(size=(EPISODES, T, 8)).astype(np.float32),
            "action": rng.uniform(-1, 1, (EPISODES, T, 2)).astype(np.float32),
            "return_to_go": rng.normal(size=(EPISODES, T)).astype(np.float32),
            "timestep": np.tile(np.arange(T, dtype=np.int32), (EPISODES, 1)),
        }
        table.add(rows, np.full(EPISODES, T, np.int32))
        module = example("_learner")
        task = module.Task(1.0, 2.0, np.zeros(8, np.float32), np.ones(8, np.float32))
        return module.Learner(table, task, options, seed=seed)

    return make
