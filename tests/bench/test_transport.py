"""The benchmark of remote reads runs, and counts what it says that it counts."""

import json

import pytest

from gear_jax import transport
from gear_jax.bench import main
from gear_jax.bench.transport import _row


def test_runs(tmp_path, capsys):
    if why := transport.missing("ucx"):
        pytest.skip(f"no UCX here: {why}")
    out = tmp_path / "out.json"
    arguments = ["--workloads", "transport", "--quick", "--rounds", "1", "--seconds", "0.01", "--way", "same host"]
    assert main([*arguments, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [r["against"] for r in rows] == ["one at a time"] + ["memcpy"] * 4
    assert all(r["ratio"] > 0 for r in rows)
    assert "32 MiB at once" in capsys.readouterr().out


def test_ratios_are_of_speeds():
    row = _row("x", 10**9, [1.0, 2.0, 2.0], "y", [1.0, 1.0, 1.0])
    assert row["ours_gb_s"] == 0.5 and row["theirs_gb_s"] == 1.0 and row["ratio"] == 0.5
