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
      times: how often a trajectory may be drawn before it is gone; None: any number of times.
    """

    alpha: float = 0.6
    beta: float = 0.4
    stratified: bool = False
    times: int | None = None

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

    def redraw(self, state, index, key, batch_size, axis=None):
        return _base.draw_by_mass(index, key, batch_size, axis=axis), state  # a stratum knows its place in the batch

    def weigh(self, selection, axis=None):
        # N cancels out of the normalised weight.
        drawn, least = selection.slot >= 0, selection.least
        if least is None:
            positive = selection.probability > 0
            least = jnp.where(positive, selection.probability, np.float32(np.inf))
            least = jnp.min(least, initial=np.float32(np.inf))
        least = _axis.least(least, axis)
        # Below 1 only where a probability is so small that it became zero.
        ratio = jnp.maximum(selection.probability / jnp.where(least < np.inf, least, 1.0), 1.0)
        # ratio ** -beta in vector code, which XLA's power on a CPU is not; exact where the ratio is 1.
        weight = jnp.exp(np.float32(-self.beta) * jnp.log(ratio))
        # A valid row keeps some weight, however steep beta makes it.
        return jnp.where(drawn, jnp.maximum(weight, _MIN_MASS), np.float32(0))
