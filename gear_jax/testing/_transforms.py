"""The transformations of JAX, as ways to run a function of tables and rows on several of both."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax.ops._place import host_sharding
from gear_jax.ops._registry import in_host_memory

Tree = Any
# (the op as a function of tables and rows, tables, rows, memory of the tables) -> its results for each element of the
# batch, stacked, as NumPy arrays. Tables and rows are trees of NumPy arrays with a leading dimension K; "shared"
# transforms take tables without it.
Transform = Callable[[Callable[[Tree, Tree], Tree], Tree, Tree, str], Tree]


def place(tables: Tree, memory: str = "device") -> Tree:
    """Arrays on the default device, in a memory kind; of their own, so that they can be donated."""
    tables = jax.tree.map(jnp.array, tables)  # a NumPy array that goes to a CPU keeps its memory otherwise
    return tables if memory == "device" else jax.device_put(tables, host_sharding())


def to_numpy(tree: Tree) -> Tree:
    """NumPy copies of arrays, wherever they lie: a view of one in host memory would keep it from being donated."""

    def leaf(x):
        in_host = isinstance(x, jax.Array) and in_host_memory(x)
        return np.array(jax.device_put(x, jax.memory.Space.Device) if in_host else x)

    return jax.tree.map(leaf, tree)


def pick(tree: Tree, k: Any) -> Tree:
    """Element k of each leaf."""
    return jax.tree.map(lambda x: x[k], tree)


def batch_size(transform: str) -> int:
    """K, the batch of a transformation: 8, or one element for each device where each has one."""
    return min(8, jax.device_count()) if transform in ("shard_map", "pmap") else 8


def _size(rows: Tree) -> int:
    return jax.tree.leaves(rows)[0].shape[0]


def _numpy(tree: Tree) -> Tree:
    return jax.tree.map(np.asarray, tree)


def _split(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.reshape(2, x.shape[0] // 2, *x.shape[1:]), tree)


def _joined(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), _numpy(tree))


def _one_by_one(f, tables, rows, memory):
    results = [_numpy(f(place(pick(tables, k), memory), place(pick(rows, k)))) for k in range(_size(rows))]
    return jax.tree.map(lambda *x: np.stack(x), *results)


def _at_once(wrap) -> Transform:
    """Runs `wrap(f)` on all tables and rows."""

    def run(f, tables, rows, memory):
        return _numpy(wrap(f)(place(tables, memory), place(rows)))

    return run


def _scan(f, tables, rows, memory):
    run = jax.jit(lambda t, r: jax.lax.scan(lambda _, x: (None, f(*x)), None, (t, r))[1])
    return _numpy(run(place(tables, memory), place(rows)))


def _shared_scan(f, tables, rows, memory):
    run = jax.jit(lambda t, r: jax.lax.scan(lambda _, x: (None, f(t, x)), None, r)[1])
    return _numpy(run(place(tables, memory), place(rows)))


def _nested(f, tables, rows, memory):
    return _joined(jax.jit(jax.vmap(jax.vmap(f)))(place(_split(tables), memory), place(_split(rows))))


def _shared_nested(f, tables, rows, memory):
    run = jax.jit(jax.vmap(jax.vmap(f, in_axes=(None, 0)), in_axes=(None, 0)))
    return _joined(run(place(tables, memory), place(_split(rows))))


def _cond(f, tables, rows, memory):
    return _one_by_one(jax.jit(lambda t, r: jax.lax.cond(_size(r) > 0, f, f, t, r)), tables, rows, memory)


def _shard_map(f, tables, rows, memory):
    """Each device gets its element as its part of the first dimension: nothing is taken apart on a device."""
    k = _size(rows)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:k]), ("x",))
    spec = jax.sharding.PartitionSpec("x")

    def spread(tree, memory_kind):
        sharding = jax.sharding.NamedSharding(mesh, spec, memory_kind=memory_kind)
        return jax.tree.map(lambda x: jax.device_put(x.reshape(k * x.shape[1], *x.shape[2:]), sharding), tree)

    run = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    got = _numpy(run(spread(tables, memory), spread(rows, "device")))
    return jax.tree.map(lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]), got)


# With one table for each element of the batch.
TRANSFORMS: dict[str, Transform] = {
    "eager": _one_by_one,
    "jit": lambda f, t, r, memory: _one_by_one(jax.jit(f), t, r, memory),
    "vmap": _at_once(lambda f: jax.jit(jax.vmap(f))),
    "eager_vmap": _at_once(jax.vmap),
    "nested_vmap": _nested,
    "scan": _scan,
    "cond": _cond,
    "shard_map": _shard_map,
    "pmap": _at_once(jax.pmap),
    "vmap_of_jit": _at_once(lambda f: jax.vmap(jax.jit(f))),
}
# With one table for all of them.
SHARED_TRANSFORMS: dict[str, Transform] = {
    "shared_vmap": _at_once(lambda f: jax.jit(jax.vmap(f, in_axes=(None, 0)))),
    "shared_nested_vmap": _shared_nested,
    "shared_scan": _shared_scan,
}
NOT_PINNED = ("scan", "pmap")
"""Transforms for the device's memory alone: scan takes the tables of its elements out of one array, which a GPU cannot
do in the host's memory, and `jax.pmap` refuses arguments that lie there."""
