import copy

import pytest

from gear_jax.bench.gpu import picture, tabulate


def test_targets_have_verdicts_and_their_peers(result):
    lines = {line[0]: line for line in tabulate.target_lines(result)}
    assert lines["gather"][1:5] == [">= 0.92 of cudaMemcpy H2D", "50.0 GB/s (4 KiB | rows)", "0.926", "yes"]
    assert lines["windows"][4] == "NO" and lines["windows"][5] == "NumPy indexing + device_put 0.5 GB/s (80 x)"
    assert "XLA take in HBM 1,000 GB/s (0.05 x)" in lines["gather"][5]
    assert "flashbax in HBM: not installed" in lines["gather"][5]
    sample = lines["prioritised, N = 1,000, B = 8: sample"]
    assert sample[5] == "TorchRL, CUDA tree 400 us (4 x); torch.multinomial: not installed"
    update = lines["prioritised, N = 1,000, B = 8: update"]
    assert update[3:] == ["-", "-", "-"]


def test_a_row_that_broke_off_says_why(result):
    lines = tabulate.target_lines(result)
    assert ["guard", "", "wrong: the column lies elsewhere", "-", "-", "-"] in lines
    assert ["guard", "0.1", "54.0", "50.0", "wrong: the column lies elsewhere"] in tabulate.copy_lines(result)


def test_figures_stand_beside_the_copy(result):
    lines = tabulate.figure_lines(result["rows"]["gather"])
    assert lines[1] == ["4096 B rows", "50 GB/s", "in flight", "0.926 of H2D 54.0"]


def test_peers_say_by_how_much_or_why_not(result):
    lines = tabulate.peer_lines(result["rows"]["peers"])
    assert lines[1][2:] == ["2.5 GB/s", "20 x"]
    assert lines[-1][2:] == ["not installed: No module named 'flashbax'", "-"]


@pytest.mark.parametrize("markdown", [False, True])
def test_everything_is_in_the_tables(result, markdown):
    text = tabulate.tables(result, markdown)
    assert all(name in text for name in result["rows"])
    assert "NVIDIA H100 80GB HBM3" in text and "PCIe generation 5 x16" in text and "jax 0.11.2" in text
    assert "A note." in text and "one wait at the end" in text
    if markdown:
        tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
        assert len(tables) == 7 and all(len({line.count("|") for line in table}) == 1 for table in tables)


def test_without_copies_the_reason_is_shown(result):
    result["memcpy"] = "cudaMemcpy: not on this backend"
    for row in result["rows"].values():
        row["memcpy"] = {}
    text = tabulate.tables(result)
    assert "not on this backend" in text


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (1.234, "1.23"), (99.94, "99.9"), (12345.6, "12,346")]
)
def test_numbers_have_three_digits(value, text):
    assert tabulate.number(value) == text


def test_points_are_speeds_by_bytes_of_a_row(result):
    assert picture.points(result) == {
        "gather": [(4096, pytest.approx(50.0)), (1 << 20, pytest.approx(52.0))],
        "windows, gather": [(1280, pytest.approx(40.0))],
    }
    # What reads the GPU's own memory is no peer of a gather over the link.
    assert picture.peer_points(result) == {"NumPy indexing + device_put": [(4096, 2.5), (1280, 0.5)]}


def test_calls_in_flight_come_before_device_time(result):
    extra = copy.deepcopy(result["rows"]["gather"]["figures"][0]) | {"timed": "device", "value": 1.0}
    result["rows"]["gather"]["figures"].append(extra)
    assert picture.points(result)["gather"][0] == (4096, pytest.approx(50.0))


def test_the_picture_is_a_png(result, tmp_path):
    pytest.importorskip("matplotlib")
    picture.save(result, str(tmp_path / "speed.png"))
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing_says_what_is_missing(result, tmp_path):
    pytest.importorskip("matplotlib")
    for row in result["rows"].values():
        row["figures"] = []
    with pytest.raises(ValueError, match="--rows"):
        picture.save(result, str(tmp_path / "none.png"))
