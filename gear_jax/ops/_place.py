"""Where arrays lie: the device that new ones go to, and its kinds of memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from gear_jax._errors import value_error

MEMORIES = ("pinned_host", "device")
"""Page-locked memory of the host, which the kernels of a GPU read and write where it is; the device's own memory."""


def check_memory(memory: str | None) -> None:
    """Raises a ValueError unless it is None or one of `MEMORIES`."""
    if memory is not None and memory not in MEMORIES:
        raise value_error("memory", got=repr(memory), wanted=f"None or one of {MEMORIES}", fix="Leave it out.")


def default_device() -> Any:
    """The `jax.Device` that arrays go to unless they are sent elsewhere (`jax.default_device`). Starts the backend."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device


def memory_kind(memory: str | None) -> str:
    """A memory kind; None: "pinned_host" if arrays go to a GPU, else "device" (the CPU's own is the host's anyway)."""
    if memory is not None:
        return memory
    return "pinned_host" if default_device().platform == "gpu" else "device"


def host_sharding() -> jax.sharding.Sharding:
    """Of arrays in page-locked host memory, by the default device."""
    return jax.sharding.SingleDeviceSharding(default_device(), memory_kind="pinned_host")


def tracing() -> bool:
    """Whether a program is being traced, so that nothing that is made now is an array yet."""
    return isinstance(jnp.zeros((), jnp.bool_), Tracer)
