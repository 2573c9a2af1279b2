"""From a dataset into a replay table, chunk by chunk."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from gear_jax._errors import value_error
from gear_jax.datasets._binding import Binding, bind, zero_rows
from gear_jax.datasets._episode import Episode, Source, bad, require
from gear_jax.datasets._open import open_source
from gear_jax.datasets._returns import DERIVED_COLUMNS, derive
from gear_jax.datasets._summary import LoadInterrupted, LoadSummary, UnmarkedTimeoutWarning, unmarked_message
from gear_jax.replay._config import Config
from gear_jax.replay._state import ReplayState, check_table

_CHUNK_BYTES = 8 << 20
_CHUNK_ROWS = 256


def load(
    replay: Any,
    state: Any,
    source: Any,
    *,
    columns: Any = None,
    chunk: int | None = None,
    progress: bool = True,
    return_to_go: bool = True,
    gamma: float = 1.0,
    bootstrap: Callable[[Episode], float] | None = None,
    priority: Callable[[Episode], float] | None = None,
    too_long: str = "error",
    too_many: str = "error",
) -> tuple[Any, LoadSummary]:
    """Inserts a dataset into a replay table, one episode per trajectory.

    The dataset is read twice: once to check every episode, then to insert. Whatever is wrong with the data is
    raised before anything is inserted, and the state given stays good. At any time one episode and one chunk
    are in memory; every chunk has the same shape, so `replay.add` is compiled once.

    Beside the dataset's own columns ("observation", "action", "reward", ...) a table can ask for

    - "return_to_go": g[t] = r[t] + gamma * g[t + 1]. Behind the last step of a terminated episode stands 0.
      Behind a truncated one stands `bootstrap(episode)`, or 0: then it is the return of the recorded rewards
      only.
    - "timestep": int32, from 0. "terminated", "truncated": bool, True at most at an episode's last step.

    Args:
      replay: what `make_replay` returned.
      state: its state. It is consumed, as by `replay.add`, once the data has been found good.
      source: a Minari dataset (id, folder or object), the path of a D4RL-style HDF5 file, or a `Source`.
      columns: which dataset column fills which column of the table: the tree of the table's columns with
        names in it, `{"obs": "observation", "rtg": "return_to_go", "pos": "observation/position"}`. A name
        can stand for a whole subtree (a Dict or Tuple space). None: the names of the table's columns.
      chunk: A, trajectories per insertion, rounded up to a multiple of the table's partitions so that these
        fill evenly. None: as many as fit 8 MiB, at most 256.
      progress: show a tqdm progress bar.
      return_to_go: offer the column "return_to_go"; False leaves the name to the dataset.
      gamma: the discount of "return_to_go".
      bootstrap: an estimate of what was still to come when an episode was truncated (a float per episode).
      priority: the priority of an episode's trajectories, finite and not negative, given the episode (with
        the columns that the table asks for; `episode.episode_return` is its return). None: the table's
        default for new ones.
      too_long: what to do with an episode of more than T steps: "error", or "split" it into trajectories of
        at most T steps. Return-to-go, timestep and end flags of the pieces are those of the whole episode.
      too_many: what to do when there are more trajectories than the state has free slots (in the partition that they go
        to): "error", or "evict" those that the table's eviction policy gives up.

    Returns:
      The new state, and a `LoadSummary`.

    Raises:
      ValueError: the data is bad (a `DatasetError`), does not fit the table, or an argument is wrong. The
        text names file, episode and column. Nothing has been inserted.
      LoadInterrupted: reading failed in the second pass; `error.state` is the state to go on with.
    """
    _require_choice("too_long", too_long, ("error", "split"))
    _require_choice("too_many", too_many, ("error", "evict"))
    if chunk is not None and chunk < 1:
        raise value_error("chunk", got=chunk, wanted="at least 1", fix="Pass None for a chunk of about 8 MiB.")
    replay.stats(state)  # refuses a consumed state, and what is none, before anything is read
    check_table("load", replay.config, state, 1 if replay.placement is None else replay.placement.devices)
    source = open_source(source)
    binding = bind(replay.config.table.columns, columns)
    derived = [n for n in DERIVED_COLUMNS if n in binding.sources and (return_to_go or n != "return_to_go")]
    job = _Job(source, binding, tuple(derived), gamma, bootstrap, priority, progress)
    plan = job.check(replay.config.table.trajectory_length, too_long)
    summary = plan.summary(source.name)
    rows = _chunk_rows(replay.config.partitions, plan, binding, chunk)
    if too_many == "error":
        _require_room(replay.config, state, source.name, summary.trajectories, rows)
    if summary.unmarked_timeouts:
        message = unmarked_message(summary.unmarked_timeouts, summary.episodes)
        warnings.warn(message, UnmarkedTimeoutWarning, stacklevel=2)
    return job.insert(replay, state, plan, rows), summary


def _require_room(config: Config, state: ReplayState, name: str, trajectories: int, rows: int) -> None:
    """Refuses more trajectories than there are free slots, those that streams have open not among them."""
    used = (np.asarray(state.length) > 0).sum(axis=1)
    if state.streams is not None:
        slots = np.asarray(state.streams.slot)
        used += np.bincount(slots[slots >= 0] // config.slots, minlength=config.partitions)
    # Where `_Job.insert` puts them: a full chunk falls evenly to the partitions, the last one in runs.
    needed = np.full(config.partitions, trajectories // rows * (rows // config.partitions))
    last = trajectories % rows
    if last:
        row = np.arange(last) * rows // last
        needed += np.bincount(row * config.partitions // rows, minlength=config.partitions)
    if (used + needed <= config.slots).all():
        return
    free, capacity = config.slots - used, config.table.capacity
    where, worst = "", int(np.argmax(needed - free))
    if trajectories <= free.sum():
        where = f", {needed[worst]} of them for partition {worst}, which has {free[worst]} free slots"
    raise value_error(
        name,
        got=f"{trajectories} trajectories{where}",
        wanted=f"at most the {free.sum()} free slots of a table with a capacity of {capacity}",
        fix=f"Make the table with capacity={config.partitions * (used + needed).max()}, or pass too_many='evict'.",
    )


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise value_error(name, got=repr(value), wanted=f"one of {choices}", fix=f"Pass {name}={choices[0]!r}.")


@dataclasses.dataclass
class _Plan:
    """What the first pass learnt: a few numbers per episode, nothing of the steps."""

    steps: int  # most steps of one trajectory, T'
    lengths: list[int] = dataclasses.field(default_factory=list)
    returns: list[float] = dataclasses.field(default_factory=list)
    bootstraps: list[float] = dataclasses.field(default_factory=list)
    priorities: list[float] = dataclasses.field(default_factory=list)
    unmarked: list[str] = dataclasses.field(default_factory=list)
    terminated: int = 0
    truncated: int = 0

    @property
    def trajectories(self) -> int:
        return sum(-(-length // self.steps) for length in self.lengths)

    def whole_episodes(self, trajectories: int) -> int:
        """How many episodes the first so many trajectories complete."""
        ends = np.cumsum([-(-length // self.steps) for length in self.lengths])
        return int(np.searchsorted(ends, trajectories, side="right"))

    def summary(self, name: str) -> LoadSummary:
        return LoadSummary(
            source=name,
            episodes=len(self.lengths),
            trajectories=self.trajectories,
            steps=sum(self.lengths),
            lengths=np.asarray(self.lengths, np.int64),
            returns=np.asarray(self.returns, np.float64),
            terminated=self.terminated,
            truncated=self.truncated,
            unmarked_timeouts=tuple(self.unmarked),
        )


@dataclasses.dataclass(frozen=True)
class _Job:
    source: Source
    binding: Binding
    derived: tuple[str, ...]
    gamma: float
    bootstrap: Callable[[Episode], float] | None
    priority: Callable[[Episode], float] | None
    progress: bool

    def check(self, limit: int, too_long: str) -> _Plan:
        """First pass: raises for the first bad episode."""
        plan = _Plan(steps=limit)
        for episode in self._read("check"):
            if episode.length < 1:
                raise bad(
                    episode.source,
                    episode.id,
                    "reward",
                    got="an empty episode",
                    wanted="at least one step",
                    fix="Leave it out of the dataset.",
                )
            if episode.length > limit and too_long == "error":
                raise bad(
                    episode.source,
                    episode.id,
                    None,
                    got=f"{episode.length} steps",
                    wanted=f"at most the table's trajectory_length of {limit}",
                    fix="Make the table longer (table_spec(source) does) or pass too_long='split'.",
                )
            _require_finite_rewards(episode)
            tail = self._scalar("bootstrap", self.bootstrap, episode) if self._cut(episode) else 0.0
            episode = derive(episode, self.derived, gamma=self.gamma, bootstrap=tail)
            self.binding.values(episode)
            if self.priority is not None:
                plan.priorities.append(self._scalar("priority", self.priority, episode, low=0.0))
            plan.lengths.append(episode.length)
            plan.returns.append(episode.episode_return)
            plan.bootstraps.append(tail)
            plan.terminated += episode.terminated
            plan.truncated += episode.truncated
            if episode.unmarked_timeout:
                plan.unmarked.append(episode.name)
        if not plan.lengths:
            raise value_error(self.source.name, got="no episodes", wanted="at least one", fix="Record some first.")
        plan.steps = min(limit, max(plan.lengths))
        return plan

    def insert(self, replay: Any, state: Any, plan: _Plan, rows: int) -> Any:
        """Second pass, `rows` trajectories at a time."""
        buffers = zero_rows(self.binding, rows, plan.steps)
        lengths, priorities = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
        total, inserted, filled = plan.trajectories, 0, 0
        pieces = self._pieces(plan)
        while True:
            try:
                piece = next(pieces, None)
            except Exception as error:
                whole = plan.whole_episodes(inserted)
                raise LoadInterrupted(self.source.name, error, state, whole) from error
            if piece is None:
                return state
            values, priority = piece
            # The row decides the partition: a chunk that will not be full is spread over the rows.
            count = min(rows, total - inserted)
            row = filled * rows // count
            lengths[row], priorities[row] = len(values[0]), priority
            for buffer, value in zip(buffers, values, strict=True):
                buffer[row, : len(value)] = value
            filled += 1
            if filled == count:
                given = None if self.priority is None else priorities
                trajectories = self.binding.structure.unflatten(buffers)
                state, handles = replay.add(state, trajectories, lengths, given)
                # The insertion may read the NumPy arrays themselves: they are filled anew when it is done.
                jax.block_until_ready(handles)
                inserted, filled = inserted + count, 0
                lengths[:] = 0

    def _pieces(self, plan: _Plan) -> Iterator[tuple[list[np.ndarray], float]]:
        """Yields the arrays and the priority of every trajectory."""
        count = 0
        for i, episode in enumerate(self._read("load")):
            if i >= len(plan.lengths) or episode.length != plan.lengths[i]:
                raise ValueError(f"{episode.name}: the dataset changed while it was being loaded")
            episode = derive(episode, self.derived, gamma=self.gamma, bootstrap=plan.bootstraps[i])
            values = self.binding.values(episode)
            for low in range(0, episode.length, plan.steps):
                yield (
                    [v[low : low + plan.steps] for v in values],
                    plan.priorities[i] if plan.priorities else 0.0,
                )
            count += 1
        if count != len(plan.lengths):
            raise ValueError(f"{self.source.name}: the dataset changed while it was being loaded")

    def _cut(self, episode: Episode) -> bool:
        return self.bootstrap is not None and not episode.terminated

    def _read(self, verb: str) -> Iterator[Episode]:
        names = [name for name in self.binding.sources if name not in self.derived]
        episodes = self.source.episodes(names)
        if not self.progress:
            return episodes
        tqdm = require("tqdm").tqdm
        return iter(tqdm(episodes, desc=f"{verb} {_short(self.source.name)}", total=len(self.source), unit="episode"))

    def _scalar(self, name: str, function: Any, episode: Episode, low: float = -np.inf) -> float:
        value = float(function(episode))
        if not np.isfinite(value) or value < low:
            raise bad(
                episode.source,
                episode.id,
                None,
                got=f"{name} {value}",
                wanted=f"a finite number of at least {low}",
                fix=f"Mend the function given as `{name}`.",
            )
        return value


def _require_finite_rewards(episode: Episode) -> None:
    if "reward" not in episode.columns:
        raise bad(
            episode.source,
            episode.id,
            "reward",
            got=f"no such column (there are {sorted(episode.columns)})",
            wanted="rewards, whatever the table asks for",
            fix="Yield them from Source.episodes.",
        )
    wrong = np.flatnonzero(~np.isfinite(np.asarray(episode.columns["reward"])))
    if wrong.size:
        raise bad(
            episode.source,
            episode.id,
            "reward",
            got=f"{episode.columns['reward'][wrong[0]]} at step {wrong[0]}",
            wanted="finite rewards",
            fix="Mend the step or leave the episode out.",
        )


def _chunk_rows(partitions: int, plan: _Plan, binding: Binding, chunk: int | None) -> int:
    if chunk is None:
        chunk = min(max(_CHUNK_BYTES // max(binding.step_bytes * plan.steps, 1), 1), _CHUNK_ROWS)
        chunk = min(chunk, plan.trajectories)
    return -(-chunk // partitions) * partitions


def _short(name: str) -> str:
    return "/".join(name.replace("\\", "/").split("/")[-3:])
