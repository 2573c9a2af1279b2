"""What the CUDA driver says of itself and its devices: by ctypes, without a context. No jax in here."""

import ctypes
import dataclasses
import pathlib
import re
from typing import Any

from gear_jax._errors import message

_LIBRARY = "libcuda.so.1"
_PROC_VERSION = pathlib.Path("/proc/driver/nvidia/version")
# Numbers of CUdevice_attribute.
_CAN_MAP_HOST_MEMORY, _UNIFIED_ADDRESSING, _MAJOR, _MINOR = 19, 41, 75, 76
_DMA_BUF = 124
_SUCCESS, _NO_DEVICE = 0, 100
_BATCH_COPY = 12080  # since when there is cudaMemcpyBatchAsync


class DriverError(RuntimeError):
    """The driver is there and refuses to work."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
      name: what it is sold as.
      compute_capability: (major, minor).
      maps_host_memory: whether its kernels can read and write page-locked host memory.
      unified_addressing: whether they do so by the host's own addresses.
    """

    name: str
    compute_capability: tuple[int, int]
    maps_host_memory: bool
    unified_addressing: bool


def library() -> Any | None:
    """The driver's library, or None where there is no NVIDIA driver."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def supported_cuda(driver: Any) -> int:
    """The newest CUDA version that the driver runs: 1000 * major + 10 * minor."""
    version = ctypes.c_int()
    _check(driver, "cuDriverGetVersion", driver.cuDriverGetVersion(ctypes.byref(version)))
    return version.value


def driver_version() -> str | None:
    """The version of the kernel's driver ("580.65.06"), None where it does not say."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _PROC_VERSION.read_text())
    except OSError:
        return None
    return found[1] if found else None


def devices(driver: Any) -> list[Device]:
    """The GPUs that this process may use.

    Raises:
      DriverError: if the driver does not start.
    """
    code = driver.cuInit(0)
    if code == _NO_DEVICE:
        return []
    _check(driver, "cuInit", code)
    count = ctypes.c_int()
    _check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    return [_device(driver, i) for i in range(count.value)]


def exports_dma_buf(driver: Any, ordinal: int) -> bool:
    """Whether the driver hands out a GPU's memory as dma-buf, by which an RDMA device reaches it.

    Raises:
      DriverError: if the driver does not start, or has no such GPU.
    """
    _check(driver, "cuInit", driver.cuInit(0))
    return bool(_attribute(driver, _handle(driver, ordinal), _DMA_BUF))


def _device(driver: Any, ordinal: int) -> Device:
    handle, name = _handle(driver, ordinal), ctypes.create_string_buffer(256)
    _check(driver, "cuDeviceGetName", driver.cuDeviceGetName(name, len(name), handle))
    return Device(
        name.value.decode(errors="replace"),
        (_attribute(driver, handle, _MAJOR), _attribute(driver, handle, _MINOR)),
        bool(_attribute(driver, handle, _CAN_MAP_HOST_MEMORY)),
        bool(_attribute(driver, handle, _UNIFIED_ADDRESSING)),
    )


def _handle(driver: Any, ordinal: int) -> Any:
    handle = ctypes.c_int()
    _check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(handle), ordinal))
    return handle


def _attribute(driver: Any, handle: Any, number: int) -> int:
    value = ctypes.c_int()
    _check(driver, "cuDeviceGetAttribute", driver.cuDeviceGetAttribute(ctypes.byref(value), number, handle))
    return value.value


def _check(driver: Any, call: str, code: int) -> None:
    if code == _SUCCESS:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    said = (text.value or b"").decode(errors="replace")
    raise DriverError(f"{call}: the CUDA driver says {code}, {said!r}. `nvidia-smi` should work first.")


def driver_problem(driver: Any, runtime: int) -> str | None:
    """Why the driver cannot run what was built with a CUDA runtime (1000 * major + 10 * minor); None if it can."""
    newest = supported_cuda(driver)
    # Within one major version a driver runs what was built with a later minor one.
    if newest // 1000 >= runtime // 1000:
        return None
    return message(
        "CUDA driver", got=f"{driver_version() or 'one'}, for CUDA up to {version(newest)}",
        wanted=f"one for CUDA {runtime // 1000}, which this build of gear_jax uses",
        fix="Update the NVIDIA driver, or build gear_jax with a CUDA toolkit of the driver's version.",
    )  # fmt: skip


def batch_copy_problem(newest: int, runtime: int) -> str | None:
    """Why a GPU's copy engines cannot be given many copies in one call; None if they can.

    Args:
      newest: the newest CUDA that the driver runs, 1000 * major + 10 * minor.
      runtime: the CUDA runtime of this build's library, likewise.
    """
    wanted = f"one for CUDA {version(_BATCH_COPY)} or newer, which has cudaMemcpyBatchAsync"
    if newest < _BATCH_COPY:
        return message(
            "CUDA driver", got=f"{driver_version() or 'one'}, for CUDA up to {version(newest)}", wanted=wanted,
            fix="Update the NVIDIA driver; until then kernels do all gathers.",
        )  # fmt: skip
    if runtime < _BATCH_COPY:
        return message(
            "CUDA library of gear_jax", got=f"one for CUDA {version(runtime)}", wanted=wanted,
            fix="Build gear_jax with a newer CUDA toolkit; until then kernels do all gathers.",
        )  # fmt: skip
    return None


def host_memory_problem(device: Device) -> str | None:
    """Why kernels on a GPU cannot reach tables in page-locked host memory; None if they can."""
    if device.maps_host_memory and device.unified_addressing:
        return None
    return message(
        f"GPU {device.name}", got="no mapped host memory", wanted="kernels that can reach page-locked host memory",
        fix='Keep the table in the GPU\'s own memory: make_replay(..., memory="device").',
    )  # fmt: skip


def version(number: int) -> str:
    """13000 -> "13.0"."""
    return f"{number // 1000}.{number % 1000 // 10}"
