"""The ops on thread pools of other sizes: a pool of one thread must not wait for itself, and no result may change."""

import hashlib
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cpu

SCRIPT = """
import hashlib
import jax, jax.numpy as jnp, numpy as np
from gear_jax import ops
from gear_jax.specs import Window

rng = np.random.default_rng(0)
column = jnp.asarray(rng.integers(0, 256, (8, 64, 50, 96), np.uint8))
slots = jnp.asarray(rng.integers(0, 512, 2000), jnp.int32)
mass = jnp.asarray(rng.uniform(size=(8, 64)), jnp.float32)
bits = jnp.asarray(rng.integers(0, 2**32, (20000, 2), np.uint32))

@jax.jit
def run(column, mass):
    zero = ops.zeros((8, 64), jnp.float32), ops.zeros((8, 64), jnp.float32), ops.zeros((8, 32), jnp.float32)
    tree = ops.sumtree_update(*zero, jnp.arange(512, dtype=jnp.int32), mass.reshape(-1), mass.reshape(-1))
    fields = jnp.arange(512, dtype=jnp.int32).reshape(8, 64), jnp.arange(512, dtype=jnp.uint32).reshape(8, 64)
    drawn = ops.sumtree_sample(tree[1], tree[2], *fields, bits)
    data, mask, ticket = ops.gather(column, slots, slots % 60, slots % 51, Window(-20, 40, "head", 3))
    column = ops.scatter(column, jnp.arange(512, dtype=jnp.int32), column.reshape(512, 50, 96)[::-1], ticket=ticket)
    return tree, drawn, data, mask, column, ops.zeros((33 << 20,), jnp.uint8)[::4096]

digest = hashlib.sha256()
for x in jax.tree.leaves(run(column, mass)):
    digest.update(np.asarray(x).tobytes())
print(digest.hexdigest())
"""


def _run(threads: int) -> str:
    env = dict(os.environ, NPROC=str(threads), XLA_FLAGS="", JAX_PLATFORMS="cpu")
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    command = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {cpus})\n{SCRIPT}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def one_thread():
    return _run(1)


def test_a_pool_of_one_thread_ends(one_thread):
    assert len(one_thread) == hashlib.sha256().digest_size * 2


@pytest.mark.parametrize("threads", [2, 7])
def test_the_number_of_threads_does_not_show(one_thread, threads):
    assert _run(threads) == one_thread
