import numpy as np

from gear_jax.selectors import LowestPriority
from gear_jax.testing.selectors import check_selector


def test_contract():
    check_selector(LowestPriority())


def test_lowest_first_zero_included_and_ties_go_to_the_lower_slot(draw):
    rng = np.random.default_rng(0)
    priority = rng.integers(0, 5, (4, 20)).astype(np.float32)
    selectable = rng.uniform(size=(4, 20)) < 0.7
    (slot, _, _), _ = draw(LowestPriority(), priority, selectable, size=30)
    there = np.flatnonzero(selectable)
    wanted = there[np.argsort(priority.reshape(-1)[there], kind="stable")][:30]
    np.testing.assert_array_equal(slot, wanted)


def test_a_negative_zero_is_a_zero(draw):
    (slot, _, _), _ = draw(LowestPriority(), [2, -0.0, 1, 0], size=4)
    np.testing.assert_array_equal(slot, [1, 3, 2, 0])
