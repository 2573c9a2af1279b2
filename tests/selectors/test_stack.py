import numpy as np
import pytest

from gear_jax.selectors import Stack
from gear_jax.testing.selectors import check_selector


@pytest.mark.parametrize("times", [1, 3])
def test_contract(times):
    check_selector(Stack(times))


@pytest.mark.parametrize("clock", [100, 50 + 2**32])
def test_the_newest_first_whatever_the_priorities(draw, clock):
    rng = np.random.default_rng(0)
    number = clock - 1 - rng.permutation(100)[:60].reshape(3, 20)
    selectable = rng.uniform(size=(3, 20)) < 0.6
    sequence, clock = (number % 2**32).astype(np.uint32), np.uint32(clock % 2**32)
    (slot, probability, weight), _ = draw(
        Stack(), rng.uniform(size=(3, 20)) < 0.5, selectable, size=20, sequence=sequence, clock=clock
    )
    there = np.flatnonzero(selectable)
    np.testing.assert_array_equal(slot, there[np.argsort(-number.reshape(-1)[there])][:20])
    assert (probability == 1).all() and (weight == 1).all()
