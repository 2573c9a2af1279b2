"""The same table on any number of devices: the same handles, batches, weights, states and statistics, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gear_jax as gear
from gear_jax import selectors
from gear_jax.testing.ops import to_numpy

SELECTORS = [
    selectors.Uniform(),
    selectors.Prioritized(),
    selectors.Prioritized(alpha=1.0, beta=1.0, stratified=True),
    selectors.TopK(),
    selectors.LowestPriority(),
    selectors.Fifo(),
    selectors.Lifo(),
    selectors.Permutation(),
]


def check(case, same, replay, selector, **options):
    wanted, last, stats = case.on_one_device(selector, **options)
    got, state = case.play(replay)
    same(got, wanted)
    same(to_numpy(state.replace(ticket=None, stamp=None)), last)
    assert replay.stats(state) == stats
    assert bool(replay.can_sample(state))


@pytest.mark.parametrize(
    ("selector", "n", "exchange"),
    [
        *[(selector, 8, "peer") for selector in SELECTORS],
        *[(selector, 2, "collective") for selector in SELECTORS[1::2]],
        *[(selectors.Prioritized(), 4, exchange) for exchange in ("peer", "collective", "rdma")],
        (selectors.Prioritized(), 1, "peer"),
        (selectors.Permutation(), 8, "rdma"),
    ],
    ids=str,
)
def test_any_number_of_devices(case, same, selector, n, exchange):
    check(case, same, case.make(case.mesh(n), selector=selector, exchange=exchange), selector)


@pytest.mark.parametrize(
    ("shape", "batch_axis", "exchange"),
    [
        ((2, 4), "data", "peer"), ((4, 2), "model", "peer"), ((2, 4), "model", "collective"),
        ((4, 2), "data", "collective"), ((2, 4), "data", "rdma"), ((2, 4), "model", "rdma"),
    ],
    ids=str,
)  # fmt: skip
def test_two_axes_hold_the_table_and_one_cuts_the_batch(case, same, shape, batch_axis, exchange):
    mesh, selector = case.mesh(8, ("data", "model"), shape), selectors.Prioritized()
    replay = case.make(mesh, ("data", "model"), selector=selector, exchange=exchange, batch_axis=batch_axis)
    check(case, same, replay, selector)
    state, sample = replay.sample(case.play(replay)[1], jax.random.key(0), case.batch)
    assert sample.data["vector"].sharding.spec == P(batch_axis)
    # No two devices hold the same trajectory.
    assert {s.replica_id for s in state.columns["vector"].addressable_shards} == {0}


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_an_axis_that_is_not_named_holds_copies(case, same, memory):
    replay = case.make(case.mesh(8, ("other", "replay"), (2, 4)), memory=memory)
    assert replay.exchange == "peer" or memory == "device"
    check(case, same, replay, selectors.Prioritized())


def test_eviction_by_rank_is_the_same_everywhere(case, same):
    options = {"eviction": selectors.LowestPriority()}
    replay = case.make(case.mesh(4), selector=selectors.Uniform(), **options)
    check(case, same, replay, selectors.Uniform(), **options)


def test_the_numbers_of_partitions_by_default(case):
    assert gear.make_replay(case.table, mesh=case.mesh(2)).config.partitions == 8
    table = gear.TableSpec(case.table.columns, 5, 60)
    mesh = case.mesh(6)
    assert gear.make_replay(table, mesh=mesh).config.partitions == 12


@pytest.mark.parametrize("batch", [8, 16, 200])
def test_batches_smaller_and_larger_than_the_table(case, same, batch):
    wanted = None
    for replay in (case.make(), case.make(case.mesh(8), exchange="collective"), case.make(case.mesh(8))):
        state, _ = replay.add(replay.init(), *next(case.turns())[1:])
        got = to_numpy(replay.sample(state, jax.random.key(3), batch)[1])
        wanted = got if wanted is None else wanted
        same(got, wanted)


def test_nothing_to_draw(case, same):
    wanted = to_numpy(case.make().sample(case.make().init(), jax.random.key(0), 16)[1])
    for exchange in ("peer", "collective", "rdma"):
        replay = case.make(case.mesh(4), exchange=exchange)
        state = replay.init()
        assert not bool(replay.can_sample(state))
        same(to_numpy(replay.sample(state, jax.random.key(0), 16)[1]), wanted)


def test_all_rows_on_one_device(case, same):
    """The padded exchange then takes several turns."""
    rows = {"number": np.arange(80, dtype=np.int32).reshape(16, 5), "vector": np.ones((16, 5, 3), np.float32)}
    lengths = np.array([5, 4] + [0] * 14, np.int32)
    wanted = None
    for replay in (case.make(), case.make(case.mesh(8), exchange="collective"), case.make(case.mesh(8))):
        state, _ = replay.add(replay.init(), rows, lengths)
        got = to_numpy(replay.sample(state, jax.random.key(1), 64)[1])
        wanted = got if wanted is None else wanted
        same(got, wanted)


def test_streams(case, same):
    wanted = None
    on_devices = [case.make(case.mesh(4), streams=8, exchange=exchange) for exchange in ("peer", "rdma")]
    for replay in (case.make(streams=8), *on_devices):
        state, got = replay.init(), []
        for i in range(9):
            step = {"number": np.arange(8, dtype=np.int32) + 10 * i, "vector": np.full((8, 3), i, np.float32)}
            done = np.arange(8) % 4 == i % 4
            state, handles = replay.append(state, np.arange(8, dtype=np.int32), step, done)
            got.append(to_numpy(handles))
        state, sample = replay.sample(state, jax.random.key(0), 16)
        got += [to_numpy(sample), replay.stats(state), to_numpy(state.streams)]
        wanted = got if wanted is None else wanted
        same(got, wanted)


def test_stale_handles_and_rejected_priorities_are_counted_once(case, same):
    wanted = None
    for replay in (case.make(), case.make(case.mesh(8))):
        state, handles = replay.add(replay.init(), *next(case.turns())[1:])
        slot = jnp.concatenate([handles.slot, np.array([-1, -5, 64, 1000, 3], np.int32)])
        generation = jnp.concatenate([handles.generation, np.array([0, 1, 1, 1, 9], np.uint32)])
        priorities = np.resize(np.array([1, np.nan, 5, -1], np.float32), 21)
        state = replay.update_priorities(state, gear.Handle(slot, generation), priorities)
        got = to_numpy((state.priority, state.counters, state.max_priority)), replay.stats(state)
        wanted = got if wanted is None else wanted
        same(got, wanted)


def test_one_compilation_for_any_number_of_calls(case):
    replay = case.make(case.mesh(4), selector=selectors.Prioritized(alpha=0.3))
    state, compiled = replay.init(), []
    for i, rows, lengths, _ in case.turns():
        state, _ = replay.add(state, rows, lengths)
        state, sample = replay.sample(state, jax.random.key(i), 16)
        state = replay.update_priorities(state, sample.handles, sample.weight)
        compiled.append([f._cache_size() for f in replay._calls._compiled.values()])
    assert compiled[1] == compiled[-1] and max(compiled[-1]) == 1, compiled


def test_what_lies_where(case):
    replay = case.make(case.mesh(4))
    state = replay.init()
    local = {x.data.shape for x in state.columns["vector"].addressable_shards}
    assert local == {(2, 8, case.steps, 3)}
    assert state.mass.sharding.spec == P(("replay",)) or state.mass.sharding.spec == P("replay")
    assert state.clock.is_fully_replicated and state.max_priority.is_fully_replicated
    size = gear.footprint(case.table, mesh=case.mesh(4), partitions=8)
    assert size.devices == 4
    columns = sum(size.columns.values())
    assert sum(size.tiers.values()) == columns // 4 + -(-size.index // 4)
    assert "exchange='peer'" in repr(replay)


@pytest.mark.parametrize("streams", [[4, 5, 6, 7], [0, 1, 2, 3], [7, 6, 5, 4, 3, 2, 1, 0], [3, 3, 9, -1, 6]], ids=str)
def test_steps_reach_their_streams_wherever_they_stand(case, same, streams):
    wanted, k = None, len(streams)
    for replay in (case.make(streams=8), case.make(case.mesh(4), streams=8), case.make(case.mesh(8), streams=8)):
        state, got = replay.init(), []
        for i in range(4):
            step = {"number": np.arange(k, dtype=np.int32) + 10 * i, "vector": np.full((k, 3), i, np.float32)}
            state, handles = replay.append(state, np.array(streams, np.int32), step, np.arange(k) % 4 == i)
            got.append(to_numpy(handles))
        got += [to_numpy(state.streams), to_numpy(state.columns), replay.stats(state)]
        wanted = got if wanted is None else wanted
        same(got, wanted)
        assert got[-1]["inserted"] > 0


@pytest.mark.parametrize("options", [{}, {"selection": "decentralized"}], ids=str)
def test_a_sample_takes_the_memory_of_an_earlier_one(case, same, options):
    replay = case.make(case.mesh(4), **options)
    state, first = replay.sample(case.play(replay)[1], jax.random.key(1), 16)
    wanted = to_numpy(replay.sample(jax.tree.map(jnp.copy, state), jax.random.key(2), 16)[1])
    pointers = {s.data.unsafe_buffer_pointer() for s in first.data["vector"].addressable_shards}
    _, second = replay.sample(state, jax.random.key(2), 16, out=first)
    same(to_numpy(second), wanted)
    assert {s.data.unsafe_buffer_pointer() for s in second.data["vector"].addressable_shards} == pointers
    assert first.data["vector"].is_deleted()


def test_where_no_sample_takes_another_s_memory(case):
    two = case.mesh(8, ("data", "model"), (4, 2))
    for replay in (
        case.make(case.mesh(4), exchange="collective"),
        case.make(two, ("data", "model")),
        case.make(two, ("data", "model"), selection="decentralized"),
    ):
        state, sample = replay.sample(case.play(replay)[1], jax.random.key(1), 16)
        with pytest.raises(ValueError, match="out: got a sample to take the memory of, wanted None"):
            replay.sample(state, jax.random.key(2), 16, out=sample)


def test_a_state_that_lies_otherwise_is_put_right_once(case, same):
    wanted, last, _ = case.on_one_device(selectors.Prioritized())
    replay = case.make(case.mesh(4))
    state = replay.init()
    elsewhere = jax.sharding.NamedSharding(case.mesh(4), P(None, "replay"))
    state = state.replace(
        columns=jax.tree.map(lambda x: jax.device_put(x, elsewhere), state.columns), mass=np.asarray(state.mass)
    )
    got, state = case.play(replay, state)
    same(got, wanted)
    same(to_numpy(state.replace(ticket=None, stamp=None)), last)
    assert {x.data.shape for x in state.columns["vector"].addressable_shards} == {(2, 8, case.steps, 3)}


def test_on_one_device_both_selections_are_the_same(case, same):
    both = [case.make(case.mesh(1), selection=selection) for selection in ("centralized", "decentralized")]
    got = [case.play(replay) for replay in both]
    same(got[0][0], got[1][0])


def test_the_footprint_of_copies(case):
    size = gear.footprint(case.table, mesh=case.mesh(8, ("other", "replay"), (4, 2)))
    assert (size.devices, size.copies) == (8, 4)
    assert size.total == 4 * (sum(size.columns.values()) + size.index)
    assert sum(size.tiers.values()) * 8 == pytest.approx(size.total, abs=8)


def test_nothing_to_add_append_or_update(case, same):
    wanted = None
    none = {"number": np.zeros((0, 5), np.int32), "vector": np.zeros((0, 5, 3), np.float32)}
    no_steps = {"number": np.zeros((8, 0), np.int32), "vector": np.zeros((8, 0, 3), np.float32)}
    on_devices = [case.make(case.mesh(4), streams=8, exchange=exchange) for exchange in ("peer", "rdma")]
    for replay in (case.make(streams=8), *on_devices):
        state, got = case.play(replay)[1], []
        state, handles = replay.add(state, none, np.zeros((0,), np.int32))
        got.append(to_numpy(handles))
        state, handles = replay.add(state, no_steps, np.full((8,), 3), np.full((8,), 9, np.float32))
        got.append(to_numpy(handles))
        state, handles = jax.jit(replay.add, donate_argnums=0)(state, none, np.zeros((0,), np.int32))
        step = jax.tree.map(lambda x: x[:, 0], none)
        state, handles = replay.append(state, np.zeros((0,), np.int32), step, np.zeros((0,), bool))
        got.append(to_numpy(handles))
        state = replay.update_priorities(state, handles, np.zeros((0,), np.float32))
        got += [to_numpy(state.replace(ticket=None, stamp=None)), replay.stats(state)]
        wanted = got if wanted is None else wanted
        same(got, wanted)


def test_states_of_other_numbers_of_devices_are_refused(case):
    for other in (case.make(case.mesh(2)), case.make()):
        with pytest.raises(ValueError, match=r"sample: state: got a state of \d device\(s\), wanted one of 4"):
            case.make(case.mesh(4)).sample(other.init(), jax.random.key(0), 8)
    state = case.make(case.mesh(4)).init()
    with pytest.raises(ValueError, match="stack: state: got one over a mesh of 4 devices, wanted one of 1 device"):
        gear.sharding.stack(state, 2)
    with pytest.raises(ValueError, match="unstack: stacked: got the state of one device"):
        gear.sharding.unstack(case.make().init())
    with pytest.raises(ValueError, match="take_back: index: got the state of one device"):
        gear.sharding.take_back(state, case.make().init())
    with pytest.raises(TypeError, match="unstack: stacked: got int"):
        gear.sharding.unstack(3)
