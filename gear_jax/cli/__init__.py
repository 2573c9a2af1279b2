"""The command line: `python -m gear_jax doctor | inspect | top | bench`.

Each command's module is imported when the command runs, so that `doctor` can report on an installation that is broken.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

from gear_jax.cli._output import Failure


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m gear_jax`."""
    top = argparse.ArgumentParser(
        prog="python -m gear_jax",
        description="Experience replay as a JAX value: tools.",
        epilog="Exit status: 0 if all is well, 1 if something is wrong or damaged, 2 for a bad argument.",
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="report versions, devices, libraries, what is missing and how to get it",
        description="Reports on the installation. Exit status 0 if replay works on the CPU, and on the GPU where there "
        "is one, jax has a plugin for it and this build its library; 1 if not.",
    )
    doctor.add_argument(
        "--clean-shm",
        action="store_true",
        help="instead: remove the rings of actors (gear_jax.actors) in shared memory that no living process holds",
    )
    doctor.set_defaults(run=_run_doctor)
    inspect = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds: columns, sizes, lengths and priorities",
        description="Shows what a checkpoint of gear_jax.checkpoint.save holds. Reads its index, none of its columns.",
    )
    inspect.add_argument("checkpoint", metavar="CHECKPOINT", help="the directory given to gear_jax.checkpoint.save")
    inspect.add_argument("--step", type=_step, help="the step to show (default: the latest)")
    inspect.add_argument(
        "--png", type=pathlib.Path, metavar="FILE", help="also draw the histograms to a PNG (needs matplotlib)"
    )
    inspect.set_defaults(run=_run_inspect)
    live = commands.add_parser(
        "top",
        help="show live what learners and their actors are doing",
        description="Shows the counters of learners that write them (gear_jax.metrics.FileWriter), and the rings of "
        "actors, until Ctrl-C (exit status 130) or once (0); 1 for a file that cannot be read.",
    )
    live.add_argument("file", nargs="*", metavar="FILE", help="of a FileWriter (default: all learners of this user)")
    live.add_argument("--once", action="store_true", help="print it once")
    live.add_argument("--every", type=_seconds, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    live.set_defaults(run=_run_top)
    commands.add_parser(
        "bench",
        help="measure gear_jax beside other replay libraries (arguments of its own: `bench --help`)",
        add_help=False,
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the arguments without the program's name; None: `sys.argv[1:]`.

    Returns:
      The exit status.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv[:1] == ["bench"]:
            from gear_jax import bench

            return bench.main(argv[1:])
        args = parser().parse_args(argv)
        status = args.run(args)
        sys.stdout.flush()
        return status
    except Failure as e:
        print(f"python -m gear_jax {argv[0]}: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (`| head`) has left; Python must not write to it when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _run_doctor(args: argparse.Namespace) -> int:
    if args.clean_shm:
        from gear_jax.cli import _doctor_rings

        return _doctor_rings.clean()
    from gear_jax.cli import _doctor

    return _doctor.run()


def _run_inspect(args: argparse.Namespace) -> int:
    from gear_jax.cli import _inspect

    return _inspect.run(args.checkpoint, args.step, args.png)


def _run_top(args: argparse.Namespace) -> int:
    from gear_jax.cli import _top

    return _top.run(args.file, args.once, args.every)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted seconds from 0.05 to 3600")
    return seconds


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted an integer >= 0")
    return int(text)
