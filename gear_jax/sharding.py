"""Tables over several devices and processes: what goes beside `make_replay(mesh=...)`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax._errors import type_error, value_error
from gear_jax.ops import Addresses
from gear_jax.replay import Replay, ReplayState
from gear_jax.replay._mesh import Placement

__all__ = ["process_rows", "stack", "unstack"]

# What is not cut along the partitions or the streams: every device has it.
_WHOLE = ("max_priority", "clock", "selector")


def stack(state: ReplayState, n: int) -> ReplayState:
    """The states of n devices, stacked, for `jax.pmap` over `Replay.per_device`.

    Args:
      state: of the whole table, P partitions; on one device, or over a mesh of n. Its columns may be `Addresses` of n
        shards (`gear_jax.external.addresses` of columns over a mesh), which stay what they are.
      n: devices; must divide P and N.

    Returns:
      Leaves `[n, P / n, ...]`; `[n, ...]` of what every device has.

    Raises:
      ValueError: if n does not divide P or N.
    """

    def cut(x):
        if x.shape[0] % n:
            got = f"{x.shape[0]} partitions or streams"
            raise value_error("stack: state", got=got, wanted=f"a multiple of n = {n}", fix="Pass a divisor.")
        return jnp.reshape(x, (n, x.shape[0] // n, *x.shape[1:]))

    def columns(x):
        return jax.tree.map(lambda c: c if isinstance(c, Addresses) else cut(c), x, is_leaf=_is_addresses)

    ticket = jnp.zeros((n, 1), jnp.int32)
    repeat = lambda x: jnp.broadcast_to(x[None], (n, *x.shape))  # noqa: E731
    return _by_field(state, columns, cut, repeat).replace(ticket=ticket)


def unstack(stacked: ReplayState) -> ReplayState:
    """The state of the whole table out of those of its n devices: the opposite of `stack`.

    Columns that are `Addresses` stay: put the columns themselves in their place,
    `unstack(stacked).replace(columns=state.columns)`.
    """

    def join(x):
        return jnp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))

    def columns(x):
        return jax.tree.map(lambda c: c if isinstance(c, Addresses) else join(c), x, is_leaf=_is_addresses)

    return _by_field(stacked, columns, join, lambda x: x[0]).replace(ticket=jnp.zeros((1,), jnp.int32))


def process_rows(replay: Replay, trajectories: Any, lengths: Any, priorities: Any = None, rows: int | None = None):
    """The rows that this process adds, as part of the global arrays that `Replay.add` takes. Nothing is sent.

    All processes call it, each with what it has, and then `add` with what it returns. A process with fewer than `rows`,
    or none, still takes part: what is missing has length 0.

    Args:
      replay: over a mesh.
      trajectories: a tree like the columns of NumPy arrays, leaves `[a, T', *shape]`, T' the same on all processes.
      lengths: `int32[a]`.
      priorities: `float32[a]`, or None on all processes.
      rows: how many rows each process has room for, the same on all of them; None: a, which then must be. A multiple of
        the process's devices.

    Returns:
      (trajectories, lengths, priorities) of A = rows * processes rows; those of one process go to its own devices.

    Raises:
      ValueError: without a mesh, for more rows than `rows`, if the process's devices do not divide them, or if another
        process holds copies of this one's partitions (the axis that they differ in is not one of the table's).
    """
    placement = replay.placement
    if placement is None:
        raise value_error(
            "process_rows: replay", got="one without a mesh", wanted="make_replay(..., mesh=mesh)",
            fix="Give the rows to add as they are.",
        )  # fmt: skip
    lengths = np.asarray(lengths)
    a = lengths.shape[0]
    room = a if rows is None else rows
    sharding = placement.sharding(placement.held)
    devices = _places(placement, sharding)
    if room % devices:
        raise value_error(
            "process_rows: rows", got=room, wanted=f"a multiple of this process's {devices} devices",
            fix=f"Use rows={-(-room // devices) * devices}.",
        )  # fmt: skip
    if a > room:
        fix = "Raise rows on all processes, or add in several calls."
        raise value_error("process_rows: lengths", got=f"{a} rows", wanted=f"at most rows = {room}", fix=fix)

    def whole(x):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            raise type_error(
                "process_rows", got="a global array", wanted="the rows of this process", fix="Pass it to add as it is."
            )
        x = np.asarray(x)
        if x.shape[:1] != (a,):
            wanted = f"[{a}, ...], as lengths"
            raise value_error("process_rows", got=f"shape {x.shape}", wanted=wanted, fix="Match them.")
        x = np.concatenate([x, np.zeros((room - a, *x.shape[1:]), x.dtype)]) if room > a else x
        return jax.make_array_from_process_local_data(sharding, x)

    lengths = lengths.astype(np.int32) if np.issubdtype(lengths.dtype, np.integer) else lengths
    return jax.tree.map(whole, trajectories), whole(lengths), None if priorities is None else whole(priorities)


def _places(placement: Placement, sharding: jax.sharding.NamedSharding) -> int:
    """Over how many devices the rows of this process go."""
    places: dict[int, set[int]] = {}
    for device, (at,) in sharding.devices_indices_map((placement.devices,)).items():
        places.setdefault(device.process_index, set()).add(at.start or 0)
    mine = places.pop(jax.process_index(), set())
    copies = sorted(p for p, held in places.items() if held & mine)
    if copies or not mine:
        got = f"process(es) {copies} with copies of this one's partitions" if mine else "a mesh without this process"
        raise value_error(
            "process_rows: replay", got=got, wanted="a table of which each process holds a part of its own",
            fix=f"Write make_replay(..., axis={tuple(placement.mesh.shape)}), or give all the same global rows to add.",
        )  # fmt: skip
    return len(mine)


def _is_addresses(x: Any) -> bool:
    return isinstance(x, Addresses)


def _by_field(state: ReplayState, columns: Callable, held: Callable, whole: Callable) -> ReplayState:
    fields = {}
    for name in state.__dataclass_fields__:
        x = getattr(state, name)
        if name == "ticket":  # each device has its own, always 0
            continue
        fields[name] = columns(x) if name == "columns" else jax.tree.map(whole if name in _WHOLE else held, x)
    return state.replace(**fields)
