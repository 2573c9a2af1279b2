"""`Addresses`: what stands for a column that an op reads by address."""

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax._errors import type_error, value_error

WORDS = 4


class Owner(Protocol):
    """What keeps the memory of addresses."""

    def check(self) -> None:
        """Raises a ValueError if the memory is not there any more."""


@dataclasses.dataclass(frozen=True, eq=False)
class Addresses:
    """A column by the address of its memory, for `gear_jax.ops.gather`; `gear_jax.external` makes it.

    A pytree with one small array, which jit, vmap, scan, shard_map and pmap take like any other; the column is not in
    it. So a program reads a column that it could not take as an argument: one in `pinned_host` under pmap, another
    device's shard, memory that JAX did not allocate.

    The words are a number that the library looks up, no pointer: where the memory was given up through
    `gear_jax.external`, the gather fails and touches nothing. Words without an owner are not checked after an array of
    JAX's was donated or deleted: they read what lies there now.

    The object keeps the memory alive, as long as it is the one that `gear_jax.external` returned, or was made from
    it by `shard` or `dataclasses.replace`. What comes out of a transformation names the memory and keeps nothing.

    Attributes:
      words: `uint32[4]`; `uint32[n, 4]` for the n shards of an array.
      shape: `(P, S, T, *shape)` of a shard, static.
      dtype: static.
      alignment: each shard begins at a multiple of so many bytes (1, 16 or 128), static.
      owner: what keeps the memory; not part of the pytree.
    """

    words: jax.Array
    shape: tuple[int, ...]
    dtype: np.dtype
    alignment: int
    owner: Owner | None = dataclasses.field(default=None, repr=False)

    @property
    def ndim(self) -> int:
        """Dimensions of a shard."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements of a shard."""
        return math.prod(self.shape)

    def shard(self, k: Any) -> "Addresses":
        """The addresses of shard k alone; an integer or, in a program, a scalar array.

        Raises:
          ValueError: if this is one shard already.
        """
        if jnp.ndim(self.words) != 2:
            raise value_error(
                "Addresses.shard", got=f"words of shape {jnp.shape(self.words)}", wanted=f"[n, {WORDS}]",
                fix="Use the addresses as they are: they are those of one shard.",
            )  # fmt: skip
        return dataclasses.replace(self, words=self.words[k])

    def check(self) -> None:
        """Raises a ValueError if the memory is not there any more, as far as this object knows."""
        if self.owner is not None:
            self.owner.check()


def _flatten(x: Addresses):
    # Whatever is going to be done with the words, a call of a compiled program say, would fail.
    x.check()
    return (x.words,), (x.shape, x.dtype, x.alignment)


def _flatten_with_keys(x: Addresses):
    children, static = _flatten(x)
    return ((jax.tree_util.GetAttrKey("words"), children[0]),), static


def _unflatten(static, children) -> Addresses:
    return Addresses(children[0], *static)


jax.tree_util.register_pytree_with_keys(Addresses, _flatten_with_keys, _unflatten, _flatten)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a column is that is given by address, or (`shards` > 0) by the pointers of so many shards."""

    shape: tuple[int, ...]
    dtype: np.dtype
    alignment: int
    shards: int = 0

    @property
    def ndim(self) -> int:
        """Its dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


def layout(column: Any) -> Layout | None:
    """The layout of a column that is given by address; None for an array."""
    return Layout(column.shape, column.dtype, column.alignment) if isinstance(column, Addresses) else None


def words_of(i: int, column: Addresses) -> jax.Array:
    """`uint32[4]`, the operand of a handler for column i.

    Raises:
      TypeError: if they are not words.
      ValueError: if they are those of several shards, or if the memory is not there any more.
    """
    column.check()
    words = column.words
    dtype = getattr(words, "dtype", type(words).__name__)
    if dtype != jnp.uint32:
        raise type_error(
            f"columns[{i}].words", got=dtype, wanted="uint32", fix="Pass Addresses as gear_jax.external made them."
        )
    if words.shape not in ((WORDS,), (1, WORDS)):  # the second in a shard_map
        raise value_error(
            f"columns[{i}].words", got=f"shape {words.shape}", wanted=f"({WORDS},), the address of one shard",
            fix="Pass addresses.shard(k), or map over the shards with pmap, shard_map or vmap.",
        )  # fmt: skip
    return jnp.reshape(words, (WORDS,))
