"""D4RL-style HDF5: one flat file, episodes end to end, told apart by `terminals` and `timeouts`."""

import os
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from gear_jax._errors import value_error
from gear_jax.datasets._episode import (
    DEFAULT_COLUMNS,
    Episode,
    Source,
    as_flags,
    as_rewards,
    bad,
    leaves,
    open_hdf5,
    require,
)

_NAMES = {
    "observation": "observations",
    "action": "actions",
    "reward": "rewards",
    "next_observation": "next_observations",
}
_BLOCK = 65536  # most rows read at once in search of the ends
_BLOCK_BYTES = 16 << 20
_CHUNK_CACHE = 16 << 20  # bytes; h5py's 1 MiB unpacks a compressed chunk again for every episode in it


class D4RLSource(Source):
    """A D4RL-style HDF5 file: datasets `observations`, `actions`, `rewards`, `terminals` and, if you are
    lucky, `timeouts` and `next_observations`, all with the same number of rows N. A group instead of a
    dataset is a nested column. Any other dataset of N rows can be read by its own name ("infos/qpos").

    An episode ends where `terminals` or `timeouts` is set. Where neither is, an end is found in three other
    ways, each reported as an unmarked timeout (truncated, never terminated): `max_episode_steps` steps have
    passed; there is no `timeouts` and `next_observations` does not lead on to the next row; the file ends.

    Only the flags are read ahead (and, in the second of these cases, the observations), in blocks of at most
    16 MiB; one row number and three flags per episode are kept.

    Args:
      path: the file.
      max_episode_steps: the environment's time limit, for files that do not mark it. None: no limit is
        assumed.

    Raises:
      ValueError: the file is missing or no readable HDF5 (a truncated one, say), a column is missing or
        ragged.
    """

    def __init__(self, path: str | os.PathLike, *, max_episode_steps: int | None = None):
        self.name = os.fspath(path)
        if max_episode_steps is not None and max_episode_steps < 1:
            raise value_error(
                "max_episode_steps", got=max_episode_steps, wanted="at least 1", fix="Pass None for no limit."
            )
        self._limit = max_episode_steps
        self._stops, self._terminated, self._truncated, self._unmarked = self._index()

    def __len__(self) -> int:
        return len(self._stops)

    def episodes(self, columns: Collection[str] = DEFAULT_COLUMNS) -> Iterator[Episode]:
        paths = {name: self._path(name) for name in dict.fromkeys(("reward", *columns))}
        with self._open() as file:
            start = 0
            nodes = {name: self._node(file, path) for name, path in paths.items()}
            for i, stop in enumerate(self._stops):
                tree: dict[str, Any] = {}
                for name, node in nodes.items():
                    _insert(tree, name, self._read(node, int(start), int(stop), i, paths[name]))
                tree["reward"] = as_rewards(self.name, i, "rewards", tree["reward"])
                yield Episode(
                    columns=tree,
                    length=int(stop - start),
                    terminated=bool(self._terminated[i]),
                    truncated=bool(self._truncated[i]),
                    source=self.name,
                    id=i,
                    unmarked_timeout=bool(self._unmarked[i]),
                )
                start = stop

    def _open(self):
        if not os.path.isfile(self.name):
            raise value_error(self.name, got="no such file", wanted="a D4RL-style HDF5 file", fix="Check the path.")
        return open_hdf5(self.name, rdcc_nbytes=_CHUNK_CACHE)

    def _path(self, name: str) -> str:
        head, slash, rest = name.partition("/")
        return _NAMES.get(head, head) + slash + rest

    def _node(self, file, path: str):
        node = file.get(path)
        if node is None:
            found: list[str] = []
            h5py = require("h5py")
            file.visititems(lambda n, o: found.append(n) if isinstance(o, h5py.Dataset) else None)
            raise bad(
                self.name,
                "all of them",
                path,
                got=f"no such column (the file has {sorted(found)})",
                wanted="a dataset or group of that name",
                fix="Name an existing column in `columns`, or add it to the file.",
            )
        return node

    def _read(self, node, start: int, stop: int, episode: Any, path: str) -> Any:
        if hasattr(node, "keys"):
            return {key: self._read(node[key], start, stop, episode, f"{path}/{key}") for key in node}
        try:
            if not node.ndim:
                raise OSError("a scalar, not one row per step")
            value = node[start:stop]
        except (OSError, RuntimeError) as error:
            raise bad(
                self.name,
                episode,
                path,
                got=f"rows {start} to {stop - 1} unreadable ({error})",
                wanted="a complete column",
                fix="The file is damaged: copy or download it again.",
            ) from error
        if len(value) != stop - start:
            raise bad(
                self.name,
                episode,
                path,
                got=f"{len(value)} of {stop - start} rows",
                wanted=f"rows {start} to {stop - 1}",
                fix="The column is ragged: write one row per step in every column.",
            )
        return value

    def _index(self):
        """Finds the ends of the episodes: stops int64[E], terminated bool[E], unmarked bool[E]."""
        with self._open() as file:
            rows = {}
            for name in ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations"):
                if name in ("timeouts", "next_observations") and name not in file:
                    continue
                rows.update(_row_counts(self._node(file, name), name))
            total = min(rows.values())
            if total == 0:
                empty = min(rows, key=rows.__getitem__)
                raise bad(
                    self.name,
                    0,
                    empty,
                    got="0 rows",
                    wanted="at least one step",
                    fix="The file is empty: record it.",
                )
            index = self._scan(file, total)
            self._require_even(rows, index[0])
            return index

    def _require_even(self, rows: dict[str, int], stops: np.ndarray) -> None:
        total = max(rows.values())
        for path, count in rows.items():
            if count != total:
                episode = int(np.searchsorted(stops, count, side="right"))
                raise bad(
                    self.name,
                    min(episode, len(stops) - 1),
                    path,
                    got=f"{count} rows",
                    wanted=f"{total}, like {max(rows, key=rows.__getitem__)!r}",
                    fix="The column is ragged: write one row per step in every column.",
                )

    def _scan(self, file, total: int):
        found = []
        start = 0
        block = self._block(file)
        for low in range(0, total, block):
            high = min(low + block, total)
            terminal, timeout, jump = self._flags(file, low, high, total, len(found))
            for row in _ends(terminal | timeout | jump, low, start, self._limit, total):
                ended, cut = terminal[row - low], timeout[row - low]
                found.append((row + 1, ended, cut or not ended, not (ended or cut)))
                start = row + 1
        stops, *flags = zip(*found, strict=True)
        return np.asarray(stops, np.int64), *(np.asarray(f, bool) for f in flags)

    def _block(self, file) -> int:
        if not self._by_next(file):
            return _BLOCK
        row = sum(np.prod(n.shape[1:]) * n.dtype.itemsize for n in _datasets(file["next_observations"]))
        return int(np.clip(_BLOCK_BYTES // max(int(row), 1), 1, _BLOCK))

    def _by_next(self, file) -> bool:
        return "timeouts" not in file and "next_observations" in file

    def _flags(self, file, low: int, high: int, total: int, episode: int):
        def flags(name):
            return as_flags(self.name, episode, name, self._read(file[name], low, high, episode, name))

        terminal = flags("terminals")
        none = np.zeros(high - low, bool)
        if "timeouts" in file:
            return terminal, flags("timeouts"), none
        return terminal, none, self._jumps(file, low, high, total, episode) if self._by_next(file) else none

    def _jumps(self, file, low: int, high: int, total: int, episode: int) -> np.ndarray:
        """bool[high - low]: the recorded next observation is not the next row, so a reset lies between."""
        last = min(high + 1, total)
        here = dict(leaves(self._read(file["observations"], low + 1, last, episode, "observations")))
        after = dict(leaves(self._read(file["next_observations"], low, last - 1, episode, "next_observations")))
        jump = np.zeros(high - low, bool)
        for path, value in after.items():
            if path not in here or here[path].shape != value.shape:
                raise bad(
                    self.name,
                    episode,
                    f"next_observations/{path}".rstrip("/"),
                    got=f"shape {value.shape[1:]}",
                    wanted="the shape of 'observations'",
                    fix="Write both from the same observation space.",
                )
            differs = (value != here[path]) & ((value == value) | (here[path] == here[path]))  # NaN is NaN
            jump[: last - 1 - low] |= differs.any(axis=tuple(range(1, differs.ndim)))
        return jump


def _ends(marked: np.ndarray, low: int, start: int, limit: int | None, total: int) -> Iterator[int]:
    """Yields the last row of every episode that ends in this block; the open one begins at `start`."""
    high = low + len(marked)
    for row in [*(np.flatnonzero(marked) + low), high - 1]:
        while limit is not None and start + limit - 1 < row:
            start += limit
            yield start - 1
        on_limit = limit is not None and start + limit - 1 == row
        if marked[row - low] or on_limit or row == total - 1:
            if row >= start:
                yield int(row)
                start = row + 1


def _datasets(node) -> Iterator[Any]:
    if hasattr(node, "keys"):
        for key in node:
            yield from _datasets(node[key])
    else:
        yield node


def _row_counts(node, path: str) -> dict[str, int]:
    if hasattr(node, "keys"):
        return {k: v for key in node for k, v in _row_counts(node[key], f"{path}/{key}").items()}
    return {path: node.shape[0] if node.ndim else 0}


def _insert(tree: dict, path: str, value: Any) -> None:
    *heads, last = path.split("/")
    for head in heads:
        tree = tree.setdefault(head, {})
    tree[last] = value
