"""`ops.rdma_fetch` and `rdma_read` over verbs, against the reference; see test_verbs.py.

Imports jax, and compiles, which under emulation takes long: few programs, each used more than once.
"""

import functools
import json
import os
import secrets
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import ops, transport
from gear_jax.ops import _reference
from gear_jax.specs import Window
from gear_jax.testing import _peers
from gear_jax.testing.ops import assert_same_bits
from gear_jax.testing.processes import free_ports
from gear_jax.transport import Job, Session

# make test-rdma sets GEAR_JAX_RDMA=1: a missing device is then an error, not a skip.
if (why := transport.missing("verbs")) and os.environ.get("GEAR_JAX_RDMA") != "1":
    pytest.skip(why, allow_module_level=True)

P, S, T, ROWS = 2, 3, 4096, 33
LEAVES = [((P, S, T, 3), np.float32), ((P, S, T), np.uint8), ((P, S), np.uint32)]  # two columns and the stamp
SIZES = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in LEAVES]
DEADLINE = 10.0


def shard(rank):
    """What each process exposes: random bytes, among which odd stamps, of rows that are being written."""
    return [
        _peers.pattern(rank, i, size).view(d).reshape(s)
        for i, (size, (s, d)) in enumerate(zip(SIZES, LEAVES, strict=True))
    ]


class Pair:
    """This process, which has shard 0 in JAX's memory, and another, which has shard 1 and no jax."""

    def __init__(self):
        addresses = [("127.0.0.1", port) for port in free_ports(2)]
        secret = secrets.token_bytes(32)
        job = {
            "rank": 1, "addresses": addresses, "secret": secret.hex(), "transport": "verbs", "sizes": SIZES,
            "deadline": DEADLINE, "options": {}, "start_timeout": 120.0,
        }  # fmt: skip
        command = [sys.executable, "-m", "gear_jax.testing._peers"]
        self.other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.other.stdin.write(json.dumps(job) + "\n")
            self.other.stdin.flush()
            *columns, self.stamp = [jax.block_until_ready(jnp.array(x)) for x in shard(0)]
            self.columns = dict(zip("ab", columns, strict=True))
            regions = [(x.unsafe_buffer_pointer(), x.nbytes) for x in (*columns, self.stamp)]
            self.session = Session(
                Job(0, tuple(addresses), secret), regions, deadline=DEADLINE, start_timeout=120.0, number=0
            )
            assert self.session.transport == "verbs"
            self.remote = ops.Remote(self.session.number, (0, 1), (0, 0))
        except BaseException:
            if hasattr(self, "session"):
                self.session.close()
            self.kill()
            raise
        both = [np.stack(x) for x in zip(shard(0), shard(1), strict=True)]
        self.all, self.stamps = dict(zip("ab", both[:2], strict=True)), both[2]

    def kill(self):
        self.other.kill()
        self.other.wait()
        self.other.stdin.close()
        self.other.stdout.close()

    def close(self):
        self.session.close()
        self.kill()

    def rows(self, n, seed=0):
        """Rows of both shards and of none, some with another generation."""
        rng = np.random.default_rng(seed)
        shards, slots = rng.integers(-1, 3, n), rng.integers(-1, P * S + 1, n)
        generations = self.stamps.reshape(2, -1)[np.clip(shards, 0, 1), np.clip(slots, 0, P * S - 1)] // 2
        generations += (rng.integers(0, 4, n) == 0).astype(np.uint32)
        ids = (shards, slots, rng.integers(-3, T + 3, n), rng.integers(-1, T + 2, n))
        return [*(jnp.asarray(x, jnp.int32) for x in ids), jnp.asarray(generations)]

    def wanted(self, rows, window, lost=(False, False)):
        stamps, lost = jnp.asarray(self.stamps), jnp.asarray(lost)
        got = {name: reference(window)(jnp.asarray(c), stamps, lost, rows) for name, c in self.all.items()}
        return {n: x[0] for n, x in got.items()}, {n: x[1] for n, x in got.items()}, got["a"][2]

    def fetch(self, rows, window):
        return fetch(self.remote, window)(self.columns, self.stamp, rows)


@functools.cache
def fetch(remote, window):
    return jax.jit(lambda c, stamp, rows: ops.rdma_fetch(remote, c, stamp, *rows[:4], window, rows[4])[:3])


@functools.cache
def reference(window):
    width, pad, offset = (T, "around", 0) if window is None else (window.length, window.pad, window.offset)
    return jax.jit(lambda *args: _reference.fetch(*args, offset, width, pad, window is not None))


@pytest.fixture(scope="module")
def pair():
    made = Pair()
    yield made
    made.close()


@pytest.mark.parametrize("window", [None, Window(-19, 20, pad="head")], ids=["whole", "20"])
def test_fetch(pair, window):
    valid = []
    for seed in range(4):
        rows = pair.rows(ROWS, seed)
        got = pair.fetch(rows, window)
        assert_same_bits(got, pair.wanted(rows, window))
        valid += np.asarray(got[2])[np.asarray(rows[0]) == 1].tolist()
    assert any(valid) and not all(valid), "of the other process"


def test_two_halves(pair):
    rows, window = pair.rows(ROWS), Window(-19, 20, pad="head")

    def run(columns, stamp, rows):
        pending, _ = ops.rdma_fetch_start(pair.remote, columns, stamp, *rows[:4], window, rows[4], queue=3)
        data, mask, valid, ok = ops.rdma_fetch_done(pending)
        return data, mask, valid & ok

    assert_same_bits(jax.jit(run)(pair.columns, pair.stamp, rows), pair.wanted(rows, window))
    ops.release_queue(3)


def test_read(pair):
    fields = {"b": pair.columns["b"], "stamp": pair.stamp}
    remote = ops.Remote(pair.session.number, (0, 1), (1, 1))
    got, here, _ = jax.jit(lambda f: ops.rdma_read(remote, f))(fields)
    assert np.asarray(here).tolist() == [True, True]
    assert_same_bits(got, {"b": jnp.asarray(pair.all["b"]), "stamp": jnp.asarray(pair.stamps)})


def test_a_killed_process_costs_its_rows_and_a_bounded_time(pair):
    rows, window = pair.rows(ROWS, seed=5), Window(-19, 20, pad="head")
    assert_same_bits(pair.fetch(rows, window), pair.wanted(rows, window))
    pair.other.kill()
    start = time.monotonic()
    got = jax.block_until_ready(pair.fetch(rows, window))
    took = time.monotonic() - start
    end = time.monotonic() + 60
    while pair.session.alive[1]:
        assert time.monotonic() < end, "nobody noticed"
        time.sleep(0.05)
    assert took < DEADLINE + 5
    lost = pair.wanted(rows, window, (False, True))
    if np.asarray(got[2]).sum() != np.asarray(lost[2]).sum():  # it was read before its end was seen
        got = pair.fetch(rows, window)
    assert_same_bits(got, lost)
    assert ops.rdma_counters(pair.session.number)["lost_rows"] > 0
