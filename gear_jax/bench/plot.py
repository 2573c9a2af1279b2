"""The picture: every engine's speed in every row, relative to gear_jax."""

from collections.abc import Mapping
from typing import Any

from .report import OURS, PEERS

_COLOURS = {
    "flashbax": "#1b7837",
    "flashbax_async": "#7fbf7b",
    "cpprb": "#2166ac",
    "torchrl": "#b2182b",
    "reverb": "#e08214",
    "numpy": "#777777",
}


def save(result: Mapping[str, Any], path: str) -> None:
    """Writes a PNG with one line per row, time of each peer over ours on a logarithmic axis.

    Args:
        result: What the run found.
        path: The PNG file.

    Raises:
        ValueError: gear_jax was not measured in any row.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name, cells in result["rows"].items() if "seconds" in cells.get(OURS, {})]
    if not names:
        raise ValueError("--plot shows speeds relative to gear_jax, and it was not measured: add it to --engines")
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.32 * len(names)), layout="constrained")
    for peer in PEERS:
        points = [
            (cells[peer]["seconds"] / cells[OURS]["seconds"], place)
            for place, cells in enumerate(result["rows"][name] for name in names)
            if "seconds" in cells.get(peer, {})
        ]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=42, color=_COLOURS[peer], label=peer, zorder=3, edgecolor="white", linewidth=0.6)
    axes.axvline(1.0, color="black", linewidth=1.5, label=OURS)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="both", color="#dddddd", linewidth=0.6)
    axes.set_xlabel(f"time of a call / time of {OURS} (right of the line: slower than {OURS})")
    figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=8, columnspacing=1.2, handletextpad=0.4)
    host = result["machine"]
    figure.suptitle(f"{host['processor']}, {host['cores']} cores", fontsize=9)
    figure.savefig(path, dpi=140)
    plt.close(figure)
