"""What a checkpoint says of its table, and whether a replay and a state fit it."""

from typing import Any

import jax
from jax.core import Tracer

import gear_jax
from gear_jax._checkpoint import _state
from gear_jax._errors import type_error, value_error
from gear_jax._numbers import is_integer
from gear_jax.replay import Replay, ReplayState

FORMAT = 2


def describe(replay: Replay) -> dict[str, Any]:
    """The settings of a table, and the arrays of its index; JSON."""
    config = replay.config
    columns = [_field(*x) for x in zip(config.names, config.columns, strict=True)]
    arrays = _state.index_arrays(jax.eval_shape(replay.init))
    index = [
        {**_field(name, x), "number": i, "cut": _state.is_cut(replay, name)}
        for i, (name, x) in enumerate(arrays.items())
    ]
    return {
        "format": FORMAT,
        "gear_jax": gear_jax.__version__,
        "columns": columns,
        "index": index,
        "trajectory_length": config.steps,
        "capacity": config.table.capacity,
        "partitions": config.partitions,
        "selector": repr(config.selector),
        "selection": config.selection,
        "eviction": repr(config.eviction),
        "streams": config.streams,
        "anchor": config.anchor.kind,
        "shortest_trajectory": config.anchor.min_length,
    }


def _field(name: str, x: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(x.shape), "dtype": x.dtype.name}


_SETTINGS = (
    "trajectory_length", "capacity", "partitions", "selector", "eviction", "streams", "shortest_trajectory",
)  # fmt: skip


def check_table(where: str, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises ValueError where the settings of a checkpoint and of a replay differ in what the state depends on."""

    def check(what: str, got: Any, want: Any, detail: str = "") -> None:
        if got != want:
            fix = "Restore with a replay made like the one that was saved."
            raise value_error(f"checkpoint {where}: {what}", got=got, wanted=f"{want}{detail}", fix=fix)

    def check_fields(what: str, kind: str) -> None:
        got, want = ({f["name"]: f"{f['dtype']}{f['shape']}" for f in table[what]} for table in (saved, wanted))
        missing, unknown = sorted(set(want) - set(got)), sorted(set(got) - set(want))
        detail = "; ".join(f"{k} {v}" for k, v in (("missing", missing), ("unknown", unknown)) if v)
        check(what, list(got), list(want), f" ({detail})" if detail else "")
        for name in want:
            check(f"{kind} {name!r}", got[name], want[name])

    check_fields("columns", "column")
    for name in _SETTINGS:
        check(name, saved[name], wanted[name])
    _check_selector(where, saved, wanted)
    check_fields("index", "index")  # a selector of the same name may keep another state


def _check_selector(where: str, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises ValueError where each device had a selector state of its own, and these are other devices."""

    def devices(table):
        own = [f for f in table["index"] if f["name"].split("/")[0] == "selector"]
        cut = [f["shape"][0] for f in own if f["cut"]]
        return f"one for each of {cut[0]} devices" if cut else "one for all" if own else "none"

    got, want = devices(saved), devices(wanted)
    if got != want and "devices" in got + want:
        raise value_error(
            f"checkpoint {where}: states of {saved['selector']}", got=got, wanted=want,
            fix="Restore with the same selection and, if that is decentralized, as many devices; a table with "
            'selection="centralized" goes to any number of them.',
        )  # fmt: skip


def check_arguments(state: Any, replay: Any, keep: Any, ahead: Any) -> None:
    """Raises TypeError or ValueError for arguments of `save` that are none."""
    if not isinstance(replay, Replay):
        raise type_error("replay", got=type(replay).__name__, wanted="a Replay", fix="Pass what made the state.")
    if not isinstance(state, ReplayState):
        raise type_error("state", got=type(state).__name__, wanted="a ReplayState", fix="Pass the last state.")
    _check_state(state, replay)
    if keep is not None and (not is_integer(keep) or keep < 1):
        fix = "Leave it out to keep all steps."
        raise value_error("keep", got=repr(keep), wanted="None or a positive integer", fix=fix)
    if not is_integer(ahead) or ahead < 0:
        raise value_error("ahead", got=repr(ahead), wanted="a number of bytes", fix="Leave it out for 1 GiB.")


def _check_state(state: ReplayState, replay: Replay) -> None:
    leaves = jax.tree.leaves(state)
    if any(isinstance(x, Tracer) for x in leaves):
        raise type_error("save: state", got="a traced state", wanted="a concrete one", fix="Call save outside jit.")
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
        raise value_error(
            "save: state",
            got="a state that an earlier call has consumed",
            wanted="the state that the last call returned",
            fix="Rebind it: `state, sample = replay.sample(state, ...)`.",
        )
    wanted = jax.eval_shape(replay.init)
    show = lambda s: jax.tree.map(lambda x: (x.shape, x.dtype), s)  # noqa: E731
    if jax.tree.structure(state) != jax.tree.structure(wanted) or show(state) != show(wanted):
        wanted = f"one of {replay!r}"
        raise value_error("save: state", got="the state of another replay", wanted=wanted, fix="Pass what made it.")
