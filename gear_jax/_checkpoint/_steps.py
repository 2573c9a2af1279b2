"""The steps of a directory: which are complete, and what they say of themselves."""

import os
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

import gear_jax
from gear_jax._checkpoint._files import Archives, layouts
from gear_jax._checkpoint._items import Field, read_field
from gear_jax._checkpoint._rows import Base
from gear_jax._checkpoint._table import FORMAT
from gear_jax._errors import message, value_error
from gear_jax._numbers import is_integer
from gear_jax.replay import Replay

_COMPLETE = "_CHECKPOINT_METADATA"  # what Orbax puts into a step's folder


def path_of(directory: str | os.PathLike) -> epath.Path:
    """The absolute path of a directory."""
    return epath.Path(os.path.abspath(directory))


def step_number(step: Any) -> int:
    """A step's number, or a ValueError."""
    if not is_integer(step) or step < 0:
        raise value_error("step", got=repr(step), wanted="an integer >= 0", fix="Pass the number of the training step.")
    return int(step)


def steps_in(path: epath.Path) -> list[int]:
    """The complete steps of a directory."""
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdecimal() and (p / _COMPLETE).exists())


def find(directory: str | os.PathLike, step: int | None) -> tuple[epath.Path, int]:
    """The path of a directory, and the number of a complete step in it: the latest, if None is given.

    Raises:
      FileNotFoundError: if there is none.
    """
    path = path_of(directory)
    wanted, fix = "a directory that gear_jax.checkpoint.save has written", "Look at the path."
    if not path.is_dir():
        what = "a file" if path.exists() else "nothing there"
        raise FileNotFoundError(message(f"checkpoint {path}", got=what, wanted=wanted, fix=fix))
    steps = steps_in(path)
    if not steps:
        if (path / _COMPLETE).exists():
            fix = f"Give the directory that it is in, {path.parent}, and step={path.name}."
        raise FileNotFoundError(message(f"checkpoint {path}", got="no complete step", wanted=wanted, fix=fix))
    if step is None:
        return path, steps[-1]
    step = step_number(step)
    if step not in steps:
        fix = "Leave step out for the latest."
        raise FileNotFoundError(message(f"checkpoint {path}: step", got=step, wanted=f"one of {steps}", fix=fix))
    return path, step


_GEOMETRY = ("columns", "trajectory_length", "capacity", "partitions", "streams")


def base_of(
    path: epath.Path, steps: list[int], since: int | None, table: dict[str, Any], replay: Replay
) -> Base | None:
    """The step whose files a new one may share; None if there is none."""
    if since is not None and since not in steps:
        fix = "Leave it out: all rows are compared then."
        raise value_error("since", got=since, wanted=f"one of the steps in {path}, {steps}", fix=fix)
    if not steps:
        return None
    step = steps[-1] if since is None else since
    try:
        saved = read_table(path, step)
    except ValueError:
        if since is not None:
            raise
        return None
    other = [name for name in _GEOMETRY if saved[name] != table[name]]
    if other and since is not None:
        fix = "Leave it out."
        raise value_error("since", got=f"{since}, a table with other {other}", wanted="this table", fix=fix)
    columns = path / str(step) / "columns"
    if other or not all(layout.same(columns / str(i)) for i, layout in enumerate(layouts(replay.config))):
        return None
    if since is None:
        return Base(step, columns)
    fields = {f["name"]: Field.of_json(f) for f in saved["index"]}

    def index(name: str, start: int, stop: int) -> np.ndarray:
        try:
            archives = Archives(path / str(step) / "index", replay.config.partitions)
            return read_field(archives, fields[name], start, stop)
        except Exception as e:
            raise damaged(path, step, f"{type(e).__name__}: {e}") from e

    return Base(step, columns, index)


def damaged(path: epath.Path, step: int, what: str) -> ValueError:
    """The error for a step that cannot be read."""
    others = [s for s in steps_in(path) if s != step]
    fix = f"Restore another step: {others}." if others else "There is no other step to go back to."
    return value_error(f"checkpoint {path / str(step)}", got=what, wanted="a complete checkpoint of gear_jax", fix=fix)


def read_table(path: epath.Path, step: int) -> dict[str, Any]:
    """What a step says of its table, see `_table.describe`."""
    try:
        table = ocp.JsonCheckpointHandler().restore(path / str(step) / "table")
    except (OSError, ValueError) as e:
        raise damaged(path, step, f"{type(e).__name__}: {e}") from e
    if not isinstance(table, dict) or "format" not in table:
        raise damaged(path, step, "no settings of a table")
    if table["format"] != FORMAT:
        raise value_error(
            f"checkpoint {path / str(step)}: format", got=f"{table['format']}, of gear_jax {table.get('gear_jax')}",
            wanted=f"{FORMAT}, of gear_jax {gear_jax.__version__}", fix="Restore it with the version that wrote it.",
        )  # fmt: skip
    return table
