"""What `doctor` says of remote reads."""

import pytest

from gear_jax import transport
from gear_jax.cli import _doctor_transport


def lines():
    rows, problem = _doctor_transport.report()
    return dict(rows), problem


def test_two_processes_read_each_other():
    if why := transport.missing("ucx"):
        pytest.skip(f"no UCX here: {why}")
    rows, problem = lines()
    assert problem is None
    assert rows["ucx"].startswith("UCX 1.")
    assert "read each other by" in rows["two processes here"]


def test_where_there_is_none_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(transport, "missing", lambda name: f"{name}: got none, wanted one. Install it.")
    monkeypatch.setattr(_doctor_transport, "_trial", lambda name: pytest.fail("tried"))
    rows, problem = lines()
    assert problem is None
    assert "Install it" in rows["ucx"] and "gear_jax[rdma]" in rows["would be used"]


def test_a_trial_that_fails_is_a_problem(monkeypatch):
    def fail(*args, **options):
        raise transport.TransportError("no such luck\nand more")

    monkeypatch.setattr(transport, "missing", lambda name: "")
    monkeypatch.setattr(_doctor_transport, "Peers", fail)
    rows, problem = lines()
    assert problem == f"{transport.KINDS[0]}: no such luck"
    assert rows["two processes here"] == "do NOT read each other: no such luck"
