import dataclasses
from typing import final

from gear_jax.selectors import _base


@final
@dataclasses.dataclass(frozen=True)
class Stack(_base.Ranked):
    """Each trajectory at most `times` times, the newest first; then it is gone, and its slot free. Else as `Queue`.

    Attributes:
      times: how often, at least 1.
    """

    times: int = 1  # pyright: ignore[reportIncompatibleVariableOverride]

    def rank(self, index):
        return ~_base.age_rank(index)  # as in `Lifo`
