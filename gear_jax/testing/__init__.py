"""Contract suites: what an implementation must do to count as one. Tests of this package and of others call them."""

from gear_jax.testing import ops, processes, selectors
from gear_jax.testing.selectors import check_selector

__all__ = ["check_selector", "ops", "processes", "selectors"]
