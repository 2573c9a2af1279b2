"""Saves and restores replay tables with Orbax.

A checkpoint is one step of an `orbax.checkpoint.CheckpointManager` directory with three items:

  table    JSON: columns, T, C, P, selector, ...; checked by `restore`.
  index    all of the `ReplayState` but its columns: one NumPy archive, with checksums.
  columns  one Zarr array `uint8[C, bytes of a trajectory]` for each column, compressed, with checksums. It is
           written and read block by block, so that a save or a restore needs little memory beside the table.

Orbax writes a step into a temporary directory and renames it at the end: a save that is killed leaves the steps
before it as they were.
"""

import dataclasses
import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.core import Tracer

import gear_jax
from gear_jax._checkpoint_items import (
    ColumnsHandler,
    ColumnsRestore,
    ColumnsSave,
    IndexHandler,
    IndexRestore,
    IndexSave,
)
from gear_jax._errors import message, type_error, value_error
from gear_jax.replay import Replay, ReplayState, _statistics

FORMAT = 1
_COMPLETE = "_CHECKPOINT_METADATA"  # what Orbax puts into a step's folder


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a checkpoint holds, without its columns.

    Attributes:
      step: the step it was saved at.
      table: the settings of the table: "columns" (a list of name, shape and dtype), "trajectory_length", "capacity",
        "partitions", "selector", "eviction", "streams", "anchor", "gear_jax" (the version that wrote it).
      length: `int32[P, S]`, steps in each slot; 0: empty.
      priority: `float32[P, S]`.
      stats: rows inserted, evicted, sampled, ..., as in `Replay.stats`.
    """

    step: int
    table: dict[str, Any]
    length: np.ndarray
    priority: np.ndarray
    stats: dict[str, int | float]


def save(
    directory: str | os.PathLike, step: int, state: ReplayState, replay: Replay, *, keep: int | None = None
) -> None:
    """Saves a table as one step of a directory; done when it returns. The state is not consumed.

    Args:
      directory: of a file system; made if it is not there.
      step: its number, not there yet.
      state: the state, outside jit.
      replay: what made it.
      keep: how many steps to keep; the oldest go once this one is complete. None: all.

    Raises:
      ValueError: if the step is there already, or the state was consumed or is not of this replay.
    """
    step = _step_number(step)
    if not isinstance(replay, Replay):
        raise type_error("replay", got=type(replay).__name__, wanted="a Replay", fix="Pass what made the state.")
    if not isinstance(state, ReplayState):
        raise type_error("state", got=type(state).__name__, wanted="a ReplayState", fix="Pass the last state.")
    _check_state(state, replay)
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        fix = "Leave it out to keep all steps."
        raise value_error("keep", got=repr(keep), wanted="None or a positive integer", fix=fix)
    items = ocp.args.Composite(
        index=IndexSave(jax.tree.leaves(state.replace(columns=None))),
        columns=ColumnsSave(replay.config, state.columns),
        table=ocp.args.JsonSave(_table(replay)),
    )
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False)
    with ocp.CheckpointManager(_path(directory), options=options, item_handlers=_handlers()) as manager:
        if step in manager.all_steps():
            raise value_error(
                "step", got=f"{step}, which is in {directory} already", wanted=f"one not in {manager.all_steps()}",
                fix="Save under another number, or remove that step's folder.",
            )  # fmt: skip
        manager.save(step, args=items, force=True)


def restore(directory: str | os.PathLike, replay: Replay, step: int | None = None) -> ReplayState:
    """Reads a table back; it goes on with the same batches as the one that was saved.

    Args:
      directory: as given to `save`.
      replay: made with the same table, selector, eviction, partitions and streams as the one that was saved. Windows
        may differ, as long as the shortest trajectory that can be drawn stays the same.
      step: the step's number; None: the latest.

    Returns:
      A new state.

    Raises:
      FileNotFoundError: if there is no such directory or step.
      ValueError: naming what differs, if the checkpoint is not of such a table; or if it is damaged.
    """
    if not isinstance(replay, Replay):
        raise type_error("replay", got=type(replay).__name__, wanted="a Replay", fix="Pass gear_jax.make_replay(...).")
    path, step = _find(directory, step)
    saved = _read_table(path, step)
    _check_table(f"{path / str(step)}", saved, _table(replay))
    state = replay.init()
    index, tree = jax.tree.flatten(state.replace(columns=None))
    shardings = [x.sharding for x in index]
    columns = ColumnsRestore(replay.config, state.columns)
    del state, index  # the columns are handed over: they are filled in place
    restored = _read(path, step, index=IndexRestore(saved["index"]), columns=columns)
    index = tree.unflatten(jax.device_put(list(restored["index"].values()), shardings))
    return index.replace(columns=restored["columns"])


def latest_step(directory: str | os.PathLike) -> int | None:
    """The largest number of a complete step in a directory; None where there is none."""
    path = _path(directory)
    if not path.is_dir():
        return None
    steps = _steps(path)
    return max(steps) if steps else None


def summary(directory: str | os.PathLike, step: int | None = None) -> Summary:
    """Reads what a checkpoint says of itself and its index, none of the columns. Needs no `Replay`.

    Raises:
      FileNotFoundError, ValueError: as `restore`.
    """
    path, step = _find(directory, step)
    table = _read_table(path, step)
    wanted = ("length", "priority", "counters", "max_priority")
    fields = [f for f in table["index"] if f["name"] in wanted]
    index = _read(path, step, index=IndexRestore(fields))["index"]
    stats = _statistics.of_arrays(table["capacity"], index["length"], index["counters"], index["max_priority"])
    return Summary(step, table, index["length"], index["priority"], stats)


# What is checked.


def _table(replay: Replay) -> dict[str, Any]:
    config = replay.config
    columns = [_field(*x) for x in zip(config.names, config.columns, strict=True)]
    index = [
        {**_field(jax.tree_util.keystr(path, simple=True, separator="/"), x), "number": i}
        for i, (path, x) in enumerate(jax.tree.leaves_with_path(jax.eval_shape(replay.init).replace(columns=None)))
    ]
    return {
        "format": FORMAT,
        "gear_jax": gear_jax.__version__,
        "columns": columns,
        "index": index,
        "trajectory_length": config.steps,
        "capacity": config.table.capacity,
        "partitions": config.partitions,
        "selector": repr(config.selector),
        "eviction": repr(config.eviction),
        "streams": config.streams,
        "anchor": config.anchor.kind,
        "shortest_trajectory": config.anchor.min_length,
    }


def _field(name: str, x: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(x.shape), "dtype": x.dtype.name}


_SETTINGS = (
    "trajectory_length", "capacity", "partitions", "selector", "eviction", "streams", "shortest_trajectory",
)  # fmt: skip


def _check_table(where: str, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises ValueError where the settings of a checkpoint and of a replay differ in what the state depends on."""

    def check(what: str, got: Any, want: Any, detail: str = "") -> None:
        if got != want:
            fix = "Restore with a replay made like the one that was saved."
            raise value_error(f"checkpoint {where}: {what}", got=got, wanted=f"{want}{detail}", fix=fix)

    def check_fields(what: str, kind: str) -> None:
        got, want = ({f["name"]: f"{f['dtype']}{f['shape']}" for f in table[what]} for table in (saved, wanted))
        missing, unknown = sorted(set(want) - set(got)), sorted(set(got) - set(want))
        detail = "; ".join(f"{k} {v}" for k, v in (("missing", missing), ("unknown", unknown)) if v)
        check(what, list(got), list(want), f" ({detail})" if detail else "")
        for name in want:
            check(f"{kind} {name!r}", got[name], want[name])

    check_fields("columns", "column")
    for name in _SETTINGS:
        check(name, saved[name], wanted[name])
    check_fields("index", "index")  # a selector of the same name may keep another state


def _check_state(state: ReplayState, replay: Replay) -> None:
    leaves = jax.tree.leaves(state)
    if any(isinstance(x, Tracer) for x in leaves):
        raise type_error("save: state", got="a traced state", wanted="a concrete one", fix="Call save outside jit.")
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
        raise value_error(
            "save: state",
            got="a state that an earlier call has consumed",
            wanted="the state that the last call returned",
            fix="Rebind it: `state, sample = replay.sample(state, ...)`.",
        )
    wanted = jax.eval_shape(replay.init)
    show = lambda s: jax.tree.map(lambda x: (x.shape, x.dtype), s)  # noqa: E731
    if jax.tree.structure(state) != jax.tree.structure(wanted) or show(state) != show(wanted):
        wanted = f"one of {replay!r}"
        raise value_error("save: state", got="the state of another replay", wanted=wanted, fix="Pass what made it.")


# Orbax.


def _path(directory: str | os.PathLike) -> epath.Path:
    return epath.Path(os.path.abspath(directory))


def _step_number(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise value_error("step", got=repr(step), wanted="an integer >= 0", fix="Pass the number of the training step.")
    return int(step)


def _steps(path: epath.Path) -> list[int]:
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdecimal() and (p / _COMPLETE).exists())


def _find(directory, step: int | None) -> tuple[epath.Path, int]:
    path = _path(directory)
    wanted, fix = "a directory that gear_jax.checkpoint.save has written", "Look at the path."
    if not path.is_dir():
        what = "a file" if path.exists() else "nothing there"
        raise FileNotFoundError(message(f"checkpoint {path}", got=what, wanted=wanted, fix=fix))
    steps = _steps(path)
    if not steps:
        if (path / _COMPLETE).exists():
            fix = f"Give the directory that it is in, {path.parent}, and step={path.name}."
        raise FileNotFoundError(message(f"checkpoint {path}", got="no complete step", wanted=wanted, fix=fix))
    if step is None:
        return path, steps[-1]
    step = _step_number(step)
    if step not in steps:
        fix = "Leave step out for the latest."
        raise FileNotFoundError(message(f"checkpoint {path}: step", got=step, wanted=f"one of {steps}", fix=fix))
    return path, step


def _handlers() -> dict[str, ocp.CheckpointHandler]:
    return {
        "index": IndexHandler(),
        "columns": ColumnsHandler(),
        "table": ocp.JsonCheckpointHandler(),
    }


def _read(path: epath.Path, step: int, **items: Any) -> Any:
    """Restores items; whatever fails in there is damage, and said so."""
    handlers = _handlers()
    composite = ocp.CompositeCheckpointHandler(
        index=handlers["index"], columns=handlers["columns"], table=handlers["table"]
    )
    with ocp.Checkpointer(composite) as checkpointer:
        try:
            restored = checkpointer.restore(path / str(step), args=ocp.args.Composite(**items))
        except Exception as e:
            raise _damaged(path, step, f"{type(e).__name__}: {e}") from e
    missing = [name for name in items if restored.get(name) is None]
    if missing:
        raise _damaged(path, step, f"no {' and no '.join(missing)}")
    return restored


def _damaged(path: epath.Path, step: int, what: str) -> ValueError:
    others = [s for s in _steps(path) if s != step]
    fix = f"Restore another step: {others}." if others else "There is no other step to go back to."
    return value_error(f"checkpoint {path / str(step)}", got=what, wanted="a complete checkpoint of gear_jax", fix=fix)


def _read_table(path: epath.Path, step: int) -> dict[str, Any]:
    table = _read(path, step, table=ocp.args.JsonRestore())["table"]
    if not isinstance(table, dict) or "format" not in table:
        raise _damaged(path, step, "no settings of a table")
    if table["format"] != FORMAT:
        raise value_error(
            f"checkpoint {path / str(step)}: format", got=f"{table['format']}, of gear_jax {table.get('gear_jax')}",
            wanted=f"{FORMAT}, of gear_jax {gear_jax.__version__}", fix="Restore it with the version that wrote it.",
        )  # fmt: skip
    return table
