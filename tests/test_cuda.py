"""What a CUDA driver says, from a library that answers like one."""

import ctypes
import pathlib

import pytest

from gear_jax import _cuda


class Driver:
    """The calls of libcuda that are used; each gives `code` for the calls in `failing`."""

    def __init__(self, cuda=13000, names=("NVIDIA H100",), attributes=None, failing=(), code=999):
        self.cuda, self.names, self.failing, self.code = cuda, names, failing, code
        self.attributes = {19: 1, 41: 1, 75: 9, 76: 0, **(attributes or {})}

    def _answer(self, call, out=None, value=None):
        if call in self.failing:
            return self.code
        if out is not None:
            out._obj.value = value
        return 0

    def cuDriverGetVersion(self, out):
        return self._answer("cuDriverGetVersion", out, self.cuda)

    def cuInit(self, flags):
        return self._answer("cuInit")

    def cuDeviceGetCount(self, out):
        return self._answer("cuDeviceGetCount", out, len(self.names))

    def cuDeviceGet(self, out, ordinal):
        return self._answer("cuDeviceGet", out, ordinal)

    def cuDeviceGetName(self, name, size, device):
        name.value = self.names[device.value].encode()
        return self._answer("cuDeviceGetName")

    def cuDeviceGetAttribute(self, out, number, device):
        return self._answer("cuDeviceGetAttribute", out, self.attributes[number])

    def cuGetErrorString(self, code, out):
        out._obj.value = b"unknown error"
        return 0


def test_devices():
    assert _cuda.devices(Driver(names=("NVIDIA H100", "NVIDIA A2"))) == [
        _cuda.Device("NVIDIA H100", (9, 0), True, True),
        _cuda.Device("NVIDIA A2", (9, 0), True, True),
    ]
    assert _cuda.devices(Driver(failing=("cuInit",), code=100)) == []  # no device


def test_a_driver_that_does_not_start():
    with pytest.raises(_cuda.DriverError, match=r"cuInit: the CUDA driver says 999, 'unknown error'.*nvidia-smi"):
        _cuda.devices(Driver(failing=("cuInit",)))
    with pytest.raises(_cuda.DriverError, match="cuDriverGetVersion"):
        _cuda.supported_cuda(Driver(failing=("cuDriverGetVersion",)))


@pytest.mark.parametrize(
    ("driver", "runtime", "good"),
    [(13000, 13000, True), (13000, 13020, True), (12080, 13000, False), (13000, 12090, True)],
)
def test_the_driver_of_another_cuda(driver, runtime, good):
    problem = _cuda.driver_problem(Driver(cuda=driver), runtime)
    assert (problem is None) == good
    if problem:
        assert "for CUDA up to 12.8, wanted one for CUDA 13" in problem and "Update the NVIDIA driver" in problem


@pytest.mark.parametrize(("attributes", "good"), [({}, True), ({19: 0}, False), ({41: 0}, False)])
def test_a_device_without_mapped_host_memory(attributes, good):
    (device,) = _cuda.devices(Driver(attributes=attributes))
    problem = _cuda.host_memory_problem(device)
    assert (problem is None) == good
    if problem:
        assert "NVIDIA H100: got no mapped host memory" in problem and 'make_replay(..., memory="device")' in problem


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@x)", "580.65.06"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54  Thu Feb 22", "550.54"),
        ("nothing", None),
        (None, None),
    ],
)
def test_the_version_of_the_kernels_driver(monkeypatch, tmp_path, text, version):
    path = tmp_path / "version"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(_cuda, "_PROC_VERSION", path)
    assert _cuda.driver_version() == version


def test_no_driver(monkeypatch):
    monkeypatch.setattr(_cuda, "_LIBRARY", "libthere_is_none.so.7")
    assert _cuda.library() is None


@pytest.mark.gpu
def test_the_driver_of_this_machine():
    driver = _cuda.library()
    assert isinstance(driver, ctypes.CDLL)
    assert _cuda.driver_problem(driver, _cuda.supported_cuda(driver)) is None
    assert all(_cuda.host_memory_problem(d) is None for d in _cuda.devices(driver))
    assert pathlib.Path("/proc/driver/nvidia").exists() == (_cuda.driver_version() is not None)
