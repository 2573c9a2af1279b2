"""Checks of a batch against NumPy, done before anything is timed.

Shapes: B batch, W window, N stored trajectories.
"""

import dataclasses

import numpy as np

from .workloads import Workload

_CHUNK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Batch:
    """A sampled batch as NumPy arrays.

    Attributes:
        data: Columns [B, W, *shape].
        mask: bool[B, W], or None for a library that gives none.
        weight: Importance weights float[B], or None.
        placement: How a window is placed: "exact", as the workload asks; "within", anywhere inside a stored
            trajectory; "loose", any steps that are stored (windows may cross an end or repeat a step).
    """

    data: dict[str, np.ndarray]
    mask: np.ndarray | None = None
    weight: np.ndarray | None = None
    placement: str = "exact"


class WrongBatch(AssertionError):
    """A library returned something else than what was stored."""


def _require(condition, text: str) -> None:
    if not condition:
        raise WrongBatch(text)


def check_batch(workload: Workload, size: int, batch: Batch, known: int, spread: bool = True) -> np.ndarray:
    """Checks shapes, placement, padding and every byte of a batch.

    Args:
        workload: What is stored.
        size: B.
        batch: The batch.
        known: Trajectories 0..known-1 may be drawn.
        spread: Whether all are in the table, once each, so that a batch must hold many different ones.

    Returns:
        The trajectories drawn, int64[B].

    Raises:
        WrongBatch: Something differs; the text names what.
    """
    width = workload.window or workload.steps
    for column in workload.columns:
        _require(column.name in batch.data, f"column {column.name!r} is missing")
        got, want = batch.data[column.name], (size, width, *column.shape)
        _require(got.shape == want, f"column {column.name!r} has shape {got.shape}, not {want}")
        _require(got.dtype == np.dtype(column.dtype), f"column {column.name!r} is {got.dtype}, not {column.dtype}")
    codes = workload.codes(batch.data)
    real = np.ones((size, width), bool)
    if workload.window and batch.placement == "exact":
        real = _check_mask(workload, codes, batch.mask)
    ids, steps = np.divmod(codes, workload.steps)
    _require(ids[real].min() >= 0 and ids[real].max() < known, "a step was never stored")
    drawn = ids[:, -1]
    if batch.placement != "loose":
        _require((ids == drawn[:, None])[real].all(), "a row mixes two trajectories")
        consecutive = np.diff(steps, axis=1)[real[:, 1:] & real[:, :-1]]
        _require((consecutive == 1).all(), "steps are not consecutive")
    if batch.placement == "exact":
        _require(
            (steps[:, -1] == workload.lengths(drawn) - 1).all(),
            "a window does not end at its trajectory's end",
        )
    _check_bytes(workload, batch, codes, real)
    if spread:
        _check_spread(drawn, known)
    return drawn


def _check_mask(workload: Workload, codes: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """The real steps bool[B, W]: the mask must be true exactly at the last min(L, W) of them."""
    size, width = codes.shape
    lengths = workload.lengths(codes[:, -1] // workload.steps)
    real = np.arange(width) >= width - np.minimum(lengths, width)[:, None]
    if mask is not None:
        _require(mask.shape == (size, width) and (mask == real).all(), "the mask is not that of the real steps")
    return real


def _check_bytes(workload: Workload, batch: Batch, codes: np.ndarray, real: np.ndarray) -> None:
    size, width = codes.shape
    rows = max(1, _CHUNK_BYTES // (workload.step_bytes * width))
    for start in range(0, size, rows):
        part = slice(start, start + rows)
        for column in workload.columns:
            want = workload.values(column, np.where(real[part], codes[part], 0))
            want[~real[part]] = 0
            same = np.array_equal(batch.data[column.name][part], want)
            _require(same, f"column {column.name!r}, rows {start}..: not the bytes that were stored")


def _check_spread(drawn: np.ndarray, known: int) -> None:
    expected = known * (1 - (1 - 1 / known) ** len(drawn))
    distinct = len(np.unique(drawn))
    _require(distinct >= 0.5 * expected, f"{distinct} different trajectories; about {expected:.0f} expected")


def check_priorities(favoured: np.ndarray, drawn: np.ndarray, weight: np.ndarray | None) -> None:
    """Checks a batch drawn after `favoured` int64[F] alone were given a priority that is not tiny.

    Args:
        favoured: Trajectories with priority 1.
        drawn: Trajectories drawn, int64[B].
        weight: Their importance weights float[B]: all favoured ones equal, every other one larger.
    """
    chosen = np.isin(drawn, favoured)
    _require(
        chosen.mean() >= 0.85,
        f"{chosen.mean():.0%} of the draws have 94 % of the mass: priorities are ignored",
    )
    if weight is not None and len(weight):
        inside = weight[chosen]
        _require(np.allclose(inside, inside[0], rtol=1e-3), "equal priorities have different weights")
        if (~chosen).any():
            _require(weight[~chosen].min() > inside.max(), "a rarer trajectory has a smaller weight")
