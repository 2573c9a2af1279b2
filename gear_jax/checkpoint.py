"""Saves and restores replay tables with Orbax.

A checkpoint is one step of an `orbax.checkpoint.CheckpointManager` directory with three items:

  table    JSON: columns, T, C, P, selector, ...; checked by `restore`.
  index    all of the `ReplayState` but its columns: a NumPy archive for the partitions of each device, one for what all
           devices have, with checksums.
  columns  a Zarr array `uint8[P, S, bytes of a trajectory]` for each column, compressed, with checksums; a file for
           each block of slots, and in `digests` a digest of each. Written and read in pieces, so that a save or a
           restore needs little memory beside the table.

A block that has not changed since an earlier step is not written again: its file gets a second name, a hard link (a
copy, where the file system has none). Each step is complete by itself, and any of them may be deleted; but a file that
rots on the disk does so for all steps that share it.

Nothing in there depends on the number of devices or processes. Each process writes what its own devices hold and reads
what they need; the directory is one that all of them see. Orbax writes a step into a temporary directory and renames it
when all processes are done: a save that fails or is killed, in whichever process, leaves the steps before it as they
were.
"""

import atexit
import contextlib
import dataclasses
import functools
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from gear_jax._checkpoint import _state
from gear_jax._checkpoint._files import Archives
from gear_jax._checkpoint._items import (
    ColumnsHandler,
    ColumnsRestore,
    ColumnsSave,
    Field,
    IndexHandler,
    IndexRestore,
    IndexSave,
    read_field,
)
from gear_jax._checkpoint._rows import HandOver, blocks
from gear_jax._checkpoint._steps import base_of, damaged, find, path_of, read_table, step_number, steps_in
from gear_jax._checkpoint._table import check_arguments, check_table, describe
from gear_jax._errors import message, type_error, value_error
from gear_jax.replay import Replay, ReplayState, _statistics
from gear_jax.replay._processes import meet, share

_AHEAD = 64 << 20  # bytes of rows that wait to be written, where the caller waits too
_pending: dict[str, "Save"] = {}  # the last save of each directory, until its error is known


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a checkpoint holds, without its columns.

    Attributes:
      step: the step it was saved at.
      table: the settings of the table: "columns" (a list of name, shape and dtype), "trajectory_length", "capacity",
        "partitions", "selector", "selection", "eviction", "streams", "anchor", "gear_jax" (the version that wrote it).
      length: `int32[P, S]`, steps in each slot; 0: empty.
      priority: `float32[P, S]`.
      stats: rows inserted, evicted, sampled, ..., as in `Replay.stats`.
    """

    step: int
    table: dict[str, Any]
    length: np.ndarray
    priority: np.ndarray
    stats: dict[str, int | float]


class Save:
    """A save, under way or done. Made by `save`.

    Attributes:
      step: its number.
    """

    def __init__(self, step: int, columns: ColumnsSave, work: Callable[[], None]):
        self.step = step
        self._columns, self._error = columns, None
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"gear_jax.checkpoint step {step}")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:  # for whoever waits
            self._error = e
            self._columns.rows.abandon()

    @property
    def bytes_written(self) -> int:
        """Bytes of rows that this process has written so far, before compression."""
        return self._columns.written

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the step is complete, on all processes.

        Args:
          timeout: in seconds; None: as long as it takes (processes that wait for another give up after 5 minutes).

        Raises:
          TimeoutError: if it takes longer.
          Exception: what it has failed with. The steps before are as they were.
        """
        self._thread.join(timeout)
        if not self.done():
            raise TimeoutError(f"save of step {self.step}: still under way after {timeout} s. Wait again.")
        for path in [path for path, pending in _pending.items() if pending is self]:
            del _pending[path]
        if self._error is not None:
            raise self._error


@atexit.register
def _wait_at_exit() -> None:
    """Python says on the standard error what a save has failed with that nobody has waited for."""
    for pending in list(_pending.values()):
        try:
            pending.wait()
        except Exception:
            traceback.print_exc()


def save(
    directory: str | os.PathLike,
    step: int,
    state: ReplayState,
    replay: Replay,
    *,
    keep: int | None = None,
    blocking: bool = True,
    since: int | None = None,
    ahead: int = 1 << 30,
) -> Save:
    """Saves a table as one step of a directory. The state is not consumed.

    Over several processes all of them call it, with a directory that all of them see. The step is there when all have
    written their part, or not at all.

    Blocks of rows (4 MiB, or one row) that the directory's latest step holds already are not written again. To find
    them, all rows are read, and compared by a digest of 64 bits that the device forms. With `since`, the index says
    what has changed, and the rest is not read either.

    Args:
      directory: of a file system; made if it is not there.
      step: its number, not there yet.
      state: the state, outside jit.
      replay: what made it.
      keep: how many steps to keep; the oldest go once this one is complete. None: all.
      blocking: whether the step is complete when this returns. If not, writing goes on in a thread, and what is
        sampled, added or updated meanwhile changes nothing of what is saved: all rows to be written have been read when
        this returns. That needs memory: see `ahead`. Wait for it before the process ends, which cuts it short.
      since: a step in the directory that the state comes from: it was saved as that step, or restored from it, and then
        nothing but this replay's calls. Slots that have not been filled since are taken to be the same. A few of them
        are compared; if they differ, this raises.
      ahead: bytes of rows that may wait in the host's memory, where `blocking` is False. If more has changed, it
        returns when all but these have been written.

    Returns:
      A `Save`: `wait()` for its end, or its error. An error that nobody has waited for is raised by the next save to
      the directory, or printed when the process ends.

    Raises:
      ValueError: if the step is there already, the state was consumed or is not of this replay, or does not come from
        the step `since`.
    """
    step = step_number(step)
    check_arguments(state, replay, keep, ahead)
    path = path_of(directory)
    if os.fspath(path) in _pending:
        _pending[os.fspath(path)].wait()
    path.mkdir(parents=True, exist_ok=True)
    steps = steps_in(path)
    if step in steps:
        raise value_error(
            "step", got=f"{step}, which is in {directory} already", wanted=f"one not in {steps}",
            fix="Save under another number, or remove that step's folder.",
        )  # fmt: skip
    table = describe(replay)
    base = base_of(path, steps, since, table, replay)
    processes = _processes(replay)
    shards, whole = _state.take(replay, state)
    number = {f["name"]: f["number"] for f in table["index"]}
    parts = [(s.start, s.stop, {number[name]: x for name, x in s.arrays.items()}) for s in shards]
    first = jax.process_index() == processes[0]
    index = IndexSave(parts, {number[name]: x for name, x in whole.items()} if first else None, processes)
    rows = HandOver(_AHEAD if blocking else ahead)
    columns = ColumnsSave(replay.config, rows, None if base is None else base.columns, processes)
    items = ocp.args.Composite(index=index, columns=columns, table=ocp.args.JsonSave(table))
    handle = Save(step, columns, functools.partial(_write, path, step, keep, items, processes))
    _pending[os.fspath(path)] = handle
    failed = True
    try:
        for shard in shards:
            if not all(rows.put(item) for item in blocks(replay.config, shard, base)):
                break
        rows.finish()
        failed = False
    except BaseException as e:
        rows.finish(e)
        raise
    finally:
        if failed:
            with contextlib.suppress(Exception):  # what it fails with is what has been raised
                handle.wait()
    if blocking:
        handle.wait()
    return handle


def _write(path: epath.Path, step: int, keep: int | None, items: Any, processes: tuple[int, ...]) -> None:
    """Has Orbax write a step; in a thread of its own."""
    everyone = ocp.options.MultiprocessingOptions(
        primary_host=processes[0], active_processes=set(processes), barrier_sync_key_prefix=f"gear_jax_{processes[0]}"
    )
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, create=False, enable_async_checkpointing=False, multiprocessing_options=everyone
    )
    handlers = {
        "index": IndexHandler(),
        "columns": ColumnsHandler(),
        "table": ocp.JsonCheckpointHandler(multiprocessing_options=everyone),
    }
    with ocp.CheckpointManager(path, options=options, item_handlers=handlers) as manager:
        manager.save(step, args=items, force=True)


def restore(directory: str | os.PathLike, replay: Replay, step: int | None = None) -> ReplayState:
    """Reads a table back; it goes on with the same batches as the one that was saved.

    The replay may be over another number of devices or processes, or over none: with centralized selection the batches
    are the same. Over several processes all of them call it.

    Args:
      directory: as given to `save`.
      replay: made with the same table, selector, eviction, partitions and streams as the one that was saved. Windows
        may differ, as long as the shortest trajectory that can be drawn stays the same.
      step: the step's number; None: the latest.

    Returns:
      A new state. With `exchange="rdma"` each process saves and restores its own part, in a directory of its own, and
      goes on with `state = replay.connect(state)`.

    Raises:
      FileNotFoundError: if there is no such directory or step.
      ValueError: naming what differs, if the checkpoint is not of such a table; or if it is damaged.
      RuntimeError: if another process has failed.
    """
    if not isinstance(replay, Replay):
        raise type_error("replay", got=type(replay).__name__, wanted="a Replay", fix="Pass gear_jax.make_replay(...).")

    def look():
        path, number = find(directory, step)
        saved = read_table(path, number)
        check_table(f"{path / str(number)}", saved, describe(replay))
        return path, number, saved

    path, number, saved = _together(replay, look)
    state = replay._empty()
    columns = ColumnsRestore(replay.config, replay.placement, state.columns)
    state = state.replace(columns=None)  # the columns are handed over: they are filled in place

    def read():
        folder = path / str(number)
        try:
            archives = Archives(folder / "index", replay.config.partitions)
            fields = {f["name"]: Field.of_json(f) for f in saved["index"]}
            index = _state.give(
                replay, state, lambda name, start, stop: read_field(archives, fields[name], start, stop)
            )
            return index.replace(columns=ColumnsHandler().restore(folder / "columns", columns))
        except Exception as e:
            raise damaged(path, number, f"{type(e).__name__}: {e}") from e

    return _together(replay, read)


def latest_step(directory: str | os.PathLike) -> int | None:
    """The largest number of a complete step in a directory; None where there is none."""
    path = path_of(directory)
    if not path.is_dir():
        return None
    steps = steps_in(path)
    return max(steps) if steps else None


def summary(directory: str | os.PathLike, step: int | None = None) -> Summary:
    """Reads what a checkpoint says of itself and its index, none of the columns. Needs no `Replay`.

    Raises:
      FileNotFoundError, ValueError: as `restore`.
    """
    path, step = find(directory, step)
    table = read_table(path, step)
    wanted = ("length", "priority", "counters", "max_priority")
    fields = [Field.of_json(f) for f in table["index"] if f["name"] in wanted]
    try:
        index = IndexHandler().restore(path / str(step) / "index", IndexRestore(fields, table["partitions"]))
    except Exception as e:
        raise damaged(path, step, f"{type(e).__name__}: {e}") from e
    stats = _statistics.of_arrays(table["capacity"], index["length"], index["counters"], index["max_priority"])
    return Summary(step, table, index["length"], index["priority"], stats)


def _processes(replay: Replay) -> tuple[int, ...]:
    """The processes that hold the table, which save and restore it together."""
    if replay.placement is None:
        return (jax.process_index(),)
    return tuple(sorted({d.process_index for d in replay.placement.mesh.devices.flat}))


def _together(replay: Replay, work: Callable[[], Any]) -> Any:
    """What `work` returns; raises on all processes if it does on one."""
    result = error = None
    try:
        result = work()
    except Exception as e:
        error = e
    processes = _processes(replay)
    if len(processes) > 1:
        assert replay.placement is not None
        meet("restore", list(processes))
        told = share(replay.placement.mesh.devices.flat, np.array([error is not None], np.uint32))
        if error is None and told.any():
            others = [p for p, failed in zip(processes, told[:, 0], strict=True) if failed]
            fix = "They say what it was."
            error = RuntimeError(
                message("restore", got=f"failures on processes {others}", wanted="what each of them needs", fix=fix)
            )
    if error is not None:
        raise error
    return result
