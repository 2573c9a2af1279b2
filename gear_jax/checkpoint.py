"""Saves and restores replay tables with Orbax.

A checkpoint is one step of an `orbax.checkpoint.CheckpointManager` directory with three items:

  table    JSON: columns, T, C, P, selector, ...; checked by `restore`.
  index    all of the `ReplayState` but its columns, as Orbax stores any pytree.
  columns  one Zarr array `uint8[C, bytes of a trajectory]` for each column, compressed, with checksums. It is written and
           read block by block, so that a save or a restore needs little memory beside the table.

Orbax writes a step into a temporary directory and renames it at the end: a save that is killed leaves the steps before it
as they were.
"""

import contextlib
import dataclasses
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

import gear_jax
from gear_jax import ops
from gear_jax._errors import message, type_error, value_error
from gear_jax.replay import Replay, ReplayState
from gear_jax.replay._config import Config
from gear_jax.replay._state import Counter, int64

FORMAT = 1
_CHUNK = 16 << 20  # bytes compressed at once, by one thread
_BLOCK = 8 * _CHUNK  # bytes read or written at once: what is needed beside the table
_INDEX = ("length", "priority", "counters", "max_priority")


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


def save(directory: str | os.PathLike, step: int, state: ReplayState, replay: Replay, *, keep: int | None = None) -> None:
    """Saves a table as one step of a directory; done when it returns. The state is not consumed.

    Args:
      directory: made if it is not there. Orbax also takes the addresses of object stores ("gs://...").
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
        raise value_error("keep", got=repr(keep), wanted="None or a positive integer", fix="Leave it out to keep all steps.")
    items = ocp.args.Composite(
        index=ocp.args.PyTreeSave(state.replace(columns=None)),
        columns=_ColumnsSave(replay.config, state.columns),
        table=ocp.args.JsonSave(_table(replay.config)),
    )
    with _manager(_path(directory), keep=keep, create=True) as manager:
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
    _check_table(f"{path / str(step)}", _read_table(path, step), _table(replay.config))
    state = replay.init()
    index = state.replace(columns=None)
    index_args = ocp.args.PyTreeRestore(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), index),
        restore_args=ocp.checkpoint_utils.construct_restore_args(index),
    )
    columns = _ColumnsRestore(replay.config, state.columns)
    del state, index  # the columns are handed over: they are filled in place
    restored = _read(path, step, index=index_args, columns=columns)
    return restored["index"].replace(columns=restored["columns"])


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
    args = ocp.args.PyTreeRestore(
        dict.fromkeys(_INDEX, 0),
        restore_args=dict.fromkeys(_INDEX, ocp.RestoreArgs(restore_type=np.ndarray)),
        partial_restore=True,
    )
    index = _read(path, step, index=args)["index"]
    stats: dict[str, int | float] = {
        "trajectories": int((index["length"] > 0).sum()),
        "steps": int(index["length"].sum(dtype=np.int64)),
        "capacity": table["capacity"],
        **{c.name.lower(): int64(index["counters"][:, c]) for c in Counter},
        "max_priority": float(index["max_priority"].max()),
    }
    return Summary(step, table, index["length"], index["priority"], stats)


# What is checked.


def _table(config: Config) -> dict[str, Any]:
    columns = [
        {"name": n, "shape": list(c.shape), "dtype": c.dtype.name} for n, c in zip(config.names, config.columns, strict=True)
    ]
    return {
        "format": FORMAT,
        "gear_jax": gear_jax.__version__,
        "columns": columns,
        "trajectory_length": config.steps,
        "capacity": config.table.capacity,
        "partitions": config.partitions,
        "selector": repr(config.selector),
        "eviction": repr(config.eviction),
        "streams": config.streams,
        "anchor": config.anchor.kind,
        "shortest_trajectory": config.anchor.min_length,
    }


def _check_table(where: str, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises ValueError where the settings of a checkpoint and those of a replay differ in what the state depends on."""
    fix = "Restore with a replay made like the one that was saved."
    got_columns = {c["name"]: c for c in saved["columns"]}
    want_columns = {c["name"]: c for c in wanted["columns"]}
    if list(got_columns) != list(want_columns):
        missing, unknown = sorted(set(want_columns) - set(got_columns)), sorted(set(got_columns) - set(want_columns))
        detail = "; ".join(f"{k} {v}" for k, v in (("it lacks", missing), ("it has besides", unknown)) if v)
        raise value_error(
            f"checkpoint {where}", got=f"columns {list(got_columns)}", wanted=f"{list(want_columns)}" + (f" ({detail})" if detail else ""),
            fix=fix,
        )  # fmt: skip
    show = lambda c: f"{c['dtype']}{c['shape']}"  # noqa: E731
    for name, column in want_columns.items():
        if show(got_columns[name]) != show(column):
            raise value_error(f"checkpoint {where}: column {name!r}", got=show(got_columns[name]), wanted=show(column), fix=fix)
    for name in ("trajectory_length", "capacity", "partitions", "selector", "eviction", "streams", "shortest_trajectory"):
        if saved[name] != wanted[name]:
            raise value_error(f"checkpoint {where}: {name}", got=saved[name], wanted=wanted[name], fix=fix)


def _check_state(state: ReplayState, replay: Replay) -> None:
    leaves = jax.tree.leaves(state)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise type_error("save: state", got="a traced state", wanted="a concrete one", fix="Call save outside jit.")
    if any(x.is_deleted() for x in leaves):
        raise value_error(
            "save: state", got="a state that an earlier call has consumed", wanted="the state that the last call returned",
            fix="Rebind it: `state, sample = replay.sample(state, ...)`.",
        )  # fmt: skip
    wanted = jax.eval_shape(replay.init)
    show = lambda s: jax.tree.map(lambda x: (x.shape, x.dtype), s)  # noqa: E731
    if jax.tree.structure(state) != jax.tree.structure(wanted) or show(state) != show(wanted):
        raise value_error("save: state", got="the state of another replay", wanted=f"one of {replay!r}", fix="Pass what made it.")


# Orbax.


def _path(directory: str | os.PathLike) -> epath.Path:
    path = epath.Path(directory)
    return path if "://" in os.fspath(directory) else path.absolute()


def _step_number(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise value_error("step", got=repr(step), wanted="an integer >= 0", fix="Pass the number of the training step.")
    return int(step)


def _steps(path: epath.Path) -> list[int]:
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdecimal() and (p / "_CHECKPOINT_METADATA").exists())


def _find(directory, step: int | None) -> tuple[epath.Path, int]:
    path = _path(directory)
    wanted, fix = "a directory that gear_jax.checkpoint.save has written", "Look at the path."
    if not path.is_dir():
        what = "a file" if path.exists() else "nothing there"
        raise FileNotFoundError(message(f"checkpoint {path}", got=what, wanted=wanted, fix=fix))
    steps = _steps(path)
    if not steps:
        raise FileNotFoundError(message(f"checkpoint {path}", got="no complete step", wanted=wanted, fix=fix))
    if step is None:
        return path, steps[-1]
    step = _step_number(step)
    if step not in steps:
        raise FileNotFoundError(
            message(f"checkpoint {path}: step", got=step, wanted=f"one of {steps}", fix="Leave step out for the latest.")
        )
    return path, step


@contextlib.contextmanager
def _manager(path: epath.Path, *, keep: int | None = None, create: bool = False):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, create=create, read_only=not create, enable_async_checkpointing=False
    )
    handlers = {
        "index": ocp.PyTreeCheckpointHandler(),
        "columns": _ColumnsHandler(),
        "table": ocp.JsonCheckpointHandler(),
    }
    with ocp.CheckpointManager(path, options=options, item_handlers=handlers) as manager:
        yield manager


def _read(path: epath.Path, step: int, **items: Any) -> Any:
    """Restores items; whatever fails in there is damage, and said so."""
    with _manager(path) as manager:
        try:
            restored = manager.restore(step, args=ocp.args.Composite(**items))
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


# Columns.


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How a column lies in its file: `uint8[rows, row_bytes]` in chunks `[chunk_rows, chunk_bytes]`."""

    rows: int
    row_bytes: int

    @property
    def chunk(self) -> tuple[int, int]:
        return min(self.rows, max(1, _CHUNK // self.row_bytes)), min(self.row_bytes, _CHUNK)

    def blocks(self):
        """Yields ranges of rows of at most `_BLOCK` bytes (or one row), whole chunks each."""
        step = max(1, _BLOCK // self.row_bytes // self.chunk[0]) * self.chunk[0]
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def open(self, directory: epath.Path, *, create: bool):
        codecs = [
            {"name": "bytes"},
            {"name": "zstd", "configuration": {"level": 1}},
            {"name": "crc32c"},
        ]
        metadata = {
            "shape": [self.rows, self.row_bytes],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "codecs": codecs,
        }
        spec = {
            "driver": "zarr3",
            "kvstore": os.fspath(directory) if "://" in os.fspath(directory) else f"file://{os.fspath(directory)}",
            "metadata": metadata,
            # A chunk that is not there is damage, not zeros.
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }
        return ts.open(spec, create=create, open=not create).result()


def _layouts(config: Config):
    """Yields (number, ColumnSpec, layout) of each column."""
    for i, column in enumerate(config.columns):
        yield i, column, _Layout(config.table.capacity, config.steps * math.prod(column.shape) * column.dtype.itemsize)


class _ColumnsHandler(ocp.CheckpointHandler):
    """Writes and reads the columns of a table, block by block, with the ops that samples and insertions use."""

    def save(self, directory: epath.Path, args: "_ColumnsSave") -> None:
        columns = jax.tree.leaves(args.columns)
        for i, _, layout in _layouts(args.config):
            file = layout.open(directory / str(i), create=True)
            for start, stop in layout.blocks():
                rows = np.asarray(_get(columns[i], jnp.arange(start, stop, dtype=jnp.int32)))
                file[start:stop].write(rows.reshape(stop - start, -1).view(np.uint8)).result()

    def restore(self, directory: epath.Path, args: "_ColumnsRestore") -> Any:
        tree = jax.tree.structure(args.columns)
        columns = jax.tree.leaves(args.columns)
        args.columns = None  # each is donated below
        for i, column, layout in _layouts(args.config):
            file = layout.open(directory / str(i), create=False)
            for start, stop in layout.blocks():
                rows = file[start:stop].read().result().view(column.dtype)
                rows = rows.reshape(stop - start, args.config.steps, *column.shape)
                columns[i] = _put(columns[i], jnp.arange(start, stop, dtype=jnp.int32), rows)
                # Without waiting, blocks would pile up.
                columns[i].block_until_ready()
        return tree.unflatten(columns)


@ocp.args.register_with_handler(_ColumnsHandler, for_save=True)
@dataclasses.dataclass
class _ColumnsSave(ocp.args.CheckpointArgs):
    config: Config
    columns: Any


@ocp.args.register_with_handler(_ColumnsHandler, for_restore=True)
@dataclasses.dataclass
class _ColumnsRestore(ocp.args.CheckpointArgs):
    config: Config
    columns: Any


@jax.jit
def _get(column: jax.Array, slots: jax.Array) -> jax.Array:
    """`[K, T, *shape]`: the slots as they are, whatever their lengths."""
    steps = jnp.full_like(slots, column.shape[2])
    return ops.gather(column, slots, jnp.zeros_like(slots), steps)[0]


@functools.partial(jax.jit, donate_argnums=0)
def _put(column: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    return ops.scatter(column, slots, rows)
