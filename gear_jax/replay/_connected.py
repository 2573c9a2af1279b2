"""What a `Replay` does with the other processes of a job: `exchange="rdma"`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from gear_jax import ops
from gear_jax._errors import type_error, value_error
from gear_jax.ops._place import default_device, host_sharding, memory_kind
from gear_jax.replay import _exposed, _remote
from gear_jax.replay._calls import Calls, check_alive, traced
from gear_jax.replay._config import Config, check_streams, make_config
from gear_jax.replay._link import Link, new_incarnation
from gear_jax.replay._mesh import Placement
from gear_jax.replay._remote import RemoteTable, check_selector
from gear_jax.replay._state import ReplayState, check_table


def make_remote(
    table, selector, windows, anchor, memory, batch_axis, partitions, selection, eviction, streams, donate,
    max_staleness, link,
) -> Config:  # fmt: skip
    """The settings of a replay over the processes of a job, each with its part, checked as those of `make_replay`."""
    times = getattr(selector, "times", None)
    in_gpu = memory == "device" and default_device().platform != "cpu"
    _refuse(
        ("batch_axis", batch_axis, batch_axis is not None, "None: a batch is for the process that draws it"),
        ("selection", selection, selection != "centralized", "'centralized'"),
        ("donate", donate, not donate, "True: what others read must stay where it is"),
        ("selector.times", times, times is not None, "None: a process knows its own draws alone"),
        ("max_staleness", max_staleness, max_staleness is not None, "None"),
        ("memory", memory, in_gpu, "None: others read the host's memory"),
    )
    n = link.processes
    config = make_config(table, selector, windows, anchor, memory, partitions, selection, eviction, 0, devices=n)
    check_selector(config.selector, n)
    own = config.partitions // n
    streams = check_streams(streams, own, config.slots)
    rows = ops.Remote(link.number, tuple(range(n)), (0,) * n, link.on_loss)
    kind = memory_kind(config.memory)
    remote = RemoteTable(link.number, link.rank, n, len(config.columns) + 1, kind, link.on_loss)
    return dataclasses.replace(config, partitions=own, streams=streams, rows=rows, remote=remote, exchange="rdma")


def with_rdma(config: Config, placement: Placement, donate: bool, link: Link) -> Config:
    """The settings of a replay over a mesh whose devices read the rows that they want out of each other's memory."""
    selection, memory = config.selection, config.memory
    in_gpu = memory_kind(memory) == "device" and placement.mesh.devices.flat[0].platform != "cpu"
    _refuse(
        ("selection", selection, selection != "centralized", "'centralized': else no device wants another's rows"),
        ("donate", donate, not donate, "True: what others read must stay where it is"),
        ("memory", memory, in_gpu, "None: others read the host's memory"),
    )
    rows = _exposed.shards(placement, link.number, len(config.columns), link.on_loss)
    return dataclasses.replace(config, rows=rows)


def _refuse(*cases: tuple[str, Any, bool, str]) -> None:
    for name, got, bad, wanted in cases:
        if bad:
            fix = "Leave it out, or use another exchange."
            raise value_error(name, got=f"{got!r} with exchange='rdma'", wanted=wanted, fix=fix)


def check_unused(exchange: Any, **given: Any) -> None:
    """Raises a ValueError for arguments of exchange="rdma" that are given with another."""
    unset = {"on_loss": "invalid", "deadline": 2.0}
    for name, value in given.items():
        if value != unset.get(name):
            fix = "Write exchange='rdma', or leave it out."
            raise value_error(name, got=f"{value!r} with exchange={exchange!r}", wanted="exchange='rdma'", fix=fix)


class Connected:
    """The part of `Replay` that is about other processes."""

    config: Config
    placement: Placement | None
    _link: Link | None
    _calls: Calls

    @property
    def session(self) -> Any:
        """With `exchange="rdma"`: the open session, a `gear_jax.transport.Session` (of one process alone something like
        it), with `alive`, `counters()` and `transport`; None before `init` and after `close`, and with other exchanges.
        """
        return None if self._link is None else self._link.session

    def connect(self, state: ReplayState) -> ReplayState:
        """Exposes a state to the other processes of the job, and connects to them, with `exchange="rdma"`.

        `init` does it. Call it again for a state that comes from elsewhere, such as a checkpoint: what was exposed
        before is no more, to the others this process is lost for a moment, and they need not call anything. Priorities
        that were on their way to others are dropped. With several processes the generations of its trajectories change:
        handles of before are stale, also those that others have. Samples that are in flight (`sample_start`) are
        waited for first, and are whole: they end by the deadline.

        From then on the state, threaded linearly, must stay in its memory until `close`, which donation sees to: in
        your own jitted steps donate it, too. A sample finds out if it does not. What a call of the replay has returned
        is kept until then, even if you let it go; what a step of yours has returned is not.

        Args:
          state: outside jit; consumed.

        Returns:
          The state.

        Raises:
          TransportError: if a process of the job is missing, or they do not agree. ValueError: with another exchange.
        """
        check_type("connect", state)
        if self._link is None:
            raise value_error(
                "connect", got=f"exchange={self.config.exchange!r}", wanted="exchange='rdma'", fix="Leave the call out."
            )
        if traced(*jax.tree.leaves(state)):
            fix = "Call it outside jit."
            raise type_error("connect: state", got="a traced state", wanted="a concrete one", fix=fix)
        check_alive("connect", state)
        check_table("connect", self.config, state, 1 if self.placement is None else self.placement.devices)
        jax.block_until_ready(state)  # what is still to run needs the session that there is
        self._link.wait()
        self._link.close()
        state = self._calls.placed(state)
        state = self._with_exposed(state)
        self._link.connect(_exposed.pieces(state, self.placement), self.config.of_all())
        self._note_exposed(state)
        return state

    def close(self) -> None:
        """Lets no other process read this one's memory any more, and reads none; with `exchange="rdma"`. Do it before
        the last state goes, and before another table is made: until then the memory is kept. The others go on without
        this process. `connect` opens it again.

        Waits for the last call of this replay, and for samples in flight; a program of your own that is still to run
        fails."""
        if self._link is not None:
            self._link.wait()
            self._link.close()

    def counters(self) -> dict[str, int | float]:
        """What has happened between this process and the others, with `exchange="rdma"`; else empty.

        Of the session: `bytes`, `reads`, `timeouts`, `lost`, `losses`, `reconnects`, `wait_seconds`, ...
        (`gear_jax.transport.Session.counters`). Of the rows: `rows`, `remote_rows`, `retries`, `torn`, `stale`,
        `lost_rows`, `refused_rows` (`gear_jax.ops.rdma_counters`).
        """
        return {} if self._link is None else self._link.counters()

    def _check_exposed(self, name: str, state: ReplayState) -> None:
        """Raises a ValueError if others would read something else than this state: before it is consumed."""
        link = self._link
        assert link is not None and state.stamp is not None
        written = state.stamp if state.remote is None else state.remote.record  # by every call that writes any of it
        if link.session is not None and link.holds(written):
            return  # what the last call returned: nothing to look at, nothing to wait for
        if not link.exposes(_exposed.pieces(state, self.placement)):
            raise value_error(
                f"{name}: state", got="one that other processes do not read" if link.session else "a closed replay",
                wanted="the state that init, connect or the last call returned",
                fix="Call state = replay.connect(state); in jitted steps of your own donate the state.",
            )  # fmt: skip

    def _note_exposed(self, state: ReplayState) -> None:
        """Remembers a state whose arrays are those that are exposed."""
        assert self._link is not None
        self._link.hold(_exposed.arrays(state), state.ticket)

    def _with_exposed(self, state: ReplayState) -> ReplayState:
        """The state with all that is exposed beside its columns made anew out of its index."""
        remote, placement, kind = self.config.remote, self.placement, memory_kind(self.config.memory)
        incarnation = new_incarnation()
        if remote is not None and remote.processes > 1:
            state = state.replace(generation=_counted_on(state.generation, incarnation))
        stamp = self._calls.of_index("stamps", _exposed.stamps, state)
        if kind == "pinned_host":  # where the columns are
            to = host_sharding() if placement is None else placement.sharding(placement.held, kind)
            stamp = jax.device_put(stamp, to)
        if remote is not None:
            remote = _rebuilt(remote, state.replace(columns=None), incarnation)
        return state.replace(stamp=stamp, remote=remote)


@functools.partial(jax.jit, static_argnums=0)
def can_sample_remote(remote: RemoteTable, state: ReplayState) -> jax.Array:
    """`Replay.can_sample` of the table as a whole."""
    return jnp.any(_remote.read_index(remote, state)[0].mass > 0)


@functools.partial(jax.jit, static_argnums=0)
def _rebuilt(remote: RemoteTable, state: ReplayState, incarnation: jax.Array):
    return _remote.rebuilt(state, remote, incarnation)


_counted_on = jax.jit(_remote.counted_on)


def check_type(name: str, state: Any) -> None:
    """Raises a TypeError if an argument is no state."""
    if not isinstance(state, ReplayState):
        raise type_error(f"{name}: state", got=type(state).__name__, wanted="a ReplayState", fix="Pass replay.init().")
