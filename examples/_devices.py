"""Which devices an example runs on."""

from __future__ import annotations

import argparse

import jax


def first_devices(parser: argparse.ArgumentParser, count: int | None) -> list[jax.Device]:
    """The first `count` devices, or all of them.

    A CPU is one device, unless it is told to be more before JAX starts it; so it is told here. Ends the program with a
    message if there are not as many.
    """
    if count is not None and count >= 1:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            pass  # JAX has started: there are as many as there are
    devices = jax.devices()
    count = len(devices) if count is None else count
    if not 1 <= count <= len(devices):
        parser.error(f"--devices: got {count}, wanted 1 to {len(devices)}, the {devices[0].platform} devices there are")
    return devices[:count]
