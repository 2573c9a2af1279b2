import dataclasses
from typing import final

from gear_jax.selectors import _base


@final
@dataclasses.dataclass(frozen=True)
class Lifo(_base.Ranked):
    """The newest trajectories, newest first; nothing is consumed."""

    def rank(self, index):
        return ~_base.age_rank(index)  # order turned round, above NEVER still: an age is never 2**32 - 1
