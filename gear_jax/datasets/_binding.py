"""Which column of a dataset fills which column of a table, and whether its values fit there."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax._errors import type_error, value_error
from gear_jax.datasets._episode import Episode, bad, lookup

_KINDS = (np.bool_, jnp.integer, jnp.floating, jnp.complexfloating)  # each may go into a later one


@dataclasses.dataclass(frozen=True)
class Field:
    """One leaf of the table.

    Attributes:
      target: where it is in the table ("observation/position").
      source: where it comes from in an `Episode` ("observation/position").
      shape: of one step.
      dtype: what the table stores.
    """

    target: str
    source: str
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Binding:
    """All leaves of a table, in the order of `jax.tree.leaves(table.columns)`."""

    fields: tuple[Field, ...]
    structure: Any

    @property
    def sources(self) -> tuple[str, ...]:
        """The columns to read, without repetition."""
        return tuple(dict.fromkeys(field.source for field in self.fields))

    @property
    def step_bytes(self) -> int:
        """Bytes of one step over all columns."""
        return sum(int(np.prod(f.shape)) * f.dtype.itemsize for f in self.fields)

    def values(self, episode: Episode) -> list[np.ndarray]:
        """The episode's arrays `[L, *shape]`, one per field, checked; not yet cast to the table's dtype.

        Raises:
          ValueError: naming file, episode and column: a column is missing, misshapen or ragged, has the wrong
            dtype, or holds a number that is not finite or does not fit the table's dtype.
        """
        return [_checked(field, episode) for field in self.fields]


def bind(columns: Any, mapping: Any) -> Binding:
    """Binds a table's columns to a dataset's.

    Args:
      columns: `TableSpec.columns`, a pytree of `ColumnSpec`.
      mapping: the same tree with the name of a dataset column in place of a `ColumnSpec` or of a whole
        subtree. None: every top-level column is filled from the dataset column of its own name.

    Raises:
      TypeError, ValueError: the mapping does not fit the table.
    """
    if mapping is None:
        if not isinstance(columns, Mapping):
            raise value_error(
                "columns",
                got=f"None for a table whose columns are a {type(columns).__name__}",
                wanted="a tree of dataset column names like the table's columns",
                fix="Pass columns=('observation', 'action', ...).",
            )
        mapping = {key: key for key in columns}
    for path, name in jax.tree_util.tree_leaves_with_path(mapping):
        if not isinstance(name, str):
            raise type_error(
                f"columns[{_join(path)!r}]",
                got=repr(name),
                wanted="the name of a dataset column",
                fix="Write columns={'obs': 'observation', ...}.",
            )
    try:
        sources = jax.tree.map(_sources, mapping, columns)
    except (ValueError, TypeError) as error:
        raise value_error(
            "columns",
            got=f"{mapping} for a table with {jax.tree.map(lambda spec: spec.shape, columns)}",
            wanted="one dataset column name for every column of the table",
            fix=f"Give `columns` the structure of the table's columns ({error}).",
        ) from error
    targets, structure = jax.tree_util.tree_flatten_with_path(columns)
    fields = [
        Field(_join(path), source, spec.shape, np.dtype(jax.dtypes.canonicalize_dtype(spec.dtype)))
        for (path, spec), source in zip(targets, jax.tree.leaves(sources), strict=True)
    ]
    return Binding(tuple(fields), structure)


def _sources(name: str, specs: Any) -> Any:
    paths, structure = jax.tree_util.tree_flatten_with_path(specs)
    return structure.unflatten(["/".join(filter(None, (name, _join(path)))) for path, _ in paths])


def _join(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _checked(field: Field, episode: Episode) -> np.ndarray:
    def error(got: object, wanted: object, fix: str) -> ValueError:
        where = field.source if field.source == field.target else f"{field.source} -> {field.target}"
        return bad(episode.source, episode.id, where, got=got, wanted=wanted, fix=fix)

    try:
        values = lookup(episode.columns, field.source)
    except KeyError:
        have = sorted(episode.columns)
        raise error(f"no such column (there are {have})", "a column", "Name another one in `columns`.") from None
    if isinstance(values, Mapping | tuple):
        raise error("a nested column", "one array", "Nest the table's column too, or name one entry ('a/b').")
    if len(values) != episode.length:
        raise error(f"{len(values)} rows", f"{episode.length}, one per step", "The column is ragged: mend the file.")
    if values.shape[1:] != field.shape:
        raise error(
            f"shape {values.shape[1:]} a step",
            f"{field.shape} as in the table",
            "Derive the table from the data: gear_jax.datasets.table_spec(source).",
        )
    if not _castable(values.dtype, field.dtype):
        raise error(
            f"dtype {values.dtype}",
            f"something that {field.dtype} holds",
            "Derive the table from the data: gear_jax.datasets.table_spec(source).",
        )
    misfit = _misfit(values, field.dtype)
    if misfit is not None:
        step = int(np.flatnonzero(misfit.any(axis=tuple(range(1, misfit.ndim))))[0])
        got = values[step][misfit[step]][0] if values.ndim > 1 else values[step]
        wanted = f"finite numbers within {field.dtype}"
        raise error(f"{got} at step {step}", wanted, "Mend the step or leave the episode out.")
    return values


def _kind(dtype: np.dtype) -> int:
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), len(_KINDS))


def _castable(source: np.dtype, target: np.dtype) -> bool:
    return source.kind not in "OSUVMm" and _kind(source) <= _kind(target)


def _misfit(values: np.ndarray, target: np.dtype) -> np.ndarray | None:
    """Where values are not finite or leave the range of `target`, same shape as `values`; None: nowhere."""
    source = values.dtype
    if not values.size or source == np.bool_:
        return None
    if jnp.issubdtype(source, jnp.integer):
        if not jnp.issubdtype(target, jnp.integer):
            return None
        low, high = jnp.iinfo(target).min, jnp.iinfo(target).max
        if low <= int(values.min()) and int(values.max()) <= high:
            return None
        return (values < low) | (values > high)
    wrong = ~np.isfinite(values)
    if target.itemsize < source.itemsize:
        limit = float(jnp.finfo(target).max)
        wrong |= np.abs(values) > limit
    return wrong if wrong.any() else None


def zero_rows(binding: Binding, rows: int, steps: int) -> list[np.ndarray]:
    """One zeroed array `[rows, steps, *shape]` per field."""
    return [np.zeros((rows, steps, *field.shape), field.dtype) for field in binding.fields]
