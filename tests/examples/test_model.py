"""The Decision Transformer: who may see what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

B, K, OBSERVATION, ACTION = 3, 4, 5, 2


def make_model(module, **options):
    config = module.ModelConfig(OBSERVATION, ACTION, K, episode_steps=20, width=16, layers=2, heads=2, **options)
    return module.DecisionTransformer(config, nnx.Rngs(0))


@pytest.fixture
def model(example):
    return make_model(example("_model"))


@pytest.fixture
def window():
    keys = jax.random.split(jax.random.key(1), 3)
    return {
        "return_to_go": jax.random.normal(keys[0], (B, K)),
        "observation": jax.random.normal(keys[1], (B, K, OBSERVATION)),
        "action": jax.random.normal(keys[2], (B, K, ACTION)),
        "timestep": jnp.tile(jnp.arange(K, dtype=jnp.int32), (B, 1)),
        "mask": jnp.ones((B, K), bool),
    }


def changed(model, window, name, step):
    """Which steps' predictions change when one step of one argument does."""
    other = {**window, name: window[name].at[:, step].add(1)}
    return ~np.isclose(model(**window), model(**other), atol=1e-6).all(axis=(0, 2))


def test_predictions_are_actions(model, window):
    predicted = model(**window)
    assert predicted.shape == (B, K, ACTION) and predicted.dtype == jnp.float32
    assert np.abs(predicted).max() < 1


def test_blocks_in_bfloat16_predict_nearly_the_same(example, window):
    module = example("_model")
    exact, coarse = make_model(module), make_model(module, compute="bfloat16")
    predicted = coarse(**window)
    assert predicted.dtype == jnp.float32
    np.testing.assert_allclose(predicted, exact(**window), atol=0.05)
    assert (np.asarray(predicted) != np.asarray(exact(**window))).any()


@pytest.mark.parametrize("name", ["return_to_go", "observation", "timestep"])
def test_a_step_is_seen_by_itself_and_after(model, window, name):
    assert changed(model, window, name, 1).tolist() == [False, True, True, True]


def test_an_action_is_seen_only_after(model, window):
    assert changed(model, window, "action", 1).tolist() == [False, False, True, True]


@pytest.mark.parametrize("name", ["return_to_go", "observation", "action"])
def test_padding_is_not_seen(model, window, name):
    window["mask"] = window["mask"].at[:, :2].set(False)
    assert not changed(model, window, name, 1)[2:].any()


def test_a_window_of_padding_is_finite(model, window):
    window["mask"] = jnp.zeros((B, K), bool)
    assert np.isfinite(model(**window)).all()


def test_a_clone_does_not_see_the_return(example, window):
    model = make_model(example("_model"), conditioned=False)
    assert not changed(model, window, "return_to_go", 1).any()
    assert changed(model, window, "observation", 1).any()
