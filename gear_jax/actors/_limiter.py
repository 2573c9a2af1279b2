"""Who waits, the actors or the learner, so that each trajectory is learnt from as often as wanted. No jax in here.

Shapes: B rows drawn at a time, C capacity.
"""

import dataclasses
import math
import os
import threading
import time
from fractions import Fraction
from typing import Any

import numpy as np

from gear_jax._errors import message, type_error, value_error
from gear_jax.actors import _wait

_MOST_DENOMINATOR = 1_000_000


class RateLimitTimeoutError(TimeoutError):
    """The deadline has passed, and the rate limiter still made the caller wait."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """The settings of a `RateLimiter`, checked; and when they let somebody go on.

    Attributes:
      ratio: samples per insert, or None.
      buffer: the error buffer, in samples; None with `ratio`.
      need: trajectories that the table has to hold before a batch is drawn.
      batch: B.
      capacity: C.
      waits_when_full: whether inserts wait for room.
    """

    ratio: Fraction | None
    buffer: Fraction | None
    need: int
    batch: int
    capacity: int
    waits_when_full: bool

    def difference(self, inserted: int, sampled: int) -> Fraction:
        """How far inserts are ahead of samples, in samples, against what they should be; 0 without a ratio."""
        return Fraction(0) if self.ratio is None else (inserted - self.need) * self.ratio - sampled

    def may_sample(self, inserted: int, sampled: int, size: int) -> bool:
        """Whether a batch may be drawn from a table that holds `size` trajectories."""
        if size < self.need:
            return False
        return self.ratio is None or self.difference(inserted, sampled + self.batch) >= -_known(self.buffer)

    def may_insert(self, inserted: int, sampled: int, size: int) -> int:
        """How many trajectories may come in."""
        room = self.capacity - size if self.waits_when_full else self.capacity
        missing = self.need - size  # until there are enough, nothing else counts
        if self.ratio is not None:
            ahead = _known(self.buffer) - self.difference(inserted, sampled)
            room = min(room, max(missing, math.floor(ahead / self.ratio)))
        return max(0, room)


def make_rates(
    samples_per_insert: float | None, min_size: int, error_buffer: float | None, batch_size: int, capacity: int,
    times: int | None, when_full: str | None,
) -> Rates:  # fmt: skip
    """Checks settings.

    Raises:
      TypeError, ValueError: for what is none, and for settings with which everybody may wait for ever, or that nobody
        can keep: saying why, and what would do.
    """
    min_size, batch = _count("min_size", min_size), _count("batch_size", batch_size)
    capacity = _count("capacity", capacity)
    if times is not None:
        times = _count("times", times)
    if when_full is None:
        when_full = "evict" if times is None or samples_per_insert is not None else "wait"
    if when_full not in ("wait", "evict"):
        raise value_error("when_full", got=repr(when_full), wanted="'wait' or 'evict'", fix="Leave it out.")
    # A trajectory may be in its last draw, so as many as a batch has rows are sure to fill it.
    need = min_size if times is None else max(min_size, batch)
    if need > capacity:
        what, why = ("min_size", "") if need == min_size else ("batch_size", " (each may have one draw left)")
        raise value_error(
            what, got=f"{need}, for a table of {capacity} trajectories",
            wanted=f"at most {capacity}: the table never holds more{why}, so the learner would wait for ever",
            fix=f"Use {what}={capacity} or less, or TableSpec(capacity={need}).",
        )  # fmt: skip
    ratio = _fraction("samples_per_insert", samples_per_insert)
    if when_full == "wait":
        _check_waits(ratio, times)
    if ratio is None:
        if error_buffer is not None:
            fix = "Give samples_per_insert too, or leave it out."
            raise value_error("error_buffer", got=error_buffer, wanted="None without samples_per_insert", fix=fix)
        return Rates(None, None, need, batch, capacity, when_full == "wait")
    if times is not None and ratio > times:
        raise value_error(
            "samples_per_insert", got=f"{_shown(ratio)} of trajectories that leave after {times} draws",
            wanted=f"at most times = {times}: the table can never give more, and no buffer makes up for it",
            fix=f"Use samples_per_insert={times}, or a selector with more times.",
        )  # fmt: skip
    given = error_buffer is not None
    buffer = _fraction("error_buffer", error_buffer) if given else ratio + batch
    assert buffer is not None
    _check_buffer(ratio, buffer, batch)
    return Rates(ratio, buffer, need, batch, capacity, False)


def _check_waits(ratio: Fraction | None, times: int | None) -> None:
    if times is None:
        raise value_error(
            "when_full", got="'wait' for a table that nothing leaves",
            wanted="'evict': once the table is full the actors would wait for ever",
            fix="Leave it out, or use a selector with times, such as Queue().",
        )  # fmt: skip
    if ratio is not None:
        raise value_error(
            "when_full", got=f"'wait' with samples_per_insert={_shown(ratio)}",
            wanted="one of the two: actors that wait for room, and a learner that waits for their inserts, wait for "
            "each other once the table is full",
            fix="Leave samples_per_insert out: a table whose trajectories are drawn times times keeps that ratio by "
            "itself. Or use when_full='evict'.",
        )  # fmt: skip


def _check_buffer(ratio: Fraction, buffer: Fraction, batch: int) -> None:
    """Refuses a buffer in which both sides can be stuck.

    The difference moves by `ratio` with an insert and by B with a batch, so on multiples of their greatest common
    divisor g. With a steps of g to an insert, b to a batch, and a buffer of k steps to either side there are 2k + 1
    places. Each of them allows at least one move if 2k + 1 >= a + b. Otherwise no place allows both and no walk comes
    back to where it was, which takes a + b different places: every walk ends.
    """
    step = Fraction(math.gcd(ratio.numerator, batch * ratio.denominator), ratio.denominator)
    moves = (ratio + batch) / step
    if 2 * math.floor(buffer / step) + 1 < moves:
        least = math.ceil((moves - 1) / 2) * step
        raise value_error(
            "error_buffer", got=_shown(buffer), wanted=f"at least {_shown(least)}: with samples_per_insert="
            f"{_shown(ratio)} and batches of {batch} rows, the learner would come to wait for an insert that would be "
            "too much, and the actors for a batch that would be too much",
            fix=f"Use error_buffer={_shown(least)} or more, or leave it out for {_shown(ratio + batch)}.",
        )  # fmt: skip


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
            max_staleness = _count("max_staleness", max_staleness, 0)
        self.times, self.max_staleness = times, max_staleness
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._inserted = self._sampled = self._size = self._drawn = self._version = 0
        self._counts = {"insert_waits": 0, "sample_waits": 0, "refused_stale": 0}
        self._seconds = {"insert_wait_seconds": 0.0, "sample_wait_seconds": 0.0}
        self._waiting = {"insert": 0, "sample": 0}

    def __repr__(self):
        r = self.rates
        ratio = "no ratio" if r.ratio is None else f"{_shown(r.ratio)} samples per insert +- {_shown(_known(r.buffer))}"
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
        with self._held():
            self._version = max(self._version, int(version))

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
        with self._held():
            unseen = 0 if inserted is None else self._inserted - inserted
            self._size, self._drawn = min(int(size) + unseen, self.rates.capacity), 0
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


def _known(buffer: Fraction | None) -> Fraction:
    assert buffer is not None
    return buffer


def _fraction(what: str, number: Any) -> Fraction | None:
    if number is None:
        return None
    fix = "Pass a number, such as 4.0."
    if isinstance(number, bool) or not isinstance(number, (int, float, Fraction, np.number)):
        raise type_error(what, got=repr(number), wanted="a number", fix=fix)
    if not (number > 0 and math.isfinite(number)):
        raise value_error(what, got=number, wanted="more than 0, and finite", fix=fix)
    fraction = Fraction(number if isinstance(number, (int, Fraction)) else float(number))
    fraction = fraction.limit_denominator(_MOST_DENOMINATOR)
    if not fraction:
        raise value_error(what, got=number, wanted=f"1 / {_MOST_DENOMINATOR} or more", fix=fix)
    return fraction


def _count(what: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise type_error(what, got=repr(value), wanted="an integer", fix="Pass a Python int.")
    if value < least:
        raise value_error(what, got=value, wanted=f"at least {least}", fix="Pass a larger number.")
    return int(value)


def _shown(number: Fraction) -> str:
    return f"{float(number):g}"
