import numpy as np
import pytest

import gear_jax as gear
from gear_jax.selectors import Queue
from gear_jax.testing.selectors import check_selector


@pytest.mark.parametrize("times", [1, 3])
def test_contract(times):
    check_selector(Queue(times))


@pytest.mark.parametrize("clock", [100, 50 + 2**32])
def test_the_oldest_first_whatever_the_priorities(draw, clock):
    rng = np.random.default_rng(0)
    number = clock - 1 - rng.permutation(100)[:60].reshape(3, 20)
    selectable = rng.uniform(size=(3, 20)) < 0.6
    sequence, clock = (number % 2**32).astype(np.uint32), np.uint32(clock % 2**32)
    (slot, probability, weight), _ = draw(
        Queue(), rng.uniform(size=(3, 20)) < 0.5, selectable, size=20, sequence=sequence, clock=clock
    )
    there = np.flatnonzero(selectable)
    np.testing.assert_array_equal(slot, there[np.argsort(number.reshape(-1)[there])][:20])
    assert (probability == 1).all() and (weight == 1).all()


def test_a_batch_holds_none_twice_however_often_it_may_be_drawn(draw):
    (slot, _, _), _ = draw(Queue(times=8), [1, 1, 1])
    np.testing.assert_array_equal(slot, [0, 1, 2, -1, -1, -1, -1, -1])


@pytest.mark.parametrize("times", [0, -1, 1.5, True])
def test_times_that_are_none(times):
    table = gear.TableSpec({"a": gear.ColumnSpec((), np.int32)}, 1, 4)
    with pytest.raises((TypeError, ValueError), match=r"selector\.times: got"):
        gear.make_replay(table, Queue(times))
