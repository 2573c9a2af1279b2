"""A table over the processes of a job that read each other's memory: `exchange="rdma"`.

Each process holds the partitions of its rank and writes to them alone. Beside the columns and the stamps of the slots
(`_exposed`) it exposes, for the others to read: a record of what is known of each slot, and an outbox of priorities
that it has for slots of others. A sample reads all records, draws from the table that they describe as one process
would that held it all, and fetches the rows. Nobody waits for anybody: there is no collective.

Records and entries of the outbox carry a check, so that one that is torn while it is read counts as none.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from gear_jax import ops
from gear_jax._errors import value_error
from gear_jax.selectors import Fifo, Index, Lifo

OUTBOX = 4096
"""Entries of an outbox: priorities that a process may have for others before they must have looked."""
_WORDS = 8  # of a record or an entry: seven, and their check


class RemoteState(struct.PyTreeNode):
    """What a process of a job keeps beside its part of the table, in host memory that the others read.

    Attributes:
      record: `uint32[P, S, 8]`: generation, length, sequence, bits of priority and mass, 0, 0, check.
      outbox: `uint32[1, R, 8]`, a ring: number, incarnation, slot, generation, bits of the priority, 0, 0, check.
      sent: `uint32[1]`, entries written to it so far.
      incarnation: `uint32[1]`, a random number: a process that was started again counts from 0.
      seen: `uint32[n, 2]`, of each process's outbox: its incarnation, and the number of the last entry applied.
      missed: `uint32[1]`, entries for anybody that were overwritten before this process looked (those before it was
        started among them).
    """

    record: jax.Array
    outbox: jax.Array
    sent: jax.Array
    incarnation: jax.Array
    seen: jax.Array
    missed: jax.Array


@dataclasses.dataclass(frozen=True)
class RemoteTable:
    """The static side: which part of the job's table this process holds.

    Attributes:
      session: the session's number.
      rank, processes: of this process, and how many there are.
      first: the number of each process's first region that is none of `_exposed`.
      memory: the kind of memory that records and the outbox lie in: that of the host.
      on_loss: as in `ops.Remote`.
    """

    session: int
    rank: int
    processes: int
    first: int
    memory: str
    on_loss: str

    def _regions(self, first: int, on_loss: str) -> ops.Remote:
        n = self.processes
        return ops.Remote(self.session, tuple(range(n)), (first,) * n, on_loss)

    @property
    def records(self) -> ops.Remote:
        return self._regions(self.first, self.on_loss)

    @property
    def outboxes(self) -> ops.Remote:
        return self._regions(self.first + 1, "invalid")


def init(remote: RemoteTable, partitions: int, slots: int) -> RemoteState:
    """Of an empty table of this process's P / n partitions."""
    zero = jnp.zeros((1,), jnp.uint32)
    return RemoteState(
        record=ops.zeros((partitions, slots, _WORDS), jnp.uint32, remote.memory),
        outbox=ops.zeros((1, OUTBOX, _WORDS), jnp.uint32, remote.memory),
        sent=zero,
        incarnation=jnp.copy(zero),
        seen=jnp.zeros((remote.processes, 2), jnp.uint32),
        missed=jnp.copy(zero),
    )


def counted_on(generation: jax.Array, incarnation: jax.Array) -> jax.Array:
    """Generations at a random distance from those that a process had before it was connected.

    Others may have handles of its last life, which counted from the same numbers: they are those of no trajectory now,
    nor of any to come, but for a chance of about one in 2**30 for each slot.
    """
    # Ahead, so that a stamp and a record still tell what is older. 0 stands for no trajectory.
    return jnp.maximum(generation + (incarnation[0] >> np.uint32(2)) + np.uint32(1), np.uint32(1))


def rebuilt(state: Any, remote: RemoteTable, incarnation: jax.Array) -> RemoteState:
    """What is exposed, anew out of the index: for a table that another way has filled (a checkpoint)."""
    p, s = state.length.shape
    fresh = init(remote, p, s)
    record = records(state.length, state.generation, state.sequence, state.priority, state.mass)
    record = jax.device_put(record, jax.memory.Space.Host) if remote.memory == "pinned_host" else record
    return fresh.replace(record=record, incarnation=incarnation)


def _bits(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.uint32 else jax.lax.bitcast_convert_type(x, jnp.uint32)


def _floats(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.float32)


def _check(words: list[jax.Array]) -> jax.Array:
    """A hash of seven words, which is not 0 for zeros."""
    mixed = jnp.full_like(words[0], 0x9E3779B9)
    for i, word in enumerate(words):
        mixed = (mixed ^ (word + np.uint32(i))) * np.uint32(0x85EBCA6B)
        mixed = mixed ^ (mixed >> np.uint32(15))
    return mixed


def _sealed(*words: jax.Array) -> jax.Array:
    """Up to seven words and their check, `uint32[..., 8]`."""
    seven = [_bits(w) for w in words]
    seven += [jnp.zeros_like(seven[0])] * (_WORDS - 1 - len(seven))
    return jnp.stack([*seven, _check(seven)], -1)


def _whole(sealed: jax.Array) -> jax.Array:
    """Whether each passes its check."""
    words = [sealed[..., i] for i in range(_WORDS)]
    return _check(words[:-1]) == words[-1]


def records(length, generation, sequence, priority, mass) -> jax.Array:
    """`uint32[..., 8]` of slots."""
    return _sealed(generation, length, sequence, priority, mass)


def publish(state: Any, slots: jax.Array) -> Any:
    """Writes the records of slots `int32[K]` of this process (-1: none), after their fields were set."""
    fields = (state.length, state.generation, state.sequence, state.priority, state.mass)
    known, ticket = ops.gather_rows(fields, slots, ticket=state.ticket)
    record = ops.scatter_rows(state.remote.record, slots, records(*known), ticket=ticket, in_flight=False)
    return state.replace(ticket=ticket, remote=state.remote.replace(record=record))


def read_index(remote: RemoteTable, state: Any) -> tuple[Index, jax.Array]:
    """The index of the table as a whole, P partitions, as its processes have published it; and the next ticket.

    Of a process that is lost all slots are empty, as is one whose record is being written.
    """
    got, _, ticket = ops.rdma_read(remote.records, state.remote.record, ticket=state.ticket)
    got = got.reshape(-1, *got.shape[2:])
    word = jnp.where(_whole(got)[..., None], got, np.uint32(0))
    mass = _floats(word[..., 4])
    length = word[..., 1].astype(jnp.int32)
    index = Index(
        length, word[..., 2], _floats(word[..., 3]), mass, ops.sumtree_sums(mass), state.clock[1], word[..., 0], ticket
    )
    return index, ticket


def send(state: Any, slots: jax.Array, generation: jax.Array, priority: jax.Array, flags: jax.Array) -> Any:
    """Puts priorities `float32[K]` for slots of other processes, where `flags` are set, into the outbox."""
    remote = state.remote
    count = jnp.cumsum(flags.astype(jnp.uint32))
    number = remote.sent[0] + count
    last = flags & (count + np.uint32(OUTBOX) > count[-1])  # more than there is room for: the last ones
    place = jnp.where(last, ((number - np.uint32(1)) % np.uint32(OUTBOX)).astype(jnp.int32), -1)
    incarnation = jnp.broadcast_to(remote.incarnation, number.shape)
    entries = _sealed(number, incarnation, slots, generation, priority)
    outbox = ops.scatter_rows(remote.outbox, place, entries, ticket=state.ticket, in_flight=False)
    remote = remote.replace(outbox=outbox, sent=remote.sent + count[-1])
    return state.replace(remote=remote)


def received(remote: RemoteTable, state: Any) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """What the others have for anybody and this process has not looked at: the state, and slots (-1: none),
    generations and priorities, `[n * R]`, in the order in which each process wrote them."""
    n = remote.processes
    got, here, ticket = ops.rdma_read(remote.outboxes, state.remote.outbox, ticket=state.ticket)
    got = got[:, 0]
    other = here & (np.arange(n) != remote.rank)
    good = _whole(got) & other[:, None]
    incarnation = jnp.max(jnp.where(good, got[..., 1], np.uint32(0)), 1)
    seen = state.remote.seen
    # Of one that was not seen before all entries are new, however many there were: numbers wrap round.
    newest = jnp.max(jnp.where(good, got[..., 0], np.uint32(0)), 1)
    first = jnp.where(newest < np.uint32(2**31), np.uint32(0), newest - np.uint32(OUTBOX))
    base = jnp.where(seen[:, 0] == incarnation, seen[:, 1], first)
    ahead = jax.lax.bitcast_convert_type(got[..., 0] - base[:, None], jnp.int32)
    new = good & (ahead > 0)
    furthest = jnp.max(jnp.where(new, ahead, 0), 1).astype(jnp.uint32)
    # Entry k of an outbox is at place k - 1 mod R: from the one behind the last entry on they are in order.
    order = ((base + furthest)[:, None] + jnp.arange(OUTBOX, dtype=jnp.uint32)[None]) % np.uint32(OUTBOX)
    got = jnp.take_along_axis(got, order.astype(jnp.int32)[..., None], 1)
    new = jnp.take_along_axis(new, order.astype(jnp.int32), 1)
    missed = jnp.sum(furthest - jnp.sum(new, 1, dtype=jnp.uint32), dtype=jnp.uint32)
    known = jnp.where((furthest > 0)[:, None], jnp.stack([incarnation, base + furthest], -1), seen)
    state = state.replace(
        ticket=ticket, remote=state.remote.replace(seen=known, missed=state.remote.missed + missed[None])
    )
    slot = jnp.where(new, jax.lax.bitcast_convert_type(got[..., 2], jnp.int32), -1)
    return state, slot.reshape(-1), got[..., 3].reshape(-1), _floats(got[..., 4]).reshape(-1)


def check_selector(selector: Any, processes: int) -> None:
    """Raises a ValueError for a selector that needs to know more than the records say."""
    if processes > 1 and isinstance(selector, (Fifo, Lifo)):
        raise value_error(
            "selector", got=f"{selector!r} with exchange='rdma' over {processes} processes",
            wanted="one that does not compare the ages of their trajectories: each counts its own",
            fix="Use Uniform, Prioritized, TopK, LowestPriority or Permutation, or exchange='collective'.",
        )  # fmt: skip
