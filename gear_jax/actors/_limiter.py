"""Who waits, the actors or the learner, so that each trajectory is learnt from as often as wanted. No jax in here.

Shapes: B rows drawn at a time, C capacity.
"""

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_jax._errors import message, type_error, value_error
from gear_jax._numbers import check_count, is_integer, is_number
from gear_jax.actors import _wait
from gear_jax.actors._rates import known, make_rates, shown

_COUNTED = "inserted", "sampled", "size", "drawn", "version"


class RateLimitTimeoutError(TimeoutError):
    """The deadline has passed, and the rate limiter still made the caller wait."""


class RateLimiter:
    """Decides who waits, the actors or the learner. Thread-safe; of the learner's process alone.

    With `samples_per_insert` r, a table that has been given I trajectories should have given out (I - min_size) * r
    rows or so: at most `error_buffer` more, or the learner waits for inserts; at most `error_buffer` fewer, or the
    actors wait for the learner. While the table holds fewer than `min_size` trajectories inserts always go on, and
    samples wait. Source: Reverb's rate limiters (Cassirer et al., 2021); a batch is as many samples as it has rows.

    `Ingest(limiter=...)` keeps to it: what actors may not insert yet stays in their ring, and when that is full they
    wait, in whatever process they are. Threads of this process call `await_insert`.

    Args:
      samples_per_insert: how often a trajectory is drawn on average, more than 0; None: no ratio is kept.
      batch_size: B, the rows that the learner draws at a time (in a compiled program, of all its samples).
      capacity: C, of the table.
      min_size: trajectories in the table before the first batch.
      error_buffer: in rows; None: samples_per_insert + batch_size.
      times: the selector's: how often a trajectory may be drawn before it is gone. The table then has to hold B
        trajectories, at least, for a batch.
      max_staleness: the replay's: trajectories whose policy is further behind `version` are not let in.
      when_full: "evict": a full table gives up old trajectories for new ones. "wait": the actors wait until some have
        been drawn for the last time; only with `times`. None: "wait" with `times` and no `samples_per_insert`. (Over
        several partitions one may be full, and evict, while others have room.)

    Raises:
      TypeError, ValueError: for arguments that are none, and for settings with which everybody may come to wait for
        ever, or which nobody can keep: why, and what would do.
    """

    def __init__(
        self, samples_per_insert: float | None = None, *, batch_size: int, capacity: int, min_size: int = 1,
        error_buffer: float | None = None, times: int | None = None, max_staleness: int | None = None,
        when_full: str | None = None,
    ):  # fmt: skip
        self.rates = make_rates(samples_per_insert, min_size, error_buffer, batch_size, capacity, times, when_full)
        if max_staleness is not None:
            max_staleness = check_count("max_staleness", max_staleness, 0)
        self.times, self.max_staleness = times, max_staleness
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._inserted = self._sampled = self._size = self._drawn = self._version = 0
        self._counts = {"insert_waits": 0, "sample_waits": 0, "refused_stale": 0}
        self._seconds = {"insert_wait_seconds": 0.0, "sample_wait_seconds": 0.0}
        self._waiting = {"insert": 0, "sample": 0}

    def __repr__(self):
        r = self.rates
        ratio = "no ratio" if r.ratio is None else f"{shown(r.ratio)} samples per insert +- {shown(known(r.buffer))}"
        return f"RateLimiter({ratio}, from {r.need} of {r.capacity} trajectories, batches of {r.batch})"

    def __reduce__(self):
        raise type_error(
            "RateLimiter", got="a copy for another process", wanted="one that stays in the learner's process",
            fix="Give it to Ingest: actors in other processes wait for room in their ring.",
        )  # fmt: skip

    @property
    def batch_size(self) -> int:
        """B."""
        return self.rates.batch

    @property
    def version(self) -> int:
        """The learner's policy version."""
        return self._version

    def advance(self, version: int) -> None:
        """Says which version the learner's policy has, for `max_staleness`; a lower one than before changes nothing."""
        array = getattr(version, "ndim", None) == 0  # of jax's, say
        number: Any = np.asarray(version)[()] if array else version
        number = check_count("version", number, -(2**31))
        with self._held():
            self._version = max(self._version, number)

    def fresh(self, versions: Any) -> np.ndarray:
        """Which trajectories of policy `versions`, `int[n]`, are not too stale to be let in: `bool[n]`; counted."""
        versions = np.asarray(versions)
        with self._held():
            if self.max_staleness is None:
                return np.ones(versions.shape, bool)
            fresh = versions >= self._version - self.max_staleness
            self._counts["refused_stale"] += int(fresh.size - fresh.sum())
            return fresh

    def observe(self, size: int, inserted: int | None = None) -> None:
        """Says how many trajectories the table holds. Needed where they leave by other means than eviction.

        Args:
          size: of the table.
          inserted: how many of the inserts that have been counted the table had seen then; None: all of them.
        """
        size = check_count("size", size, 0)
        inserted = inserted if inserted is None else check_count("inserted", inserted, 0)
        with self._held():
            unseen = 0 if inserted is None else self._inserted - inserted
            self._size, self._drawn = min(size + unseen, self.rates.capacity), 0
            self._changed.notify_all()

    def may_insert(self) -> int:
        """How many trajectories may come in now."""
        with self._held():
            return self._may_insert()

    def may_sample(self) -> bool:
        """Whether a batch may be drawn now."""
        with self._held():
            return self._may_sample()

    def insert(self, n: int = 1) -> None:
        """Counts trajectories that have come in."""
        n = check_count("n", n, 0)
        with self._held():
            self._insert(n)

    def sample(self) -> bool:
        """Counts a batch, if one may be drawn now; returns whether."""
        with self._held():
            may = self._may_sample()
            if may:
                self._sample()
            return may

    def await_insert(self, timeout: float = 30.0) -> None:
        """Waits until one more trajectory may come in, and counts it.

        Raises:
          RateLimitTimeoutError: after `timeout` seconds; nothing is counted then.
        """
        self._await("insert", lambda: self._may_insert() > 0, lambda: self._insert(1), timeout)

    def await_sample(self, timeout: float = 30.0) -> None:
        """Waits until a batch may be drawn, and counts it. For threads; `Ingest.await_sample` drains meanwhile.

        Raises:
          RateLimitTimeoutError: after `timeout` seconds; nothing is counted then.
        """
        self._await("sample", self._may_sample, self._sample, timeout)

    def waited(self, side: str, seconds: float) -> None:
        """Counts a wait of the "insert" or "sample" side that was made elsewhere."""
        if side not in self._waiting:
            raise value_error("side", got=repr(side), wanted='"insert" or "sample"', fix="Write one of them.")
        if not is_number(seconds) or not 0 <= seconds < 1e9:
            raise value_error("seconds", got=repr(seconds), wanted="0 or more, and finite", fix="Pass seconds.")
        with self._held():
            self._counts[f"{side}_waits"] += 1
            self._seconds[f"{side}_wait_seconds"] += seconds

    def stats(self) -> dict[str, int | float | None]:
        """Python numbers: `inserted` and `sampled` so far, `size`; `difference` of the two in rows, which samples take
        down to `lowest` and inserts up to `highest` (None without a ratio); `may_insert` and `may_sample` now; how
        often and how long either side waited; `refused_stale`; `version`.
        """
        with self._held():
            rates, buffer = self.rates, self.rates.buffer
            limit = None if buffer is None else float(buffer)
            return {
                "inserted": self._inserted,
                "sampled": self._sampled,
                "size": self._size,
                "min_size": rates.need,
                "difference": float(rates.difference(self._inserted, self._sampled)),
                "lowest": None if limit is None else -limit,
                "highest": limit,
                "may_insert": self._may_insert(),
                "may_sample": int(self._may_sample()),
                "inserts_waiting": self._waiting["insert"],
                "samples_waiting": self._waiting["sample"],
                "version": self._version,
                **self._counts,
                **self._seconds,
            }

    def state_dict(self) -> dict[str, int | float]:
        """What it has counted, in Python numbers, to be saved with the table's checkpoint: between a `drain` and the
        next, so that both have seen the same."""
        with self._held():
            counted = {name: getattr(self, f"_{name}") for name in _COUNTED}
            return {**counted, **self._counts, **self._seconds}

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Goes on from what another one, of the same table, has counted: in place of all that this one has.

        The settings are this one's own. What lay in the ring is no part of it: it has not come in yet.

        Args:
          state: of `state_dict`.

        Raises:
          TypeError, ValueError: if that is none, naming what is wrong in it.
        """
        fix = "Pass what RateLimiter.state_dict returned."
        if not isinstance(state, Mapping):
            raise type_error("state", got=type(state).__name__, wanted="a mapping of numbers", fix=fix)
        with self._held():
            names = {*_COUNTED, *self._counts, *self._seconds}
            if set(state) != names:
                raise value_error("state", got=f"keys {sorted(state)}", wanted=f"{sorted(names)}", fix=fix)
            for name, x in state.items():
                whole = name not in self._seconds
                if not (is_integer if whole else is_number)(x) or not 0 <= x < 2**63:
                    wanted = f"{'an integer' if whole else 'a number'}, 0 or more"
                    raise value_error(f"state[{name!r}]", got=repr(x), wanted=wanted, fix=fix)
            self._inserted, self._sampled, self._size, self._drawn, self._version = (int(state[x]) for x in _COUNTED)
            self._size = min(self._size, self.rates.capacity)
            self._counts = {name: int(state[name]) for name in self._counts}
            self._seconds = {name: float(state[name]) for name in self._seconds}
            self._changed.notify_all()

    def _may_sample(self) -> bool:
        # Until `observe` says better, all that were drawn since may have left; or none, for `_may_insert`.
        return self.rates.may_sample(self._inserted, self._sampled, self._size - self._drawn)

    def _may_insert(self) -> int:
        return self.rates.may_insert(self._inserted, self._sampled, self._size)

    def _insert(self, n: int) -> None:
        self._inserted += n
        self._size = min(self._size + n, self.rates.capacity)
        self._changed.notify_all()

    def _sample(self) -> None:
        self._sampled += self.rates.batch
        if self.times is not None:
            self._drawn += self.rates.batch
        self._changed.notify_all()

    def _held(self) -> threading.Condition:
        if os.getpid() != self._process:
            raise type_error(
                "RateLimiter", got="a call in a forked process", wanted="one of the learner's process",
                fix="Give it to Ingest: actors in other processes wait for room in their ring.",
            )  # fmt: skip
        return self._changed

    def _await(self, side: str, may: Any, count: Any, timeout: float) -> None:
        until = _wait.deadline("timeout", timeout)
        with self._held():
            started = time.monotonic_ns()
            if not may():
                self._waiting[side] += 1
                try:
                    while not may() and (left := until - time.monotonic_ns()) > 0:
                        self._changed.wait(left / 1e9)
                finally:
                    self._waiting[side] -= 1
                    self._counts[f"{side}_waits"] += 1
                    self._seconds[f"{side}_wait_seconds"] += (time.monotonic_ns() - started) / 1e9
            if not may():
                raise self._timeout(side, timeout)
            count()

    def _timeout(self, side: str, timeout: float) -> RateLimitTimeoutError:
        rates = self.rates
        got = f"{self._size} trajectories, {self._inserted} inserted and {self._sampled} rows sampled so far"
        if side == "sample" and self._size - self._drawn < rates.need:
            wanted, fix = f"{rates.need} trajectories in the table", "Look after the actors"
        elif side == "sample":
            wanted, fix = f"more inserts: {self!r}", "Look after the actors"
        else:
            wanted, fix = f"more samples: {self!r}", "Look after the learner"
        text = message(f"{side} after {timeout:g} s", got=got, wanted=wanted, fix=f"{fix}, or raise the timeout.")
        return RateLimitTimeoutError(text)
