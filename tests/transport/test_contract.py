"""Each transport keeps the contract: real processes, over TCP and over shared memory."""

import signal

import pytest

from gear_jax import transport
from gear_jax.testing import transports
from gear_jax.testing._peers import Peers, pattern

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


def test_readers_that_are_killed_one_after_the_other():
    """UCX's own way to answer a read ends the process that answers, now and then."""

    def make(sizes, processes=2, **arguments):
        return Peers("ucx", sizes, processes, environment=WAYS["tcp"], **arguments)

    transports.check_killed_reader(make, kills=5)


def test_processes_of_one_host_read_each_other_directly():
    """The peer takes no part: it stands still meanwhile."""
    with Peers("ucx", (1 << 20,)) as peers:
        if peers.session._native.way(1) != "its memory directly":
            pytest.skip("this process may not trace its children")
        peers.signal(1, signal.SIGSTOP)
        try:
            assert (peers.session.read(1, 0, 0, 1 << 20) == pattern(1, 0, 1 << 20)).all()
        finally:
            peers.signal(1, signal.SIGCONT)
    for list_, way in (("tcp,self", "UCX"), ("^cma", "UCX"), ("^sysv,cuda_copy", "its memory directly")):
        with Peers("ucx", (1,), environment={"UCX_TLS": list_}) as peers:
            assert peers.session._native.way(1) == way, list_
