"""What a table holds and what a window shows of it. No jax in here: actor processes import this module."""

import dataclasses
import operator
from typing import Any

import numpy as np

from gear_jax._errors import type_error, value_error

PADS = ("around", "head", "tail")
ANCHORS = ("uniform", "full", "start", "end")
_MAX_INT32 = 2**31 - 1


def _integer(what: str, value: Any, low: int, fix: str) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        value = operator.index(value)
    except TypeError:
        raise type_error(what, got=repr(value), wanted="an integer", fix=fix) from None
    if not low <= value <= _MAX_INT32:
        raise value_error(what, got=value, wanted=f"an integer in [{low}, {_MAX_INT32}]", fix=fix)
    return value


@dataclasses.dataclass(frozen=True)
class ColumnSpec:
    """One column of a table: what it holds for each step.

    Attributes:
      shape: the shape of one step, any rank, no zero dimension.
      dtype: any NumPy or JAX dtype of whole bytes (4-bit and smaller types are refused).

    Raises:
      TypeError, ValueError: for a shape or dtype that cannot be stored.
    """

    shape: tuple[int, ...]
    dtype: Any

    def __post_init__(self):
        fix = "Write ColumnSpec(shape=(11,), dtype=jnp.float32)."
        try:
            shape = tuple(self.shape)
        except TypeError:
            raise type_error("ColumnSpec.shape", got=repr(self.shape), wanted="a tuple of integers", fix=fix) from None
        shape = tuple(_integer(f"ColumnSpec.shape[{i}]", d, 1, fix) for i, d in enumerate(shape))
        try:
            dtype = np.dtype(self.dtype).newbyteorder("=")
        except TypeError:
            raise type_error("ColumnSpec.dtype", got=repr(self.dtype), wanted="a NumPy or JAX dtype", fix=fix) from None
        narrow = any(
            dtype.name.startswith(p) for p in ("int2", "int4", "uint2", "uint4", "int1", "uint1", "float4", "float6")
        )
        narrow = narrow and dtype.itemsize == 1
        if dtype.hasobject or dtype.fields or dtype.kind in "SUMm" or narrow or dtype.itemsize > 16:
            raise value_error(
                "ColumnSpec.dtype",
                got=dtype.name,
                wanted="a bool, integer, float or complex dtype of whole bytes",
                fix="Pack narrow values into uint8 before they are stored.",
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", dtype)


@dataclasses.dataclass(frozen=True)
class Window:
    """Which steps of a trajectory a sample shows, relative to the anchor step t.

    Element w of the window is step t + offset + w. Steps outside [0, L) of a trajectory of length L are padding: they
    hold `pad_value` and their mask is False.

    Attributes:
      offset: step of element 0 relative to the anchor; may be negative.
      length: W, the number of elements. None (the default): the whole trajectory, W = T, element w is step w whatever
        the anchor; `offset` must then be 0.
      pad: where padding goes. "around" keeps the placement; "head" moves the valid steps to the right end, "tail" to
        the left end.
      pad_value: the value of padding, in the column's dtype.

    Raises:
      TypeError, ValueError: for a window that cannot be.
    """

    offset: int = 0
    length: int | None = None
    pad: str = "around"
    pad_value: Any = 0

    def __post_init__(self):
        fix = "Write Window(offset=-19, length=20) for the 20 steps that end at the anchor, Window() for all steps."
        if isinstance(self.offset, bool) or not hasattr(self.offset, "__index__"):
            raise type_error("Window.offset", got=repr(self.offset), wanted="an integer", fix=fix)
        offset = operator.index(self.offset)
        if abs(offset) > _MAX_INT32:
            raise value_error("Window.offset", got=offset, wanted=f"at most {_MAX_INT32} either way", fix=fix)
        object.__setattr__(self, "offset", offset)
        if self.length is None:
            if offset:
                raise value_error("Window.offset", got=offset, wanted="0 where length is None", fix=fix)
        else:
            object.__setattr__(self, "length", _integer("Window.length", self.length, 1, fix))
        if self.pad not in PADS:
            raise value_error("Window.pad", got=repr(self.pad), wanted=f"one of {PADS}", fix=fix)


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """A table of trajectories.

    Attributes:
      columns: any pytree of `ColumnSpec` (a dict, say).
      trajectory_length: T, the most steps a slot can hold.
      capacity: C, slots over all devices.

    Raises:
      TypeError, ValueError: for lengths that are not positive integers. The tree itself is checked by `make_replay`,
        which needs jax to walk it.
    """

    columns: Any
    trajectory_length: int
    capacity: int

    def __post_init__(self):
        fix = "Write TableSpec(columns={...}, trajectory_length=1000, capacity=2048)."
        for name in ("trajectory_length", "capacity"):
            object.__setattr__(self, name, _integer(f"TableSpec.{name}", getattr(self, name), 1, fix))
