"""Deadlines. No jax in here."""

import time
from collections.abc import Callable
from typing import Any

from gear_jax._errors import type_error, value_error
from gear_jax._numbers import is_integer, is_number

_SLICE_NS = 200_000_000  # Python handles signals (Ctrl-C) between the slices of a wait


def deadline(what: str, seconds: Any) -> int:
    """`time.monotonic_ns` in `seconds` from now.

    Raises:
      TypeError, ValueError: unless it is a finite number, 0 or more.
    """
    fix = f"Pass seconds: {what}=30.0."
    if not is_number(seconds):
        raise type_error(what, got=repr(seconds), wanted="a number of seconds", fix=fix)
    if not 0 <= seconds < 1e9:
        raise value_error(what, got=seconds, wanted="0 or more, and finite", fix=fix)
    return time.monotonic_ns() + int(float(seconds) * 1e9)


def least(number: Any, limit: int, them: str) -> int:
    """How many of `limit` slots or actors, which `them` names, to wait for.

    Raises:
      TypeError, ValueError: unless it is an integer, 1 to `limit`.
    """
    if not is_integer(number):
        raise type_error("least", got=repr(number), wanted="an integer", fix="Pass least=8, or leave it out.")
    if not 1 <= number <= limit:
        wanted = f"1 to {limit}, the {them} of the ring"
        raise value_error("least", got=number, wanted=wanted, fix="Take fewer, or leave it out.")
    return int(number)


def in_slices(wait: Callable[[int], Any], until: int, over: Callable[[Any], bool]) -> Any:
    """Calls `wait(deadline)` until it returns something that is `over`, or `until` has passed; returns the last."""
    while True:
        now = time.monotonic_ns()
        got = wait(min(until, now + _SLICE_NS))
        if over(got) or now >= until:
            return got
