"""Trees of columns without jax: the same names and the same order as `jax.tree` gives them."""

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from gear_jax._errors import type_error
from gear_jax.specs import ColumnSpec


def flatten(what: str, tree: Any) -> list[tuple[str, Any]]:
    """The leaves of nested dicts, lists, tuples and named tuples, each with its path ("a/0/b").

    Raises:
      TypeError: for keys that do not sort, and where a container holds nothing.
    """
    return list(_walk(what, tree, ()))


def _walk(what: str, tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        try:
            children = [(str(k), tree[k]) for k in sorted(tree)]
        except TypeError:
            raise type_error(what, got="keys that do not sort", wanted="strings", fix="Name the columns.") from None
    elif isinstance(tree, tuple) and (fields := getattr(tree, "_fields", None)) is not None:
        children = [(name, getattr(tree, name)) for name in fields]
    elif isinstance(tree, (list, tuple)):
        children = [(str(i), x) for i, x in enumerate(tree)]
    else:
        yield "/".join(path), tree
        return
    for name, child in children:
        yield from _walk(what, child, (*path, name))


def specs(what: str, tree: Any) -> list[tuple[str, ColumnSpec]]:
    """The `ColumnSpec`s of a tree, with their paths.

    Raises:
      TypeError: if a leaf is none. Other pytrees than those of `flatten` need jax, which actors do without.
    """
    found = flatten(what, tree)
    for name, spec in found:
        if not isinstance(spec, ColumnSpec):
            raise type_error(
                f"{what}[{name!r}]", got=type(spec).__name__,
                wanted="a ColumnSpec, in dicts, lists, tuples or named tuples",
                fix='Write {"observation": gear_jax.ColumnSpec((11,), "float32")}.',
            )  # fmt: skip
    return found


def dtype_of(name: str) -> np.dtype:
    """The dtype of a name, those of ml_dtypes (bfloat16, float8...) included."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))


def unflatten(names: list[str], values: list[Any]) -> Any:
    """Nested dicts of values by their paths; the value itself where there is one without a name."""
    if names == [""]:
        return values[0]
    tree: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        *above, last = name.split("/")
        at = tree
        for part in above:
            at = at.setdefault(part, {})
        at[last] = value
    return tree
