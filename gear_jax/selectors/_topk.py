import dataclasses
from typing import final

import jax.numpy as jnp
import numpy as np

from gear_jax.selectors import _base


@final
@dataclasses.dataclass(frozen=True)
class TopK(_base.Ranked):
    """The trajectories of the highest priority; k is the batch size. A priority of zero is never drawn."""

    def mass(self, priority, selectable):
        return (selectable & (priority > 0) & (priority < np.inf)).astype(jnp.float32)

    def rank(self, index):
        return _base.priority_rank(index)
