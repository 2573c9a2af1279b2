"""The functions of one device, for a `jax.shard_map` or `jax.pmap` of one's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax import _axis
from gear_jax._errors import value_error
from gear_jax.replay import _append, _insert, _limits, _sample, _state
from gear_jax.replay._config import Config
from gear_jax.replay._state import Handle, ReplayState, Sample


class DeviceReplay:
    """What one of n devices does of a `Replay`: made by `Replay.per_device`, called in a function mapped over `axis`.

    A state is that of one device: P / n partitions, N / n streams, everything else whole (`gear_jax.sharding.stack`
    makes the states of n devices out of one, for pmap; in a shard_map they are the shards). All devices make the same
    calls. Columns may be given by address (`gear_jax.external.addresses`) where they are only read: that is how a
    pmapped step samples from columns in `pinned_host`, which pmap does not take as arguments.
    """

    def __init__(self, config: Config, axis: str | tuple[str, ...], batch_axis: str | None, exchange: str):
        self._config, self._axis, self._batch_axis, self._exchange = config, axis, batch_axis, exchange

    def init(self, key: jax.Array) -> ReplayState:
        """An empty table's state of this device. See `Replay.init`; the key is the same on all devices."""
        return _state.init(self._local(), key)

    def add(self, state: ReplayState, trajectories: Any, lengths: Any, priorities: Any = None, version: Any = None):
        """Inserts A / n trajectories, leaves `[A / n, T', *shape]`, into this device's partitions: see `Replay.add`.

        Given priorities, the devices tell each other the largest (one number); else nothing crosses between them.
        """
        return self._call("add", _insert.add, state, trajectories, lengths, priorities, None, version)

    def append(
        self, state: ReplayState, stream: Any, step: Any, done: Any, version: Any = None
    ) -> tuple[ReplayState, Handle]:
        """Appends this device's K steps, to streams wherever they are: see `Replay.append`. As many on all devices;
        they tell each other all of them. Of several for one stream the first device's first counts."""

        def append(config, state, *given):
            everyone = jax.tree.map(lambda x: _axis.all_gather(jnp.asarray(x), config.axis), given)
            state, handles = _append.append(config, state, *everyone)
            k = handles.slot.shape[0] // _axis.size(config.axis)
            own = lambda x: jax.lax.dynamic_slice_in_dim(x, _axis.index(config.axis) * np.int32(k), k)  # noqa: E731
            return state, jax.tree.map(own, handles)

        given = (stream, step, done, *(() if version is None else (_limits.each(version, jnp.shape(stream)[0]),)))
        return self._call("append", append, state, *given)

    def sample(self, state: ReplayState, key: jax.Array, batch_size: int) -> tuple[ReplayState, Sample]:
        """Draws a batch of B rows over all devices; this one gets its part, B over the devices of `batch_axis`.

        Args:
          state: of this device.
          key: the same on all devices.
          batch_size: B, static.
        """
        return self._call("sample", _sample.sample, state, key, _sample.check_batch(batch_size))

    def update_priorities(self, state: ReplayState, handles: Handle, priorities: Any) -> ReplayState:
        """Sets priorities of this device's part of a batch, wherever the trajectories are: see
        `Replay.update_priorities`. The devices tell each other all of them."""

        def update(config, state, handles, priorities):
            gather = lambda x: _axis.all_gather(jnp.asarray(x), config.batch_axis)  # noqa: E731
            return _insert.update_priorities(config, state, jax.tree.map(gather, handles), gather(priorities)), ()

        return self._call("update_priorities", update, state, handles, priorities)[0]

    def expire(self, state: ReplayState, version: Any) -> ReplayState:
        """See `Replay.expire`; the same version on all devices. Nothing crosses between them."""
        return self._call("expire", _limits.expire, state, version)[0]

    def _local(self) -> Config:
        if not _axis.names(self._axis):
            fix = "Name the axis of your pmap or shard_map."
            raise value_error("axis", got=repr(self._axis), wanted="a mapped axis", fix=fix)
        return self._config.local(self._axis, self._batch_axis, self._exchange)

    def _call(self, name, function, state, *args):
        config = self._local()
        _state.check_table(name, config, state)
        return function(config, state, *args)
