"""The command line of the benchmark."""

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from . import report, runner
from .engines import ENGINES
from .workloads import workloads

_REASONS = ("failed", "unsupported")  # in place of an engine's versions


def names(known: Sequence[str], what: str):
    """A parser of some of the `known` names, with commas between, for the argument `what`."""

    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        wrong = [name for name in chosen if name not in known]
        if wrong or not chosen:
            raise argparse.ArgumentTypeError(f"{what} got {text!r}, wanted some of {','.join(known)}")
        return chosen

    return parse


def _interpreter(text: str) -> tuple[str, str]:
    engine, separator, python = text.partition("=")
    if not separator or engine not in ENGINES or not python:
        raise argparse.ArgumentTypeError(f"--env got {text!r}, wanted ENGINE=PYTHON with ENGINE of {','.join(ENGINES)}")
    return engine, python


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m gear_jax bench`."""
    found = argparse.ArgumentParser(
        prog="python -m gear_jax bench",
        description="Checks, then times, gear_jax beside other replay libraries, each in its own process.",
    )
    add = found.add_argument
    loads = list(workloads())
    add(
        "--device",
        choices=["cpu", "gpu"],
        default="cpu",
        help="gpu: the CUDA kernels beside cudaMemcpy, with arguments of its own (--device gpu --help)",
    )
    add(
        "--workloads",
        type=names(loads, "--workloads"),
        default=loads,
        help=f"some of {','.join(loads)}; or transport alone, with arguments of its own (--workloads transport --help)",
    )
    add(
        "--engines",
        type=names(list(ENGINES), "--engines"),
        default=list(ENGINES),
        help=f"some of {','.join(ENGINES)}",
    )
    add("--quick", action="store_true", help="small tables, few rows, 2 short rounds: does everything run?")
    add(
        "--rounds",
        type=int,
        default=None,
        help="times each row is timed with each engine in turns (5; quick: 2)",
    )
    add("--seconds", type=float, default=None, help="length of each timing (0.4; quick: 0.1)")
    add("--envs", metavar="DIR", help="folder in which --make-envs made the peers' environments")
    add(
        "--env",
        metavar="ENGINE=PYTHON",
        type=_interpreter,
        action="append",
        default=[],
        help="an engine's interpreter",
    )
    add("--make-envs", metavar="DIR", help="make the peers' environments (Python 3.11) below DIR and stop")
    add("--json", metavar="OUT", help="write everything that was measured")
    add("--markdown", metavar="OUT", help="write the tables as Markdown")
    add("--plot", metavar="PNG", help="write the picture of relative speeds")
    return found


def _kind(argv: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    """What `--device` and `--workloads` name, and the other arguments: some benchmarks have arguments of their own."""
    found = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    found.add_argument("--device")
    found.add_argument("--workloads")
    named, others = found.parse_known_args(argv)
    return named.device, named.workloads, others


def run(argv: Sequence[str] | None = None) -> int:
    """See `gear_jax.bench.main`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    device, named, others = _kind(argv)
    if named == "transport" and device in (None, "cpu"):
        from gear_jax.bench.transport import run as run_transport

        return run_transport(others)
    if device == "gpu":
        from gear_jax.bench.gpu.cli import run as run_on_gpu  # a process of its own, and jax in it

        return run_on_gpu(argv)
    args = parser().parse_args(argv)
    if args.make_envs:
        script = pathlib.Path(__file__).with_name("envs.sh")
        return subprocess.run(["bash", str(script), args.make_envs]).returncode
    loads = {name: load for name, load in workloads(args.quick).items() if name in args.workloads}
    pythons = runner.interpreters(args.engines, args.envs, dict(args.env))
    result = _measure(args, loads, pythons)
    print("\n" + report.tables(result, loads))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        pathlib.Path(args.markdown).write_text(report.tables(result, loads, markdown=True) + "\n")
    if args.plot:
        from . import plot

        plot.save(result, args.plot)
    broken = any("wrong" in cell or "failed" in cell for cells in result["rows"].values() for cell in cells.values())
    return 1 if broken or "failed" in result["own_checks"] else 0


def _measure(args: argparse.Namespace, loads: dict[str, Any], pythons: dict[str, str]) -> dict[str, Any]:
    rounds = args.rounds or (2 if args.quick else 5)
    seconds = args.seconds or (0.1 if args.quick else 0.4)
    options = {"engines": args.engines, "quick": args.quick, "rounds": rounds, "seconds": seconds}
    # See Engine.prepare.
    options["jax_cpu_enable_async_dispatch"] = {"gear_jax": False, "flashbax": False, "flashbax_async": True}
    result: dict[str, Any] = {"machine": report.machine(), "options": options}
    result |= {"versions": {}, "rows": {}, "verdicts": {}, "own_checks": {}}

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for workload in loads.values():
        found = runner.run_workload(workload, pythons, args.quick, rounds, seconds, say)
        measured = {engine: info for engine, info in found["engines"].items() if info.keys().isdisjoint(_REASONS)}
        result["versions"] |= measured
        result["rows"] |= found["rows"]
        for row in workload.rows:
            result["verdicts"][row.name] = report.verdict(row, workload, found["rows"][row.name])
    if report.OURS in args.engines and runner.missing(report.OURS, pythons[report.OURS]) is None:
        say("gear_jax: cost of an insert, its memory, compilations")
        result["own_checks"] = runner.run_own_checks(pythons[report.OURS], args.quick)
    return result
