"""The arguments of `python -m gear_jax bench --device gpu`."""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

from gear_jax.bench.cli import names
from gear_jax.bench.gpu import picture, tabulate
from gear_jax.bench.gpu.rows import NAMES, ROWS
from gear_jax.bench.gpu.run import run as run_rows
from gear_jax.bench.gpu.sizes import FULL, QUICK, TINY


def parser() -> argparse.ArgumentParser:
    """The arguments, `--device gpu` included."""
    found = argparse.ArgumentParser(
        prog="python -m gear_jax bench --device gpu",
        description="Checks, then times, the CUDA kernels beside cudaMemcpy and beside other ways to the same batches.",
        epilog="rows:\n" + "\n".join(f"  {row.name:13} {row.about}" for row in ROWS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--device", choices=["gpu"], required=True, help="what the other benchmark does without")
    add("--rows", type=names(NAMES, "--rows"), default=list(NAMES), help="some of the rows below, with commas between")
    size = found.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help=f"small tables, under {QUICK.limit:.0f} s; no word on the large"
    )
    size.add_argument("--tiny", action="store_true", help="does every row run? Also without a GPU; times mean nothing")
    size.add_argument(
        "--from", dest="source", metavar="JSON", help="measure nothing: tables and picture of an earlier --json"
    )
    add(
        "--limit",
        type=float,
        metavar="SECONDS",
        help=f"begin nothing after so long ({FULL.limit:.0f}; quick: {QUICK.limit:.0f})",
    )
    add("--json", metavar="OUT", help="write everything that was measured, anew after each row")
    add("--markdown", metavar="OUT", help="write the tables as Markdown, anew after each row")
    add("--plot", metavar="PNG", help="write the picture of speeds by the size of a row")
    return found


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
      argv: arguments without the program's name; None takes `sys.argv[1:]`.

    Returns:
      The exit status: 0 where every row ended, 1 where one was wrong or failed, 2 on a bad argument or without a GPU.
    """
    args = parser().parse_args(argv)
    result = json.loads(pathlib.Path(args.source).read_text()) if args.source else _measure(args)
    if result is None:
        return 2
    print("\n" + tabulate.tables(result))
    _save(args, result)
    if args.plot:
        picture.save(result, args.plot)
    return int(any("wrong" in row or "failed" in row for row in result["rows"].values()))


def _measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """Runs the rows; None, and why on standard error, where they cannot run."""
    sizes = TINY if args.tiny else QUICK if args.quick else FULL
    if args.limit is not None:
        sizes = dataclasses.replace(sizes, limit=args.limit)
    backend = jax.default_backend()
    if backend != "gpu" and not args.tiny:
        print(
            f"--device gpu: jax's backend is {backend!r}, wanted 'gpu'. Install jax[cuda13] on a machine with an "
            "NVIDIA GPU, or run with --tiny, which only shows that every row runs.",
            file=sys.stderr,
        )
        return None

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return run_rows(sizes, args.rows, say, lambda result: _save(args, result))


def _save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.json and not args.source:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        pathlib.Path(args.markdown).write_text(tabulate.tables(result, markdown=True) + "\n")
