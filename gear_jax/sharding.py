"""Tables over several devices and processes: what goes beside `make_replay(mesh=...)`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gear_jax import external
from gear_jax._errors import type_error, value_error
from gear_jax._numbers import is_integer
from gear_jax.ops import Addresses
from gear_jax.ops._registry import int32_where_it_is
from gear_jax.replay import Replay, ReplayState
from gear_jax.replay._calls import check_alive
from gear_jax.replay._mesh import Placement

__all__ = ["lend", "process_rows", "stack", "take_back", "unstack"]


def stack(state: ReplayState, n: int) -> ReplayState:
    """The states of n devices, stacked, for `jax.pmap` over `Replay.per_device`.

    Args:
      state: of the whole table, P partitions; on one device, or over a mesh of n. Its columns may be `Addresses` of n
        shards (`gear_jax.external.addresses` of columns over a mesh), which stay what they are; arrays are copied.
      n: devices; must divide P and N.

    Returns:
      Leaves `[n, P / n, ...]`; `[n, ...]` of what every device has. Of a state over a mesh of n devices each has its
      own already; give pmap the same ones in the same order (`jax.pmap(..., devices=list(mesh.devices.flat))`).

    Raises:
      ValueError: if n does not divide P or N.
    """
    if not is_integer(n) or n < 1:
        raise value_error("stack: n", got=repr(n), wanted="an integer from 1 on", fix="Pass the number of devices.")
    if not isinstance(state, ReplayState):
        fix = "Pass what replay.init or another call returned."
        raise type_error("stack: state", got=type(state).__name__, wanted="a ReplayState", fix=fix)
    devices = _holders(state)
    if len(devices) not in (0, 1, n):
        raise value_error(
            "stack: state", got=f"one over a mesh of {len(devices)} devices", wanted=f"one of 1 device, or of {n}",
            fix=f"Write stack(state, {len(devices)}), or restore a checkpoint of it over another mesh.",
        )  # fmt: skip
    if len(devices) == n and isinstance(state.length.sharding, NamedSharding):
        return _placed(devices, _selects_apart(state))(state)
    return _stack(state, n, apart=False)


def unstack(stacked: ReplayState) -> ReplayState:
    """The state of the whole table, of a replay without a mesh, out of those of n devices: the opposite of `stack`.

    For a replay over a mesh, `lend` and `take_back`. Columns that are `Addresses` stay: put the columns themselves in
    their place, `unstack(stacked).replace(columns=state.columns)`.

    Raises:
      TypeError, ValueError: for what are no stacked states.
    """
    _check_stacked("unstack: stacked", stacked)
    return _unstack(stacked, apart=False).replace(ticket=jnp.zeros((1,), jnp.int32))


def lend(state: ReplayState, columns: Any = None) -> tuple[ReplayState, Any]:
    """A state as pmapped programs take it that read its columns by address; the columns stay where they are.

        index, columns = lend(state)
        index, ... = step(index, columns, ...)  # jax.pmap(..., donate_argnums=0); as often as you like
        state, handles = replay.add(take_back(state, index), ...)
        index, columns = lend(state, columns)

    In the step, `index.replace(columns=columns)` is the state that the functions of `Replay.per_device` take; return it
    `.replace(columns=None)`. Till `take_back` nothing else may be done with the state.

    Args:
      state: of a replay over a mesh of n devices; outside jit. On a GPU its columns lie in `pinned_host`.
      columns: those of the last `lend`, where `Replay.add` or `append` have written the columns in place since: they
        are renewed (`gear_jax.external.renew`), and nobody waits. None: the first time.

    Returns:
      The states of n devices, stacked, without columns; and the columns' tree of `Addresses`, of n shards.

    Raises:
      TypeError, ValueError: as `gear_jax.external.addresses` and `renew`; for a table over several processes, or one of
        which a mesh has copies.
    """
    devices = _holders(state)
    if len({device.process_index for device in devices}) > 1:
        raise value_error(
            "lend: state", got="a table over several processes", wanted="one over the devices of this process",
            fix="Use jax.jit, or jax.shard_map over the mesh: they take the columns themselves.",
        )  # fmt: skip
    copies = len(state.length.sharding.device_set) // len(devices)
    if copies > 1:
        raise value_error(
            "lend: state", got=f"a table of which there are {copies} copies", wanted="one over all axes of its mesh",
            fix="Name all of them in make_replay(axis=...).",
        )  # fmt: skip
    if columns is None:
        columns = jax.tree.map(lambda x: _of_shards(external.addresses(x), devices), state.columns)
    else:
        columns = jax.tree.map(external.renew, columns, state.columns, is_leaf=_is_addresses)
    return stack(state.replace(columns=None), state.ticket.shape[0]), columns


def take_back(state: ReplayState, index: ReplayState) -> ReplayState:
    """The state after pmapped programs: the opposite of `lend`.

    Args:
      state: the one that was lent.
      index: what the last of the programs returned.

    Returns:
      The next state, with the columns of the one that was lent, and lying as that does.
    """
    if not isinstance(state, ReplayState):
        fix = "Pass what lend was given."
        raise type_error("take_back: state", got=type(state).__name__, wanted="a ReplayState", fix=fix)
    _check_stacked("take_back: index", index)
    check_alive("take_back", state)
    check_alive("take_back", index)
    shardings = jax.tree.map(lambda x: x.sharding, state.replace(columns=None))
    leaves, tree = jax.tree.flatten(shardings)
    join = _joined(tree, tuple(leaves), _selects_apart(state))
    return join(index.replace(columns=None)).replace(columns=state.columns)


def _check_stacked(what: str, stacked: Any) -> None:
    if not isinstance(stacked, ReplayState):
        fix = "Pass what stack or lend gave, or a pmapped program."
        raise type_error(what, got=type(stacked).__name__, wanted="a ReplayState", fix=fix)
    if stacked.ticket.ndim != 2:
        got, fix = "the state of one device", "Pass what stack or lend gave, or a pmapped program."
        raise value_error(what, got=got, wanted="the states of n devices, stacked", fix=fix)


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
    lengths = np.asarray(int32_where_it_is("lengths", np.asarray(lengths)))
    a = int(lengths.shape[0])
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


def _of_shards(x: Addresses, devices: tuple[Any, ...]) -> Addresses:
    """`uint32[n, 4]`, where pmap takes them."""
    return dataclasses.replace(x, words=jax.device_put(jnp.reshape(x.words, (len(devices), -1)), _mapped(devices)))


def _mapped(devices: tuple[Any, ...]) -> NamedSharding:
    """Of what `jax.pmap` over `devices` maps over."""
    return NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec("devices"))


def _holders(state: ReplayState) -> tuple[Any, ...]:
    """The devices that hold a state, in the order of their partitions; none in a program."""
    x = state.length
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return ()
    first = {}
    for device, (rows, *_) in x.sharding.devices_indices_map(x.shape).items():
        first.setdefault(rows.start or 0, device)
    return tuple(first[start] for start in sorted(first))


def _selects_apart(state: ReplayState) -> bool:
    """Whether each device of a state over a mesh has a selector's state of its own."""
    return any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(state.selector))


@functools.lru_cache(maxsize=16)
def _placed(devices: tuple[Any, ...], apart: bool) -> Callable[[ReplayState], ReplayState]:
    """`stack`, compiled: each device gets what pmap will have it take."""
    return jax.jit(functools.partial(_stack, n=len(devices), apart=apart), out_shardings=_mapped(devices))


@functools.lru_cache(maxsize=16)
def _joined(tree: Any, shardings: tuple[Any, ...], apart: bool) -> Callable[[ReplayState], ReplayState]:
    """`unstack` for a mesh, compiled: the result lies as `shardings` say."""
    return jax.jit(functools.partial(_unstack, apart=apart), out_shardings=tree.unflatten(shardings))


def _stack(state: ReplayState, n: int, apart: bool) -> ReplayState:
    """`apart`: the selector's state is that of each device already."""

    def cut(x):
        if x.shape[0] % n:
            got = f"{x.shape[0]} partitions or streams"
            raise value_error("stack: state", got=got, wanted=f"a multiple of n = {n}", fix="Pass a divisor.")
        return jnp.reshape(x, (n, x.shape[0] // n, *x.shape[1:]))

    def repeat(x):
        return jnp.broadcast_to(x[None], (n, *x.shape))

    return _by_field(state, cut, repeat, cut if apart else repeat).replace(ticket=jnp.zeros((n, 1), jnp.int32))


def _unstack(stacked: ReplayState, apart: bool) -> ReplayState:
    """The opposite, with a ticket for each device."""

    def join(x):
        return jnp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))

    def first(x):
        return x[0]

    return _by_field(stacked, join, first, join if apart else first).replace(ticket=join(stacked.ticket))


def _by_field(state: ReplayState, held: Callable, whole: Callable, selector: Callable) -> ReplayState:
    """Maps what is cut along the partitions or streams, what every device has, and the selector's state."""
    fields = {}
    for name in state.__dataclass_fields__:
        if name == "ticket":  # each device has its own, always 0
            continue
        function = {"max_priority": whole, "clock": whole, "selector": selector}.get(name, held)
        fields[name] = jax.tree.map(
            lambda x, f=function: x if isinstance(x, Addresses) else f(x), getattr(state, name), is_leaf=_is_addresses
        )
    return state.replace(**fields)
