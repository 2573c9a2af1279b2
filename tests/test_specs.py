"""`gear_jax.specs`: what can be stored and shown."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax.specs import ColumnSpec, TableSpec, Window
from gear_jax.testing.ops import DTYPES, dtype_of


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_whole_bytes(name):
    spec = ColumnSpec((2, 3), dtype_of(name))
    assert spec.dtype == dtype_of(name) and spec.shape == (2, 3)
    assert spec == ColumnSpec([2, np.int64(3)], dtype_of(name)) and hash(spec) == hash(
        ColumnSpec((2, 3), dtype_of(name))
    )


def test_shapes_and_names_of_dtypes():
    assert ColumnSpec((), "float32") == ColumnSpec((), jnp.float32) == ColumnSpec(shape=(), dtype=np.float32)
    assert ColumnSpec((), float).dtype == np.float64


@pytest.mark.parametrize("bad", [jnp.int4, jnp.uint2, jnp.float4_e2m1fn, "S3", "datetime64[s]", object, [("a", int)]])
def test_dtypes_that_cannot_be_stored(bad):
    with pytest.raises(ValueError, match=r"ColumnSpec\.dtype: got .*wanted .*whole bytes.*uint8"):
        ColumnSpec((), bad)


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (
            lambda: ColumnSpec(3, jnp.float32),
            TypeError,
            r"ColumnSpec\.shape: got 3, wanted a tuple of integers\. Write",
        ),
        (
            lambda: ColumnSpec((3, 0), jnp.float32),
            ValueError,
            r"ColumnSpec\.shape\[1\]: got 0, wanted an integer in \[1, ",
        ),
        (lambda: ColumnSpec((2.0,), jnp.float32), TypeError, r"ColumnSpec\.shape\[0\]: got 2\.0, wanted an integer"),
        (
            lambda: ColumnSpec((), "float33"),
            TypeError,
            r"ColumnSpec\.dtype: got 'float33', wanted a NumPy or JAX dtype",
        ),
        (lambda: TableSpec({}, 0, 4), ValueError, r"TableSpec\.trajectory_length: got 0, wanted an integer in \[1, "),
        (lambda: TableSpec({}, 4, -1), ValueError, r"TableSpec\.capacity: got -1"),
        (lambda: TableSpec({}, 4, 2**31), ValueError, r"TableSpec\.capacity: got 2147483648, wanted .*2147483647\]"),
        (lambda: TableSpec({}, "4", 4), TypeError, r"TableSpec\.trajectory_length: got '4', wanted an integer"),
        (lambda: TableSpec({}, True, 4), TypeError, r"trajectory_length: got True"),
        (lambda: Window(1.5, 3), TypeError, r"Window\.offset: got 1\.5, wanted an integer\. Write Window"),
        (lambda: Window(2**31, 3), ValueError, r"Window\.offset: got 2147483648"),
        (lambda: Window(-1), ValueError, r"Window\.offset: got -1, wanted 0 where length is None"),
        (lambda: Window(0, 0), ValueError, r"Window\.length: got 0, wanted an integer in \[1, "),
        (
            lambda: Window(0, 3, "left"),
            ValueError,
            r"Window\.pad: got 'left', wanted one of \('around', 'head', 'tail'\)",
        ),
    ],
)
def test_errors(call, kind, match):
    with pytest.raises(kind, match=match):
        call()


def test_specs_are_static():
    for spec in (ColumnSpec((), "int8"), Window(-1, 2), TableSpec((), 1, 1)):
        assert hash(spec) == hash(dataclasses.replace(spec))
        with pytest.raises(dataclasses.FrozenInstanceError):
            spec.shape = ()
    assert Window() == Window(0, None, "around", 0)
