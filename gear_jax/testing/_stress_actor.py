"""The actors of `gear_jax.testing.actors`. No jax in here.

Shapes: N actors, M the most trajectories of each, T steps.
"""

import time
import zlib

import numpy as np

from gear_jax.actors import Writer

STEPS, NOISE = 8, 48
TRIED, COMMITTED = 1, 2


def ledger(path: str, actors: int, most: int, mode: str) -> np.memmap:
    """What actors say that they did, `uint8[N, M]` in a file: 0, `TRIED` or `COMMITTED`. It outlives them."""
    return np.memmap(path, np.uint8, mode, shape=(actors, most))  # type: ignore[call-overload]


def _noise() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, (257, STEPS, NOISE)).astype(np.uint8)


def checksum(sequence: int, code: np.ndarray, noise: np.ndarray) -> int:
    """Of a trajectory's bytes and its place; contiguous `code` int64[L], `noise` uint8[L, NOISE]."""
    return zlib.crc32(noise.data, zlib.crc32(code.data, sequence & 0xFFFFFFFF))


def play(writer: Writer, path: str, most: int, stop: str) -> None:
    """Commits trajectories until there is a byte in the file `stop`.

    Trajectory k of an actor, over all its processes, has version k, 1 + k % T steps, and a checksum. Before its commit
    the ledger says `TRIED`, after it `COMMITTED`.
    """
    mine = ledger(path, writer.ring.actors, most, "r+")[writer.actor]
    stopped = np.memmap(stop, np.uint8, "r")
    table, steps = _noise(), np.arange(STEPS)
    k = int(np.count_nonzero(mine))
    while not stopped[0] and k < most:
        length = 1 + k % STEPS
        if k % 16 == 0:
            for t in range(length):
                writer.append({"code": np.int64(k * STEPS + t), "noise": table[k % 257, t]})
            views = writer.begin()
        else:
            views = writer.begin()
            views["code"][:length] = steps[:length] + k * STEPS
            views["noise"][:length] = table[k % 257, :length]
        code, noise = views["code"][:length].astype(np.int64), views["noise"][:length]
        mine[k] = TRIED
        writer.commit(length, version=k, checksum=checksum(k, code, noise))
        mine[k] = COMMITTED
        k += 1
    if k == most:
        time.sleep(0.01)
