"""Saving and restoring: the same batches afterwards, damage and mismatches named, a killed save harmless."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gear_jax as gear
from gear_jax import checkpoint
from gear_jax._checkpoint import _files
from gear_jax.testing.ops import to_numpy

COLUMNS = {
    "observation": gear.ColumnSpec((3,), jnp.float32),
    "extra": (gear.ColumnSpec((), jnp.uint8), gear.ColumnSpec((2, 2), jnp.bfloat16)),
}
TABLE = gear.TableSpec(COLUMNS, trajectory_length=5, capacity=12)
# Compiled once for all tests that need nothing special.
REPLAY = gear.make_replay(TABLE)
THREE_PARTITIONS = gear.make_replay(TABLE, partitions=3)
SELECTORS = [
    gear.selectors.Uniform(),
    gear.selectors.Prioritized(0.7, 0.5),
    gear.selectors.TopK(),
    gear.selectors.Fifo(),
    gear.selectors.Lifo(),
    gear.selectors.Permutation(),
]
ROOT = pathlib.Path(__file__).parent.parent


def rows(count, seed, columns=COLUMNS, steps=5):
    rng = np.random.default_rng(seed)
    is_spec = lambda x: isinstance(x, gear.ColumnSpec)  # noqa: E731
    make = lambda c: jnp.asarray(rng.integers(0, 2, (count, steps, *c.shape)).astype(c.dtype))  # noqa: E731
    return jax.tree.map(make, columns, is_leaf=is_spec), jnp.asarray(rng.integers(1, steps + 1, count, np.int32))


def work(replay, state, seed, calls=3):
    """Some more of everything; returns the state and all that was seen."""
    seen = []
    for i in range(calls):
        state, handles = replay.add(state, *rows(2, seed + i))
        state, sample = replay.sample(state, jax.random.key(seed + i), 6)
        state = replay.update_priorities(state, sample.handles, jnp.arange(6, dtype=jnp.float32) + i)
        seen += [handles, sample]
        if replay.config.streams:
            step = jax.tree.map(lambda x: x[:, 0], rows(2, seed + i)[0])
            state, handles = replay.append(state, jnp.arange(2, dtype=jnp.int32), step, jnp.array([False, i == 1]))
            seen.append(handles)
    return state, seen


def same(a, b) -> bool:
    equal = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), to_numpy(a), to_numpy(b))
    return jax.tree.all(equal)


def saved(tmp_path, replay=None, step=1, seed=0):
    replay = REPLAY if replay is None else replay
    state, _ = work(replay, replay.init(jax.random.key(9)), seed)
    checkpoint.save(tmp_path, step, state, replay)
    return replay, state


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: type(s).__name__)
def test_goes_on_with_the_same_batches(tmp_path, selector):
    options = {"selector": selector, "eviction": gear.selectors.LowestPriority(), "streams": 2, "partitions": 2}
    replay, state = saved(tmp_path, gear.make_replay(TABLE, **options))
    stats = replay.stats(state)
    assert stats["open_streams"] > 0
    # A replay of its own, as after a restart.
    restored = checkpoint.restore(tmp_path, gear.make_replay(TABLE, **options))
    assert same(restored, state)
    assert replay.stats(restored) == stats
    state, want = work(replay, state, seed=50)
    restored, got = work(replay, restored, seed=50)
    assert same(got, want)
    assert same(restored, state)


@pytest.mark.parametrize("restored_to", ["device", "pinned_host"])
def test_between_kinds_of_memory(tmp_path, memory, restored_to):
    replay, state = saved(tmp_path, gear.make_replay(TABLE, gear.selectors.Prioritized(), memory=memory))
    other = gear.make_replay(TABLE, gear.selectors.Prioritized(), memory=restored_to)
    restored = checkpoint.restore(tmp_path, other)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(restored.columns)} == {restored_to}
    assert same(restored, state)
    state, want = work(replay, state, seed=50, calls=1)
    restored, got = work(other, restored, seed=50, calls=1)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(restored.columns)} == {restored_to}
    assert same(got, want) and same(restored, state)


def test_save_leaves_the_state_usable_in_place(tmp_path, memory):
    replay, state = saved(tmp_path, gear.make_replay(TABLE, memory=memory))
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.columns)]
    state, _ = replay.add(state, *rows(2, 3))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.columns)] == where
    restored = checkpoint.restore(tmp_path, replay)
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(restored.columns)]
    restored, _ = replay.add(restored, *rows(2, 3))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(restored.columns)] == where


_DTYPES = (
    "bool int8 int16 int32 uint8 uint16 uint32 float16 bfloat16 float32 complex64 float8_e4m3fn float8_e5m2 "
    "float8_e4m3 float8_e3m4 float8_e4m3b11fnuz float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()


def test_every_dtype(tmp_path):
    columns = {name: gear.ColumnSpec((3,), np.dtype(getattr(ml_dtypes, name, name))) for name in _DTYPES}
    replay = gear.make_replay(gear.TableSpec(columns, 5, 4))
    state, _ = replay.add(replay.init(), *rows(3, 0, columns))
    checkpoint.save(tmp_path, 0, state, replay)
    bits = lambda s: [to_numpy(x).tobytes() for x in jax.tree.leaves(s.columns)]  # noqa: E731
    assert bits(checkpoint.restore(tmp_path, replay)) == bits(state)


@pytest.mark.parametrize(("block", "read"), [(8, 32), (64, 64), (200, 700), (100_000, 100_000)])
def test_any_division_into_blocks(tmp_path, monkeypatch, block, read):
    monkeypatch.setattr(_files, "_BLOCK", block)
    monkeypatch.setattr(_files, "_READ", read)
    replay, state = saved(tmp_path, THREE_PARTITIONS)
    assert same(checkpoint.restore(tmp_path, replay), state)


def test_slots_out_of_range_are_errors_and_none_occur(tmp_path, checks):
    replay, state = saved(tmp_path)
    assert same(checkpoint.restore(tmp_path, replay), state)


def test_steps(tmp_path):
    directory = tmp_path / "made" / "by_save"
    assert checkpoint.latest_step(directory) is None
    replay, state = saved(directory, step=3)
    later, _ = work(replay, replay.init(), 7)
    checkpoint.save(directory, 10, later, replay)
    checkpoint.save(directory, 2, later, replay)
    assert checkpoint.latest_step(directory) == 10
    assert same(checkpoint.restore(directory, replay, step=3), state)
    assert same(checkpoint.restore(directory, replay), later)
    with pytest.raises(ValueError, match=r"step: got 3, which is in .* already, wanted one not in \[2, 3, 10\]"):
        checkpoint.save(directory, 3, later, replay)
    checkpoint.save(directory, np.int64(11), later, replay, keep=np.int64(2), ahead=np.int64(1 << 20))
    with pytest.raises(FileNotFoundError, match=r"step: got 3, wanted one of \[10, 11\]"):
        checkpoint.restore(directory, replay, step=3)


def test_relative_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    replay, state = saved("here")
    assert same(checkpoint.restore("here", replay), state)


def test_bad_arguments(tmp_path):
    replay = REPLAY
    state = replay.init()
    for step in (-1, 1.0, True, "1"):
        with pytest.raises(ValueError, match=r"step: got .*wanted an integer >= 0"):
            checkpoint.save(tmp_path, step, state, replay)
    with pytest.raises(ValueError, match="keep: got 0"):
        checkpoint.save(tmp_path, 1, state, replay, keep=0)
    with pytest.raises(TypeError, match="replay: got TableSpec"):
        checkpoint.save(tmp_path, 1, state, TABLE)
    with pytest.raises(TypeError, match="replay: got TableSpec"):
        checkpoint.restore(tmp_path, TABLE)
    with pytest.raises(TypeError, match="state: got dict"):
        checkpoint.save(tmp_path, 1, {}, replay)
    with pytest.raises(ValueError, match="state of another replay"):
        checkpoint.save(tmp_path, 1, state, gear.make_replay(gear.TableSpec(COLUMNS, 5, 13)))
    with pytest.raises(TypeError, match="traced state"):
        jax.jit(lambda s: checkpoint.save(tmp_path, 1, s, replay))(state)
    replay.add(state, *rows(2, 0))
    with pytest.raises(ValueError, match="consumed"):
        checkpoint.save(tmp_path, 1, state, replay)
    assert checkpoint.latest_step(tmp_path) is None


def other_columns(**changes):
    columns = {**COLUMNS, **changes}
    return gear.TableSpec({k: v for k, v in columns.items() if v is not None}, 5, 12)


@pytest.mark.parametrize(
    ("table", "options", "error"),
    [
        (other_columns(reward=gear.ColumnSpec((), jnp.float32)), {}, r"columns: .*\(missing \['reward'\]\)"),
        (other_columns(observation=None), {}, r"columns: .*\(unknown \['observation'\]\)"),
        (other_columns(observation=gear.ColumnSpec((4,), jnp.float32)), {}, r"column 'observation': .*\[3\].*\[4\]"),
        (other_columns(observation=gear.ColumnSpec((3,), jnp.float16)), {}, r"column .*: got float32.*float16"),
        (gear.TableSpec(COLUMNS, 6, 12), {}, "trajectory_length: got 5, wanted 6"),
        (gear.TableSpec(COLUMNS, 5, 24), {}, "capacity: got 12, wanted 24"),
        (TABLE, {"partitions": 2}, "partitions: got 1, wanted 2"),
        (TABLE, {"streams": 2}, "streams: got 0, wanted 2"),
        (TABLE, {"selector": gear.selectors.TopK()}, r"selector: got Uniform\(times=None\), wanted TopK\(\)"),
        (TABLE, {"eviction": gear.selectors.LowestPriority()}, r"eviction: got Fifo\(\), wanted LowestPriority\(\)"),
        (TABLE, {"windows": gear.Window(-1, 2), "anchor": "full"}, "shortest_trajectory: got 1, wanted 2"),
    ],
)
def test_mismatch_is_named(tmp_path_factory, table, options, error):
    directory = tmp_path_factory.getbasetemp() / "mismatch"
    if checkpoint.latest_step(directory) is None:
        saved(directory)
    with pytest.raises(ValueError, match=r"checkpoint \S+/1: " + error):
        checkpoint.restore(directory, gear.make_replay(table, **options))


def test_windows_may_differ(tmp_path):
    _, state = saved(tmp_path)
    restored = checkpoint.restore(tmp_path, gear.make_replay(TABLE, windows=gear.Window(-2, 3)))
    assert same(restored, state)


def test_missing(tmp_path):
    replay = REPLAY
    with pytest.raises(FileNotFoundError, match=r"nowhere: got nothing there.*checkpoint.save"):
        checkpoint.restore(tmp_path / "nowhere", replay)
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(FileNotFoundError, match="got no complete step"):
        checkpoint.restore(tmp_path, replay)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="got a file"):
        checkpoint.summary(tmp_path / "file")


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("pattern", "harm"),
    [
        ("columns/0/c.0.0.0", _flip),
        ("columns/1/c.0.0.0", _cut),
        ("columns/2/c.0.0.0", pathlib.Path.unlink),
        ("columns/0/zarr.json", pathlib.Path.unlink),
        ("columns", shutil.rmtree),
        ("index", shutil.rmtree),
        ("index/0-1.npz", _flip),
        ("index/0-1.npz", _cut),
        ("index/0-1.npz", pathlib.Path.unlink),
        ("index/whole.npz", _flip),
        ("index/whole.npz", pathlib.Path.unlink),
        ("table", shutil.rmtree),
        ("table/metadata", _cut),
    ],
)
def test_damage_is_named(tmp_path, tmp_path_factory, pattern, harm):
    whole = tmp_path_factory.getbasetemp() / "whole"
    if checkpoint.latest_step(whole) is None:
        saved(whole)
    directory = tmp_path / "damaged"
    shutil.copytree(whole, directory)
    shutil.copytree(directory / "1", directory / "5")
    for path in list((directory / "5").glob(pattern)):
        harm(path)
    replay = REPLAY
    with pytest.raises(ValueError, match=r"checkpoint \S+/5: .*Restore another step: \[1\]"):
        checkpoint.restore(directory, replay)
    checkpoint.restore(directory, replay, step=1)


def test_other_format_is_named(tmp_path):
    saved(tmp_path)
    path = tmp_path / "1" / "table" / "metadata"
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, "format": 99, "gear_jax": "9.0"}))
    with pytest.raises(ValueError, match=r"format: got 99, of gear_jax 9\.0, wanted 2"):
        checkpoint.restore(tmp_path, REPLAY)


def test_summary(tmp_path):
    replay, state = saved(tmp_path, gear.make_replay(TABLE, gear.selectors.Prioritized(), streams=2), step=4)
    summary = checkpoint.summary(tmp_path)
    stats = replay.stats(state)
    stats.pop("open_streams")
    assert summary.step == 4
    assert summary.stats == stats
    np.testing.assert_array_equal(summary.length, state.length)
    np.testing.assert_array_equal(summary.priority, state.priority)
    assert summary.table["selector"] == repr(gear.selectors.Prioritized())
    assert summary.table["columns"][-1] == {"name": "observation", "shape": [3], "dtype": "float32"}


_SAVE = """
import sys
import jax, jax.numpy as jnp
import gear_jax as gear
table = gear.TableSpec({"x": gear.ColumnSpec((64,), jnp.float32)}, 1000, int(sys.argv[2]))
replay = gear.make_replay(table, gear.selectors.Permutation())
state = replay.init()
for i in range(table.capacity // 20):
    x = jax.random.uniform(jax.random.key(i), (20, 1000, 64))
    state, _ = replay.add(state, {"x": x}, jnp.full((20,), 1000, jnp.int32))
"""
_SAVE_TWICE = """
gear.checkpoint.save(sys.argv[1], 1, state, replay)
for i in range(table.capacity // 40):  # half of it
    x = jax.random.uniform(jax.random.key(-i), (20, 1000, 64))
    state, _ = replay.add(state, {"x": x}, jnp.full((20,), 1000, jnp.int32))
print("saving", flush=True)
gear.checkpoint.save(sys.argv[1], 2, state, replay)
print("saved", flush=True)
"""


def run(code, *args, **options):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)], env=env, stdout=subprocess.PIPE, text=True, **options
    )


def test_killed_save_leaves_the_previous_step(tmp_path):
    capacity = 400  # 100 MB that do not compress: more than a second to save
    with run(_SAVE + _SAVE_TWICE, tmp_path, capacity) as process:
        assert process.stdout.readline() == "saving\n"
        deadline = time.monotonic() + 60
        # Killed with some of the column written, and not all.
        while not list(tmp_path.glob("2.*/columns*/0/c.*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == ""
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("2.")]
    assert checkpoint.latest_step(tmp_path) == 1

    table = gear.TableSpec({"x": gear.ColumnSpec((64,), jnp.float32)}, 1000, capacity)
    replay = gear.make_replay(table, gear.selectors.Permutation())
    state = checkpoint.restore(tmp_path, replay)
    held = to_numpy(state.columns["x"])[0, :20]
    np.testing.assert_array_equal(held, jax.random.uniform(jax.random.key(0), (20, 1000, 64)))
    # The next save clears away what was left and takes the number.
    checkpoint.save(tmp_path, 2, state, replay)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    assert same(checkpoint.restore(tmp_path, replay), state)


def test_a_process_that_does_not_wait_says_so(tmp_path):
    """It ends, the save is complete or not there, and what was there before is."""
    code = (
        _SAVE
        + """
gear.checkpoint.save(sys.argv[1], 1, state, replay)
from orbax.checkpoint import CheckpointManager
def cut_short(*args, **kwargs):
    raise RuntimeError("cannot schedule new futures after interpreter shutdown")
CheckpointManager.save = cut_short
gear.checkpoint.save(sys.argv[1], 2, state, replay, blocking=False)
"""
    )
    with run(code, tmp_path, 20, stderr=subprocess.PIPE) as process:
        _, err = process.communicate(timeout=120)
    # Python 3.12 may refuse a thread before the save gets as far as the one that is cut short here.
    assert "interpreter shutdown" in err
    assert checkpoint.latest_step(tmp_path) == 1


_PEAK = """
import resource
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
"""
_PEAK_SAVE = """
jax.block_until_ready(state)
before = peak()
gear.checkpoint.save(sys.argv[1], 1, state, replay)
print(peak() - before)
"""
_PEAK_RESTORE = """
jax.devices()
before = peak()
state = gear.checkpoint.restore(sys.argv[1], replay)
print(peak() - before)
"""


@pytest.mark.cpu
def test_needs_little_memory_beside_the_table(tmp_path):
    capacity = 2400  # 600 MB
    setup, _ = _SAVE.split("for i in")
    with run(_PEAK + setup + _PEAK_SAVE, tmp_path, capacity) as process:
        assert int(process.stdout.read()) < 300
    with run(_PEAK + setup.replace("state = replay.init()", "") + _PEAK_RESTORE, tmp_path, capacity) as process:
        assert int(process.stdout.read()) < 600 + 300
