"""Remote reads beside what the machine can do: memcpy for a process of this host, `ucx_perftest` for TCP.

`python -m gear_jax bench --workloads transport`. Two processes, one of which is told nothing while it is read. Ours and
the yardstick take turns, in rounds; a figure is the median of the rounds' medians, a ratio that of the rounds' ratios.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gear_jax.bench import report
from gear_jax.bench.timing import time_calls
from gear_jax.testing._peers import Peers
from gear_jax.testing.processes import free_ports
from gear_jax.transport import missing

_MEBIBYTE = 1 << 20
_REGION = 512 * _MEBIBYTE  # larger than the caches
_TARGETS = 128 * _MEBIBYTE
_PLANS = 64
_SMALL, _MANY = 4096, 256
WAYS = {"same host": {}, "shared memory": {"UCX_TLS": "posix,sysv,self"}, "TCP": {"UCX_TLS": "tcp,self"}}
_PERFTEST_SECONDS = 120


class _Reads:
    """Reads at random places of a peer's region, into places of a large array in turns; what to read is made before."""

    def __init__(self, peers: Peers, region: int):
        self._read: Callable[[list[tuple[int, ...]]], list[str]] = peers.session._native.read
        self._region = region
        self._to = np.ones(min(_TARGETS, region), np.uint8)
        self._from = np.ones(region, np.uint8)
        self._rng = np.random.default_rng(0)

    def _plans(self, size: int, count: int) -> Iterator[list[tuple[int, ...]]]:
        """Lists of pieces (peer, region, offset, bytes, to), over and over."""
        targets = itertools.cycle(range(0, len(self._to) - size + 1, size))
        offsets = self._rng.integers(0, (self._region - size) // 64 + 1, (_PLANS, count)) * 64
        base = self._to.ctypes.data
        return itertools.cycle([[(1, 0, o, size, base + next(targets)) for o in row] for row in offsets.tolist()])

    def at_once(self, size: int, count: int = 1) -> Callable[[], None]:
        """`count` reads at once."""
        plans = self._plans(size, count)

        def run() -> None:
            if set(self._read(next(plans))) != {"ok"}:
                raise RuntimeError("a read failed")

        return run

    def singly(self, size: int, count: int) -> Callable[[], None]:
        """`count` reads, each after the last."""
        plans = self._plans(size, count)

        def run() -> None:
            for piece in next(plans):
                if self._read([piece]) != ["ok"]:
                    raise RuntimeError("a read failed")

        return run

    def memcpy(self, size: int, count: int = 1) -> Callable[[], None]:
        """The same copies, of memory of this process."""
        plans, source = self._plans(size, count), self._from.ctypes.data

        def run() -> None:
            for _, _, offset, _, to in next(plans):
                ctypes.memmove(to, source + offset, size)

        return run


def _turns(calls: dict[str, Callable[[], None]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of each call in each round, the median of those in its turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(time_calls(call, seconds)[0])
    return found


def _against_memcpy(
    reads: _Reads, sizes: Sequence[tuple[int, int]], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    rows = []
    for size, count in sizes:
        calls = {"ours": reads.at_once(size, count), "memcpy": reads.memcpy(size, count)}
        times = _turns(calls, rounds, seconds)
        rows.append(_row(f"{count} x {_text(size)} at once", size * count, times["ours"], "memcpy", times["memcpy"]))
    return rows


def _small(reads: _Reads, rounds: int, seconds: float) -> dict[str, Any]:
    calls = {"ours": reads.at_once(_SMALL, _MANY), "singly": reads.singly(_SMALL, _MANY)}
    times = _turns(calls, rounds, seconds)
    return _row(f"{_MANY} x {_text(_SMALL)} at once", _SMALL * _MANY, times["ours"], "one at a time", times["singly"])


def _perftest(size: int, outstanding: int, iterations: int) -> float:
    """Bytes a second of `ucx_perftest -t ucp_get` over TCP on this machine."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("ucx_perftest is part of the package libucx-cu12")
    folder = pathlib.Path(spec.submodule_search_locations[0])
    (port,) = free_ports(1)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib"), "UCX_TLS": "tcp,self"}
    program = [str(folder / "bin" / "ucx_perftest"), "-p", str(port)]
    options = ["-t", "ucp_get", "-s", str(size), "-n", str(iterations), "-O", str(outstanding), "-f"]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    server, said = subprocess.Popen(program, **quiet), ""
    try:
        for _ in range(50):
            time.sleep(0.1)
            command = [program[0], "127.0.0.1", *program[1:], *options]
            client = subprocess.run(command, timeout=_PERFTEST_SECONDS, **quiet)
            said = client.stdout
            # With -f it prints the final line alone: iterations, median, average and overall latency, then the
            # average and the overall bandwidth in MiB/s.
            numbers = re.findall(r"[\d.]+", said.strip().splitlines()[-1]) if said.strip() else []
            if client.returncode == 0 and len(numbers) >= 6:
                return float(numbers[-3]) * _MEBIBYTE
        raise RuntimeError(f"ucx_perftest failed: {said}")
    finally:
        server.kill()
        server.communicate()


def _against_perftest(reads: _Reads, size: int, rounds: int, seconds: float, quick: bool) -> list[dict[str, Any]]:
    rows = []
    for outstanding in (1, 16):
        ours, theirs, call = [], [], reads.at_once(size, outstanding)
        for _ in range(rounds):
            ours.append(time_calls(call, seconds)[0])
            theirs.append(size * outstanding / _perftest(size, outstanding, 100 if quick else 300))
        name = f"ucx_perftest -O {outstanding}"
        rows.append(_row(f"{outstanding} x {_text(size)} at once", size * outstanding, ours, name, theirs))
    return rows


def _row(name: str, size: int, ours: list[float], other: str, theirs: list[float]) -> dict[str, Any]:
    return {
        "read": name, "ours_gb_s": size / statistics.median(ours) / 1e9, "against": other,
        "theirs_gb_s": size / statistics.median(theirs) / 1e9,
        "ratio": statistics.median(t / o for o, t in zip(ours, theirs, strict=True)),
    }  # fmt: skip


def _text(size: int) -> str:
    return f"{size // _MEBIBYTE} MiB" if size >= _MEBIBYTE else f"{size // 1024} KiB"


def measure(
    ways: Sequence[str], options: dict[str, int], quick: bool, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """The rows of each way."""
    region = _REGION // (8 if quick else 1)
    sizes = [(_MEBIBYTE, 1), (_MEBIBYTE, 16), (4 * _MEBIBYTE, 1), (32 * _MEBIBYTE, 1)]
    rows = []
    for way in ways:
        with Peers("ucx", (region,), deadline=60.0, environment=WAYS[way], options=options) as peers:
            reads = _Reads(peers, region)
            found = [_small(reads, rounds, seconds)]
            if way == "TCP":
                found += _against_perftest(reads, _MEBIBYTE, rounds, seconds, quick)
            else:
                found += _against_memcpy(reads, sizes, rounds, seconds)
        rows += [{"way": way, **row} for row in found]
    return rows


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m gear_jax bench --workloads transport", description=__doc__)
    parser.add_argument("--way", choices=list(WAYS), action="append", help="one of them (all)")
    parser.add_argument("--option", metavar="NAME=N", action="append", default=[], help="an option of the session")
    parser.add_argument("--quick", action="store_true", help="a small region, 2 short rounds: does everything run?")
    parser.add_argument("--rounds", type=int, default=None, help="(7; quick: 2)")
    parser.add_argument("--seconds", type=float, default=None, help="length of each turn (0.3; quick: 0.05)")
    parser.add_argument("--json", metavar="OUT", help="write everything that was measured")
    args = parser.parse_args(argv)
    if why := missing("ucx"):
        print(f"nothing to measure: {why}", file=sys.stderr)
        return 1
    rounds, seconds = args.rounds or (2 if args.quick else 7), args.seconds or (0.05 if args.quick else 0.3)
    options = {name: int(value) for name, value in (o.split("=") for o in args.option)}
    rows = measure(args.way or list(WAYS), options, args.quick, rounds, seconds)
    lines = [["way", "read", "ours GB/s", "against", "GB/s", "ratio"]]
    for r in rows:
        ours, theirs = f"{r['ours_gb_s']:.3g}", f"{r['theirs_gb_s']:.3g}"
        lines.append([r["way"], r["read"], ours, r["against"], theirs, f"{r['ratio']:.2f}"])
    print(report.as_text(lines))
    if args.json:
        with contextlib.closing(open(args.json, "w", encoding="utf-8")) as out:
            json.dump({"machine": report.machine(), "rounds": rounds, "rows": rows}, out, indent=1)
    return 0
