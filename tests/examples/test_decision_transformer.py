"""The main job, small: the command from recording to learning curve, and its train loop."""

import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

import gear_jax as gear
from gear_jax.flax import NNXReplay

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
T, OBSERVATION, ACTION = 30, 8, 2


@pytest.fixture
def main(example):
    return example("decision_transformer")


@pytest.fixture(autouse=True)
def usual_promotion():
    """Examples are written for JAX's defaults."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def make_learner(main, arguments=()):
    options = main.parse(["--batch", "4", "--width", "16", "--layers", "1", "--chunk", "2", "--steps", "4",
                          "--evaluate-every", "2", *arguments])  # fmt: skip
    columns = {
        "observation": gear.ColumnSpec((OBSERVATION,), np.float32),
        "action": gear.ColumnSpec((ACTION,), np.float32),
        "return_to_go": gear.ColumnSpec((), np.float32),
        "timestep": gear.ColumnSpec((), np.int32),
    }
    window = gear.Window(offset=1 - options.context, length=options.context)
    table = NNXReplay(gear.make_replay(gear.TableSpec(columns, T, capacity=6), windows=window))
    rng = np.random.default_rng(0)
    rows = {
        "observation": rng.normal(size=(6, T, OBSERVATION)).astype(np.float32),
        "action": rng.uniform(-1, 1, (6, T, ACTION)).astype(np.float32),
        "return_to_go": rng.normal(size=(6, T)).astype(np.float32),
        "timestep": np.tile(np.arange(T, dtype=np.int32), (6, 1)),
    }
    table.add(rows, np.full(6, T, np.int32))
    task = main.Task(1.0, 2.0, np.zeros(OBSERVATION, np.float32), np.ones(OBSERVATION, np.float32))
    return main.Learner(table, task, options, seed=0)


def test_the_train_loop_copies_no_column(main):
    gear.assert_in_place(main.train, make_learner(main), steps=2)


def test_the_train_loop_learns_and_the_seed_decides(main):
    learner = make_learner(main)
    before = jax.tree.map(np.asarray, nnx.state(learner.model, nnx.Param))
    losses = main.train(learner, steps=2)
    assert losses.shape == (2,) and np.isfinite(losses).all()
    assert learner.table.replay.stats(learner.table())["sampled"] == 2 * 4
    moved = jax.tree.map(lambda a, b: bool((a != np.asarray(b)).any()), before, nnx.state(learner.model, nnx.Param))
    assert any(jax.tree.leaves(moved))
    np.testing.assert_array_equal(main.train(make_learner(main), steps=2), losses)


def test_moments_leave_out_what_was_not_written(main):
    column = np.random.default_rng(0).normal(size=(1, 3, 5, 2)).astype(np.float32)
    length = np.array([[5, 0, 2]], np.int32)
    real = np.concatenate([column[0, 0], column[0, 2, :2]])
    mean, std = main.moments(column, length)
    np.testing.assert_allclose(mean, real.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(std, real.std(axis=0), rtol=1e-4)


@pytest.mark.parametrize("arguments", [["--steps", "5"], ["--evaluate-every", "3"], ["--steps", "0"]])
def test_steps_that_do_not_fit_the_chunk(main, arguments, capsys):
    with pytest.raises(SystemExit):
        main.parse(["--chunk", "2", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_the_outcome_of_two_seeds(main, tmp_path):
    asked = [(share, 200.0 * share) for share in main.ASKED]
    curve = [np.array([0.0, 10.0]), np.array([180.0, 190.0])]
    finals = np.array([170.0, 190.0]), np.array([190.0, 210.0])
    results = [main.Result([0, 2], curve, np.ones(2), final, asked, 0.02, 0.0001) for final in finals]
    task = main.Task(90.0, 200.0, np.zeros(1), np.ones(1))
    text = main.table_of(task, results, batch=64)
    assert "190.0  (seeds: 180, 200)" in text and "170.0, 210.0" in text
    assert "2.11 x" in text and "0.95 x" in text and "asked for 50.0 instead" in text
    assert "3,200" in text and "0.50%  (100 µs of 20.0 ms)" in text
    main.plot(tmp_path / "new" / "curve.png", task, results)
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_command(tmp_path):
    plot = tmp_path / "plots" / "curve.png"
    command = [sys.executable, "-W", "error", EXAMPLES / "decision_transformer.py"]
    command += ["--episodes", "4", "--steps", "4", "--chunk", "2", "--evaluate-every", "4", "--envs", "2"]
    command += ["--width", "16", "--layers", "1", "--batch", "8"]
    command += ["--datasets", tmp_path / "datasets", "--plot", plot]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for row in ("dataset, mean return", "dataset, best return", "policy, return", "instead, return"):
        assert row in done.stdout
    assert re.search(r"samples \(windows\) per second +[\d,]+\n", done.stdout)
    assert re.search(r"share of a step spent in replay +[\d.]+% +\(\d+ µs of [\d.]+ ms\)\n", done.stdout)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "train seed 0" in done.stderr and "arning" not in done.stderr
