"""A state in parts, one for each device, as a checkpoint holds it; and back, over any number of devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax._checkpoint._rows import Shard
from gear_jax.replay import Replay, ReplayState
from gear_jax.replay._mesh import Placement

# What every device has. The rest of the index is cut along the partitions, or the streams.
_WHOLE = ("max_priority", "clock")


def index_arrays(state: ReplayState) -> dict[str, Any]:
    """The arrays of an index by name. The ticket, always 0, is none of them: there is one for each device. Nor is what
    other processes read: `Replay.connect` makes it anew."""
    leaves = jax.tree.leaves_with_path(state.replace(columns=None, ticket=None, stamp=None, remote=None))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def is_cut(replay: Replay, name: str) -> bool:
    """Whether the devices hold parts of an array of the index, and not all of it."""
    if name.split("/")[0] == "selector":
        return replay.placement is not None and replay.config.selection == "decentralized"
    return name not in _WHOLE


def take(replay: Replay, state: ReplayState) -> tuple[list[Shard], dict[str, np.ndarray]]:
    """What this process is to write: the parts of its devices, and copies of what every device has, by name.

    Of devices that hold the same, one writes it.
    """
    config, placement = replay.config, replay.placement
    columns, parts, whole = {}, {}, {}
    for name, x in index_arrays(state).items():
        if not is_cut(replay, name):
            whole[name] = _host(x if placement is None else _shards(x, placement, all_have=True)[0][1])
            continue
        total = x.shape[0]
        for start, part in _shards(x, placement):
            first = start * config.partitions // total
            parts.setdefault(first, {})[name] = _host(part)
    for x in jax.tree.leaves(state.columns):
        for start, part in _shards(x, placement):
            columns.setdefault(start, []).append(part)
    return [Shard(a, a + parts[a]["length"].shape[0], columns[a], parts[a]) for a in sorted(parts)], whole


def give(replay: Replay, state: ReplayState, read: Callable[[str, int, int], np.ndarray]) -> ReplayState:
    """A state with an index that is read.

    Args:
      replay: what the state is for.
      state: without columns; its arrays say where the new ones go.
      read: gives the rows [start, stop) of an array by name; all of one that is not cut.
    """
    placement = replay.placement
    names = list(index_arrays(state))
    leaves, tree = jax.tree.flatten(state.replace(ticket=None, stamp=None, remote=None))
    restored = []
    for name, x in zip(names, leaves, strict=True):
        size = x.shape[0] if x.ndim else 0
        if placement is None:
            restored.append(jax.device_put(read(name, 0, size), x.sharding))
        elif not is_cut(replay, name):
            everything = read(name, 0, size)
            restored.append(jax.make_array_from_callback(x.shape, x.sharding, lambda i, x=everything: np.asarray(x[i])))
        else:

            def part(at: Any, name: str = name, size: int = size) -> np.ndarray:
                start, stop, _ = at[0].indices(size)
                return read(name, start, stop)

            restored.append(jax.make_array_from_callback(x.shape, x.sharding, part))
    return tree.unflatten(restored).replace(ticket=state.ticket, stamp=state.stamp, remote=state.remote)


def _shards(x: Any, placement: Placement | None, all_have: bool = False) -> list[tuple[int, Any]]:
    """The parts of an array that this process answers for, each with the row that it begins at."""
    if placement is None:
        return [(0, x)]
    memory = x.sharding.memory_kind if isinstance(x, jax.Array) else None
    wanted = placement.sharding(jax.sharding.PartitionSpec() if all_have else placement.held, memory)
    if not isinstance(x, jax.Array) or not x.sharding.is_equivalent_to(wanted, x.ndim):
        x = jax.device_put(x, wanted)  # a program of the user's may have left it elsewhere
    if all_have:
        return [(0, x.addressable_shards[0].data)]
    return [(s.index[0].start or 0, on_device(s)) for s in x.addressable_shards if s.replica_id == 0]


def on_device(shard: Any) -> jax.Array:
    """A device's part of a global array, as an array of that device; the same memory."""
    x = shard.data
    if x.sharding.memory_kind == "pinned_host":
        # Its type does not say so, and a program would be compiled for the device's memory. Another sharding and back
        # sets the type.
        one = jax.sharding.Mesh(np.array([shard.device]), ("one",))
        spec = jax.sharding.PartitionSpec()
        there = jax.device_put(x, jax.sharding.NamedSharding(one, spec, memory_kind="pinned_host"))
        x = jax.device_put(there, x.sharding)
    return x


def _host(x: Any) -> np.ndarray:
    """A copy. A view of the array itself would keep it from being donated."""
    return np.array(x) if isinstance(x, np.ndarray) else np.asarray(_copy(x))


@jax.jit
def _copy(x: jax.Array) -> jax.Array:
    return jnp.copy(x)
