"""What every reader yields: an `Episode`, and the interface of the readers, `Source`."""

import abc
import contextlib
import dataclasses
import importlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from gear_jax._errors import message

DEFAULT_COLUMNS = ("observation", "action", "reward")


class DatasetError(ValueError):
    """The data is bad. The text names the file, the episode and the column."""


@dataclasses.dataclass(frozen=True, eq=False)
class Episode:
    """One episode of a dataset, in NumPy.

    `terminated` and `truncated` are kept apart: after a termination nothing follows, after a truncation the
    episode would have gone on.

    Attributes:
      columns: name -> array `[L, *shape]`, or a nested dict or tuple of such arrays (a Dict or Tuple space).
        "reward" is always there.
      length: L, the number of steps, at least 1.
      terminated: the last step ended in a terminal state.
      truncated: the episode was cut off at the last step (a time limit, the end of the file).
      source: the file or folder it was read from.
      id: its number in `source`.
      unmarked_timeout: it was cut off, but the file does not say so: `truncated` is the reader's inference.
    """

    columns: Mapping[str, Any]
    length: int
    terminated: bool
    truncated: bool
    source: str
    id: int
    unmarked_timeout: bool = False

    @property
    def name(self) -> str:
        """File and number, as error messages and summaries name it."""
        return f"{self.source}: episode {self.id}"

    @property
    def episode_return(self) -> float:
        """The undiscounted sum of the recorded rewards."""
        return float(np.sum(self.columns["reward"], dtype=np.float64))


class Source(abc.ABC):
    """A dataset that can be read from the start any number of times, one episode in memory at a time.

    Subclass it to load from a format of your own: `load` and `table_spec` use nothing else.

    Attributes:
      name: the file, folder or dataset id.
    """

    name: str

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of episodes."""

    @abc.abstractmethod
    def episodes(self, columns: Collection[str] = DEFAULT_COLUMNS) -> Iterator[Episode]:
        """Yields every episode in the order of the dataset.

        Args:
          columns: the columns to read; "reward" is always read. "observation/position" is the entry
            "position" of a nested column.

        Raises:
          DatasetError: a column is missing, misshapen or ragged, an episode is empty, a file cannot be read.
            The text names the file, the episode and the column.
        """

    def __iter__(self) -> Iterator[Episode]:
        return self.episodes()


def require(module: str):
    """Imports an optional dependency, or says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"gear_jax.datasets needs {module!r} here ({error}). Install it: pip install 'gear_jax[datasets]'"
        ) from error


def bad(source: str, episode: Any, column: str | None, *, got: object, wanted: object, fix: str) -> "DatasetError":
    """The error for bad data; names the file, the episode and the column (None: not this one)."""
    what = source
    if episode is not None:
        what += f": episode {episode}"
    if column is not None:
        what += f": column {column!r}"
    return DatasetError(message(what, got=got, wanted=wanted, fix=fix))


@contextlib.contextmanager
def open_hdf5(path: str, **options: Any) -> Iterator[Any]:
    """Opens an HDF5 file to read.

    Whatever h5py raises over a damaged one, here or in the body of the `with`, becomes a `DatasetError`.
    """
    h5py = require("h5py")
    try:
        with h5py.File(path, "r", **options) as file:
            yield file
    except (DatasetError, ImportError):
        raise
    except Exception as error:  # h5py raises OSError, RuntimeError, KeyError, TypeError and ValueError
        raise bad(
            path,
            None,
            None,
            got=f"a file that cannot be read ({error})",
            wanted="a complete HDF5 file",
            fix="It is truncated, damaged or not HDF5: record, copy or download it again.",
        ) from error


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) of a nested dict or tuple; paths look like "observation/position"."""
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from leaves(child, f"{prefix}/{key}" if prefix else str(key))
    elif isinstance(tree, tuple):
        for i, child in enumerate(tree):
            yield from leaves(child, f"{prefix}/{i}" if prefix else str(i))
    else:
        yield prefix, tree


def map_leaves(function, tree: Any) -> Any:
    """Applies `function` to every leaf of a nested dict or tuple of arrays."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, child) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, child) for child in tree)
    return function(tree)


def lookup(columns: Mapping[str, Any], path: str) -> Any:
    """The subtree of nested columns at "a/b/0"; raises KeyError where there is none."""
    node: Any = columns
    for part in path.split("/"):
        if isinstance(node, tuple) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, Mapping) and part in node:
            node = node[part]
        else:
            raise KeyError(path)
    return node


def require_length(source: str, episode: int, tree: Any, name: str, length: int, wanted: str) -> None:
    """Raises where a leaf of `tree` does not have `length` rows: a ragged column."""
    for path, leaf in leaves(tree, name):
        if len(leaf) != length:
            raise bad(
                source,
                episode,
                path,
                got=f"{len(leaf)} rows",
                wanted=f"{length} ({wanted})",
                fix="The column is ragged: record the episode again or remove it from the dataset.",
            )


def end_flags(source: str, episode: int, name: str, flags: np.ndarray) -> bool:
    """Whether an episode's last step is flagged; a flag before it, or a value that is no flag, raises."""
    flags = as_flags(source, episode, name, flags)
    early = np.flatnonzero(flags[:-1])
    if early.size:
        raise bad(
            source,
            episode,
            name,
            got=f"True at step {early[0]} of {len(flags)}",
            wanted="True at the last step only",
            fix="Steps after the end belong to another episode: split them before recording.",
        )
    return bool(flags[-1])


def as_flags(source: str, episode: Any, name: str, values: np.ndarray) -> np.ndarray:
    """Booleans from a flag column of any dtype, `[L]` or `[L, 1]`; a value other than 0 or 1 raises."""
    values = np.asarray(values)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    ok = values.ndim == 1 and values.dtype.kind in "buif" and bool(np.isin(values, (0, 1)).all())
    if not ok:
        raise bad(
            source,
            episode,
            name,
            got=f"{values.dtype} of shape {values.shape}",
            wanted="one flag (0 or 1) per step",
            fix="Write the flag as bool, one per step.",
        )
    return values.astype(bool)


def as_rewards(source: str, episode: int, name: str, values: np.ndarray) -> np.ndarray:
    """Rewards `[L]`: accepts `[L]` or `[L, 1]` of a real dtype."""
    values = np.asarray(values)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or values.dtype.kind not in "buif":
        raise bad(
            source,
            episode,
            name,
            got=f"{values.dtype} of shape {values.shape}",
            wanted="one real number per step",
            fix="Write rewards as float32, one per step.",
        )
    return values
