"""From the devices that hold the rows of a batch to those that are to have them.

Each device knows all draws of the batch (slot, anchor, length), and so who holds what and who wants it: nothing is
negotiated. Three ways:

- "peer": the device reads the rows of its part out of the others' memory, in one gather, by pointers that the devices
  exchange before. That exchange comes after all earlier writes, and a barrier comes before all later ones.
- "collective": each device gathers what the others want of it, and one all-to-all moves it. It is a "ragged" one where
  XLA has that (between the GPUs of a process), so that only the rows travel; else it goes in turns of padded messages,
  1.5 times the rows if they fall evenly. Both take room for a whole batch on each device while they run.
- "rdma": the device reads the rows of its part out of the others' memory, through a session of their processes
  (`_exposed`). No device but the one that wants them takes part, and nothing else travels. The same barrier comes
  before later writes; a row that was written all the same, or whose process is lost, is not valid.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import _axis, ops
from gear_jax.replay import _exposed
from gear_jax.replay._config import Config, check_divides
from gear_jax.windows import visible

_PIECES = 64


def replicas(config: Config) -> tuple[str, ...]:
    """The axes that a batch is repeated over."""
    return tuple(name for name in _axis.names(config.axis) if name != config.batch_axis)


@dataclasses.dataclass(frozen=True)
class Part:
    """How a batch is cut: into parts along the batch's axis, each into blocks, one for each device that has the part.

    The blocks go from the holders to one device each; those that share a part then exchange theirs.

    Attributes:
      batch: B.
      rows: of a part.
      block: rows of a block; the last of a part may hold fewer.
      copies: devices that have a part.
      part: the number of this device's part, `int32[]`.
      copy: the number of this device among those that have it, `int32[]`.
      devices: the device of each block, in the order of the rows; static.
    """

    batch: int
    rows: int
    block: int
    copies: int
    part: jax.Array
    copy: jax.Array
    devices: tuple[int, ...]

    @classmethod
    def of(cls, config: Config, batch: int) -> "Part":
        """Cuts a batch.

        Raises:
          ValueError: if the parts do not divide it.
        """
        names = _axis.names(config.axis)
        sizes = [jax.lax.axis_size(name) for name in names]
        parts = jax.lax.axis_size(config.batch_axis)
        check_divides("batch_size", batch, parts, f"the devices of axis {config.batch_axis!r}")
        rows, copies = batch // parts, math.prod(sizes) // parts
        grid = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), names.index(config.batch_axis), 0)
        devices = tuple(grid.reshape(-1).tolist())
        part, copy = _axis.index(config.batch_axis), _axis.index(replicas(config))
        return cls(batch, rows, -(-rows // copies), copies, part, copy, devices)

    def cut(self, x: jax.Array) -> jax.Array:
        """This device's part of `[B, ...]`."""
        return jax.lax.dynamic_slice_in_dim(x, self.part * np.int32(self.rows), self.rows)

    def block_rows(self) -> jax.Array:
        """The rows of this device's block, `int32[block]`; -1 beyond the end of the part."""
        place = self.copy * np.int32(self.block) + jnp.arange(self.block, dtype=jnp.int32)
        return jnp.where(place < self.rows, self.part * np.int32(self.rows) + place, -1)

    def ends(self) -> np.ndarray:
        """The row behind each block, `int32[n]`, in the order of the rows."""
        last = np.minimum(np.arange(1, self.copies + 1) * self.block, self.rows)
        return (np.arange(len(self.devices) // self.copies)[:, None] * self.rows + last).reshape(-1).astype(np.int32)

    def join(self, config: Config, tree: Any) -> Any:
        """The part, `[rows, ...]`, out of the blocks of the devices that have it."""
        return jax.tree.map(lambda x: _axis.all_gather(x, replicas(config))[: self.rows], tree)


def read(config: Config, part: Part, state: Any, drawn: dict[str, Any], after: Any):
    """This device's part of a batch, read out of the memory of the processes that have the rows.

    Args:
      config: of the device.
      part: how the batch is cut.
      state: of the device.
      drawn: handles, anchor and length of the part's rows, `[rows]`.
      after: as in `ops.gather`.

    Returns:
      (data, mask, valid, ticket): as of `fetch`, and `bool[rows]`.
    """
    at = part.copy * np.int32(part.block) + jnp.arange(part.block, dtype=jnp.int32)
    there, at = at < part.rows, jnp.minimum(at, part.rows - 1)
    names = ("handles", "anchor", "length")
    own = jax.tree.map(lambda x: x[at], {name: drawn[name] for name in names})
    own["handles"] = own["handles"].replace(slot=jnp.where(there, own["handles"].slot, -1))
    data, mask, valid, ticket = ops.rdma_fetch(*_exposed.fetch_of(config, state, own), ticket=state.ticket, after=after)
    ticket, data = _behind_all(config, ticket, data)
    return *part.join(config, (data, mask, valid)), ticket


def takes_memory(config: Config) -> bool:
    """Whether a sample can take the memory of an earlier one: what is read is then what is handed out."""
    apart = config.selection == "decentralized"
    return (apart or config.exchange == "peer") and _axis.size(replicas(config)) == 1


def fetch(config: Config, part: Part, columns: Any, slots, anchors, lengths, ticket, after, out):
    """This device's part of a batch.

    Args:
      config: of the device.
      part: how the batch is cut.
      columns: those of the device.
      slots: `int32[B]`, of the whole table.
      anchors, lengths: `int32[B]`.
      ticket, after, out: as in `ops.gather`; `out` only where it `takes_memory`.

    Returns:
      (data, mask, ticket): leaves `[rows, W, *shape]` and `bool[rows, W]`; the ticket comes after the reads of all
      devices that read here.
    """
    rows = slots, anchors, lengths
    if config.exchange == "peer":
        data, mask, ticket = _by_peers(config, part, columns, rows, ticket, after, out)
        if part.copies == 1:
            return data, mask, ticket
    else:
        data, ticket = _by_collective(config, part, columns, rows, ticket, after)
    data = part.join(config, data)
    anchors, lengths = part.cut(anchors), part.cut(lengths)
    masks = [visible(window, anchors, lengths, config.steps) for window in config.windows]
    return data, config.tree.unflatten(masks), ticket


def _by_peers(config: Config, part: Part, columns, rows, ticket, after, out):
    pointers, ticket = ops.pointers(columns, ticket=ticket)
    pointers = _axis.all_gather(pointers[None], config.axis)  # [n, columns, 2]
    leaves, tree = jax.tree.flatten(columns)
    shards = tree.unflatten([ops.Shards(pointers[:, i], x.shape, x.dtype) for i, x in enumerate(leaves)])
    at = part.block_rows()
    slots, anchors, lengths = (x[jnp.maximum(at, 0)] for x in rows)
    lengths = jnp.where(at >= 0, lengths, 0)
    data, mask, ticket = ops.gather(
        shards, slots, anchors, lengths, config.window_tree, ticket=ticket, after=after, out=out
    )
    ticket, data = _behind_all(config, ticket, data)
    return data, mask, ticket


def _behind_all(config: Config, ticket: jax.Array, data: Any) -> tuple[jax.Array, Any]:
    """The ticket of all devices' reads, and data that comes behind them.

    Nobody writes until everybody has read. The data comes behind that, too: a program that drops the state would else
    drop the barrier, and end while others read.
    """
    ticket = _axis.total(ticket, config.axis)
    return ticket, jax.tree.map(lambda x: ops.seal(x, ticket) if x.size else x, data)


def _by_collective(config: Config, part: Part, columns, rows, ticket, after):
    slots, anchors, lengths = rows
    n, me = _axis.size(config.axis), _axis.index(config.axis)
    ends = part.ends()
    block = np.searchsorted(ends, np.arange(part.batch), side="right").astype(np.int32)
    target = np.asarray(part.devices, np.int32)[block]
    # A row of nothing is padding, which its target makes for itself.
    owner = jnp.where(lengths > 0, slots // np.int32(config.partitions * config.slots), target)
    before = jnp.cumsum(owner[:, None] == jnp.arange(n, dtype=jnp.int32)[None], axis=0, dtype=jnp.int32)
    starts = np.concatenate([np.zeros((1,), np.int32), ends[:-1]])
    floor = jnp.where((starts > 0)[:, None], before[np.maximum(starts - 1, 0)], 0)  # [blocks, owners]
    ceiling = jnp.where((ends > 0)[:, None], before[np.maximum(ends - 1, 0)], 0)
    counts = jnp.zeros((n, n), jnp.int32).at[np.asarray(part.devices)].set(ceiling - floor)  # [target, owner]
    # The number of each row among those that its owner sends to its target.
    number = jnp.take_along_axis(before, owner[:, None], 1)[:, 0] - 1 - floor[block, owner]
    ragged = config.exchange == "ragged"
    width = part.block if ragged else min(part.block, -(-3 * part.block // (2 * n)) + 1)
    at = part.block_rows()
    own, own_number = owner[jnp.maximum(at, 0)], number[jnp.maximum(at, 0)]

    def send(turn, ticket):
        """What comes to this device, `[n * width, ...]`: of each owner the rows from turn * width on."""
        place = number - turn * np.int32(width)
        mine = (owner == me) & (place >= 0) & (place < width)
        to = jnp.where(mine, target * np.int32(width) + place, n * width)
        picked = jnp.full((n * width,), -1, jnp.int32).at[to].set(jnp.arange(part.batch, dtype=jnp.int32), mode="drop")
        there = picked >= 0
        picked = jnp.maximum(picked, 0)
        here = jnp.where(there, config.held(slots)[picked], -1)
        data, _, ticket = ops.gather(
            columns, jnp.maximum(here, 0), anchors[picked], jnp.where(here >= 0, lengths[picked], 0),
            config.window_tree, ticket=ticket, after=after,
        )  # fmt: skip
        if ragged:
            return jax.tree.map(_ragged(_axis.names(config.axis), me, counts, width), data), ticket
        move = lambda x: jax.lax.all_to_all(x, _axis.names(config.axis), 0, 0, tiled=True)  # noqa: E731
        return jax.tree.map(move, data), ticket

    def take(turn, came, so_far):
        place = own_number - turn * np.int32(width)
        fits = (at >= 0) & (place >= 0) & (place < width)
        index = own * np.int32(width) + jnp.clip(place, 0, width - 1)
        pick = lambda x, old: jnp.where(fits.reshape(-1, *[1] * (x.ndim - 1)), x[index], old)  # noqa: E731
        return jax.tree.map(pick, came, so_far)

    came, ticket = send(np.int32(0), ticket)
    data = take(np.int32(0), came, jax.tree.map(lambda x: x[: part.block], came))
    if width < part.block:
        turns = -(-jnp.max(counts) // np.int32(width))

        def turn(carry):
            k, data, ticket = carry
            came, ticket = send(k, ticket)
            return k + 1, take(k, came, data), ticket

        _, data, ticket = jax.lax.while_loop(lambda c: c[0] < turns, turn, (jnp.int32(1), data, ticket))
    return data, ticket


def _ragged(names: tuple[str, ...], me: jax.Array, counts: jax.Array, width: int) -> Any:
    """What moves `[n * width, ...]`, of which the first counts[k, me] of each `width` rows go to device k.

    Args:
      names: of the axes.
      me: the number of this device.
      counts: `int32[n, n]`, rows for each target from each owner.
      width: rows that there is room for from each device.
    """
    n = counts.shape[0]
    # XLA's kernel copies each piece with one block of threads: many pieces fill the link.
    piece = -(-width // _PIECES)
    begin = jnp.arange(-(-width // piece), dtype=jnp.int32) * np.int32(piece)
    cut = lambda rows: jnp.clip(rows[:, None] - begin[None], 0, piece).reshape(-1)  # noqa: E731
    room = (jnp.arange(n, dtype=jnp.int32) * np.int32(width))[:, None] + begin[None]
    there = jnp.broadcast_to(me * np.int32(width) + begin[None], room.shape).reshape(-1)
    sizes = cut(counts[:, me]), cut(counts[me])

    def move(x):
        words = _as_words(x)
        got = jax.lax.ragged_all_to_all(
            words, jnp.zeros_like(words), room.reshape(-1), sizes[0], there, sizes[1], axis_name=names
        )
        return got if words is x else jax.lax.bitcast_convert_type(got, x.dtype).reshape(x.shape)

    return move


def _as_words(x: jax.Array) -> jax.Array:
    """Rows of a narrow dtype as `uint32[rows, k]`, which a GPU moves faster; else as they are."""
    size = x.dtype.itemsize
    per_row = math.prod(x.shape[1:])
    if size >= 4 or x.dtype == jnp.bool_ or per_row == 0 or per_row * size % 4:
        return x
    return jax.lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 4 // size), jnp.uint32)
