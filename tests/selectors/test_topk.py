import numpy as np

from gear_jax.selectors import TopK
from gear_jax.testing.selectors import check_selector


def test_contract():
    check_selector(TopK())


def test_highest_first_and_ties_go_to_the_lower_slot(draw):
    rng = np.random.default_rng(0)
    priority = rng.integers(0, 5, (4, 20)).astype(np.float32)
    selectable = rng.uniform(size=(4, 20)) < 0.7
    (slot, probability, weight), _ = draw(TopK(), priority, selectable, size=30)
    flat = np.where(selectable & (priority > 0), priority, -1).reshape(-1)
    wanted = np.argsort(-flat, kind="stable")[:30]
    wanted = np.where(flat[wanted] > 0, wanted, -1)
    np.testing.assert_array_equal(slot, wanted)
    assert (probability == 1).all() and (weight == 1).all()


def test_the_surplus_is_marked_and_zero_is_never_drawn(draw):
    (slot, _, _), _ = draw(TopK(), [[0, 3, -0.0], [2, 0, 5]], size=8)
    np.testing.assert_array_equal(slot, [5, 1, 3, -1, -1, -1, -1, -1])


def test_partitions_do_not_matter(draw):
    priority = np.random.default_rng(1).uniform(size=24).astype(np.float32)
    slots = [draw(TopK(), priority.reshape(p, -1), size=10)[0][0] for p in (1, 4)]
    np.testing.assert_array_equal(*slots)
