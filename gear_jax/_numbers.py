"""What counts as a number among the arguments of a call. No jax in here."""

from typing import Any

import numpy as np

from gear_jax._errors import type_error, value_error


def is_integer(x: Any) -> bool:
    """Whether it is an integer, Python's or NumPy's; a bool is none."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    """Whether it is a real number, Python's or NumPy's; a bool is none."""
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def check_count(what: str, value: Any, low: int = 1, high: int = 2**63 - 1) -> int:
    """The integer, or a TypeError or ValueError that names the argument."""
    if not is_integer(value):
        raise type_error(what, got=repr(value), wanted="an integer", fix="Pass a Python int.")
    if value < low:
        raise value_error(what, got=value, wanted=f"at least {low}", fix="Pass a larger number.")
    if value > high:
        raise value_error(what, got=value, wanted=f"at most {high}", fix="Pass a smaller number.")
    return int(value)


def check_seconds(what: str, seconds: Any, fix: str) -> float:
    """The seconds that something may take, or a ValueError that names the argument."""
    if not is_number(seconds) or not 0 < seconds < 1e6:
        raise value_error(what, got=repr(seconds), wanted="seconds, more than 0 and less than a million", fix=fix)
    return float(seconds)
