"""What `gear_jax.external` asks of CUDA and CuPy, for which others stand in here. test_buffer.py on a GPU asks them."""

import gc
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import external, ops
from gear_jax.external import _registration

pytestmark = pytest.mark.cpu
TABLE = (2, 3, 7)


def aligned(nbytes):
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


@pytest.fixture
def gpu(fake_gpu):
    return fake_gpu


class TestOnAFakeGpu:
    @pytest.mark.parametrize(("offset", "alignment"), [(0, 128), (64, 16), (16, 16), (8, 1), (129, 1), (256, 128)])
    def test_alignments(self, gpu, offset, alignment):
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        with external.from_buffer(memory, TABLE, np.uint8, offset=offset, device=gpu.device) as table:
            assert table.addresses().alignment == alignment

    def names(self, gpu):
        return [c[0] for c in gpu.calls]

    def test_what_is_asked_of_cuda_and_cupy(self, gpu):
        memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
        start = np.frombuffer(memory, np.uint8).ctypes.data
        offset = mmap.PAGESIZE + 64
        table = external.from_buffer(memory, TABLE, np.float32, offset=offset, device=gpu.device)
        assert gpu.calls == [("lock", start, 3 * mmap.PAGESIZE, 3)]  # portable, mapped
        addresses = table.addresses()
        assert gpu.calls[1:] == [("register", start + offset, 168, [0, 1])]
        assert (table.addresses().words == addresses.words).all() and len(gpu.calls) == 2
        assert table.array.unsafe_buffer_pointer() == start + offset
        table.close()
        assert gpu.calls[2:] == [("unregister", 1), ("unlock", start)]
        table.close()
        assert len(gpu.calls) == 4

    def test_whole_pages_are_locked(self, gpu):
        memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        view = np.frombuffer(memory, np.uint8)[100:200]
        with external.from_buffer(view, (1, 1, 100), np.uint8, device=gpu.device):
            assert gpu.calls == [("lock", view.ctypes.data - 100, mmap.PAGESIZE, 3)]

    def test_a_read_only_buffer_is_locked_to_be_read(self, gpu):
        memory = mmap.mmap(-1, mmap.PAGESIZE, access=mmap.ACCESS_READ)
        with external.from_buffer(memory, (1, 1, 100), np.uint8, device=gpu.device):
            assert gpu.calls[0][3] == 3 | 8

    def test_an_empty_buffer_is_not_locked(self, gpu):
        with external.from_buffer(b"", (1, 0, 4), np.uint8, device=gpu.device) as table:
            table.addresses()
            assert self.names(gpu) == ["register"]

    def test_tables_of_one_buffer_share_the_lock(self, gpu):
        memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        tables = [external.from_buffer(memory, TABLE, np.float32, offset=k * 192, device=gpu.device) for k in range(3)]
        for k in (0, 2):
            tables[k].close()
        assert self.names(gpu) == ["lock"]
        tables[1].close()
        assert self.names(gpu) == ["lock", "unlock"]

    def test_buffers_that_share_pages(self, gpu):
        view = np.frombuffer(mmap.mmap(-1, 3 * mmap.PAGESIZE), np.uint8)
        page = mmap.PAGESIZE
        with external.from_buffer(view[: page + 1], (1, 1, 1), np.uint8, device=gpu.device):
            with pytest.raises(ValueError, match=r"shares pages with the buffer of another table.*with offset="):
                external.from_buffer(view[page + 1 :], (1, 1, 1), np.uint8, device=gpu.device)
            with external.from_buffer(view[page : page + 1], (1, 1, 1), np.uint8, device=gpu.device):
                assert self.names(gpu) == ["lock"]

    def test_memory_that_somebody_else_has_locked(self, gpu):
        memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        start = np.frombuffer(memory, np.uint8).ctypes.data
        gpu.cupy.refuses, gpu.cupy.others = 712, [(start, start + 2 * mmap.PAGESIZE)]
        with external.from_buffer(memory, TABLE, np.float32, device=gpu.device) as table:
            table.addresses()
        assert self.names(gpu) == ["lock", "register", "unregister"]  # and not ours to unlock
        gpu.cupy.others = [(start, start + mmap.PAGESIZE)]
        with pytest.raises(RuntimeError, match="no part of the memory may be locked already"):
            external.from_buffer(memory, TABLE, np.float32, device=gpu.device)

    @pytest.mark.parametrize(("status", "error"), [(2, MemoryError), (1, RuntimeError), (801, RuntimeError)])
    def test_memory_that_cannot_be_locked(self, gpu, status, error):
        gpu.cupy.refuses = status
        with pytest.raises(
            error, match=f"page-locking .* bytes of read-only memory: got cudaError {status}.*ulimit -l"
        ):
            external.from_buffer(bytes(168), TABLE, np.float32, device=gpu.device)

    def test_memory_that_a_gpu_cannot_read(self, gpu):
        gpu.cuda.error = "the memory is not page-locked"
        with external.from_buffer(bytearray(168), TABLE, np.float32, device=gpu.device) as table:
            with pytest.raises(RuntimeError, match="not page-locked"):
                table.addresses()
            gpu.cuda.error = None
            table.addresses()

    def test_a_dtype_that_cupy_does_not_have(self, gpu):
        with external.from_buffer(bytearray(84), TABLE, jnp.bfloat16, device=gpu.device) as table:
            with pytest.raises(TypeError, match=r"External.array: got dtype bfloat16 \(no such dtype\).*addresses\(\)"):
                table.array  # noqa: B018
            table.addresses()

    def test_it_closes_while_the_error_of_its_array_is_on_its_way(self, gpu):
        with pytest.raises(TypeError, match="bfloat16"):
            with external.from_buffer(bytearray(84), TABLE, jnp.bfloat16, device=gpu.device) as table:
                table.array  # noqa: B018
        assert self.names(gpu) == ["lock", "unlock"]

    def test_the_memory_stays_locked_while_an_array_views_it(self, gpu, monkeypatch):
        monkeypatch.setattr("gear_jax.external._buffer._PATIENCE", 0.0)
        table = external.from_buffer(aligned(168), TABLE, np.float32, device=gpu.device)
        other = jax.device_put(table.array, may_alias=True)  # shares its memory
        view = np.asarray(other)
        with pytest.raises(BufferError, match=r"External.close: got arrays that share the table's memory, wanted none"):
            table.close()
        assert table.closed and self.names(gpu) == ["lock"]
        del other, view
        table.close()
        assert self.names(gpu) == ["lock", "unlock"]

    def test_a_forgotten_table_is_unlocked_when_its_array_is_gone(self, gpu):
        table = external.from_buffer(aligned(168), TABLE, np.float32, device=gpu.device)
        table.addresses()
        array = table.array
        del table
        external.check()
        external.check()
        assert self.names(gpu) == ["lock", "register", "unregister"]
        del array
        gc.collect()
        external.check()
        assert self.names(gpu) == ["lock", "register", "unregister", "unlock"]

    def test_without_cupy(self, gpu):
        gpu.lose_cupy()
        with pytest.raises(ImportError, match=r"got no CuPy .*pip install cupy-cuda13x") as e:
            external.from_buffer(bytes(168), TABLE, np.float32, device=gpu.device)
        assert e.value.name == "cupy"


def test_a_gpu_needs_the_cuda_library(monkeypatch):
    def refuse():
        raise RuntimeError("no handlers")

    monkeypatch.setattr(ops, "check_platform", refuse)
    with pytest.raises(RuntimeError, match="no handlers"):
        _registration.gpus("gpu")
    assert _registration.gpus("cpu") == []


def test_addresses_of_a_gpus_array_that_it_cannot_read(gpu, monkeypatch):
    gpu.cuda.error = "the memory is not page-locked"
    monkeypatch.setattr(_registration, "gpus", lambda platform: [0])
    with pytest.raises(RuntimeError, match="not page-locked"):
        external.addresses(jnp.zeros(TABLE, jnp.float32))
    assert gpu.calls[-1][0] == "register"
