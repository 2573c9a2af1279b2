"""What rows share: sizes, tables, the clock, and programs that gather."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gear_jax as gear
from gear_jax import ops
from gear_jax.bench.gpu import clock, tables
from gear_jax.bench.gpu.findings import Missing
from gear_jax.bench.gpu.memcpy import Copies
from gear_jax.bench.gpu.sizes import Sizes

_KERNEL_BYTES = 1 << 29  # what the longer of two programs moves more, about
_SETS = 8  # index sets that calls take in turn, so that no cache holds the rows of the last call
_MOST = 32


class OutOfTime(Exception):
    """The run's limit has passed."""


class Bench:
    """One run.

    Args:
      sizes: how large everything is.
      say: shows progress.
    """

    def __init__(self, sizes: Sizes, say: Callable[[str], None]):
        self.sizes, self.say = sizes, say
        self.on_gpu = jax.default_backend() == "gpu"
        self.begun = time.monotonic()
        self.no_copies: str | None = None if self.on_gpu else "cudaMemcpy: not on this backend"
        self._copies: Copies | None = None
        self._tables: dict[str, dict[str, jax.Array]] = {}
        s = sizes
        self.layouts = {
            "main": tables.main_layout(*s.main, s.cell_bytes),
            "small": tables.main_layout(*s.small, 256),
            "windows": tables.window_layout(*s.windows),
        }

    def copies(self) -> dict[str, float]:
        """`cudaMemcpy` now, in GB/s; {} where it cannot be measured (`no_copies` says why)."""
        if self.no_copies is None and self._copies is None:
            try:
                self._copies = Copies(self.sizes.copy_bytes, self.sizes.copies, self.sizes.rounds)
            except Missing as reason:
                self.no_copies = str(reason)
        return self._copies.measure() if self._copies else {}

    def spent(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.begun

    def check_time(self) -> None:
        """Raises OutOfTime where the limit has passed."""
        if self.spent() > self.sizes.limit:
            raise OutOfTime(f"stopped after {self.spent():.0f} s; the limit is {self.sizes.limit:.0f} s (--limit)")

    def table(self, name: str) -> dict[str, jax.Array]:
        """A table of `layouts` in page-locked memory, made when it is first asked for."""
        if name not in self._tables:
            self.check_time()
            begin = time.monotonic()
            self._tables[name] = tables.make(self.layouts[name], "pinned_host")
            size = self.layouts[name].size / 1e9
            self.say(f"  table {name!r}: {size:.2f} GB page-locked and filled in {time.monotonic() - begin:.1f} s")
        return self._tables[name]

    def take(self, name: str) -> dict[str, jax.Array]:
        """A table that the caller will change: whoever asks for it next gets a new one."""
        columns = self.table(name)
        del self._tables[name]
        return columns

    def drop(self, names: set[str]) -> None:
        """Frees tables."""
        for name in names:
            self._tables.pop(name, None)

    def in_flight(self, call: Callable[[int], Any], wait: Callable[[Any], Any] = jax.block_until_ready) -> float:
        """`clock.in_flight` at this run's sizes."""
        return clock.in_flight(call, wait, self.sizes.rounds, self.sizes.seconds)

    def each(self, call: Callable[[int], Any], calls: int) -> tuple[list[float], list[float]]:
        """`clock.each` of calls of JAX."""
        return clock.each(call, jax.block_until_ready, calls)

    def between(self, short: Callable[[], Any], long: Callable[[], Any], more: int) -> float:
        """`clock.between` at this run's sizes."""
        return clock.between(short, long, more, self.sizes.rounds, self.sizes.seconds)


class Reads:
    """One gather, in its forms: checked, called from Python, many in one program.

    Args:
      bench: the run.
      layout: the table's.
      columns: the table's columns, or some of them.
      batch: B.
      windows: name -> (offset, length), or None for whole trajectories. Windows lie inside the trajectories: without
        padding, every byte of a batch is read.
      order: as in `ops.gather`.
      seed: of the rows' places.
    """

    def __init__(
        self,
        bench: Bench,
        layout: tables.Layout,
        columns: Mapping[str, jax.Array],
        batch: int,
        windows: Mapping[str, tuple[int, int]] | None = None,
        order: bool | None = None,
        seed: int = 0,
    ):
        self.bench, self.layout, self.columns, self.batch = bench, layout, dict(columns), batch
        self.spans = {name: (0, layout.steps) if windows is None else windows[name] for name in columns}
        self.windows = None
        if windows is not None:
            self.windows = {n: gear.Window(offset=o, length=w) for n, (o, w) in self.spans.items()}
        self.order = order
        self.size = batch * sum(w * layout.step_bytes((n,)) for n, (_, w) in self.spans.items())
        self.lengths = jnp.full((batch,), layout.steps, jnp.int32)
        rng = np.random.default_rng(seed)
        self.index = [self._draw(rng, windows is None) for _ in range(_SETS)]
        self.gather = jax.jit(functools.partial(ops.gather, windows=self.windows, order=order))

    def _draw(self, rng: np.random.Generator, whole: bool) -> tuple[jax.Array, jax.Array]:
        low = max(0, *(-o for o, _ in self.spans.values()))
        high = self.layout.steps - max(o + w for o, w in self.spans.values())
        slots = rng.integers(0, self.layout.slots, self.batch, np.int32)
        starts = np.zeros(self.batch, np.int32) if whole else rng.integers(low, high + 1, self.batch, np.int32)
        return jnp.asarray(slots), jnp.asarray(starts)

    def call(self, i: int) -> Any:
        """The i-th call from Python: (data, mask, ticket)."""
        return self.gather(self.columns, *self.index[i % _SETS], self.lengths)

    def check(self) -> None:
        """Compares a batch with NumPy. Raises Wrong."""
        data, mask, _ = self.call(1)
        tables.check(self.layout, data, *self.index[1], self.spans, mask)

    def in_flight(self) -> float:
        """Seconds of a call, one call behind the other."""
        return self.bench.in_flight(self.call)

    def single(self, calls: int = 20) -> float:
        """Seconds of a call and the wait for it, the median."""
        return clock.percentile(self.bench.each(self.call, calls)[1], 50)

    def kernel(self) -> float:
        """Seconds on the device."""
        more = max(1, min(_MOST, _KERNEL_BYTES // self.size))
        ticket = ops.new_ticket()

        def chain(number: int):
            def run(columns, index, lengths, ticket):
                for slots, starts in index:
                    ticket = ops.gather(columns, slots, starts, lengths, self.windows, ticket=ticket, order=self.order)[
                        2
                    ]
                return ticket

            program = jax.jit(run)
            index = [self.index[i % _SETS] for i in range(number)]
            return lambda: jax.block_until_ready(program(self.columns, index, self.lengths, ticket))

        return self.bench.between(chain(1), chain(1 + more), more)

    def scan(self, number: int) -> float:
        """Seconds of one gather in a scan of `number`."""
        slots, starts = (jnp.stack([self.index[i % _SETS][k] for i in range(number)]) for k in range(2))

        @jax.jit
        def run(columns, slots, starts, lengths, ticket):
            def step(ticket, at):
                slots, starts = at
                return ops.gather(columns, slots, starts, lengths, self.windows, ticket=ticket, order=self.order)[
                    2
                ], None

            return jax.lax.scan(step, ticket, (slots, starts))[0]

        ticket = ops.new_ticket()
        return self.bench.in_flight(lambda _: run(self.columns, slots, starts, self.lengths, ticket)) / number
