"""The static side of a replay table, checked once."""

import dataclasses
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import _axis
from gear_jax._axis import Axis
from gear_jax._errors import type_error, value_error
from gear_jax._numbers import check_count
from gear_jax.ops import Remote
from gear_jax.ops._gather import broadcast_windows, pad_bytes
from gear_jax.ops._place import check_memory
from gear_jax.replay._remote import RemoteTable
from gear_jax.selectors import Fifo, Queue, Ranked, Selector, Stack, Uniform
from gear_jax.specs import ColumnSpec, TableSpec, Window
from gear_jax.windows import Anchor, make_anchor

SELECTIONS = ("centralized", "decentralized")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of `make_replay`, resolved.

    Attributes:
      table: the spec as given.
      tree: the structure of the columns.
      names: a path for each column, for messages.
      columns: a `ColumnSpec` for each column, dtypes canonical.
      windows: a `Window` (or None) for each column.
      anchor: the rule for the anchor.
      selector, eviction: the policies.
      partitions: P.
      slots: S.
      steps: T.
      memory: memory kind of the columns as given; None is resolved where the backend is needed anyway, in `init`.
      streams: N.
      selection: "centralized" or "decentralized".
      axis: None: this is the whole table. Else the devices that it is spread over, and P and N are those of one device.
      batch_axis: of the axes, the one that a batch is spread over.
      exchange: how rows get from the device that holds them to the one that wants them.
      rows: None, or where the shards are exposed that others read the rows of; their slots then have stamps.
      remote: None, or the part of a job's table that this process holds; P is then that of the process, and so is N.
      max_staleness: how many versions a trajectory's policy may be behind the learner's; None: any number.
    """

    table: TableSpec
    tree: Any
    names: tuple[str, ...]
    columns: tuple[ColumnSpec, ...]
    windows: tuple[Window | None, ...]
    anchor: Anchor
    selector: Selector
    eviction: Ranked
    partitions: int
    slots: int
    steps: int
    memory: str | None
    streams: int
    selection: str = "centralized"
    axis: Axis = None
    batch_axis: str | None = None
    exchange: str = "collective"
    rows: Remote | None = None
    remote: RemoteTable | None = None
    max_staleness: int | None = None

    @property
    def limited(self) -> bool:
        """Whether trajectories leave the selection by themselves."""
        return self.selector.times is not None or self.max_staleness is not None

    @property
    def frees_anywhere(self) -> bool:
        """Whether slots become free in another order than that in which they were filled."""
        # A queue's go in the order they came in; streams close in another than they were opened in.
        in_order = isinstance(self.selector, Queue) and self.max_staleness is None and not self.streams
        return self.limited and not in_order

    @property
    def window_tree(self):
        return self.tree.unflatten(self.windows)

    def local(self, axis: Axis, batch_axis: str | None = None, exchange: str = "collective") -> "Config":
        """What one of the devices of `axis` has of the table. In a function that is mapped over the axis.

        Raises:
          ValueError: if the devices do not divide P, or N, or `batch_axis` is none of the axes.
        """
        batch_axis = check_batch_axis(batch_axis, _axis.names(axis))
        n = _axis.size(axis)
        check_devices(self.partitions, self.streams, n)
        return dataclasses.replace(
            self, partitions=self.partitions // n, streams=self.streams // n, axis=axis, batch_axis=batch_axis,
            exchange=exchange,
        )  # fmt: skip

    def first_slot(self) -> jax.Array:
        """The number, in the whole table, of the first slot that this device holds: `int32[]`."""
        held = np.int32(self.partitions * self.slots)
        return jnp.int32(self.remote.rank) * held if self.remote is not None else _axis.index(self.axis) * held

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole table."""
        return self.axis is None and (self.remote is None or self.remote.processes == 1)

    def held(self, slots: jax.Array) -> jax.Array:
        """Slots of the whole table, `int32[K]`, as those of this device; -1 where another one holds them."""
        if self.is_whole:
            return slots
        here = slots - self.first_slot()
        return jnp.where((slots >= 0) & (here >= 0) & (here < self.partitions * self.slots), here, -1)

    def everywhere(self, slots: jax.Array) -> jax.Array:
        """Slots of this device, `int32[K]` (-1: none), as those of the whole table."""
        return slots if self.is_whole else jnp.where(slots >= 0, slots + self.first_slot(), -1)

    def of_all(self) -> dict[str, str]:
        """What must be the same in all processes that hold parts of the table, by name, in words."""
        parts = 1 if self.remote is None else self.remote.processes
        columns = zip(self.names, self.columns, strict=True)
        words = {
            "columns": ", ".join(f"{name} {spec.dtype}{list(spec.shape)}" for name, spec in columns),
            "trajectory_length": self.steps,
            "capacity": parts * self.partitions * self.slots,
            "partitions": parts * self.partitions,
            "selector": self.selector,
            "max_staleness": self.max_staleness,
        }
        return {name: without_addresses(str(x)) for name, x in words.items()}

    def flatten(self, what: str, tree: Any, lead: str) -> list[jax.Array]:
        """The leaves of an argument that should look like the columns, with `lead` leading dimensions ("A, T'").

        Raises:
          ValueError: for a missing or unknown column, or a wrong shape. TypeError: for a wrong dtype.
        """
        paths, structure = jax.tree.flatten_with_path(tree)
        if structure != self.tree:
            got = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
            missing = sorted(set(self.names) - set(got))
            unknown = sorted(set(got) - set(self.names))
            detail = "; ".join(f"{k} {v}" for k, v in (("missing", missing), ("unknown", unknown)) if v)
            raise value_error(
                what, got=f"columns {got}" + (f" ({detail})" if detail else ""), wanted=f"{list(self.names)}",
                fix=f"Give a tree like TableSpec.columns, {self.tree}.",
            )  # fmt: skip
        leaves = []
        n = lead.count(",") + 1 if lead else 0
        for name, spec, (_, x) in zip(self.names, self.columns, paths, strict=True):
            # A table has no derivative.
            x = jax.lax.stop_gradient(jax.numpy.asarray(x))
            if x.ndim < n or x.shape[n:] != spec.shape:
                wanted = f"[{lead}, {', '.join(map(str, spec.shape))}]" if spec.shape else f"[{lead}]"
                raise value_error(f"{what}[{name!r}]", got=f"shape {x.shape}", wanted=wanted, fix="Reshape it.")
            if x.dtype != spec.dtype:
                raise type_error(
                    f"{what}[{name!r}]",
                    got=f"dtype {x.dtype}",
                    wanted=str(spec.dtype),
                    fix=f"Pass it .astype({str(spec.dtype)!r}).",
                )
            leaves.append(x)
        return leaves


def check_divides(what: str, number: int, by: int, of: str) -> None:
    """Raises a ValueError if `by` does not divide `number`; `of`: what there are `by` of."""
    if number % by:
        fix = f"Use {-(-number // by) * by}."
        raise value_error(what, got=number, wanted=f"a multiple of {by}, {of}", fix=fix)


def check_devices(partitions: int, streams: int, n: int) -> None:
    """Raises a ValueError if n devices cannot share P partitions and N streams evenly."""
    for what, number in (("partitions", partitions), ("streams", streams)):
        if number % n:
            raise value_error(
                what, got=f"{number} over {n} devices", wanted=f"a multiple of {n}",
                fix=f"Use {what}={-(-number // n) * n}, or other devices.",
            )  # fmt: skip


def make_config(
    table,
    selector,
    windows,
    anchor,
    memory,
    partitions,
    selection,
    eviction,
    streams,
    devices: int = 0,
    max_staleness=None,
) -> Config:
    """Checks the arguments of `make_replay` and fills in what they leave open. `devices`: of a mesh; 0 without one."""
    if not isinstance(table, TableSpec):
        raise type_error(
            "table", got=type(table).__name__, wanted="a TableSpec", fix="Write gear_jax.TableSpec(columns=...)."
        )
    names, columns, tree = _columns(table)
    selector = Uniform() if selector is None else selector
    _instance("selector", selector, Selector, "a selector", "gear_jax.selectors.Uniform()")
    if devices and selection != "decentralized" and "axis" not in inspect.signature(selector.select).parameters:
        raise type_error(
            "selector", got=f"{selector!r}, whose select takes no axis", wanted="one for several devices",
            fix="Write select(state, index, key, batch_size, axis=None): see gear_jax.selectors.Selector. Or let each "
            "device draw for itself: selection='decentralized'.",
        )  # fmt: skip
    eviction = Fifo() if eviction is None else eviction
    _instance("eviction", eviction, Ranked, "a selector with a rank", "gear_jax.selectors.Fifo()")
    check_memory(memory)
    if selection not in SELECTIONS:
        raise value_error("selection", got=repr(selection), wanted=f"one of {SELECTIONS}", fix="Leave it out.")
    spread = tuple(broadcast_windows(tree, windows))
    for name, w in zip(names, spread, strict=True):
        if w is not None and not isinstance(w, Window):
            raise type_error(
                f"windows[{name!r}]", got=type(w).__name__, wanted="a Window or None", fix="Write gear_jax.Window(...)."
            )
    for spec, w in zip(columns, spread, strict=True):
        pad_bytes(0 if w is None else w.pad_value, spec.dtype)
    if partitions is None:
        partitions = -(-8 // devices) * devices if devices else 1
    partitions = check_count("partitions", partitions, 1)
    if table.capacity % partitions:
        raise value_error(
            "partitions", got=f"{partitions} for a capacity of {table.capacity}", wanted="a divisor of the capacity",
            fix=f"Use capacity={-(-table.capacity // partitions) * partitions}.",
        )  # fmt: skip
    streams = check_streams(streams, partitions, table.capacity // partitions)
    check_devices(partitions, streams, max(1, devices))
    if selector.times is not None or isinstance(selector, Queue | Stack):
        check_count("selector.times", selector.times, 1, 2**32 - 1)
    if max_staleness is not None:
        max_staleness = check_count("max_staleness", max_staleness, 0)
    return Config(
        table, tree, names, columns, spread, make_anchor(anchor, spread, table.trajectory_length), selector, eviction,
        partitions, table.capacity // partitions, table.trajectory_length, memory, streams, selection,
        max_staleness=max_staleness,
    )  # fmt: skip


def check_batch_axis(batch_axis: Any, axis: tuple[str, ...]) -> str:
    """The axis that a batch is spread over: the one that is named, else the first."""
    if batch_axis is None:
        return axis[0]
    if batch_axis not in axis:
        fix = "Leave it out: the first of them."
        raise value_error("batch_axis", got=repr(batch_axis), wanted=f"one of axis, {axis}", fix=fix)
    return batch_axis


def check_streams(streams: Any, partitions: int, slots: int) -> int:
    """A number of streams that leaves slots free in each of P partitions of S slots."""
    streams = check_count("streams", streams, 0)
    if -(-streams // partitions) >= slots:
        raise value_error(
            "streams", got=f"{streams} streams on {partitions * slots} slots in {partitions} partitions",
            wanted="fewer streams than slots in each partition", fix="Raise TableSpec.capacity.",
        )  # fmt: skip
    return streams


def _columns(table: TableSpec):
    is_spec = lambda x: isinstance(x, ColumnSpec)  # noqa: E731
    paths, tree = jax.tree.flatten_with_path(table.columns, is_leaf=is_spec)
    names = tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths)
    fix = 'Write columns={"observation": gear_jax.ColumnSpec((11,), jnp.float32)}.'
    if not paths:
        raise value_error("TableSpec.columns", got="no column", wanted="at least one ColumnSpec", fix=fix)
    columns = []
    for name, (_, spec) in zip(names, paths, strict=True):
        if not is_spec(spec):
            raise type_error(f"TableSpec.columns[{name!r}]", got=repr(spec), wanted="a ColumnSpec", fix=fix)
        columns.append(ColumnSpec(spec.shape, jax.dtypes.canonicalize_dtype(spec.dtype)))
    return names, tuple(columns), tree


def _instance(what, value, kind, wanted, fix):
    if not isinstance(value, kind):
        raise type_error(what, got=repr(value), wanted=wanted, fix=f"Pass {fix}.")


def without_addresses(text: str) -> str:
    """Where an object has no text of its own, Python gives its address, which is another in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)
