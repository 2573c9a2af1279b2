"""How `Ingest` keeps to a rate limiter. No jax in here.

The learner's loop is one thread: while it waits for a batch it drains the ring, and answers actors that ask.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gear_jax._errors import value_error
from gear_jax.actors import _wait
from gear_jax.actors._limiter import RateLimiter

_SERVE_SECONDS, _DRAIN_SECONDS = 0.005, 0.1  # of waits that look after something else in between


def check(limiter: RateLimiter, replay: Any) -> None:
    """Raises a ValueError if a limiter is not of a replay's table."""
    config = replay.config
    for what, got, wanted in (
        ("capacity", limiter.rates.capacity, config.table.capacity),
        ("times", limiter.times, config.selector.times),
        ("max_staleness", limiter.max_staleness, config.max_staleness),
    ):
        if got != wanted:
            fix = f"Write RateLimiter(..., {what}={wanted})."
            raise value_error(f"limiter: {what}", got=got, wanted=f"the table's, {wanted}", fix=fix)
    if limiter.rates.waits_when_full:
        _check_all_leave(config)


def check_versions(config: Any, found: Any) -> None:
    """Raises a ValueError for trajectories of a drain that are to be let in without the version that the table needs.

    A writer is refused that leaves it out; but it may have committed before the ring had this learner, or to a ring on
    another machine.
    """
    if config.max_staleness is None:
        return
    without = found.admitted & ~found.has_version
    if without.any():
        actors = ", ".join(map(str, sorted(set(found.actor[without].tolist()))))
        raise value_error(
            "drain: version", got=f"{without.sum()} trajectories without one, of actor(s) {actors}",
            wanted="one of each: the table has max_staleness",
            fix="Write commit(version=...) in the actors; admit=lambda found: found.has_version drops the others.",
        )  # fmt: skip


def _check_all_leave(config: Any) -> None:
    """Refuses to wait for room in a table that may fill with what is never drawn, and so never leaves."""
    why = None
    if config.anchor.min_length > 1:
        why = f"anchor={config.anchor.kind!r} never draws trajectories of fewer than {config.anchor.min_length} steps"
    elif not np.asarray(config.selector.mass(np.zeros(1, np.float32), np.ones(1, bool))).all():
        why = f"{config.selector!r} never draws a priority of 0"
    if why is not None:
        raise value_error(
            "limiter: when_full", got="'wait'", wanted=f"'evict': {why}, and once they fill the table the actors would "
            "wait for ever", fix="Write RateLimiter(..., when_full='evict').",
        )  # fmt: skip


def await_sample(ingest: Any, state: Any, timeout: float, policy: Callable[[Any], Any] | None) -> tuple[Any, bool]:
    """See `Ingest.await_sample`."""
    limiter = ingest.limiter
    if limiter is None:
        fix = "Pass limiter=RateLimiter(...) to Ingest."
        raise value_error("await_sample", got="an Ingest without a limiter", wanted="one with it", fix=fix)
    started, until = time.monotonic_ns(), _wait.deadline("timeout", timeout)
    state, _ = ingest.drain(state)
    ready = limiter.sample()
    if ready:
        return state, True
    while not ready and (left := (until - time.monotonic_ns()) / 1e9) > 0:
        if policy is not None:
            ingest.serve(policy, min(left, _SERVE_SECONDS))
        state, n = ingest.drain(state, timeout=0.0 if policy is not None else min(left, _DRAIN_SECONDS))
        ready = limiter.sample()
        if not n and not ready and not limiter.may_insert():  # other threads have to draw
            time.sleep(min(left, _SERVE_SECONDS))
    limiter.waited("sample", (time.monotonic_ns() - started) / 1e9)
    return state, ready
