import dataclasses
from typing import final

from gear_jax.selectors import _base


@final
@dataclasses.dataclass(frozen=True)
class Fifo(_base.Ranked):
    """The oldest trajectories, oldest first; nothing is consumed. As an eviction policy it costs O(A), not O(C)."""

    def rank(self, index):
        return _base.age_rank(index)
