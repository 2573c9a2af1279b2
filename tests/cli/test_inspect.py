"""`inspect`: the numbers, the histograms in text and as PNG, and what goes wrong."""

import importlib.util
import io
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax import checkpoint, cli
from gear_jax.cli import _inspect
from gear_jax.cli._output import bars, human


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Step 5: nine trajectories of 40 and one of 3 steps in 16 slots. Step 6: an empty table."""
    path = tmp_path_factory.mktemp("checkpoint")
    columns = {"observation": gear.ColumnSpec((3,), jnp.float32), "pixels": gear.ColumnSpec((2, 2), jnp.bfloat16)}
    table = gear.TableSpec(columns, trajectory_length=40, capacity=16)
    replay = gear.make_replay(table, gear.selectors.Prioritized())
    rows = {"observation": jnp.ones((10, 40, 3)), "pixels": jnp.ones((10, 40, 2, 2), jnp.bfloat16)}
    lengths = jnp.full((10,), 40, jnp.int32).at[0].set(3)
    state, _ = replay.add(replay.init(), rows, lengths, jnp.arange(10, dtype=jnp.float32))
    checkpoint.save(path, 5, state, replay)
    checkpoint.save(path, 6, replay.init(), replay)
    return path


def test_numbers(directory, capsys):
    assert cli.main(["inspect", str(directory), "--step", "5"]) == 0
    text = capsys.readouterr().out
    lines = [" ".join(x.split()) for x in text.splitlines()]
    for line in (
        "step 5, written by gear_jax " + gear.__version__,
        "table 16 slots of 40 steps in 1 partition(s)",
        "trajectories 10 (62.5% of the slots)",
        "steps 363, mean length 36.3, shortest 3, longest 40",
        "inserted 10",
        "observation (3,) float32 7.5 KiB",
        "pixels (2, 2) bfloat16 5 KiB",
        "all 12.5 KiB",
    ):
        assert line in lines
    assert f"3 - 6 1 {'█' * 4}▌" in lines
    assert f"39 - 40 9 {'█' * 40}" in lines
    assert f"0 - 0.9 1 {'█' * 40}" in lines


def test_latest_step_empty_table(directory, capsys, tmp_path):
    png = tmp_path / "empty.png"
    assert cli.main(["inspect", str(directory), "--png", str(png)]) == 0
    text = capsys.readouterr().out
    assert text.count("(none)") == 2
    assert png.stat().st_size > 1000


def test_png(directory, capsys, tmp_path):
    from matplotlib import image

    png = tmp_path / "histograms.png"
    assert cli.main(["inspect", str(directory), "--step", "5", "--png", str(png)]) == 0
    assert f"Histograms: {png}" in capsys.readouterr().out
    pixels = image.imread(png)
    assert pixels.shape[0] > 400 and pixels.shape[1] > 1000
    assert 0.5 < pixels[..., :3].mean() < 0.99  # drawn on, and not all over


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["nowhere"], "nowhere: got nothing there"),
        (["{directory}", "--step", "7"], "step: got 7, wanted one of [5, 6]"),
        (["{directory}/5"], "Give the directory that it is in, {directory}, and step=5."),
        (["{directory}", "--png", "a.jpg"], "--png: got 'a.jpg', wanted a name that ends in .png"),
        (["{directory}", "--png", "nowhere/a.png"], "wanted a file in a directory that exists. Make nowhere first."),
    ],
)
def test_failures_are_one_line(directory, capsys, argv, error):
    assert cli.main(["inspect", *(a.format(directory=directory) for a in argv)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("python -m gear_jax inspect: ") and said.err.count("\n") == 1
    assert error.format(directory=directory) in said.err


def test_damage(directory, capsys, tmp_path):
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "_CHECKPOINT_METADATA").write_text("{}")
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "wanted a complete checkpoint of gear_jax. There is no other step" in capsys.readouterr().err


def test_png_without_matplotlib(directory, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert cli.main(["inspect", str(directory), "--png", "a.png"]) == 1
    assert "python -m pip install matplotlib" in capsys.readouterr().err


def test_png_that_cannot_be_written(directory, capsys, tmp_path):
    (tmp_path / "taken.png").mkdir()
    assert cli.main(["inspect", str(directory), "--png", str(tmp_path / "taken.png")]) == 1
    assert "--png: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "whole", "lines"),
    [
        ([4, 4, 4], True, ["4  3"]),
        ([2.5, 2.5], False, ["2.5  2"]),
        ([1, 2, 2, 3], True, ["1  1", "2  2", "3  1"]),
        ([1, 25], True, ["1 - 3  1", "4 - 6  0"]),
    ],
)
def test_histogram(values, whole, lines):
    text = _inspect._histogram_text(np.array(values), whole=whole).splitlines()
    assert [x.strip().split("  █")[0].rstrip() for x in text[: len(lines)]] == lines
    assert sum(int(x.split("█")[0].split()[-1]) for x in text) == len(values)


def test_bars_without_unicode(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    lines = bars([1, 1000, 0], ["a", "b", "c"], width=4).splitlines()
    assert lines == ["  a      1  #", "  b  1,000  ####", "  c      0"]


def test_human():
    assert [human(x) for x in (0, 1023, 1536, 2**40)] == ["0 B", "1023 B", "1.5 KiB", "1 TiB"]
