"""Columns by address for pmapped programs: a state is lent, changed, taken back, and goes on as if it had not left."""

import jax
import numpy as np
import pytest

from gear_jax import make_replay, selectors, sharding
from gear_jax.testing.ops import to_numpy


def pointers(columns):
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(columns) for shard in x.addressable_shards]


@pytest.mark.parametrize(
    ("shape", "selector", "selection"),
    [
        ((8,), selectors.Prioritized(), "centralized"),
        ((8,), selectors.Permutation(), "decentralized"),
        ((4, 2), selectors.Permutation(), "centralized"),
        ((4, 2), selectors.Prioritized(), "decentralized"),
        ((1,), selectors.Prioritized(), "centralized"),
        ((1,), selectors.Permutation(), "decentralized"),
    ],
    ids=str,
)
def test_the_way_there_and_back(case, same, shape, selector, selection):
    """As with the replay's own functions, in place, and compiled once; streams, and any mesh, go along."""
    n, names = int(np.prod(shape)), ("a", "b")[: len(shape)]
    mesh = case.mesh(n, names, shape)
    memory = "pinned_host" if jax.default_backend() == "gpu" else None
    replay = case.make(mesh, names, selector=selector, selection=selection, streams=8, memory=memory)
    device, traces = replay.per_device("i"), []

    def step(index, columns, key):
        traces.append(1)
        state, batch = device.sample(index.replace(columns=columns), key, case.batch)
        state = device.update_priorities(state, batch.handles, batch.probability * 3)
        return state.replace(columns=None), batch

    step = jax.pmap(step, axis_name="i", in_axes=(0, 0, None), donate_argnums=0, devices=list(mesh.devices.flat))
    state, other, columns = replay.init(), replay.init(), None
    where, lies = pointers(state.columns), jax.tree.map(lambda x: x.sharding, state)

    def insert(state, rows, lengths, priorities):
        state, _ = replay.add(state, rows, lengths, priorities)
        return replay.append(state, np.arange(8), jax.tree.map(lambda x: x[:8, 0], rows), np.arange(8) % 2 == 0)[0]

    for i, *rows in case.turns():
        state, other = insert(state, *rows), insert(other, *rows)
        index, columns = sharding.lend(state, columns)
        index, batch = step(index, columns, jax.random.key(i))
        state = sharding.take_back(state, index)
        other, wanted = replay.sample(other, jax.random.key(i), case.batch)
        other = replay.update_priorities(other, wanted.handles, wanted.probability * 3)
        if len(shape) == 1:  # else the twin's batch is cut along one axis alone
            same(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch), wanted)
        assert pointers(state.columns) == where
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, lies))
    assert len(traces) == 1
    same(state, other)
    assert replay.stats(state) == replay.stats(other)


def test_what_was_lent_is_not_written_meanwhile(case):
    """Addresses that were not renewed after an insertion are refused, and so are those of another state."""
    replay = case.make(case.mesh(4), memory="pinned_host")
    rows, lengths = next((rows, lengths) for _, rows, lengths, _ in case.turns())
    state = replay.init()
    index, columns = sharding.lend(state)
    state = sharding.take_back(state, index)
    state, _ = replay.add(state, rows, lengths)
    with pytest.raises(ValueError, match="those of an array that was deleted or donated"):
        jax.pmap(lambda index, columns: index.length, devices=jax.devices()[:4])(index, columns)
    with pytest.raises(ValueError, match="lend: state: got a table of which there are 2 copies"):
        sharding.lend(case.make(case.mesh(4, ("a", "b"), (2, 2)), "a").init())
    with pytest.raises(ValueError, match="renew: array: got one that lies elsewhere"):
        sharding.lend(replay.init(), columns)
    index, columns = sharding.lend(state, columns)
    jax.pmap(lambda index, columns: index.length, devices=jax.devices()[:4])(index, columns)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_explicit_axes(case, same, memory):
    """A mesh as `jax.make_mesh` makes it, whose types say how arrays lie: the same, whatever way arguments lie."""
    case.mesh(8)
    wanted, last, stats = case.on_one_device(selectors.Prioritized())
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    assert jax.sharding.AxisType.Explicit in mesh.axis_types
    options = {"mesh": mesh, "axis": ("data", "model"), "partitions": 8, "memory": memory, "windows": case.windows}
    replay = make_replay(case.table, selectors.Prioritized(), **options)
    got, state = case.play(replay)
    same(got, wanted)
    same(to_numpy(state.replace(ticket=None)), last)
    assert replay.stats(state) == stats

    @jax.jit
    def step(state, key):
        state, batch = replay.sample(state, key, case.batch)
        assert jax.typeof(batch.data["vector"]).sharding.spec[0] == "data"
        return replay.update_priorities(state, batch.handles, 1 / (1 + batch.probability)), batch.handles

    state, handles = step(state, jax.random.key(0))
    assert (np.asarray(handles.slot) >= 0).all()
