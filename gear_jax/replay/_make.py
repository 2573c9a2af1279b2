"""`make_replay`."""

from typing import Any

import jax

from gear_jax._errors import value_error
from gear_jax.ops._place import check_memory
from gear_jax.replay._config import make_config
from gear_jax.replay._connected import check_unused, make_remote, with_rdma
from gear_jax.replay._link import Link
from gear_jax.replay._mesh import make_placement
from gear_jax.replay._replay import Replay
from gear_jax.selectors import Selector


def make_replay(
    table,
    selector: Selector | None = None,
    windows: Any = None,
    anchor: str = "uniform",
    memory: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    axis: str | tuple[str, ...] = "replay",
    batch_axis: str | None = None,
    partitions: int | None = None,
    selection: str = "centralized",
    eviction: Selector | None = None,
    streams: int = 0,
    donate: bool = True,
    exchange: str | None = None,
    job: Any = None,
    transport: str | None = None,
    on_loss: str = "invalid",
    deadline: float = 2.0,
    max_staleness: int | None = None,
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
      memory: where the columns lie. "pinned_host": in page-locked memory of the host, which a GPU's kernels read and
        write where it is. "device": in the device's own. None: "pinned_host" where arrays go to a GPU by default,
        "device" on a CPU (the same memory there); settled by `init` and `footprint`, which start jax's backend.
      mesh: the devices that the table is spread over, of this process or several; None: the default device alone. All
        processes make the same replay, and call the same functions in the same order.
      axis: the axis, or axes, of the mesh that the partitions are cut along; over the others they are repeated.
      batch_axis: which of them a batch is cut along; over the others of them it is repeated. None: the first.
      partitions: P, logical shards; None: 1 without a mesh, else the least multiple of n (the devices of `axis`) that
        is 8 or more. Must divide the capacity, and n must divide it. What is drawn, and where rows go, depends on P
        alone, not on n.
      selection: "centralized": a sample is drawn from the table as a whole, the same for every n. "decentralized": each
        device draws B / n rows from its own partitions, and nothing but a few numbers crosses between devices;
        `Sample.probability` is then that on the device over n, and a device with nothing to draw gives rows that are
        not `valid`. On one device both are the same.
      eviction: which trajectory a new one displaces; None: `selectors.Fifo()`, the oldest of its partition.
      streams: N, the streams of `Replay.append`.
      donate: whether calls outside jit consume the state. False keeps it, at the price of a copy of the table.
      exchange: how a device gets the rows of its part of a batch that other devices hold, with centralized selection.
        "peer": it reads them where they are, in one gather; the devices must be of one process and, if GPUs, the
        columns in `pinned_host`. "collective": an all-to-all of the rows. "rdma": it reads them out of the memory of
        the processes that have them, which take no part; on a GPU the columns must be in `pinned_host`, and `axis` must
        name all axes. None: "peer" where it can be had, else "collective". `Replay.exchange` says which.
        Without a mesh "rdma" spreads the table over the processes of a job, each of which holds the partitions of its
        rank on its default device, adds to them, and reads the others' memory when it samples. They need not call
        anything in step, and one that ends hurts no other. All make the same tables and selectors, in the same order;
        their windows may differ. See docs/rdma.md.
      job: the processes, with exchange="rdma": a `gear_jax.transport.Job`; None: those of `jax.distributed`, or this
        one alone. Over a mesh it must be those of `jax.distributed`; not used where the mesh is of this process alone.
      transport: "verbs" or "ucx", with exchange="rdma"; None: the best that all processes have.
      on_loss: what a process that is gone means to a sample, with exchange="rdma": "invalid": rows that were on their
        way from it are not `valid`, and from the next sample on its partitions are not drawn from, and probabilities
        are those of the rest, until it is back. "error": samples raise until it is back; on a GPU the first of
        them to be dispatched when the loss is known, the one that met it has rows that are not `valid`.
      deadline: seconds that a read may take, with exchange="rdma". A process that does not answer counts as gone.
      max_staleness: how many policy versions a trajectory may be behind the learner's (`Replay.expire`) before it
        leaves the table; None: any number, and none are kept.

    Raises:
      TypeError, ValueError: naming the argument, what it got, what it wanted, and the fix.
    """
    placement = link = None
    if exchange == "rdma" and mesh is None:
        link = Link(job, transport, deadline, on_loss)
        config = make_remote(
            table, selector, windows, anchor, memory, batch_axis, partitions, selection, eviction, streams, donate,
            max_staleness, link,
        )  # fmt: skip
        return Replay(config, link=link)
    if exchange != "rdma":
        check_unused(exchange, job=job, transport=transport, on_loss=on_loss, deadline=deadline)
    if mesh is None:
        for name, value in (("batch_axis", batch_axis), ("exchange", exchange)):
            if value is not None:
                fix = "Give a mesh, or leave it out."
                raise value_error(name, got=f"{value!r} without a mesh", wanted="None", fix=fix)
    else:
        check_memory(memory)
        placement = make_placement(mesh, axis, batch_axis, exchange, memory)
        memory = placement.memory
    config = make_config(
        table, selector, windows, anchor, memory, partitions, selection, eviction, streams,
        devices=0 if placement is None else placement.devices, max_staleness=max_staleness,
    )  # fmt: skip
    if exchange == "rdma" and placement is not None:
        link = Link(job, transport, deadline, on_loss, placement)
        config = with_rdma(config, placement, donate, link)
    return Replay(config, donate=donate, placement=placement, link=link)
