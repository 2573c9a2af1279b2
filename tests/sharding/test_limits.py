"""Trajectories that leave by themselves, the same on any number of devices, bit for bit; and through checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.selectors import Prioritized, Queue, Stack, Uniform
from gear_jax.testing.ops import to_numpy

OPTIONS = {"max_staleness": 1}
BATCH = 8


def play(case, replay, state=None):
    """Three turns of each call; returns what came back and the last state."""
    state, got = replay.init() if state is None else state, []
    for i, rows, lengths, priorities in case.turns():
        version = np.arange(case.rows, dtype=np.int32) % 3 + i - 2
        state, handles = replay.add(state, rows, lengths, priorities, version=version)
        state = replay.expire(state, i)
        for k in range(2):
            state, sample = replay.sample(state, jax.random.key(2 * i + k), BATCH)
            state = replay.update_priorities(state, sample.handles, sample.probability * 3)
            got.append(to_numpy((handles, sample)))
    return got, state


@pytest.fixture(scope="module")
def wanted(case):
    """wanted(selector) -> the same on one device: what came back, the last state, its statistics."""

    @functools.cache
    def run(selector):
        replay = case.make(selector=selector, **OPTIONS)
        got, state = play(case, replay)
        return got, to_numpy(state.replace(ticket=None, stamp=None)), replay.stats(state)

    return run


STRATIFIED = Prioritized(times=1, stratified=True)
SELECTORS = [Queue(1), Queue(3), Stack(2), Uniform(times=1), Prioritized(times=2), STRATIFIED]


# Each selector on all devices; every number of devices and every exchange with two of the selectors.
@pytest.mark.parametrize(
    ("selector", "n", "exchange"),
    [
        *[(selector, 8, "peer") for selector in SELECTORS],
        *[(Queue(1), n, exchange) for n, exchange in ((2, "rdma"), (4, "collective"), (8, "rdma"))],
        *[(Prioritized(times=2), n, exchange) for n, exchange in ((2, "collective"), (4, "peer"), (8, "rdma"))],
        (Uniform(times=1), 8, "collective"),
    ],
    ids=str,
)
def test_any_number_of_devices(case, same, wanted, selector, n, exchange):
    replay = case.make(case.mesh(n), selector=selector, exchange=exchange, **OPTIONS)
    got, state = play(case, replay)
    results, last, numbers = wanted(selector)
    same(got, results)
    same(to_numpy(state.replace(ticket=None, stamp=None)), last)
    assert replay.stats(state) == numbers
    assert numbers["used_up"] and numbers["expired"] and numbers["refused_stale"]
    gone = numbers["evicted"] + numbers["used_up"] + numbers["expired"]
    assert numbers["trajectories"] == numbers["inserted"] - gone


@pytest.mark.parametrize("selector", [Queue(1), Uniform(times=2)], ids=str)
def test_each_device_for_itself(case, selector):
    replay = case.make(case.mesh(4), selector=selector, selection="decentralized")
    state = replay.init()
    rows = {"number": np.ones((16, 5), np.int32), "vector": np.zeros((16, 5, 3), np.float32)}
    state, _ = replay.add(state, rows, np.full(16, 5, np.int32))
    drawn, i = [], 0
    while bool(replay.can_sample(state)):
        state, sample = replay.sample(state, jax.random.key(i), 8)
        slot, i = np.asarray(sample.handles.slot), i + 1
        drawn += slot[np.asarray(sample.valid)].tolist()
        assert i < 20
    _, counts = np.unique(drawn, return_counts=True)
    assert counts.tolist() == [selector.times] * 16


@pytest.mark.parametrize("n", [2, 8])
def test_stacked_for_pmap_and_back(case, same, n):
    case.mesh(n)  # skips where there are fewer devices
    replay = case.make(selector=Prioritized(times=2), **OPTIONS)
    own = replay.per_device("i")
    _, state = play(case, replay)
    stacked = gear.sharding.stack(state, np.int64(n))
    run = jax.pmap(lambda s, k: own.sample(own.expire(s, 3), k, BATCH), axis_name="i", in_axes=(0, None))
    after, sample = run(stacked, jax.random.key(9))
    state, wanted = replay.sample(replay.expire(state, 3), jax.random.key(9), BATCH)
    same(jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), sample), wanted)
    same(to_numpy(gear.sharding.unstack(after)), to_numpy(state))


def test_rows_added_by_devices_have_versions(case):
    case.mesh(4)  # skips where there are fewer devices
    replay = case.make(selector=Queue(), **OPTIONS)
    own = replay.per_device("i")
    rows = {"number": jnp.ones((4, 2, 5), jnp.int32), "vector": jnp.zeros((4, 2, 5, 3))}
    add = jax.pmap(lambda s, r, v: own.add(own.expire(s, 5), r, jnp.full((2,), 5, jnp.int32), None, v), axis_name="i")
    state, handles = add(gear.sharding.stack(replay.init(), 4), rows, jnp.arange(8, dtype=jnp.int32).reshape(4, 2))
    assert ((np.asarray(handles.slot).reshape(-1) >= 0) == (np.arange(8) >= 4)).all()
    assert replay.stats(gear.sharding.unstack(state))["refused_stale"] == 4


def test_saved_from_eight_devices_and_restored_on_two(case, same, tmp_path):
    selector = Prioritized(times=2)
    eight, two = (case.make(case.mesh(n), selector=selector, **OPTIONS) for n in (8, 2))
    _, state = play(case, eight)
    gear.checkpoint.save(tmp_path / "c", 1, state, eight)
    restored = gear.checkpoint.restore(tmp_path / "c", two)
    assert two.stats(restored) == eight.stats(state)
    same(*(play(case, r, s)[0] for r, s in ((eight, state), (two, restored))))


def test_a_checkpoint_of_other_limits_is_refused(case, tmp_path):
    replay = case.make(selector=Queue(2), **OPTIONS)
    gear.checkpoint.save(tmp_path / "c", 1, replay.init(), replay)
    with pytest.raises(ValueError, match=r"selector: got Queue\(times=2\), wanted Queue\(times=3\)"):
        gear.checkpoint.restore(tmp_path / "c", case.make(selector=Queue(3), **OPTIONS))
    with pytest.raises(ValueError, match=r"limits/current"):
        gear.checkpoint.restore(tmp_path / "c", case.make(selector=Queue(2)))


def test_lent_to_pmap_and_taken_back(case, same):
    replay = case.make(case.mesh(4), selector=Uniform(times=2), **OPTIONS)
    own = replay.per_device("i")
    state, other = (play(case, replay)[1] for _ in range(2))
    index, columns = gear.sharding.lend(state)

    def step(index, columns, key):
        state, batch = own.sample(own.expire(index.replace(columns=columns), 3), key, BATCH)
        return state.replace(columns=None), batch

    step = jax.pmap(step, axis_name="i", in_axes=(0, 0, None), donate_argnums=0, devices=jax.devices()[:4])
    index, batch = step(index, columns, jax.random.key(9))
    state = gear.sharding.take_back(state, index)
    other, wanted = replay.sample(replay.expire(other, 3), jax.random.key(9), BATCH)
    same(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch), wanted)
    same(state, other)
    assert replay.stats(state) == replay.stats(other)
