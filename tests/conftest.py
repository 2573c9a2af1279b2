"""The conditions that the whole suite runs under: eight devices, no implicit promotion of dtypes or ranks."""

import os

# Before jax starts its backend.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The examples are the same in every run, and a compilation in the midst of one is not slowness.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=50)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _no_checks(monkeypatch):
    """A test that wants `GEAR_JAX_CHECKS` sets it."""
    monkeypatch.delenv("GEAR_JAX_CHECKS", raising=False)


@pytest.fixture
def checks(monkeypatch):
    """Data-dependent faults are errors in this test."""
    monkeypatch.setenv("GEAR_JAX_CHECKS", "1")
