"""The benchmark of ingest: it runs, checks what it measures, and judges rightly."""

import json
import subprocess
import sys

import jax
import pytest

from gear_jax import _cuda, _native
from gear_jax.bench import runner
from gear_jax.bench.ingest import cli, copies, source

SETTINGS = {"actors": 2, "slots": 2, "nice": 1, "seconds": 0.4, "quick": True, "copy": False}


@pytest.mark.parametrize("copy", [False, True])
def test_ours_runs(copy):
    if jax.default_backend() == "gpu":
        pytest.importorskip("cupy")
    words = [sys.executable, "-m", "gear_jax.bench.ingest.ours", json.dumps({**SETTINGS, "copy": copy})]
    environment = runner._environment("gear_jax")
    environment["JAX_PLATFORMS"] = "cuda" if jax.default_backend() == "gpu" else "cpu"
    run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["rate"] > 0 and found["full"] > 0 and min(found["samples"]) > 0
    assert all(0 < a <= b for a, b in zip(found["p50"], found["p99"], strict=True))


def test_actors_write_different_trajectories():
    first, second = source.trajectories(0), source.trajectories(1)
    assert first["frames"].shape == (source.EACH, 20, 84, 84, 4)
    assert not set(first["action"].ravel()) & set(second["action"].ravel())


@pytest.mark.gpu
def test_cuda_memcpy():
    pytest.importorskip("cupy")
    found = copies.gpu_rates(quick=True)
    assert found.keys() == {"to the GPU", "from the GPU"} and min(found.values()) > 1e9


def test_a_gpu_is_measured_where_there_is_one(monkeypatch):
    def gpu(driver, devices=(), library=None, cupy=False):
        monkeypatch.setattr(_cuda, "library", lambda: driver)
        monkeypatch.setattr(_cuda, "devices", lambda driver: list(devices))
        monkeypatch.setattr(_native, "load", lambda platform: library)
        monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object() if cupy else None)
        problems = []
        return cli._gpu(problems), problems

    assert gpu(None) == gpu(object()) == (False, [])
    assert gpu(object(), [0], object(), True) == (True, [])
    found, (problem,) = gpu(object(), [0])
    assert not found and "without a build with GEAR_JAX_CUDA=ON and CuPy: pip install" in problem
    monkeypatch.undo()
    monkeypatch.setattr(_cuda, "library", object)

    def refuse(driver):
        raise _cuda.DriverError("nvidia-smi should work first")

    monkeypatch.setattr(_cuda, "devices", refuse)
    problems = []
    assert not cli._gpu(problems) and problems == ["the GPU is not measured: nvidia-smi should work first"]


def test_what_a_round_runs(monkeypatch):
    ran = []
    monkeypatch.setattr(copies, "rates", lambda seconds, quick: {"1 thread": 1.0})
    monkeypatch.setattr(copies, "gpu_rates", lambda quick: {"to the GPU": 2.0})
    monkeypatch.setattr(cli, "_process", lambda name, words, problems: ran.append((name, json.loads(words[-1]))))
    args = cli.parser().parse_args(["--quick"])
    assert cli._round(args, cli.OURS[:1], None, []).keys() == {"memcpy", "gear_jax"}
    assert cli._round(args, cli.OURS, None, []).keys() == {"memcpy", "cudaMemcpy", *cli.OURS}
    copied = [(name, settings["copy"]) for name, settings in ran[1:]]
    assert copied == [("gear_jax", False), ("gear_jax GPU", False), ("gear_jax GPU copy=True", True)]


def test_processes_of_the_gpu_run_there():
    show = "import json, os; print(json.dumps({'platforms': os.environ['JAX_PLATFORMS']}))"
    for name, platform in (("gear_jax", "cpu"), ("gear_jax GPU", "cuda"), ("gear_jax GPU copy=True", "cuda")):
        assert cli._process(name, [sys.executable, "-c", show], []) == {"platforms": platform}


def test_medians_and_verdicts():
    def found(rate, reverb, busy):
        ours = {"rate": rate, "full": 2 * rate, "samples": [9, 9], "p50": [1e-3, 1e-3], "p99": [2e-3, busy]}
        return {
            "memcpy": {"1 thread": 10e9, "2 threads": 16e9}, "gear_jax": ours, "reverb trajectory": {"rate": reverb},
            "reverb step": None,
        }  # fmt: skip

    result = {"medians": cli._medians([found(5e9, 1e9, 3e-3), found(6e9, 2e9, 3e-3), found(9e9, 1.8e9, 9e-3)])}
    lines = {line[0]: line[1:] for line in cli._table(result)[1:]}
    assert lines["gear_jax / reverb"] == ["3.3", ">= 3", "pass"]
    assert lines["gear_jax / memcpy 1 thread"] == ["0.60", ">= 0.5", "pass"]
    assert lines["gear_jax / memcpy 2 threads"] == ["0.38", ">= 0.5", "FAIL"]
    assert lines["p99 of a sample of 64, with ingest / idle"] == ["3.0 / 2.0 ms = 1.50", "<= 2", "pass"]
    slow = cli._table({"medians": cli._medians([{**found(4e9, 2e9, 5e-3)}])})
    assert [line[3] for line in slow if line[2]] == ["verdict", "FAIL", "FAIL", "FAIL", "FAIL"]
    gpu = {"gear_jax GPU": found(3e9, 1e9, 6e-3)["gear_jax"], "cudaMemcpy": {"to the GPU": 50e9, "from the GPU": 49e9}}
    lines = {line[0]: line[1:] for line in cli._table({"medians": cli._medians([{**found(4e9, 2e9, 3e-3), **gpu}])})}
    assert lines["gear_jax, a drain of a full ring, GB/s"][0] == "8.00"
    assert lines["gear_jax GPU, GB/s"][0] == "3.00" and lines["gear_jax GPU, a drain of a full ring, GB/s"][0] == "6.00"
    assert lines["cudaMemcpy to the GPU, GB/s"][0] == "50.00" and lines["cudaMemcpy from the GPU, GB/s"][0] == "49.00"
    assert lines["p99 of a sample of 64, with ingest / idle, GPU"] == ["6.0 / 2.0 ms = 3.00", "<= 2", "FAIL"]
    assert lines["p99 of a sample of 64, with ingest / idle"][2] == "pass"
    alone = {"memcpy": {"1 thread": 10e9, "2 threads": 16e9}, "gear_jax": None}
    assert [line[0] for line in cli._table({"medians": cli._medians([alone])})[1:]] == [
        "memcpy 1 thread, GB/s", "memcpy 2 threads, GB/s",
    ]  # fmt: skip


@pytest.mark.cpu
def test_a_learner_that_takes_too_long_leaves_nothing(monkeypatch):
    from gear_jax.actors._clean import rings

    monkeypatch.setattr(cli, "_SECONDS", 8)
    settings = {**SETTINGS, "actors": 1, "seconds": 600}
    words = [sys.executable, "-m", "gear_jax.bench.ingest.ours", json.dumps(settings)]
    problems, before = [], {r.path for r in rings()}
    assert cli._process("gear_jax", words, problems) is None
    assert problems == ["gear_jax failed: no answer in 8 s"]
    assert not [r for r in rings() if r.stale and r.path not in before]


def test_a_process_that_fails_is_named():
    problems = []
    assert cli._process("reverb step", [sys.executable, "-c", "raise ValueError('no luck')"], problems) is None
    assert problems == ["reverb step failed: ValueError: no luck"]
