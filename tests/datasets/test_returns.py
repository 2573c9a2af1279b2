"""Return-to-go against an independent reference."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_jax.datasets import Episode, derive, return_to_go

REWARDS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40)


def reference(rewards, gamma, bootstrap):
    """The definition, term by term: sum over k of gamma^k r[t + k], and the bootstrap behind the end."""
    length = len(rewards)
    return [
        math.fsum([gamma ** (k - t) * rewards[k] for k in range(t, length)] + [gamma ** (length - t) * bootstrap])
        for t in range(length)
    ]


def episode(rewards, terminated=False, truncated=True, **columns):
    columns["reward"] = np.asarray(rewards)
    return Episode(columns, len(rewards), terminated, truncated, "memory", 0)


@given(REWARDS, st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.floats(-1e3, 1e3))
def test_equals_the_definition(rewards, gamma, bootstrap):
    got = return_to_go(np.asarray(rewards), gamma=gamma, bootstrap=bootstrap)
    assert got.shape == (len(rewards),) and got.dtype == np.float64
    np.testing.assert_allclose(got, reference(rewards, gamma, bootstrap), rtol=1e-9, atol=1e-9)


def test_float32_rewards_are_summed_in_float64():
    rewards = np.full(100_000, 0.1, np.float32)
    assert return_to_go(rewards)[0] == pytest.approx(100_000 * float(np.float32(0.1)), rel=1e-12)


def test_whole_number_and_boolean_rewards():
    np.testing.assert_array_equal(return_to_go(np.array([1, 1, 0])), [2, 1, 0])
    np.testing.assert_array_equal(return_to_go(np.array([True, False, True])), [2, 1, 1])


def test_one_step():
    np.testing.assert_array_equal(return_to_go(np.array([3.0]), gamma=0.5, bootstrap=4.0), [5.0])


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_a_discount_out_of_range_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma"):
        return_to_go(np.ones(3), gamma=gamma)


def test_the_bootstrap_counts_after_a_truncation():
    got = derive(episode([1.0, 2.0]), ["return_to_go"], gamma=0.5, bootstrap=8.0)
    np.testing.assert_allclose(got.columns["return_to_go"], [1 + 0.5 * (2 + 0.5 * 8), 2 + 0.5 * 8])


@pytest.mark.parametrize("truncated", [False, True])
def test_the_bootstrap_does_not_count_after_a_termination(truncated):
    got = derive(episode([1.0, 2.0], True, truncated), ["return_to_go"], bootstrap=8.0)
    np.testing.assert_array_equal(got.columns["return_to_go"], [3.0, 2.0])


def test_end_flags_are_kept_apart():
    got = derive(episode([0.0, 0.0, 0.0], False, True), ["terminated", "truncated", "timestep"]).columns
    np.testing.assert_array_equal(got["terminated"], [False, False, False])
    np.testing.assert_array_equal(got["truncated"], [False, False, True])
    np.testing.assert_array_equal(got["timestep"], [0, 1, 2])
    assert got["timestep"].dtype == np.int32


def test_only_what_was_asked_for_is_added():
    assert set(derive(episode([1.0]), ["reward"]).columns) == {"reward"}
