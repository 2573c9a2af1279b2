"""`from_buffer`: a table over memory that JAX did not allocate."""

import gc
import math
import operator
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax._errors import message, type_error, value_error
from gear_jax._numbers import is_integer
from gear_jax.external import _cupy, _registration
from gear_jax.external._arrays import alignment
from gear_jax.external._page_lock import PageLock
from gear_jax.external._registration import Registration
from gear_jax.ops import Addresses, _registry
from gear_jax.ops._place import default_device

# What XLA wants of an array's memory on a CPU; else it makes a copy.
_XLA_ALIGNMENT = 64
# How long a deleted array may take to be gone, and between two looks, in seconds.
_PATIENCE, _PAUSE = 5.0, 0.001


def from_buffer(buffer: Any, shape: Sequence[int], dtype: Any, *, offset: int = 0, device: Any = None) -> "External":
    """Makes memory that JAX did not allocate a table: shared memory, a mapped file, a NumPy array.

    For a GPU the whole buffer is page-locked through CuPy, once, however many tables it holds; that takes a while for
    many GB, and makes memory that cannot be swapped. A mapped file should lie in memory (/dev/shm), or be mapped to be
    read only.

    Who writes to the memory meanwhile is the caller's to know: neither XLA nor a gather waits for it.

    Args:
      buffer: anything with the buffer protocol, one piece: `SharedMemory.buf`, an `mmap`, an array. It may be
        read-only. It is kept alive; nothing may free the memory behind its back before the table is closed.
      shape: of the table; `[P, S, T, *shape]` to gather from it.
      dtype: of whole bytes.
      offset: bytes of the buffer before the table. Where the table then begins at no multiple of 64 bytes, there is no
        `array` on a CPU; at no multiple of 16, gathers on a GPU are slower.
      device: where `array` lies; None: jax's default device.

    Raises:
      TypeError: if the buffer is none, or the dtype none that JAX has as it is.
      ValueError: if the buffer is too small, or not one piece, or shares pages with that of another table.
      ImportError: for a GPU, without CuPy.
      MemoryError, RuntimeError: if the memory cannot be page-locked.
    """
    _registration.collect()
    shape, dtype = _shape(shape), _dtype(dtype)
    whole, read_only = _bytes(buffer)
    nbytes = math.prod(shape) * dtype.itemsize
    if not is_integer(offset) or offset < 0:
        raise value_error("from_buffer: offset", got=repr(offset), wanted="an integer >= 0", fix="Leave it out.")
    if offset + nbytes > whole.nbytes:
        raise value_error(
            "from_buffer: buffer", got=f"{whole.nbytes} bytes",
            wanted=f"at least {offset + nbytes}: {dtype}{list(shape)} from byte {offset} on",
            fix="Pass a larger buffer, or another shape, dtype or offset.",
        )  # fmt: skip
    device = default_device() if device is None else device
    lock = None
    if device.platform == "gpu" and whole.nbytes:
        lock = PageLock(whole.ctypes.data, whole.nbytes, read_only, device.local_hardware_id)
    table = whole[offset : offset + nbytes]
    return External(_Memory(buffer, table, lock), shape, dtype, device)


class External:
    """A table over memory that JAX did not allocate; `from_buffer` makes it.

    Give it up with `close`, or as a context manager, before the memory itself goes (`SharedMemory.close`). It is also
    given up when nothing refers to it, its array and its addresses any more: where it is page-locked or has addresses,
    by the next call of `gear_jax.external`.

    Attributes:
      shape: of the table.
      dtype: of the table.
      device: where `array` lies.
    """

    def __init__(self, memory: "_Memory", shape: tuple[int, ...], dtype: np.dtype, device: Any):
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._closed = False
        self._closing = threading.Lock()
        self._memory: _Memory | None = memory  # None: given up
        self._array: jax.Array | None = None
        self._left = weakref.finalize(self, memory.leave)
        self._left.atexit = False

    def __repr__(self) -> str:
        return f"External({self.dtype}{list(self.shape)}{', closed' if self.closed else ''})"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check(self) -> None:
        """Raises a ValueError if it is closed."""
        self._open()

    def _open(self) -> "_Memory":
        if self._closed or self._memory is None:
            raise value_error(
                "External", got="one that is closed", wanted="an open one",
                fix="Close it after the last use; gear_jax.external.from_buffer makes another.",
            )  # fmt: skip
        return self._memory

    @property
    def array(self) -> jax.Array:
        """The table as an array of the device, without a copy. Do not donate it.

        On a GPU, XLA takes it for an array in the GPU's memory, and reads it over PCIe; `gear_jax.ops.gather` is better
        off with `addresses`, which say where it lies.

        Raises:
          TypeError: on a GPU, for a dtype that CuPy does not have.
          ValueError: if the table is closed; or, on a CPU, does not begin at a multiple of 64 bytes.
        """
        memory = self._open()
        if self._array is None:
            self._array = memory.array(self.shape, self.dtype, self.device)
        return self._array

    def addresses(self) -> Addresses:
        """The table by its address, for `gear_jax.ops.gather`: `uint32[4]`, for all devices.

        Raises:
          RuntimeError: if a GPU cannot read it.
          ValueError: if the table is closed, or has fewer than three dimensions.
        """
        memory = self._open()
        if len(self.shape) < 3:
            raise value_error(
                "External.addresses", got=f"shape {self.shape}", wanted="at least [P, S, T]",
                fix="Make the table of shape [P, S, T, *shape] ([1, C, T, *shape] for one partition).",
            )  # fmt: skip
        with jax.ensure_compile_time_eval():
            words = jnp.asarray(memory.register(self.device.platform).words)
        aligned = alignment([memory.pointer], self.device.platform)
        return Addresses(words, self.shape, self.dtype, aligned, self)

    def close(self) -> None:
        """Gives the memory up, when the programs under way have run. The array is deleted, addresses are stale.

        Raises:
          BufferError: on a GPU, if something else is a view of the memory (an array that JAX made of `array` without a
            copy): it stays page-locked until that is gone, and this may be called again.
        """
        self._closed = True
        with self._closing:
            self._give_up()

    def _give_up(self) -> None:
        memory = self._memory
        if memory is None:
            return
        _registration.settle()
        Registration.release(memory.registrations)
        array, self._array = self._array, None
        if array is not None:
            array.delete()
            del array
            memory.wait_for_views()
        if not memory.free():
            text = message(
                "External.close", got="arrays that share the table's memory", wanted="none",
                fix="Delete what was made of External.array without a copy, then close again.",
            )  # fmt: skip
            raise BufferError(text)
        self._memory = None
        self._left.detach()

    def __enter__(self) -> "External":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _View:
    """Kept by every array over the memory: while it is there, the memory must be, and stay page-locked."""

    def __init__(self, table: np.ndarray):
        self._table = table
        self.__array_interface__ = table.__array_interface__  # NumPy's array over this keeps it


class _Memory:
    """What a table holds, and what is left of it when it is gone."""

    def __init__(self, buffer: Any, table: np.ndarray, lock: PageLock | None):
        self.pointer: int = table.ctypes.data
        self.registrations: list[Registration] = []
        self._buffer = buffer
        self._table: Any = table
        self._lock = lock
        self._view: weakref.ref[_View] | None = None

    def register(self, platform: str) -> Registration:
        if not self.registrations:
            nbytes = self._table.nbytes
            self.registrations.append(Registration(self.pointer, nbytes, _registration.gpus(platform)))
        return self.registrations[0]

    def array(self, shape: tuple[int, ...], dtype: np.dtype, device: Any) -> jax.Array:
        view, on_gpu = _View(self._table), device.platform == "gpu"
        with jax.ensure_compile_time_eval():
            if on_gpu:
                array = self._gpu_array(shape, dtype, view, device.local_hardware_id)
            else:
                array = jax.device_put(np.asarray(view).view(dtype).reshape(shape), device, may_alias=True)
        self._view = weakref.ref(view)  # not where that failed: the traceback may hold it
        if not on_gpu and array.nbytes and array.unsafe_buffer_pointer() != self.pointer:
            array.delete()
            raise value_error(
                "External.array", got=f"memory that begins at {self.pointer % _XLA_ALIGNMENT} modulo {_XLA_ALIGNMENT}",
                wanted="a multiple, or XLA makes a copy",
                fix=f"Lay the table out at a multiple of {_XLA_ALIGNMENT} bytes, or read it by External.addresses().",
            )  # fmt: skip
        return array

    def _gpu_array(self, shape: tuple[int, ...], dtype: np.dtype, view: _View, device: int) -> jax.Array:
        try:
            return jax.dlpack.from_dlpack(_cupy.array(self.pointer, shape, dtype, view, device))
        except (BufferError, TypeError, ValueError, jax.errors.JaxRuntimeError) as e:
            raise type_error(
                "External.array", got=f"dtype {dtype} ({e})", wanted="one that CuPy and DLPack have",
                fix="Read the table by External.addresses(); or make it of unsigned integers, and "
                "jax.lax.bitcast_convert_type what was read.",
            ) from e  # fmt: skip

    def wait_for_views(self) -> None:
        """Until JAX has let go of the arrays that are deleted: with a garbage collection, or on a thread of XLA's."""
        for generation in (0, 2):  # any will do, unless a cycle holds an array; a full one takes long
            if self._viewed():
                gc.collect(generation)
        end = time.monotonic() + _PATIENCE
        while self._lock is not None and self._viewed() and time.monotonic() < end:
            time.sleep(_PAUSE)

    def _viewed(self) -> bool:
        return self._view is not None and self._view() is not None

    def leave(self) -> None:
        """Has it given up later, unless what uses it keeps it."""
        if self.registrations or self._lock is not None:
            _registration.leave(self)

    def free(self) -> bool:
        if self._lock is not None:
            if self._viewed():
                return False
            self._lock.release()
        self._buffer = self._table = None
        return True


def _shape(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        sizes = (-1,)
    if any(n < 0 for n in sizes):
        raise value_error(
            "from_buffer: shape", got=repr(shape), wanted="integers >= 0", fix="Pass (P, S, T, *shape) of the table."
        )
    return sizes


def _dtype(dtype: Any) -> np.dtype:
    try:
        dtype = np.dtype(dtype)
        kept = jax.dtypes.canonicalize_dtype(dtype) == dtype and dtype.isnative and _registry._whole_bytes(dtype)
    except TypeError:
        kept = False
    if not kept:
        raise type_error(
            "from_buffer: dtype", got=str(dtype), wanted="numbers of whole bytes that JAX has as they are",
            fix="Set jax_enable_x64 for 64 bits; else view the memory as another dtype (complex64, uint8).",
        )  # fmt: skip
    return dtype


def _bytes(buffer: Any) -> tuple[np.ndarray, bool]:
    """The bytes of a buffer, and whether they are read-only."""
    if isinstance(buffer, jax.Array):
        raise type_error(
            "from_buffer: buffer", got="a jax.Array", wanted="memory that JAX did not allocate",
            fix="Pass the array itself to a program, or its gear_jax.external.addresses.",
        )  # fmt: skip
    try:
        view = buffer if isinstance(buffer, np.ndarray) else np.asarray(memoryview(buffer))
        if not view.flags.c_contiguous:
            raise value_error(
                "from_buffer: buffer", got="memory in pieces", wanted="one piece", fix="Pass the array it is a view of."
            )
        whole = view.reshape(-1).view(np.uint8)
    except TypeError as e:
        raise type_error(
            "from_buffer: buffer", got=type(buffer).__name__, wanted="something with the buffer protocol, of numbers",
            fix="Pass SharedMemory.buf, an mmap.mmap or a NumPy array.",
        ) from e  # fmt: skip
    return whole, not whole.flags.writeable
