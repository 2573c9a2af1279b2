"""`prefetch`: samples drawn ahead of a train loop."""

import collections
import contextlib
import weakref
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from gear_jax import ops
from gear_jax._errors import message, type_error, value_error
from gear_jax._numbers import is_integer
from gear_jax.ops._gather_start import MAX_DEPTH, Queue
from gear_jax.replay import Handle, PendingSample, Replay, ReplayState, Sample, _sample

# Queues of loaders that are closed, for the next ones of the same replay: the programs are compiled for a queue.
_idle: weakref.WeakKeyDictionary[Replay, list[Queue]] = weakref.WeakKeyDictionary()


class Staleness(NamedTuple):
    """How many calls a sample is behind: those between its drawing and its delivery.

    Attributes:
      updates: calls of `update_priorities`, which the sample's probabilities and weights know nothing of.
      adds: calls of `add` and `append`, whose trajectories it could not draw, and which may have evicted its own.
    """

    updates: int
    adds: int


class _InFlight(NamedTuple):
    pending: PendingSample
    clock: Staleness  # calls so far when it was drawn
    columns: Any  # kept until it is delivered: without donation a later state has others


def prefetch(replay: Replay, state: ReplayState, key: jax.Array, batch_size: int, size: int = 2) -> "Prefetcher":
    """Draws samples ahead of a train loop, so that on a GPU each is on its way while the one before is in use.

        with gear_jax.prefetch(replay, state, key, batch_size, size=2) as loader:
            for _ in range(steps):
                sample = loader.next()
                params, errors = train_step(params, sample)
                loader.update_priorities(sample.handles, errors)
                loader.add(trajectories, lengths)
        state = loader.state

    The loader owns the state meanwhile: change it through the loader's methods. For use outside jit; within one, write
    `replay.sample_start` and `replay.sample_done`.

    Args:
      replay: of `make_replay`.
      state: its last state; consumed.
      key: a `jax.random` key. Sample n is that of `replay.sample(state, jax.random.fold_in(key, n), batch_size)` in the
        state of when it was drawn.
      batch_size: B.
      size: samples in flight, in [1, 64]. Each takes the memory of a batch, and is as many deliveries behind
        (`Prefetcher.staleness`).

    Raises:
      TypeError, ValueError: for arguments that do not fit.
    """
    if not isinstance(replay, Replay):
        raise type_error("replay", got=type(replay).__name__, wanted="a Replay", fix="Pass make_replay(...).")
    if replay.placement is not None:
        raise value_error(
            "prefetch: replay", got="one over a mesh", wanted="one on a single device",
            fix="Use replay.sample: in one program XLA overlaps it with what does not depend on it.",
        )  # fmt: skip
    if not is_integer(size) or not 1 <= size <= MAX_DEPTH:
        raise value_error(
            "size", got=repr(size), wanted=f"an integer in [1, {MAX_DEPTH}]", fix="Pass 1 or 2; more seldom help."
        )
    replay.can_sample(state)  # a state that is none, or consumed, is reported here
    if isinstance(state.ticket, Tracer):
        raise type_error(
            "prefetch: state", got="a traced state", wanted="a concrete one",
            fix="Under jit write replay.sample_start and replay.sample_done.",
        )  # fmt: skip
    return Prefetcher(replay, state, _sample.check_key(key), _sample.check_batch(batch_size), size)


class Prefetcher:
    """What `prefetch` returns: an iterator of samples, and the owner of the state. Not for several threads at once."""

    def __init__(self, replay: Replay, state: ReplayState, key: jax.Array, batch_size: int, size: int):
        self._replay, self._state = replay, state
        self._key, self._drawn = key, 0
        self._batch_size, self._size = batch_size, size
        idle = _idle.get(replay)
        self._queue: Queue | None = idle.pop() if idle else Queue()
        self._flights: collections.deque[_InFlight] = collections.deque()
        self._clock = Staleness(0, 0)
        self._staleness: Staleness | None = None

    def __repr__(self):
        where = "closed" if self._queue is None else f"{len(self._flights)} of {self._size} in flight"
        return f"Prefetcher({where}, {self._batch_size} rows each, of {self._replay!r})"

    def __enter__(self) -> "Prefetcher":
        self._check_open("enter")
        return self

    def __exit__(self, exc_type, exc, traceback) -> None:
        # The error that is under way says more than one that closing meets because of it.
        with contextlib.suppress(Exception) if exc_type is not None else contextlib.nullcontext():
            self.close()

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> Sample:
        return self.next()

    @property
    def state(self) -> ReplayState:
        """The last state. While the loader is open it is for looking at (`replay.stats`); then it is yours again."""
        return self._state

    @property
    def staleness(self) -> Staleness | None:
        """Of the sample that `next` returned last; None before the first."""
        return self._staleness

    def next(self) -> Sample:
        """The next sample; another one is drawn in its place. The first call draws the first `size` + 1.

        Raises:
          ValueError: if the loader is closed.
        """
        queue = self._check_open("next").number
        while len(self._flights) < self._size:
            key = self._next_key()
            self._state, pending = self._replay._run(
                "sample_start", _sample.start, self._state, key, self._batch_size, queue, self._size, ()
            )
            self._flights.append(_InFlight(pending, self._clock, self._state.columns))
        oldest = self._flights[0]
        # Without donation nothing else keeps the columns until they have been read. Donated, they are the state's.
        columns = () if self._replay.donate else oldest.columns
        self._state, (sample, following) = self._replay._run(
            "sample_next", _sample.start_next, self._state, oldest.pending, columns, self._next_key(),
            self._batch_size, queue, self._size,
        )  # fmt: skip
        self._flights.popleft()
        self._flights.append(_InFlight(following, self._clock, self._state.columns))
        self._staleness = Staleness(*(now - then for now, then in zip(self._clock, oldest.clock, strict=True)))
        return sample

    def update_priorities(self, handles: Handle, priorities: Any) -> None:
        """As `Replay.update_priorities`. Samples in flight were drawn without it (`staleness`)."""
        self._check_open("update_priorities")
        self._state = self._replay.update_priorities(self._state, handles, priorities)
        self._clock = self._clock._replace(updates=self._clock.updates + 1)

    def add(self, trajectories: Any, lengths: Any, priorities: Any = None, version: Any = None) -> Handle:
        """As `Replay.add`. It waits until the samples in flight have read the columns."""
        self._check_open("add")
        self._state, handles = self._replay.add(self._state, trajectories, lengths, priorities, version=version)
        self._clock = self._clock._replace(adds=self._clock.adds + 1)
        return handles

    def append(self, stream: Any, step: Any, done: Any, version: Any = None) -> Handle:
        """As `Replay.append`; waits like `add`."""
        self._check_open("append")
        self._state, handles = self._replay.append(self._state, stream, step, done, version)
        self._clock = self._clock._replace(adds=self._clock.adds + 1)
        return handles

    def expire(self, version: Any) -> None:
        """As `Replay.expire`. What samples in flight have drawn they keep."""
        self._check_open("expire")
        self._state = self._replay.expire(self._state, version)

    def close(self) -> None:
        """Drops the samples in flight and frees their memory. `state` is yours from here on. Closing twice is fine."""
        queue, self._queue = self._queue, None
        if queue is None:
            return
        flights, self._flights = list(self._flights), collections.deque()
        # The last delivery and the starts behind it may still be under way; what they use must not go before.
        jax.block_until_ready([flight.pending for flight in flights])
        ops.release_queue(queue.number)
        _idle.setdefault(self._replay, []).append(queue)

    def _next_key(self) -> jax.Array:
        key = jax.random.fold_in(self._key, self._drawn)
        self._drawn += 1
        return key

    def _check_open(self, name: str) -> Queue:
        if self._queue is None:
            raise ValueError(
                message(
                    f"Prefetcher.{name}", got="a closed loader", wanted="an open one",
                    fix="Go on with gear_jax.prefetch(replay, loader.state, ...).",
                )
            )  # fmt: skip
        return self._queue
