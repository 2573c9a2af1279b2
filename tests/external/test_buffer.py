"""`from_buffer`: what can be a table, and how it ends."""

import contextlib
import dataclasses
import gc
import mmap
import sys
import tempfile
import threading
import weakref
from multiprocessing import shared_memory

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import external, ops
from gear_jax.specs import Window
from gear_jax.testing.ops import DTYPES, assert_same_bits, dtype_of, gather_oracle, random_rows, random_values

FAILED = (jax.errors.JaxRuntimeError, ValueError)
TABLE = (2, 3, 7)


@pytest.fixture
def bridge():
    """`from_buffer` on a GPU needs CuPy."""
    if jax.default_backend() == "gpu":
        pytest.importorskip("cupy")


def ids(*numbers):
    return jnp.asarray(numbers, jnp.int32)


def check(table, column, seed=0):
    """A table reads what the column holds."""
    rows, window = random_rows(np.random.default_rng(seed), column.shape[:3], (9,)), Window(-2, 4, "head", 1)
    data, mask, _ = jax.jit(lambda t, r: ops.gather(t, *r, window))(table, rows)
    assert_same_bits((data, mask), gather_oracle(column, *rows, window))


def read(table):
    """One row."""
    return ops.gather(table, ids(0), ids(0), ids(9))[0]


def fails_in_the_end(call, text):
    """A call fails with a text; on a GPU its kernel cannot, and the next one does."""
    with pytest.raises(FAILED, match=text):
        for _ in range(2):
            jax.block_until_ready(call())


def read_only_pages():
    """Skips where a GPU does not lock them."""
    supported = 113  # cudaDevAttrHostRegisterReadOnlySupported
    if jax.default_backend() == "gpu" and not sys.modules["cupy"].cuda.runtime.deviceGetAttribute(supported, 0):
        pytest.skip("the GPU locks no read-only memory")


@contextlib.contextmanager
def shared(nbytes):
    memory = shared_memory.SharedMemory(create=True, size=max(1, nbytes))
    try:
        yield memory
    finally:
        memory.close()
        memory.unlink()


def aligned(nbytes):
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


@pytest.mark.usefixtures("bridge")
class TestFromBuffer:
    def test_shared_memory(self):
        column = random_values(np.random.default_rng(0), (*TABLE, 5), np.float32)
        with shared(column.nbytes) as memory, external.from_buffer(memory.buf, column.shape, np.float32) as table:
            view = np.frombuffer(memory.buf, np.float32, column.size).reshape(column.shape)
            view[:] = column
            check(table.addresses(), column)
            np.testing.assert_array_equal(table.array, column)
            view[:] = column[::-1]  # it is the same memory
            check(table.addresses(), column[::-1])
            del view
        # `shared` closes it, which needs that nothing views it any more

    def test_a_mapped_file(self):
        read_only_pages()
        column = random_values(np.random.default_rng(0), (*TABLE, 5), np.int16)
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.write(bytes(64) + column.tobytes())
            file.flush()
            self.check_file(file, column)

    @pytest.mark.cpu
    def test_a_mapped_file_on_a_disk(self, tmp_path):
        column = random_values(np.random.default_rng(0), (*TABLE, 5), np.int16)
        path = tmp_path / "table"
        path.write_bytes(bytes(64) + column.tobytes())
        with path.open("rb") as file:
            self.check_file(file, column)

    def check_file(self, file, column):
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            with external.from_buffer(mapped, column.shape, np.int16, offset=64) as table:
                check(table.addresses(), column)
                np.testing.assert_array_equal(table.array, column)

    def test_a_read_only_buffer(self):
        read_only_pages()
        column = random_values(np.random.default_rng(0), TABLE, np.uint8)
        with external.from_buffer(column.tobytes(), TABLE, np.uint8) as table:
            check(table.addresses(), column)

    @pytest.mark.parametrize("offset", [0, 1, 2, 3, 8, 16, 17, 48, 63, 64])
    def test_any_alignment(self, offset):
        column = random_values(np.random.default_rng(offset), (*TABLE, 16), np.uint8)
        memory = np.zeros(column.nbytes + 200, np.uint8)
        offset += -memory.ctypes.data % 64
        memory[offset : offset + column.nbytes] = column.reshape(-1)
        with external.from_buffer(memory, column.shape, np.uint8, offset=offset) as table:
            assert (table.addresses().alignment == 1) == ((memory.ctypes.data + offset) % 16 != 0)
            check(table.addresses(), column)

    @pytest.mark.parametrize("shape", [(0, 3, 7), (1, 0, 7), (2, 3, 0), (1, 1, 1), (1, 1, 1, 0)])
    def test_small_tables(self, shape):
        column = np.ones(shape, np.float32)
        with shared(column.nbytes) as memory:
            np.frombuffer(memory.buf, np.float32, column.size)[:] = 1
            with external.from_buffer(memory.buf, shape, np.float32) as table:
                check(table.addresses(), column)
                assert table.array.shape == shape

    def test_every_dtype(self):
        rng = np.random.default_rng(0)
        for dtype in map(dtype_of, DTYPES):
            column = random_values(rng, TABLE, dtype)
            with external.from_buffer(column, TABLE, dtype) as table:
                check(table.addresses(), column)

    def test_arrays_of_every_dtype(self):
        rng = np.random.default_rng(0)
        for dtype in map(dtype_of, DTYPES):
            column = random_values(rng, TABLE, dtype)
            memory = aligned(column.nbytes)
            memory[:] = column.reshape(-1).view(np.uint8)
            with external.from_buffer(memory, TABLE, dtype) as table:
                try:
                    table.array  # noqa: B018
                except TypeError as e:  # CuPy lacks some of ml_dtypes, and which depends on its version
                    assert jax.default_backend() == "gpu" and dtype.isbuiltin != 1
                    assert str(e).startswith(f"External.array: got dtype {dtype}")
                    continue
                assert_same_bits(table.array, column)
                assert table.array.unsafe_buffer_pointer() == memory.ctypes.data
                assert table.array.format.layout.major_to_minor == (0, 1, 2)

    def test_several_tables_of_one_buffer(self):
        columns = random_values(np.random.default_rng(0), (3, *TABLE), np.float32)
        with shared(columns.nbytes) as memory:
            np.frombuffer(memory.buf, np.float32, columns.size)[:] = columns.reshape(-1)
            tables = [
                external.from_buffer(memory.buf, TABLE, np.float32, offset=k * columns[0].nbytes) for k in range(3)
            ]
            for k in (1, 0, 2):
                for j in range(3):
                    if tables[j].closed:
                        continue
                    check(tables[j].addresses(), columns[j])
                tables[k].close()

    def test_the_array_is_no_copy_and_keeps_the_buffer(self):
        memory = aligned(2 * 3 * 7 * 4).view(np.float32)
        table = external.from_buffer(memory, TABLE, np.float32)
        assert table.array is table.array
        assert table.array.unsafe_buffer_pointer() == memory.ctypes.data
        memory[:] = 3
        assert jax.jit(jnp.sum)(table.array) == 3 * 42
        gone = weakref.ref(memory)
        del memory
        gc.collect()
        assert gone() is not None and (table.array == 3).all()
        table.close()
        gc.collect()
        assert gone() is None

    def test_a_table_without_gathers_may_have_any_shape(self):
        with external.from_buffer(aligned(8), (4,), np.int16) as table:
            assert table.array.tolist() == [0] * 4
            with pytest.raises(ValueError, match=r"External.addresses: got shape \(4,\), wanted at least \[P, S, T\]"):
                table.addresses()

    @pytest.mark.cpu
    def test_what_views_the_array_keeps_the_buffer(self):
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        table = external.from_buffer(memory, TABLE, np.float32)
        view, gone = np.asarray(table.array), weakref.ref(memory)
        table.close()
        del memory
        gc.collect()
        assert gone() is not None and (view == 0).all()
        del view
        gc.collect()
        assert gone() is None

    @pytest.mark.cpu
    def test_a_donated_array_is_copied(self):
        memory = aligned(64).view(np.float32)
        with external.from_buffer(memory, (16,), np.float32) as table:
            assert jax.jit(lambda x: x + 1, donate_argnums=0)(table.array).tolist() == [1] * 16
        assert (memory == 0).all()


@pytest.mark.cpu
def test_an_array_must_begin_where_xla_wants_it():
    memory = aligned(200)
    with external.from_buffer(memory, TABLE, np.uint8, offset=16) as table:
        with pytest.raises(ValueError, match=r"External.array: got memory that begins at 16 modulo 64.*addresses\(\)"):
            table.array  # noqa: B018
        check(table.addresses(), np.zeros(TABLE, np.uint8))


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, r"from_buffer: buffer: got 167 bytes, wanted at least 168: float32\[2, 3, 7\] from byte 0 on",
         lambda: external.from_buffer(bytes(167), TABLE, np.float32)),
        (ValueError, "buffer: got 168 bytes, wanted at least 169",
         lambda: external.from_buffer(bytes(168), TABLE, np.float32, offset=1)),
        (ValueError, "offset: got -1, wanted an integer >= 0",
         lambda: external.from_buffer(bytes(168), TABLE, np.float32, offset=-1)),
        (ValueError, "offset: got True", lambda: external.from_buffer(bytes(168), TABLE, np.float32, offset=True)),
        (ValueError, r"shape: got \(2, -3\), wanted integers >= 0",
         lambda: external.from_buffer(bytes(9), (2, -3), "u1")),
        (ValueError, "shape: got 3, wanted integers", lambda: external.from_buffer(bytes(9), 3, "u1")),
        (ValueError, r"shape: got \(1.5,\)", lambda: external.from_buffer(bytes(9), (1.5,), "u1")),
        (TypeError, "dtype: got float64, wanted numbers of whole bytes.*jax_enable_x64",
         lambda: external.from_buffer(bytes(8), (1,), np.float64)),
        (TypeError, "dtype: got object", lambda: external.from_buffer(bytes(8), (1,), object)),
        (TypeError, "dtype: got int4", lambda: external.from_buffer(bytes(8), (1,), jnp.int4)),
        (TypeError, "dtype: got >f4", lambda: external.from_buffer(bytes(8), (1,), ">f4")),
        (TypeError, "dtype: got datetime64", lambda: external.from_buffer(bytes(8), (1,), "M8[s]")),
        (TypeError, "dtype: got nonsense", lambda: external.from_buffer(bytes(8), (1,), "nonsense")),
        (TypeError, "buffer: got list, wanted something with the buffer protocol",
         lambda: external.from_buffer([1, 2], (2,), np.uint8)),
        (TypeError, "buffer: got ndarray, wanted something with the buffer protocol, of numbers",
         lambda: external.from_buffer(np.array([object()]), (2,), np.uint8)),
        (TypeError, "buffer: got a jax.Array, wanted memory that JAX did not allocate",
         lambda: external.from_buffer(jnp.zeros(2), (2,), np.float32)),
        (ValueError, "buffer: got memory in pieces", lambda: external.from_buffer(np.zeros(8)[::2], (2,), np.float32)),
        (ValueError, "buffer: got memory in pieces",
         lambda: external.from_buffer(memoryview(bytes(8))[::2], (2,), np.uint8)),
    ],
)  # fmt: skip
def test_what_is_no_table(error, text, call):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.usefixtures("bridge")
class TestClose:
    CLOSED = "External: got one that is closed, wanted an open one. .*from_buffer"

    def open(self):
        return external.from_buffer(aligned(168).view(np.float32), TABLE, np.float32)

    def test_everything_says_so(self):
        table = self.open()
        array, addresses = table.array, table.addresses()
        compiled = jax.jit(read).lower(addresses).compile()
        assert not table.closed and "closed" not in repr(table)
        table.close()
        table.close()
        assert table.closed and repr(table) == "External(float32[2, 3, 7], closed)"
        for use in (
            lambda: table.array,
            table.addresses,
            addresses.check,
            lambda: read(addresses),
            lambda: jax.jit(read)(addresses),
            lambda: compiled(addresses),
            lambda: jax.tree.leaves(addresses),
            lambda: jax.pmap(read, in_axes=None, axis_size=1)(addresses),
        ):
            with pytest.raises(ValueError, match=self.CLOSED):
                use()
        with pytest.raises(RuntimeError, match="deleted"):
            array.sum()

    def test_words_that_are_left_fail_when_a_program_uses_them(self):
        table = self.open()
        words = table.addresses().words
        held = dataclasses.replace(table.addresses(), owner=None)
        programs = [lambda: read(held), jax.jit(lambda: read(held)), lambda: jax.jit(read)(held)]
        for f in programs:
            jax.block_until_ready(f())
        assert (table.addresses().words == words).all()
        table.close()
        for f in programs:
            fails_in_the_end(f, "got the address of a table that was closed or freed")
        with self.open() as another:  # which may well get the same entry of the registry
            for f in programs:
                fails_in_the_end(f, "got the address of a table that was closed or freed")
            jax.block_until_ready(read(another.addresses()))

    def test_it_waits_for_programs_under_way(self):
        memory = np.ones((1, 512, 4096), np.float32)
        for _ in range(5):
            table = external.from_buffer(memory, memory.shape, np.float32)
            f = jax.jit(lambda t: ops.gather(t, jnp.arange(512), jnp.zeros(512, jnp.int32), jnp.full(512, 4096))[0])
            got = f(table.addresses())
            table.close()
            memory[:] = 0
            assert (got == 1).all()
            memory[:] = 1

    @pytest.mark.cpu
    def test_it_collects_no_more_garbage_than_it_must(self, monkeypatch):
        collected, collect = [], gc.collect
        monkeypatch.setattr(gc, "collect", lambda generation=2: (collected.append(generation), collect(generation)))
        table = self.open()
        table.close()
        assert collected == []
        table = self.open()
        jax.block_until_ready(table.array + 1)
        table.close()
        assert set(collected) <= {0}  # a full collection takes long where there are many objects

    def test_threads_may_close_it_together(self):
        table = self.open()
        read(table.addresses())
        threads = [threading.Thread(target=table.close) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert table.closed

    def test_what_nothing_refers_to_is_freed_by_the_next_call(self):
        memory = aligned(168).view(np.float32)
        table = external.from_buffer(memory, TABLE, np.float32)
        held = dataclasses.replace(table.addresses(), owner=None)
        addresses = table.addresses()
        del table
        external.check()
        assert read(addresses).shape == (1, 7)  # they keep it
        gone = weakref.ref(memory)
        del memory, addresses
        assert gone() is not None  # programs under way may still read it
        external.check()
        gc.collect()
        assert gone() is None
        fails_in_the_end(lambda: read(held), "closed or freed")

    def test_an_array_outlives_its_table(self):
        memory = aligned(168).view(np.float32)
        table = external.from_buffer(memory, TABLE, np.float32)
        array = table.array
        del table
        external.check()
        memory[:] = 5
        assert (array == 5).all()
        gone = weakref.ref(memory)
        del memory, array
        gc.collect()
        external.check()
        gc.collect()
        assert gone() is None
