"""What is said of a run."""

import numpy as np
import pytest

SIZE = {"parameters": 29_000_000, "compute": "bfloat16", "batch": 64, "context": 128, "sample_bytes": 400_000,
        "table_bytes": 7_680_000, "memory": "pinned_host"}  # fmt: skip


@pytest.fixture
def report(example):
    return example("_report")


@pytest.fixture
def task(example):
    return example("_learner").Task(90.0, 200.0, np.zeros(1), np.ones(1))


@pytest.fixture
def results(report):
    asked = [(share, 200.0 * share) for share in report.ASKED]
    curve = [np.array([0.0, 10.0]), np.array([180.0, 190.0])]
    finals = np.array([170.0, 190.0]), np.array([190.0, 210.0])
    return [report.Result([0, 2], curve, np.ones(2), final, asked, 0.02, 0.0001) for final in finals]


def test_the_outcome_of_two_seeds(report, task, results, tmp_path):
    text = report.table_of(task, results, report.Size(**SIZE))
    assert "190.0  (seeds: 180, 200)" in text and "170.0, 210.0" in text
    assert "2.11 x" in text and "0.95 x" in text and "asked for 50.0 instead" in text
    assert "3,200" in text and "0.50%  (100 µs of 20.0 ms)" in text
    assert "29,000,000" in text and "7.68 MB in pinned_host memory" in text
    assert "64 windows of 128 steps, 400 kB" in text and "20.00 ms  (50.0 a second)" in text
    assert "20 MB/s in training, 4 GB/s by sampling alone" in text
    assert "fixed batch" not in text
    report.plot(tmp_path / "new" / "curve.png", task, results)
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_step_without_replay(report, task, results):
    text = report.table_of(task, [results[0]._replace(fixed_seconds=0.016)], report.Size(**SIZE))
    assert "16.00 ms" in text and "1.250 x" in text
