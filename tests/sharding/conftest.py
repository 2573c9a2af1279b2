"""One table over every number of devices: the same calls, and what they gave."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.testing.ops import to_numpy

STEPS, CAPACITY, ROWS, BATCH, TURNS = 5, 64, 16, 24, 4
TABLE = gear.TableSpec(
    {"number": gear.ColumnSpec((), jnp.int32), "vector": gear.ColumnSpec((3,), jnp.float32)}, STEPS, CAPACITY
)
WINDOWS = {"number": gear.Window(-2, 3), "vector": gear.Window(0, 2, pad="head", pad_value=7)}


def make(mesh=None, axis="replay", **options):
    """A replay of P = 8 partitions; the same one for the same arguments."""
    return _make(mesh, axis, tuple(sorted(options.items())))


@functools.cache
def _make(mesh, axis, options):
    options = {"selector": gear.selectors.Prioritized(), "partitions": 8, **dict(options)}
    return gear.make_replay(TABLE, windows=WINDOWS, mesh=mesh, axis=axis, **options)


def mesh(n, names=("replay",), shape=None):
    """A mesh of the first n devices; skips where there are fewer."""
    if jax.device_count() < n:
        pytest.skip(f"needs {n} devices, got {jax.device_count()}")
    shape = (n,) if shape is None else shape
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape), devices=jax.devices()[:n])


def turns():
    """What is added, and with which priorities, in each turn."""
    rng = np.random.default_rng(5)
    for i in range(TURNS):
        rows = {
            "number": rng.integers(1, 99, (ROWS, STEPS)).astype(np.int32),
            "vector": rng.normal(size=(ROWS, STEPS, 3)).astype(np.float32),
        }
        lengths = rng.integers(0, STEPS + 1, ROWS).astype(np.int32)
        priorities = rng.uniform(0, 3, ROWS).astype(np.float32) if i % 2 else None
        yield i, rows, lengths, priorities


def play(replay, state=None):
    """Adds, samples and updates in turn. Returns what came back, and the last state but for its ticket, in NumPy."""
    state = replay.init() if state is None else state
    got = []
    for i, rows, lengths, priorities in turns():
        state, handles = replay.add(state, rows, lengths, priorities)
        state, sample = replay.sample(state, jax.random.key(i), BATCH)
        state = replay.update_priorities(state, sample.handles, sample.probability * 3)
        got.append(to_numpy((handles, sample)))
    return got, state


@functools.cache
def _on_one_device(selector, options):
    replay = make(selector=selector, **dict(options))
    got, state = play(replay)
    return got, to_numpy(state.replace(ticket=None)), replay.stats(state)


def on_one_device(selector, **options):
    """The same without a mesh: (what came back, the last state, its statistics)."""
    return _on_one_device(selector, tuple(sorted(options.items())))


@pytest.fixture(scope="session")
def case():
    """The functions and constants above."""
    return types.SimpleNamespace(
        make=make, mesh=mesh, play=play, turns=turns, on_one_device=on_one_device, table=TABLE, windows=WINDOWS,
        batch=BATCH, rows=ROWS, steps=STEPS, capacity=CAPACITY,
    )  # fmt: skip


@pytest.fixture(scope="session")
def same():
    """Asserts that two trees hold the same values."""

    def check(got, wanted):
        for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(*to_numpy((g, w)), err_msg=jax.tree_util.keystr(path))

    return check
