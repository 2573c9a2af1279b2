"""Numbers among arguments: Python's and NumPy's, and nothing else."""

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax._numbers import check_count, check_seconds, is_integer, is_number

INTEGERS = [0, -3, 2**70, np.int8(1), np.int64(-1), np.uint64(2**63)]
NUMBERS = [0.5, float("nan"), np.float16(1), np.float32(2.5), np.float64(3)]
NEITHER = [True, np.bool_(True), "1", None, 1j, np.complex64(1), np.ones(()), np.ones(1), jnp.ones(()), Fraction(1, 2)]


@pytest.mark.parametrize("x", INTEGERS, ids=repr)
def test_integers(x):
    assert is_integer(x) and is_number(x)


@pytest.mark.parametrize("x", NUMBERS, ids=repr)
def test_numbers_that_are_no_integers(x):
    assert not is_integer(x) and is_number(x)


@pytest.mark.parametrize("x", NEITHER, ids=repr)
def test_what_is_no_number(x):
    assert not is_integer(x) and not is_number(x)


def test_counts():
    assert type(check_count("x", np.int8(3))) is int and check_count("x", 0, 0) == 0
    for value, words in ((0, "x: got 0, wanted at least 1"), (2**63, r"x: got \d+, wanted at most \d+")):
        with pytest.raises(ValueError, match=words):
            check_count("x", value)
    with pytest.raises(TypeError, match=r"x: got 1\.0, wanted an integer"):
        check_count("x", 1.0)


def test_seconds():
    assert type(check_seconds("x", np.float32(0.5), "")) is float
    for seconds in (0, -1, float("nan"), 1e6, "1", None, True):
        with pytest.raises(ValueError, match=r"x: got .*, wanted seconds, more than 0 .* Write x=2\.0\."):
            check_seconds("x", seconds, "Write x=2.0.")
