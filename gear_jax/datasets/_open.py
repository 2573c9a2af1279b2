"""From a path or an id to a `Source`."""

import os
import pathlib
from typing import Any

from gear_jax._errors import type_error, value_error
from gear_jax.datasets._d4rl import D4RLSource
from gear_jax.datasets._episode import Source
from gear_jax.datasets._minari import MinariSource

_HDF5 = (".hdf5", ".h5", ".hdf")


def open_source(source: Any) -> Source:
    """Opens a dataset.

    Args:
      source: a `Source`; a Minari dataset id, folder or `minari.MinariDataset`; the path of a D4RL-style HDF5
        file.

    Raises:
      TypeError: anything else. A generator of episodes will not do: a dataset is read twice.
      ValueError: no such dataset, or a damaged one.
    """
    if isinstance(source, Source):
        return source
    if hasattr(source, "storage") and hasattr(source, "episode_indices"):
        return MinariSource(source)
    if not isinstance(source, str | os.PathLike):
        raise type_error(
            "source",
            got=type(source).__name__,
            wanted="a path, a Minari dataset id or a gear_jax.datasets.Source",
            fix="Subclass Source to read a format of your own: it is read twice, so a generator will not do.",
        )
    path = pathlib.Path(source)
    if path.is_file() or path.suffix in _HDF5:
        if path.name == "main_data.hdf5" and (path.parent / "metadata.json").is_file():
            return MinariSource(path.parent)
        if not path.exists():
            raise value_error(str(path), got="no such file", wanted="a D4RL-style HDF5 file", fix="Check the path.")
        return D4RLSource(path)
    return MinariSource(source)
