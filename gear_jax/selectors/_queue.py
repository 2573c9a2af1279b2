import dataclasses
from typing import final

from gear_jax.selectors import _base


@final
@dataclasses.dataclass(frozen=True)
class Queue(_base.Ranked):
    """Each trajectory at most `times` times, the oldest first; then it is gone, and its slot free.

    For on-policy training: a batch holds no trajectory twice, so with `times=k` the same rows come in k samples, and
    then the next ones. What a sample asks for beyond what is there is marked `valid=False`. O(C log C) a sample.

    Attributes:
      times: how often, at least 1.
    """

    times: int = 1  # pyright: ignore[reportIncompatibleVariableOverride]

    def rank(self, index):
        return _base.age_rank(index)
