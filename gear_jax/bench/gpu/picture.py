"""The picture: GB/s by the size of a row, beside `cudaMemcpy`."""

import statistics
from collections.abc import Mapping
from typing import Any

from gear_jax.bench.gpu.findings import IN_FLIGHT, KERNEL
from gear_jax.bench.gpu.reading import size_text

_OURS = {  # series -> (label, colour, marker, line)
    "gather": ("gather", "#1b4f9c", "o", "-"),
    "unsorted": ("gather, rows as they come", "#7fb2e5", "o", "--"),
    "windows, gather": ("Decision-Transformer windows", "#0b7a4b", "D", ""),
    "windows, unsorted": ("the same, as they come", "#8fd3b6", "D", ""),
    "trajectories of 60 KB": ("trajectories of 60 KB, by B", "#5b3794", "^", ""),
    "trajectories of 12 MB": ("trajectories of 12 MB, by B", "#9a6fd0", "^", ""),
    "engine=copy": ("copy engines", "#1b9e9e", "v", "-"),
    "insert": ("insert", "#b35806", "s", "-"),
}
_PEERS = ("#b2182b", "#e08214", "#777777", "#d6604d", "#4d4d4d", "#c994c7")
_TIMED = (IN_FLIGHT, KERNEL)


def points(result: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Series -> (bytes of a row, GB/s), each place once, in order: calls in flight where they were timed so."""
    found: dict[str, dict[tuple[int, Any], float]] = {}
    for row in result["rows"].values():
        for figure in row["figures"]:
            series = figure.get("series")
            if series in _OURS and figure["timed"] in _TIMED:
                place = figure["row_bytes"], figure.get("batch")
                found.setdefault(series, {}).setdefault(place, figure["value"])
    return {series: sorted((place[0], value) for place, value in places.items()) for series, places in found.items()}


def peer_points(result: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Peer -> (bytes of a row, GB/s), of those that read host memory."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in result["rows"].values():
        for peer in row["peers"]:
            if peer.get("row_bytes") and "HBM" not in peer["name"]:
                found.setdefault(peer["name"], []).append((peer["row_bytes"], peer["value"]))
    return found


def save(result: Mapping[str, Any], path: str) -> None:
    """Writes a PNG.

    Raises:
      ValueError: there is no speed in the result.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ours, peers = points(result), peer_points(result)
    if not ours:
        raise ValueError("--plot shows speeds by the size of a row, and none was measured: add gather to --rows")
    figure, axes = plt.subplots(figsize=(9, 5.2), layout="constrained")
    for way, style in (("h2d", "-"), ("d2h", ":")):
        speeds = [row["memcpy"][way] for row in result["rows"].values() if way in row["memcpy"]]
        if speeds:
            peak = statistics.median(speeds)
            axes.axhline(
                peak, color="black", linestyle=style, linewidth=1.4, label=f"cudaMemcpy {way.upper()} {peak:.1f}"
            )
    for series, (label, colour, marker, line) in _OURS.items():
        if series in ours:
            x, y = zip(*ours[series], strict=True)
            axes.plot(x, y, color=colour, marker=marker, linestyle=line or "none", markersize=6, label=label)
    for colour, (name, places) in zip(_PEERS, sorted(peers.items()), strict=False):
        x, y = zip(*sorted(places), strict=True)
        axes.plot(x, y, color=colour, marker="x", linestyle="none", markersize=7, markeredgewidth=1.8, label=name)
    _finish(axes, [x for places in (*ours.values(), *peers.values()) for x, _ in places])
    host = result["machine"]
    axes.set_title(f"{host.get('card', host['device'])}, JAX {host['versions'].get('jax', '?')}", fontsize=10)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _finish(axes: Any, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    ticks = [size for size in (1 << k for k in range(6, 26, 2)) if min(sizes) / 2 <= size <= max(sizes) * 2]
    axes.set_xticks(ticks, [size_text(size) for size in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of a row")
    axes.set_ylabel("GB/s")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
