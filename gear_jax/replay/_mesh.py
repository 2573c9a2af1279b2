"""A table over the devices of a mesh: who holds what, and the functions of one device run on all of them."""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gear_jax import _axis
from gear_jax._errors import type_error, value_error
from gear_jax.replay._config import check_batch_axis
from gear_jax.replay._state import Handle, ReplayState, Sample, Streams

EXCHANGES = ("peer", "collective", "rdma")
EXCHANGES_PER_DEVICE = EXCHANGES[:2]
MOST_PEERS = 64  # of a GPU's gather (cuda/gather_device.h)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a table lies on a mesh.

    Attributes:
      mesh: the mesh.
      axis: names of the axes that the partitions are spread over, the slowest first.
      batch_axis: the one of them that a batch is spread over; it is repeated over the others.
      exchange: how a device gets the rows of its part of a batch that others hold: "peer", "collective" or "rdma".
      memory: the memory kind of the columns.
    """

    mesh: Mesh
    axis: tuple[str, ...]
    batch_axis: str
    exchange: str
    memory: str

    @property
    def devices(self) -> int:
        """n, the devices that hold different partitions."""
        return math.prod(self.mesh.shape[name] for name in self.axis)

    @property
    def parts(self) -> int:
        """Into how many parts a batch is cut."""
        return self.mesh.shape[self.batch_axis]

    @property
    def holders(self) -> list[Any]:
        """The device that holds each of the n parts of the table, where `axis` names all axes of the mesh."""
        order = [self.mesh.axis_names.index(name) for name in self.axis]
        return self.mesh.devices.transpose(order).reshape(-1).tolist()

    @property
    def processes(self) -> int:
        """How many processes have devices of the mesh."""
        return len({d.process_index for d in self.mesh.devices.flat})

    @property
    def local_devices(self) -> list[Any]:
        """The mesh's devices of this process."""
        return list(self.mesh.local_devices)

    def sharding(self, spec: PartitionSpec, memory: str | None = None) -> NamedSharding:
        """Of a global array."""
        return NamedSharding(self.mesh, spec, memory_kind=memory)

    @property
    def held(self) -> PartitionSpec:
        """Of what is cut along the partitions, or the rows that are added."""
        return PartitionSpec(self.axis)

    @property
    def batch(self) -> PartitionSpec:
        """Of what is cut along the rows of a batch."""
        return PartitionSpec(self.batch_axis)

    @property
    def way(self) -> str:
        """The exchange, as `Config.exchange` has it: "ragged" for a collective one where XLA has that."""
        # Between processes XLA refuses a ragged all-to-all on GPUs, and a CPU has none.
        gpu = self.mesh.devices.flat[0].platform == "gpu"
        return "ragged" if self.exchange == "collective" and self.processes == 1 and gpu else self.exchange

    def state(self, streams: bool, selector: PartitionSpec) -> ReplayState:
        """The specs of a state."""
        held: Any = self.held
        all_have: Any = PartitionSpec()
        return ReplayState(
            columns=held, length=held, generation=held, sequence=held, priority=held, mass=held, sums=held,
            max_priority=all_have, cursor=held, counters=held, clock=all_have, selector=selector,
            streams=Streams(held, held) if streams else None, ticket=held, limits=held,
            stamp=held if self.exchange == "rdma" else None,
        )  # fmt: skip

    def sample(self) -> Sample:
        """The specs of a batch."""
        b: Any = self.batch
        return Sample(b, b, Handle(b, b), b, b, b, b, b)

    def run(self, function: Any, in_specs: tuple[Any, ...], out_specs: Any) -> Any:
        """A function of global arrays, from one of a device's."""
        # check_vma: what is the same on all devices is made so by collectives that it would not follow (`_axis`).
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.axis), check_vma=False
        )
        explicit = {
            name for name, kind in zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
            if kind == AxisType.Explicit
        }  # fmt: skip
        if not explicit:
            return mapped  # XLA moves what lies otherwise
        return lambda *args: mapped(*_laid_out(self.mesh, explicit, args, in_specs))


def _laid_out(mesh: Mesh, explicit: set[str], args: Any, specs: Any) -> Any:
    """Arguments moved to lie as `specs`, a tree prefix, say along the explicit axes of a mesh."""

    def lay(spec: PartitionSpec, tree: Any) -> Any:
        kept = [tuple(name for name in _axis.names(names) if name in explicit) or None for names in spec]
        return jax.tree.map(functools.partial(move, kept), tree)

    def move(kept: list[Any], x: Any) -> Any:
        x = jnp.asarray(x)
        to = NamedSharding(mesh, PartitionSpec(*kept, *(None,) * (x.ndim - len(kept))))
        now = jax.typeof(x).sharding
        return x if now.mesh.axis_names == mesh.axis_names and now.spec == to.spec else jax.reshard(x, to)

    return jax.tree.map(lay, specs, args, is_leaf=lambda x: isinstance(x, PartitionSpec))


def make_placement(mesh: Any, axis: Any, batch_axis: Any, exchange: Any, memory: str | None) -> Placement:
    """Checks the arguments of `make_replay` that name a mesh.

    Raises:
      TypeError, ValueError: naming the argument, what it got, what it wanted, and the fix.
    """
    if not isinstance(mesh, Mesh):
        fix = 'Write jax.make_mesh((n,), ("replay",)).'
        raise type_error("mesh", got=type(mesh).__name__, wanted="a jax.sharding.Mesh of devices", fix=fix)
    if not isinstance(axis, (str, tuple, list)):
        fix = 'Write axis="replay" or axis=("data", "model").'
        raise type_error("axis", got=repr(axis), wanted="one or more names of axes of the mesh", fix=fix)
    if len({d.id for d in mesh.devices.flat}) != mesh.size:
        raise value_error("mesh", got="one with a device twice", wanted="different devices", fix="Use jax.make_mesh.")
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in names:
        if name not in mesh.shape:
            raise value_error(
                "axis", got=repr(name), wanted=f"an axis of the mesh, {tuple(mesh.shape)}",
                fix="Name the axes that the table is spread over, or make the mesh with that axis.",
            )  # fmt: skip
    if not names or len(set(names)) != len(names):
        fix = 'Write axis="replay" or axis=("data", "model").'
        raise value_error("axis", got=repr(axis), wanted="one or more different axes of the mesh", fix=fix)
    batch_axis = check_batch_axis(batch_axis, names)
    if exchange is not None:
        check_exchange(exchange)
    if exchange == "rdma":
        _check_for_rdma(mesh, names)
    if memory is None:
        memory = "device" if mesh.devices.flat[0].platform == "cpu" else "pinned_host"
    why = _no_peers(mesh, memory)
    if exchange == "peer" and why:
        raise value_error("exchange", got="'peer'", wanted=f"'collective', because {why}", fix="Leave it out.")
    return Placement(mesh, names, batch_axis, exchange or ("collective" if why else "peer"), memory)


def check_exchange(exchange: Any, known: tuple[str, ...] = EXCHANGES) -> None:
    """Raises a ValueError unless it is one of those that are known."""
    if exchange not in known:
        raise value_error("exchange", got=repr(exchange), wanted=f"one of {known}", fix="Leave it out.")


def _check_for_rdma(mesh: Mesh, names: tuple[str, ...]) -> None:
    """Raises a ValueError for a mesh over which rows are not read from other processes."""
    if set(names) != set(mesh.axis_names):
        raise value_error(
            "axis", got=f"{names} with exchange='rdma'", wanted=f"all axes of the mesh, {mesh.axis_names}",
            fix="Name them all; batch_axis says which of them a batch is cut along.",
        )  # fmt: skip
    processes = {d.process_index for d in mesh.devices.flat}
    if processes not in ({jax.process_index()}, set(range(jax.process_count()))):
        raise value_error(
            "mesh", got=f"devices of process(es) {sorted(processes)} with exchange='rdma'",
            wanted=f"those of this process, {jax.process_index()}, alone, or some of each of {jax.process_count()}",
            fix="Make it of jax.devices(), or use exchange='collective'.",
        )  # fmt: skip
    counts = collections.Counter(d.process_index for d in mesh.devices.flat)
    if len(set(counts.values())) > 1:
        raise value_error(
            "mesh", got=f"{dict(counts)} devices of processes with exchange='rdma'", wanted="as many of each",
            fix="Make it of jax.devices(), or use exchange='collective'.",
        )  # fmt: skip


def _no_peers(mesh: Mesh, memory: str) -> str | None:
    """Why one device cannot read another's columns where they are; None if it can."""
    if len({d.process_index for d in mesh.devices.flat}) > 1:
        return "the mesh is of several processes, which do not see each other's memory"
    if mesh.devices.flat[0].platform != "cpu" and mesh.size > MOST_PEERS:
        return f"a GPU reads the shards of {MOST_PEERS} devices at most, and there are {mesh.size}"
    if mesh.devices.flat[0].platform != "cpu" and memory != "pinned_host":
        return f"columns in memory {memory!r} are no other device's to read"
    return None


def broadcast(prefix: Any, tree: Any) -> Any:
    """A tree like `tree` out of a tree that is the upper part of it."""
    return jax.tree.map(lambda x, below: jax.tree.map(lambda _: x, below), prefix, tree)
