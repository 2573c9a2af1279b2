"""`pointers` and `Shards`: a table in the memory of several devices of one process, read by each of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from gear_jax._errors import type_error, value_error
from gear_jax.ops import _registry
from gear_jax.ops._addresses import Addresses, Layout

# On a GPU `pointers` sees to it; a CPU's gather does not mind.
_ALIGNMENT = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shards:
    """A column in n shards of the same shape by their pointers, for `gear_jax.ops.gather`; see `pointers`.

    The table is that of the shards one behind the other, `[n * P, S, T, *shape]`: slot c of it is slot c % (P * S) of
    shard c // (P * S). A pytree with one small array; the column is not in it.

    Attributes:
      pointers: `uint32[n, 2]`, of each shard, as `pointers` returned them.
      shape: `(P, S, T, *shape)` of one shard, static.
      dtype: static.
    """

    pointers: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))


def pointers(columns: Any, *, ticket: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Where the memory of columns begins: for other devices of this process, which read it with `gather`.

    On each device of a `jax.shard_map` (or `jax.pmap`) over an axis "x"::

        words, ticket = ops.pointers(columns, ticket=ticket)  # of this device's shards
        words = jax.lax.all_gather(words, "x")  # uint32[n, k, 2]; no device goes on before all have written
        leaves, tree = jax.tree.flatten(columns)
        table = tree.unflatten([ops.Shards(words[:, i], c.shape, c.dtype) for i, c in enumerate(leaves)])
        data, mask, ticket = ops.gather(table, slots, starts, lengths, ticket=ticket)  # slots of all shards
        ticket = jax.lax.psum(ticket, "x")  # no device goes on before all have read
        columns = ops.scatter(columns, new_slots, values, ticket=ticket)  # own slots again

    The call takes the columns as operands, so that it follows earlier writes of them in the program, and what follows
    it, by data, follows those too. The rest is the caller's duty:

    - **A barrier behind the reads.** Each device hands the tickets of its gathers to a collective, and takes the
      result before it writes the columns in place, frees them or ends the program (return it).
    - **Columns that stay.** XLA knows nothing of the reads. The columns must be arguments of the program, or made from
      them by `scatter` and returned; what is neither may be gone after this call, unless something behind the barrier
      takes it (`ops.pointers(columns, ticket=barrier)` again, whose ticket is used).
    - **This program only.** Pointers say nothing to another process, and nothing once the columns have been donated.

    Args:
      columns: pytree of k arrays; on a GPU they must lie in `pinned_host`, which all GPUs of the host read.
      ticket: `int32[1]` of an earlier read, which this one then follows; None for a new one.

    Returns:
      (words, ticket): `uint32[k, 2]`, the high and the low word of the pointer of each leaf (in the order of
      `jax.tree.leaves`; zeros for an array without elements), and a ticket `int32[1]` as that of `gather`.

    Raises:
      TypeError: at trace time, for columns by address.
      JaxRuntimeError: when it runs, on a GPU, for a column that other GPUs cannot read, or that does not begin at a
        multiple of 128 bytes.

    Transformations: jit, scan, cond, shard_map and pmap as usual; under vmap a ValueError. Not differentiable.
    """
    is_leaf = lambda x: isinstance(x, (Addresses, Shards))  # noqa: E731
    leaves = jax.tree.leaves(columns, is_leaf=is_leaf)
    for i, c in enumerate(leaves):
        if is_leaf(c):
            raise type_error(
                f"pointers: columns[{i}]", got=type(c).__name__, wanted="an array", fix="Pass the array itself."
            )
    return _call([jnp.asarray(c) for c in leaves], _registry.ticket(ticket))


@custom_vmap
def _call(columns, ticket):
    results = [jax.ShapeDtypeStruct((len(columns), 2), jnp.uint32), jax.ShapeDtypeStruct((1,), jnp.int32)]
    return tuple(_registry.call("gear_pointers", results, [ticket, *columns]))


@_call.def_vmap
def _no_vmap(size, batched, *args):
    raise value_error(
        "ops.pointers under vmap", got="a batch of tables", wanted="one, of all partitions",
        fix="Call it outside the vmap, on the arrays as they lie in memory.",
    )  # fmt: skip


def shards_layout(i: int, column: Shards) -> Layout:
    """What column i is, all shards together.

    Raises:
      TypeError: if the pointers are no words.
      ValueError: if they, or the shape, are of another shape.
    """
    words = column.pointers
    got = f"{words.dtype}{list(words.shape)}" if hasattr(words, "dtype") else type(words).__name__
    if getattr(words, "dtype", None) != jnp.uint32:
        raise type_error(
            f"columns[{i}].pointers", got=got, wanted="uint32[n, 2]", fix="Pass what ops.pointers returned."
        )
    if words.ndim != 2 or words.shape[1] != 2 or not words.shape[0]:
        raise value_error(
            f"columns[{i}].pointers", got=got, wanted="uint32[n, 2], those of one column",
            fix="Pick the column of what jax.lax.all_gather returned: words[:, i].",
        )  # fmt: skip
    if not column.shape:
        raise value_error(f"columns[{i}].shape", got="()", wanted="(P, S, T, *shape)", fix="Pass that of the shard.")
    n = words.shape[0]
    return Layout((n * column.shape[0], *column.shape[1:]), column.dtype, _ALIGNMENT, n)
