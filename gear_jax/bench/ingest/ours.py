"""gear_jax's learner: drains a ring that actors fill at full rate, and samples. Prints a line of JSON.

    python -m gear_jax.bench.ingest.ours \\
        '{"actors": 8, "slots": 4, "nice": 10, "seconds": 2, "quick": false, "copy": false}'
"""

import json
import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np

import gear_jax as gear
from gear_jax.actors import ActorPool, Ingest
from gear_jax.bench.check import Batch, check_batch
from gear_jax.bench.engines.base import dispatch_at_once
from gear_jax.bench.ingest import actor, source
from gear_jax.bench.workloads import workloads

SAMPLE = 64
_START_SECONDS = 60


class Learner:
    """A table of S5 behind a ring."""

    def __init__(self, actors: int, slots: int, nice: int, quick: bool, copy: bool):
        self.workload = workloads(quick)["S5"]
        columns = {c.name: gear.ColumnSpec(c.shape, c.dtype) for c in self.workload.columns}
        table = gear.TableSpec(columns, self.workload.steps, self.workload.stored)
        self.replay = gear.make_replay(table)
        self.state = self.replay.init()
        self.ingest = Ingest(self.replay, actors=actors, slots=slots, copy=copy)
        self.pool = ActorPool(actor.write, self.ingest.ring, nice=nice)
        self.keys = iter(jax.random.split(jax.random.key(0), 100_000))
        self.last: Any = None

    def drain(self) -> int:
        """Adds what is there: half of a ring, if it comes within 5 ms."""
        half = self.ingest.ring.actors * self.ingest.ring.slots // 2
        self.state, n = self.ingest.drain(self.state, timeout=1.0, least=max(1, half), linger=0.005)
        return n

    def sample(self) -> float:
        """Seconds of a sample, into the last one's memory."""
        key = next(self.keys)
        begin = time.perf_counter()
        self.state, self.last = self.replay.sample(self.state, key, SAMPLE, out=self.last)
        jax.block_until_ready(self.last.data)
        return time.perf_counter() - begin

    def warm(self) -> None:
        """Until all actors write and the table is full; compiles every size of a drain."""
        until, inserted = time.monotonic() + _START_SECONDS, 0
        running = 0
        while inserted < self.workload.stored or running < self.ingest.ring.actors:
            inserted += self.drain()
            running = sum(a["committed"] > 0 for a in self.ingest.stats()["actors"])
            if time.monotonic() > until:
                raise TimeoutError(f"the actors do not start: {self.ingest.stats()}")
        for n in range(1, self.ingest.ring.actors * self.ingest.ring.slots + 1):
            self._wait(n)
            self.state, _ = self.ingest.drain(self.state, most=n)
        for _ in range(5):
            self.sample()

    def _wait(self, n: int) -> None:
        until = time.monotonic() + 0.5
        while self.ingest.pending < n and time.monotonic() < until:
            time.sleep(0.001)

    def check(self) -> None:
        """Every byte of a batch against NumPy."""
        data = {name: np.array(x) for name, x in self.last.data.items()}
        check_batch(self.workload, SAMPLE, Batch(data), self.ingest.ring.actors * source.EACH, spread=False)

    def throughput(self, seconds: float) -> float:
        """Bytes a second that reach the table."""
        begin, n = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            n += self.drain()
        return n * self.workload.steps * self.workload.step_bytes / (time.perf_counter() - begin)

    def full_drains(self, seconds: float) -> float:
        """Bytes a second of drains alone, each of a full ring, whose actors wait meanwhile."""
        full = self.ingest.ring.actors * self.ingest.ring.slots
        begin, spent, n = time.perf_counter(), 0.0, 0
        while not n or time.perf_counter() - begin < seconds:
            self._wait(full)
            start = time.perf_counter()
            n += self.drain()
            spent += time.perf_counter() - start
        return n * self.workload.steps * self.workload.step_bytes / spent

    def latencies(self, seconds: float, busy: bool) -> list[float]:
        """Seconds of samples, with a drain before each (`busy`) or with the actors stopped."""
        if not busy:
            self._signal(signal.SIGSTOP)
            self.state, _ = self.ingest.drain(self.state)
        times, begin = [], time.perf_counter()
        while time.perf_counter() - begin < seconds:
            if busy:
                self.drain()
            times.append(self.sample())
        if not busy:
            self._signal(signal.SIGCONT)
        return times

    def _signal(self, number: int) -> None:
        for pid in self.pool.pids:
            os.kill(pid, number)

    def close(self) -> None:
        """Ends the actors."""
        self.ingest.close()
        self.pool.close()


def main() -> int:
    """Runs what the arguments, JSON, say."""
    args = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the ring goes with this process
    dispatch_at_once()
    learner = Learner(args["actors"], args["slots"], args["nice"], args["quick"], args["copy"])
    try:
        learner.warm()
        learner.check()
        rate, full = learner.throughput(args["seconds"]), learner.full_drains(args["seconds"])
        idle, busy = [], []
        for _ in range(4):  # in turns, as the machine changes
            idle += learner.latencies(args["seconds"] / 4, busy=False)
            busy += learner.latencies(args["seconds"] / 4, busy=True)
        learner.check()
        learner.pool.check()
    finally:
        learner.close()
    points = {f"p{p}": [float(np.percentile(x, p)) for x in (idle, busy)] for p in (50, 99)}
    print(json.dumps({"rate": rate, "full": full, "samples": [len(idle), len(busy)], **points}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
