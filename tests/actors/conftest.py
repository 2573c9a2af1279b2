"""Rings in a directory of shared memory of the test's own, in which nothing may be left."""

import os
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.actors import make_ring

STEPS = 4
# The processes of actors import what they run, `actor_targets`, by its name.
sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture
def shm():
    """The directory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gear_jax_test.") as directory:
        yield directory
        assert os.listdir(directory) == []


@pytest.fixture
def bridge():
    """An `Ingest` on a GPU needs CuPy."""
    if jax.default_backend() == "gpu":
        pytest.importorskip("cupy")


@pytest.fixture
def table():
    """Columns of odd sizes, nested."""
    columns = {
        "observation": {"image": gear.ColumnSpec((3, 5), jnp.uint8), "position": gear.ColumnSpec((3,), jnp.float32)},
        "action": gear.ColumnSpec((), jnp.int32),
        "done": gear.ColumnSpec((), jnp.bool_),
    }
    return gear.TableSpec(columns, trajectory_length=STEPS, capacity=32)


@pytest.fixture
def ring(shm, table):
    """A ring of 2 actors with 3 slots each, which answers up to 2 rows of each."""
    ask = {"image": gear.ColumnSpec((3, 5), "uint8"), "position": gear.ColumnSpec((3,), "float32")}
    made = make_ring(table, 2, 3, ask=ask, answer=gear.ColumnSpec((2,), "float32"), rows=2, directory=shm)
    yield made
    made.unlink()


@pytest.fixture
def step():
    """From a code to a step."""
    return _step


@pytest.fixture
def trajectory():
    """From a code and a length to columns."""
    return _trajectory


def _step(code: int):
    """A step whose every byte follows from its code."""
    return {
        "observation": {
            "image": ((np.arange(15) * 7 + code) % 256).astype(np.uint8).reshape(3, 5),
            "position": np.arange(3, dtype=np.float32) + code,
        },
        "action": np.int32(code),
        "done": bool(code % 2),
    }


def _trajectory(code: int, length: int):
    """Columns `[L, *shape]` of the steps code, code + 1, ..."""
    steps = [_step(code + t) for t in range(length)]
    return {
        "observation": {k: np.stack([s["observation"][k] for s in steps]) for k in ("image", "position")},
        "action": np.array([s["action"] for s in steps], np.int32),
        "done": np.array([s["done"] for s in steps]),
    }
