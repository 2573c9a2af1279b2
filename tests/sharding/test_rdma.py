"""`exchange="rdma"` over a mesh, beyond what the other files here show of all exchanges: what is exposed, and when."""

import jax
import numpy as np
import pytest

import gear_jax as gear
from gear_jax import checkpoint, selectors
from gear_jax.replay import _exposed
from gear_jax.testing.ops import to_numpy


@pytest.fixture
def made(case):
    """A replay of the test's own, over four devices, and the last state of a few calls."""
    replay = gear.make_replay(
        case.table, selectors.Prioritized(), case.windows, mesh=case.mesh(4), partitions=8, exchange="rdma", streams=8
    )
    state, _ = replay.add(replay.init(), *next(case.turns())[1:])
    yield replay, state
    replay.close()


def append(replay, state, done):
    step = {"number": np.arange(8, dtype=np.int32), "vector": np.ones((8, 3), np.float32)}
    return replay.append(state, np.arange(8, dtype=np.int32), step, np.full(8, done))[0]


def test_what_is_exposed(made):
    """Of each device its columns and stamps, where they stay. Stamps are twice the generation; of open slots less."""
    replay, state = made
    assert replay.exchange == "rdma" and "exchange='rdma'" in repr(replay)
    before = [x.unsafe_buffer_pointer() for x in _exposed.pieces(state, replay.placement)]
    assert len(before) == 4 * 3 and replay.config.rows.regions == (0, 3, 6, 9)
    for done in (False, True):
        state = append(replay, state, done)
        opened = np.isin(np.arange(64), np.asarray(state.streams.slot))
        assert opened.sum() == (0 if done else 8)
        stamp = jax.jit(lambda x: x + np.uint32(0))(state.stamp)  # what NumPy looks at cannot stay where it is
        np.testing.assert_array_equal(np.ravel(stamp), 2 * np.ravel(state.generation) - opened)
    state, sample = replay.sample(state, jax.random.key(0), 16)
    assert sample.valid.all()
    assert [x.unsafe_buffer_pointer() for x in _exposed.pieces(state, replay.placement)] == before
    numbers = replay.counters()
    assert numbers["rows"] == 16 and numbers["remote_rows"] == 0
    assert "missed_updates" not in replay.stats(state)


def test_connect_makes_stamps_anew(made):
    replay, state = made
    state = append(replay, state, False)
    wanted = to_numpy(state)
    state = replay.connect(state)
    np.testing.assert_array_equal(to_numpy(state.stamp), wanted.stamp)
    assert replay.sample(state, jax.random.key(0), 16)[1].valid.all()


def test_a_row_whose_stamp_says_otherwise_is_padding(case, made):
    replay, state = made
    state = state.replace(generation=jax.jit(lambda x: x + np.uint32(1))(state.generation))
    _, sample = replay.sample(state, jax.random.key(0), 16)
    sample = to_numpy(sample)
    assert not sample.valid.any() and not sample.mask["number"].any() and (sample.data["vector"] == 7).all()
    assert (sample.handles.slot == -1).all() and not sample.handles.generation.any()
    assert not sample.probability.any() and not sample.weight.any() and not sample.length.any()
    assert replay.counters()["torn"] == 16  # they might have become what was wanted


@pytest.mark.parametrize("call", ["add", "sample"])
def test_a_state_that_is_not_exposed_is_refused(case, made, call):
    replay, state = made
    other = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), state)
    args = {"add": next(case.turns())[1:], "sample": (jax.random.key(0), 16)}[call]
    for name, there in (("one that other processes do not read", other), ("a closed replay", state)):
        if there is state:
            replay.close()
        with pytest.raises(ValueError, match=rf"{call}: state: got {name}, .* replay\.connect\(state\)"):
            getattr(replay, call)(there, *args)
    state = replay.connect(state)
    getattr(replay, call)(state, *args)


def test_programs_that_move_the_table_are_found_out(made):
    """A jitted step that keeps the state copies its columns, which then are not those exposed."""
    replay, state = made
    step = jax.jit(lambda s, key: replay.sample(replay.add(s, *given(s))[0], key, 16))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"rdma_fetch: operand 0: .*donate the state, so that"):
        jax.block_until_ready(step(state, jax.random.key(0)))


def given(state):
    rows = jax.tree.map(lambda x: np.ones((4, *x.shape[2:]), x.dtype), state.columns)
    return rows, np.full((4,), 5, np.int32)


def test_restored_elsewhere_it_goes_on_with_the_same_batches(case, same, tmp_path):
    """Saved without it, on one device; restored over four that read each other, and connected."""
    replays = (
        case.make(),
        gear.make_replay(
            case.table, selectors.Prioritized(), case.windows, mesh=case.mesh(4), partitions=8, exchange="rdma"
        ),
    )
    state, _ = replays[0].add(replays[0].init(), *next(case.turns())[1:])
    checkpoint.save(tmp_path, 1, state, replays[0])
    states = [state, replays[1].connect(checkpoint.restore(tmp_path, replays[1]))]
    for i, *rows in case.turns():
        results = []
        for k, replay in enumerate(replays):
            states[k], handles = replay.add(states[k], *rows)
            states[k], sample = replay.sample(states[k], jax.random.key(i), 16)
            results.append(to_numpy((handles, sample)))
        same(results[1], results[0])
    replays[1].close()


@pytest.mark.parametrize("call", ["sample", "add", "connect", "stats"])
def test_a_consumed_state_is_named_as_such(case, made, call):
    """A sample keeps the state that it is given, as it may fail: what consumes it is the insertion that follows."""
    replay, first = made
    rows = next(case.turns())[1:]
    state, _ = replay.sample(first, jax.random.key(0), 16)
    state, _ = replay.add(state, *rows)
    args = {"sample": (jax.random.key(0), 16), "add": rows}.get(call, ())
    with pytest.raises(ValueError, match=rf"{call}: state: got a state that an earlier call has consumed"):
        getattr(replay, call)(first, *args)


def test_connect_takes_no_state_of_another_table(made):
    replay, state = made
    table = gear.TableSpec({"number": gear.ColumnSpec((), np.int32)}, 5, 64)
    other = gear.make_replay(table, mesh=replay.placement.mesh, partitions=8)
    with pytest.raises(ValueError, match="connect: state: got "):
        replay.connect(other.init())
    replay.sample(state, jax.random.key(0), 16)  # and nothing was closed
