import json

import pytest

from gear_jax.bench.gpu.findings import CALL, HOW, IN_FLIGHT, Findings, Missing, reason


def test_a_speed_stands_beside_the_copy_of_its_direction(copies):
    found = Findings(copies)
    assert found.rate("gather", 27_000_000, 1e-3, IN_FLIGHT, "h2d", series="gather") == 27.0
    figure = found.figures[0]
    assert figure["ratio"] == 0.5 and figure["peak"] == 54.0 and figure["series"] == "gather"
    assert figure["seconds"] == 1e-3 and figure["bytes"] == 27_000_000


def test_without_a_copy_there_is_a_speed_but_no_share():
    found = Findings({})
    found.rate("gather", 1_000_000, 1e-3, CALL, "h2d")
    assert "ratio" not in found.figures[0]
    assert found.of_copy(1.0, "h2d") is None


@pytest.mark.parametrize(("value", "counts", "reached"), [(0.92, True, True), (0.91, True, False), (0.99, False, None)])
def test_a_bound_from_below(copies, value, counts, reached):
    found = Findings(copies)
    found.at_least("gather", 0.92, "of cudaMemcpy H2D", value, "-", counts)
    assert found.targets[0]["reached"] is reached
    assert found.targets[0]["wanted"] == ">= 0.92 of cudaMemcpy H2D"


@pytest.mark.parametrize(("value", "reached"), [(100.0, True), (100.1, False), (None, None)])
def test_a_bound_from_above(copies, value, reached):
    found = Findings(copies)
    found.at_most("sample", 100.0, "us", value, "-")
    assert found.targets[0]["reached"] is reached


def test_a_ratio_says_how_many_times_faster_we_are(copies):
    found = Findings(copies)
    found.peer("slower", "gather", 10.0, "GB/s", 50.0)
    found.peer("slower", "sample", 300.0, "us", 100.0)
    found.peer("alone", "sample", 300.0, "us", None)
    assert [peer["ratio"] for peer in found.peers] == [5.0, 3.0, None]


def test_all_of_it_is_json(copies):
    found = Findings(copies)
    found.rate("gather", 1, 1.0, IN_FLIGHT, "h2d")
    found.at_least("gather", 1.0, "x", 2.0, "-")
    found.no_peer("torch", "gather", "not installed")
    found.note("A note.")
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()
    assert all(figure["timed"] in HOW for figure in found.figures)


def test_reasons_are_one_line():
    assert reason(Missing("not installed: torch")) == "not installed: torch"
    assert reason(ValueError("a\nb")) == "ValueError: a"
    assert len(reason(ValueError("x" * 999))) == 200
