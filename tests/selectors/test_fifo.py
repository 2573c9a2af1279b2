import numpy as np
import pytest

from gear_jax.selectors import Fifo
from gear_jax.testing.selectors import check_selector


def test_contract():
    check_selector(Fifo())


# The second clock has wrapped round: some rows came before 2**32 and some after.
@pytest.mark.parametrize("clock", [100, 50 + 2**32, 2**32])
def test_the_oldest_first_whatever_the_priorities(draw, clock):
    rng = np.random.default_rng(0)
    number = clock - 1 - rng.permutation(100)[:60].reshape(3, 20)
    selectable = rng.uniform(size=(3, 20)) < 0.6
    sequence, clock = (number % 2**32).astype(np.uint32), np.uint32(clock % 2**32)
    (slot, probability, weight), _ = draw(
        Fifo(), rng.uniform(size=(3, 20)) < 0.5, selectable, size=20, sequence=sequence, clock=clock
    )
    there = np.flatnonzero(selectable)
    wanted = there[np.argsort(number.reshape(-1)[there])][:20]
    np.testing.assert_array_equal(slot, wanted)
    assert (probability == 1).all() and (weight == 1).all()


def test_nothing_is_consumed_and_the_surplus_is_marked(draw):
    (first, _, _), state = draw(Fifo(), [1, 1, 1])
    (second, _, _), _ = draw(Fifo(), [1, 1, 1], state=state, key=1)
    np.testing.assert_array_equal(first, [0, 1, 2, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(second, first)
