"""Shape letters and aliases used in every docstring of the package.

C capacity in slots, P partitions, S slots per partition (P * S = C), T steps of a slot, B batch, W window length,
A trajectories inserted at once, N streams, n devices.
"""

from typing import Any

Tree = Any
"""A pytree."""
