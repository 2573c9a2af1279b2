"""Runs a piece of Python in a process of its own, where a crash of a library cannot take the caller along."""

import os
import pathlib
import subprocess
import sys

import gear_jax

_SECONDS = 300


def run(code: str, **environ: str) -> tuple[str | None, str]:
    """(what went wrong, or None; what it printed) of some code, run with more environment variables."""
    env = {**os.environ, **environ}
    root = str(pathlib.Path(gear_jax.__file__).parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a trial did not end within {_SECONDS // 60} minutes", ""
    if done.returncode == 0:
        return None, done.stdout
    if done.returncode < 0:
        return f"a trial was killed by signal {-done.returncode}", done.stdout
    lines = [x for x in done.stderr.strip().splitlines() if x and not x.startswith("For simplicity, JAX")]
    said = next((x for x in reversed(lines) if x.strip("- ")), None)
    return said or f"a trial ended with status {done.returncode}", done.stdout
