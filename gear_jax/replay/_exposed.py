"""What the processes of a job read of each other's tables: columns, and a stamp for each slot (`exchange="rdma"`).

A stamp is a seqlock over its slot's bytes, which `ops.scatter(stamps=)` keeps: 2 * generation where they are whole, odd
while they are being written. Shards of one process are exposed one after another, each as its columns, its stamps, and
what else `_remote` has to say.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import ops
from gear_jax.replay._mesh import Placement


def shards(placement: Placement, session: int, columns: int, on_loss: str) -> ops.Remote:
    """Where the shards of a table over a mesh are: one for each device, in the order of the partitions."""
    several = placement.processes > 1
    peers = [device.process_index if several else 0 for device in placement.holders]
    first = [peers[:i].count(peer) * (columns + 1) for i, peer in enumerate(peers)]
    return ops.Remote(session, tuple(peers), tuple(first), on_loss)


def for_no_rows(rows: ops.Remote) -> ops.Remote:
    """The same for a fetch of no rows: whoever is lost, it loses nothing."""
    return dataclasses.replace(rows, on_loss="invalid")


def arrays(state: Any) -> list[jax.Array]:
    """What is exposed of a state, in the order of the regions; over a mesh, of all devices."""
    of_rows = [*jax.tree.leaves(state.columns), state.stamp]
    return of_rows if state.remote is None else [*of_rows, state.remote.record, state.remote.outbox]


def pieces(state: Any, placement: Placement | None) -> list[jax.Array]:
    """The same as this process exposes it: over a mesh, one device of it after another."""
    if placement is None:
        return arrays(state)
    parts = [{part.device: part.data for part in x.addressable_shards} for x in arrays(state)]
    here = [device for device in placement.holders if device in parts[0]]
    return [part[device] for device in here for part in parts]


def fetch_of(config: Any, state: Any, drawn: dict[str, Any]) -> tuple[Any, ...]:
    """The operands of an `ops.rdma_fetch` of rows that were drawn, `[n]`, out of the whole table."""
    held, slot = np.int32(config.partitions * config.slots), drawn["handles"].slot
    shard, slot = jnp.where(slot >= 0, slot // held, -1), jnp.where(slot >= 0, slot % held, -1)
    rows = shard, slot, drawn["anchor"], drawn["length"]
    return config.rows, state.columns, state.stamp, *rows, config.window_tree, drawn["handles"].generation


def stamps(config: Any, state: Any) -> jax.Array:
    """`uint32[P, S]` of a table that another way has filled (a checkpoint). `state`: of a device, without columns."""
    p, s = state.length.shape
    stamp = (state.generation + state.generation).reshape(-1)
    if state.streams is not None:  # the slots that are open are not whole
        here = config.held(state.streams.slot)
        stamp = stamp.at[jnp.where(here >= 0, here, p * s)].add(np.uint32(2**32 - 1), mode="drop")
    return stamp.reshape(p, s)
