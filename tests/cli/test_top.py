"""`python -m gear_jax top`: learners and rings, once and live."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import jax.numpy as jnp
import pytest

import gear_jax as gear
from gear_jax import cli
from gear_jax.metrics import FileWriter

ROOT = pathlib.Path(gear.__file__).parent.parent


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def learner(temporary):
    writer = FileWriter(name="train.py")
    writer.write(1000, {"replay/trajectories": 50, "replay/capacity": 200, "replay/sampled": 0, "loss": 0.123456})
    time.sleep(0.01)
    writer.write(2000, {"replay/trajectories": 50, "replay/capacity": 200, "replay/sampled": 64, "loss": 0.123456,
                        "ingest/actors/0/pid": 77})  # fmt: skip
    yield writer
    writer.close()


def test_a_learner_once(learner, capsys):
    assert cli.main(["top", "--once"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^train\.py \(process {os.getpid()}\): step 2,000 \([\d,.]+/s\), \d\.\d s ago$", text, re.M)
    assert re.search(r"^  trajectories +50 +\[######\.{18}\] 25%$", text, re.M)
    assert re.search(r"^  sampled +64 +[\d,.]+$", text, re.M)
    assert re.search(r"^  loss +0\.1235$", text, re.M)
    assert "pid" not in text
    assert cli.main(["top", "--once", str(learner.path)]) == 0
    assert "train.py" in capsys.readouterr().out


def test_a_ring_once(shm, capsys):
    table = gear.TableSpec({"a": gear.ColumnSpec((), jnp.int32)}, 2, 4)
    ring = gear.actors.make_ring(table, 2, 3, name="top", directory=shm)
    with gear.actors.Writer(ring, 1) as writer:
        writer.append({"a": 1})
        writer.commit()
        assert cli.main(["top", "--once"]) == 0
    text = capsys.readouterr().out
    assert "ring top: 1 trajectories committed, 1 waiting, learner free" in text
    assert re.search(rf"^  1 +running +{os.getpid()} +1 +1 +0\.0$", text, re.M)


def test_nothing_is_said_to_be_nothing(monkeypatch, capsys):
    monkeypatch.setattr("gear_jax.actors._clean.rings", list)
    assert cli.main(["top", "--once"]) == 0
    assert "nothing to show: no ring of actors, and no process" in capsys.readouterr().out


def test_files_that_are_none(temporary, capsys):
    (temporary / "x").write_text("{")
    for path in ("x", "y"):
        assert cli.main(["top", "--once", str(temporary / path)]) == 1
        assert "wanted a file of counters" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["top", "--every", "0"])
    assert "got '0', wanted seconds" in capsys.readouterr().err


@pytest.mark.parametrize(("rich", "terminal"), [(True, True), (False, True), (True, False)])
def test_live_until_interrupted(learner, rich, terminal):
    if rich:
        pytest.importorskip("rich")
    code = "import sys\n" + ("" if rich else "sys.modules['rich.live'] = None\n")
    code += "from gear_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    ours, its = os.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", code, "top", str(learner.path), "--every", "0.05"], stdout=its,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )  # fmt: skip
    os.close(its)
    try:
        os.set_blocking(ours, False)
        until, text = time.monotonic() + 30, ""
        while text.count("trajectories") < 3 and time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                text += os.read(ours, 1 << 16).decode(errors="replace")
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert text.count("trajectories") >= 3 and "25%" in text and "train.py" in text
    assert ("\x1b" in text) == terminal
