import dataclasses
from typing import final

import jax.numpy as jnp
import numpy as np

from gear_jax import _axis
from gear_jax._errors import value_error
from gear_jax.selectors import _base

# Largest mass of a slot: sums over 2**31 of them stay finite. Smallest: what is not zero must not become zero.
_MAX_MASS = np.float32(2.0**96)
_MIN_MASS = np.float32(2.0**-126)


@final
@dataclasses.dataclass(frozen=True)
class Prioritized(_base.Selector):
    """Trajectories in proportion to priority ** alpha, with replacement. O(B log C) a sample and an update.

    `weight` is (N * probability) ** -beta over the largest of the batch, N being the number of trajectories that can be
    drawn. A priority of zero is never drawn. Masses are cut to [2**-126, 2**96]. Source: Schaul et al., "Prioritized
    Experience Replay" (ICLR 2016), sections 3.3 and 3.4.

    Attributes:
      alpha: exponent of the priorities, >= 0; applied once, when a slot's mass is formed. Priorities stay as given.
      beta: exponent of the importance weights, >= 0. To anneal it, form the weights from `Sample.probability`.
      stratified: False: the draws are independent. True: draw i falls in the i-th of B even parts of the mass (appendix
        B.2.1). Every trajectory is drawn as often on average, with less variance, and a large batch is drawn and read
        faster, because its slots come in ascending order; so do not cut such a batch into parts as it comes.
    """

    alpha: float = 0.6
    beta: float = 0.4
    stratified: bool = False

    def __post_init__(self):
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            try:
                good = 0 <= value <= np.finfo(np.float32).max
            except TypeError:
                good = False
            if not good:
                raise value_error(
                    f"Prioritized.{name}",
                    got=repr(value),
                    wanted="a finite float32 >= 0",
                    fix="Write Prioritized(0.6, 0.4).",
                )

    def mass(self, priority, selectable):
        drawn = selectable & (priority > 0) & (priority < np.inf)
        power = jnp.clip(jnp.where(drawn, priority, 1.0) ** np.float32(self.alpha), _MIN_MASS, _MAX_MASS)
        return jnp.where(drawn, power, np.float32(0))

    def select(self, state, index, key, batch_size, axis=None):
        return _base.draw_by_mass(index, key, batch_size, self.stratified, axis), state

    def weigh(self, selection, axis=None):
        # N cancels out of the normalised weight.
        drawn, probability = selection.slot >= 0, selection.probability
        smallest = jnp.min(jnp.where(drawn, probability, np.float32(np.inf)), initial=np.float32(np.inf))
        smallest = _axis.least(smallest, axis)
        ratio = jnp.where(drawn, probability, 1.0) / jnp.where(smallest < np.inf, smallest, 1.0)
        # A valid row keeps some weight, however steep beta makes it.
        weight = jnp.maximum(ratio ** np.float32(-self.beta), _MIN_MASS)
        return jnp.where(drawn, weight, np.float32(0))
