"""The items of a checkpoint that are not JSON: the index and the columns of a table, as Orbax handlers.

Each process writes what its own devices hold, into the folder that Orbax has made for all, and reads what they need.
"""

import dataclasses
import functools
from collections import deque
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from gear_jax import _env, ops
from gear_jax._checkpoint import _files
from gear_jax._checkpoint._files import Archives, Layout
from gear_jax._checkpoint._rows import Block, HandOver
from gear_jax._checkpoint._state import on_device
from gear_jax._errors import message
from gear_jax.replay._config import Config
from gear_jax.replay._mesh import Placement

_WRITES = 8  # blocks compressed and written at once


def together(directory: epath.Path, processes: tuple[int, ...], error: BaseException | None) -> None:
    """Waits until all processes have written into a folder; raises on all of them if one has failed.

    They tell each other by files: a collective of the devices would get in the way of those of the program.
    """
    if len(processes) > 1:
        said = {i: directory / f"process_{i}" for i in processes}
        try:
            said[jax.process_index()].write_text("" if error is None else f"{type(error).__name__}: {error}")
        finally:  # a file that is not there is a failure, too
            _meet(directory, processes)
        failed = {i: path.read_text() if path.exists() else "nothing written" for i, path in said.items()}
        failed = {i: text for i, text in failed.items() if text}
        if failed and error is None:
            fix = "The steps before are as they were; save again when that is mended."
            raise RuntimeError(
                message("save", got=f"failures on processes {failed}", wanted="what each of them holds", fix=fix)
            )
    if error is not None:
        raise error


def _meet(directory: epath.Path, processes: tuple[int, ...]) -> None:
    """Waits for all processes, but no longer than `GEAR_JAX_TIMEOUT` seconds."""
    seconds = _env.timeout()
    try:
        ocp.multihost.sync_global_processes(f"gear_jax {directory}", timeout=seconds, processes=set(processes))
    except Exception as e:
        text = message(
            "save", got=f"no word from another process within {seconds} s", wanted=f"all of {processes}",
            fix="Look at what they said last; raise GEAR_JAX_TIMEOUT if one has so much more to write. The steps "
            "before are as they were.",
        )  # fmt: skip
        raise RuntimeError(text) from e


@dataclasses.dataclass(frozen=True)
class Field:
    """An array of the index.

    Attributes:
      name: its path, like "streams/slot".
      number: under which it is in the archives.
      dtype, shape: of the whole array.
      cut: whether the devices hold parts of it.
    """

    name: str
    number: int
    dtype: str
    shape: tuple[int, ...]
    cut: bool

    @classmethod
    def of_json(cls, x: dict[str, Any]) -> "Field":
        return cls(x["name"], x["number"], x["dtype"], tuple(x["shape"]), x["cut"])


class IndexHandler(ocp.CheckpointHandler):
    """Writes and reads the index: an archive for each device's part, and one for what all have."""

    def save(self, directory: epath.Path, args: "IndexSave") -> None:
        error = None
        try:
            for start, stop, arrays in args.parts:
                _files.write_part(directory, start, stop, arrays)
            if args.whole is not None:
                _files.write_whole(directory, args.whole)
        except Exception as e:
            error = e
        together(directory, args.processes, error)

    def restore(self, directory: epath.Path, args: "IndexRestore") -> dict[str, np.ndarray]:
        read = functools.partial(read_field, Archives(directory, args.partitions))
        return {f.name: read(f, 0, f.shape[0] if f.shape else 0) for f in args.fields}


def read_field(archives: Archives, field: Field, start: int, stop: int) -> np.ndarray:
    """The rows [start, stop) of an array of the index; all of one that is not cut."""
    if not field.cut:
        return archives.whole(field.number, field.dtype, field.shape)
    return archives.cut(field.number, field.dtype, field.shape, start, stop)


@ocp.args.register_with_handler(IndexHandler, for_save=True)
@dataclasses.dataclass
class IndexSave(ocp.args.CheckpointArgs):
    """Parts are (start, stop, arrays by number) of partitions; `whole` is None where another process writes it."""

    parts: list[tuple[int, int, dict[int, np.ndarray]]]
    whole: dict[int, np.ndarray] | None
    processes: tuple[int, ...]


@ocp.args.register_with_handler(IndexHandler, for_restore=True)
@dataclasses.dataclass
class IndexRestore(ocp.args.CheckpointArgs):
    fields: list[Field]
    partitions: int


class ColumnsHandler(ocp.CheckpointHandler):
    """Writes and reads the columns of a table, block by block, with the ops that samples and insertions use."""

    def save(self, directory: epath.Path, args: "ColumnsSave") -> None:
        error = None
        try:
            self._write(directory, args)
        except BaseException as e:  # an interrupt of the one who reads the rows, too
            error = e
            args.rows.abandon()
        together(directory, args.processes, error)

    def _write(self, directory: epath.Path, args: "ColumnsSave") -> None:
        layouts = _files.layouts(args.config)
        files = [layout.open(directory / str(i), create=True) for i, layout in enumerate(layouts)]
        digests = directory / "digests"
        digests.mkdir(exist_ok=True)
        writes: deque[tuple[Any, Block]] = deque()

        def finish_one():
            future, block = writes.popleft()
            future.result()
            assert block.rows is not None
            args.written += block.rows.nbytes
            args.rows.written(block)

        for item in args.rows:
            if item is None:
                if writes:
                    finish_one()
            elif not isinstance(item, Block):
                _files.write_part(digests, *item)
            elif item.rows is None:
                folder, names = str(item.column), layouts[item.column].files(item.partition, item.block)
                assert args.base is not None
                _files.link(args.base / folder, directory / folder, names)
            else:
                start, stop = layouts[item.column].rows(item.block)
                place = files[item.column][item.partition, start:stop]
                writes.append((place.write(item.rows, can_reference_source_data_indefinitely=True), item))
                if len(writes) >= _WRITES:
                    finish_one()
        while writes:
            finish_one()

    def restore(self, directory: epath.Path, args: "ColumnsRestore") -> Any:
        tree = jax.tree.structure(args.columns)
        columns = jax.tree.leaves(args.columns)
        args.columns = None  # each is donated below
        for i, layout in enumerate(_files.layouts(args.config)):
            file = layout.open(directory / str(i), create=False)
            column, columns[i] = columns[i], None
            if args.placement is None:
                columns[i] = _fill(column, 0, file, layout)
                continue
            shape, sharding = column.shape, column.sharding
            shards = [(s.index[0].start or 0, on_device(s)) for s in column.addressable_shards]
            del column
            filled = []
            while shards:
                first, shard = shards.pop(0)
                filled.append(_fill(shard, first, file, layout))
            columns[i] = jax.make_array_from_single_device_arrays(shape, sharding, filled)
        return tree.unflatten(columns)


def _fill(column: jax.Array, first: int, file: Any, layout: Layout) -> jax.Array:
    """A device's part of a column, `[p, S, T, *shape]` from partition `first` on, in place, out of its file."""
    shape, dtype, step = column.shape, column.dtype, layout.read_rows
    for p in range(shape[0]):
        for start in range(0, layout.slots, step):
            stop = min(start + step, layout.slots)
            rows = file[first + p, start:stop].read().result().view(dtype).reshape(stop - start, *shape[2:])
            slots = np.arange(p * layout.slots + start, p * layout.slots + stop, dtype=np.int32)
            # Without waiting, blocks would pile up.
            column = _put(column, slots, rows).block_until_ready()
    return column


@ocp.args.register_with_handler(ColumnsHandler, for_save=True)
@dataclasses.dataclass
class ColumnsSave(ocp.args.CheckpointArgs):
    """`base`: the folder of the columns of an earlier step; `written` counts the bytes of rows written."""

    config: Config
    rows: HandOver
    base: epath.Path | None
    processes: tuple[int, ...]
    written: int = 0


@ocp.args.register_with_handler(ColumnsHandler, for_restore=True)
@dataclasses.dataclass
class ColumnsRestore(ocp.args.CheckpointArgs):
    config: Config
    placement: Placement | None
    columns: Any


@functools.partial(jax.jit, donate_argnums=0)
def _put(column: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    return ops.scatter(column, slots, rows)
