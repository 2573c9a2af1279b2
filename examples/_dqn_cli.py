"""What the commands of the DQN examples share: checks of options, the plot of learning curves."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any


def check(parser: argparse.ArgumentParser, options: argparse.Namespace, counts: Sequence[str]) -> None:
    """Ends the program, by `parser.error`, for options that do not fit; `counts` must be 1 or more."""
    for name in counts:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(options, name)}, wanted at least 1")
    if options.turns % options.evaluate_every:
        parser.error(f"--turns: got {options.turns}, wanted a multiple of --evaluate-every {options.evaluate_every}")
    if options.segment <= options.n:
        parser.error(f"--segment: got {options.segment}, wanted more than --n {options.n}")


def plot(path: pathlib.Path, outcomes: Sequence[Any], target: float, highest: float, how: str, xlabel: str) -> None:
    """Draws the learning curves: `seconds` and `returns` of each outcome, up to the `highest` return there is."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for seed, outcome in enumerate(outcomes):
        axes.plot(outcome.seconds, outcome.returns, marker="o", markersize=3, label=f"seed {seed}")
    axes.axhline(target, color="black", linestyle="--", linewidth=1, label="target")
    axes.set(xlabel=xlabel, ylabel="greedy return", title=f"DQN on CartPole-v1, {how}")
    axes.set_ylim(0, highest * 1.05)
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
