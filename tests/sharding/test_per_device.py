"""The functions of one device, in a shard_map and in a pmap of one's own: the same as one table on one device."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gear_jax import selectors, sharding
from gear_jax.testing.ops import to_numpy

SELECTORS = [selectors.Uniform(), selectors.Prioritized(), selectors.TopK(), selectors.Permutation()]


def cut(tree, n):
    return jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), tree)


def join(tree):
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), to_numpy(tree))


@pytest.mark.parametrize(("selector", "n"), [*[(s, 8) for s in SELECTORS], (selectors.Prioritized(), 2)], ids=str)
def test_pmap(case, same, selector, n):
    case.mesh(n)
    wanted, last, stats = case.on_one_device(selector)
    replay = case.make(selector=selector)
    device = replay.per_device("i")
    devices = jax.devices()[:n]
    add = jax.pmap(device.add, axis_name="i", devices=devices)
    sample = jax.pmap(lambda s, k: device.sample(s, k, case.batch), axis_name="i", in_axes=(0, None), devices=devices)
    update = jax.pmap(device.update_priorities, axis_name="i", devices=devices)
    init = jax.pmap(lambda k, _: device.init(k), axis_name="i", in_axes=(None, 0), devices=devices)
    state, got = init(jax.random.key(0), np.arange(n)), []
    same(to_numpy(state), to_numpy(sharding.stack(replay.init(), n)))
    for i, rows, lengths, priorities in case.turns():
        given = [] if priorities is None else [cut(priorities, n)]
        state, handles = add(state, cut(rows, n), cut(lengths, n), *given)
        state, batch = sample(state, jax.random.key(i))
        state = update(state, batch.handles, batch.probability * 3)
        got.append((join(handles), join(batch)))
    same(got, wanted)
    whole = sharding.unstack(state)
    same(to_numpy(whole.replace(ticket=None)), last)
    assert replay.stats(whole) == stats


@pytest.mark.parametrize("exchange", ["peer", "collective"])
def test_shard_map(case, same, exchange):
    n, selector = 4, selectors.Prioritized()
    mesh = case.mesh(n)
    wanted, _, _ = case.on_one_device(selector)
    replay = case.make(mesh, selector=selector)
    device = replay.per_device("replay", exchange=exchange)
    specs = replay.placement.state(False, P())

    def turn(state, key, rows, lengths, priorities):
        state, handles = device.add(state, rows, lengths, priorities)
        state, batch = device.sample(state, key, case.batch)
        return device.update_priorities(state, batch.handles, batch.probability * 3), (handles, batch)

    held = P("replay")
    run = jax.jit(
        jax.shard_map(
            turn, mesh=mesh, in_specs=(specs, P(), held, held, held), out_specs=(specs, held), check_vma=False
        ),
        donate_argnums=0,
    )
    state, got = replay.init(), []
    for i, rows, lengths, priorities in case.turns():
        state, out = run(state, jax.random.key(i), rows, lengths, priorities)
        got.append(to_numpy(out))
    same(got, wanted)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_pmap_samples_columns_by_address(case, same, memory):
    """The way for columns that pmap does not take: they stay with the replay over the mesh, which adds to them."""
    n, selector = 4, selectors.Prioritized()
    memory = "pinned_host" if jax.default_backend() == "gpu" else memory
    wanted, last, stats = case.on_one_device(selector)
    replay = case.make(case.mesh(n), selector=selector, memory=memory)
    device, devices = replay.per_device("i"), jax.devices()[:n]
    sample = jax.pmap(lambda s, k: device.sample(s, k, case.batch), axis_name="i", in_axes=(0, None), devices=devices)
    update = jax.pmap(device.update_priorities, axis_name="i", devices=devices)
    state, got, columns = replay.init(), [], None
    for i, rows, lengths, priorities in case.turns():
        state, handles = replay.add(state, rows, lengths, priorities)
        index, columns = sharding.lend(state, columns)
        stacked, batch = sample(index.replace(columns=columns), jax.random.key(i))
        stacked = update(stacked, batch.handles, batch.probability * 3)
        state = sharding.take_back(state, stacked)
        got.append((to_numpy(handles), join(batch)))
    same(got, wanted)
    same(to_numpy(state.replace(ticket=None)), last)
    assert replay.stats(state) == stats


def test_steps_of_streams_wherever_they_are(case, same):
    """Each device gives steps for streams that others hold."""
    n, k = 4, 8
    case.mesh(n)
    replay = case.make(streams=8)
    device = replay.per_device("i")
    append = jax.pmap(device.append, axis_name="i", devices=jax.devices()[:n])
    state, stacked = replay.init(), sharding.stack(replay.init(), n)
    for i in range(6):
        streams = np.random.default_rng(i).permutation(9)[:k].astype(np.int32)  # 8 is none
        step = {"number": np.arange(k, dtype=np.int32) + 10 * i, "vector": np.full((k, 3), i, np.float32)}
        done = np.arange(k) % 3 == i % 3
        state, wanted = replay.append(state, streams, step, done)
        stacked, got = append(stacked, *cut((streams, step, done), n))
        same(join(got), to_numpy(wanted))
    same(to_numpy(sharding.unstack(stacked)), to_numpy(state))


def test_errors(case):
    mesh = case.mesh(8)
    replay = case.make(partitions=4)
    device = replay.per_device("replay")
    with pytest.raises(ValueError, match=r"partitions: got 4 over 8 devices, wanted a multiple of 8"):
        jax.shard_map(device.init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(jax.random.key(0))
    with pytest.raises(ValueError, match="exchange: got 'both', wanted one of"):
        replay.per_device("replay", exchange="both")
    with pytest.raises(ValueError, match="batch_axis: got 'x', wanted one of axis, "):
        device = replay.per_device("replay", "x")
        jax.shard_map(device.init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(jax.random.key(0))
    with pytest.raises(ValueError, match="stack: state: got 4 partitions or streams, wanted a multiple of n = 8"):
        sharding.stack(replay.init(), 8)
