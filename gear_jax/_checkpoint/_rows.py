"""The rows of a table on their way into a checkpoint: which have changed, and the hand-over to who writes them.

Whether a block of slots has changed is seen from a digest of its bytes, which the device forms; the rows that have not
changed never reach the host. Where the caller says which step a state comes from, the index tells: a slot whose
generation is the same holds the same trajectory, unless a stream had it open.
"""

import dataclasses
import functools
import hashlib
import os
import threading
import zipfile
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from gear_jax import ops
from gear_jax._checkpoint import _files
from gear_jax._checkpoint._files import Archives, Layout
from gear_jax._errors import value_error
from gear_jax.replay._config import Config

DIGEST = 8  # bytes
_GUARDS = 8  # blocks of a column and device that are compared although the index says that they are the same


class Shard(NamedTuple):
    """What one device holds.

    Attributes:
      start, stop: its partitions.
      columns: arrays `[stop - start, S, T, *shape]`.
      arrays: those of the index, on the host, by name.
    """

    start: int
    stop: int
    columns: list[Any]
    arrays: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Base:
    """An earlier step.

    Attributes:
      step: its number.
      columns: the folder of its columns.
      index: its index, read as (name, start, stop) for the rows of an array; None: blocks are compared by digest alone.
    """

    step: int
    columns: epath.Path
    index: Any = None


class Block(NamedTuple):
    """A block of a column: `rows` to write, or None: the earlier step has it."""

    column: int
    partition: int
    block: int
    rows: np.ndarray | None


class Digests(NamedTuple):
    """The digests of the partitions [start, stop): `uint8[stop - start, blocks, DIGEST]` by column."""

    start: int
    stop: int
    arrays: dict[int, np.ndarray]


class HandOver:
    """A queue from the one that reads rows to the one that writes them, with a bound on the bytes that wait."""

    def __init__(self, limit: int):
        self._limit, self._bytes, self._items = limit, 0, deque()
        self._finished, self._abandoned, self._waiting, self._error = False, False, False, None
        self._changed = threading.Condition()

    def put(self, item: Block | Digests) -> bool:
        """Waits for room and gives an item; False if nobody will take it."""
        size = _nbytes(item)
        with self._changed:
            while not (self._abandoned or not self._bytes or self._bytes + size <= self._limit):
                self._waiting = True
                self._changed.notify_all()
                self._changed.wait()
            self._waiting = False
            self._bytes += size
            self._items.append(item)
            self._changed.notify_all()
            return not self._abandoned

    def finish(self, error: BaseException | None = None) -> None:
        """Says that there is no more; with an error, that the save is to fail."""
        if error is not None and not isinstance(error, Exception):
            # A thread of Orbax's that ends by anything else, such as a KeyboardInterrupt, does not stop the commit.
            error = RuntimeError(f"reading the rows was cut short by {error!r}")
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Says that nothing more will be taken."""
        with self._changed:
            self._abandoned = True
            self._items.clear()
            self._changed.notify_all()

    def written(self, item: Block | Digests) -> None:
        """Makes room."""
        with self._changed:
            self._bytes -= _nbytes(item)
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Block | Digests | None]:
        """What has been put; None: there is nothing, and no room for more before some of it is `written`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._finished or self._waiting)
                if self._error is not None:
                    raise self._error
                if not self._items and self._finished:
                    return
                item = self._items.popleft() if self._items else None
                if item is None:  # it says so again if one `written` does not make room
                    self._waiting = False
            yield item


def _nbytes(item: Block | Digests) -> int:
    return item.rows.nbytes if isinstance(item, Block) and item.rows is not None else 0


def blocks(config: Config, shard: Shard, base: Base | None) -> Iterator[Block | Digests]:
    """All blocks of a shard, those that have changed with their rows, and then their digests."""
    digests = {}
    changed = None if base is None or base.index is None else _changed_slots(config, shard, base)
    for number, layout in enumerate(_files.layouts(config)):
        count = shard.stop - shard.start
        known = None if base is None else _known(base, number, layout, shard)
        digests[number] = np.zeros((count, layout.blocks, DIGEST), np.uint8) if known is None else known.digests.copy()
        doubtful = np.ones((count, layout.blocks), bool)
        may_change = doubtful
        if known is not None and changed is not None:
            may_change = layout.any(changed) | ~known.there
            doubtful = may_change | _guards(layout, shard.arrays["sequence"], may_change)
        for p, b in np.argwhere(~doubtful).tolist():
            yield Block(number, shard.start + p, b, None)
        for p, b, digest, rows in _read(shard.columns[number], layout, np.argwhere(doubtful).tolist()):
            same = known is not None and known.there[p, b] and np.array_equal(known.digests[p, b], digest)
            if not same and not may_change[p, b]:
                assert base is not None
                raise value_error(
                    "save: since", got=f"{base.step}, with other rows in slots that have not been filled since",
                    wanted="the step that this very state was saved as, or restored from",
                    fix="Leave since out: all rows are compared then.",
                )  # fmt: skip
            digests[number][p, b] = digest
            yield Block(number, shard.start + p, b, None if same else rows())
    yield Digests(shard.start, shard.stop, digests)


class _Known(NamedTuple):
    """What an earlier step has of a shard's column: digests `uint8[p, blocks, DIGEST]`, and whether files are there."""

    digests: np.ndarray
    there: np.ndarray


def _known(base: Base, number: int, layout: Layout, shard: Shard) -> _Known | None:
    shape = layout.partitions, layout.blocks, DIGEST
    try:
        archives = Archives(base.columns / "digests", layout.partitions)
        digests = archives.cut(number, np.uint8, shape, shard.start, shard.stop)
        names = set(os.listdir(base.columns / str(number)))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):  # damage of that step is no reason not to save this one
        return None
    there = [
        [names.issuperset(layout.files(p, b)) for b in range(layout.blocks)] for p in range(shard.start, shard.stop)
    ]
    return _Known(digests, np.array(there))


def _changed_slots(config: Config, shard: Shard, base: Base) -> np.ndarray:
    """`bool[p, S]`: which slots may hold something else than they did."""
    changed = np.zeros((shard.stop - shard.start, config.slots), bool)
    for name in ("generation", "sequence", "length"):
        changed |= shard.arrays[name] != base.index(name, shard.start, shard.stop)
    if config.streams:
        # The generation rises when a stream opens a slot, and not with the steps that follow.
        a, b = (x * config.streams // config.partitions for x in (shard.start, shard.stop))
        for slots in (shard.arrays["streams/slot"], base.index("streams/slot", a, b)):
            here = slots[slots >= 0] - shard.start * config.slots
            changed.reshape(-1)[here[(here >= 0) & (here < changed.size)]] = True
    return changed


def _guards(layout: Layout, sequence: np.ndarray, changed: np.ndarray) -> np.ndarray:
    """The unchanged blocks with the newest rows: these differ if the state comes from elsewhere."""
    newest = np.maximum.reduceat(sequence, np.arange(0, layout.slots, layout.block_rows), axis=1).astype(np.int64)
    order = np.argsort(np.where(changed, -1, newest), axis=None)[::-1][:_GUARDS]
    guards = np.zeros(changed.shape, bool)
    guards.reshape(-1)[order] = True
    return guards & ~changed


def _read(column: jax.Array, layout: Layout, wanted: list[list[int]]):
    """Yields (partition of the shard, block, digest, a function that gives its rows) of blocks, many at a time."""
    capacity = min(layout.read_rows, column.shape[0] * layout.slots)
    batch, used = [], 0
    for p, b in wanted:
        start, stop = layout.rows(b)
        if used + stop - start > capacity:
            yield from _read_batch(column, layout, batch, capacity)
            batch, used = [], 0
        batch.append((p, b, used, used + stop - start))
        used += stop - start
    if batch:
        yield from _read_batch(column, layout, batch, capacity)


def _read_batch(column: jax.Array, layout: Layout, batch: list[tuple[int, int, int, int]], capacity: int):
    # Always as many slots, so that one program serves; the last is repeated.
    slots = np.concatenate([p * layout.slots + np.arange(*layout.rows(b), dtype=np.int32) for p, b, _, _ in batch])
    slots = np.pad(slots, (0, capacity - slots.size), mode="edge").astype(np.int32)
    rows, digest = _get(column, slots)
    digest = np.asarray(digest)
    host = functools.cache(lambda: np.asarray(rows).reshape(capacity, -1).view(np.uint8))
    for p, b, start, stop in batch:
        words = hashlib.blake2b(digest[start:stop].tobytes(), digest_size=DIGEST).digest()
        # A copy, for a few rows must not keep all of them.
        yield p, b, np.frombuffer(words, np.uint8), lambda a=start, b=stop: host()[a:b].copy()


@jax.jit
def _get(column: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[K, T, *shape]`, the slots as they are, whatever their lengths, and a digest of each, `uint32[K, 2]`."""
    steps = jnp.full_like(slots, column.shape[2])
    rows = ops.gather(column, slots, jnp.zeros_like(slots), steps)[0]
    return rows, _digest(_words(rows))


def _digest(words: jax.Array) -> jax.Array:
    """`uint32[K, W]` to `uint32[K, 2]`: sums of all words, each mixed with its place."""
    place = jnp.arange(words.shape[1], dtype=jnp.uint32)[None] * np.uint32(0x9E3779B9)
    keys = (np.uint32(0x7F4A7C15), np.uint32(0x94D049BB))
    return jnp.stack([jnp.sum(_mix(words + _mix(place + k)), axis=1, dtype=jnp.uint32) for k in keys], -1)


def _mix(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _words(x: jax.Array) -> jax.Array:
    """The bits of `[K, ...]` as `uint32[K, W]`."""
    k = x.shape[0]
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    size = x.dtype.itemsize
    if size >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(k, -1)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    x = jax.lax.bitcast_convert_type(x, jnp.uint8 if size == 1 else jnp.uint16).reshape(k, -1)
    if x.shape[1] % (4 // size):
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x.reshape(k, -1, 4 // size), jnp.uint32)
