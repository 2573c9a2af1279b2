import sys
import types

import numpy as np
import pytest

from gear_jax.bench.gpu.findings import Missing
from gear_jax.bench.gpu.memcpy import Copies


class Stream:
    ptr = 77

    def __init__(self, non_blocking):
        assert non_blocking


class Event:
    def record(self, stream):
        self.stream = stream

    def synchronize(self):
        pass


class Memory(bytearray):
    ptr = 1


@pytest.fixture
def cupy(monkeypatch):
    """CuPy whose copies to the GPU take 2 ms a repetition, and those from it 4 ms."""
    copied = []
    runtime = types.SimpleNamespace(
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyAsync=lambda target, source, size, kind, stream: copied.append((size, kind, stream)),
    )
    cuda = types.SimpleNamespace(
        Stream=Stream,
        Event=Event,
        runtime=runtime,
        alloc_pinned_memory=Memory,
        alloc=lambda size: types.SimpleNamespace(ptr=2),
        get_elapsed_time=lambda begin, end: 2.0 * copied[-1][1],
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    return copied


def test_speeds_are_bytes_over_time(cupy):
    copies = Copies(size=1 << 20, number=4, rounds=3)
    assert copies.measure() == pytest.approx({"h2d": (1 << 22) / 2e-3 / 1e9, "d2h": (1 << 22) / 4e-3 / 1e9})
    assert cupy == [(1 << 20, 1, 77)] * 16 + [(1 << 20, 2, 77)] * 16  # one repetition more, which does not count


def test_the_memory_is_written_before_it_is_copied(cupy):
    host = Copies(size=1 << 10, number=1, rounds=1).host
    np.testing.assert_array_equal(np.frombuffer(host, np.uint32), np.arange(256))


def test_without_cupy_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(Missing, match="cupy-cuda13x"):
        Copies(1 << 10, 1, 1)
