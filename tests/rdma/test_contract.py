"""Verbs keep the contract of a transport, on a real device, with real processes; see test_verbs.py."""

import os

import pytest

from gear_jax import transport
from gear_jax.testing import transports

# make test-rdma sets GEAR_JAX_RDMA=1: a missing device is then an error, not a skip.
if (why := transport.missing("verbs")) and os.environ.get("GEAR_JAX_RDMA") != "1":
    pytest.skip(why, allow_module_level=True)


@pytest.mark.parametrize("check", transports.CHECKS)
def test_verbs(check):
    transports.check(check, "verbs")
