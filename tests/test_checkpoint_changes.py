"""Saves after the first: only what has changed is written; and saves that go on while the table is used."""

import shutil
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gear_jax as gear
from gear_jax import checkpoint
from gear_jax._checkpoint import _files, _rows
from gear_jax.testing.ops import to_numpy

TABLE = gear.TableSpec(
    {"x": gear.ColumnSpec((16,), jnp.float32), "flag": gear.ColumnSpec((), jnp.bool_)}, trajectory_length=8, capacity=64
)
ROW = 8 * (16 * 4 + 1)
REPLAY = gear.make_replay(TABLE, partitions=2)
STREAMS = gear.make_replay(TABLE, partitions=2, streams=3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Two rows of x in a block, 32 slots of flag."""
    monkeypatch.setattr(_files, "_BLOCK", 1024)
    monkeypatch.setattr(_files, "_READ", 8192)


def rows(count, seed):
    rng = np.random.default_rng(seed)
    data = {"x": rng.normal(size=(count, 8, 16)).astype(np.float32), "flag": rng.integers(0, 2, (count, 8)) > 0}
    return data, np.full(count, 8, np.int32)


def full(replay, seed=0):
    return replay.add(replay.init(), *rows(64, seed))[0]


def same(a, b) -> bool:
    equal = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), to_numpy(a), to_numpy(b))
    return jax.tree.all(equal)


def new_bytes(step):
    """The bytes of a step's column files that are no other step's."""
    return sum(p.stat().st_size for p in step.glob("columns/*/c.*") if p.stat().st_nlink == 1)


@pytest.mark.parametrize("by_index", [True, False])
def test_a_second_save_writes_what_has_changed(tmp_path, by_index):
    state = full(REPLAY)
    first = checkpoint.save(tmp_path, 1, state, REPLAY).bytes_written
    assert first == 64 * ROW
    before = to_numpy(state)
    state, _ = REPLAY.sample(state, jax.random.key(0), 8)
    state, _ = REPLAY.add(state, *rows(6, 1))  # three rows to each partition: two blocks of x there
    options = {"since": 1} if by_index else {}
    second = checkpoint.save(tmp_path, 2, state, REPLAY, **options).bytes_written
    flag = 64 * 8  # all of it: two blocks
    assert second == 8 * 8 * 16 * 4 + flag
    assert new_bytes(tmp_path / "2") < 0.3 * sum(p.stat().st_size for p in (tmp_path / "2").glob("columns/*/c.*"))
    assert checkpoint.save(tmp_path, 3, state, REPLAY).bytes_written == 0
    assert new_bytes(tmp_path / "3") == 0
    for step, wanted in ((1, before), (2, state), (3, state)):
        assert same(checkpoint.restore(tmp_path, REPLAY, step), wanted)
    # Any step may go.
    shutil.rmtree(tmp_path / "1")
    shutil.rmtree(tmp_path / "2")
    assert same(checkpoint.restore(tmp_path, REPLAY), state)
    state, _ = REPLAY.add(state, *rows(2, 2))
    checkpoint.save(tmp_path, 4, state, REPLAY, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["4"]
    assert same(checkpoint.restore(tmp_path, REPLAY), state)


def test_steps_of_open_streams_are_saved(tmp_path):
    state = full(STREAMS)
    for i in range(12):
        step = jax.tree.map(lambda x: x[:, 0], rows(3, i)[0])
        done = jnp.array([i == 4, False, i == 7])
        state, _ = STREAMS.append(state, jnp.arange(3, dtype=jnp.int32), step, done)
        checkpoint.save(tmp_path, i, state, STREAMS, since=i - 1 if i else None)
        assert same(checkpoint.restore(tmp_path, STREAMS), state), i


def test_a_table_that_comes_from_elsewhere(tmp_path):
    """Another history with the same numbers in its index: seen by the digests, and refused where the index decides."""
    state, other = full(REPLAY), full(REPLAY, seed=5)
    np.testing.assert_array_equal(state.generation, other.generation)
    checkpoint.save(tmp_path, 1, state, REPLAY)
    with pytest.raises(ValueError, match=r"since: got 1, with other rows in slots that have not been filled since"):
        checkpoint.save(tmp_path, 2, other, REPLAY, since=1)
    assert checkpoint.latest_step(tmp_path) == 1
    checkpoint.save(tmp_path, 2, other, REPLAY)
    assert same(checkpoint.restore(tmp_path, REPLAY), other)
    assert same(checkpoint.restore(tmp_path, REPLAY, 1), state)


def test_a_single_step_that_differs(tmp_path):
    """One number of one row, with the same index, is seen by the digest."""
    data, lengths = rows(64, 0)
    checkpoint.save(tmp_path, 1, REPLAY.add(REPLAY.init(), data, lengths)[0], REPLAY)
    data["x"][40, 7, 15] *= -1
    state, _ = REPLAY.add(REPLAY.init(), data, lengths)
    assert checkpoint.save(tmp_path, 2, state, REPLAY).bytes_written == 2 * 8 * 16 * 4
    assert same(checkpoint.restore(tmp_path, REPLAY), state)


def test_since_must_fit(tmp_path):
    state = full(REPLAY)
    checkpoint.save(tmp_path, 1, state, REPLAY)
    with pytest.raises(ValueError, match=r"since: got 7, wanted one of the steps in .*\[1\]"):
        checkpoint.save(tmp_path, 2, state, REPLAY, since=7)
    with pytest.raises(ValueError, match=r"since: got 1, a table with other \['streams'\]"):
        checkpoint.save(tmp_path, 2, full(STREAMS), STREAMS, since=1)
    with pytest.raises(ValueError, match="ahead: got -1"):
        checkpoint.save(tmp_path, 2, state, REPLAY, ahead=-1)
    # Another table in the same directory shares nothing.
    assert checkpoint.save(tmp_path, 2, full(STREAMS), STREAMS).bytes_written == 64 * ROW


@pytest.mark.parametrize(
    "harm", ["digests/0-2.npz", "1/c.0.3.0", "0/zarr.json", "../index/0-2.npz", "../table/metadata"]
)
def test_a_damaged_step_does_not_spoil_the_next(tmp_path, harm):
    state = full(REPLAY)
    checkpoint.save(tmp_path, 1, state, REPLAY)
    (tmp_path / "1" / "columns" / harm).unlink()
    checkpoint.save(tmp_path, 2, state, REPLAY)
    assert same(checkpoint.restore(tmp_path, REPLAY), state)


def test_without_hard_links(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(95, "Operation not supported")

    state = full(REPLAY)
    checkpoint.save(tmp_path, 1, state, REPLAY)
    monkeypatch.setattr("os.link", refuse)
    assert checkpoint.save(tmp_path, 2, state, REPLAY).bytes_written == 0
    shutil.rmtree(tmp_path / "1")
    assert same(checkpoint.restore(tmp_path, REPLAY), state)


def test_other_block_sizes_are_read(tmp_path, monkeypatch):
    state = full(REPLAY)
    checkpoint.save(tmp_path, 1, state, REPLAY)
    monkeypatch.setattr(_files, "_BLOCK", 3000)
    assert same(checkpoint.restore(tmp_path, REPLAY), state)
    assert checkpoint.save(tmp_path, 2, state, REPLAY, since=1).bytes_written == 64 * ROW
    assert same(checkpoint.restore(tmp_path, REPLAY), state)


class Gate:
    """Holds a save back where it begins to write."""

    def __init__(self, monkeypatch):
        self.open, self.error, write = threading.Event(), None, _files.Layout.open

        def gated(layout, directory, *, create):
            if create:
                assert self.open.wait(60)
                if self.error is not None:
                    raise self.error
            return write(layout, directory, create=create)

        monkeypatch.setattr(_files.Layout, "open", gated)


def test_the_table_goes_on_during_a_save(tmp_path, monkeypatch, memory):
    replay = gear.make_replay(TABLE, gear.selectors.Prioritized(), partitions=2, memory=memory)
    gate = Gate(monkeypatch)
    state = full(replay)
    wanted = to_numpy(state)
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.columns)]
    handle = checkpoint.save(tmp_path, 1, state, replay, blocking=False)
    for i in range(4):
        state, sample = replay.sample(state, jax.random.key(i), 8)
        state = replay.update_priorities(state, sample.handles, jnp.full((8,), 9.0))
        state, _ = replay.add(state, *rows(32, 10 + i))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.columns)] == where
    assert not handle.done() and handle.bytes_written == 0
    assert checkpoint.latest_step(tmp_path) is None
    with pytest.raises(TimeoutError, match=r"step 1: still under way after 0\.01 s"):
        handle.wait(0.01)
    gate.open.set()
    handle.wait()
    handle.wait()
    assert handle.done() and handle.bytes_written == 64 * ROW
    assert same(checkpoint.restore(tmp_path, replay), wanted)
    checkpoint.save(tmp_path, 2, state, replay, blocking=False).wait()
    assert same(checkpoint.restore(tmp_path, replay), state)


def test_the_next_save_waits_for_the_one_before(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    state = full(REPLAY)
    handle = checkpoint.save(tmp_path, 1, state, REPLAY, blocking=False)
    threading.Timer(0.2, gate.open.set).start()
    assert checkpoint.save(tmp_path, 2, state, REPLAY).bytes_written == 0
    assert handle.done() and checkpoint.latest_step(tmp_path) == 2


def test_errors_of_the_background(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.error = OSError(28, "No space left on device")
    gate.open.set()
    state = full(REPLAY)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, 1, state, REPLAY, blocking=False, ahead=0).wait()
    checkpoint.save(tmp_path, 1, state, REPLAY, blocking=False)  # known already; and nobody waits for this one
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, 2, state, REPLAY)
    assert checkpoint.latest_step(tmp_path) is None
    gate.error = None
    checkpoint.save(tmp_path, 2, state, REPLAY)
    assert same(checkpoint.restore(tmp_path, REPLAY), state)


def test_an_error_while_rows_are_read_ends_the_save(tmp_path, monkeypatch):
    state = full(REPLAY)
    checkpoint.save(tmp_path, 1, state, REPLAY)

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_rows, "_get", fail)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 2, state, REPLAY)
    assert checkpoint.latest_step(tmp_path) == 1
    checkpoint.save(tmp_path, 2, state, REPLAY)


@pytest.mark.parametrize("ahead", [0, 1, 1000])
def test_blocks_larger_than_what_may_wait(tmp_path, ahead):
    state = full(REPLAY)
    checkpoint.save(tmp_path, 1, state, REPLAY, blocking=False, ahead=ahead).wait(60)
    restored = checkpoint.restore(tmp_path, REPLAY)
    for got, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(*to_numpy((got, wanted)))


def test_no_more_waits_than_allowed():
    block = lambda i: _rows.Block(0, 0, i, np.zeros((1, 100), np.uint8))  # noqa: E731
    hand_over, put = _rows.HandOver(250), []

    def read():
        for i in range(20):
            assert hand_over.put(block(i))
            put.append(i)
        hand_over.finish()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    # Who writes keeps two, and writes one where there is no room for more.
    kept, seen = [], 0
    for item in hand_over:
        if item is not None:
            assert item.block == seen
            seen += 1
            kept.append(item)
        if kept and (item is None or len(kept) > 2):
            hand_over.written(kept.pop(0))
        assert len(put) <= seen + 3
    reader.join(60)
    assert put == list(range(20))
    # One that is larger than all that may wait goes alone; after an end nothing is taken.
    hand_over = _rows.HandOver(0)
    assert hand_over.put(block(0))
    hand_over.abandon()
    assert not hand_over.put(block(1))


_DTYPES = "bool int8 uint16 int32 float16 bfloat16 float32 complex64 float8_e4m3fn".split()


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 3), (3, 4, 4)])
def test_digests_tell_every_bit_and_every_place(dtype, shape):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize)).astype(np.uint8)
    digest = jax.jit(lambda x: _rows._digest(_rows._words(x)))
    of = lambda bits: np.asarray(digest(jnp.asarray(bits.view(dtype)[..., 0])))  # noqa: E731
    seen = {of(bits)[0].tobytes()}
    changes = [(i, bit) for i in range(bits[0].size) for bit in range(1 if dtype.kind == "b" else 8)]
    for i, bit in changes:
        other = bits.copy()
        other[0].reshape(-1)[i] ^= 1 << bit
        got = of(other)
        np.testing.assert_array_equal(got[1:], of(bits)[1:])
        seen.add(got[0].tobytes())
    assert len(seen) == 1 + len(changes)
