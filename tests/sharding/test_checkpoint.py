"""Checkpoints over a mesh: saved on so many devices, restored on others; several processes, all or nothing."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import gear_jax as gear
from gear_jax import checkpoint
from gear_jax._checkpoint import _files
from gear_jax.testing.ops import to_numpy
from gear_jax.testing.processes import free_ports

pytestmark = pytest.mark.cpu
ROOT = pathlib.Path(__file__).parents[2]
COLUMNS = {"observation": gear.ColumnSpec((3,), jnp.float32), "action": gear.ColumnSpec((), jnp.int8)}
TABLE = gear.TableSpec(COLUMNS, trajectory_length=5, capacity=48)
B = 8


def make(n, selector=None, table=TABLE, **options):
    """Eight partitions on n devices; 0: without a mesh; a pair: a mesh of two axes, both cut."""
    if isinstance(n, tuple):
        options |= {"mesh": jax.make_mesh(n, ("data", "model")), "axis": ("data", "model")}
    elif n:
        options |= {"mesh": Mesh(np.array(jax.devices()[:n]), ("replay",))}
    return gear.make_replay(table, selector, partitions=8, **options)


def rows(count, seed):
    rng = np.random.default_rng(seed)
    data = {
        "observation": rng.normal(size=(count, 5, 3)).astype(np.float32),
        "action": rng.integers(-9, 9, (count, 5)).astype(np.int8),
    }
    return data, rng.integers(1, 6, count).astype(np.int32)


def work(replay, state, seed, calls):
    """Some more of everything; returns the state and all that was seen."""
    seen = []
    for i in range(calls):
        state, handles = replay.add(state, *rows(8, seed + i))
        state, sample = replay.sample(state, jax.random.key(seed + i), B)
        state = replay.update_priorities(state, sample.handles, jnp.arange(B, dtype=jnp.float32) + i)
        seen += [handles, sample]
        if replay.config.streams:
            step = jax.tree.map(lambda x: x[:, 0], rows(8, 500 + seed + i)[0])
            done = jnp.arange(8) % 5 == i % 5
            state, handles = replay.append(state, jnp.arange(8, dtype=jnp.int32), step, done)
            seen.append(handles)
    return state, to_numpy(seen)


def same(a, b) -> bool:
    equal = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), to_numpy(a), to_numpy(b))
    return jax.tree.all(equal)


def batches(replay, state, count):
    seen = []
    for i in range(count):
        state, sample = replay.sample(state, jax.random.key(1000 + i), B)
        seen.append(to_numpy(sample))
    return seen


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    "selector", [gear.selectors.Prioritized(0.7, 0.5), gear.selectors.Permutation()], ids=lambda s: type(s).__name__
)
def test_goes_on_over_other_devices(tmp_path, selector):
    options = {"selector": selector, "streams": 8, "eviction": gear.selectors.LowestPriority()}
    replay = make(4, **options)
    state, _ = work(replay, replay.init(jax.random.key(9)), 0, 5)
    assert replay.stats(state)["open_streams"] > 0
    checkpoint.save(tmp_path, 1, state, replay)
    state, wanted = work(replay, state, 50, 4)
    wanted_batches = batches(replay, state, 3)
    for n in (0, 2, 8):
        other = make(n, **options)
        restored = checkpoint.restore(tmp_path, other)
        assert restored.ticket.shape == (max(n, 1),)
        # From there to yet another number, without a call in between.
        checkpoint.save(tmp_path / str(n), 1, restored, other)
        restored, got = work(other, restored, 50, 4)
        assert same(got, wanted), n
        assert same(batches(other, restored, 3), wanted_batches), n
        restored, got = work(replay, checkpoint.restore(tmp_path / str(n), replay), 50, 4)
        assert same(got, wanted), f"{n} and back"


@pytest.mark.devices(8)
def test_the_next_hundred_batches(tmp_path):
    replay = make(0, gear.selectors.Prioritized())
    state, _ = work(replay, replay.init(), 0, 8)
    checkpoint.save(tmp_path, 1, state, replay)
    wanted = batches(replay, state, 100)
    for n in (8, (2, 2)):
        other = make(n, gear.selectors.Prioritized())
        assert same(batches(other, checkpoint.restore(tmp_path, other), 100), wanted)


@pytest.mark.devices(4)
def test_in_place_and_in_the_memory_asked_for(tmp_path, memory):
    replay = make(4, memory=memory)
    state, _ = work(replay, replay.init(), 0, 2)

    def where(state):
        return [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(state.columns) for s in x.addressable_shards]

    before = where(state)
    checkpoint.save(tmp_path, 1, state, replay)
    state, _ = replay.add(state, *rows(8, 3))
    assert where(state) == before
    restored = checkpoint.restore(tmp_path, replay)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(restored.columns)} == {memory}
    before = where(restored)
    restored, _ = replay.add(restored, *rows(8, 3))
    assert where(restored) == before
    assert same(restored, state)


@pytest.mark.devices(4)
def test_what_a_mesh_repeats_is_written_once(tmp_path):
    mesh = jax.make_mesh((2, 2), ("replay", "other"))
    replay = gear.make_replay(TABLE, partitions=8, mesh=mesh)
    state, _ = work(replay, replay.init(), 0, 2)
    table_bytes = 48 * 5 * (12 + 1)
    assert checkpoint.save(tmp_path, 1, state, replay).bytes_written == table_bytes
    restored = checkpoint.restore(tmp_path, replay)
    assert same(restored, state)
    assert same(work(replay, restored, 9, 2)[1], work(replay, state, 9, 2)[1])


@pytest.mark.devices(4)
def test_a_second_save_from_other_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "_BLOCK", 1)  # a row
    replay, other = make(0, streams=8), make(4, streams=8)
    state, _ = work(replay, replay.init(), 0, 8)
    checkpoint.save(tmp_path, 1, state, replay)
    state = checkpoint.restore(tmp_path, other)
    state, _ = other.add(state, *rows(8, 77))
    by_index = checkpoint.save(tmp_path, 2, state, other, since=1).bytes_written
    state, _ = other.sample(state, jax.random.key(0), B)
    by_digest = checkpoint.save(tmp_path, 3, state, other).bytes_written
    row = 5 * (12 + 1)
    open_streams = int((np.asarray(state.streams.slot) >= 0).sum())
    assert by_digest == 0
    assert by_index <= (8 + open_streams) * row
    assert same(checkpoint.restore(tmp_path, other), state)
    assert same(batches(replay, checkpoint.restore(tmp_path, replay, step=2), 3), batches(other, state, 3))


@pytest.mark.devices(4)
def test_decentralized_states_stay_with_their_devices(tmp_path):
    options = {"selector": gear.selectors.Permutation(), "selection": "decentralized"}
    replay = make(4, **options)
    state, _ = work(replay, replay.init(), 0, 3)
    checkpoint.save(tmp_path, 1, state, replay)
    assert same(work(replay, checkpoint.restore(tmp_path, replay), 9, 2)[1], work(replay, state, 9, 2)[1])
    error = r"states of Permutation\(\): got one for each of 4 devices, wanted one for each of 2 devices\. Restore with"
    with pytest.raises(ValueError, match=error):
        checkpoint.restore(tmp_path, make(2, **options))
    with pytest.raises(ValueError, match=r"got one for each of 4 devices, wanted one for all\."):
        checkpoint.restore(tmp_path, make(4, gear.selectors.Permutation()))
    # A selector without a state has nothing that could not be moved.
    replay = make(4, selection="decentralized")
    state, _ = work(replay, replay.init(), 0, 3)
    checkpoint.save(tmp_path, 2, state, replay)
    assert checkpoint.restore(tmp_path, make(2, selection="decentralized")).length.shape == (8, 6)


# Several processes.

_START = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
rank, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
def print(*words):
    sys.stderr.write(" ".join(map(str, ("said:", *words))) + "\\n")
jax.distributed.initialize(f"localhost:{port}", 2, rank, initialization_timeout=60, heartbeat_timeout_seconds=20)
import gear_jax as gear
from gear_jax import checkpoint, sharding
TABLE = gear.TableSpec({"x": gear.ColumnSpec((4,), jnp.float32)}, 3, 32)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replay",))
replay = gear.make_replay(TABLE, gear.selectors.Permutation(), partitions=8, mesh=mesh, streams=8)

def rows(i):
    x = np.arange(8 * 3 * 4, dtype=np.float32).reshape(8, 3, 4) + 1000 * i
    return {"x": x}, np.full(8, 3, np.int32)

def add(state, i):
    data, lengths = rows(i)
    mine = slice(4 * rank, 4 * rank + 4)
    return replay.add(state, *sharding.process_rows(replay, {"x": data["x"][mine]}, lengths[mine])[:2])[0]

on_all = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))

def draw(state, count):
    seen = []
    for i in range(count):
        state, sample = replay.sample(state, jax.random.key(i), 8)
        seen.append(np.asarray(on_all(sample.data["x"]).addressable_shards[0].data))
    return np.stack(seen)
"""


def launch(tmp_path, *codes, directory=None):
    """Runs a program on each of two processes of four CPU devices; returns their results and what they said."""
    (port,) = free_ports(1)
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _START + textwrap.dedent(code), str(rank), str(port), str(directory or tmp_path)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, code in enumerate(codes)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=180) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    # Gloo's threads write to the standard output too, in the middle of a line if they like: what counts comes by the
    # standard error.
    own = lambda err: "".join(re.findall(r"said: (.*\n)", err))  # noqa: E731
    return [(p.returncode, own(err), err) for p, (_, err) in zip(processes, said, strict=True)]


def check(results):
    for code, _, err in results:
        assert code == 0, err[-4000:]
    return [out for _, out, _ in results]


def test_two_processes_to_one_and_back(tmp_path):
    code = """
    state = replay.init()
    for i in range(6):
        state = add(state, i)
    first = checkpoint.save(directory, 1, state, replay)
    state = add(state, 6)
    second = checkpoint.save(directory, 2, state, replay, blocking=False, since=1)
    state = add(state, 7)
    second.wait()
    print(first.bytes_written, second.bytes_written)
    restored = checkpoint.restore(directory, replay)
    np.save(f"{directory}/drawn{rank}.npy", draw(restored, 20))
    jax.distributed.shutdown()
    """
    written = [tuple(map(int, out.split())) for out in check(launch(tmp_path, code, code))]
    # Each process has written its half: 16 rows of 48 bytes, and of the second step at most that.
    assert [first for first, _ in written] == [16 * 48] * 2
    assert checkpoint.latest_step(tmp_path) == 2
    drawn = [np.load(tmp_path / f"drawn{i}.npy") for i in range(2)]
    np.testing.assert_array_equal(*drawn)

    table = gear.TableSpec({"x": gear.ColumnSpec((4,), jnp.float32)}, 3, 32)
    for n in (0, 2):
        replay = make(n, gear.selectors.Permutation(), table, streams=8)
        state = checkpoint.restore(tmp_path, replay)
        for i in range(20):
            state, sample = replay.sample(state, jax.random.key(i), 8)
            np.testing.assert_array_equal(to_numpy(sample.data["x"]), drawn[0][i])
    # And what one process has saved, two read.
    checkpoint.save(tmp_path / "one", 1, checkpoint.restore(tmp_path, replay), replay)
    code = """
    np.save(f"{directory}/again{rank}.npy", draw(checkpoint.restore(directory + "/one", replay), 20))
    jax.distributed.shutdown()
    """
    check(launch(tmp_path, code, code))
    np.testing.assert_array_equal(np.load(tmp_path / "again1.npy"), drawn[0])


def test_all_or_nothing_over_processes(tmp_path):
    code = """
    state = add(replay.init(), 0)
    checkpoint.save(directory, 1, state, replay)
    state = add(state, 1)
    if rank == 1:
        from gear_jax._checkpoint import _files
        def full(*args):
            raise OSError(28, "No space left on device")
        _files.write_part = full
    for step, options in (2, {}), (3, {"blocking": False}):
        try:
            checkpoint.save(directory, step, state, replay, **options).wait()
            print("saved")
        except Exception as e:
            print(type(e).__name__, "process", rank, "No space left" in str(e), "1:" in str(e))
    assert checkpoint.latest_step(directory) == 1, os.listdir(directory)
    restored = checkpoint.restore(directory, replay)
    jax.distributed.shutdown()
    """
    said = check(launch(tmp_path, code, code))
    assert said[0].splitlines() == ["RuntimeError process 0 True True"] * 2
    assert said[1].splitlines() == ["OSError process 1 True False"] * 2


def test_damage_seen_by_one_process_is_an_error_on_both(tmp_path):
    code = """
    checkpoint.save(directory, 1, add(replay.init(), 0), replay)
    if rank == 0:
        os.unlink(f"{directory}/1/columns/0/c.7.0.0")
    state = add(replay.init(), 0)  # after the removal, on both
    jax.block_until_ready(state.length)
    try:
        checkpoint.restore(directory, replay)
    except Exception as e:
        print(type(e).__name__, str(e)[:200])
    jax.distributed.shutdown()
    """
    said = check(launch(tmp_path, code, code))
    assert said[0].startswith("RuntimeError restore: got failures on processes [1]")
    assert said[1].startswith("ValueError checkpoint")


def test_a_process_that_dies_leaves_the_previous_step(tmp_path):
    survivor = """
    state = add(replay.init(), 0)
    checkpoint.save(directory, 1, state, replay)
    os.environ["GEAR_JAX_TIMEOUT"] = "10"
    try:
        checkpoint.save(directory, 2, add(state, 1), replay)
    except Exception as e:
        print(type(e).__name__, e)
        os._exit(3)  # at its end, a process would wait for the other once more
    """
    victim = """
    state = add(replay.init(), 0)
    checkpoint.save(directory, 1, state, replay)
    from gear_jax._checkpoint import _files
    _files.write_part = lambda *args: os._exit(9)
    checkpoint.save(directory, 2, add(state, 1), replay)
    """
    (code, out, err), (died, _, _) = launch(tmp_path, survivor, victim)
    assert (code, died) == (3, 9), err[-4000:]
    assert out.startswith("RuntimeError save: got no word from another process within 10 s")
    assert checkpoint.latest_step(tmp_path) == 1
