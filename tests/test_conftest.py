"""What the suite's own set-up promises."""

import itertools
import pathlib
import subprocess
import sys

import jax

DIES = pathlib.Path(__file__).with_name("dies.py")


def test_a_worker_that_dies_leaves_its_reason():
    command = [sys.executable, "-m", "pytest", "-n", "1", "-q", "-p", "no:cacheprovider", str(DIES)]
    done = subprocess.run(command, cwd=DIES.parent.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout
    died = done.stdout[done.stdout.index("workers that died") :]
    assert "ended with -6" in died
    assert "the reason is on standard error" in died
    assert "dies.py" in died[died.index("Fatal Python error: Aborted") :]


def test_a_worker_drops_programs_before_they_are_too_many(request, monkeypatch):
    """An XLA that cannot map memory for one more program ends the process."""
    path = str(DIES.with_name("conftest.py"))
    (conftest,) = [p for p in request.config.pluginmanager.get_plugins() if getattr(p, "__file__", None) == path]
    program = jax.jit(lambda x: x + 1)
    program(1.0)
    monkeypatch.setattr(conftest, "_tests", itertools.count(1))
    monkeypatch.setattr(conftest, "_MAX_MAPPINGS", conftest._mappings())
    for _ in range(19):
        conftest.pytest_runtest_teardown()
    assert program._cache_size() == 1
    conftest.pytest_runtest_teardown()
    assert program._cache_size() == 0
