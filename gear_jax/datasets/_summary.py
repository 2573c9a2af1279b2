"""What `load` tells about a dataset."""

import dataclasses

import numpy as np


class UnmarkedTimeoutWarning(UserWarning):
    """Episodes were cut off without the file saying so; they were loaded as truncated."""


class LoadInterrupted(RuntimeError):
    """Reading failed after the dataset had been checked and in part inserted (a disk error, a file that
    changed).

    Attributes:
      state: the replay state with what was inserted so far; the state that was given to `load` is consumed.
      episodes: how many episodes it holds of this dataset in whole.
    """

    def __init__(self, source: str, error: Exception, state, episodes: int):
        super().__init__(
            f"{source}: reading failed in the second pass ({error}). `error.state` is the state to go on "
            f"with; it holds {episodes} whole episodes of this dataset."
        )
        self.state = state
        self.episodes = episodes


@dataclasses.dataclass(frozen=True, eq=False)
class LoadSummary:
    """A dataset in numbers.

    Attributes:
      source: the dataset.
      episodes: E, how many there were.
      trajectories: how many went into the table: more than E where long episodes were split.
      steps: over all episodes.
      lengths: int64[E].
      returns: float64[E], the undiscounted sums of the recorded rewards.
      terminated: episodes that ended in a terminal state.
      truncated: episodes that were cut off, unmarked ones included. An episode can be both.
      unmarked_timeouts: the names of the episodes that were cut off without the file saying so.
    """

    source: str
    episodes: int
    trajectories: int
    steps: int
    lengths: np.ndarray
    returns: np.ndarray
    terminated: int
    truncated: int
    unmarked_timeouts: tuple[str, ...]

    @property
    def mean_return(self) -> float:
        """Mean over the episodes."""
        return float(self.returns.mean())

    @property
    def best_return(self) -> float:
        """The largest."""
        return float(self.returns.max())

    @property
    def worst_return(self) -> float:
        """The smallest."""
        return float(self.returns.min())

    def __str__(self) -> str:
        rows = (
            ("dataset", self.source),
            ("episodes", f"{self.episodes} ({self.trajectories} trajectories, {self.steps} steps)"),
            ("length", f"{self.lengths.min()} to {self.lengths.max()} steps"),
            (
                "return",
                f"mean {self.mean_return:.2f}, best {self.best_return:.2f}, worst {self.worst_return:.2f}",
            ),
            ("ends", f"{self.terminated} terminated, {self.truncated} truncated"),
            ("unmarked", f"{len(self.unmarked_timeouts)} timeouts that the file does not mark"),
        )
        return "\n".join(f"{name:<9} {value}" for name, value in rows)


def unmarked_message(names: tuple[str, ...], total: int) -> str:
    """The text of an `UnmarkedTimeoutWarning`: names the first few episodes."""
    shown = ", ".join(names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (
        f"{len(names)} of {total} episodes were cut off without being marked: {shown}{more}. They are loaded "
        "as truncated, not as terminated. Mark them in `timeouts` or `truncations`, or pass D4RLSource(path, "
        "max_episode_steps=...); all names are in the summary's `unmarked_timeouts`."
    )
