"""The settings of a `RateLimiter`, and what they let happen. No jax in here.

Shapes: B rows drawn at a time, C capacity.
"""

import dataclasses
import math
from fractions import Fraction
from typing import Any

from gear_jax._errors import type_error, value_error
from gear_jax._numbers import check_count, is_number

_MOST_DENOMINATOR = 1_000_000


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
        return self.ratio is None or self.difference(inserted, sampled + self.batch) >= -known(self.buffer)

    def may_insert(self, inserted: int, sampled: int, size: int) -> int:
        """How many trajectories may come in."""
        room = self.capacity - size if self.waits_when_full else self.capacity
        missing = self.need - size  # until there are enough, nothing else counts
        if self.ratio is not None:
            ahead = known(self.buffer) - self.difference(inserted, sampled)
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
    min_size, batch = check_count("min_size", min_size), check_count("batch_size", batch_size)
    capacity = check_count("capacity", capacity)
    if times is not None:
        times = check_count("times", times)
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
            "samples_per_insert", got=f"{shown(ratio)} of trajectories that leave after {times} draws",
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
            "when_full", got=f"'wait' with samples_per_insert={shown(ratio)}",
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
            "error_buffer", got=shown(buffer), wanted=f"at least {shown(least)}: with samples_per_insert="
            f"{shown(ratio)} and batches of {batch} rows, the learner would come to wait for an insert that would be "
            "too much, and the actors for a batch that would be too much",
            fix=f"Use error_buffer={shown(least)} or more, or leave it out for {shown(ratio + batch)}.",
        )  # fmt: skip


def known(buffer: Fraction | None) -> Fraction:
    assert buffer is not None
    return buffer


def _fraction(what: str, number: Any) -> Fraction | None:
    if number is None:
        return None
    fix = "Pass a number, such as 4.0."
    if not is_number(number) and not isinstance(number, Fraction):
        raise type_error(what, got=repr(number), wanted="a number", fix=fix)
    if not (number > 0 and math.isfinite(number)):
        raise value_error(what, got=number, wanted="more than 0, and finite", fix=fix)
    fraction = Fraction(number if isinstance(number, (int, Fraction)) else float(number))
    fraction = fraction.limit_denominator(_MOST_DENOMINATOR)
    if not fraction:
        raise value_error(what, got=number, wanted=f"1 / {_MOST_DENOMINATOR} or more", fix=fix)
    return fraction



def shown(number: Fraction) -> str:
    return f"{float(number):g}"
