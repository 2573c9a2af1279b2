"""The memory of a table's columns: whether it is there, and how it is taken."""

import contextlib
import math
import os
from typing import Any

import jax
import numpy as np

from gear_jax import _cuda, _host_memory, ops
from gear_jax._errors import message
from gear_jax.ops._place import default_device, host_sharding, memory_kind
from gear_jax.ops._registry import in_host_memory
from gear_jax.replay._config import Config
from gear_jax.replay._mesh import Placement
from gear_jax.replay._state import ReplayState, column_shapes

# The most that XLA's pool has page-locked for a table of this process, and keeps.
_locked = 0


def column_bytes(config: Config) -> list[int]:
    """The bytes of each column."""
    return [math.prod(x) * c.dtype.itemsize for x, c in zip(column_shapes(config), config.columns, strict=True)]


def problem(config: Config, placement: Placement | None = None) -> str | None:
    """Why the columns cannot be made, and what to do; None if they can. Starts the backend."""
    if memory_kind(config.memory) != "pinned_host":
        return None
    available = _host_memory.available()
    available = None if available is None else available + _locked
    return _host_memory.problem(_shard_bytes(config, placement), _devices(placement)[0].platform, os.environ, available)


def _devices(placement: Placement | None) -> list[Any]:
    """The devices of this process that hold columns."""
    return [default_device()] if placement is None else placement.local_devices


def _shard_bytes(config: Config, placement: Placement | None) -> list[int]:
    """The bytes of each array that this process makes."""
    n = 1 if placement is None else placement.devices
    return [x // n for x in column_bytes(config) for _ in _devices(placement)]


def make_columns(config: Config, placement: Placement | None = None) -> list[jax.Array]:
    """New columns, outside a program; over a mesh, this process makes the shards of its own devices.

    Raises:
      MemoryError: if the table does not fit XLA's pool of page-locked memory, or the host's memory.
      RuntimeError: if the device cannot reach host memory.
    """
    global _locked
    memory = memory_kind(config.memory)
    shapes = column_shapes(config)
    devices = _devices(placement)
    if memory != "pinned_host" or devices[0].platform == "cpu":
        return [ops.zeros(x, c.dtype, memory) for x, c in zip(shapes, config.columns, strict=True)]
    for device in devices:
        _check_device(device)
    why = problem(config, placement)
    if why:
        raise MemoryError(why)
    sizes, made = _shard_bytes(config, placement), {}
    pool = _host_memory.pool()
    n = 1 if placement is None else placement.devices
    for i in _host_memory.order(sizes, pool):
        column, device = divmod(i, len(devices))
        shape = (shapes[column][0] // n, *shapes[column][1:])
        with contextlib.nullcontext() if placement is None else jax.default_device(devices[device]):
            made[i] = _make(shape, config.columns[column].dtype, memory)
    _locked = max(_locked, _host_memory.locked(sizes, pool) or sum(sizes))
    whole = []
    for k, shape in enumerate(shapes):
        parts = [made[k * len(devices) + d] for d in range(len(devices))]
        whole.append(parts[0] if placement is None else _joined(shape, placement, parts))
    return whole


def _joined(shape: tuple[int, ...], placement: Placement, parts: list[jax.Array]) -> jax.Array:
    """The global array of the shards that this process has."""
    sharding = placement.sharding(placement.held, "pinned_host")
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def place(config: Config, placement: Placement | None, state: ReplayState) -> ReplayState:
    """The state with its columns in `pinned_host` where the table wants them there: see `Replay.place`."""
    leaves, tree = jax.tree.flatten(state.columns)
    if memory_kind(config.memory) != "pinned_host" or all(map(_in_host_memory, leaves)):
        return state
    to = host_sharding() if placement is None else placement.sharding(placement.held, "pinned_host")
    return state.replace(columns=tree.unflatten([x if _in_host_memory(x) else _moved(x, to) for x in leaves]))


def _in_host_memory(x: Any) -> bool:
    return isinstance(x, jax.Array) and in_host_memory(x)


def _moved(x: Any, to: jax.sharding.Sharding) -> jax.Array:
    if isinstance(x, jax.Array) and x.sharding.memory_kind == "pinned_host":
        # Lies there already, but its type says otherwise: so does `jax.make_array_from_callback` make it, and Orbax
        # with it. A program would then be compiled for the wrong memory. Another sharding and back sets the type.
        mesh = jax.sharding.Mesh(np.array(list(x.sharding.device_set)), ("one",))
        spec = jax.sharding.PartitionSpec()
        x = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec, memory_kind="pinned_host"))
    return jax.device_put(x, to)


def _make(shape, dtype, memory: str) -> jax.Array:
    """One column, there when this returns: the next one would otherwise be staged beside it."""
    try:
        return ops.zeros(shape, dtype, memory).block_until_ready()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        size, pool = math.prod(shape) * dtype.itemsize, _host_memory.pool()
        gib = -(-(pool.limit + 2 * size) // _host_memory.GIB)
        text = message(
            "page-locked memory", got=str(e).splitlines()[0],
            wanted=f"{_host_memory.human(size)} for a column, beside what this process holds in pinned_host",
            fix=f"Delete tables that are not needed any more, or set {_host_memory.LIMIT}={gib} before jax starts "
            "its backend, if the host has that much.",
        )  # fmt: skip
        raise MemoryError(text) from e


def _check_device(device: Any) -> None:
    driver = _cuda.library()
    if driver is None:
        return  # jax reaches its GPU by other means than an NVIDIA driver
    devices, ordinal = _cuda.devices(driver), device.local_hardware_id
    why = _cuda.host_memory_problem(devices[ordinal]) if 0 <= (ordinal or 0) < len(devices) else None
    if why:
        raise RuntimeError(why)
