"""The files of a checkpoint: a column in blocks of slots, and archives of the arrays that go with them.

A block is a file of its own. A block that has not changed since an earlier step is that step's file under a second name
(a hard link), so that every step is complete by itself, and any of them may be deleted.
"""

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath

from gear_jax.replay._config import Config

_BLOCK = 4 << 20  # bytes of a block: what is written anew where one row of it has changed
_READ = 16 * _BLOCK  # bytes read at once
_WHOLE = "whole.npz"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a column lies in its folder: an array `uint8[P, S, row_bytes]` in chunks `[1, block_rows, piece_bytes]`.

    No block crosses partitions, so that the files are the same for any number of devices. A row of more than a block is
    cut into several chunks, which are compressed side by side.
    """

    partitions: int
    slots: int
    row_bytes: int

    @property
    def block_rows(self) -> int:
        return min(self.slots, max(1, _BLOCK // self.row_bytes))

    @property
    def blocks(self) -> int:
        """Blocks of a partition."""
        return -(-self.slots // self.block_rows)

    @property
    def read_rows(self) -> int:
        """How many rows are read at once: whole blocks of at most `_READ` bytes, or one."""
        return max(1, _READ // self.row_bytes // self.block_rows) * self.block_rows

    def rows(self, block: int) -> tuple[int, int]:
        """The slots of a block: the first, and the one behind the last."""
        return block * self.block_rows, min((block + 1) * self.block_rows, self.slots)

    def files(self, partition: int, block: int) -> list[str]:
        """The names of a block's files."""
        pieces = -(-self.row_bytes // min(self.row_bytes, _BLOCK))
        return [f"c.{partition}.{block}.{k}" for k in range(pieces)]

    def any(self, flags: np.ndarray) -> np.ndarray:
        """Whether any slot of each block is flagged: `bool[p, S]` to `bool[p, blocks]`."""
        return np.logical_or.reduceat(flags, np.arange(0, self.slots, self.block_rows), axis=1)

    def metadata(self) -> dict[str, Any]:
        return {
            "shape": [self.partitions, self.slots, self.row_bytes],
            "data_type": "uint8",
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [1, self.block_rows, min(self.row_bytes, _BLOCK)]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}],
        }

    def same(self, directory: epath.Path) -> bool:
        """Whether a column was written into the same files."""
        try:
            there = json.loads((directory / "zarr.json").read_text())
        except (OSError, ValueError):
            return False
        return all(there.get(name) == x for name, x in self.metadata().items() if name in ("shape", "chunk_grid"))

    def open(self, directory: epath.Path, *, create: bool):
        """The array. Several processes may create it at once."""
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": os.fspath(directory)},
            # A file may have been written with blocks of another size.
            **({"metadata": self.metadata()} if create else {}),
            # A chunk that is not there is damage, not zeros.
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }
        file = ts.open(spec, create=create, open=True).result()
        if file.shape != (self.partitions, self.slots, self.row_bytes):
            raise ValueError(f"{directory} is an array of {file.shape}")
        return file


def layouts(config: Config) -> list[Layout]:
    """The layout of each column."""
    size = lambda c: config.steps * math.prod(c.shape) * c.dtype.itemsize  # noqa: E731
    return [Layout(config.partitions, config.slots, size(c)) for c in config.columns]


def link(source: epath.Path, target: epath.Path, names: Iterable[str]) -> None:
    """Gives files a second name; copies them where the file system has no hard links."""
    for name in names:
        try:
            os.link(source / name, target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)


# Archives. NumPy's format knows no bfloat16, so arrays go in as bytes; the archive keeps a CRC of each.


def write_whole(directory: epath.Path, arrays: dict[int, np.ndarray]) -> None:
    """Writes what belongs to no partition, by number."""
    _write(directory / _WHOLE, arrays)


def write_part(directory: epath.Path, start: int, stop: int, arrays: dict[int, np.ndarray]) -> None:
    """Writes what belongs to the partitions [start, stop), by number."""
    _write(directory / f"{start}-{stop}.npz", arrays)


def _write(path: epath.Path, arrays: dict[int, np.ndarray]) -> None:
    with path.open("wb") as file:
        named: dict[str, Any] = {f"arr_{i}": x.reshape(-1).view(np.uint8) for i, x in arrays.items()}
        np.savez(file, **named)


class Archives:
    """Reads the archives of a folder, however many devices wrote them."""

    def __init__(self, directory: epath.Path, partitions: int):
        self._directory, self._partitions = directory, partitions
        found = (re.fullmatch(r"(\d+)-(\d+)\.npz", name) for name in os.listdir(directory))
        self._parts = sorted((int(m[1]), int(m[2]), m[0]) for m in found if m)

    def whole(self, number: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """An array that belongs to no partition."""
        return self._array(_WHOLE, number, dtype, shape)

    def cut(self, number: int, dtype: Any, shape: tuple[int, ...], start: int, stop: int) -> np.ndarray:
        """The rows [start, stop) of an array `[K, ...]` that is cut along the partitions.

        Raises:
          ValueError: if some of them are in no archive.
        """
        rows = [x[max(start - a, 0) : stop - a] for a, b, x in self._overlapping(number, dtype, shape, start, stop)]
        if sum(map(len, rows)) != stop - start:
            raise ValueError(f"{self._directory} does not hold all of the rows {start} to {stop} of array {number}")
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _overlapping(self, number, dtype, shape, start, stop) -> Iterator[tuple[int, int, np.ndarray]]:
        k, p = shape[0], self._partitions
        for first, last, name in self._parts:
            a, b = first * k // p, last * k // p
            if a < stop and b > start:
                yield a, b, self._array(name, number, dtype, (b - a, *shape[1:]))

    def _array(self, name: str, number: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        with (self._directory / name).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return arrays[f"arr_{number}"].view(jnp.dtype(dtype)).reshape(shape)
