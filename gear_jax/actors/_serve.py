"""The learner's answers to what actors ask, all at once. No jax in here.

Shapes: B rows asked about, padded to a power of two.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gear_jax._errors import type_error, value_error
from gear_jax.actors import _columns, _wait
from gear_jax.actors._ring import Ring
from gear_jax.actors._writer import _checked


def serve(
    ring: Ring, learner: Any, policy: Callable[[Any], Any], timeout: float, least: int, linger: float
) -> tuple[int, int]:
    """See `Ingest.serve`. `learner`: the core's. Returns rows and actors answered."""
    if not ring.rows:
        fix = "Make the ring with ask= and answer=."
        raise value_error("serve", got="a ring without ask", wanted="one that answers", fix=fix)
    until = _wait.deadline("timeout", timeout)
    _wait.deadline("linger", linger)
    if not _wait.in_slices(lambda end: learner.await_questions(1, end), until, bool):
        return 0, 0
    if least > 1 and linger > 0:
        until = _wait.deadline("linger", linger)
        _wait.in_slices(lambda end: learner.await_questions(least, end), until, bool)
    questions = learner.questions()
    rows = sum(n for _, _, n in questions)
    if not rows:
        return 0, 0
    # New memory each time: what jax makes of a NumPy array may go on looking at it.
    observations = []
    for array in ring.ask.values():
        batch = np.zeros((_padded(rows), *array.shape[2:]), array.dtype)
        start = 0
        for lane, _, n in questions:
            batch[start : start + n] = array[lane, :n]
            start += n
        observations.append(batch)
    actions = _actions(ring, policy(_columns.unflatten(list(ring.ask), observations)), rows)
    start, answered = 0, 0
    for lane, asked, n in questions:
        for array, action in zip(ring.answer.values(), actions, strict=True):
            array[lane, :n] = action[start : start + n]
        start += n
        answered += learner.answer(lane, asked)
    return rows, answered


def _padded(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def _actions(ring: Ring, tree: Any, rows: int) -> list[np.ndarray]:
    names = list(ring.answer)
    found = dict(_columns.flatten("policy", tree))
    if list(found) != names:
        fix = "Return a tree like `answer`."
        raise value_error("policy's answer", got=f"{list(found)}", wanted=f"{names}", fix=fix)
    actions = []
    for name, array in ring.answer.items():
        x = np.asarray(found[name])
        if x.ndim == 0 or x.shape[0] < rows:
            fix = "Return an action for each row of what it was given."
            raise type_error(f"policy's answer[{name!r}]", got=f"shape {x.shape}", wanted=f"{rows} rows", fix=fix)
        x = x[:rows]
        actions.append(_checked("policy's answer", name, x, (rows, *array.shape[2:]), array.dtype))
    return actions


class Rate:
    """Lets something happen at most once in `seconds`."""

    def __init__(self, seconds: float):
        self._ns, self._last = int(seconds * 1e9), 0

    def due(self) -> bool:
        """Whether it is time again; if so, the next time is that much later."""
        now = time.monotonic_ns()
        if now - self._last < self._ns:
            return False
        self._last = now
        return True
