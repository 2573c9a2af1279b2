"""Stand for a GPU, CUDA and CuPy; write down what `gear_jax.external` asks of them. Arrays are the CPU's."""

import contextlib
import importlib
import sys
import types

import jax.numpy as jnp
import numpy as np

from gear_jax import _native, external
from gear_jax.external import _page_lock, _registration


class FakeCuda:
    """Stands for the CUDA library."""

    def __init__(self):
        self.calls = []
        self.error = None

    def register_memory(self, words, pointer, nbytes, devices):
        self.calls.append(("register", pointer, nbytes, devices))
        if self.error:
            raise RuntimeError(self.error)

    def unregister_memory(self, words):
        self.calls.append(("unregister", len(words)))

    def take_address_fault(self):
        return ""


class FakeCupy(types.ModuleType):
    """Stands for CuPy: its arrays are NumPy's."""

    def __init__(self, calls):
        super().__init__("cupy")
        self.calls, self.locked, self.refuses = calls, set(), None
        self.others = ()  # memory that somebody else has locked

        class CUDARuntimeError(RuntimeError):
            def __init__(self, status):
                self.status = status
                super().__init__(f"cudaError {status}")

        runtime = types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            hostRegister=self.register,
            hostUnregister=self.unregister,
            pointerGetAttributes=lambda p: types.SimpleNamespace(
                type=int(any(b <= p < e for b, e in self.others)), devicePointer=p
            ),
        )
        self.cuda = types.SimpleNamespace(
            runtime=runtime,
            Device=lambda number: contextlib.nullcontext(),
            UnownedMemory=lambda pointer, nbytes, owner, device: (pointer, nbytes, owner),
            MemoryPointer=lambda memory, offset: memory,
        )

    def register(self, pointer, nbytes, flags):
        self.calls.append(("lock", pointer, nbytes, flags))
        if self.refuses:
            raise self.cuda.runtime.CUDARuntimeError(self.refuses)
        self.locked.add(pointer)

    def unregister(self, pointer):
        self.calls.append(("unlock", pointer))
        self.locked.remove(pointer)

    def ndarray(self, shape, dtype, memory):
        pointer, nbytes, owner = memory
        if dtype == jnp.bfloat16:
            raise TypeError("no such dtype")
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
        base = types.SimpleNamespace(__array_interface__=interface, owner=owner)
        return np.asarray(base).view(dtype).reshape(shape)


class FakeGpu:
    platform = "gpu"

    def __init__(self, number=0):
        self.local_hardware_id = number


def gpu(monkeypatch):
    """Yields what `fake_gpu` gives a test. Nothing may be locked at the end."""
    cuda = FakeCuda()
    cupy = FakeCupy(cuda.calls)
    cpu = _native.load("cpu")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(_registration, "_module", lambda platform: cuda if platform == "CUDA" else cpu)
    monkeypatch.setattr(_registration, "gpus", lambda platform: [0, 1] if platform == "gpu" else [])
    real = importlib.import_module

    def fail(name, *args):
        if name == "cupy":
            raise ImportError("No module named 'cupy'")
        return real(name, *args)

    def lose_cupy():
        monkeypatch.setattr(importlib, "import_module", fail)

    yield types.SimpleNamespace(device=FakeGpu(), cuda=cuda, cupy=cupy, calls=cuda.calls, lose_cupy=lose_cupy)
    external.check()
    assert not cupy.locked and not _page_lock._locked
