"""What the tests' actors do. Their processes import this module, and no jax."""

import os
import sys
import time

import numpy as np


def count(writer, n, pause=0.0):
    """Commits n trajectories of `step` 0, 1, ... as version."""
    assert "jax" not in sys.modules
    for i in range(n):
        writer.append({"x": i, "actor": writer.actor})
        writer.commit(version=i)
        time.sleep(pause)


def fail(writer, path):
    """Fails the first two times."""
    with open(path, "a") as file:
        file.write("x")
    if os.path.getsize(path) < 3:
        raise ValueError("no such luck")
    count(writer, 1)


def sleep(writer):
    """Waits to be ended."""
    writer.append({"x": 1, "actor": writer.actor})
    time.sleep(60)


def ask(writer, n, rows):
    """Asks n times about `rows` rows (0: one without a leading dimension), and commits the answers."""
    for i in range(n):
        shape = (rows, 2) if rows else (2,)
        observation = np.full(shape, 10 * writer.actor + i, np.float32)
        answer = writer.act({"seen": observation}, timeout=30)
        assert answer["act"].shape == shape[:-1], answer
        np.testing.assert_array_equal(answer["act"], observation[..., 0] * 2)
        writer.append({"x": int(answer["act"].sum()), "actor": writer.actor})
        writer.commit(version=i)
