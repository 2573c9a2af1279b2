"""Contract suites: what an implementation must do to count as one. Tests of this package and of others call them."""

from gear_jax.testing import ops

__all__ = ["ops"]
