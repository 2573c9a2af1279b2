"""`make_replay` and the object it returns."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gear_jax import ops
from gear_jax._errors import type_error, value_error
from gear_jax.ops._registry import int32
from gear_jax.replay import _append, _insert, _sample, _state
from gear_jax.replay._config import Config, make_config
from gear_jax.replay._state import Handle, ReplayState, Sample
from gear_jax.selectors import Selector


def make_replay(
    table,
    selector: Selector | None = None,
    windows: Any = None,
    anchor: str = "uniform",
    memory: str | None = None,
    mesh: None = None,
    axis: str | tuple[str, ...] = "replay",
    batch_axis: str | None = None,
    partitions: int | None = None,
    selection: str = "centralized",
    eviction: Selector | None = None,
    streams: int = 0,
    donate: bool = True,
) -> "Replay":
    """Makes a replay: the pure functions over a `ReplayState`.

    Args:
      table: a `TableSpec`.
      selector: which trajectories a sample takes; None: `selectors.Uniform()`.
      windows: which steps of them, a tree like the columns of `Window` or None, or one for all. None: all T steps.
      anchor: the step t that windows are placed at: "uniform" (any step), "full" (any step at which every window lies
        inside the trajectory, as the anchor does; too short ones are never drawn; a window of all T steps does not
        count), "start" (0), "end" (L, behind the last step:
        `Window(-20, 20)` then shows the last 20).
      memory: memory kind of the columns. None: "device", the only one where there are no CUDA kernels.
      mesh: None; this version keeps a table on one device.
      axis, batch_axis: of the mesh; without one they say nothing.
      partitions: P, logical shards; None: 1. Must divide the capacity.
      selection: "centralized" or "decentralized"; the same on one device.
      eviction: which trajectory a new one displaces; None: `selectors.Fifo()`, the oldest of its partition.
      streams: N, the streams of `Replay.append`.
      donate: whether calls outside jit consume the state. False keeps it, at the price of a copy of the table.

    Raises:
      TypeError, ValueError: naming the argument, what it got, what it wanted, and the fix.
    """
    if mesh is not None:
        raise value_error(
            "mesh", got=repr(mesh), wanted="None", fix="This version keeps a table on one device; leave it out."
        )
    config = make_config(table, selector, windows, anchor, memory, partitions, selection, eviction, streams)
    return Replay(config, donate=donate)


class Replay:
    """The functions over a replay state, made by `make_replay`.

    All are pure: jit them, scan them, donate their state. The state is threaded linearly: each call takes the last
    state and returns the next. Called outside jit they are compiled once for each set of shapes, with the state
    donated: the state passed in is consumed (`make_replay(donate=False)` keeps it).

    In a `jax.lax.cond` the table stays in place if the branch taken where the predicate holds does the work and the
    other returns the state as it is. Where both branches read or write the table XLA may copy it (0.10 more often than
    0.11). Then leave cond out: `add` with lengths of 0, and `update_priorities` with slots of -1, do nothing.

    Under `jax.vmap` over several states (one for each seed, say) each state is a table of its own. To draw K batches
    from one state, draw K * B rows and reshape, or scan; `gear_jax.assert_in_place` finds the rest.
    """

    def __init__(self, config: Config, donate: bool = True):
        self.config = config
        self.donate = donate
        self._compiled: dict[str, Any] = {}

    def __repr__(self):
        c = self.config
        return (
            f"Replay({c.table.capacity} trajectories of {c.steps} steps in {c.partitions} partition(s), "
            f"{c.selector!r}, columns {list(c.names)})"
        )

    def init(self, key: jax.Array | None = None) -> ReplayState:
        """An empty table.

        Args:
          key: a `jax.random` key for what the selector keeps to itself (the order of `Permutation`); None: key 0.
        """
        key = jax.random.key(0) if key is None else _sample.check_key(key)
        ops.check_platform()
        if _traced(key):
            return _state.init(self.config, key)
        return self._jitted("init", _state.init)(key)

    def add(
        self, state: ReplayState, trajectories: Any, lengths: Any, priorities: Any = None
    ) -> tuple[ReplayState, Handle]:
        """Inserts A trajectories in place; each takes a free slot, or the place of one that is evicted.

        Args:
          state: the last state; consumed outside jit.
          trajectories: a tree like the columns, leaves `[A, T', *shape]`, T' <= T.
          lengths: `int32[A]`, the steps that count, cut to [0, T']. A trajectory of length 0 is skipped.
          priorities: `float32[A]`; None: the largest seen so far (1.0 at first). NaN, infinite and negative ones are
            stored as 0 and counted.

        Returns:
          The next state and the handles `[A]`; slot -1 for a skipped row, and for a row that later rows of the same
          batch have displaced.

        Raises:
          TypeError, ValueError: for shapes, dtypes or columns that do not match the table.
        """
        if not isinstance(lengths, jax.Array):  # jit would cut a NumPy int64 before we see it
            lengths = int32("lengths", lengths)
        return self._run("add", _insert.add, state, trajectories, lengths, priorities)

    def append(self, state: ReplayState, stream: Any, step: Any, done: Any) -> tuple[ReplayState, Handle]:
        """Appends one step to each of K streams.

        A stream writes to a slot of its own, which nobody can draw until it is closed: by `done`, or by its T-th step
        (the episode then goes on in a new slot).

        Args:
          state: the last state; consumed outside jit.
          stream: `int32[K]`, numbers in [0, N); others are skipped, and so is a second step for one stream.
          step: a tree like the columns, leaves `[K, *shape]`.
          done: `bool[K]`, whether this was the last step of the episode.

        Returns:
          The next state and the handles `[K]` of the trajectories that this call closed; slot -1 elsewhere.
        """
        return self._run("append", _append.append, state, stream, step, done)

    def sample(
        self, state: ReplayState, key: jax.Array, batch_size: int, out: Sample | None = None
    ) -> tuple[ReplayState, Sample]:
        """Draws a batch.

        Args:
          state: the last state; consumed outside jit.
          key: a `jax.random` key, typed or legacy.
          batch_size: B, static.
          out: an earlier sample of the same batch size whose `data` and `mask` are not needed any more: the new sample
            takes their memory. They are consumed. Worth it for batches of many MB, where new memory costs as much as
            the copy. A NumPy array that still looks at it keeps it alive; the new sample then gets memory of its own.

        Returns:
          The next state and a `Sample`.

        Raises:
          TypeError, ValueError: for a state that is consumed or of another table, a key that is none, a batch size that
            is not static, an `out` that does not fit.
        """
        _check_type("sample", state)
        batch_size = _sample.check_batch(batch_size)
        old = None if out is None else _recyclable(out)
        return self._run("sample", _sample.sample, state, key, batch_size, old)

    def update_priorities(self, state: ReplayState, handles: Handle, priorities: Any) -> ReplayState:
        """Sets the priorities of trajectories.

        Args:
          state: the last state; consumed outside jit.
          handles: of a sample, or of `add`. A stale one changes nothing and is counted; slot -1 is passed over; of
            several handles to one trajectory the last one wins.
          priorities: `float32`, of the handles' shape. NaN, infinite and negative ones change nothing and are counted.

        Returns:
          The next state.

        Raises:
          TypeError, ValueError: for handles or priorities that do not fit.
        """
        if not isinstance(handles, Handle):
            raise type_error("handles", got=type(handles).__name__, wanted="a Handle", fix="Pass Sample.handles.")
        return self._run("update_priorities", _insert.update_priorities, state, handles, priorities)

    def can_sample(self, state: ReplayState) -> jax.Array:
        """Whether a sample would hold a valid row: `bool[]`."""
        _check_type("can_sample", state)
        if not _traced(state.ticket):
            _check_alive("can_sample", state)
        return jnp.any(ops.sumtree_roots(state.sums) > 0)

    def stats(self, state: ReplayState) -> dict[str, int | float]:
        """Python numbers, exact, for the host: not under jit.

        trajectories and steps that can be selected or would be with a shorter window, slots, rows offered (`inserted`,
        `evicted`), updates that changed nothing (`stale_updates`, `rejected_priorities`), rows `sampled`, the largest
        priority seen (1.0 at least), and `open_streams`.
        """
        _check_type("stats", state)
        if _traced(state.ticket):
            raise type_error(
                "stats: state", got="a traced state", wanted="a concrete one", fix="Call stats outside jit."
            )
        _check_alive("stats", state)
        index = (np.asarray(x) for x in (state.length, state.counters, state.max_priority))
        result = _state.statistics(self.config.table.capacity, *index)
        if state.streams is not None:
            result["open_streams"] = int((np.asarray(state.streams.slot) >= 0).sum())
        return result

    def _run(self, name: str, function, state, *args):
        _check_type(name, state)
        if _traced(state.ticket, *jax.tree.leaves(args)):
            return _checked(name, function, self.config, state, *args)
        _check_alive(name, state)
        return self._jitted(name, function)(state, *args)

    def _jitted(self, name: str, function):
        compiled = self._compiled.get(name)
        if compiled is None:
            static = (2,) if name == "sample" else ()
            donated = {"init": (), "sample": (0, 3)}.get(name, (0,)) if self.donate else {"sample": (3,)}.get(name, ())
            run = functools.partial(function, self.config)
            if name != "init":
                run = functools.partial(_checked, name, function, self.config)
            compiled = jax.jit(run, static_argnums=static, donate_argnums=donated)
            self._compiled[name] = compiled
        return compiled


def _checked(name: str, function, config: Config, state: ReplayState, *args):
    """Calls a function of a state that has been seen to be of this table; runs at trace time only."""
    _state.check_table(name, config, state)
    return function(config, state, *args)


def _recyclable(out: Any):
    """The (data, mask) of a sample whose memory may be taken."""
    if not isinstance(out, Sample):
        raise type_error("out", got=type(out).__name__, wanted="a Sample", fix="Pass an earlier sample of this replay.")
    arrays = [x for x in jax.tree.leaves((out.data, out.mask)) if not isinstance(x, (np.ndarray, Tracer))]
    if any(x.is_deleted() for x in arrays):
        raise value_error(
            "out", got="a sample that an earlier call has consumed", wanted="one whose memory is still its own",
            fix="Pass the last sample, and pass each only once.",
        )  # fmt: skip
    return out.data, out.mask


def _check_type(name: str, state: Any) -> None:
    if not isinstance(state, ReplayState):
        raise type_error(f"{name}: state", got=type(state).__name__, wanted="a ReplayState", fix="Pass replay.init().")


def _traced(*leaves) -> bool:
    return any(isinstance(x, Tracer) for x in leaves)


def _check_alive(name: str, state: ReplayState) -> None:
    # Leaves that were restored from bytes may be NumPy arrays, which nothing consumes.
    if isinstance(state.ticket, jax.Array) and state.ticket.is_deleted():
        raise value_error(
            f"{name}: state",
            got="a state that an earlier call has consumed",
            wanted="the state that the last call returned",
            fix="Rebind it: `state, sample = replay.sample(state, ...)`; make_replay(donate=False) keeps old ones.",
        )
