"""The memory of a ring: its bytes, who may have it, and what is wrong with other files."""

import os
import pathlib
import struct
import subprocess
import sys
import threading
import types

import ml_dtypes
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.actors import (
    RingBusyError,
    RingElsewhereError,
    RingError,
    RingForeignError,
    RingMissingError,
    RingSpaceError,
    Writer,
    _clean,
    make_ring,
    open_ring,
)
from gear_jax.actors._clean import clean, rings

STEPS = 4


def fnv1a(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def test_golden_bytes(ring):
    data = ring.held.bytes().tobytes()
    magic, version, order, digest, nbytes, steps, lanes, slots, columns, rows = struct.unpack_from("<8sIIQQQIIII", data)
    assert (magic, version, order) == (b"GEARRING", 1, 0x01020304)
    assert (nbytes, steps, lanes, slots, columns, rows) == (len(data), STEPS, 2, 3, 7, 2)
    lanes_at, slots_at, columns_at, data_at = struct.unpack_from("<4Q", data, 56)
    assert (lanes_at, slots_at, columns_at) == (384, 384 + 2 * 128, 384 + 2 * 128 + 6 * 64)
    assert digest == fnv1a(data[24:88] + data[columns_at : columns_at + 7 * 240])
    assert digest == 0x2F8186BBE2B64B95  # of exactly this ring
    assert data_at % 4096 == 0
    names = []
    end = data_at
    for i in range(columns):
        name, dtype, kind, rank = struct.unpack_from("<120s24sII", data, columns_at + 240 * i)
        shape = struct.unpack_from("<8q", data, columns_at + 240 * i + 152)[:rank]
        item, offset, size = struct.unpack_from("<3Q", data, columns_at + 240 * i + 216)
        lead = 2 * 3 * STEPS if kind == 0 else 2 * 2
        assert offset == end and offset % 64 == 0
        assert size == lead * int(np.prod(shape)) * item
        end = -(-(offset + size) // 64) * 64
        names.append((name.rstrip(b"\0").decode(), dtype.rstrip(b"\0").decode(), kind, shape))
    assert names == [
        ("action", "int32", 0, ()), ("done", "bool", 0, ()), ("observation/image", "uint8", 0, (3, 5)),
        ("observation/position", "float32", 0, (3,)), ("image", "uint8", 1, (3, 5)), ("position", "float32", 1, (3,)),
        ("", "float32", 2, (2,)),
    ]  # fmt: skip


def test_arrays_lie_in_the_memory(ring):
    memory = ring.held.bytes()
    for array in ring.columns:
        assert array.shape[:2] == (6, STEPS) and array.ctypes.data % 64 == 0
        assert np.shares_memory(array, memory)
    other = open_ring(ring.name, ring.directory)
    ring.columns[0][5, 3] = 77
    assert other.columns[0][5, 3] == 77
    kept = other.columns[0]
    del other
    assert kept[5, 3] == 77  # the memory stays as long as an array over it
    assert open_ring(ring.path).specs == ring.specs


def test_dtypes_of_ml_dtypes_and_odd_trees(shm):
    from typing import NamedTuple

    class Pair(NamedTuple):
        low: object
        high: object

    columns = [Pair(gear.ColumnSpec((1,), ml_dtypes.bfloat16), gear.ColumnSpec((), "complex64")), ()]
    columns.append({2: gear.ColumnSpec((), "float16"), 1: gear.ColumnSpec((2, 1, 3), ml_dtypes.float8_e4m3fn)})
    ring = make_ring(gear.TableSpec(columns, 1, 1), 1, 1, directory=shm)
    assert ring.names == ["0/low", "0/high", "2/1", "2/2"]
    assert ring.columns[0].dtype == ml_dtypes.bfloat16 and ring.columns[2].shape == (1, 1, 2, 1, 3)
    ring.unlink()


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"actors": 0}, ValueError, "actors: got 0"),
        ({"slots": True}, ValueError, "slots: got True"),
        ({"name": "a/b"}, ValueError, "name: got 'a/b'"),
        ({"name": "x" * 101}, ValueError, "name: got"),
        ({"ask": gear.ColumnSpec((), "int32")}, ValueError, "ask, answer: got one of them"),
        ({"ask": {"a": 1}, "answer": gear.ColumnSpec((), "int32")}, TypeError, r"ask\['a'\]: got int"),
        ({"actors": 2**20, "slots": 2}, RingError, "at most 1048575 slots"),
        ({"actors": 2**16, "slots": 2**14, "table": 2**20}, RingSpaceError, "the ring's memory: got"),
    ],
)
def test_arguments(shm, table, change, error, text):
    if "table" in change:
        table = gear.TableSpec(table.columns, change["table"], 1)
    with pytest.raises(error, match=text):
        make_ring(table, **{"actors": 2, "directory": shm, **{k: v for k, v in change.items() if k != "table"}})


def test_a_full_file_system_is_an_error_at_once(shm, table, monkeypatch):
    monkeypatch.setattr("gear_jax._host_memory.available", lambda: None)
    room = os.statvfs(shm)
    long = gear.TableSpec(table.columns, -(-room.f_bavail * room.f_frsize // 1000), 1)
    with pytest.raises(RingSpaceError, match=r"the ring's shared memory: got .* free in .*doctor --clean-shm"):
        make_ring(long, 10, 10, directory=shm)


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_a_file_system_that_is_smaller_than_it_says(tmp_path, table):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        with pytest.raises(RingSpaceError, match="doctor --clean-shm"):
            make_ring(table, 100, 100, directory=str(tmp_path))
        assert os.listdir(tmp_path) == []
        make_ring(table, 1, 1, directory=str(tmp_path)).unlink()
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True, timeout=30)


def test_names(ring, shm, table):
    with pytest.raises(RingMissingError, match="Start the learner first"):
        open_ring("no-such", shm)
    with pytest.raises(ValueError, match="name: got"):
        open_ring("../x", shm)
    named = make_ring(table, 1, name="run_1", directory=shm)
    with pytest.raises(RingBusyError, match="the name of a file that is there"):
        make_ring(table, 1, name="run_1", directory=shm)
    named.unlink()
    make_ring(table, 1, name="run_1", directory=shm).unlink()
    ring.check_whole()
    os.truncate(ring.path, ring.nbytes - 4096)
    with pytest.raises(RingForeignError, match="a file that was cut short"):
        ring.check_whole()
    with pytest.raises(RingForeignError, match="cut short"):
        Writer(ring.path)


@pytest.mark.parametrize("content", [b"", b"x", b"GEARRING" + bytes(500), os.urandom(8192)])
def test_other_files(shm, content):
    path = os.path.join(shm, f"gear_jax.{os.getuid()}.x")
    with open(path, "wb") as file:
        file.write(content)
    with pytest.raises(RingForeignError, match="got "):
        open_ring("x", shm)
    assert [r.stale for r in rings(shm)] == [True]
    assert [str(p) for p in clean(shm)] == [path]


def test_another_version_and_another_container(ring):
    memory = ring.held.bytes()
    memory[8] = 2
    with pytest.raises(RingForeignError, match=r"version 2, wanted version 1. Use the same gear_jax"):
        open_ring(ring.path)
    memory[8] = 1
    memory[88] ^= 1
    with pytest.raises(RingElsewhereError, match="PID namespace"):
        open_ring(ring.path)
    memory[88] ^= 1


_HOLD = """
import os, sys, time
import gear_jax as gear
from gear_jax.actors import make_ring, open_ring, Writer
table = gear.TableSpec({"x": gear.ColumnSpec((), "int32")}, 1, 1)
ring = make_ring(table, 1, name=sys.argv[2], directory=sys.argv[1])
if sys.argv[2] == "held": writer = Writer(ring)
if sys.argv[2] == "unfinished":
    os.rename(ring.path, ring.path + ".new-" + str(gear.actors._ring.core().owner_of(0)))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["held", "mapped", "unfinished"])
def test_only_what_nobody_holds_is_removed(shm, name):
    with subprocess.Popen([sys.executable, "-c", _HOLD, shm, name], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            (found,) = rings(shm)
            assert (found.stale, found.holders) == (False, (process.pid,))
            assert clean(shm) == [] and len(os.listdir(shm)) == 1
        finally:
            process.kill()
            process.wait(30)
    assert [p.name for p in clean(shm)] == [found.path.name]


@pytest.fixture
def strangers(monkeypatch):
    """Processes are those of another container: what is known of them here says that they are dead."""
    monkeypatch.setattr(_clean, "_mapped_by", lambda *_: ())
    monkeypatch.setattr(_clean, "core", lambda: types.SimpleNamespace(life_of=lambda _: "dead"))


def test_a_ring_that_a_stranger_makes_is_not_removed(shm, strangers):
    with subprocess.Popen([sys.executable, "-c", _HOLD, shm, "unfinished"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            assert [r.stale for r in rings(shm)] == [False] and clean(shm) == []
        finally:
            process.kill()
            process.wait(30)
    assert len(clean(shm)) == 1


def test_a_ring_that_is_found_while_others_clean_up_is_not_removed(shm, table, monkeypatch):
    make_ring(table, 1, name="found", directory=shm)
    (found,) = rings(shm)
    assert found.stale
    ring = open_ring("found", shm)
    with monkeypatch.context() as patch:
        patch.setattr(_clean, "rings", lambda _: [found])
        assert clean(shm) == []
    assert open_ring("found", shm).path == ring.path
    del ring
    assert clean(shm) == [found.path]


def test_rings_are_made_and_found_while_others_clean_up(shm, table, strangers):
    done = threading.Event()

    def clean_up():
        while not done.is_set():
            for path in os.listdir(shm):  # without a look at who owns them
                with _clean._alone(pathlib.Path(shm, path)) as alone:
                    if alone:
                        os.unlink(os.path.join(shm, path))

    others = [threading.Thread(target=clean_up) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for i in range(300):
            ring = make_ring(table, 1, name=f"{i}", directory=shm)
            assert open_ring(f"{i}", shm).nbytes == ring.nbytes
    finally:
        done.set()
        for other in others:
            other.join()
    del ring
    clean(shm)
    assert os.listdir(shm) == []


def test_an_unnamed_ring_goes_with_its_maker(shm, table):
    ring = make_ring(table, 1, directory=shm)
    assert os.listdir(shm)
    del ring
    assert os.listdir(shm) == []


def test_a_ring_that_cannot_be_leaves_no_file(shm):
    table = gear.TableSpec({"x": gear.ColumnSpec((), "int32")}, 1, 1)
    with pytest.raises(TypeError, match="versions: got 'x', wanted True or False"):
        make_ring(table, 2, name="x", versions="x", directory=shm)
    with pytest.raises(ValueError, match="name: got ''"):
        make_ring(table, 2, name="", directory=shm)
    assert os.listdir(shm) == []
