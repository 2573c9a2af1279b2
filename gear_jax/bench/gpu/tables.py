"""Tables whose every value follows from its place, so that a batch is checked against NumPy without a second copy.

A value is a hash of (slot, step, cell, salt): 24 bits of it in a float32, all of it in other types. A cell is one value
of a step. The GPU writes tables and batches; NumPy forms the values that a batch should have.
"""

import ctypes
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax.bench.gpu.findings import Wrong

_CHECKED_BYTES = 8 << 20  # of a batch, in rows spread evenly over it
_COPIED_BYTES = 256 << 20  # a batch up to here is copied to the host as a whole, which compiles nothing


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shape of a table.

    Attributes:
      slots: S.
      steps: T.
      columns: name -> (cells of a step, dtype's name). A step is a vector of so many; 0 stands for a scalar.
      salt: tables and batches of another salt hold other values.
    """

    slots: int
    steps: int
    columns: Mapping[str, tuple[int, str]]
    salt: int = 0

    def step_bytes(self, names: tuple[str, ...] | None = None) -> int:
        """Bytes of a step in the columns `names` (None: in all)."""
        chosen = self.columns if names is None else names
        return sum(max(1, self.columns[n][0]) * np.dtype(self.columns[n][1]).itemsize for n in chosen)

    @property
    def size(self) -> int:
        """Bytes of the table."""
        return self.slots * self.steps * self.step_bytes()


def main_layout(slots: int, steps: int, cell_bytes: int) -> Layout:
    """One column of bytes."""
    return Layout(slots, steps, {"x": (cell_bytes, "uint8")})


def window_layout(slots: int, steps: int) -> Layout:
    """A Decision Transformer's columns: steps of 44, 12, 4 and 4 bytes."""
    columns = {"observation": (11, "float32"), "action": (3, "float32"), "reward": (0, "float32"), "time": (0, "int32")}
    return Layout(slots, steps, columns)


def _mix(slot, step, cell, salt: int):
    """uint32 arrays of one rank -> uint32: a hash in which every input bit counts (NumPy and JAX alike)."""
    u = np.uint32
    h = slot * u(0x9E3779B1) + step * u(0x85EBCA77) + cell * u(0xC2B2AE3D) + u(salt * 0x27D4EB2F & 0xFFFFFFFF)
    h = (h ^ (h >> u(16))) * u(0x7FEB352D)
    h = (h ^ (h >> u(15))) * u(0x846CA68B)
    return h ^ (h >> u(16))


def _cast(h, dtype: str, xp: Any):
    if dtype == "float32":
        return (h >> np.uint32(8)).astype(xp.float32)
    return h.astype(dtype)


def _values(layout: Layout, name: str, slot: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """The column's values at slots `uint32[*lead[:-1]]` and all steps, `[*lead, *cells]`; under jit."""
    cells, dtype = layout.columns[name]
    shape = (*lead, cells) if cells else lead
    spread = slot.reshape(*slot.shape, *[1] * (len(shape) - slot.ndim))
    step = jax.lax.broadcasted_iota(jnp.uint32, shape, len(lead) - 1)
    cell = jax.lax.broadcasted_iota(jnp.uint32, shape, len(lead)) if cells else jnp.zeros(shape, jnp.uint32)
    return _cast(_mix(jnp.broadcast_to(spread, shape), step, cell, layout.salt), dtype, jnp)


def make(layout: Layout, memory: str) -> dict[str, jax.Array]:
    """Columns `[1, S, T, *cells]` with their values, one program a column.

    Args:
      layout: the shape.
      memory: memory kind, "pinned_host" or "device".
    """
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=memory)
    lead = (1, layout.slots, layout.steps)

    def fill(name: str):
        values = _values(layout, name, jax.lax.broadcasted_iota(jnp.uint32, lead[:2], 1), lead)
        # Not by `out_shardings` alone: the array's type must say where it lies, or a call that aliases it is refused.
        return jax.device_put(values, jax.memory.Space.Host) if memory == "pinned_host" else values

    found = {}
    for name in layout.columns:
        # One at a time: what the GPU holds on the way is one column.
        found[name] = jax.block_until_ready(jax.jit(fill, static_argnums=0, out_shardings=sharding)(name))
    return found


def trajectories(layout: Layout, slots: jax.Array, names: tuple[str, ...] | None = None) -> dict[str, jax.Array]:
    """Whole trajectories `[A, T, *cells]` as slots `int32[A]` would hold them. Under jit."""
    lead = (slots.shape[0], layout.steps)
    return {n: _values(layout, n, slots.astype(jnp.uint32), lead) for n in names or layout.columns}


def expected(layout: Layout, name: str, slots: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """What a column holds at slots `int[R]` and steps `int[R, W]`: `[R, W, *cells]`, in NumPy."""
    cells, dtype = layout.columns[name]
    slot = slots.astype(np.uint32)[:, None, None]
    cell = np.arange(max(1, cells), dtype=np.uint32)[None, None]
    h = _cast(_mix(slot, steps.astype(np.uint32)[..., None], cell, layout.salt), dtype, np)
    return h if cells else h[..., 0]


def check(
    layout: Layout, data: Mapping[str, Any], slots: Any, starts: Any, windows: Mapping[str, Any], mask: Any = None
):
    """Compares a batch with NumPy: rows spread evenly over it, as many as `_CHECKED_BYTES` hold.

    Args:
      layout: the table's.
      data: name -> `[B, W, *cells]`.
      slots, starts: `int32[B]`.
      windows: name -> (offset, length); the windows lie inside the trajectories.
      mask: None, or name -> `bool[B, W]`, which must be True throughout.

    Raises:
      Wrong: naming column and row.
    """
    batch = len(slots)
    row_bytes = sum(windows[n][1] * layout.step_bytes((n,)) for n in data)
    rows = np.unique(np.linspace(0, batch - 1, min(batch, max(2, _CHECKED_BYTES // row_bytes))).astype(np.int32))
    slots, starts = np.asarray(slots)[rows], np.asarray(starts)[rows]
    for name, values in data.items():
        offset, length = windows[name]
        got = np.asarray(values)[rows] if values.nbytes <= _COPIED_BYTES else np.asarray(values[rows])
        want = expected(layout, name, slots, starts[:, None] + offset + np.arange(length)[None])
        if got.shape != want.shape or got.dtype != want.dtype:
            raise Wrong(f"column {name!r}: {got.dtype}{list(got.shape)}, wanted {want.dtype}{list(want.shape)}")
        wrong = (got != want).reshape(len(rows), -1).any(1)
        if wrong.any():
            raise Wrong(f"column {name!r}: {wrong.sum()} of {len(rows)} rows differ, the first is row {rows[wrong][0]}")
        if mask is not None and not np.asarray(mask[name]).all():
            raise Wrong(f"column {name!r}: the mask hides steps of a window that has no padding")


def pointer(column: jax.Array) -> int:
    """Where the column lies."""
    return column.addressable_shards[0].data.unsafe_buffer_pointer()


def host_view(column: jax.Array) -> np.ndarray:
    """A column in host memory as a NumPy array over the same memory; keep the column while it is used."""
    size = column.size * column.dtype.itemsize
    memory: Any = (ctypes.c_uint8 * size).from_address(pointer(column))
    return np.frombuffer(memory, column.dtype).reshape(column.shape)
