import json

import pytest

from gear_jax.bench import plot, report
from gear_jax.bench.workloads import workloads

LOADS = workloads()


def _row(name):
    return next((w, row) for w in LOADS.values() for row in w.rows if row.name == name)


def _cells(**seconds):
    return {
        engine: {
            "seconds": s,
            "variant": "v",
            "variants": {"2 threads": {"seconds": s}},
            "mark": "",
            "pipeline": False,
        }
        for engine, s in seconds.items()
    }


def _passes(name, **seconds):
    workload, row = _row(name)
    return report.verdict(row, workload, _cells(**seconds))["pass"]


def test_a_large_row_must_not_be_slower_than_the_best_peer():
    assert _passes("S1a sample 512", gear_jax=1e-3, cpprb=1.01e-3, flashbax=5e-3)
    assert not _passes("S1a sample 512", gear_jax=1.02e-3, cpprb=1.01e-3)


def test_a_small_row_may_cost_a_dispatch_more():
    assert _passes("S3 sample 256", gear_jax=109e-6, cpprb=50e-6)
    assert not _passes("S3 sample 256", gear_jax=111e-6, cpprb=50e-6)


def test_rows_that_must_be_twice_as_fast():
    assert _passes("S4 update 65,536", gear_jax=1e-3, cpprb=2e-3)
    assert not _passes("S4 update 65,536", gear_jax=1e-3, cpprb=1.9e-3)
    assert not _passes("S2 sample 32", gear_jax=1e-4, flashbax=1.5e-4)


def test_a_row_with_a_ceiling_needs_it_measured_and_reached():
    assert _passes("S1b sample 8", gear_jax=1e-3, numpy=2e-3, memcpy=0.81e-3)
    assert not _passes("S1b sample 8", gear_jax=1e-3, numpy=2e-3, memcpy=0.79e-3)
    assert _passes("S1b sample 8", gear_jax=1e-3, numpy=2e-3) is None


def test_numpy_counts_as_a_peer_but_not_as_a_library():
    workload, row = _row("S4 update 65,536")
    found = report.verdict(row, workload, _cells(gear_jax=1e-3, cpprb=3e-3, numpy=0.5e-3))
    assert found["libraries"]["pass"] and found["libraries"]["peer"] == "cpprb"
    assert not found["peers"]["pass"] and found["peers"]["peer"] == "numpy" and not found["pass"]


def test_the_better_way_of_flashbax_counts():
    assert not _passes("S1a sample 512", gear_jax=1e-3, flashbax=5e-3, flashbax_async=0.9e-3)
    assert not _passes("S1a sample 512", gear_jax=1e-3, flashbax=0.9e-3, flashbax_async=5e-3)


def test_nothing_measured_is_neither_pass_nor_fail():
    assert _passes("S1a sample 32", gear_jax=1e-3) is None
    assert _passes("S1a sample 32", cpprb=1e-3) is None


def test_figures_have_the_rows_unit_and_marks():
    workload, row = _row("S1a sample 32")
    cell = {"seconds": 1e-3, "mark": "~", "pipeline": True}
    assert report.figure(row, workload, cell) == "1.92~»"
    assert report.figure(row, workload, {"unsupported": "no"}) == "-"
    assert report.figure(row, workload, {"wrong": "no"}) == "WRONG"
    workload, row = _row("S3 add 1")
    assert report.figure(row, workload, {"seconds": 33e-6}) == "33"


@pytest.fixture
def result():
    rows = {row.name: _cells(gear_jax=1e-3, cpprb=2e-3, numpy=3e-3) for w in LOADS.values() for row in w.rows}
    rows["S2 sample 32"]["cpprb"] = {"unsupported": "cannot"}
    rows["S5 add 1"]["gear_jax"] = {"wrong": "a byte"}
    verdicts = {row.name: report.verdict(row, w, rows[row.name]) for w in LOADS.values() for row in w.rows}
    own = {
        "add_at_capacity": {"capacities": [1000, 64_000], "seconds": [1e-5, 2e-5], "ratio": 2.0},
        "peak_of_add": {"table_and_batch": 100, "peak": 105, "ratio": 1.05},
        "compilations": {"calls": 20, "first_call": 3, "later_calls": 0},
    }
    return {
        "machine": report.machine(),
        "options": {"engines": ["gear_jax", "cpprb", "numpy"], "quick": False, "rounds": 5, "seconds": 0.4},
        "versions": {},
        "rows": rows,
        "verdicts": verdicts,
        "own_checks": own,
    }


def test_tables_name_every_row_every_reason_and_every_promise(result):
    text = report.tables(result, LOADS)
    assert all(name in text for name in result["rows"])
    assert "cpprb: unsupported: cannot (S2 sample 32)" in text and "gear_jax: wrong: a byte" in text
    assert "jax_cpu_enable_async_dispatch=False" in text.split("\n\n")[0]
    assert "ratio 2.00" in text and "FAIL" in text and "pass" in text
    assert json.loads(json.dumps(result)) == result


def test_markdown_tables_have_one_width(result):
    for lines in (report.speed_lines(result, LOADS), report.verdict_lines(result, LOADS)):
        assert len({line.count("|") for line in report.as_markdown(lines).splitlines()}) == 1


def test_failed_own_checks_are_shown():
    assert report.own_lines({"failed": "boom"})[1] == ["own checks", "boom", "", "FAIL"]


def test_the_plot_is_a_picture_or_says_what_is_missing(result, tmp_path):
    pytest.importorskip("matplotlib")
    plot.save(result, str(tmp_path / "speed.png"))
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    for cells in result["rows"].values():
        cells.pop("gear_jax")
    with pytest.raises(ValueError, match="--engines"):
        plot.save(result, str(tmp_path / "none.png"))
