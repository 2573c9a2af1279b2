"""Minari datasets on this machine, in every storage that Minari writes (HDF5, Arrow, Parquet).

Minari's own reader is used for the metadata and the spaces, not for the steps. Its HDF5 reader decodes every
info of every episode; its Arrow reader opens every episode's file at once, reads ahead of the consumer and
takes each record batch for an episode, so that one of more than 32,768 rows comes back cut and the next ones
under wrong numbers. Here one episode is read at a time, and of it only the columns that were asked for.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from gear_jax._errors import value_error
from gear_jax.datasets._decode import decode_arrow, decode_hdf5
from gear_jax.datasets._episode import (
    DEFAULT_COLUMNS,
    Episode,
    Source,
    as_rewards,
    bad,
    end_flags,
    map_leaves,
    open_hdf5,
    require,
    require_length,
)

COLUMNS = (*DEFAULT_COLUMNS, "next_observation")


class MinariSource(Source):
    """A local Minari dataset. The columns are "observation", "action", "reward" and "next_observation".

    An episode whose last step is flagged neither terminated nor truncated is reported as an unmarked timeout.

    Args:
      dataset: a dataset id ("pendulum/mixed-v0", looked up under `MINARI_DATASETS_PATH` or
        `~/.minari/datasets`; nothing is downloaded), the folder of a dataset, or a `minari.MinariDataset`,
        whose filter is kept.
      episodes: the numbers of the episodes to read, in this order. None: all of them.

    Raises:
      ValueError: there is no such dataset, or it is damaged.
    """

    def __init__(self, dataset: Any, *, episodes: Sequence[int] | None = None):
        if hasattr(dataset, "storage") and hasattr(dataset, "episode_indices"):
            self._folder = pathlib.Path(dataset.storage.data_path)
            episodes = dataset.episode_indices if episodes is None else episodes
        else:
            self._folder = find_minari(dataset)
        self.name = str(self._folder)
        self._metadata, self._spaces, self._jpeg = self._describe()
        self._format = self._metadata["data_format"]
        total = self._metadata["total_episodes"]
        self._ids = [int(i) for i in (range(total) if episodes is None else episodes)]
        wrong = [i for i in self._ids if not 0 <= i < total]
        if wrong:
            raise value_error("episodes", got=wrong[0], wanted=f"numbers in [0, {total})", fix="Leave it out for all.")

    def __len__(self) -> int:
        return len(self._ids)

    def episodes(self, columns: Collection[str] = DEFAULT_COLUMNS) -> Iterator[Episode]:
        wanted = {path.split("/")[0] for path in columns} | {"reward"}
        for name in sorted(wanted - set(COLUMNS)):
            raise bad(
                self.name,
                "all of them",
                name,
                got="no such column",
                wanted=f"one of {COLUMNS}",
                fix="Name an existing column in `columns`.",
            )
        with self._reader() as read:
            for i in self._ids:
                yield self._episode(i, read, wanted)

    def _episode(self, i: int, read: Callable[[int, str], Any], wanted: set[str]) -> Episode:
        columns: dict[str, Any] = {"reward": as_rewards(self.name, i, "rewards", read(i, "rewards"))}
        length = len(columns["reward"])
        if not length:
            raise bad(
                self.name,
                i,
                "rewards",
                got="an empty episode",
                wanted="at least one step",
                fix="Remove it from the dataset, or leave it out with MinariSource(..., episodes=[...]).",
            )
        flags = {}
        for name in ("terminations", "truncations"):
            flags[name] = read(i, name)
            require_length(self.name, i, flags[name], name, length, "one per reward")
            flags[name] = end_flags(self.name, i, name, flags[name])
        if "action" in wanted:
            columns["action"] = read(i, "actions")
            require_length(self.name, i, columns["action"], "actions", length, "one per reward")
        if wanted & {"observation", "next_observation"}:
            both = read(i, "observations")
            require_length(self.name, i, both, "observations", length + 1, "one more than rewards")
            if "observation" in wanted:
                columns["observation"] = map_leaves(lambda leaf: leaf[:-1], both)
            if "next_observation" in wanted:
                columns["next_observation"] = map_leaves(lambda leaf: leaf[1:], both)
        unmarked = not (flags["terminations"] or flags["truncations"])
        return Episode(
            columns=columns,
            length=length,
            terminated=flags["terminations"],
            truncated=flags["truncations"] or unmarked,
            source=self.name,
            id=i,
            unmarked_timeout=unmarked,
        )

    def _describe(self):
        """Metadata, spaces by file column, and whether images are JPEG."""
        storage = require("minari.dataset.minari_storage").MinariStorage
        try:
            metadata = storage.read_raw_metadata(self._folder)
            opened = storage.read(self._folder)
            spaces = {"observations": opened.observation_space, "actions": opened.action_space}
            return {k: metadata[k] for k in ("data_format", "total_episodes")}, spaces, opened.jpeg_encoding
        except ImportError:
            raise
        except Exception as error:  # AssertionError, KeyError, JSON errors, errors of gymnasium.make
            raise bad(
                self.name,
                None,
                None,
                got=f"a dataset that Minari cannot open ({type(error).__name__}: {error})",
                wanted="a folder with metadata.json and its data",
                fix="Record or download the dataset again.",
            ) from error

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Callable[[int, str], Any]]:
        """A function (episode, file column) -> nested arrays."""
        if self._format == "hdf5":
            path = str(self._folder / "main_data.hdf5")
            with open_hdf5(path) as file:
                yield lambda i, name: decode_hdf5(path, file, i, name, self._spaces.get(name), self._jpeg)
        else:
            tables = _ArrowEpisodes(self._folder, self._format)
            yield lambda i, name: decode_arrow(*tables.column(i, name), self._spaces.get(name), self._jpeg)


class _ArrowEpisodes:
    """The columns of one episode's Arrow or Parquet files, read when asked for."""

    def __init__(self, folder: pathlib.Path, storage_format: str):
        self._dataset = require("pyarrow.dataset").dataset
        self._errors = (OSError, require("pyarrow").ArrowException)
        self._folder = folder
        self._format = storage_format
        self._open: tuple[int, Any] | None = None

    def column(self, i: int, name: str):
        folder = self._folder / str(i)
        try:
            files = self._files(i, folder)
            if name not in files.schema.names:
                raise bad(
                    str(folder),
                    i,
                    name,
                    got=f"no such column (there are {files.schema.names})",
                    wanted="a column of that name",
                    fix="Record or download the dataset again.",
                )
            values = files.to_table(columns=[name], use_threads=False).column(0).combine_chunks()
        except self._errors as error:
            raise bad(
                str(folder),
                i,
                name,
                got=f"unreadable ({error})",
                wanted="complete Arrow files",
                fix="The files are missing or damaged: record or download the dataset again.",
            ) from error
        # The last row of an episode holds its last observation; its other columns are padding.
        return str(folder), i, name, values if name == "observations" else values[:-1]

    def _files(self, i: int, folder: pathlib.Path):
        if self._open is None or self._open[0] != i:
            if not folder.is_dir():
                raise FileNotFoundError("no such folder")
            prefixes = ["_", ".", "metadata.json"]
            self._open = (i, self._dataset(folder, format=self._format, ignore_prefixes=prefixes))
        return self._open[1]


def find_minari(dataset: str | os.PathLike) -> pathlib.Path:
    """The data folder of a dataset given by folder or id; raises ValueError where there is none."""
    path = pathlib.Path(dataset)
    root = pathlib.Path(os.environ.get("MINARI_DATASETS_PATH") or pathlib.Path.home() / ".minari" / "datasets")
    for folder in (path, path / "data", root / path / "data"):
        if (folder / "metadata.json").is_file():
            return folder
    raise value_error(
        str(dataset),
        got=f"no dataset in {path} or {root / path}",
        wanted="a Minari dataset on this machine",
        fix="Record one (examples/record_dataset.py), download one, or set MINARI_DATASETS_PATH.",
    )
