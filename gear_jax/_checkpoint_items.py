"""The items of a checkpoint that are not JSON: the index and the columns of a table, as Orbax handlers."""

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

from gear_jax import ops
from gear_jax.replay._config import Config

_CHUNK = 16 << 20  # bytes compressed at once, by one thread
_BLOCK = 4 * _CHUNK  # bytes read or written at once: what is needed beside the table
_INDEX = "index.npz"


class IndexHandler(ocp.CheckpointHandler):
    """Writes and reads arrays as bytes: NumPy's format knows no bfloat16. The archive keeps a CRC of each."""

    def save(self, directory: epath.Path, args: "IndexSave") -> None:
        with (directory / _INDEX).open("wb") as file:
            np.savez(file, *(np.asarray(x).reshape(-1).view(np.uint8) for x in args.arrays))

    def restore(self, directory: epath.Path, args: "IndexRestore") -> dict[str, np.ndarray]:
        with (directory / _INDEX).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            read = lambda f: arrays[f"arr_{f['number']}"].view(jnp.dtype(f["dtype"])).reshape(f["shape"])  # noqa: E731
            return {f["name"]: read(f) for f in args.fields}


@ocp.args.register_with_handler(IndexHandler, for_save=True)
@dataclasses.dataclass
class IndexSave(ocp.args.CheckpointArgs):
    arrays: list[jax.Array]


@ocp.args.register_with_handler(IndexHandler, for_restore=True)
@dataclasses.dataclass
class IndexRestore(ocp.args.CheckpointArgs):
    fields: list[dict[str, Any]]


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
        codecs = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}]
        metadata = {
            "shape": [self.rows, self.row_bytes],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "codecs": codecs,
        }
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": os.fspath(directory)},
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


class ColumnsHandler(ocp.CheckpointHandler):
    """Writes and reads the columns of a table, block by block, with the ops that samples and insertions use."""

    def save(self, directory: epath.Path, args: "ColumnsSave") -> None:
        columns = jax.tree.leaves(args.columns)
        for i, _, layout in _layouts(args.config):
            file = layout.open(directory / str(i), create=True)
            for start, stop in layout.blocks():
                rows = np.asarray(_get(columns[i], jnp.arange(start, stop, dtype=jnp.int32)))
                rows = rows.reshape(stop - start, -1).view(np.uint8)
                file[start:stop].write(rows, can_reference_source_data_indefinitely=True).result()

    def restore(self, directory: epath.Path, args: "ColumnsRestore") -> Any:
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


@ocp.args.register_with_handler(ColumnsHandler, for_save=True)
@dataclasses.dataclass
class ColumnsSave(ocp.args.CheckpointArgs):
    config: Config
    columns: Any


@ocp.args.register_with_handler(ColumnsHandler, for_restore=True)
@dataclasses.dataclass
class ColumnsRestore(ocp.args.CheckpointArgs):
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
