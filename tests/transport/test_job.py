"""The processes of a job: what is refused, and how those of `jax.distributed` find each other."""

import sys
import textwrap

import pytest

from gear_jax.testing.processes import run_processes
from gear_jax.transport import Job, missing

ADDRESSES = (("a", 1), ("b", 2))
SECRET = b"s" * 16


@pytest.mark.parametrize(
    ("rank", "addresses", "secret", "match"),
    [
        (2, ADDRESSES, SECRET, "rank"),
        (-1, ADDRESSES, SECRET, "rank"),
        (0, (), SECRET, "rank"),
        (0, (("a", 0),), SECRET, "addresses"),
        (0, (("", 1),), SECRET, "addresses"),
        (0, (("a", 1), ("a", 1)), SECRET, "addresses"),
        (0, ADDRESSES, b"short", "secret"),
        (0, ADDRESSES, "a text of many letters", "secret"),
    ],
)
def test_fields_are_checked(rank, addresses, secret, match):
    with pytest.raises(ValueError, match=match):
        Job(rank, addresses, secret)


def test_the_secret_does_not_show():
    job = Job(1, [["a", 1], ("b", 2)], SECRET)
    assert job.addresses == ADDRESSES
    assert "sss" not in repr(job) and "sss" not in str(job)


PROGRAM = """
import sys, jax, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
coordinator, n, i = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(coordinator, n, i)
from gear_jax.transport import Job, Session
job = Job.current(host="127.0.0.1")
assert job.rank == i and len(job.addresses) == n and len(job.secret) == 32
with Session(job, [np.full(100, i, np.uint8)]) as session:
    for peer in range(n):
        assert (session.read(peer, 0, 0, 100) == peer).all()
    from jax.experimental import multihost_utils
    multihost_utils.sync_global_devices("read")
    print("all read")
"""


@pytest.mark.cpu
def test_the_job_of_jax_distributed(tmp_path):
    if why := missing("ucx"):
        pytest.skip(f"no UCX here: {why}")
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(program), "{coordinator}", "{processes}", "{process}"]
    for output in run_processes(command, 2, devices=1, seconds=120):
        assert "all read" in output
