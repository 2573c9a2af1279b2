import dataclasses
from typing import final

import jax.numpy as jnp

from gear_jax.selectors import _base


@final
@dataclasses.dataclass(frozen=True)
class Uniform(_base.Selector):
    """Every selectable trajectory with the same probability 1 / N, with replacement. O(B log C) a sample.

    Attributes:
      times: how often a trajectory may be drawn before it is gone; None: any number of times.
    """

    times: int | None = None

    def mass(self, priority, selectable):
        del priority
        return selectable.astype(jnp.float32)

    def select(self, state, index, key, batch_size, axis=None):
        return _base.draw_by_mass(index, key, batch_size, axis=axis), state
