"""From what Minari stored to NumPy: nested spaces, fixed-size lists, JPEG frames."""

import io
import math
from typing import Any

import numpy as np

from gear_jax.datasets._episode import DatasetError, bad, require


def decode_hdf5(path: str, file: Any, episode: int, name: str, space: Any, jpeg: bool) -> Any:
    """Reads one column of one episode from Minari's HDF5.

    Args:
      path: the file's name, for errors.
      file: the open file.
      episode: the episode's number.
      name: "observations", "actions", "rewards", "terminations" or "truncations".
      space: the Gymnasium space of the column; None: one number per step.
      jpeg: frames are stored as JPEG.

    Returns:
      A nested dict or tuple of arrays, `[rows, *shape]`.
    """
    group = file.get(f"episode_{episode}")
    if group is None:
        raise bad(
            path,
            episode,
            name,
            got="no such episode",
            wanted=f"a group 'episode_{episode}', as metadata.json says",
            fix="The recording broke off: record or download the dataset again.",
        )
    return _hdf5_node(_Place(path, episode, name), group, name, space, jpeg)


def decode_arrow(path: str, episode: int, name: str, values: Any, space: Any, jpeg: bool) -> Any:
    """Turns one Arrow column of one episode, a `pyarrow.Array`, into arrays; see `decode_hdf5`."""
    return _arrow_node(_Place(path, episode, name), values, space, jpeg)


class _Place:
    """Where we are, for error messages."""

    def __init__(self, path: str, episode: int, column: str):
        self.path, self.episode, self.column = path, episode, column

    def child(self, key: Any) -> "_Place":
        return _Place(self.path, self.episode, f"{self.column}/{key}")

    def error(self, got: object, wanted: object, fix: str = "Record or download the dataset again.") -> DatasetError:
        return bad(self.path, self.episode, self.column, got=got, wanted=wanted, fix=fix)


def _children(space: Any) -> dict[Any, Any] | None:
    """Sub-spaces by key (Dict) or position (Tuple); None for a leaf."""
    spaces = require("gymnasium").spaces
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    if isinstance(space, spaces.Tuple):
        return dict(enumerate(space.spaces))
    return None


def _assemble(space: Any, parts: dict[Any, Any]) -> Any:
    return parts if isinstance(space, require("gymnasium").spaces.Dict) else tuple(parts.values())


def _hdf5_node(place: _Place, group: Any, key: str, space: Any, jpeg: bool) -> Any:
    node = group.get(key)
    if node is None:
        raise place.error(f"no such column (there are {list(group)})", "a column of that name")
    children = _children(space)
    is_group = hasattr(node, "keys")
    if is_group != (children is not None):
        raise place.error("a group" if is_group else "a dataset", f"what the space {space} stores")
    if children is not None:
        prefix = "" if isinstance(space, require("gymnasium").spaces.Dict) else "_index_"
        parts = {k: _hdf5_node(place.child(k), node, f"{prefix}{k}", s, jpeg) for k, s in children.items()}
        return _assemble(space, parts)
    try:
        values = node[()]
    except (OSError, RuntimeError) as error:
        raise place.error(f"unreadable ({error})", "a complete column") from error
    if jpeg and _is_image(space):
        return _frames(place, [bytes(row) for row in values], space)
    return _require_shape(place, np.asarray(values), space)


def _arrow_node(place: _Place, values: Any, space: Any, jpeg: bool) -> Any:
    types = require("pyarrow").types
    if values.null_count:
        raise place.error(f"{values.null_count} missing values", "a value for every step")
    children = _children(space)
    if children is not None:
        if not types.is_struct(values.type):
            raise place.error(str(values.type), "a struct, as the space says")
        have = {field.name for field in values.type}
        parts = {}
        for key, sub in children.items():
            if str(key) not in have:
                raise place.child(key).error(f"no such column (there are {sorted(have)})", "a column of that name")
            parts[key] = _arrow_node(place.child(key), values.field(str(key)), sub, jpeg)
        return _assemble(space, parts)
    if jpeg and _is_image(space):
        return _frames(place, values.to_pylist(), space)
    if types.is_fixed_size_list(values.type):
        flat = values.flatten()
        if flat.null_count:
            raise place.error(f"{flat.null_count} missing values", "a value for every step")
        shape = getattr(space, "shape", None)
        if shape is None or math.prod(shape) != values.type.list_size:
            raise place.error(f"{values.type.list_size} values a step", f"the shape {shape} of the space")
        return flat.to_numpy(zero_copy_only=False).reshape(len(values), *shape)
    if types.is_list(values.type) or types.is_large_list(values.type):
        lengths = sorted({len(row) for row in values.to_pylist()})
        raise place.error(f"rows of {lengths} values (ragged)", "the same number of values at every step")
    if not (types.is_integer(values.type) or types.is_floating(values.type) or types.is_boolean(values.type)):
        raise place.error(str(values.type), "numbers", "Leave this column out with `columns`.")
    return _require_shape(place, values.to_numpy(zero_copy_only=False), space)


def _require_shape(place: _Place, values: np.ndarray, space: Any) -> np.ndarray:
    """Checks a leaf against its space's shape (None: flags and rewards, checked by their own rules)."""
    if values.dtype.kind not in "buifc":
        ragged = values.dtype.kind == "O"
        raise place.error(
            "rows of different lengths or text (ragged)" if ragged else str(values.dtype),
            "numbers of one shape",
            "Leave this column out with `columns`, or record it as a Box.",
        )
    shape = getattr(space, "shape", None)
    if not values.ndim or (shape is not None and values.shape[1:] != tuple(shape)):
        raise place.error(f"shape {values.shape[1:]} a step", f"the shape {shape} of the space")
    return values


def _is_image(space: Any) -> bool:
    return space is not None and bool(require("minari.dataset.minari_storage").is_image_space(space))


def _frames(place: _Place, frames: list[bytes], space: Any) -> np.ndarray:
    image = require("PIL.Image")
    result = np.empty((len(frames), *space.shape), np.uint8)
    for t, frame in enumerate(frames):
        try:
            decoded = np.asarray(image.open(io.BytesIO(frame)))
        except (OSError, ValueError) as error:
            raise place.error(f"no image at step {t} ({error})", "a JPEG frame") from error
        if decoded.shape != result.shape[1:]:
            raise place.error(f"a frame of shape {decoded.shape} at step {t}", f"the shape {space.shape} of the space")
        result[t] = decoded
    return result
