"""What a run is worth: its numbers and its learning curve."""

from __future__ import annotations

import pathlib
import statistics
from typing import NamedTuple

import matplotlib
import numpy as np
from _learner import Task
from _policies import ENVIRONMENT

ASKED = (0.25, 0.5, 0.75)  # lesser returns to ask for, as shares of the dataset's best


class Result(NamedTuple):
    """One seed's run.

    Attributes:
      steps, returns: the learning curve; returns is `[evaluations, environments]`.
      losses: one for each train step.
      final: returns in fresh environments when asked for the dataset's best.
      asked: (share of the dataset's best that the policy was asked for, mean return it got).
      step_seconds: of a train step, compilation aside.
      sample_seconds: of a step that only samples.
      fixed_seconds: of a train step that learns from the same batch every time; None: not measured.
    """

    steps: list[int]
    returns: list[np.ndarray]
    losses: np.ndarray
    final: np.ndarray
    asked: list[tuple[float, float]]
    step_seconds: float
    sample_seconds: float
    fixed_seconds: float | None = None


class Size(NamedTuple):
    """How large the job is.

    Attributes:
      parameters: of the model.
      compute: the dtype its blocks compute in.
      batch, context: windows in a batch, steps in a window.
      sample_bytes: of a batch, masks included.
      table_bytes: of the columns.
      memory: memory kind of the columns.
      devices: that the table is spread over, and the batch.
    """

    parameters: int
    compute: str
    batch: int
    context: int
    sample_bytes: int
    table_bytes: int
    memory: str
    devices: int = 1


def table_of(task: Task, results: list[Result], size: Size) -> str:
    """The outcome in words and numbers."""
    rows = _returns(task, results) + _costs(results, size)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}   {value}" for name, value in rows)


def _returns(task: Task, results: list[Result]) -> list[tuple[str, str]]:
    finals = np.array([result.final.mean() for result in results])
    spread = f"  (seeds: {', '.join(f'{value:.0f}' for value in finals)})" if len(finals) > 1 else ""
    environments = np.concatenate([result.final for result in results])
    rows = [
        ("dataset, mean return", f"{task.mean_return:.1f}"),
        ("dataset, best return", f"{task.best_return:.1f}"),
        ("policy, return", f"{finals.mean():.1f}{spread}"),
        ("  worst and best of the environments", f"{environments.min():.1f}, {environments.max():.1f}"),
        ("  over the dataset's mean", f"{finals.mean() / task.mean_return:.2f} x"),
        ("  over the dataset's best", f"{finals.mean() / task.best_return:.2f} x"),
    ]
    for i, share in enumerate(ASKED):
        got = statistics.mean(result.asked[i][1] for result in results)
        rows.append((f"  asked for {share * task.best_return:.1f} instead, return", f"{got:.1f}"))
    return rows


def _costs(results: list[Result], size: Size) -> list[tuple[str, str]]:
    step = statistics.median(result.step_seconds for result in results)
    sample = statistics.median(result.sample_seconds for result in results)
    fixed = [result.fixed_seconds for result in results if result.fixed_seconds is not None]
    gathered = size.sample_bytes
    rows = [
        ("parameters", f"{size.parameters:,}  (float32; blocks compute in {size.compute})"),
        ("table", f"{_scaled(size.table_bytes)}B in {size.memory} memory{_over(size.devices)}"),
        ("batch", f"{size.batch} windows of {size.context} steps, {_scaled(gathered)}B"),
        ("train step", f"{step * 1e3:.2f} ms  ({1 / step:,.1f} a second)"),
    ]
    if fixed:
        alone = statistics.median(fixed)
        rows += [
            ("  on a fixed batch, without replay", f"{alone * 1e3:.2f} ms"),
            ("  with replay over without", f"{step / alone:.3f} x"),
        ]
    return [
        *rows,
        ("samples (windows) per second", f"{size.batch / step:,.0f}"),
        ("gathered", f"{_scaled(gathered / step)}B/s in training, {_scaled(gathered / sample)}B/s by sampling alone"),
        ("share of a step spent in replay", f"{sample / step:.2%}  ({sample * 1e6:.0f} µs of {step * 1e3:.1f} ms)"),
    ]


def _over(devices: int) -> str:
    return "" if devices == 1 else f", over {devices} devices"


def _scaled(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} G"


def plot(path: pathlib.Path, task: Task, results: list[Result]) -> None:
    """Draws the learning curve: the return of every evaluation above the loss."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(7, 6), height_ratios=(2, 1))
    for seed, result in enumerate(results):
        returns = np.array(result.returns)
        (line,) = top.plot(result.steps, returns.mean(axis=1), marker="o", markersize=3, label=f"policy, seed {seed}")
        top.fill_between(result.steps, returns.min(axis=1), returns.max(axis=1), alpha=0.2, color=line.get_color())
        window = max(len(result.losses) // 100, 1)
        smooth = np.convolve(result.losses, np.full(window, 1 / window), mode="valid")
        bottom.plot(np.arange(len(smooth)) + window, smooth, color=line.get_color())
    top.axhline(task.best_return, color="black", linestyle="--", linewidth=1, label="dataset, best")
    top.axhline(task.mean_return, color="black", linestyle=":", linewidth=1, label="dataset, mean")
    top.set(ylabel="return", title=f"Decision Transformer on {ENVIRONMENT}")
    top.set_ylim(bottom=min(0.0, top.get_ylim()[0]))
    top.legend(loc="lower right")
    bottom.set(xlabel="train step", ylabel="loss", yscale="log")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
