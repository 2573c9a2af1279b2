"""The behaviour policies: valid actions, the mixture, the same from the same generator."""

import numpy as np

OBSERVATION = np.linspace(-1.0, 1.0, 8)


def test_the_mixture(example):
    policies = example("_policies")
    rng = np.random.default_rng(0)
    drawn = [policies.draw_policy(rng).name for _ in range(400)]
    assert set(drawn) == {"random", "gait"}
    assert abs(drawn.count("random") / 400 - policies.RANDOM_SHARE) < 0.08


def test_actions_are_valid_and_reproducible(example):
    policies = example("_policies")
    for kind in (policies.RandomPolicy, policies.GaitPolicy):
        a, b = (kind(np.random.default_rng(3)) for _ in range(2))
        for _ in range(50):
            action = a(OBSERVATION)
            assert action.shape == (2,) and action.dtype == np.float32 and np.abs(action).max() <= 1
            np.testing.assert_array_equal(action, b(OBSERVATION))
