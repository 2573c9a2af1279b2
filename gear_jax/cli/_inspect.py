"""`inspect`: what a checkpoint holds."""

import importlib.util
import itertools
import math
import pathlib
from typing import Any

import numpy as np

from gear_jax.cli._output import Failure, bars, human, table

_BINS = 10


def run(name: str, step: int | None, png: pathlib.Path | None) -> int:
    """Prints a checkpoint, and draws it if asked to; returns 0.

    Raises:
      Failure: if it cannot be read or drawn.
    """
    if png is not None:
        _check_png(png)  # before the work, not after it
    from gear_jax import checkpoint

    try:
        summary = checkpoint.summary(name, step)
    except (ValueError, OSError) as e:
        raise Failure(str(e)) from e
    print(_describe(name, summary))
    if png is not None:
        _draw(png, name, summary)
        print(f"\nHistograms: {png}")
    return 0


def _describe(name: str, summary) -> str:
    settings, stats = summary.table, summary.stats
    steps, capacity = settings["trajectory_length"], settings["capacity"]
    lengths, priorities = _held(summary)
    sizes = [_bytes(c, settings) for c in settings["columns"]]
    columns = [("column", "shape", "dtype", "bytes")]
    columns += [
        (c["name"], str(tuple(c["shape"])), c["dtype"], human(n))
        for c, n in zip(settings["columns"], sizes, strict=True)
    ]
    columns.append(("all", "", "", human(sum(sizes))))
    total = f"{int(lengths.sum(dtype=np.int64)):,}"
    if lengths.size:
        total += f", mean length {lengths.mean():,.1f}, shortest {lengths.min():,}, longest {lengths.max():,}"
    facts = [
        ("step", f"{summary.step}, written by gear_jax {settings['gear_jax']}"),
        ("table", f"{capacity:,} slots of {steps:,} steps in {settings['partitions']} partition(s)"),
        ("selector", settings["selector"]),
        ("eviction", settings["eviction"]),
        ("anchor", settings["anchor"]),
        ("streams", str(settings["streams"])),
        ("trajectories", f"{lengths.size:,} ({lengths.size / capacity:.1%} of the slots)"),
        ("steps", total),
        ("inserted", f"{stats['inserted']:,}"),
        ("evicted", f"{stats['evicted']:,}"),
        ("rows sampled", f"{stats['sampled']:,}"),
        ("stale updates", f"{stats['stale_updates']:,}"),
        ("bad priorities", f"{stats['rejected_priorities']:,}"),
    ]
    parts = [f"Checkpoint {name}", table(facts), "Columns", table(columns, right=(3,))]
    for title, values, whole in (("Lengths", lengths, True), ("Priorities", priorities, False)):
        parts += [f"{title} of {values.size:,} trajectories", _histogram_text(values, whole=whole)]
    return "\n".join(p + ("\n" if i % 2 else "") for i, p in enumerate(parts)).rstrip()


def _held(summary) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and priorities of the slots that hold a trajectory."""
    held = summary.length > 0
    return summary.length[held], summary.priority[held]


def _bytes(column: dict[str, Any], settings: dict[str, Any]) -> int:
    from jax.numpy import dtype  # knows bfloat16 and the 8-bit floats

    step = math.prod(column["shape"]) * dtype(column["dtype"]).itemsize
    return step * settings["trajectory_length"] * settings["capacity"]


def _edges(values: np.ndarray, *, whole: bool) -> np.ndarray:
    """Borders of the bins, `float64[bins + 1]`; whole numbers if asked for."""
    low, high = float(values.min()), float(values.max())
    if whole:
        width = max(1, math.ceil((high - low + 1) / _BINS))
        return np.arange(low, high + width + 0.5, width)
    if low == high:
        return np.array([low, low])
    return np.linspace(low, high, _BINS + 1)


def _histogram_text(values: np.ndarray, *, whole: bool) -> str:
    if not values.size:
        return "  (none)"
    edges = _edges(values, whole=whole)
    if edges[0] == edges[-1]:
        return bars([values.size], [f"{edges[0]:.4g}"])
    counts, _ = np.histogram(values, edges)
    pairs = list(itertools.pairwise(edges))
    if whole:
        ends = [(a, min(b - 1, values.max())) for a, b in pairs]
        labels = [f"{a:.0f}" if a == b else f"{a:.0f} - {b:.0f}" for a, b in ends]
    else:
        labels = [f"{a:.4g} - {b:.4g}" for a, b in pairs]
    return bars(counts.tolist(), labels)


def _check_png(path: pathlib.Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise Failure("--png: got no matplotlib, wanted one. Run `python -m pip install matplotlib`.")
    if path.suffix.lower() != ".png":
        raise Failure(f"--png: got {str(path)!r}, wanted a name that ends in .png.")
    if not path.absolute().parent.is_dir():
        raise Failure(f"--png: got {str(path)!r}, wanted a file in a directory that exists. Make {path.parent} first.")


def _draw(path: pathlib.Path, name: str, summary) -> None:
    # Without pyplot: no window system, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    lengths, priorities = _held(summary)
    what = f"{lengths.size:,} of {summary.table['capacity']:,} slots, {int(lengths.sum(dtype=np.int64)):,} steps"
    figure.suptitle(f"{pathlib.PurePath(name).name}, step {summary.step}: {what}", fontsize=11)
    axes = figure.subplots(1, 2)
    for ax, values, label, colour in (
        (axes[0], lengths, "length (steps)", "#4477aa"),
        (axes[1], priorities, "priority", "#cc6677"),
    ):
        if values.size:
            edges = _edges(values, whole=label != "priority")
            if edges[0] == edges[-1]:
                edges = np.array([edges[0] - 0.5, edges[0] + 0.5])
            ax.hist(values, edges, color=colour, edgecolor="white", linewidth=0.5)
        else:
            ax.text(0.5, 0.5, "none", ha="center", va="center", transform=ax.transAxes)
        ax.set(xlabel=label, ylabel="trajectories")
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as e:
        raise Failure(f"--png: {e}") from e
