"""Memory under an address, and how it is given up."""

import collections
import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from gear_jax import _native, ops


class Resource(Protocol):
    """What is given up some time after the object that held it is gone."""

    registrations: list["Registration"]

    def free(self) -> bool:
        """Gives up the rest once the registrations are; False if something still uses it."""
        ...


# Of objects that the garbage collector took. It may run anywhere, in a callback of a program that others wait for, say,
# where waiting for the devices is not allowed. So what such an object held is freed by the next call that may wait.
_left: collections.deque[Resource] = collections.deque()


def _module(platform: str) -> Any:
    return _native.load(platform)


class Registration:
    """Memory that gathers may read by its words.

    Attributes:
      words: `uint32[4]`.
    """

    def __init__(self, pointer: int, nbytes: int, devices: Sequence[int]):
        """Registers memory.

        Args:
          pointer: where it begins.
          nbytes: its size.
          devices: CUDA's numbers of the GPUs that may read it; none where gathers run on the CPU.

        Raises:
          RuntimeError: if a GPU cannot read it.
        """
        words = _module("cpu").register_memory(pointer, nbytes)
        if devices:
            try:
                _module("CUDA").register_memory(words, pointer, nbytes, list(devices))
            except RuntimeError:
                _module("cpu").unregister_memory(words)
                raise
        self._words = words
        self._on_gpu = bool(devices)
        self._released = False

    @property
    def words(self) -> np.ndarray:
        return np.asarray(self._words, np.uint32)

    @staticmethod
    def release(registrations: Sequence["Registration"]) -> None:
        """Makes their words stale, and waits until nobody reads the memory any more. Again: does nothing."""
        held = [r for r in registrations if not r._released]
        on_gpu = [r._words for r in held if r._on_gpu]
        if on_gpu:
            _module("CUDA").unregister_memory(on_gpu)
        for r in held:  # last: another table may get the same entry from now on
            _module("cpu").unregister_memory(r._words)
            r._released = True


def gpus(platform: str) -> list[int]:
    """CUDA's numbers of the GPUs that read what a device of `platform` holds in host memory; none for "cpu"."""
    if platform != "gpu":
        return []
    ops.check_platform()
    return [d.local_hardware_id for d in jax.local_devices(backend="gpu")]


def settle() -> None:
    """Waits for the programs under way: those that were called before the memory they read is given up."""
    for x in jax.live_arrays():
        with contextlib.suppress(RuntimeError, ValueError):  # its failure, or that it is deleted, is its user's to see
            x.block_until_ready()


def leave(resource: Resource) -> None:
    """Has the next call that may wait give a resource up."""
    _left.append(resource)


def collect() -> None:
    """Gives up what objects that are gone have left."""
    resources = []
    with contextlib.suppress(IndexError):  # another thread may be faster
        while True:
            resources.append(_left.popleft())
    if not resources:
        return
    try:
        settle()
        Registration.release([x for r in resources for x in r.registrations])
    except BaseException:
        _left.extend(resources)
        raise
    while resources:
        resource = resources.pop()
        try:
            freed = resource.free()
        except BaseException:
            _left.extend([resource, *resources])
            raise
        if not freed:
            leave(resource)


def check() -> None:
    """Frees what closed or forgotten tables still hold, and reports what gathers on GPUs found wrong with an address.

    Waits for the programs of which a result is still there.

    Raises:
      ValueError: if a gather on a GPU got the address of a table that was not there any more, or was none. Its rows
        are padding, with a mask that is False. Each fault is reported once, here or by the next gather by address.
    """
    settle()
    collect()
    module = _module("CUDA")
    fault = module.take_address_fault() if module is not None else ""
    if fault:
        raise ValueError(fault)
