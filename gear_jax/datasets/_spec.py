"""A table that fits a dataset."""

from typing import Any

import jax
import numpy as np

from gear_jax._errors import value_error
from gear_jax.datasets._episode import bad, lookup, map_leaves
from gear_jax.datasets._open import open_source
from gear_jax.datasets._returns import DERIVED_COLUMNS, derive
from gear_jax.specs import ColumnSpec, TableSpec

_FLOAT = ("reward", "return_to_go")  # whole-number rewards are common, and an accident


def table_spec(
    source: Any,
    capacity: int | None = None,
    columns: Any = None,
    *,
    trajectory_length: int | None = None,
    return_to_go: bool = True,
) -> TableSpec:
    """Derives a `TableSpec` from a dataset: shapes and dtypes of its first episode, the length of its
    longest.

    Args:
      source: as for `load`.
      capacity: C. None: exactly what the dataset needs.
      columns: as for `load`: a tree of dataset column names; the table gets its structure. A name of a nested
        column (a Dict or Tuple space) becomes a subtree. None: observation, action, reward and return_to_go.
      trajectory_length: T. None: the longest episode. A shorter one goes with `load(..., too_long="split")`.
      return_to_go: whether `columns=None` includes return_to_go.

    Returns:
      The spec. Dtypes are JAX's own for the file's (float64 becomes float32 unless x64 is on); rewards are
      floating.

    Raises:
      ValueError: the dataset is damaged or empty, or lacks a column.
    """
    source = open_source(source)
    if columns is None:
        names = ("observation", "action", "reward") + (("return_to_go",) if return_to_go else ())
        columns = {name: name for name in names}
    wanted = jax.tree.leaves(columns)
    stored = [name for name in wanted if name not in DERIVED_COLUMNS]
    first = next(source.episodes(stored), None)
    if first is None:
        raise value_error(source.name, got="no episodes", wanted="at least one", fix="Record some first.")
    first = derive(first, [name for name in wanted if name in DERIVED_COLUMNS])

    def column(name: str) -> Any:
        try:
            tree = lookup(first.columns, name)
        except KeyError:
            raise bad(
                first.source,
                first.id,
                name,
                got=f"no such column (there are {sorted(first.columns)})",
                wanted="a column",
                fix="Name an existing one in `columns`.",
            ) from None
        return map_leaves(lambda leaf: _spec(leaf, name), tree)

    lengths = [episode.length for episode in source.episodes(("reward",))]
    steps = trajectory_length or max(lengths)
    rows = sum(-(-length // steps) for length in lengths)
    return TableSpec(jax.tree.map(column, columns), trajectory_length=steps, capacity=capacity or rows)


def _spec(leaf: np.ndarray, name: str) -> ColumnSpec:
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))
    if name in _FLOAT and dtype.kind in "bui":
        dtype = np.dtype(np.float32)
    return ColumnSpec(leaf.shape[1:], dtype)
