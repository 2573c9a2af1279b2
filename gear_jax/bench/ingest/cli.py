"""The command line of `bench --ingest`."""

import argparse
import importlib.util
import json
import pathlib
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from gear_jax import _cuda, _native
from gear_jax.bench import report, runner
from gear_jax.bench.ingest import copies

_SECONDS, _END_SECONDS = 300, 20
_HERE = pathlib.Path(__file__).resolve().parent
VARIANTS = ("trajectory", "step")
OURS = ("gear_jax", "gear_jax GPU", "gear_jax GPU copy=True")


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    found = argparse.ArgumentParser(prog="python -m gear_jax bench --ingest", description=__doc__)
    add = found.add_argument
    add("--ingest", action="store_true", help=argparse.SUPPRESS)
    add("--actors", type=int, default=8)
    add("--slots", type=int, default=4, help="of each actor")
    add("--nice", type=int, default=19, help="by how much the actors yield to the learner")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=3.0, help="of each timing")
    add("--quick", action="store_true", help="one short round: does everything run?")
    add("--envs", metavar="DIR", help="folder in which bench --make-envs made dm-reverb's environment")
    add("--env", metavar="reverb=PYTHON", help="dm-reverb's interpreter")
    add("--json", metavar="OUT")
    add("--markdown", metavar="OUT")
    return found


def run(argv: Sequence[str]) -> int:
    """Measures and prints; the exit status is 1 where something failed."""
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started is ended
    if args.quick:
        args.rounds, args.seconds = 1, 0.5
    given = {"reverb": args.env.partition("=")[2]} if args.env else {}
    python = runner.interpreters(["reverb"], args.envs, given)["reverb"]
    options = {name: x for name, x in vars(args).items() if name not in ("json", "markdown", "envs", "env")}  # no paths
    result: dict[str, Any] = {"machine": report.machine(), "options": options, "rounds": [], "problems": []}
    missing = runner.missing("reverb", python)
    if missing:
        result["problems"].append(missing)
    ours = OURS if _gpu(result["problems"]) else OURS[:1]
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
        result["rounds"].append(_round(args, ours, None if missing else python, result["problems"]))
    result["medians"] = _medians(result["rounds"])
    text = _table(result)
    print(report.as_text(text))
    print("\n".join(result["problems"]))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        pathlib.Path(args.markdown).write_text(report.as_markdown(text) + "\n")
    return 1 if any("failed" in p for p in result["problems"]) else 0


def _gpu(problems: list[str]) -> bool:
    """Whether there is a GPU to measure; says what is missing where one cannot be."""
    driver = _cuda.library()
    try:
        if driver is None or not _cuda.devices(driver):
            return False
    except _cuda.DriverError as e:
        problems.append(f"the GPU is not measured: {e}")
        return False
    lacking = [] if _native.load("CUDA") else ["a build with GEAR_JAX_CUDA=ON"]
    if importlib.util.find_spec("cupy") is None:
        lacking.append('CuPy: pip install "gear_jax[cuda]"')
    if lacking:
        problems.append(f"the GPU is not measured without {' and '.join(lacking)}")
    return not lacking


def _round(args: argparse.Namespace, ours: Sequence[str], reverb: str | None, problems: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"memcpy": copies.rates(args.seconds / 4, args.quick)}
    if len(ours) > 1:
        found["cudaMemcpy"] = copies.gpu_rates(args.quick)
    settings = {name: getattr(args, name) for name in ("actors", "slots", "nice", "seconds", "quick")}
    for name in ours:
        settings["copy"] = name.endswith("copy=True")
        words = [sys.executable, "-m", "gear_jax.bench.ingest.ours", json.dumps(settings)]
        found[name] = _process(name, words, problems)
    for variant in VARIANTS if reverb else ():
        words = [reverb, str(_HERE / "on_reverb.py"), "serve", str(args.actors), str(args.seconds), variant]
        found[f"reverb {variant}"] = _process(f"reverb {variant}", words, problems)
    return found


def _process(name: str, words: list[str], problems: list[str]) -> dict[str, Any] | None:
    engine, pipe = name.split()[0], subprocess.PIPE
    environment = runner._environment(engine) | ({"JAX_PLATFORMS": "cuda"} if "GPU" in name else {})
    with subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=_SECONDS)
        except BaseException as e:
            process.terminate()  # a ring would outlive a learner that is killed
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            if not isinstance(e, subprocess.TimeoutExpired):
                raise
            problems.append(f"{name} failed: no answer in {_SECONDS} s")
            return None
    if process.returncode:
        lines = err.strip().splitlines()
        problems.append(f"{name} failed: {lines[-1] if lines else process.returncode}")
        return None
    return json.loads(out.strip().splitlines()[-1])


def _medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    every: dict[str, list[float]] = {}
    for found in rounds:
        for copy in ("memcpy", "cudaMemcpy"):
            for which, rate in found.get(copy, {}).items():
                every.setdefault(f"{copy} {which}", []).append(rate)
        for name, one in found.items():
            if name.lower().endswith("memcpy") or one is None:
                continue
            every.setdefault(name, []).append(one["rate"])
            if name not in OURS:
                continue
            every.setdefault(f"{name} full", []).append(one["full"])
            for point in ("p50", "p99"):
                idle, busy = one[point]
                for what, value in (("idle", idle), ("busy", busy), ("ratio", busy / idle)):
                    every.setdefault(f"{name} {point} {what}", []).append(value)
    return {name: statistics.median(values) for name, values in every.items()}


def _table(result: dict[str, Any]) -> list[list[str]]:
    m = result["medians"]
    lines = [["ingest of S5 from actors in other processes", "figure", "target", "verdict"]]
    rates = [*OURS, *(f"reverb {v}" for v in VARIANTS), "memcpy 1 thread", "memcpy 2 threads"]
    for name in (*rates, "cudaMemcpy to the GPU", "cudaMemcpy from the GPU"):
        if name in m:
            lines.append([f"{name}, GB/s", f"{m[name] / 1e9:.2f}", "", ""])
    for name in OURS:
        if name in m:
            lines.append([f"{name}, a drain of a full ring, GB/s", f"{m[f'{name} full'] / 1e9:.2f}", "", ""])
    ours = m.get("gear_jax")
    reverb = max((m[f"reverb {v}"] for v in VARIANTS if f"reverb {v}" in m), default=None)
    if ours and reverb:
        lines.append(["gear_jax / reverb", f"{ours / reverb:.1f}", ">= 3", _verdict(ours >= 3 * reverb)])
    for threads in ("1 thread", "2 threads"):
        copy = m[f"memcpy {threads}"]
        if ours:
            passed = _verdict(ours >= 0.5 * copy)
            lines.append([f"gear_jax / memcpy {threads}", f"{ours / copy:.2f}", ">= 0.5", passed])
    return [*lines, *(line for name in OURS if name in m for line in _latencies(m, name))]


def _latencies(m: dict[str, float], name: str) -> list[list[str]]:
    lines = []
    for point in ("p50", "p99"):
        idle, busy, ratio = m[f"{name} {point} idle"] * 1e3, m[f"{name} {point} busy"] * 1e3, m[f"{name} {point} ratio"]
        target, verdict = ("<= 2", _verdict(ratio <= 2)) if point == "p99" else ("", "")
        where = name.removeprefix("gear_jax").replace(" ", ", ", 1)
        what = f"{point} of a sample of 64, with ingest / idle{where}"
        lines.append([what, f"{busy:.1f} / {idle:.1f} ms = {ratio:.2f}", target, verdict])
    return lines


def _verdict(passed: bool) -> str:
    return "pass" if passed else "FAIL"
