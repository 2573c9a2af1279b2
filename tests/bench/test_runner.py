"""The processes, with the engine that every environment has. No test looks at how long something took."""

import json
import pathlib
import subprocess
import sys

import pytest

from gear_jax import bench
from gear_jax.bench import cli, runner
from gear_jax.bench.engines import ENGINES
from gear_jax.bench.workloads import workloads


@pytest.fixture
def small():
    return workloads(quick=True)["S3"]


def _run(workload, pythons, **options):
    return runner.run_workload(workload, pythons, True, options.get("rounds", 2), 0.0, lambda _: None)


def test_processes_check_and_time_every_row(small):
    found = _run(small, {"numpy": sys.executable})
    assert found["engines"]["numpy"]["numpy"]
    for row in small.rows:
        cell = found["rows"][row.name]["numpy"]
        assert cell["seconds"] == min(variant["seconds"] for variant in cell["variants"].values())
        assert all(len(variant["rounds"]) == 2 for variant in cell["variants"].values())


def test_a_missing_library_is_a_reason_and_not_an_error(small):
    missing = [name for name, (_, _, module) in ENGINES.items() if module == "reverb"]
    found = _run(small, {missing[0]: sys.executable}, rounds=1)
    assert all("not installed" in cells["reverb"]["unsupported"] for cells in found["rows"].values())


def test_an_interpreter_that_does_not_exist_is_a_reason():
    assert "cannot run" in runner.missing("numpy", "/no/such/python")


def test_too_little_memory_is_a_reason(small, monkeypatch):
    monkeypatch.setattr(runner, "_available_bytes", lambda: 10**6)
    found = _run(small, {"numpy": sys.executable}, rounds=1)
    assert "of memory are free" in found["rows"]["S3 add 1"]["numpy"]["unsupported"]


def test_a_process_that_dies_is_a_reason(small, tmp_path):
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "it broke" >&2\nexit 3\n')
    fake.chmod(0o755)
    found = _run(small, {"cpprb": str(fake)}, rounds=1)
    assert found["rows"]["S3 add 1"]["cpprb"] == {"failed": "it broke"}


def test_environments_of_one_folder_are_found(tmp_path):
    python = tmp_path / "bench-torchrl" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    found = runner.interpreters(["torchrl", "cpprb", "numpy"], str(tmp_path), {"numpy": "/x/python"})
    assert found == {"torchrl": str(python), "cpprb": sys.executable, "numpy": "/x/python"}


@pytest.mark.parametrize("reason", [{"unsupported": "not installed"}, {"failed": "it broke"}])
def test_an_engine_that_cannot_run_has_no_versions(monkeypatch, tmp_path, capsys, reason):
    def run_workload(workload, pythons, *rest):
        cells = {"numpy": {"unsupported": "cannot"}, "cpprb": reason}
        return {"engines": {"numpy": {"numpy": "2"}, "cpprb": reason}, "rows": {r.name: cells for r in workload.rows}}

    monkeypatch.setattr(runner, "run_workload", run_workload)
    out = tmp_path / "out.json"
    status = cli.run(["--quick", "--workloads", "S3", "--engines", "numpy,cpprb", "--json", str(out)])
    assert status == int("failed" in reason)
    found = json.loads(out.read_text())
    assert found["versions"] == {"numpy": {"numpy": "2"}}
    assert found["options"]["jax_cpu_enable_async_dispatch"]["gear_jax"] is False


def test_jax_dispatches_at_once_in_a_worker(tmp_path):
    check = (
        "import runpy, sys, jax; sys.argv[:] = sys.argv[1:]; main = runpy.run_path(sys.argv[0])['main']; "
        "assert main() == 0 and not jax.config.read('jax_cpu_enable_async_dispatch')"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, str(runner._HERE / "worker.py"), "gear_jax", "S3", "quick"],
        env=runner._environment("gear_jax"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--workloads", "S9"], "S1a,S1b,S2,S3,S4,S5"),
        (["--engines", ""], "gear_jax,flashbax"),
        (["--env", "numpy"], "ENGINE=PYTHON"),
        (["--env", "nothing=/x"], "ENGINE=PYTHON"),
    ],
)
def test_bad_arguments_say_what_is_wanted(argv, text, capsys):
    with pytest.raises(SystemExit) as status:
        cli.run(argv)
    assert status.value.code == 2 and text in capsys.readouterr().err


def test_the_command_writes_what_it_found(tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("out.json", "out.md")]
    argv = ["--quick", "--rounds", "1", "--seconds", "0.001", "--workloads", "S3", "--engines", "numpy"]
    assert bench.main([*argv, "--json", files[0], "--markdown", files[1]]) == 0
    assert "S3 add 128" in capsys.readouterr().out
    assert all("S3 sample 256" in pathlib.Path(name).read_text() for name in files)


def test_the_worker_needs_nothing_but_its_own_library():
    worker = str(runner._HERE / "worker.py")
    code = (
        "import runpy, sys; sys.modules['gear_jax'] = sys.modules['jax'] = None; "
        "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, worker, "numpy", "S3", "quick"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert '"versions"' in done.stdout
