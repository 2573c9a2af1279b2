"""The command line of the example, with a preset for each kind of machine."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import jax
from _devices import first_devices
from _policies import EPISODES

PRESETS: dict[str, dict[str, Any]] = {
    # A model that two cores train in about a minute.
    "cpu": {
        "steps": 1000, "chunk": 100, "evaluate_every": 100, "batch": 64, "context": 20, "width": 64, "layers": 2,
        "heads": 4, "compute": "float32", "learning_rate": 1e-3, "weight_decay": 1e-4, "overlap": False, "compare": 0,
    },
    # A model that keeps an H100 busy for tens of milliseconds a step.
    "gpu": {
        "steps": 1000, "chunk": 50, "evaluate_every": 250, "batch": 64, "context": 128, "width": 640, "layers": 6,
        "heads": 10, "compute": "bfloat16", "learning_rate": 3e-4, "weight_decay": 1e-2, "overlap": True, "compare": 4,
    },
}  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line; what it leaves open is the preset's."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument(
        "--preset", choices=("auto", *PRESETS), default="auto", help="defaults for such a machine; auto: for this one"
    )
    first.add_argument(
        "--devices", type=int, help="train data-parallel on so many, the table spread over them; None: on one"
    )
    early = first.parse_known_args(arguments)[0]
    # Before anything asks JAX for its devices.
    devices = None if early.devices is None else first_devices(first, early.devices)
    preset = early.preset
    if preset == "auto":
        preset = "gpu" if jax.default_backend() == "gpu" else "cpu"
    parser = _parser(first, preset)
    parser.set_defaults(**PRESETS[preset])
    if devices is not None:
        parser.set_defaults(overlap=False)
    options = parser.parse_args(arguments)
    options.preset, options.devices = preset, devices
    if devices is not None and options.overlap:
        parser.error("--overlap: got it with --devices, wanted one or the other")
    if devices is not None and options.batch % len(devices):
        parser.error(f"--batch: got {options.batch}, wanted a multiple of --devices {len(devices)}")
    for name in ("steps", "evaluate_every"):
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value < 1 or value % options.chunk:
            parser.error(f"{flag}: got {value}, wanted a multiple of --chunk {options.chunk}")
    if options.width % options.heads:
        parser.error(f"--width: got {options.width}, wanted a multiple of --heads {options.heads}")
    return options


def _parser(first: argparse.ArgumentParser, preset: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"Trains a Decision Transformer from a replay table, and plays with it. Defaults: preset {preset}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        parents=[first],
        allow_abbrev=False,
    )
    add, outputs = parser.add_argument, pathlib.Path("outputs")
    add("--seeds", type=int, default=1, help="train with seeds 0 to N-1")
    add("--steps", type=int, help="train steps; a multiple of --chunk")
    add("--chunk", type=int, help="train steps in one call of the compiled program")
    add("--evaluate-every", type=int, help="steps; a multiple of --chunk")
    add("--envs", type=int, default=8, help="environments to evaluate in")
    add("--batch", type=int, help="windows in a batch")
    add("--context", type=int, help="K, the steps that the model looks back on")
    add("--width", type=int, help="of the transformer; a multiple of --heads")
    add("--layers", type=int, help="of the transformer")
    add("--heads", type=int, help="of the attention")
    add("--compute", choices=("float32", "bfloat16"), help="what the blocks compute in; parameters are float32")
    add("--learning-rate", type=float, help="peak of the schedule")
    add("--weight-decay", type=float, help="of AdamW")
    add("--overlap", action=argparse.BooleanOptionalAction, help="fetch the next sample beside the train step")
    add("--memory", choices=("pinned_host", "device"), help="where the table lies; None: pinned_host on a GPU")
    add("--compare", type=int, help="chunks to time with replay and on one batch, in turn, after training; 0: none")
    add("--alpha", type=float, default=2.0, help="episodes are drawn with return ** alpha")
    add("--clone", action="store_true", help="hide the return-to-go: behaviour cloning, for comparison")
    add("--episodes", type=int, default=EPISODES, help="to record")
    add("--recording-seed", type=int, default=0, help="decides the dataset")
    add("--datasets", type=pathlib.Path, default=outputs / "datasets", help="where the recording goes")
    add("--plot", type=pathlib.Path, default=outputs / "learning_curve.png", help="where the learning curve goes")
    return parser
