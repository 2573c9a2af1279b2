"""A stress test of the ring: actors that are killed and stopped at random while the learner drains it.

`python -m gear_jax.testing.actors --trajectories 1000000` is the long form; the tests run a short one.
"""

import argparse
import dataclasses
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import ops
from gear_jax.actors import ActorPool, Drained, Ingest
from gear_jax.actors._clean import rings
from gear_jax.replay import Replay, ReplayState, make_replay
from gear_jax.specs import ColumnSpec, TableSpec
from gear_jax.testing import _stress_actor as actor

_CHECK_TABLE = 64  # every so many drains, what the table has is compared with what the ring had
_IDLE_SECONDS = 60.0


@dataclasses.dataclass
class Report:
    """What happened.

    Attributes:
      trajectories: that arrived. steps: of them. drains: calls that added any.
      killed, stopped: times that an actor was.
      lost: trajectories that an actor had tried to commit when it was killed, and that did not arrive: at most one a
        kill.
      compared: trajectories whose bytes in the table were compared with those in the ring.
      seconds: the whole run.
    """

    trajectories: int = 0
    steps: int = 0
    drains: int = 0
    killed: int = 0
    stopped: int = 0
    lost: int = 0
    compared: int = 0
    seconds: float = 0.0


class Wrong(AssertionError):
    """A trajectory was lost, came twice, out of order or torn; or something was left behind."""


class _Learner:
    """Drains a ring and checks what comes."""

    def __init__(self, replay: Replay, ingest: Ingest, most: int, seed: int):
        self.replay, self.ingest, self.report = replay, ingest, Report()
        actors = ingest.ring.actors
        self.arrived = np.zeros((actors, most), np.uint8)
        self.last, self.number = np.full(actors, -1), 0
        self.columns = dict(zip(ingest.ring.names, ingest.ring.columns, strict=True))
        self.kept: Any = None
        self.rows = jax.jit(lambda columns, slot: ops.gather(columns, slot, slot * 0, slot * 0 + actor.STEPS)[0])
        self.random = random.Random(seed)

    def drain(self, state: ReplayState, timeout: float) -> tuple[ReplayState, int]:
        """Drains once; raises `Wrong`."""
        state, n = self.ingest.drain(state, timeout=timeout, admit=self.check)
        if n and self.kept is not None:
            self._compare(state)
        return state, n

    def check(self, found: Drained) -> np.ndarray:
        """Checks order, numbers and bytes of what is in the ring."""
        n = len(found.number)
        if found.number[0] != self.number + 1 or (np.diff(found.number) != 1).any():
            raise Wrong(f"commits {found.number} came after {self.number}")
        self.number = int(found.number[-1])
        slots, lengths = found.slot.tolist(), found.length.tolist()
        for i in range(n):
            lane, k, slot, length = int(found.actor[i]), int(found.version[i]), slots[i], lengths[i]
            if k <= self.last[lane] or length != 1 + k % actor.STEPS:
                raise Wrong(f"actor {lane}: trajectory {k} of {length} steps came after {self.last[lane]}")
            self.last[lane] = k
            code = self.columns["code"][slot, :length].astype(np.int64)
            if actor.checksum(k, code, self.columns["noise"][slot, :length]) != found.checksum[i]:
                raise Wrong(f"actor {lane}: trajectory {k} has other bytes than it was committed with")
            self.arrived[lane, k] += 1
        self.report.trajectories += n
        self.report.steps += sum(lengths)
        self.kept = None
        if self.report.drains % _CHECK_TABLE == 0:
            self.kept = {name: column[found.slot] for name, column in self.columns.items()}
        self.report.drains += 1
        return np.ones(n, bool)

    def _compare(self, state: ReplayState) -> None:
        last = self.ingest.last
        assert last is not None and last.handles is not None
        n = len(last.slot)
        slot = np.zeros(self.arrived.shape[0] * self.ingest.ring.slots, np.int32)  # one shape, one program
        slot[:n] = last.handles.slot
        got = jax.tree.map(np.asarray, self.rows(state.columns, jnp.asarray(slot)))
        for i, length in enumerate(last.length.tolist()):
            for name in self.kept:
                if not np.array_equal(got[name][i, :length], self.kept[name][i, :length]):
                    raise Wrong(f"trajectory {last.version[i]} of actor {last.actor[i]}: other bytes in the table")
        self.report.compared += n

    def finish(self, said: np.ndarray) -> None:
        """Compares what arrived with what the actors said that they committed."""
        twice, missing = self.arrived > 1, (said == actor.COMMITTED) & (self.arrived == 0)
        unsaid = (said == 0) & (self.arrived > 0)
        for what, where in (("came twice", twice), ("was lost", missing), ("was never tried", unsaid)):
            if where.any():
                raise Wrong(f"(actor, trajectory) {np.argwhere(where)[0]} {what}")
        self.report.lost = int(((said == actor.TRIED) & (self.arrived == 0)).sum())
        if self.report.lost > self.report.killed:
            raise Wrong(f"{self.report.lost} trajectories lost by {self.report.killed} kills")


def _disturb(pool: ActorPool, report: Report, rng: random.Random, stopped: dict[int, float]) -> None:
    """Kills an actor, or stops it for a while; wakes those that were stopped."""
    now = time.monotonic()
    for pid in [p for p, until in stopped.items() if until < now]:
        stopped.pop(pid)
        _signal(pid, signal.SIGCONT)
    pid = rng.choice(pool.pids)
    if rng.random() < 0.5:
        report.killed += _signal(pid, signal.SIGKILL)  # of a stopped one too
    elif pid not in stopped:
        report.stopped += _signal(pid, signal.SIGSTOP)
        stopped[pid] = now + rng.uniform(0.0, 0.5)


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def stress(trajectories: int, actors: int = 4, slots: int = 4, seed: int = 0, every: float = 0.3) -> Report:
    """Runs the stress test.

    Args:
      trajectories: how many are to arrive.
      actors, slots: of the ring.
      seed: of what is killed and stopped.
      every: seconds between these, about.

    Raises:
      Wrong: if a committed trajectory does not arrive exactly once, in its actor's order, with its bytes; if anything
        arrives that was not committed; if a segment or a process is left.
    """
    begin = time.monotonic()
    most = 2 * trajectories + 1000
    columns = {"code": ColumnSpec((), jnp.int32), "noise": ColumnSpec((actor.NOISE,), jnp.uint8)}
    replay = make_replay(TableSpec(columns, trajectory_length=actor.STEPS, capacity=4 * actors * slots))
    with tempfile.TemporaryDirectory() as directory, Ingest(replay, actors=actors, slots=slots) as ingest:
        book, stop = os.path.join(directory, "ledger"), os.path.join(directory, "stop")
        said = actor.ledger(book, actors, most, "w+")
        pathlib.Path(stop).write_bytes(b"\0")
        learner = _Learner(replay, ingest, most, seed)
        with ActorPool(actor.play, ingest.ring, args=(book, most, stop), restart=True) as pool:
            state = _run(learner, pool, replay.init(), trajectories, every)
            pathlib.Path(stop).write_bytes(b"\1")
            state = _rest(learner, pool, state)
        path, pids = ingest.ring.path, pool.pids
        learner.finish(said)
    if any(str(r.path) == path for r in rings()):
        raise Wrong(f"{path} is left")
    if left := [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]:
        raise Wrong(f"processes {left} are left")
    learner.report.seconds = time.monotonic() - begin
    return learner.report


def _run(learner: _Learner, pool: ActorPool, state: ReplayState, trajectories: int, every: float) -> ReplayState:
    stopped: dict[int, float] = {}
    heard = time.monotonic()
    next_time = heard + 2 * every
    while learner.report.trajectories < trajectories:
        state, n = learner.drain(state, timeout=0.05)
        now = time.monotonic()
        heard = now if n else heard
        if now - heard > _IDLE_SECONDS:
            raise Wrong(f"nothing came in {_IDLE_SECONDS} s: {learner.ingest.stats()}")
        if now > next_time:
            _disturb(pool, learner.report, learner.random, stopped)
            next_time = now + learner.random.uniform(0.5, 1.5) * every
    for pid in stopped:
        _signal(pid, signal.SIGCONT)
    return state


def _rest(learner: _Learner, pool: ActorPool, state: ReplayState) -> ReplayState:
    """Drains what the actors commit before they hear that they are to stop."""
    until = time.monotonic() + _IDLE_SECONDS
    while True:
        ended = pool.wait(0)
        state, n = learner.drain(state, timeout=0.05)
        if ended and not n:
            return state
        if time.monotonic() > until:
            raise Wrong(f"the actors do not end: {learner.ingest.stats()}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m gear_jax.testing.actors", description=__doc__)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--slots", type=int, default=4, help="of each actor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=0.3, help="seconds between kills and stops, about")
    args = parser.parse_args()
    report = stress(args.trajectories, args.actors, args.slots, args.seed, args.every)
    print(report)
    print(f"{report.trajectories / report.seconds:,.0f} trajectories a second; all arrived once, in order, whole")
    return 0


if __name__ == "__main__":
    sys.exit(main())
