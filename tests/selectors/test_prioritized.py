import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax.selectors import Prioritized
from gear_jax.testing.selectors import check_selector


@pytest.mark.parametrize("selector", [Prioritized(), Prioritized(alpha=0, beta=1)])
def test_contract(selector):
    check_selector(selector)


@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.4), (1.0, 1.0), (0.0, 0.5), (2.0, 0.0)])
def test_draws_probabilities_and_weights_follow_the_formulas(draw, assert_drawn_by, alpha, beta):
    rng = np.random.default_rng(0)
    priority = (rng.uniform(0.2, 4, (3, 33)) * (rng.uniform(size=(3, 33)) < 0.7)).astype(np.float32)
    selectable = rng.uniform(size=(3, 33)) < 0.6
    (slot, probability, weight), _ = draw(Prioritized(alpha, beta), priority, selectable, size=20_000)
    mass = np.where(selectable & (priority > 0), priority.astype(np.float64) ** alpha, 0).reshape(-1)
    wanted = mass / mass.sum()
    assert_drawn_by(slot, wanted)
    np.testing.assert_allclose(probability, wanted[slot], rtol=1e-5)
    weights = ((mass > 0).sum() * wanted[slot]) ** -beta
    np.testing.assert_allclose(weight, weights / weights.max(), rtol=1e-5)


def test_a_zero_is_never_drawn_even_if_nothing_else_is_there(draw):
    (slot, probability, weight), _ = draw(Prioritized(), [0, 0, 0])
    assert (slot == -1).all() and (probability == 0).all() and (weight == 0).all()
    (slot, _, _), _ = draw(Prioritized(alpha=0), [0, 1e-3, 0, 0], size=64)
    assert set(slot) == {1}


def test_extreme_priorities_neither_overflow_nor_vanish(draw):
    big = np.finfo(np.float32).max
    (slot, probability, weight), _ = draw(Prioritized(alpha=2.0), [big, big, 0], size=64)
    assert set(slot) == {0, 1} and (probability == 0.5).all() and (weight == 1).all()
    (slot, probability, _), _ = draw(Prioritized(alpha=2.0), [0, 1e-37, 0], size=64)
    assert set(slot) == {1} and (probability == 1).all()
    (slot, _, weight), _ = draw(Prioritized(alpha=1.0, beta=1.0), [1e-37, big, 1.0], size=64)
    assert np.isfinite(weight).all() and set(slot) == {1}


def test_mass_applies_alpha_once_to_what_is_stored():
    mass = Prioritized(alpha=0.5).mass(jnp.asarray([4.0, 9.0, 0.0], jnp.float32), jnp.ones(3, bool))
    np.testing.assert_allclose(mass, [2, 3, 0], rtol=1e-6)


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), "0.6", None])
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_bad_settings(name, bad):
    with pytest.raises((ValueError, TypeError), match=rf"Prioritized\.{name}: got .*wanted .*Prioritized\("):
        Prioritized(**{name: bad})


def test_weights_over_many_orders_of_magnitude(draw):
    priority = np.geomspace(1e-6, 1, 64).astype(np.float32)
    (slot, probability, weight), _ = draw(Prioritized(alpha=0.5, beta=1.0, stratified=True), priority, size=100_000)
    wanted = probability.astype(np.float64).min() / probability
    assert len(set(slot)) == 64 and weight.max() == 1
    np.testing.assert_allclose(weight, wanted, rtol=1e-5)
