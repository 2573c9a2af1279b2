"""Anchors: the step of a trajectory that a sample's windows are placed at."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import _random
from gear_jax._errors import value_error
from gear_jax.specs import ANCHORS, Window

ANCHOR_STREAM = 1
"""The words of a key that draw anchors (`gear_jax._random`); stream 0 draws slots."""


class Anchor(NamedTuple):
    """A rule for the anchor, checked against the windows.

    Attributes:
      kind: "uniform" (any step), "full" (any step at which every window lies inside the trajectory), "start", "end".
      low: the first step that the rule admits.
      min_length: the fewest steps a trajectory must have to be drawn; the rule admits L - min_length + 1 steps if it
        is "full".
    """

    kind: str
    low: int
    min_length: int


def make_anchor(kind: str, windows: Sequence[Window | None], steps: int) -> Anchor:
    """Checks a rule against the windows of a table of T = `steps`.

    Raises:
      ValueError: for an unknown rule, or if no trajectory of T steps could satisfy "full".
    """
    if kind not in ANCHORS:
        raise value_error("anchor", got=repr(kind), wanted=f"one of {ANCHORS}", fix='Write anchor="uniform".')
    if kind != "full":
        return Anchor(kind, 0, 1)
    placed = [(w.offset, w.length) for w in windows if w is not None and w.length is not None]
    low = max([0, *(-offset for offset, _ in placed)])
    end = max([1, *(offset + length for offset, length in placed)])
    if low + end > steps:
        raise value_error(
            "windows",
            got=f"windows that together reach over {low + end} steps, with anchor='full'",
            wanted=f"at most trajectory_length = {steps}",
            fix="Shorten them, or use anchor='uniform' with padding.",
        )
    return Anchor(kind, low, low + end)


def visible(window: Window | None, anchor: jax.Array, length: jax.Array, steps: int) -> jax.Array:
    """Which elements of a window are steps of the trajectory, `bool[B, W]`, as `ops.gather` says of what it reads.

    Args:
      window: where it lies; None: all T = `steps`.
      anchor, length: `int32[B]`, of each row.
      steps: T.
    """
    first, width = jnp.zeros_like(anchor), steps
    if window is not None and window.length is not None:
        # Farther than any step the sum would not fit.
        first, width = anchor + np.int32(np.clip(window.offset, -(2**30), 2**30)), window.length
    length = jnp.clip(length, 0, steps)
    begin, end = jnp.clip(first, 0, length), jnp.clip(first + width, 0, length)
    count = end - begin
    pad = "around" if window is None else window.pad
    element = {"around": begin - first, "head": width - count, "tail": jnp.zeros_like(count)}[pad]
    w = jnp.arange(width, dtype=jnp.int32)[None]
    return (w >= element[:, None]) & (w < (element + count)[:, None])


def draw_anchor(anchor: Anchor, key: jax.Array, lengths: jax.Array, steps: int) -> jax.Array:
    """Draws the step t of each row: `int32[B]` from lengths `int32[B]`, none above T = `steps`; 0 where
    the length is 0.

    "end" is the step behind the last one, t = L: a window of the last W steps has offset -W.
    """
    if anchor.kind == "start" or (anchor.kind != "end" and steps == 1):
        return jnp.zeros_like(lengths)
    if anchor.kind == "end":
        return lengths
    count = jnp.maximum(lengths - (anchor.min_length - 1), 1)
    step = _random.below(_random.words(key, ANCHOR_STREAM, lengths.shape[0])[:, 0], count)
    return jnp.where(lengths > 0, anchor.low + step, 0)
