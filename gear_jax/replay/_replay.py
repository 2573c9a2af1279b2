"""The functions over a replay state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import ops
from gear_jax._errors import type_error, value_error
from gear_jax.ops._gather_start import Queue, check_depth
from gear_jax.ops._place import default_device, memory_kind, tracing
from gear_jax.ops._registry import in_host_memory, int32_where_it_is
from gear_jax.replay import _append, _insert, _limits, _memory, _mesh, _processes, _sample, _state, _statistics
from gear_jax.replay._calls import Calls, check_alive, recyclable, traced
from gear_jax.replay._config import Config
from gear_jax.replay._connected import Connected, can_sample_remote, check_type
from gear_jax.replay._device import DeviceReplay
from gear_jax.replay._link import Link
from gear_jax.replay._mesh import EXCHANGES_PER_DEVICE, Placement, check_exchange
from gear_jax.replay._sample import PendingSample
from gear_jax.replay._state import Handle, ReplayState, Sample


class Replay(Connected):
    """The functions over a replay state, made by `make_replay`.

    All are pure: jit them, scan them, donate their state. The state is threaded linearly: each call takes the last
    state and returns the next. Called outside jit they are compiled once for each set of shapes, with the state
    donated: the state passed in is consumed (`make_replay(donate=False)` keeps it).

    Where your own jitted step returns the state, let it be the first of the results: over a mesh XLA gives the memory
    of donated arrays to results by their size alone, and may give a column's to another result that comes before it and
    is as large, and then copies the column. `gear_jax.assert_in_place` finds that.

    In a `jax.lax.cond` the table stays in place if the branch taken where the predicate holds does the work and the
    other returns the state as it is. Where both branches read or write the table XLA may copy it (0.10 more often than
    0.11). Then leave cond out: `add` with lengths of 0, and `update_priorities` with slots of -1, do nothing.

    Under `jax.vmap` over several states (one for each seed, say) each state is a table of its own. To draw K batches
    from one state, draw K * B rows and reshape, or scan; `gear_jax.assert_in_place` finds the rest.
    """

    def __init__(
        self, config: Config, donate: bool = True, placement: Placement | None = None, link: Link | None = None
    ):
        self.config = config
        self._link = link
        self.donate = donate
        self.placement = placement
        self._calls = Calls(config, placement, donate)

    def __repr__(self):
        c = self.config
        return (
            f"Replay({c.table.capacity} trajectories of {c.steps} steps in {c.partitions} partition(s), "
            f"{c.selector!r}, columns {list(c.names)}{self._where()})"
        )

    def _where(self) -> str:
        p, remote = self.placement, self.config.remote
        if remote is not None:
            return f", here of process {remote.rank} of {remote.processes}, exchange='rdma'"
        return "" if p is None else f", on {p.devices} devices of axis {p.axis}, exchange={self.exchange!r}"

    def per_device(
        self, axis: str | tuple[str, ...] = "replay", batch_axis: str | None = None, exchange: str = "collective"
    ) -> DeviceReplay:
        """The functions of one device of n, for a function that is mapped over `axis` by `jax.shard_map` or `jax.pmap`.

        A replay with a mesh needs none of this under jit; it is for one's own mapped loops, classic pmap ones above
        all. With the same key they draw the same as this replay's own functions.

        Args:
          axis, batch_axis: names of mapped axes, as in `make_replay`.
          exchange: as in `make_replay`; "peer" only where all devices are of one process, and the columns are arrays.
        """
        check_exchange(exchange, EXCHANGES_PER_DEVICE)
        if self._link is not None:
            raise value_error(
                "per_device", got="a replay with exchange='rdma'", wanted="another exchange",
                fix="Make the replay without it, or call its own functions in each process.",
            )  # fmt: skip
        if exchange == "collective" and jax.default_backend() == "gpu" and jax.process_count() == 1:
            exchange = "ragged"
        return DeviceReplay(self.config, axis, batch_axis, exchange)

    @property
    def exchange(self) -> str | None:
        """How devices get rows that others hold: "peer", "collective", "rdma", or None where none needs any."""
        if self.config.rows is not None:
            return "rdma"
        if self.placement is None or self.config.selection == "decentralized":
            return None
        return self.placement.exchange

    def init(self, key: jax.Array | None = None) -> ReplayState:
        """An empty table.

        With `exchange="rdma"` all processes of the job call it: it connects them (`connect`). What was
        exposed before is no more.

        Call it outside jit for columns in `pinned_host` on a GPU: inside a program XLA makes them in the GPU's own
        memory first and then moves them.

        Args:
          key: a `jax.random` key for what the selector keeps to itself (the order of `Permutation`); None: key 0.

        Raises:
          MemoryError: if columns in `pinned_host` do not fit XLA's pool of page-locked memory, or the host's memory;
            it names the environment variable and its value.
          RuntimeError: if this build has no handlers for jax's default backend, or its driver is too old; over several
            processes, on all of them, if they have not made the same table or not been given the same key, or if one
            does not come within `GEAR_JAX_TIMEOUT` seconds (300).
          TransportError: with `exchange="rdma"`, if a process of the job does not come, or they do not agree.
        """
        if not tracing():
            self.close()  # what it exposes, it keeps: there would be two tables
        state = self._empty(key)
        return state if self._link is None or traced(state.ticket) else self.connect(state)

    def _empty(self, key: jax.Array | None = None) -> ReplayState:
        """An empty table that nobody else reads yet."""
        key = jax.random.key(0) if key is None else _sample.check_key(key)
        ops.check_platform()
        if traced(key) or tracing():
            return self._calls.init(_state.init, key)
        if self.placement is not None:
            _processes.check_agreement(self.config, self.placement, key)
        # On a CPU it is all one memory, and what a program makes there stays where it is.
        cpu = self.placement is not None and self.placement.mesh.devices.flat[0].platform == "cpu"
        if cpu or memory_kind(self.config.memory) == "device":
            return self._calls.compiled_init("init", _state.init)(key)
        columns = _memory.make_columns(self.config, self.placement)
        index = self._calls.compiled_init("init_index", _state.init_index)(key)
        if self.placement is None:
            # Columns in host memory are committed to their device, and so is all that a call gives back: committed from
            # the start, the index does not make the first call a compilation of its own.
            here = default_device()
            index = jax.tree.map(lambda x: x if in_host_memory(x) else jax.device_put(x, here), index)
        return index.replace(columns=self.config.tree.unflatten(columns))

    def place(self, state: ReplayState) -> ReplayState:
        """The state with its columns where the table keeps them, for a state that another library has restored.

        `flax.serialization` gives NumPy arrays, which a program of a GPU would copy into the GPU's memory, and Orbax
        arrays in `pinned_host` whose type does not say so. The methods of a `Replay` do this by themselves outside jit;
        do it before the state goes into a jitted step. `gear_jax.checkpoint.restore` leaves nothing to do.

        Args:
          state: outside jit. Columns that lie where they should are the same arrays after.
        """
        check_type("place", state)
        if traced(*jax.tree.leaves(state.columns)):
            raise type_error("place: state", got="a traced state", wanted="a concrete one", fix="Call it outside jit.")
        return self._calls.placed(state)

    def shardings(self, state: ReplayState) -> ReplayState:
        """How the state of a replay over a mesh lies there: a tree like `state` of `NamedSharding`s.

        For `jax.device_put` of a state that comes from elsewhere, and for `in_shardings` and `out_shardings`.

        Raises:
          ValueError: without a mesh.
        """
        if self.placement is None:
            raise value_error(
                "shardings", got="a replay without a mesh", wanted="make_replay(..., mesh=mesh)", fix="Use place."
            )
        return _mesh.broadcast(self._calls.shardings(), state)

    def add(
        self, state: ReplayState, trajectories: Any, lengths: Any, priorities: Any = None, rows: Any = None,
        version: Any = None,
    ) -> tuple[ReplayState, Handle]:  # fmt: skip
        """Inserts A trajectories in place; each takes a free slot, or the place of one that is evicted.

        Args:
          state: the last state; consumed outside jit.
          trajectories: a tree like the columns, leaves `[A, T', *shape]`, T' <= T. Over a mesh A is a multiple of the
            devices of `axis`.
          lengths: `int32[A]`, the steps that count, cut to [0, T']. A trajectory of length 0 is skipped.
          priorities: `float32[A]`; None: the largest seen so far (1.0 at first). NaN, infinite and negative ones are
            stored as 0 and counted.
          rows: `int32[A]`, which row of `trajectories`, then `[R, T', *shape]`, each of the A is: they are copied once,
            from where they lie. One outside [0, R) is skipped, as if of length 0. Not over a mesh.
          version: `int32[A]`, or one for all: of the policy that made each trajectory, for `max_staleness`. One that is
            too stale already is skipped, as if of length 0, and counted. None: the learner's own.

        Returns:
          The next state and the handles `[A]`; slot -1 for a skipped row, and for a row that later rows of the same
          batch have displaced.

        Raises:
          TypeError, ValueError: for shapes, dtypes or columns that do not match the table.
        """
        lengths = _uncut("lengths", lengths)
        version = version if version is None else _limits.each(version, jnp.shape(lengths)[0])
        if rows is not None and self.placement is not None:
            fix = "Leave rows out, and pass the rows themselves."
            raise value_error("add: rows", got="rows of a table over a mesh", wanted="None there", fix=fix)
        rows = rows if rows is None else int32_where_it_is("rows", rows)
        return self._run("add", _insert.add, state, trajectories, lengths, priorities, rows, version)

    def append(
        self, state: ReplayState, stream: Any, step: Any, done: Any, version: Any = None
    ) -> tuple[ReplayState, Handle]:
        """Appends one step to each of K streams.

        A stream writes to a slot of its own, which nobody can draw until it is closed: by `done`, or by its T-th step
        (the episode then goes on in a new slot).

        Args:
          state: the last state; consumed outside jit.
          stream: `int32[K]`, numbers in [0, N); others are skipped, and so is a second step for one stream.
          step: a tree like the columns, leaves `[K, *shape]`.
          done: `bool[K]`, whether this was the last step of the episode.
          version: `int32[K]`, or one for all, as in `add`: a trajectory has that of its first step. One that is too
            stale when it is closed does not get in.

        Over a mesh every device gets all K steps, and minds those of its own streams.

        Returns:
          The next state and the handles `[K]` of the trajectories that this call closed; slot -1 elsewhere.
        """
        stream = _uncut("stream", stream)
        version = version if version is None else _limits.each(version, jnp.shape(stream)[0])
        return self._run("append", _append.append, state, stream, step, done, version)

    def expire(self, state: ReplayState, version: Any) -> ReplayState:
        """Says which version the learner's policy has; trajectories that it leaves too far behind leave the table.

        Those of versions below `version - max_staleness` cannot be drawn any more, and their slots are free. O(C): call
        it when the policy that actors use changes, not at every step.

        Args:
          state: the last state; consumed outside jit.
          version: `int32[]`. Versions only rise: a lower one than the last changes nothing.

        Returns:
          The next state.

        Raises:
          ValueError: if the replay has no `max_staleness`.
        """
        return self._run("expire", _limits.expire, state, _uncut("version", version))[0]

    def sample(
        self, state: ReplayState, key: jax.Array, batch_size: int, out: Sample | None = None
    ) -> tuple[ReplayState, Sample]:
        """Draws a batch.

        Args:
          state: the last state; consumed outside jit.
          key: a `jax.random` key, typed or legacy.
          batch_size: B, static. Over a mesh a multiple of the devices of `batch_axis` (of `axis`, if each draws apart).
            With a selector that has `times` each row counts, and a trajectory drawn for the last time is gone when the
            call returns: the sample has its data.
          out: an earlier sample of the same batch size whose `data` and `mask` are not needed any more: the new sample
            takes their memory. They are consumed. Worth it for batches of many MB, where new memory costs as much as
            the copy. A NumPy array that still looks at it keeps it alive; the new sample then gets memory of its own.
            Not with `exchange="collective"` or "rdma", nor where the batch is repeated over an axis of a mesh: such a
            batch is always new.

        Returns:
          The next state and a `Sample`.

        Raises:
          TypeError, ValueError: for a state that is consumed or of another table, a key that is none, a batch size that
            is not static, an `out` that does not fit.
        """
        check_type("sample", state)
        batch_size = _sample.check_batch(batch_size)
        old = None if out is None else recyclable(out)
        return self._run("sample", _sample.sample, state, key, batch_size, old)

    def sample_start(
        self, state: ReplayState, key: jax.Array, batch_size: int, depth: int = 2, after: Any = ()
    ) -> tuple[ReplayState, PendingSample]:
        """Begins to draw a batch; `sample_done` ends it, with the same result as `sample`, bit for bit.

        Not for a table over a mesh. With `exchange="rdma"` rows of other processes are on their way in between.

        On a GPU the data is on its way while the work in between runs. What is added or updated in between does not
        change it: `add` and `append` wait until the columns have been read. Until `sample_done` nothing else may write
        to the table's columns or free them.

        Args:
          state: the last state; consumed outside jit.
          key, batch_size: as in `sample`.
          depth: how many samples may be in flight, static, the same in all calls. One more than that drops the oldest:
            its `sample_done` gives a batch that is not `valid`. XLA orders by data alone, so one program that ends a
            sample and starts the next may have both in flight, whatever their order in the source. The memory for
            `depth` batches is kept as long as the replay.
          after: arrays that the start waits for, such as an earlier sample.

        Returns:
          The next state and a `PendingSample`, a pytree of small arrays; it may be dropped.

        Raises:
          TypeError, ValueError: as `sample`, or for a depth that is not in [1, 64].
        """
        check_type("sample_start", state)
        batch_size, depth = _sample.check_batch(batch_size), check_depth(depth)
        return self._run("sample_start", _sample.start, state, key, batch_size, self._queue.number, depth, after)

    def sample_done(self, pending: PendingSample, after: Any = ()) -> Sample:
        """Ends a sample that `sample_start` has begun.

        Args:
          pending: the sample in flight, of the same device.
          after: arrays that must be there first: the results of work that the sample shall be beside, or the
            `PendingSample` that follows, so that it is on its way before this one is used.

        Returns:
          A `Sample`. If its data is not there any more (it has been handed out already, or `depth` later starts have
          dropped it), no row is `valid`, all is padding, and the handles have slot -1.

        Raises:
          TypeError: if `pending` is none.
        """
        if not isinstance(pending, PendingSample):
            raise type_error(
                "pending", got=type(pending).__name__, wanted="a PendingSample", fix="Pass what sample_start returned."
            )
        if traced(*jax.tree.leaves((pending, after))):
            return _sample.done(pending, after)
        return _done(pending, after)

    @functools.cached_property
    def _queue(self) -> Queue:
        return Queue()

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
        # With exchange="rdma" those of other processes' trajectories wait in this one's outbox until their owner looks.
        if not isinstance(handles, Handle):
            raise type_error("handles", got=type(handles).__name__, wanted="a Handle", fix="Pass Sample.handles.")
        if isinstance(handles.slot, np.ndarray | np.generic) and handles.slot.dtype.kind in "iu":
            handles = Handle(_uncut("handles.slot", handles.slot), handles.generation)
        return self._run("update_priorities", _update_priorities, state, handles, priorities)[0]

    def can_sample(self, state: ReplayState) -> jax.Array:
        """Whether a sample would hold a valid row: `bool[]`."""
        check_type("can_sample", state)
        if not traced(state.ticket):
            check_alive("can_sample", state)
        return _can_sample(state.sums) if self.config.remote is None else can_sample_remote(self.config.remote, state)

    def stats(self, state: ReplayState) -> dict[str, int | float]:
        """Python numbers, exact, for the host: not under jit. Over several processes all of them call it.

        trajectories and steps that can be selected or would be with a shorter window, slots, rows offered (`inserted`,
        `evicted`), updates that changed nothing (`stale_updates`, `rejected_priorities`), rows `sampled`, the largest
        priority seen (1.0 at least), and `open_streams`. With `exchange="rdma"` of this process's part alone, and
        `missed_updates`: priorities that others had for it, and that it did not look at in time.
        Where trajectories leave by themselves: those drawn as often
        as they may be (`used_up`), grown stale (`expired`), not let in because of it (`refused_stale`); the learner's
        `version`.
        """
        check_type("stats", state)
        if traced(state.ticket):
            raise type_error(
                "stats: state", got="a traced state", wanted="a concrete one", fix="Call stats outside jit."
            )
        check_alive("stats", state)
        numbers = _statistics.of_state(self.config.table.capacity, state)
        if state.remote is not None:
            numbers["missed_updates"] = int(state.remote.missed[0])
        return numbers

    def _run(self, name: str, function, state, *args) -> Any:
        """Calls `function(config, state, *args)`, which returns the next state and something beside it."""
        check_type(name, state)
        if self._link is None or traced(state.ticket, *jax.tree.leaves(args)):
            return self._calls.run(name, function, state, *args)
        check_alive(name, state)
        self._check_exposed(name, state)
        state, result = self._calls.run(name, function, state, *args)
        self._note_exposed(state)
        return state, result


_done = jax.jit(_sample.done)


def _uncut(what: str, x: Any) -> Any:
    """Integers as int32, clipped; jit would cut NumPy's int64 to other numbers before we see them."""
    return x if isinstance(x, jax.Array) else int32_where_it_is(what, x)


@jax.jit
def _can_sample(sums: jax.Array) -> jax.Array:
    return jnp.any(ops.sumtree_roots(sums) > 0)


def _update_priorities(config: Config, state: ReplayState, handles: Handle, priorities: Any):
    return _insert.update_priorities(config, state, handles, priorities), ()
