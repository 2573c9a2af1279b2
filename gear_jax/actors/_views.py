"""The ring's memory as arrays of the device that the table is on, which reads it where it is.

For a GPU it is page-locked, all of it at once, until the arrays are given up.
"""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np

from gear_jax import external
from gear_jax._errors import type_error, value_error
from gear_jax.actors._ring import Ring
from gear_jax.ops._place import default_device
from gear_jax.replay import Replay

_COPY = "Pass copy=True: each trajectory is then copied once more, by NumPy"


def check_place(replay: Replay) -> None:
    """Raises a ValueError if a table is not on one device that can read a ring's memory."""
    platform = default_device().platform
    where = f"on {platform}" if replay.placement is None else "over a mesh"
    if where not in ("on cpu", "on gpu"):
        wanted = "one on a single device, a CPU or a GPU"
        raise value_error("Ingest: replay", got=f"a table {where}", wanted=wanted, fix=f"{_COPY}.")


def arrays(ring: Ring) -> tuple[contextlib.ExitStack, dict[str, jax.Array]]:
    """The columns of a ring by their paths, `[R, T, *shape]`, on the default device; closing the stack gives them up.

    Raises:
      ImportError, MemoryError, RuntimeError: for a GPU, without CuPy, and if the memory cannot be page-locked.
      TypeError: for a GPU, for a dtype that CuPy does not have.
    """
    memory = ring.held.bytes()
    found = {}
    with contextlib.ExitStack() as stack:
        for name, column in zip(ring.names, ring.columns, strict=True):
            offset = column.ctypes.data - memory.ctypes.data
            with _alternative(name, column.dtype):
                # The buffer is the whole ring for each column, so that they share one lock.
                table = external.from_buffer(memory, column.shape, column.dtype, offset=offset)
                found[name] = stack.enter_context(table).array
        return stack.pop_all(), found


@contextlib.contextmanager
def _alternative(name: str, dtype: np.dtype) -> Iterator[None]:
    """Errors say that there is a way without page-locked memory."""
    try:
        yield
    except TypeError as e:
        raise type_error(
            f"Ingest: column {name!r}", got=f"{dtype}, which CuPy hands to no other library", fix=f"{_COPY}.",
            wanted="bool, integers, float16, float32, float64 or complex numbers, for a GPU to read them in the ring",
        ) from e  # fmt: skip
    except (ImportError, MemoryError, RuntimeError) as e:
        kind = next(k for k in (ImportError, MemoryError, RuntimeError) if isinstance(e, k))
        raise kind(f"{e} Or leave the ring's memory as it is. {_COPY}.") from e
