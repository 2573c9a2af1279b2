"""What counts as a number among the arguments of a call. No jax in here."""

from typing import Any

import numpy as np


def is_integer(x: Any) -> bool:
    """Whether it is an integer, Python's or NumPy's; a bool is none."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    """Whether it is a real number, Python's or NumPy's; a bool is none."""
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)
