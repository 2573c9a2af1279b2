"""Numbers among arguments: Python's and NumPy's, and nothing else."""

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax._numbers import is_integer, is_number

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
