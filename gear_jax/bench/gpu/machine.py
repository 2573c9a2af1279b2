"""The card, the link and the versions that figures belong to."""

import importlib.metadata
import platform
import subprocess
from typing import Any

import jax

import gear_jax
from gear_jax.bench import report

_PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "cupy-cuda13x", "cupy-cuda12x", "torch",
    "torchrl", "flashbax",
)  # fmt: skip
_CARD = {
    "name": "card",
    "driver_version": "driver",
    "memory.total": "memory",
    "pcie.link.gen.current": "pcie_generation",
    "pcie.link.gen.max": "pcie_generation_most",
    "pcie.link.width.current": "pcie_lanes",
}


def describe() -> dict[str, Any]:
    """Host, card, link, versions. Ask after the link was busy: an idle one may stand at a lower generation."""
    versions = {"gear_jax": gear_jax.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    found = report.machine() | {"device": device.device_kind, "backend": jax.default_backend(), "versions": versions}
    found["platform_version"] = " ".join(str(device.client.platform_version).split())
    return found | _card()


def _card() -> dict[str, str]:
    """What nvidia-smi says of the first card; {} where there is none."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(_CARD)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(_CARD.values(), values, strict=True)) if len(values) == len(_CARD) and not done.returncode else {}
