"""Arguments of a table in a differentiated function."""

from typing import Any

import jax
from jax.core import Tracer


def constant(tree: Any) -> Any:
    """The tree with its traced leaves cut off from differentiation: a table has no derivative."""
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if isinstance(x, Tracer) else x, tree)
