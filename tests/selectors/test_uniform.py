import numpy as np

from gear_jax.selectors import Uniform
from gear_jax.testing.selectors import check_selector


def test_contract():
    check_selector(Uniform())
    check_selector(Uniform(times=2))


def test_every_selectable_slot_alike_and_priorities_do_not_matter(draw, assert_drawn_by):
    rng = np.random.default_rng(0)
    selectable = rng.uniform(size=(3, 40)) < 0.4
    priority = rng.uniform(size=(3, 40)) * (rng.uniform(size=(3, 40)) < 0.5)
    (slot, probability, weight), _ = draw(Uniform(), priority, selectable, size=20_000)
    n = selectable.sum()
    assert_drawn_by(slot, selectable.reshape(-1) / n)
    np.testing.assert_allclose(probability, 1 / n, rtol=1e-6)
    assert (weight == 1).all()


def test_more_rows_than_there_are_are_drawn_with_replacement(draw):
    (slot, _, _), _ = draw(Uniform(), [1, 1, 1], size=64)
    assert set(slot) == {0, 1, 2}


def test_another_key_draws_others(draw):
    (first, _, _), _ = draw(Uniform(), np.ones((1, 100)), key=1)
    (second, _, _), _ = draw(Uniform(), np.ones((1, 100)), key=2)
    assert (first != second).any()
