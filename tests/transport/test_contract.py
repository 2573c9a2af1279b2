"""Each transport keeps the contract: real processes, over TCP and over shared memory."""

import pytest

from gear_jax import transport
from gear_jax.testing import transports

WAYS = {
    "tcp": {"UCX_TLS": "tcp,self"},
    "same_host": {},
    "shared_memory": {"UCX_TLS": "posix,sysv,self"},
}


@pytest.fixture(autouse=True)
def ucx():
    if why := transport.missing("ucx"):
        pytest.skip(f"no UCX here: {why}")


@pytest.mark.cpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("check", transports.CHECKS)
def test_ucx(check, way):
    transports.check(check, "ucx", WAYS[way])
