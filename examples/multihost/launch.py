"""Starts `train.py` as several processes on this machine. Flags that it does not know go to `train.py`."""

from __future__ import annotations

import argparse
import pathlib
import sys

from gear_jax.testing.processes import Processes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--processes", type=int, default=2, help="how many")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--devices", type=int, default=4, help="CPU devices of each process")
    kind.add_argument("--gpus", action="store_true", help="one GPU for each process, in place of CPU devices")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which all are ended")
    options, rest = parser.parse_known_args(arguments)
    script = str(pathlib.Path(__file__).with_name("train.py"))
    command = [sys.executable, script, "--coordinator", "{coordinator}", "--processes", "{processes}"]
    command += ["--process", "{process}", *(["--local-device", "{process}"] if options.gpus else []), *rest]
    with Processes(command, options.processes, None if options.gpus else options.devices, echo=True) as started:
        return max(abs(code) for code in started.wait(options.limit))


if __name__ == "__main__":
    raise SystemExit(main())
