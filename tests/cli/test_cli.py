"""`python -m gear_jax`: help, exit statuses, and messages without tracebacks."""

import os
import pathlib
import subprocess
import sys

import pytest

from gear_jax import bench, cli

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("doctor", "inspect", "bench"))


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "required: COMMAND"),
        (["mend"], "invalid choice: 'mend'"),
        (["inspect"], "required: CHECKPOINT"),
        (["inspect", "here", "--step", "-1"], "--step"),
        (["inspect", "here", "--step", "two"], "got 'two', wanted an integer >= 0"),
        (["doctor", "now"], "unrecognized arguments: now"),
    ],
)
def test_bad_arguments_exit_with_2(capsys, argv, error):
    with pytest.raises(SystemExit) as done:
        cli.main(argv)
    assert done.value.code == 2
    assert error in capsys.readouterr().err


def test_bench_gets_the_rest_of_the_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "main", lambda argv: seen.append(argv) or 7)
    assert cli.main(["bench", "--quick", "--json", "x", "--help"]) == 7
    assert seen == [["--quick", "--json", "x", "--help"]]


def test_run_as_a_module_without_jax():
    code = "import sys; sys.modules['jax'] = None; sys.argv[0] = 'x'; from gear_jax.cli import main; main(['--help'])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (["-m", "gear_jax", "--help"], ["-c", code]):
        done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert "usage: python -m gear_jax" in done.stdout


def test_a_reader_that_leaves_is_no_error(tmp_path):
    # The pipe's other end is closed before anything is written.
    read, write = os.pipe()
    os.close(read)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from gear_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    patch = "import gear_jax.cli._doctor as d; d._cpu_problem = lambda: None; "
    done = subprocess.run(
        [sys.executable, "-c", code.replace("from", patch + "from", 1), "doctor"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")
