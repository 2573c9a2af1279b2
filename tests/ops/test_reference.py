"""The reference in `ops._reference`, held to the same contract as the ops: it is then a second, vectorised oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax.ops import _reference
from gear_jax.specs import PADS, Window
from gear_jax.testing import ops as contract


def gather(columns, slots, starts, lengths, window):
    """`_reference.window` with the signature of `ops.gather`."""
    whole = window is None or window.length is None
    pad, value = ("around", 0) if window is None else (window.pad, window.pad_value)
    results = {
        k: _reference.window(
            c, slots, starts, lengths, 0 if whole else window.offset, c.shape[2] if whole else window.length,
            pad, value, not whole,
        )
        for k, c in columns.items()
    }  # fmt: skip
    return {k: v for k, (v, _) in results.items()}, {k: m for k, (_, m) in results.items()}, None


def scatter(columns, slots, values, lengths, starts):
    return {k: _reference.scatter(c, slots, values[k], lengths, starts) for k, c in columns.items()}


# XLA has no arithmetic on the other small floats everywhere.
DTYPES = ("bool", "int8", "uint32", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("pad", PADS)
def test_window(pad):
    contract.check_gather(gather, dtypes=DTYPES, window=Window(-2, 4, pad, 1))
    contract.check_gather(gather, dtypes=("int16",), window=Window(0, None, pad, 1))


def test_scatter():
    contract.check_scatter(scatter, dtypes=DTYPES)


@pytest.mark.parametrize("leaves", [1, 16, 17, 300, 4097])
def test_sums(leaves):
    mass = np.random.default_rng(leaves).uniform(size=(2, leaves)).astype(np.float32)
    contract.assert_same_bits(jax.jit(_reference.sums)(mass), contract.sums_oracle(mass))


def test_probabilities():
    mass = jnp.asarray([[1.0, 0.0], [2.0, 5.0]], jnp.float32)
    np.testing.assert_allclose(_reference.probabilities(mass), [0.125, 0, 0.25, 0.625])
    np.testing.assert_array_equal(_reference.probabilities(mass * 0), [0, 0, 0, 0])


def test_last_write():
    slots, new = jnp.asarray([2, 0, 2, -1, 3], jnp.int32), jnp.arange(1.0, 6.0, dtype=jnp.float32)
    got = _reference.last_write(jnp.zeros(3, jnp.float32), slots, new)
    np.testing.assert_array_equal(got, [2, 0, 3])
