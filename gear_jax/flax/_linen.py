"""The replay table as a variable of a Linen module."""

from typing import Any

import jax
from flax import linen as nn

from gear_jax._errors import value_error
from gear_jax.replay import Handle, PendingSample, Replay, ReplayState, Sample

COLLECTION = "replay"
"""The collection, and the name of the random stream, that `LinenReplay` uses."""


class LinenReplay(nn.Module):
    """A replay table whose `ReplayState` is the variable "state" of the collection "replay".

    Use it alone or as a submodule. Every method but `sample_done`, `can_sample` and `__call__` changes the table, so
    `apply` must be given `mutable=["replay"]`, and the collection that it returns takes the place of the old one:

        table = LinenReplay(gear_jax.make_replay(spec))
        variables = table.init(jax.random.key(0))
        handles, variables = table.apply(variables, trajectories, lengths, method="add", mutable=["replay"])
        sample, variables = table.apply(
            variables, 32, method="sample", mutable=["replay"], rngs={"replay": key})

    Inside `jax.jit`, donate the argument that holds the collection; without that each call copies the whole table.
    Outside jit, `apply` consumes the collection that it is given (`make_replay(donate=False)` keeps it).
    `init` runs the method it is given: an `add` in it inserts.

    Attributes:
      replay: the `gear_jax.Replay` whose functions are used.
    """

    replay: Replay

    def setup(self):
        if not self.is_initializing() and not self.has_variable(COLLECTION, "state"):
            # Linen would make a new table here on every call, and each would be lost but the last.
            raise value_error(
                f"variables[{COLLECTION!r}]", got="no state of this table", wanted="the collection that init returned",
                fix="Give apply all of it: module.apply({'params': params, 'replay': replay}, ...).",
            )  # fmt: skip
        key = self.make_rng(COLLECTION) if self.is_initializing() and self._has_stream() else None
        self.state = self.variable(COLLECTION, "state", self.replay.init, key)

    def __call__(self) -> ReplayState:
        """The state held: for `Replay.stats`, `gear_jax.checkpoint.save` and the like."""
        return self.state.value

    def add(self, trajectories: Any, lengths: Any, priorities: Any = None, version: Any = None) -> Handle:
        """As `Replay.add`: trajectories `[A, T', *shape]`, lengths and version `int32[A]`, priorities `float32[A]`.

        Returns the handles `[A]`.
        """
        self._check_mutable("add")
        args = trajectories, lengths, priorities
        self.state.value, handles = self.replay.add(self.state.value, *args, version=version)
        return handles

    def append(self, stream: Any, step: Any, done: Any, version: Any = None) -> Handle:
        """As `Replay.append`: stream `int32[K]`, step `[K, *shape]`, done `bool[K]`.

        Returns the handles `[K]` of the trajectories that were closed.
        """
        self._check_mutable("append")
        self.state.value, handles = self.replay.append(self.state.value, stream, step, done, version)
        return handles

    def sample(self, batch_size: int, key: jax.Array | None = None, out: Sample | None = None) -> Sample:
        """As `Replay.sample`.

        Args:
          batch_size: B, static.
          key: a `jax.random` key; None: the next of the stream "replay".
          out: an earlier sample to be overwritten.

        Raises:
          ValueError: without a key where `apply` was given no stream "replay", or without `mutable=["replay"]`.
        """
        self._check_mutable("sample")
        key = self._key("sample", key)
        self.state.value, sample = self.replay.sample(self.state.value, key, batch_size, out)
        return sample

    def sample_start(
        self, batch_size: int, key: jax.Array | None = None, depth: int = 2, after: Any = ()
    ) -> PendingSample:
        """As `Replay.sample_start`; `sample_done` ends it.

        Args:
          batch_size, key: as in `sample`.
          depth: how many samples may be in flight, static.
          after: arrays that the start waits for.

        Raises:
          ValueError: as `sample`.
        """
        self._check_mutable("sample_start")
        key = self._key("sample_start", key)
        self.state.value, pending = self.replay.sample_start(self.state.value, key, batch_size, depth, after)
        return pending

    def sample_done(self, pending: PendingSample, after: Any = ()) -> Sample:
        """As `Replay.sample_done`. It leaves the table as it is, and needs no mutable collection."""
        return self.replay.sample_done(pending, after)

    def update_priorities(self, handles: Handle, priorities: Any) -> None:
        """As `Replay.update_priorities`: priorities are `float32` of the handles' shape."""
        self._check_mutable("update_priorities")
        self.state.value = self.replay.update_priorities(self.state.value, handles, priorities)

    def expire(self, version: Any) -> None:
        """As `Replay.expire`: version is `int32[]`."""
        self._check_mutable("expire")
        self.state.value = self.replay.expire(self.state.value, version)

    def can_sample(self) -> jax.Array:
        """Whether a sample would hold a valid row: `bool[]`."""
        return self.replay.can_sample(self.state.value)

    def _key(self, method: str, key: jax.Array | None) -> jax.Array:
        """The key given, or the next of the stream."""
        if key is not None:
            return key
        if not self._has_stream():
            raise value_error(
                f"{method}: key", got="None, and no random stream 'replay'", wanted="one of the two",
                fix="Pass key=..., or apply(..., rngs={'replay': key}).",
            )  # fmt: skip
        return self.make_rng(COLLECTION)

    def _has_stream(self) -> bool:
        # make_rng falls back on "params".
        return self.has_rng(COLLECTION) or self.has_rng("params")

    def _check_mutable(self, method: str) -> None:
        # Before anything runs: an eager call consumes the state, and could not give the next one back.
        if not self.is_mutable_collection(COLLECTION):
            raise value_error(
                f"{method}: collection {COLLECTION!r}", got="immutable", wanted="mutable: the method changes it",
                fix=f"Write apply(..., mutable=[{COLLECTION!r}]) and keep the collection that it returns.",
            )  # fmt: skip
