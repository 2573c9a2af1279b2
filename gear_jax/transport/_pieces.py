"""What of memory is exposed, and what is read into: arguments of a session, checked, as the core takes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gear_jax._errors import type_error, value_error
from gear_jax._numbers import is_integer


def address_of(region: Any, i: int) -> tuple[int, int]:
    """Address and bytes of region i: a C-contiguous array, or both as they are."""
    if isinstance(region, np.ndarray):
        if region.dtype.hasobject:
            fix = "Objects are pointers, which mean nothing elsewhere."
            raise type_error(f"regions[{i}]", got=f"an array of {region.dtype}", wanted="an array of numbers", fix=fix)
        if not region.flags.c_contiguous:
            fix = "Pass `np.ascontiguousarray(x)`, and write to that one."
            raise value_error(f"regions[{i}]", got=f"strides {region.strides}", wanted="a C-contiguous array", fix=fix)
        return region.ctypes.data, region.nbytes
    if isinstance(region, tuple) and len(region) == 2 and all(isinstance(x, int) and 0 <= x < 2**63 for x in region):
        return region
    wanted = "a NumPy array, or (address, bytes)"
    raise type_error(f"regions[{i}]", got=type(region).__name__, wanted=wanted, fix="Pass one of these.")


def of_bytes(piece: Sequence[Any]) -> tuple[int, ...]:
    """A (peer, region, offset, bytes), as Python's integers."""
    numbers = _ints(piece)
    if numbers[2] < 0 or not 0 <= numbers[3] < 2**63:
        raise value_error("offset, bytes", got=piece[2:], wanted="0 or more", fix="Read within the region.")
    return numbers


def to_fill(piece: Sequence[Any], i: int) -> tuple[int, ...]:
    """Piece i, a (peer, region, offset, array to fill), as peer, region, offset, bytes and address."""
    *where, x = piece
    if not isinstance(x, np.ndarray) or x.dtype.hasobject:
        got = f"an array of {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
        raise type_error(f"pieces[{i}]", got=got, wanted="a NumPy array of numbers to fill", fix="Pass np.empty(...).")
    if not x.flags.c_contiguous or not x.flags.writeable:
        got = "one that is read-only" if x.flags.c_contiguous else f"strides {x.strides}"
        fix = "Pass np.empty(...), and copy it."
        raise value_error(f"pieces[{i}]", got=got, wanted="a C-contiguous array to fill", fix=fix)
    return (*_ints(where), x.nbytes, x.ctypes.data)


def _ints(piece: Sequence[Any]) -> tuple[int, ...]:
    if not all(map(is_integer, piece)):
        fix = "Pass integers."
        raise type_error("a piece", got=repr(tuple(piece)), wanted="peer, region, offset (and bytes)", fix=fix)
    return tuple(map(int, piece))
