"""`assert_in_place`: finds whole-column copies in a compiled step."""

from typing import Any

import jax

from gear_jax._errors import value_error
from gear_jax.ops import _hlo
from gear_jax.replay._state import ReplayState


def assert_in_place(f, *args: Any, **kwargs: Any) -> None:
    """Compiles `f(*args, **kwargs)` and raises if it copies, gathers or rewrites a whole column of a table.

    It looks for instructions whose result, or a part of it, has a column's dtype and its shape `[P, S, T, *shape]`, or
    `[V, P, S, T, *shape]` (a batch of tables), in whatever memory; and, where columns lie in `pinned_host` on a GPU,
    for calls that are given a column in the GPU's own memory instead. Nothing runs.

    Sampling reads the rows it needs and insertion writes the rows it gets; a program that copies a column is slower by
    orders of magnitude, and XLA says nothing. The causes: a state that is not donated at the jit boundary; a state used
    twice (an old state read after the next was made); `jax.vmap` over a shared table; a `lax.cond` of which not only
    the branch for True uses the table (see `Replay`).

    Args:
      f: a function, or the result of `jax.jit`. A plain function is compiled with every argument donated that holds a
        `ReplayState`, by place or by name; a jitted one (`jax.jit`, `nnx.jit`) as it is.
      *args, **kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s. The latter do not say that a column lies in
        `pinned_host`: give a real state for a program like the one that will run.

    Raises:
      ValueError: naming the column and the instruction.
      TypeError: if no argument holds a `ReplayState`.
    """
    states = _states((args, kwargs))
    if not states:
        raise TypeError(
            "assert_in_place: got no ReplayState among the arguments, wanted at least one. "
            "Call assert_in_place(step, state, ...)."
        )
    if not hasattr(f, "lower"):
        f = jax.jit(
            f,
            donate_argnums=tuple(i for i, a in enumerate(args) if _states(a)),
            donate_argnames=tuple(name for name, a in kwargs.items() if _states(a)),
        )
    text = f.lower(*args, **kwargs).compile().as_text() or ""
    columns, in_host = {}, {}
    for state in states:
        for path, x in jax.tree.leaves_with_path(state.columns):
            for shape in _shapes(x):
                key = _hlo.dtype_name(x.dtype), shape
                columns.setdefault(key, jax.tree_util.keystr(path, simple=True, separator="/"))
                if _in_host_memory(x):
                    in_host[key] = columns[key]
    for opcode, name, line in column_sized(text, columns):
        raise value_error(
            f"assert_in_place: column {name!r}",
            got=f"`{opcode}` of the whole column in the compiled program ({line.strip()[:160]})",
            wanted="reads and writes of single rows",
            fix="Donate the state (jax.jit(f, donate_argnums=...)), use each state once, return it before other "
            "results, scan instead of vmap, let only the branch of cond for True use the table (or add lengths of 0).",
        )
    for target, name, line in moved(text, in_host):
        raise value_error(
            f"assert_in_place: column {name!r}",
            got=f"`{target}` on a copy of it in the device's memory ({line.strip()[:160]})",
            wanted="the column in pinned_host, where it lies",
            fix="Use the columns by gear_jax alone: an operation of JAX's on them makes XLA move them.",
        )


def _states(tree: Any) -> list[ReplayState]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ReplayState))
    return [x for x in leaves if isinstance(x, ReplayState)]


def _shapes(x: Any) -> set[tuple[int, ...]]:
    """The shapes that a column has in a program: its own, and that of a device's shard."""
    sharding = getattr(x, "sharding", None)
    return {tuple(x.shape)} | ({tuple(sharding.shard_shape(x.shape))} if sharding is not None else set())


def _in_host_memory(x: Any) -> bool:
    """Whether a column is an array in the host memory of a GPU."""
    if not isinstance(x, jax.Array) or x.sharding.memory_kind != "pinned_host":
        return False
    return all(d.platform != "cpu" for d in x.sharding.device_set)


def column_sized(text: str, columns: dict[_hlo.Key, str]):
    """Yields (opcode, column, line) of each instruction that makes an array of a column's shape, or a batch of them.

    Args:
      text: a compiled program.
      columns: the name of each column by HLO dtype and shape.
    """
    for opcode, array, line in _hlo.made(text):
        name = _hlo.named(array, columns)
        if name is not None:
            yield opcode, name, line


def moved(text: str, columns: dict[_hlo.Key, str]):
    """Yields (target, column, line) of each of our calls that is given a column outside the host's memory.

    Args:
      text: a GPU's compiled program.
      columns: the columns in host memory, as for `column_sized`.
    """
    for call in _hlo.calls(text):
        for array in call.operands:
            name = _hlo.named(array, columns) if array else None
            if array and name is not None and array.space != _hlo.HOST:
                yield call.target, name, call.line
