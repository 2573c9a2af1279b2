"""The benchmark of ingest: it runs, checks what it measures, and judges rightly."""

import json
import subprocess
import sys

import pytest

from gear_jax.bench import runner
from gear_jax.bench.ingest import cli, source

pytestmark = pytest.mark.cpu


def test_ours_runs():
    settings = {"actors": 2, "slots": 2, "nice": 1, "seconds": 0.4, "quick": True}
    words = [sys.executable, "-m", "gear_jax.bench.ingest.ours", json.dumps(settings)]
    environment = runner._environment("gear_jax")
    run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["rate"] > 0 and min(found["samples"]) > 0
    assert all(0 < a <= b for a, b in zip(found["p50"], found["p99"], strict=True))


def test_actors_write_different_trajectories():
    first, second = source.trajectories(0), source.trajectories(1)
    assert first["frames"].shape == (source.EACH, 20, 84, 84, 4)
    assert not set(first["action"].ravel()) & set(second["action"].ravel())


def test_medians_and_verdicts():
    def found(rate, reverb, busy):
        ours = {"rate": rate, "samples": [9, 9], "p50": [1e-3, 1e-3], "p99": [2e-3, busy]}
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
    alone = {"memcpy": {"1 thread": 10e9, "2 threads": 16e9}, "gear_jax": None}
    assert [line[0] for line in cli._table({"medians": cli._medians([alone])})[1:]] == [
        "memcpy 1 thread, GB/s", "memcpy 2 threads, GB/s",
    ]  # fmt: skip


def test_a_learner_that_takes_too_long_leaves_nothing(monkeypatch):
    from gear_jax.actors._clean import rings

    monkeypatch.setattr(cli, "_SECONDS", 8)
    settings = {"actors": 1, "slots": 2, "nice": 1, "seconds": 600, "quick": True}
    words = [sys.executable, "-m", "gear_jax.bench.ingest.ours", json.dumps(settings)]
    problems, before = [], {r.path for r in rings()}
    assert cli._process("gear_jax", words, problems) is None
    assert problems == ["gear_jax failed: no answer in 8 s"]
    assert not [r for r in rings() if r.stale and r.path not in before]


def test_a_process_that_fails_is_named():
    problems = []
    assert cli._process("reverb step", [sys.executable, "-c", "raise ValueError('no luck')"], problems) is None
    assert problems == ["reverb step failed: ValueError: no luck"]
