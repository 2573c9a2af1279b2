import functools

import jax
import numpy as np
import pytest
from scipy import stats

from gear_jax.testing.selectors import make_index


@functools.cache
def _jitted(selector):
    return jax.jit(selector.select, static_argnums=3)


@pytest.fixture
def draw():
    """draw(selector, priority, selectable, ..., size=, key=, state=) -> (slot, probability, weight), state."""

    def run(selector, priority, selectable=True, *, size=8, key=0, state=None, **index):
        priority = np.atleast_2d(np.asarray(priority, np.float32))
        state = selector.init(jax.random.bits(jax.random.key(0), (4,), "uint32")) if state is None else state
        key = jax.random.key(key) if isinstance(key, int) else key
        index = make_index(selector, priority, selectable, **index)
        got, state = _jitted(selector)(state, index, key, size)
        return tuple(map(np.asarray, (got.slot, got.probability, selector.weigh(got)))), state

    return run


@pytest.fixture
def assert_drawn_by():
    """Chi-square of drawn slots against probabilities; a slot of probability 0 must not occur."""

    def check(slots, probability):
        count = np.bincount(slots, minlength=len(probability))
        wanted = len(slots) * np.asarray(probability, np.float64)
        assert count[wanted == 0].sum() == 0
        count, wanted = count[wanted > 0], wanted[wanted > 0]
        p_value = stats.chisquare(count, wanted * count.sum() / wanted.sum()).pvalue
        assert 1e-4 < p_value < 1 - 1e-6, p_value

    return check
