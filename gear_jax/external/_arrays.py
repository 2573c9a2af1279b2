"""Addresses of JAX's own arrays."""

import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gear_jax._errors import type_error, value_error
from gear_jax.external import _registration
from gear_jax.external._registration import Registration
from gear_jax.ops import Addresses

# What matters to the kernel of a GPU: what it reads at once, and a line. On a CPU nothing does, and arrays lie here and
# there; a program is not to be compiled anew for that.
_ALIGNMENTS = {"gpu": (128, 16)}


def alignment(pointers: Iterable[int], platform: str) -> int:
    """`Addresses.alignment` of memory that begins at `pointers`."""
    pointers = list(pointers)
    return next((n for n in _ALIGNMENTS.get(platform, (16,)) if all(p % n == 0 for p in pointers)), 1)


def addresses(array: jax.Array) -> Addresses:
    """The addresses of an array's shards, for programs that cannot take the array itself.

    Under `jax.pmap`, map over the addresses, and each device reads its own shard; give all of them to all devices
    (`in_axes=None`), and `addresses.shard(k)` reads any.

    The array lives as long as the addresses, and after that till the next call of this module. The array must not be
    deleted before. A program that takes it as a donated argument (`gear_jax.ops.scatter` in place, `Replay.add`) keeps
    the memory, but consumes the array: `renew` the addresses with its successor after each. Till then, calls with them
    raise; a program that holds them as a constant reads whatever is there, so pass them as arguments.

    Args:
      array: in host memory: in `pinned_host` on a GPU, any on a CPU. Waited for. Of an array over several processes,
        the shards of this one.

    Returns:
      `uint32[4]` for an array on one device; otherwise `uint32[n, 4]`, the shards in the order of their place in the
      array, replicas once. `Addresses.shape` is that of one shard: it should be `[P, S, T, *shape]`.

    Raises:
      TypeError: if it is not an array, or is traced.
      ValueError: if it is deleted, or not in host memory.
      RuntimeError: if a GPU cannot read it.
    """
    _registration.collect()
    shards = _shards(array)
    array.block_until_ready()  # no program waits for what it reads by address
    held = _Held(array, shards)
    platform = _platform(array)
    devices = _registration.gpus(platform)
    try:
        for pointer, nbytes in shards:
            held.registrations.append(Registration(pointer, nbytes, devices))
    except RuntimeError:
        Registration.release(held.registrations)
        raise
    words = np.stack([r.words for r in held.registrations])
    if isinstance(array.sharding, jax.sharding.SingleDeviceSharding):
        words = words[0]
    with jax.ensure_compile_time_eval():
        words = jnp.asarray(words)
    shape = array.sharding.shard_shape(array.shape)
    aligned = alignment((pointer for pointer, _ in shards), platform)
    return Addresses(words, shape, np.dtype(array.dtype), aligned, _Owner(array, _Keeper(held)))


def renew(addresses: Addresses, array: jax.Array) -> Addresses:
    """The same addresses, kept by the array that has taken over the memory of the one they were taken of.

    The words stay what they are, so that nothing is compiled anew, and what holds them as a constant stays right.

    Args:
      addresses: of `addresses`, or of an earlier `renew`.
      array: what a program returned that took the array as a donated argument and wrote it in place.

    Raises:
      TypeError: if they are not addresses of an array.
      ValueError: if the array lies elsewhere: XLA copied it. Take its own addresses then.
    """
    if not isinstance(addresses, Addresses) or not isinstance(addresses.owner, _Owner):
        raise type_error(
            "addresses", got=type(addresses).__name__, wanted="Addresses of gear_jax.external.addresses",
            fix="Pass what it returned, not what came out of a transformation.",
        )  # fmt: skip
    held = addresses.owner.keeper.held
    if _shards(array) != held.shards or array.dtype != addresses.dtype:
        raise value_error(
            "renew: array", got="one that lies elsewhere", wanted="the successor of the array, in the same memory",
            fix="Call gear_jax.external.addresses(array), and donate the array where it is written in place.",
        )  # fmt: skip
    held.array = array
    return dataclasses.replace(addresses, owner=_Owner(array, addresses.owner.keeper))


class _Held:
    """An array's registrations, with the array that holds the memory now."""

    def __init__(self, array: jax.Array, shards: list[tuple[int, int]]):
        self.array: Any = array
        self.shards = shards
        self.registrations: list[Registration] = []

    def free(self) -> bool:
        self.array = None
        return True


class _Keeper:
    """What all addresses of the same memory share: when it goes, they are gone."""

    def __init__(self, held: _Held):
        self.held = held
        weakref.finalize(self, _registration.leave, held).atexit = False


class _Owner:
    """The owner of addresses of an array."""

    def __init__(self, array: jax.Array, keeper: _Keeper):
        self.array = array
        self.keeper = keeper

    def check(self) -> None:
        if self.array.is_deleted():
            raise value_error(
                "Addresses", got="those of an array that was deleted or donated", wanted="those of one that is there",
                fix="After a program that writes the array in place, call gear_jax.external.renew(addresses, array) "
                "with the array that it returned; else take the addresses of the next array.",
            )  # fmt: skip


def _platform(array: jax.Array) -> str:
    return next(iter(array.sharding.device_set)).platform


def _shards(array: Any) -> list[tuple[int, int]]:
    """(pointer, bytes) of each shard, in the order of their place in the array."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        got = "a traced array" if isinstance(array, Tracer) else type(array).__name__
        raise type_error(
            "addresses: array", got=got, wanted="a jax.Array",
            fix="Take addresses outside of programs, and pass them in.",
        )  # fmt: skip
    if array.is_deleted():
        raise value_error(
            "addresses: array", got="one that was deleted or donated", wanted="one that is there",
            fix="Pass what the program returned that the array was donated to.",
        )  # fmt: skip
    kind = array.sharding.memory_kind
    if _platform(array) != "cpu" and kind != "pinned_host":
        raise value_error(
            "addresses: array", got=f"memory {kind!r}", wanted="'pinned_host', which all devices can read",
            fix='Move it there (jax.device_put(array, jax.memory.Space.Host), make_replay(..., memory="pinned_host")), '
            "or pass the array itself.",
        )  # fmt: skip
    found = {}
    for shard in array.addressable_shards:
        place = tuple(getattr(x, "start", x) or 0 for x in shard.index)
        if place not in found or shard.replica_id == 0:
            found[place] = (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
    return [found[place] for place in sorted(found)]
