"""How a `Replay` calls its functions of a state: checked, over the devices of a mesh, and outside jit compiled."""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from gear_jax._errors import type_error, value_error
from gear_jax.ops._place import memory_kind
from gear_jax.replay import _memory, _state
from gear_jax.replay._config import Config, check_divides
from gear_jax.replay._mesh import Placement, broadcast
from gear_jax.replay._state import Handle, ReplayState, Sample, with_fields

FIELDS = tuple(field.name for field in dataclasses.fields(ReplayState))
# What a call changes of a state, where that is not all of it. The rest stays out of the results of the compiled call,
# each of which costs time, and is not copied where the state is kept.
_SAMPLED = ("counters", "selector", "ticket")
_CHANGED = {
    "sample": _SAMPLED,
    "sample_start": _SAMPLED,
    "sample_next": _SAMPLED,
    "update_priorities": ("priority", "mass", "sums", "max_priority", "counters", "ticket"),
}
# What else they change where a draw may be a trajectory's last.
_DRAWN = ("limits", "length", "priority", "mass", "sums")
# Arguments of the compiled call that are static: batch sizes, queues, depths.
_STATIC = {"sample": (3,), "sample_start": (3, 4, 5), "sample_next": (5, 6, 7)}
# How the arguments of a call lie on a mesh: cut along the rows that are added, along the batch, or had by all devices;
# None: no array.
_LAYOUTS = {
    "add": ("held", "held", "held", None, "held"),
    "append": ("all", "all", "all", "all"),
    "expire": ("all",),
    "sample": ("all", None, "batch"),
    "update_priorities": ("all", "all"),
}


class _Program(NamedTuple):
    """A compiled call: it takes the fields of a state that it changes, those that it only reads, and its arguments, and
    returns the changed ones and the result. Lists, because jit goes through them faster than through dictionaries."""

    call: Callable
    changed: tuple[str, ...]
    kept: tuple[str, ...]


class Calls:
    """The calls of a table. `function(config, state, *args)` returns the next state and something beside it.

    Attributes:
      config: of the whole table.
      placement: its mesh, or None.
      donate: whether a call outside jit consumes the state.
    """

    def __init__(self, config: Config, placement: Placement | None, donate: bool):
        self.config, self.placement, self.donate = config, placement, donate
        self._compiled: dict[str, Any] = {}
        self._programs: dict[str, _Program] = {}
        self._last: Callable[[], ReplayState | None] = lambda: None  # what the last call outside jit returned
        self._shardings: dict[Any, list[NamedSharding]] = {}

    def init(self, function: Callable, key: jax.Array) -> Any:
        """`function(config, key)`, which returns a state, on each device with the config that it has."""
        if self.placement is None:
            return function(self.config, key)
        local = lambda key: function(self._local(), key)  # noqa: E731
        return self.placement.run(local, (PartitionSpec(),), self._state_spec())(key)

    def compiled_init(self, name: str, function: Callable) -> Callable:
        """The same, compiled."""
        if name not in self._compiled:
            self._compiled[name] = jax.jit(functools.partial(self.init, function))
        return self._compiled[name]

    def of_index(self, name: str, function: Callable, state: ReplayState) -> jax.Array:
        """`function(config, state)` of a state without its columns, compiled; it returns an array with a P."""
        if name not in self._compiled:
            placement, run = self.placement, lambda state: function(self._local(), state)
            if placement is None:
                run = functools.partial(function, self.config)
            else:
                run = placement.run(run, (self._state_spec().replace(columns=None),), placement.held)
            self._compiled[name] = jax.jit(run)
        return self._compiled[name](state.replace(columns=None))

    def run(self, name: str, function: Callable, state: ReplayState, *args: Any) -> tuple[ReplayState, Any]:
        """Calls a function: as part of the program that is being traced, or as a program of its own.

        Raises:
          ValueError: if the state is consumed, is of another table, or cannot be written in place.
        """
        if traced(state.ticket, *jax.tree.leaves(args)):
            return self._checked(name, function, state, *args)
        check_alive(name, state)
        if self._last() is not state:  # what a call has returned lies where the calls want it
            state = self.placed(state, name)
        program = self._programs.get(name) or self._jitted(name, function)
        fields = vars(state)
        try:
            after, result = program.call([fields[x] for x in program.changed], [fields[x] for x in program.kept], *args)
        except ValueError as e:
            if "external reference" not in str(e):
                raise
            raise value_error(
                f"{name}: state", got="a column that NumPy, or another library, still looks at",
                wanted="columns of its own, to write in place",
                fix="Read columns with replay.sample or ops.gather, or look at a copy: "
                "jax.device_put(column, jax.memory.Space.Device).",
            ) from e  # fmt: skip
        state = with_fields(state, program.changed, after)
        self._last = weakref.ref(state)
        return state, result

    def _jitted(self, name: str, function: Callable) -> "_Program":
        # `out` of a sample is given up also where the state is kept.
        donated = ((0,) if self.donate else ()) + ((4,) if name == "sample" else ())
        if name.startswith("sample") and self.config.rows is not None:
            donated = ()  # it may fail because of another process, and the state is not to go with it
        changed = self._changed(name)
        kept = tuple(x for x in FIELDS if x not in changed)
        run = functools.partial(self._split, name, function, (*changed, *kept))
        call = jax.jit(run, static_argnums=_STATIC.get(name, ()), donate_argnums=donated)
        self._compiled[name] = call
        return self._programs.setdefault(name, _Program(call, changed, kept))

    def _changed(self, name: str) -> tuple[str, ...]:
        """The fields of a state that a call changes."""
        changed = _CHANGED.get(name, FIELDS)
        if name == "update_priorities" and self.config.remote is not None:
            changed = (*changed, "remote")
        if changed is _SAMPLED and self.config.selector.times is not None:
            changed += _DRAWN
        return changed

    def _split(self, name: str, function: Callable, names: tuple[str, ...], changed: list, kept: list, *args: Any):
        """A function of a state, from and to the fields that it changes; runs at trace time only."""
        # Static arguments of jit keep their places: (changed, kept) stand for the state and what binds the function.
        state = ReplayState(**dict(zip(names, (*changed, *kept), strict=True)))
        state, result = self._checked(name, function, state, *args)
        return [getattr(state, field) for field in names[: len(changed)]], result

    def _checked(self, name: str, function: Callable, state: ReplayState, *args: Any):
        """Calls a function of a state that has been seen to be of this table; runs at trace time only."""
        _state.check_table(name, self.config, state, 1 if self.placement is None else self.placement.devices)
        if self.placement is None:
            return function(self.config, state, *args)
        return self._over_devices(name, function, state, *args)

    def _over_devices(self, name: str, function: Callable, state: ReplayState, *args: Any):
        placement, layouts = self.placement, _LAYOUTS.get(name)
        assert placement is not None
        if layouts is None:
            raise value_error(
                name, got="a table over a mesh", wanted="one on a single device",
                fix="Use sample: in one program XLA overlaps it with what does not depend on it.",
            )  # fmt: skip
        # XLA crashes on arrays without elements over several devices.
        if name == "append" and np.size(args[0]) == 0:
            # The step of no stream is the same: the clock goes on.
            step = jax.tree.map(lambda x: jnp.zeros((1, *np.shape(x)[1:]), x.dtype), args[1])
            none = jnp.full((1,), -1, jnp.int32), step, jnp.zeros((1,), bool), None
            state, handles = self._over_devices(name, function, state, *none)
            return state, jax.tree.map(lambda x: x[:0], handles)
        if name == "update_priorities" and np.size(args[0].slot) == 0:
            return state, ()
        if name == "add" and np.size(args[1]) == 0:
            return state, Handle(jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.uint32))
        if name == "add":
            args = _with_steps(*args)
        specs = {"held": placement.held, "batch": placement.batch, "all": PartitionSpec()}
        arrays = [(x, specs[layout]) for x, layout in zip(args, layouts, strict=True) if layout is not None]
        for x, layout in zip(args, layouts, strict=True):
            if layout == "held":
                n = placement.devices
                for leaf in jax.tree.leaves(x):
                    check_divides(f"{name}: rows", np.shape(leaf)[0], n, f"the {n} devices of {placement.axis}")

        def local(state, *given):
            rest = iter(given)
            full = [x if layout is None else next(rest) for x, layout in zip(args, layouts, strict=True)]
            return function(self._local(), state, *full)

        held: Any = placement.held
        everywhere: Any = PartitionSpec()
        results = {
            "add": Handle(held, held),
            "append": Handle(everywhere, everywhere),
            "sample": placement.sample(),
            "update_priorities": (),
            "expire": (),
        }
        whole = self._state_spec()
        run = placement.run(local, (whole, *(spec for _, spec in arrays)), (whole, results[name]))
        return run(state, *(x for x, _ in arrays))

    def placed(self, state: ReplayState, name: str = "place") -> ReplayState:
        """The state as the table keeps it; one that lies otherwise would be moved again by every call.

        Raises:
          ValueError: if it is of another table, or of another number of devices.
        """
        if self.placement is not None:
            wanted = self._wanted(jax.tree.structure(state))
            leaves, tree = jax.tree.flatten(state)
            if not all(map(_lies, leaves, wanted)):
                _state.check_table(name, self.config, state, self.placement.devices)
                index = [x if _lies(x, to) else jax.device_put(x, to) for x, to in zip(leaves, wanted, strict=True)]
                state = tree.unflatten(index)
        return _memory.place(self.config, self.placement, state)

    def _wanted(self, tree: Any) -> list[Any]:
        """The shardings of the leaves of a state."""
        if tree not in self._shardings:
            template = tree.unflatten(range(tree.num_leaves))
            self._shardings[tree] = jax.tree.leaves(broadcast(self.shardings(), template))
        return self._shardings[tree]

    def shardings(self) -> Any:
        """How a state lies on the mesh, a tree like it of `NamedSharding`s."""
        placement = self.placement
        assert placement is not None
        specs = self._state_spec()
        columns = placement.sharding(specs.columns, memory_kind(self.config.memory))
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        stamp = None if specs.stamp is None else columns  # which lie with them
        return jax.tree.map(placement.sharding, specs, is_leaf=is_spec).replace(columns=columns, stamp=stamp)

    def _local(self) -> Config:
        placement = self.placement
        assert placement is not None
        return self.config.local(placement.axis, placement.batch_axis, placement.way)

    def _state_spec(self) -> ReplayState:
        placement = self.placement
        assert placement is not None
        selector = placement.held if self.config.selection == "decentralized" else PartitionSpec()
        return placement.state(self.config.streams > 0, selector)


def _with_steps(trajectories: Any, lengths: Any, *rest: Any) -> Any:
    # Of no steps, one of length 0 is the same.
    leaves = jax.tree.leaves(trajectories)
    if any(np.ndim(x) < 2 or np.shape(x)[1] for x in leaves):
        return trajectories, lengths, *rest
    step = lambda x: jnp.zeros((*np.shape(x)[:1], 1, *np.shape(x)[2:]), x.dtype)  # noqa: E731
    return jax.tree.map(step, trajectories), jnp.zeros_like(jnp.asarray(lengths)), *rest


def recyclable(out: Any):
    """The (data, mask) of a sample whose memory may be taken.

    Raises:
      TypeError, ValueError: if it is no sample, or consumed.
    """
    if not isinstance(out, Sample):
        raise type_error("out", got=type(out).__name__, wanted="a Sample", fix="Pass an earlier sample of this replay.")
    arrays = [x for x in jax.tree.leaves((out.data, out.mask)) if not isinstance(x, (np.ndarray, Tracer))]
    if any(x.is_deleted() for x in arrays):
        raise value_error(
            "out", got="a sample that an earlier call has consumed", wanted="one whose memory is still its own",
            fix="Pass the last sample, and pass each only once.",
        )  # fmt: skip
    return out.data, out.mask


def _lies(x: Any, sharding: NamedSharding) -> bool:
    return isinstance(x, jax.Array) and (x.sharding == sharding or x.sharding.is_equivalent_to(sharding, x.ndim))


def traced(*leaves: Any) -> bool:
    """Whether any of them is part of a program that is being traced."""
    return any(isinstance(x, Tracer) for x in leaves)


def check_alive(name: str, state: ReplayState) -> None:
    """Raises a ValueError if a call has consumed the state."""
    # Leaves that were restored from bytes may be NumPy arrays, which nothing consumes. Each call that consumes a state
    # consumes one of these: a sample of what others expose keeps the ticket.
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in (state.ticket, state.length, state.sums)):
        raise value_error(
            f"{name}: state",
            got="a state that an earlier call has consumed",
            wanted="the state that the last call returned",
            fix="Rebind it: `state, sample = replay.sample(state, ...)`; make_replay(donate=False) keeps old ones.",
        )
