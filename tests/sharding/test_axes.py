"""Meshes whose axes are explicit, as `jax.make_mesh` makes them, automatic, or both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gear_jax as gear
from gear_jax.testing.ops import assert_same_bits, to_numpy

TABLE = gear.TableSpec({"x": gear.ColumnSpec((2,), jnp.float32)}, trajectory_length=3, capacity=32)
ROWS = {"x": np.arange(16 * 3 * 2, dtype=np.float32).reshape(16, 3, 2)}
LENGTHS = np.arange(16, dtype=np.int32) % 4
E, A = AxisType.Explicit, AxisType.Auto

pytestmark = pytest.mark.devices(8)


def mesh(shape=(8,), names=("replay",), types=None):
    return jax.make_mesh(shape, names, axis_types=types)


def make(mesh=None, **options):
    return gear.make_replay(TABLE, gear.selectors.Prioritized(), mesh=mesh, partitions=8, **options)


def play(replay, rows=ROWS, lengths=LENGTHS):
    state, handles = replay.add(replay.init(), rows, lengths)
    state, sample = replay.sample(state, jax.random.key(0), 8)
    state = replay.update_priorities(state, sample.handles, sample.probability * 2)
    state, again = replay.sample(state, jax.random.PRNGKey(1), 8)
    return to_numpy((handles, sample, again))


MESHES = {
    "explicit": ((8,), ("replay",), (E,), {}),
    "automatic": ((8,), ("replay",), (A,), {}),
    "two": ((2, 4), ("data", "model"), (E, E), {"axis": ("data", "model"), "batch_axis": "model"}),
    "copies": ((2, 4), ("other", "replay"), (E, E), {}),
    "mixed": ((2, 4), ("other", "replay"), (A, E), {}),
    "pinned": ((8,), ("replay",), (E,), {"memory": "pinned_host"}),
}


@pytest.mark.parametrize("name", MESHES)
def test_axes_of_any_type(name):
    *of_mesh, options = MESHES[name]
    assert_same_bits(play(make(mesh(*of_mesh), **options)), play(make()))


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("replay"), PartitionSpec(None, None)], ids=str)
def test_arguments_lie_anywhere(spec):
    m = mesh(types=(E,))
    at = NamedSharding(m, spec)
    rows = jax.tree.map(lambda x: jax.device_put(x, at), ROWS)
    lengths = jax.device_put(LENGTHS, NamedSharding(m, PartitionSpec(*spec[:1])))
    assert_same_bits(play(make(m), rows, lengths), play(make()))


def test_a_step_of_explicit_axes_stays_in_place():
    replay = make(mesh(types=(E,)))
    state, _ = replay.add(replay.init(), ROWS, LENGTHS)

    def step(state, key):
        state, sample = replay.sample(state, key, 8)
        return replay.update_priorities(state, sample.handles, sample.probability * 2), sample

    gear.assert_in_place(step, state, jax.random.key(1))
