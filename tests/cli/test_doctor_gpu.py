"""`doctor` on machines with a GPU that are made up, and what it measures on a real one."""

import importlib.metadata
import json
import resource
from types import SimpleNamespace

import pytest

from gear_jax import _cuda, _host_memory, _native, cli
from gear_jax._host_memory import GIB, LIMIT
from gear_jax.cli import _doctor, _doctor_gpu, _doctor_rdma, _doctor_transport, _trial

H100 = _cuda.Device("NVIDIA H100", (9, 0), True, True)


@pytest.fixture
def machine(monkeypatch):
    """A machine with one H100 where all is well: the settings of the test change it."""
    set_up = SimpleNamespace(devices=[H100], cuda=13000, runtime=13000, plugins={"jax-cuda13-plugin": "0.11.2"})
    set_up.trial = None, json.dumps({"version": "PJRT C API\ncuda 13000", "seconds": 0.16})
    set_up.environ = []

    def version(name):
        if name not in set_up.plugins:
            raise importlib.metadata.PackageNotFoundError(name)
        return set_up.plugins[name]

    def devices(driver):
        if isinstance(set_up.devices, Exception):
            raise set_up.devices
        return set_up.devices

    def run(code, **environ):
        set_up.environ.append(environ)
        return set_up.trial

    library = SimpleNamespace(runtime_version=lambda: set_up.runtime, registrations=dict, __file__="x")
    monkeypatch.setattr(_cuda, "library", object)
    monkeypatch.setattr(_cuda, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(_cuda, "supported_cuda", lambda driver: set_up.cuda)
    monkeypatch.setattr(_cuda, "devices", devices)
    monkeypatch.setattr(_native, "load", lambda platform: library if set_up.runtime else None)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(_trial, "run", run)
    monkeypatch.setattr(_host_memory, "available", lambda: 200 * GIB)
    monkeypatch.setattr(_host_memory, "groups", list)
    monkeypatch.setattr(_doctor_rdma, "report", lambda: [("devices", "none")])
    monkeypatch.setattr(_doctor_transport, "report", lambda: ([("ucx", "none")], None))
    monkeypatch.delenv(LIMIT, raising=False)
    return set_up


def report():
    rows, problem, tried = _doctor_gpu.report()
    return dict(rows), problem, tried


def test_all_is_well(machine, monkeypatch):
    monkeypatch.setattr(_host_memory, "groups", lambda: [_host_memory.Group("/sys/fs/cgroup/x", 128 * GIB, 100 * GIB)])
    rows, problem, tried = report()
    assert problem is None and tried
    assert rows == {
        "driver": "580.65.06, for CUDA up to 13.0",
        "GPU 0": "NVIDIA H100, compute capability 9.0: its kernels reach page-locked host memory",
        "copy engines": "gathers of large windows, called outside of programs, may use them",
        "pinned pool": f"64 GiB for each GPU of a process (default; {LIMIT} sets it)",
        "free memory": "200 GiB that could be page-locked",
        "container limit": "128 GiB in all, 100 GiB left: /sys/fs/cgroup/x",
        "RLIMIT_MEMLOCK": rows["RLIMIT_MEMLOCK"],
        "jax": "jax-cuda13-plugin 0.11.2",
        "jax's CUDA": "PJRT C API cuda 13000",
        "page-locking": "1.7 GB/s: a table of 64 GiB takes 41 s to make",
    }
    assert machine.environ == [{"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cuda": 12060, "runtime": 12090}, "CUDA driver: got 580.65.06, for CUDA up to 12.6,"),
        ({"runtime": 12060}, "CUDA library of gear_jax: got one for CUDA 12.6, wanted one for CUDA 12.8"),
        ({"cuda": 12060, "runtime": None}, "CUDA driver: got 580.65.06, for CUDA up to 12.6"),
    ],
)
def test_copy_engines_that_need_more_are_no_fault(machine, change, said):
    vars(machine).update(change)
    rows, problem, _ = report()
    assert rows["copy engines"].startswith(said) and "kernels do all gathers" in rows["copy engines"]
    assert problem is None


def test_settings_of_memory(machine, monkeypatch):
    monkeypatch.setenv(LIMIT, "200")
    limited = "8 MiB: CUDA's allocations do not count, RDMA's do"
    for soft, said in ((8 << 20, limited), (resource.RLIM_INFINITY, "unlimited")):
        monkeypatch.setattr(resource, "getrlimit", lambda what, soft=soft: (soft, soft))
        rows, _, _ = report()
        assert rows["RLIMIT_MEMLOCK"] == said
    assert f"200 GiB for each GPU of a process ({LIMIT}=200;" in rows["pinned pool"]


def test_without_a_driver(machine, monkeypatch):
    monkeypatch.setattr(_cuda, "library", lambda: None)
    assert _doctor_gpu.report() == ([("GPU", "none: this machine has no NVIDIA driver")], None, False)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cuda": 12040}, r"CUDA driver: got 580.65.06, for CUDA up to 12.4, wanted one for CUDA 13"),
        ({"devices": []}, "the NVIDIA driver sees no GPU"),
        ({"devices": [_cuda.Device("Old", (2, 0), False, True)]}, "GPU Old: got no mapped host memory"),
        ({"devices": _cuda.DriverError("cuInit: the CUDA driver says 999")}, "the CUDA driver says 999"),
        ({"trial": ("RuntimeError: no such luck", "")}, "RuntimeError: no such luck"),
    ],
)
def test_what_does_not_work(machine, capsys, monkeypatch, change, problem):
    vars(machine).update(change)
    _, said, tried = report()
    assert problem in (said or "") and tried == ("trial" in change)
    monkeypatch.setattr(_doctor, "_cpu_problem", lambda: None)
    assert cli.main(["doctor"]) == 1
    assert "The GPU path does NOT work: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"plugins": {}}, "without CUDA: `python -m pip install 'jax[cuda13]'`"),
        ({"plugins": {}, "cuda": 12090}, "'jax[cuda12]'"),
        ({"runtime": None}, "jax-cuda13-plugin"),
        ({"plugins": {}, "cuda": 12040}, "'jax[cuda12]'"),
    ],
)
def test_what_nobody_has_set_up_is_no_fault(machine, change, said):
    vars(machine).update(change)
    rows, problem, tried = report()
    assert said in rows["jax"] and problem is None and not tried


@pytest.mark.parametrize("said", ["", "no json", json.dumps({"version": "x", "seconds": -0.1})])
def test_a_speed_that_was_not_measured(machine, said):
    machine.trial = None, said
    rows, problem, tried = report()
    assert "page-locking" not in rows and problem is None and tried


@pytest.mark.gpu
def test_this_machine(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    parts = "page-locking", "copy engines", "pinned pool", "RLIMIT_MEMLOCK"
    for part in ("The GPU path works: a table in pinned_host", *parts):
        assert part in text
