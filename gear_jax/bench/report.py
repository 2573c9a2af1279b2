"""The verdicts, the tables in text and Markdown, and the plot.

A row's target (see `workloads.Row`): at least `target` times the speed of the best peer; where the target is
1 and the row moves less than `SMALL_BYTES`, at most `DISPATCH_SECONDS` above the best peer's time instead;
and at least `ceiling` of a two-thread memcpy of the same rows where that is given.
"""

import os
import platform
from collections.abc import Iterable, Mapping
from typing import Any

from .workloads import SMALL_BYTES, Row, Workload

DISPATCH_SECONDS = 60e-6
OURS, CEILING, BARE = "gear_jax", "memcpy", "numpy"
PEERS = ("flashbax", "flashbax_async", "cpprb", "torchrl", "reverb", BARE)
_CEILING_VARIANT = "2 threads"


def machine() -> dict[str, Any]:
    """The processor, cores and memory of this machine."""
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine())
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gb": round(pages * page / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def _best(cells: Mapping[str, Any], engines: Iterable[str]) -> str | None:
    timed = [engine for engine in engines if "seconds" in cells.get(engine, {})]
    return min(timed, key=lambda engine: cells[engine]["seconds"]) if timed else None


def _against(row: Row, workload: Workload, cells: Mapping[str, Any], peers: Iterable[str]) -> dict[str, Any]:
    best = _best(cells, peers)
    if best is None or "seconds" not in cells.get(OURS, {}):
        return {"peer": best, "ratio": None, "pass": None}
    ours, theirs = cells[OURS]["seconds"], cells[best]["seconds"]
    passed = theirs / ours >= row.target
    if row.target == 1.0 and workload.row_bytes(row) < SMALL_BYTES:
        passed = ours - theirs <= DISPATCH_SECONDS
    return {"peer": best, "ratio": theirs / ours, "above_us": (ours - theirs) * 1e6, "pass": passed}


def verdict(row: Row, workload: Workload, cells: Mapping[str, Any]) -> dict[str, Any]:
    """A row's verdict.

    Returns:
        "libraries" and "peers" (the libraries and NumPy), each with the best one, the ratio of speeds ours /
        best (None where one is absent) and whether the target is met; "memcpy", the share of the ceiling;
        "pass", whether all targets are met against all peers (None where something was not measured).
    """
    libraries = _against(row, workload, cells, [peer for peer in PEERS if peer != BARE])
    peers = _against(row, workload, cells, PEERS)
    found: dict[str, Any] = {"libraries": libraries, "peers": peers, "memcpy": None, "pass": peers["pass"]}
    ceiling = cells.get(CEILING, {}).get("variants", {}).get(_CEILING_VARIANT)
    if ceiling and "seconds" in cells.get(OURS, {}):
        found["memcpy"] = ceiling["seconds"] / cells[OURS]["seconds"]
    if row.ceiling is not None and found["pass"] is not None:
        found["pass"] = None if found["memcpy"] is None else found["pass"] and found["memcpy"] >= row.ceiling
    return found


def target_text(row: Row, workload: Workload) -> str:
    """The row's target in a few characters."""
    if row.target != 1.0:
        text = f">= {row.target:g}x"
    elif workload.row_bytes(row) < SMALL_BYTES:
        text = f"<= +{DISPATCH_SECONDS * 1e6:.0f} us"
    else:
        text = ">= 1x"
    return text if row.ceiling is None else f"{text}, {row.ceiling:g} memcpy"


def figure(row: Row, workload: Workload, cell: Mapping[str, Any]) -> str:
    """A cell of the table: the figure in the row's unit with its marks, or "-"."""
    if "seconds" not in cell:
        return "WRONG" if "wrong" in cell else "failed" if "failed" in cell else "-"
    seconds = cell["seconds"]
    value = {"GB/s": workload.row_bytes(row) / seconds / 1e9, "ms": seconds * 1e3, "us": seconds * 1e6}[row.unit]
    text = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return text + cell.get("mark", "") + ("»" if cell.get("pipeline") else "")


def _passed(value: bool | None) -> str:
    return "n/a" if value is None else "pass" if value else "FAIL"


def _ratio(found: Mapping[str, Any]) -> str:
    return "-" if found["ratio"] is None else f"{found['ratio']:.2f}"


def speed_lines(result: Mapping[str, Any], loads: Mapping[str, Workload]) -> list[list[str]]:
    """The table of figures, its header first."""
    engines = [engine for engine in (OURS, *PEERS, CEILING) if engine in result["options"]["engines"]]
    lines = [["row", "unit", *engines]]
    for workload, row in _rows(result, loads):
        cells = result["rows"][row.name]
        lines.append([row.name, row.unit, *(figure(row, workload, cells.get(engine, {})) for engine in engines)])
    return lines


def verdict_lines(result: Mapping[str, Any], loads: Mapping[str, Workload]) -> list[list[str]]:
    """The table of verdicts, its header first."""
    lines = [["row", "target", "ours", "best library", "x", "", "best peer", "x", "2-thread memcpy x", "verdict"]]
    for workload, row in _rows(result, loads):
        cells, found = result["rows"][row.name], result["verdicts"][row.name]
        named = []
        for group in ("libraries", "peers"):
            peer = found[group]["peer"]
            named.append("-" if peer is None else f"{peer} {figure(row, workload, cells[peer])}")
        share = "-" if found["memcpy"] is None else f"{found['memcpy']:.2f}"
        ours = figure(row, workload, cells.get(OURS, {}))
        if "seconds" in cells.get(OURS, {}):
            ours = f"{ours} {row.unit}"
        lines.append(
            [
                row.name,
                target_text(row, workload),
                ours,
                named[0],
                _ratio(found["libraries"]),
                _passed(found["libraries"]["pass"]),
                named[1],
                _ratio(found["peers"]),
                share,
                _passed(found["pass"]),
            ]
        )
    return lines


def _rows(result: Mapping[str, Any], loads: Mapping[str, Workload]) -> Iterable[tuple[Workload, Row]]:
    for workload in loads.values():
        for row in workload.rows:
            if row.name in result["rows"]:
                yield workload, row


def own_lines(checks: Mapping[str, Any]) -> list[list[str]]:
    """The table of gear_jax's own promises, its header first."""
    header = [["promise", "measured", "target", "verdict"]]
    if "failed" in checks:
        return [*header, ["own checks", checks["failed"], "", "FAIL"]]
    add, peak, compiled = checks["add_at_capacity"], checks["peak_of_add"], checks["compilations"]
    times = " / ".join(f"{seconds * 1e6:.0f} us" for seconds in add["seconds"])
    sizes = " and ".join(f"{capacity:,}" for capacity in add["capacities"])
    return [
        *header,
        [
            f"add 1 at capacity {sizes}",
            f"{times}, ratio {add['ratio']:.2f}",
            "<= 1.5",
            _passed(add["ratio"] <= 1.5),
        ],
        [
            "peak memory of add / (table + batch)",
            f"{peak['peak'] / 1e6:.0f} MB of {peak['table_and_batch'] / 1e6:.0f}, ratio {peak['ratio']:.2f}",
            "<= 1.1",
            _passed(peak["ratio"] <= 1.1),
        ],
        [
            f"compilations in {compiled['calls'] - 1} more calls",
            f"{compiled['later_calls']} (first: {compiled['first_call']})",
            "0",
            _passed(compiled["later_calls"] == 0),
        ],
    ]


def problems(result: Mapping[str, Any]) -> list[str]:
    """Why cells are empty, each reason once."""
    found: dict[str, list[str]] = {}
    for name, cells in result["rows"].items():
        for engine, cell in cells.items():
            for kind in ("unsupported", "failed", "wrong"):
                if kind in cell:
                    found.setdefault(f"{engine}: {kind}: {cell[kind]}", []).append(name)
    found = {reason: rows for reason, rows in found.items() if not reason.startswith(f"{CEILING}: unsupported")}
    return [f"{reason} ({', '.join(rows)})" for reason, rows in found.items()]


def as_text(lines: list[list[str]]) -> str:
    """Lines of cells as aligned columns."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rendered = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    return "\n".join([rendered[0], "-" * max(map(len, rendered)), *rendered[1:]])


def as_markdown(lines: list[list[str]]) -> str:
    """Lines of cells as a Markdown table."""
    rule = ["---"] * len(lines[0])
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def tables(result: Mapping[str, Any], loads: Mapping[str, Workload], markdown: bool = False) -> str:
    """Everything that is shown at the end."""
    render = as_markdown if markdown else as_text
    host = result["machine"]
    parts = [
        f"{host['processor']}, {host['cores']} cores, {host['memory_gb']} GB. "
        f"Medians of {result['options']['rounds']} rounds. "
        "JAX runs with jax_cpu_enable_async_dispatch=False, in flashbax_async with True.",
        render(speed_lines(result, loads)),
        "GB/s: more is better. ms, us: less is better. ~ the nearest thing that it has. » mean of a running pipeline.",
    ]
    if OURS in result["options"]["engines"]:
        parts.append(render(verdict_lines(result, loads)))
        parts.append("x: our speed / theirs. The last verdict counts NumPy among the peers.")
    if result["own_checks"]:
        parts.append(render(own_lines(result["own_checks"])))
    found = problems(result)
    if found:
        parts.append("\n".join(("- " if markdown else "") + line for line in found))
    return "\n\n".join(parts)
