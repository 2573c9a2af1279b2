"""What the processes of a mesh tell each other: whether they made the same table, and numbers of their shards."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gear_jax import _env
from gear_jax._errors import message
from gear_jax.replay._config import Config, without_addresses
from gear_jax.replay._mesh import Placement

# Every barrier needs a name of its own, the same on all processes; those of a set make the same calls in one order.
_barriers: dict[tuple[int, ...], Iterator[int]] = {}


def of_devices(devices: Iterable[Any]) -> list[int]:
    """The processes of devices, in order."""
    return sorted({d.process_index for d in devices})


def share(devices: Iterable[Any], words: np.ndarray) -> np.ndarray:
    """What each process of the devices has to say, told to all of them.

    Args:
      devices: of one platform; all processes that have some take part.
      words: `uint32[...]`, of this process; the shape is the same on all.

    Returns:
      `uint32[processes, ...]`, in the order of the processes.
    """
    devices = list(devices)
    processes = of_devices(devices)
    # The first device of each process, whatever devices of it are meant: a mesh in which they disagree is found too.
    first = {}
    for device in jax.devices(devices[0].platform):
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[p] for p in processes]), ("process",))
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    own = jax.device_put(words[None], first[jax.process_index()])
    given = jax.make_array_from_single_device_arrays((len(processes), *words.shape), sharding, [own])
    told = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(given)
    return np.asarray(told.addressable_shards[0].data)


def _same(x: jax.Array) -> jax.Array:
    return x


def check_agreement(config: Config, placement: Placement, key: jax.Array) -> None:
    """Waits for the other processes of the mesh, and compares what they were given.

    Raises:
      RuntimeError: on all processes, if they have not all been given the same table; if another does not come within
        `GEAR_JAX_TIMEOUT` seconds.
    """
    processes = of_devices(placement.mesh.devices.flat)
    if len(processes) == 1:
        return
    meet("init", processes)
    mine = _described(config, placement, key)
    digests = [hashlib.sha256(text.encode()).digest()[:8] for text in mine.values()]
    everyone = share(placement.mesh.devices.flat, np.frombuffer(b"".join(digests), np.uint32).reshape(-1, 2))
    differs = (everyone != everyone[:1]).any(-1)
    if not differs.any():
        return
    what = [name for name, d in zip(mine, differs.any(0), strict=True) if d]
    others = [p for p, d in zip(processes, differs.any(1), strict=True) if d]
    have = ", ".join(f"{name}={mine[name]}" for name in what)
    got = f"another {', '.join(what)} on process(es) {others} than on process {processes[0]}"
    fix = f"This process, {jax.process_index()}, has {have}."
    raise RuntimeError(message("init", got=got, wanted="the same on all of them", fix=fix))


def meet(what: str, processes: list[int]) -> None:
    """Waits until all of them are here. A collective alone would wait for one that does not come, and say nothing.

    Raises:
      RuntimeError: if one does not call `what` within `GEAR_JAX_TIMEOUT` seconds.
    """
    # jax's own barrier with a deadline, which it keeps to itself; imported here, since it takes seconds.
    from orbax.checkpoint import multihost

    seconds = _env.timeout()
    barrier = multihost.get_barrier_sync_fn(processes=set(processes))
    try:
        number = next(_barriers.setdefault(tuple(processes), itertools.count()))
        key = "_".join(["gear_jax", what, *map(str, processes), "number", str(number)])
        barrier(key=key, timeout_ms=1000 * seconds)
    except jax.errors.JaxRuntimeError as e:
        got = f"not all of processes {processes} within {seconds} s"
        fix = (
            "See what became of the others, whether each makes the same replay over the same mesh, and whether "
            f"GEAR_JAX_TIMEOUT={seconds} is enough. {e}"
        )
        raise RuntimeError(message(what, got=got, wanted=f"all of them to call {what}", fix=fix)) from e


def _described(config: Config, placement: Placement, key: jax.Array) -> dict[str, str]:
    """What must be the same on all processes, by name."""
    # Not the table as it was given: columns in another order are the same tree.
    names = [f.name for f in dataclasses.fields(config) if f.name != "table"]
    texts = {name: str(getattr(config, name)) for name in names}
    texts |= {name: str(getattr(placement, name)) for name in ("axis", "batch_axis", "exchange")}
    texts["mesh"] = f"{dict(placement.mesh.shape)} of devices {[d.id for d in placement.mesh.devices.flat]}"
    texts["key"] = str(np.asarray(jax.random.key_data(key)).tolist())
    return {name: without_addresses(text) for name, text in texts.items()}
