"""The ring: shared memory in which actors leave trajectories for the learner. No jax in here.

Shapes: N actors (lanes), K slots of each, R = N * K, T steps of a slot, E rows that an actor asks about at once.
"""

import math
import os
import pathlib
import re
import time
import weakref
from typing import Any

import numpy as np

from gear_jax import _host_memory
from gear_jax._errors import type_error, value_error
from gear_jax._numbers import is_integer
from gear_jax.actors import _columns
from gear_jax.actors._errors import RingForeignError, RingSpaceError, core, error, translated
from gear_jax.specs import ColumnSpec, TableSpec

DIRECTORY = "/dev/shm"
PREFIX = "gear_jax."
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def make_ring(
    table: TableSpec, actors: int, slots: int = 4, name: str | None = None, *, ask: Any = None, answer: Any = None,
    rows: int = 1, versions: bool = False, directory: str = DIRECTORY,
) -> "Ring":  # fmt: skip
    """Makes a ring for a table. Its memory, `Ring.nbytes`, is taken at once.

    Args:
      table: the columns, in dicts, lists, tuples or named tuples, with dtypes as the table stores them (jax makes
        float32 of float64 where x64 is off), and T. `Ingest` makes its ring itself, with all that.
      actors: N, the most actors at a time.
      slots: K, trajectories that each may have written, or be writing, before the learner takes them; then it waits.
        With 2 or more it can write while the learner reads.
      name: letters, digits, - and _; by it a learner that was started anew finds its ring, which stays until
        `Ingest.close` or `Ring.unlink`, or `python -m gear_jax doctor --clean-shm` when all its processes are gone.
        None: one of this process, which goes with it.
      ask, answer: trees of `ColumnSpec` for `Writer.act`: what an actor asks about, and what it is answered.
      rows: E, the most rows of `ask` at a time (environments of an actor).
      versions: whether writers have to say which version of the policy made a trajectory. A learner knows by itself, by
        its table's `max_staleness`; say it for a ring that is relayed to one.
      directory: where shared memory is.

    Raises:
      TypeError, ValueError: for arguments that do not fit.
      RingBusyError: if there is a ring of the name. RingSpaceError: if there is too little shared memory.
    """
    if not isinstance(table, TableSpec):
        raise type_error("table", got=type(table).__name__, wanted="a TableSpec", fix="Write gear_jax.TableSpec(...).")
    if not isinstance(versions, bool | np.bool_):
        raise type_error("versions", got=repr(versions), wanted="True or False", fix="Leave it out.")
    named = _columns.specs("TableSpec.columns", table.columns)
    ring = create(named, table.trajectory_length, actors, slots, name, ask, answer, rows, directory)
    ring.held.wants_versions = bool(versions)
    return ring


def create(
    columns: list[tuple[str, ColumnSpec]], steps: int, actors: int, slots: int, name: str | None, ask: Any, answer: Any,
    rows: int, directory: str,
) -> "Ring":  # fmt: skip
    """`make_ring` for columns by their paths."""
    for what, number in (("actors", actors), ("slots", slots), ("rows", rows)):
        if not is_integer(number) or number < 1:
            raise value_error(what, got=repr(number), wanted="an integer, 1 or more", fix="Write actors=8, slots=4.")
    if (ask is None) != (answer is None):
        fix = "Give both, or neither."
        raise value_error("ask, answer", got="one of them", wanted="what actors ask and what they get", fix=fix)
    entries = [_entry(0, x) for x in columns]
    if ask is not None:
        entries += [_entry(1, x) for x in _columns.specs("ask", ask)]
        entries += [_entry(2, x) for x in _columns.specs("answer", answer)]
    step = sum(math.prod(spec.shape) * spec.dtype.itemsize for _, spec in columns)
    _check_memory(step * steps * actors * slots)
    file = f"{PREFIX}{os.getuid()}.{_check_name(f'{os.getpid()}-{time.monotonic_ns()}' if name is None else name)}"
    with translated():
        held = core().Ring.create(directory, file, steps, actors, slots, 0 if ask is None else rows, entries)
    ring = Ring(held, directory)
    if name is None:
        weakref.finalize(ring, _remove, held, os.getpid())
    return ring


def open_ring(name: str, directory: str = DIRECTORY) -> "Ring":
    """Finds a ring by its name, or by `Ring.path`.

    Raises:
      RingMissingError: if there is none. RingForeignError: if what is there is no ring of this version, or damaged.
    """
    file = f"{PREFIX}{os.getuid()}.{name}"
    if isinstance(name, str) and "/" in name:
        directory, file = os.path.split(name)
    if not file.startswith(PREFIX) or file.count(".") != 2:
        raise value_error("name", got=repr(name), wanted="Ring.name or Ring.path", fix="Pass ingest.ring.path.")
    _check_name(file.rpartition(".")[2])
    with translated():
        return Ring(core().Ring.open(directory, file), directory)


def _remove(held: Any, maker: int) -> None:
    if os.getpid() == maker:  # not a child that was forked
        held.unlink()


class Ring:
    """A ring, made by `make_ring` or found by `open_ring`. Its memory is there as long as this, or an array over it.

    Attributes:
      name: by which `open_ring` and `Writer` find it. path: its file, by which they do so too.
      steps: T. actors: N. slots: K. rows: E, 0 without `ask`.
      names: the paths of the columns, in the order of `columns`.
      columns: NumPy arrays `[R, T, *shape]` over the shared memory. Slot s is one of actor s // K.
      ask, answer: `{path: array}`, `[N, E, *shape]` over the shared memory.
    """

    def __init__(self, held: Any, directory: str):
        self.held, self.directory, self.path = held, directory, str(held.path)
        self.name = pathlib.PurePath(self.path).name.split(".", 2)[2]
        self.steps: int = held.steps
        self.actors: int = held.lanes
        self.slots: int = held.slots
        self.rows: int = held.requests
        memory = held.bytes()
        self.nbytes = memory.size
        groups: tuple[dict[str, np.ndarray], ...] = ({}, {}, {})
        for kind, name, dtype, _, shape, offset, nbytes in held.columns():
            lead = (self.actors * self.slots, self.steps) if kind == 0 else (self.actors, self.rows)
            part = memory[offset : offset + nbytes].view(_columns.dtype_of(dtype))
            groups[kind][name] = part.reshape(*lead, *shape)
        trajectories, self.ask, self.answer = groups
        self.names, self.columns = list(trajectories), list(trajectories.values())

    def __repr__(self):
        return f"Ring({self.name!r}: {self.actors} actors, {self.slots} slots of {self.steps} steps, {self.names})"

    @property
    def specs(self) -> dict[str, ColumnSpec]:
        """The columns by their paths."""
        return {name: ColumnSpec(x.shape[2:], x.dtype) for name, x in zip(self.names, self.columns, strict=True)}

    @property
    def closed(self) -> bool:
        """Whether the learner has closed it."""
        return self.held.closed

    def report(self) -> dict[str, Any]:
        """What happens on the ring, in Python numbers.

        Returns:
          committed, consumed: trajectories since it was made; learner: "free", "running", "stopped" or "dead";
          actors: for each lane its process's `pid` and `life` (the same words), trajectories `committed`, `abandoned`
          (open ones taken back from the dead), now `open` and `pending`, and the seconds it `waited` for a free slot.
        """
        return {
            "committed": self.held.committed,
            "consumed": self.held.consumed,
            "learner": self.held.learner()[1],
            "actors": self.held.report(),
        }

    def unlink(self) -> None:
        """Removes its name. Those that have it open may go on; nobody finds it any more."""
        self.held.unlink()

    def check_whole(self) -> None:
        """Raises a RingForeignError if the file has been cut short: to touch its memory would end this process."""
        if not self.held.whole():
            raise error(
                RingForeignError, f"ring {self.held.path}", got="a file that was cut short",
                wanted="the whole ring", fix="Start learner and actors anew.",
            )  # fmt: skip


def _entry(kind: int, named: tuple[str, ColumnSpec]) -> tuple[int, str, str, int, list[int]]:
    name, spec = named
    return kind, name, spec.dtype.name, spec.dtype.itemsize, list(spec.shape)


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fix = 'Write name="run-1".'
        raise value_error("name", got=repr(name), wanted="at most 100 letters, digits, - and _", fix=fix)
    return name


def _check_memory(nbytes: int) -> None:
    # Files of shared memory are memory: what is not there is taken from whoever the kernel picks.
    free = _host_memory.available()
    if free is not None and nbytes > free:
        raise error(
            RingSpaceError, "the ring's memory", got=f"{_host_memory.human(free)} of memory free",
            wanted=_host_memory.human(nbytes), fix="Use fewer slots or actors.",
        )  # fmt: skip
