"""Fetches of another process's rows beside a matmul, and behind a process that does not answer."""

import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import ops
from gear_jax.bench.gpu.bench import Bench
from gear_jax.bench.gpu.findings import CALL, Findings, Wrong
from gear_jax.bench.transport import WAYS
from gear_jax.ops import _place
from gear_jax.testing._peers import Peers, pattern
from gear_jax.transport import missing

_BOUND = 1.1
_SETS = 8
_DEADLINE = 5.0  # seconds, that a process which does not answer costs: more than what is timed behind it
_WAITS = 3


def _median(call: Callable[[], Any], rounds: int) -> float:
    """Seconds of a call and the wait for it."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _mean(call: Callable[[], Any], rounds: int) -> float:
    """The same over all rounds, so that none of them may be slow."""
    start = time.perf_counter()
    for _ in range(rounds):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / rounds


class _Work:
    """A fetch of B rows of the other process, a matmul repeated until it takes as long, and both."""

    def __init__(self, bench: Bench):
        slots, row, self.batch, width = bench.sizes.remote
        self.rounds = 4 * bench.sizes.rounds
        memory = _place.memory_kind(None)
        self.own = [ops.zeros((1, slots, 1, row), jnp.uint8, memory), ops.zeros((1, slots), jnp.uint32, memory)]
        jax.block_until_ready(self.own)
        self.sizes = [x.nbytes for x in self.own]
        self.remote = ops.Remote(0, (0, 1), (0, 0))
        rng = np.random.default_rng(0)
        one, zero = jnp.ones((self.batch,), jnp.int32), jnp.zeros((self.batch,), jnp.int32)
        draws = rng.integers(0, slots, (_SETS, self.batch), np.int32)
        self.rows = [(one, jnp.asarray(draw), zero, one) for draw in draws]
        self.row, self.calls = row, 0
        self.x = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16) / jnp.bfloat16(width**0.5)
        self.scale, self.times = jnp.ones((), jnp.bfloat16), 8
        self.starts = jax.jit(self._start)
        self.fetches = jax.jit(lambda *own_and_rows: self.done(self._start(*own_and_rows)))
        self.multiplies = jax.jit(self._multiply, static_argnums=2)
        self.both = jax.jit(self._both, static_argnums=4)

    def next(self) -> tuple[jax.Array, ...]:
        """The rows of the next fetch."""
        self.calls += 1
        return self.rows[self.calls % _SETS]

    def peers(self, environment: dict[str, str]) -> Peers:
        """The two processes; all rows of the other one are whole."""
        regions = [(x.unsafe_buffer_pointer(), x.nbytes) for x in self.own]
        peers = Peers("ucx", self.sizes, environment=environment, deadline=_DEADLINE, memory=regions)
        peers.ask(1, do="fill", region=1, value=0)
        return peers

    def _start(self, columns, stamp, rows):
        return ops.rdma_fetch_start(self.remote, columns, stamp, *rows)[0]

    def done(self, pending, after=()):
        data, _, valid, ok = ops.rdma_fetch_done(pending, after=after)
        return data, valid & ok

    def _multiply(self, x, scale, times):
        x = x * scale
        return jax.lax.fori_loop(0, times, lambda _, y: x @ y, x)

    def _both(self, columns, stamp, rows, x, times):
        pending = self._start(columns, stamp, rows)
        # The matmul begins when the fetch has, and the fetch ends when the matmul has.
        product = self._multiply(x, 1 + jnp.minimum(pending.handle[0], 0).astype(x.dtype), times)
        return self.done(pending, after=product), product

    def fetch(self):
        return self.fetches(*self.own, self.next())

    def matmuls(self):
        return self.multiplies(self.x, self.scale, self.times)

    def together(self):
        return self.both(*self.own, self.next(), self.x, self.times)

    def check(self) -> None:
        """Compares a batch with what the other process has. Raises Wrong."""
        rows = self.next()
        data, valid = self.fetches(*self.own, rows)
        whole = pattern(1, 0, self.sizes[0]).reshape(-1, self.row)
        if not np.asarray(valid).all() or not np.array_equal(np.asarray(data)[:, 0], whole[np.asarray(rows[1])]):
            raise Wrong("a fetched row is not what the other process has")

    def as_long(self, seconds: float) -> None:
        """Repeats the matmul until it takes as long as a fetch."""
        self.times = 8
        jax.block_until_ready(self.matmuls())
        once = _median(self.matmuls, self.rounds) / self.times
        self.times = max(1, round(seconds / once))


def remote(bench: Bench, found: Findings) -> None:
    """A fetch of another process's rows, by UCX, beside a matmul; and a matmul behind a fetch that waits."""
    why = missing("ucx")
    if why:
        found.note(f"Not measured: {why}")
        return
    work = _Work(bench)
    size = f"{work.batch} x {work.row} B"
    for way, environment in WAYS.items():
        bench.check_time()
        with work.peers(environment) as peers:
            work.check()
            for _ in range(_SETS):
                jax.block_until_ready(work.fetch())
            work.as_long(_median(work.fetch, work.rounds))
            calls = {"fetch": work.fetch, "matmul": work.matmuls, "both": work.together}
            for call in calls.values():
                jax.block_until_ready(call())
            times = {name: [] for name in calls}
            for _ in range(work.rounds):  # in turns
                for name, call in calls.items():
                    times[name].append(_median(call, 1))
            spent = {name: statistics.median(values) for name, values in times.items()}
            work.check()
            found.rate(f"{way}: fetch of {size}", work.batch * work.row, spent["fetch"], CALL, "h2d")
            found.figure(f"{way}: matmuls as long", spent["matmul"] * 1e3, "ms", CALL)
            found.figure(f"{way}: both", spent["both"] * 1e3, "ms", CALL)
            longer = max(spent["fetch"], spent["matmul"])
            shown = f"{spent['both'] * 1e3:.2f} ms of {spent['fetch'] * 1e3:.2f} and {spent['matmul'] * 1e3:.2f}"
            found.at_most(
                f"a fetch beside a matmul, {way}", _BOUND, "x the longer of the two", spent["both"] / longer, shown,
                counts=bench.on_gpu,
            )  # fmt: skip
            if way == "TCP":
                _behind(bench, found, work, peers)


def _behind(bench: Bench, found: Findings, work: _Work, peers: Peers) -> None:
    """Matmuls that are dispatched behind the start of a fetch which waits for a process that is stopped."""
    dispatch, alone, behind = [], [], []
    for _ in range(1 if bench.sizes.name == "tiny" else _WAITS):
        peers.wait_until(1, True)
        _mean(work.matmuls, work.rounds)  # the clock of an idle GPU is slow
        alone.append(_mean(work.matmuls, work.rounds))
        peers.signal(1, signal.SIGSTOP)
        start = time.perf_counter()
        pending = work.starts(*work.own, work.next())
        dispatch.append(time.perf_counter() - start)
        behind.append(_mean(work.matmuls, work.rounds))
        if not peers.session.alive[1]:
            raise Wrong("the matmuls ended after the process that does not answer was given up")
        if np.asarray(work.done(pending)[1]).any():
            raise Wrong("a row of a process that is stopped is valid")
        peers.signal(1, signal.SIGCONT)
    sent, without, with_it = map(statistics.median, (dispatch, alone, behind))
    found.figure("a fetch from a stopped process: until the call returns", sent * 1e3, "ms", CALL)
    found.figure("matmuls dispatched behind it", with_it * 1e3, "ms", CALL)
    found.at_most(
        "matmuls behind a fetch that waits", _BOUND, "x the same alone", with_it / without,
        f"{with_it * 1e3:.2f} ms, alone {without * 1e3:.2f}", counts=bench.on_gpu,
    )  # fmt: skip
