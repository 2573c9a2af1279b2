"""Meshes that do not fit, and rows that they do not divide."""

import jax
import numpy as np
import pytest

import gear_jax as gear
from gear_jax import sharding
from gear_jax.transport import Job

RDMA = {"exchange": "rdma"}
TWO = Job(1, (("127.0.0.1", 1), ("127.0.0.1", 2)), bytes(32))


def test_make_replay(case):
    mesh, grid, table = case.mesh(4), case.mesh(4, ("other", "replay"), (2, 2)), case.table
    wrong = [
        ({"mesh": object()}, TypeError, r"mesh: got object, wanted a jax\.sharding\.Mesh"),
        ({"axis": None}, TypeError, r"axis: got None, wanted one or more names of axes"),
        ({"axis": "data"}, ValueError, r"axis: got 'data', wanted an axis of the mesh, \('replay',\)"),
        ({"axis": ()}, ValueError, r"axis: got \(\), wanted one or more different axes"),
        ({"axis": ("replay", "replay")}, ValueError, r"axis: got .* wanted one or more different axes"),
        ({"batch_axis": "model"}, ValueError, r"batch_axis: got 'model', wanted one of axis, \('replay',\)"),
        ({"partitions": 6}, ValueError, r"partitions: got 6 for a capacity of 64"),
        ({"partitions": 2}, ValueError, r"partitions: got 2 over 4 devices, wanted a multiple of 4.*partitions=4"),
        ({"streams": 6}, ValueError, r"streams: got 6 over 4 devices, wanted a multiple of 4.*streams=8"),
        ({"exchange": "mpi"}, ValueError, r"exchange: got 'mpi', wanted one of \('peer', 'collective', 'rdma'\)"),
        (RDMA | {"selection": "decentralized"}, ValueError, r"selection: .* wanted 'centralized': else no device"),
        (RDMA | {"donate": False}, ValueError, r"donate: .* wanted True: what others read must stay"),
        (RDMA | {"job": TWO}, ValueError, r"job: got process 1 of 2, wanted process 0 of 1, as in the mesh"),
        (
            RDMA | {"mesh": grid},
            ValueError,
            r"axis: got \('replay',\) with exchange='rdma', wanted all axes of the mesh",
        ),
        ({"memory": "disk"}, ValueError, r"memory: got 'disk'"),
    ]
    for options, kind, text in wrong:
        with pytest.raises(kind, match=text):
            gear.make_replay(table, **{"mesh": mesh, **options})
    twice = jax.sharding.Mesh(np.array([jax.devices()[0]] * 2), ("replay",))
    with pytest.raises(ValueError, match="mesh: got one with a device twice"):
        gear.make_replay(table, mesh=twice)
    for options in ({"batch_axis": "replay"}, {"exchange": "peer"}):
        with pytest.raises(ValueError, match="without a mesh, wanted None"):
            gear.make_replay(table, **options)


class Own(gear.selectors.Selector):
    """Knows nothing of devices."""

    def mass(self, priority, selectable):
        return gear.selectors.Uniform().mass(priority, selectable)

    def select(self, state, index, key, batch_size):
        return gear.selectors.Uniform().select(state, index, key, batch_size)


def test_a_selector_that_knows_nothing_of_devices(case):
    with pytest.raises(TypeError, match=r"selector: got .*Own.*, whose select takes no axis"):
        gear.make_replay(case.table, Own(), mesh=case.mesh(4))
    one, apart = (
        gear.make_replay(case.table, Own()),
        gear.make_replay(case.table, Own(), mesh=case.mesh(4), selection="decentralized"),
    )
    for replay in (one, apart):
        state, _ = replay.add(replay.init(), *next(case.turns())[1:])
        assert np.asarray(replay.sample(state, jax.random.key(0), 8)[1].valid).any()


def test_rows_and_batches_that_do_not_divide(case):
    replay = case.make(case.mesh(4))
    state = replay.init()
    rows = {"number": np.ones((6, 5), np.int32), "vector": np.ones((6, 5, 3), np.float32)}
    with pytest.raises(ValueError, match=r"add: rows: got 6, wanted a multiple of 4, the 4 devices"):
        replay.add(state, rows, np.ones((6,), np.int32))
    with pytest.raises(ValueError, match=r"batch_size: got 6, wanted a multiple of 4, the devices of axis 'replay'"):
        replay.sample(state, jax.random.key(0), 6)
    apart = case.make(case.mesh(4), selection="decentralized")
    with pytest.raises(ValueError, match=r"batch_size: got 6, wanted a multiple of 4, the 4 devices"):
        apart.sample(apart.init(), jax.random.key(0), 6)
    assert not state.ticket.is_deleted()  # what was refused consumed nothing


def test_the_state_of_another_number_of_devices(case):
    state = case.make(case.mesh(4)).init()
    with pytest.raises(ValueError, match="sample: state: got a state of 4 device"):
        case.make(case.mesh(2)).sample(state, jax.random.key(0), 8)


def test_what_a_mesh_has_not(case):
    replay = case.make(case.mesh(4))
    with pytest.raises(ValueError, match="sample_start: got a table over a mesh, wanted one on a single device"):
        replay.sample_start(replay.init(), jax.random.key(0), 8)


def test_process_rows(case):
    replay = case.make(case.mesh(4))
    rows = {"number": np.ones((3, 5), np.int32), "vector": np.ones((3, 5, 3), np.float32)}
    got, lengths, priorities = sharding.process_rows(replay, rows, np.full(3, 2), np.ones(3, np.float32), rows=8)
    assert lengths.shape == (8,) and lengths.dtype == np.int32 and priorities.shape == (8,)
    assert np.asarray(lengths).tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
    state, handles = replay.add(replay.init(), got, lengths, priorities)
    assert (np.asarray(handles.slot) >= 0).tolist() == [True] * 3 + [False] * 5
    assert replay.stats(state)["trajectories"] == 3
    long = sharding.process_rows(replay, rows, np.full(3, 2**32 + 1), rows=4)[1]
    assert np.asarray(long).tolist() == [2**31 - 1] * 3 + [0]
    with pytest.raises(ValueError, match="got 6, wanted a multiple of this process's 4 devices"):
        sharding.process_rows(replay, rows, np.full(3, 2), rows=6)
    with pytest.raises(ValueError, match="got 3 rows, wanted at most rows = 0"):
        sharding.process_rows(replay, rows, np.full(3, 2), rows=0)
    with pytest.raises(ValueError, match=r"wanted \[2, \.\.\.\], as lengths"):
        sharding.process_rows(replay, rows, np.full(2, 2), rows=4)
    with pytest.raises(ValueError, match="got one without a mesh"):
        sharding.process_rows(case.make(), rows, np.full(3, 2))


def test_take_back(case):
    replay = case.make(case.mesh(4), memory="pinned_host")
    state = replay.init()
    index, _ = sharding.lend(state)
    with pytest.raises(TypeError, match="take_back: index: got dict, wanted a ReplayState"):
        sharding.take_back(state, {})
    later, _ = replay.add(state, *next(case.turns())[1:3])
    with pytest.raises(ValueError, match="take_back: state: got a state that an earlier call has consumed"):
        sharding.take_back(state, index)
    assert not later.ticket.is_deleted()
