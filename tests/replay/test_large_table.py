"""A table of as many GiB as a machine's host memory takes: filled, evicted from and sampled, every byte compared.

XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=102 LARGE_TABLE_GIB=100 pytest -s tests/replay/test_large_table.py
"""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear

GIB = os.environ.get("LARGE_TABLE_GIB")
STEPS, SHAPE, ROWS = 100, (64, 64, 3), 256
pytestmark = pytest.mark.skipif(GIB is None, reason="takes LARGE_TABLE_GIB of host memory; set it to run this")


@jax.jit
def trajectory(number):
    """`uint8[K, T, *shape]` of trajectories number `uint32[K]`: the steps of each differ, and all its bytes."""
    cell = jax.lax.broadcasted_iota(jnp.uint32, (1, STEPS, *SHAPE), 1)
    for axis, stride in zip((2, 3, 4), (192, 3, 1), strict=True):
        cell = cell * np.uint32(12289) + jax.lax.broadcasted_iota(jnp.uint32, cell.shape, axis) * np.uint32(stride)
    mixed = (number[:, None, None, None, None] * np.uint32(0x9E3779B9) + cell) * np.uint32(0x85EBCA6B)
    return (mixed >> np.uint32(24)).astype(jnp.uint8)


def test_every_byte_of_a_table_that_fills_the_memory():
    capacity = int(float(GIB or 0) * 2**30) // (STEPS * int(np.prod(SHAPE))) // ROWS * ROWS
    table = gear.TableSpec({"image": gear.ColumnSpec(SHAPE, jnp.uint8)}, STEPS, capacity)
    replay = gear.make_replay(table, windows=gear.Window(0, 4), anchor="full")
    began = time.monotonic()
    state = jax.block_until_ready(replay.init())
    print(f"\n{capacity} trajectories, {gear.footprint(table)}: init {time.monotonic() - began:.1f} s")
    lengths = np.full(ROWS, STEPS, np.int32)
    began = time.monotonic()
    for first in range(0, capacity + ROWS, ROWS):  # the first ROWS are evicted in the end
        numbers = jnp.arange(first, first + ROWS, dtype=jnp.uint32)
        state, handles = replay.add(state, {"image": trajectory(numbers)}, lengths)
    jax.block_until_ready(state)
    print(f"filled in {time.monotonic() - began:.1f} s")
    stats = replay.stats(state)
    assert (stats["trajectories"], stats["evicted"]) == (capacity, ROWS)
    np.testing.assert_array_equal(handles.slot, np.arange(ROWS))
    furthest = 0
    for i in range(16):
        state, sample = replay.sample(state, jax.random.key(i), 1024)
        slot = sample.handles.slot
        number = jnp.where(slot < ROWS, slot + capacity, slot).astype(jnp.uint32)
        assert bool(check(number, sample.anchor, sample.data["image"])) and bool(sample.valid.all())
        furthest = max(furthest, int(slot.max()))
    assert furthest > 0.99 * capacity


@jax.jit
def check(number, anchor, got):
    def one(x):
        n, at, image = x
        return jnp.all(jax.lax.dynamic_slice_in_dim(trajectory(n[None])[0], at, 4) == image)

    return jnp.all(jax.lax.map(one, (number, anchor, got)))
