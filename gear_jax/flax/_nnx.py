"""The replay table as a variable of an NNX module."""

from typing import Any

import jax
from flax import nnx

from gear_jax._errors import type_error, value_error
from gear_jax.replay import Handle, PendingSample, Replay, ReplayState, Sample

STREAM = "replay"


class ReplayVariable(nnx.Variable):
    """Holds a `ReplayState`. No `nnx.Param`: filter for it with `nnx.state(module, ReplayVariable)`."""


class NNXReplay(nnx.Module):
    """A replay table whose `ReplayState` is a `ReplayVariable`; its methods change the table in place.

        table = NNXReplay(gear_jax.make_replay(spec), rngs=nnx.Rngs(0))
        table.add(trajectories, lengths)
        sample = table.sample(32)

    Use it alone or as a submodule, outside or inside `nnx.jit`, `nnx.scan`, `nnx.grad`, ...

    `nnx.jit` takes a module's arrays in and hands new ones out. To keep the table's memory, donate the argument that
    is (or holds) the module; without that each call copies the whole table:

        @functools.partial(nnx.jit, donate_argnames=("table",))
        def train_step(model, optimizer, table): ...

    NNX puts the results back into the module, so the module stays usable after the call; only arrays taken out of it
    before (`nnx.state`, `nnx.split`) are gone. So it is outside jit, where each call consumes the state that the
    module holds and puts the next in its place. `gear_jax.assert_in_place(train_step, model, optimizer, table)` finds
    what still copies.

    Attributes:
      replay: the `gear_jax.Replay` whose functions are used.
      state: the `ReplayVariable`.
      rngs: the random stream of `sample` and `sample_start`, forked from `rngs["replay"]`; None: they must be given
        keys.
    """

    def __init__(self, replay: Replay, *, rngs: nnx.Rngs | None = None):
        """Makes an empty table.

        Args:
          replay: from `gear_jax.make_replay`.
          rngs: random streams, "replay" (or a default one) among them: for `sample` and for what the selector keeps to
            itself. None: `sample` must be given keys.
        """
        if not isinstance(replay, Replay):
            fix = "Pass gear_jax.make_replay(...)."
            raise type_error("replay", got=type(replay).__name__, wanted="a Replay", fix=fix)
        self.replay = replay
        self.rngs = None if rngs is None else rngs[STREAM].fork()
        self.state = ReplayVariable(replay.init(None if self.rngs is None else self.rngs()))

    def __call__(self) -> ReplayState:
        """The state held: for `Replay.stats`, `gear_jax.checkpoint.save` and the like."""
        return self.state.get_value()

    def add(self, trajectories: Any, lengths: Any, priorities: Any = None, version: Any = None) -> Handle:
        """As `Replay.add`: trajectories `[A, T', *shape]`, lengths and version `int32[A]`, priorities `float32[A]`.

        Returns the handles `[A]`.
        """
        state, handles = self.replay.add(self(), trajectories, lengths, priorities, version=version)
        self.state.set_value(state)
        return handles

    def append(self, stream: Any, step: Any, done: Any, version: Any = None) -> Handle:
        """As `Replay.append`: stream `int32[K]`, step `[K, *shape]`, done `bool[K]`.

        Returns the handles `[K]` of the trajectories that were closed.
        """
        state, handles = self.replay.append(self(), stream, step, done, version)
        self.state.set_value(state)
        return handles

    def sample(self, batch_size: int, key: jax.Array | None = None, out: Sample | None = None) -> Sample:
        """As `Replay.sample`.

        Args:
          batch_size: B, static.
          key: a `jax.random` key; None: the next of the module's stream.
          out: an earlier sample to be overwritten.

        Raises:
          ValueError: without a key where the module was made without `rngs`.
        """
        state, sample = self.replay.sample(self(), self._key("sample", key), batch_size, out)
        self.state.set_value(state)
        return sample

    def sample_start(
        self, batch_size: int, key: jax.Array | None = None, depth: int = 2, after: Any = ()
    ) -> PendingSample:
        """As `Replay.sample_start`; `sample_done` ends it. An `nnx.Variable` holds a `PendingSample` as it is.

        Args:
          batch_size, key: as in `sample`.
          depth: how many samples may be in flight, static.
          after: arrays that the start waits for.

        Raises:
          ValueError: without a key where the module was made without `rngs`.
        """
        state, pending = self.replay.sample_start(self(), self._key("sample_start", key), batch_size, depth, after)
        self.state.set_value(state)
        return pending

    def sample_done(self, pending: PendingSample, after: Any = ()) -> Sample:
        """As `Replay.sample_done`."""
        return self.replay.sample_done(pending, after)

    def update_priorities(self, handles: Handle, priorities: Any) -> None:
        """As `Replay.update_priorities`: priorities are `float32` of the handles' shape."""
        self.state.set_value(self.replay.update_priorities(self(), handles, priorities))

    def expire(self, version: Any) -> None:
        """As `Replay.expire`: version is `int32[]`."""
        self.state.set_value(self.replay.expire(self(), version))

    def can_sample(self) -> jax.Array:
        """Whether a sample would hold a valid row: `bool[]`."""
        return self.replay.can_sample(self())

    def _key(self, method: str, key: jax.Array | None) -> jax.Array:
        """The key given, or the next of the stream."""
        if key is not None:
            return key
        if self.rngs is None:
            raise value_error(
                f"{method}: key", got="None, and a module without rngs", wanted="one of the two",
                fix="Pass key=..., or make the module with NNXReplay(replay, rngs=nnx.Rngs(0)).",
            )  # fmt: skip
        return self.rngs()
