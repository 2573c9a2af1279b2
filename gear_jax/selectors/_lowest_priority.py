import dataclasses
from typing import final

from gear_jax.selectors import _base


@final
@dataclasses.dataclass(frozen=True)
class LowestPriority(_base.Ranked):
    """The trajectories of the lowest priority, zero included. Made for `make_replay(eviction=...)`."""

    def rank(self, index):
        return -_base.priority_rank(index)
