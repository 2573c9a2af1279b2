import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.testing.ops import to_numpy

TABLE = gear.TableSpec(
    {"observation": gear.ColumnSpec((3,), jnp.float32), "reward": gear.ColumnSpec((), jnp.float32)},
    trajectory_length=7,
    capacity=16,
)


@pytest.fixture
def table_spec():
    return TABLE


@functools.cache  # so that each program is compiled once
def _replay(memory):
    return gear.make_replay(TABLE, gear.selectors.Prioritized(), streams=2, memory=memory)


@pytest.fixture
def replay(memory):
    return _replay(memory)


@functools.cache
def _over_mesh(memory):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("replay",))
    return gear.make_replay(TABLE, gear.selectors.Prioritized(), streams=8, memory=memory, mesh=mesh)


@pytest.fixture
def replay_over_mesh(memory):
    """Over four devices."""
    return _over_mesh(memory)


@pytest.fixture(scope="session")
def make_rows():
    """Makes the arguments of `add`: A trajectories of 5 steps."""

    def make(count: int = 4, seed: int = 0):
        keys = jax.random.split(jax.random.key(seed), 2)
        rows = {
            "observation": jax.random.normal(keys[0], (count, 7, 3)),
            "reward": jax.random.normal(keys[1], (count, 7)),
        }
        return rows, jnp.full((count,), 5, jnp.int32)

    return make


@pytest.fixture(scope="session")
def same():
    """Whether two pytrees are of the same structure and bits."""

    def compare(a, b) -> bool:
        equal = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(*to_numpy((x, y))), a, b)
        return jax.tree.all(equal)

    return compare
