"""All that is asked of CuPy: page-locking memory, and a view of it that DLPack hands to JAX. No jax in here."""

import importlib
import math
from typing import Any

import numpy as np

from gear_jax._errors import message

# Flags of cudaHostRegister, and numbers of cudaError and of cudaMemoryType.
_PORTABLE, _MAPPED, _READ_ONLY = 1, 2, 8
_OUT_OF_MEMORY, _ALREADY_REGISTERED = 2, 712
_HOST = 1


def cupy() -> Any:
    """The module.

    Raises:
      ImportError: if it is not there, or does not load.
    """
    try:
        return importlib.import_module("cupy")
    except ImportError as e:
        text = message(
            "gear_jax.external.from_buffer on a GPU", got=f"no CuPy ({e})",
            wanted="it, to page-lock memory that JAX did not allocate",
            fix="Run `pip install cupy-cuda13x` (cupy-cuda12x for CUDA 12), or `pip install gear_jax[cuda]`.",
        )  # fmt: skip
        raise ImportError(text, name="cupy") from e


def page_lock(pointer: int, nbytes: int, read_only: bool, device: int) -> bool:
    """Page-locks whole pages, and lets the kernels of all GPUs reach them.

    Args:
      pointer: the beginning of a page.
      nbytes: whole pages.
      read_only: whether the pages may only be read.
      device: CUDA's number of a GPU.

    Returns:
      Whether `page_unlock` is to be called; False: somebody else has page-locked them, and has to.

    Raises:
      ImportError: without CuPy.
      MemoryError: if there is no memory to lock.
      RuntimeError: if CUDA refuses.
    """
    runtime = cupy().cuda.runtime
    try:
        with cupy().cuda.Device(device):
            runtime.hostRegister(pointer, nbytes, _PORTABLE | _MAPPED | (_READ_ONLY if read_only else 0))
    except runtime.CUDARuntimeError as e:
        if e.status == _ALREADY_REGISTERED and all(_is_locked(p) for p in (pointer, pointer + nbytes - 1)):
            return False
        kind = MemoryError if e.status == _OUT_OF_MEMORY else RuntimeError
        text = message(
            f"page-locking {nbytes} bytes of {'read-only ' if read_only else ''}memory", got=str(e),
            wanted="memory that CUDA can lock",
            fix="A mapped file must lie in memory (/dev/shm, or another tmpfs) or be mapped to be read only, where the "
            "GPU supports that; `ulimit -l` and the container may limit what can be locked (see `python -m gear_jax "
            "doctor`); and no part of the memory may be locked already.",
        )  # fmt: skip
        raise kind(text) from e
    return True


def _is_locked(pointer: int) -> bool:
    return cupy().cuda.runtime.pointerGetAttributes(pointer).type == _HOST


def page_unlock(pointer: int) -> None:
    """Undoes `page_lock`. Nothing may use the memory any more."""
    cupy().cuda.runtime.hostUnregister(pointer)


def array(pointer: int, shape: tuple[int, ...], dtype: np.dtype, owner: object, device: int) -> Any:
    """A CuPy array over page-locked host memory, as an array of a GPU.

    Args:
      pointer: where it begins, of the host.
      shape, dtype: of the array.
      owner: what the array keeps alive.
      device: CUDA's number of the GPU.
    """
    cuda = cupy().cuda
    nbytes = math.prod(shape) * dtype.itemsize
    with cuda.Device(device):
        mapped = cuda.runtime.pointerGetAttributes(pointer).devicePointer if nbytes else 0
        memory = cuda.UnownedMemory(mapped, nbytes, owner, device)
        return cupy().ndarray(shape, dtype, cuda.MemoryPointer(memory, 0))
