"""The example of several processes: it runs as its README says, and learns."""

import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "multihost"
SMALL = ["--steps", "60", "--report-every", "30", "--batch", "64", "--capacity", "256", "--rows", "16"]

pytestmark = pytest.mark.cpu


def run(*command):
    done = subprocess.run(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(output):
    return tuple(map(float, re.search(r"loss: (\S+) at first, (\S+) at last", output).groups()))


def test_two_processes_learn():
    output = run(FOLDER / "launch.py", "--processes", 2, "--devices", 2, *SMALL)
    assert "[0] 2 processes, 4 devices" in output
    assert len(re.findall(r"windows/s", output)) == 2
    first, last = losses(output)
    assert last < first / 3


def test_the_script_alone_is_one_process():
    assert losses(run(FOLDER / "train.py", *SMALL[:-2], "--rows", 64, "--steps", 1))[0] > 0


def test_a_process_that_fails_ends_the_launcher():
    failed = subprocess.run(
        [sys.executable, FOLDER / "launch.py", "--processes", "2", "--devices", "2", "--batch", "3"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    assert failed.returncode != 0
    assert "batch_size: got 3, wanted a multiple of 4" in failed.stdout
