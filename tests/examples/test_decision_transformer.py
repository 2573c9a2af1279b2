"""The main job, small: the command from recording to learning curve, and how it reads a table."""

import functools
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def main(example):
    return example("decision_transformer")


def test_moments_leave_out_what_was_not_written(main, memory):
    column = np.random.default_rng(0).normal(size=(1, 3, 5, 2)).astype(np.float32)
    length = np.array([[5, 0, 2]], np.int32)
    real = np.concatenate([column[0, 0], column[0, 2, :2]])
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
    mean, std = jax.jit(main.moments)(jax.device_put(column, place), length)
    np.testing.assert_allclose(mean, real.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(std, real.std(axis=0), rtol=1e-4)


@pytest.fixture
def command(tmp_path):
    """Runs the command with a few tiny steps; returns what it prints and shows."""
    plot = tmp_path / "plots" / "curve.png"

    def run(*arguments):
        command = [sys.executable, "-W", "error", EXAMPLES / "decision_transformer.py", *arguments]
        command += ["--episodes", "4", "--steps", "4", "--chunk", "2", "--evaluate-every", "4", "--envs", "2"]
        command += ["--context", "16", "--width", "16", "--heads", "2", "--layers", "1", "--batch", "8"]
        command += ["--datasets", tmp_path / "datasets", "--plot", plot]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert "train seed 0" in done.stderr and "arning" not in done.stderr
        for row in ("dataset, mean return", "dataset, best return", "policy, return", "instead, return"):
            assert row in done.stdout
        assert re.search(r"samples \(windows\) per second +[\d,]+\n", done.stdout)
        assert re.search(r"share of a step spent in replay +[\d.]+% +\(\d+ µs of [\d.]+ ms\)\n", done.stdout)
        assert re.search(r"parameters +[\d,]+ ", done.stdout)
        return done

    return run


@pytest.mark.devices(4)
def test_the_command_on_several_devices(command):
    done = command("--preset", "cpu", "--devices", "4", "--memory", "pinned_host")
    assert "compute in float32" in done.stdout and "8 windows of 16 steps" in done.stdout
    assert "fixed batch" not in done.stdout + done.stderr
    assert re.search(r"table +[\d.]+ kB in pinned_host memory, over 4 devices\n", done.stdout)


@pytest.mark.devices(4)
def test_moments_of_a_table_over_devices(main, memory):
    column = np.random.default_rng(0).normal(size=(4, 3, 5, 2)).astype(np.float32)
    length = np.array([[5, 0, 2]] * 4, np.int32)
    mesh, held = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("replay",)), jax.sharding.PartitionSpec("replay")
    place = jax.sharding.NamedSharding(mesh, held, memory_kind=memory)
    whole, measure = jax.sharding.PartitionSpec(), functools.partial(main.moments, axis="replay")
    measure = jax.shard_map(measure, mesh=mesh, in_specs=held, out_specs=whole, check_vma=False)
    wanted = jax.jit(main.moments)(column, length)
    for got, want in zip(jax.jit(measure)(jax.device_put(column, place), length), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_command_as_on_a_gpu(command):
    """The large job's way, with a table in pinned memory and overlapped samples, in a small size."""
    done = command("--preset", "gpu", "--memory", "pinned_host", "--compare", "1")
    assert "compute in bfloat16" in done.stdout and "8 windows of 16 steps" in done.stdout
    assert re.search(r"table +[\d.]+ kB in pinned_host memory\n", done.stdout)
    assert re.search(r"on a fixed batch, without replay +[\d.]+ ms\n", done.stdout)
    assert re.search(r"with replay over without +[\d.]+ x\n", done.stdout)
    assert "compare with a fixed batch" in done.stderr
