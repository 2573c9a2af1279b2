"""The session of a replay with `exchange="rdma"`: who the processes are, and what each exposes."""

import contextlib
import dataclasses
import itertools
import secrets
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gear_jax import _native, ops
from gear_jax._errors import type_error, value_error
from gear_jax._numbers import check_seconds
from gear_jax.replay._mesh import Placement
from gear_jax.transport import Job, Session

# Of a fetch, one after another: each ends by the deadline.
_READS = 3
# Numbers of the sessions of replays, beside those of a user's own. Of replays over several processes the n-th has the
# same one in all of them.
_numbers = itertools.count(1 << 20)
_numbers_alone = itertools.count(1 << 24)


@dataclasses.dataclass
class Alone:
    """The session of a job of one process, which reads nobody: what a `Session` says of itself."""

    number: int
    regions: Sequence[tuple[int, int]]
    transport: str = "memory"

    def __post_init__(self):
        library: Any = _native.load("cpu")
        library.add_memory_reader(self.number, 0, [list(self.regions)])

    @property
    def alive(self) -> np.ndarray:
        return np.ones((1,), np.bool_)

    def counters(self) -> dict[str, int | float]:
        return {}

    def close(self) -> None:
        library: Any = _native.load("cpu")
        library.remove_reader(self.number)


class Link:
    """What a replay knows of its job.

    Args:
      job: the processes; None: those of `jax.distributed`, or this one alone.
      transport, deadline, on_loss: as in `Session`.
      placement: of a table over a mesh, or None.

    Attributes:
      number: of the session; known before there is one, because it becomes part of the programs.
      rank, processes: of this process, and how many there are.
      session: `Session` or `Alone`, or None.
    """

    def __init__(
        self, job: Job | None, transport: str | None, deadline: float, on_loss: str, placement: Placement | None = None
    ):
        if job is not None and not isinstance(job, Job):
            fix = "Write gear_jax.transport.Job(rank, addresses, secret)."
            raise type_error("job", got=type(job).__name__, wanted="a Job or None", fix=fix)
        if on_loss not in ops.ON_LOSS:
            raise value_error("on_loss", got=repr(on_loss), wanted=f"one of {ops.ON_LOSS}", fix="Leave it out.")
        self._deadline = check_seconds("deadline", deadline, "Leave it out for 2.0.")
        self._job, self._transport, self.on_loss = job, transport, on_loss
        if placement is not None and job is not None:
            _check_job(job)
        if placement is not None and placement.processes == 1:
            self.rank, self.processes = 0, 1
        elif job is not None:
            self.rank, self.processes = job.rank, len(job.addresses)
        elif jax.distributed.is_initialized():
            self.rank, self.processes = jax.process_index(), jax.process_count()
        else:
            self.rank, self.processes = 0, 1
        self.number = next(_numbers if self.processes > 1 else _numbers_alone)
        self.session: Session | Alone | None = None
        self._held: tuple[jax.Array, ...] = ()
        self._last: jax.Array | None = None
        self._regions: list[tuple[int, int]] = []
        self._end: Any = None

    def connect(self, arrays: Sequence[jax.Array], table: dict[str, str]) -> None:
        """Exposes arrays of this process in place of what it exposed before, and connects to the others.

        Args:
          arrays: what it exposes.
          table: what must be the same in every process, `Config.of_all`.

        Raises:
          TransportError: if a process is missing, or they do not agree.
        """
        self.close()
        self._regions = regions = _regions(arrays)
        if self.processes == 1:
            self.session = Alone(self.number, regions)
        else:
            if self._job is None:
                self._job = Job.current()
            options: Any = {"deadline": self._deadline, "on_loss": self.on_loss, "number": self.number, "holds": table}
            self.session = Session(self._job, regions, self._transport, **options)
        self._end = weakref.finalize(self, self.session.close)

    def hold(self, arrays: Sequence[jax.Array], last: jax.Array) -> None:
        """Keeps arrays that are exposed until `close`, whatever becomes of their state: others read their memory.

        A call that consumes them takes their memory over: then they hold nothing any more.

        Args:
          arrays: of the state that the last call of the replay returned.
          last: what that call did last.
        """
        self._held, self._last = tuple(arrays), last

    def holds(self, array: jax.Array) -> bool:
        """Whether it is one of those."""
        return any(array is x for x in self._held)

    def wait(self) -> None:
        """Waits for the last call of the replay, and for the fetches that are in flight."""
        if self._last is not None and not self._last.is_deleted():
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the state tells it to whoever uses it
                jax.block_until_ready(self._last)
        library: Any = _native.load("cpu")
        seconds = _READS * self._deadline
        if not library.wait_for_fetches(self.number, seconds):
            warnings.warn(
                f"session {self.number}: samples in flight have not ended after {seconds:g} s and are cut short: rows "
                "that are on their way are not valid",
                RuntimeWarning,
                stacklevel=3,
            )

    def exposes(self, arrays: Sequence[Any]) -> bool:
        """Whether these are the arrays that the session exposes; waits until they are there."""
        if self.session is None or not all(isinstance(x, jax.Array) for x in arrays):
            return False
        return _regions(arrays) == self._regions

    def close(self) -> None:
        """Exposes nothing any more."""
        if self._end is not None:
            self._end()
        self.session = self._end = None
        self._held, self._last = (), None

    def counters(self) -> dict[str, int | float]:
        """What has happened on the way: see `Replay.counters`."""
        of_session = {} if self.session is None else self.session.counters()
        return {**of_session, **ops.rdma_counters(self.number)}


def _check_job(job: Job) -> None:
    """Raises a ValueError unless the processes of a job are those of `jax.distributed`."""
    got, wanted = (job.rank, len(job.addresses)), (jax.process_index(), jax.process_count())
    if got != wanted:
        raise value_error(
            "job", got=f"process {got[0]} of {got[1]}", wanted=f"process {wanted[0]} of {wanted[1]}, as in the mesh",
            fix="Leave it out: the processes of jax.distributed.",
        )  # fmt: skip


def _regions(arrays: Sequence[jax.Array]) -> list[tuple[int, int]]:
    """Address and bytes of each; after all that is still to be written to them."""
    jax.block_until_ready(list(arrays))
    return [(x.unsafe_buffer_pointer() if x.nbytes else 0, x.nbytes) for x in arrays]


def new_incarnation() -> np.ndarray:
    """`uint32[1]`, random and not 0."""
    return np.array([secrets.randbelow(2**32 - 1) + 1], np.uint32)
