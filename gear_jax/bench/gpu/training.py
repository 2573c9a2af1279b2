"""A train step beside the sampling of its next batch."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gear_jax.bench.gpu import tables
from gear_jax.bench.gpu.bench import Bench
from gear_jax.bench.gpu.calling import check_sample
from gear_jax.bench.gpu.findings import IN_FLIGHT, Findings
from gear_jax.bench.gpu.sequences import fill, make_replay

_BOUND = 1.02
_RATE = 1e-3
_KEYS = 32

Params = list[jax.Array]


def _train(params: Params, data: jax.Array) -> Params:
    """One step of gradient descent of an autoencoder in bfloat16 on `uint8[B, 1, width]`."""
    x = data[:, 0].astype(jnp.bfloat16) / jnp.bfloat16(255)

    def loss(params: Params) -> jax.Array:
        h = x
        for w in params:
            h = jax.nn.relu(h @ w)
        return jnp.mean(jnp.square((h - x).astype(jnp.float32)))

    return [w - jnp.bfloat16(_RATE) * g for w, g in zip(params, jax.grad(loss)(params), strict=True)]


class _Loop:
    """The same training with its batch got in different ways; each way is a function of the step's number."""

    def __init__(self, bench: Bench):
        slots, width, layers, self.batch, _ = bench.sizes.train
        self.layout = tables.Layout(slots, 1, {"x": (width, "uint8")})
        self.replay: Any = make_replay(self.layout)
        state = self.replay.init(jax.random.key(0))
        self.state = fill(self.replay, state, self.layout, max(1, slots // 32))
        keys = jax.random.split(jax.random.key(1), layers)
        shape = (width, width)
        self.params = [jax.random.normal(key, shape, jnp.bfloat16) / jnp.bfloat16(width**0.5) for key in keys]
        self.keys = list(jax.random.split(jax.random.key(2), _KEYS))
        self.state, self.sample = self.replay.sample(self.state, self.keys[0], self.batch)
        check_sample(self.layout, self.sample)
        self.train = jax.jit(_train, donate_argnums=0)

    def key(self, i: int) -> jax.Array:
        return self.keys[i % _KEYS]

    def fixed(self, i: int) -> Any:
        """The same batch again and again."""
        del i
        self.params = self.train(self.params, self.sample.data["x"])
        return self.params

    def ways(self) -> dict[str, Callable[[int], Any]]:
        """Name -> a step that samples."""
        found = {"in one program, one after the other": self._serial()}
        found["sample_start and sample_done in one program"] = self._one_program()
        found["sample_start and sample_done called from Python"] = self._three_programs()
        return found

    def _serial(self) -> Callable[[int], Any]:
        def step(state, params, key):
            state, sample = self.replay.sample(state, key, self.batch)
            return state, _train(params, sample.data["x"]), sample

        program = jax.jit(step, donate_argnums=(0, 1))

        def call(i: int) -> Any:
            self.state, self.params, self.sample = program(self.state, self.params, self.key(i))
            return self.params

        return call

    def _one_program(self) -> Callable[[int], Any]:
        def step(state, params, pending, key):
            state, following = self.replay.sample_start(state, key, self.batch)
            sample = self.replay.sample_done(pending, after=following)
            return state, _train(params, sample.data["x"]), following, sample

        program = jax.jit(step, donate_argnums=(0, 1))
        pending: Any = None

        def call(i: int) -> Any:
            nonlocal pending
            if i == 0:  # in between, the other ways have used the queue
                self.state, pending = self.replay.sample_start(self.state, self.key(i), self.batch)
            self.state, self.params, pending, self.sample = program(self.state, self.params, pending, self.key(i))
            return self.params

        return call

    def _three_programs(self) -> Callable[[int], Any]:
        pending: Any = None

        def call(i: int) -> Any:
            nonlocal pending
            if i == 0:
                self.state, pending = self.replay.sample_start(self.state, self.key(i), self.batch)
            self.sample = self.replay.sample_done(pending)
            self.state, pending = self.replay.sample_start(self.state, self.key(i), self.batch)
            self.params = self.train(self.params, self.sample.data["x"])
            return self.params

        return call


def training(bench: Bench, found: Findings) -> None:
    """A step on a fixed batch, with sampling before it, and with the next batch sampled beside it."""
    loop, steps = _Loop(bench), bench.sizes.train[4]
    ways = {"on a fixed batch": loop.fixed} | loop.ways()
    for call in ways.values():
        for i in range(3):
            jax.block_until_ready(call(i))
        check_sample(loop.layout, loop.sample)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(bench.sizes.rounds):
        for name, call in ways.items():  # in turns: the clock of a busy GPU drifts
            start = time.perf_counter()
            result = None
            for i in range(steps):
                result = call(i)
            jax.block_until_ready((result, loop.sample.data))
            times[name].append((time.perf_counter() - start) / steps)
    overlapped: dict[float, str] = {}
    for name, spent in times.items():
        seconds = statistics.median(spent)
        ratio = statistics.median(a / b for a, b in zip(spent, times["on a fixed batch"], strict=True))
        found.figure(f"a train step {name}", seconds * 1e3, "ms", IN_FLIGHT, ratio_to_fixed=ratio)
        if name.startswith("sample_start"):
            overlapped[ratio] = f"{seconds * 1e3:.3f} ms ({name})"
    best = min(overlapped)
    found.at_most(
        "train step with overlapped sampling, gather shorter than compute", _BOUND, "x the step on a fixed batch",
        best, overlapped[best], counts=bench.on_gpu,
    )  # fmt: skip
