"""The ring's memory as the table's device reads it: one lock for all of it, no copy, given up before it is unmapped.

What stands for a GPU and CuPy shows what is asked of them; on a GPU test_ingest.py asks them.
"""

import gc
import os
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax import external
from gear_jax.actors import Ingest, RingBusyError, Writer, _views, make_ring, open_ring
from gear_jax.ops import _hlo
from gear_jax.testing.ops import assert_calls_in_place, column_sized

ACTORS, SLOTS, STEPS = 2, 4, 64


def specs(**more):
    columns = {"image": gear.ColumnSpec((16, 16), jnp.uint8), "x": gear.ColumnSpec((64, 1), jnp.float32), **more}
    return gear.TableSpec({"seen": columns, "done": gear.ColumnSpec((), jnp.bool_)}, STEPS, 32)


@pytest.mark.usefixtures("bridge")
@pytest.mark.parametrize(
    "options, arguments",
    [
        ({}, {}),
        ({"partitions": 2, "selector": gear.selectors.Prioritized()}, {"priorities": jnp.ones(4, jnp.float32)}),
        ({"selector": gear.selectors.Uniform(times=2), "max_staleness": 3}, {"version": jnp.zeros(4, jnp.int32)}),
    ],
)
def test_a_program_that_adds_reads_the_ring_itself(shm, memory, options, arguments):
    """The ring's arrays go into the write as they are: the program makes nothing that is as large as one of them."""
    replay = gear.make_replay(specs(), memory=memory, **options)
    with Ingest(replay, actors=ACTORS, slots=SLOTS, directory=shm) as ingest:
        state, rows = replay.init(), jnp.arange(4, dtype=jnp.int32)

        def add(state, values):
            return replay.add(state, values, rows + 1, rows=rows, **arguments)

        text = jax.jit(add, donate_argnums=0).lower(state, ingest._tree).compile().as_text()
        assert_calls_in_place(text, state.columns, jax.default_backend())
        writes = [c for c in _hlo.calls(text) if "scatter" in c.target]
        read = [a.key for call in writes for a in call.operands if a]
        arrays, leaves = dict(zip(ingest.ring.names, ingest.ring.columns, strict=True)), jax.tree.leaves(ingest._tree)
        for name, x in zip(replay.config.names, leaves, strict=True):
            assert x.unsafe_buffer_pointer() == arrays[name].ctypes.data
            assert x.shape[:2] == (ACTORS * SLOTS, STEPS) and x.format.layout.major_to_minor == tuple(range(x.ndim))
            assert read.count((_hlo.dtype_name(x.dtype), x.shape)) == 1
        large = ingest._tree["seen"]["image"].nbytes
        assert column_sized(text, large) == []

        def careless(state, values):
            return add(state, jax.tree.map(lambda v: v[::-1], values))

        text = jax.jit(careless, donate_argnums=0).lower(state, ingest._tree).compile().as_text()
        assert column_sized(text, large) != []


_PEAK = """
import sys, jax, gear_jax as gear
from gear_jax.actors import Ingest, Writer
replay = gear.make_replay(gear.TableSpec({"x": gear.ColumnSpec((1 << 20,), "uint8")}, 1, 8))
peak = lambda: jax.devices()[0].memory_stats()["peak_bytes_in_use"]
with Ingest(replay, actors=1, slots=32, directory=sys.argv[1]) as ingest, Writer(ingest.ring) as writer:
    state = replay.init()
    before = peak()
    for i in range(3):
        writer.begin()["x"][:] = i + 1
        writer.commit(1)
        state, n = ingest.drain(state)
        assert n == 1
    print(peak() - before)
state, sample = replay.sample(state, jax.random.key(0), 64)
assert set(sample.data["x"][:, 0, -1].tolist()) == {1, 2, 3}
"""


@pytest.mark.gpu
@pytest.mark.usefixtures("bridge")
def test_nothing_of_the_ring_is_in_the_gpus_memory(shm):
    words = [sys.executable, "-c", _PEAK, shm]
    run = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 1 << 20  # of a ring of 32 MiB; not even one trajectory


def mapped(path):
    with open("/proc/self/maps") as maps:
        return any(path in line for line in maps)


@pytest.mark.cpu
@pytest.mark.parametrize("closed", [False, True])
def test_nothing_of_the_ring_is_left_behind(shm, closed):
    ingest = Ingest(gear.make_replay(specs()), actors=1, directory=shm)
    path = ingest.ring.path
    assert mapped(path)
    if closed:
        ingest.close()
    del ingest
    gc.collect()
    assert not mapped(path) and not os.listdir(shm)


@pytest.fixture
def gpu(fake_gpu, monkeypatch):
    for module in (_views, external._buffer):
        monkeypatch.setattr(module, "default_device", lambda: fake_gpu.device)
    return fake_gpu


def locks(gpu):
    return [c[0] for c in gpu.calls]


def write(writer, code, length=3):
    views = writer.begin(timeout=0)
    jax.tree.map(lambda v: v.__setitem__(slice(length), code % 2), views)
    writer.commit(length)


@pytest.mark.cpu
class TestOnAFakeGpu:
    @pytest.fixture
    def replay(self):
        return gear.make_replay(specs())

    def test_the_ring_is_locked_once_and_unlocked_by_close(self, gpu, shm, replay):
        ingest = Ingest(replay, actors=ACTORS, slots=SLOTS, directory=shm)
        ring = ingest.ring
        memory = ring.held.bytes()
        assert gpu.calls == [("lock", memory.ctypes.data, memory.nbytes, 3)]  # portable, mapped, to be written
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(ingest._tree)]
        assert sorted(pointers) == sorted(c.ctypes.data for c in ring.columns)
        assert all(p % 64 == 0 for p in pointers)
        with Writer(ring) as writer:
            write(writer, 1)
            state, n = ingest.drain(replay.init())
        assert n == 1 and np.asarray(state.columns["done"])[0, 0, :4].tolist() == [True] * 3 + [False]
        ingest.close()
        assert locks(gpu) == ["lock", "unlock"]
        ingest.close()
        assert locks(gpu) == ["lock", "unlock"]
        assert ring.columns[0].sum() >= 0  # who still looks at it may go on

    def test_learners_one_after_the_other(self, gpu, shm, replay):
        ring = make_ring(specs(), ACTORS, SLOTS, name="again", directory=shm)
        for taken in (ring, ring, ring.path):  # the same memory again, and mapped once more
            with Writer(ring) as writer:
                write(writer, 1)
            ingest = Ingest(replay, taken)
            with pytest.raises(RingBusyError):
                Ingest(replay, ring)
            assert ingest.drain(replay.init())[1] == 1
            ingest.close(keep=True)
            assert ring.report()["learner"] == "free"
        assert locks(gpu) == ["lock", "unlock"] * 3
        ring.unlink()

    def test_one_that_is_forgotten_is_unlocked_before_it_is_unmapped(self, gpu, shm, replay, monkeypatch):
        there, real = [], gpu.cupy.cuda.runtime.hostUnregister

        def unregister(pointer):
            there.append(mapped(path))
            real(pointer)

        monkeypatch.setattr(gpu.cupy.cuda.runtime, "hostUnregister", unregister)
        ingest = Ingest(replay, actors=1, directory=shm)
        path, gone = ingest.ring.path, weakref.ref(ingest)
        del ingest
        gc.collect()
        assert gone() is None and not os.path.exists(path)
        external.check()
        assert there == [True]
        gc.collect()
        assert not mapped(path)

    @pytest.mark.parametrize("name", [None, "kept"])
    @pytest.mark.parametrize(("status", "error"), [(2, MemoryError), (1, RuntimeError)])
    def test_memory_that_cannot_be_locked(self, gpu, shm, replay, status, error, name):
        gpu.cupy.refuses = status
        with pytest.raises(error, match=r"page-locking .*ulimit -l.* Pass copy=True: each trajectory is then copied"):
            Ingest(replay, actors=1, name=name, directory=shm)
        assert os.listdir(shm) == []  # what it had made
        ring = make_ring(specs(), 1, name="other", directory=shm)
        with pytest.raises(error):
            Ingest(replay, ring)
        assert ring.report()["learner"] == "free" and not ring.closed
        with Ingest(replay, ring, copy=True) as ingest, Writer(ring) as writer:
            write(writer, 1)
            assert ingest.drain(replay.init())[1] == 1
        assert "unlock" not in locks(gpu)

    def test_without_cupy(self, gpu, shm, replay):
        gpu.lose_cupy()
        with pytest.raises(ImportError, match=r"got no CuPy .*pip install cupy-cuda13x.* Pass copy=True"):
            Ingest(replay, actors=1, directory=shm)
        assert os.listdir(shm) == []
        Ingest(replay, actors=1, copy=True, directory=shm).close()

    def test_a_dtype_that_cupy_does_not_have(self, gpu, shm):
        replay = gear.make_replay(specs(low=gear.ColumnSpec((), jnp.bfloat16)))
        with pytest.raises(TypeError, match=r"column 'seen/low': got bfloat16, .*wanted bool, .* Pass copy=True"):
            Ingest(replay, actors=1, directory=shm)
        assert locks(gpu) == ["lock", "unlock"] and os.listdir(shm) == []

    def test_another_platform(self, gpu, replay):
        gpu.device.platform = "tpu"
        with pytest.raises(ValueError, match=r"replay: got a table on tpu, wanted .*a CPU or a GPU. Pass copy=True"):
            Ingest(replay, actors=1)


@pytest.mark.usefixtures("bridge")
def test_what_is_in_a_ring_of_other_offsets(shm):
    """Columns that begin at odd multiples of 64 bytes, and rows at any byte."""
    columns = {f"c{i}": gear.ColumnSpec((n,), jnp.uint8) for i, n in enumerate((1, 7, 13, 33, 61))}
    replay = gear.make_replay(gear.TableSpec(columns, 3, 8))
    with Ingest(replay, actors=1, slots=3, directory=shm) as ingest, Writer(ingest.ring) as writer:
        memory = ingest.ring.held.bytes().ctypes.data
        offsets = [c.ctypes.data - memory for c in ingest.ring.columns]
        assert all(o % 64 == 0 for o in offsets) and any(o % 128 for o in offsets)
        rng = np.random.default_rng(0)
        make = lambda c: rng.integers(0, 256, (3, *c.shape)).astype(np.uint8)  # noqa: E731
        wanted = [{k: make(c) for k, c in columns.items()} for _ in range(3)]
        for rows in wanted:
            views = writer.begin()
            for k, v in views.items():
                v[:] = rows[k]
            writer.commit(3)
        state, n = ingest.drain(replay.init())
        assert n == 3
        whole = jnp.full(3, 3, jnp.int32)
        data, _, _ = gear.ops.gather(state.columns, jnp.asarray(ingest.last.handles.slot), whole * 0, whole)
        for i, rows in enumerate(wanted):
            for k in columns:
                np.testing.assert_array_equal(np.asarray(data[k])[i], rows[k])
    assert not os.listdir(shm)
    with pytest.raises(gear.actors.RingMissingError):
        open_ring(ingest.ring.name, shm)
