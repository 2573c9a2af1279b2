"""`assert_in_place`: finds whole-column copies in a compiled step."""

import re
from typing import Any

import jax

from gear_jax._errors import value_error
from gear_jax.replay._state import ReplayState

# `%name = f32[1,8,4]{2,1,0} opcode(...)`: shape text and opcode of an instruction with one result.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\w+)\[([\d,]*)\]\S* ([\w\-]+)\(")
_ASYNC = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = \((\w+)\[([\d,]*)\].* (copy-start|all-gather-start)\(")
# `%name (params) -> result {` or `ENTRY %name ...`: where a computation begins.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_HARMLESS = {
    "parameter",
    "get-tuple-element",
    "bitcast",
    "opt-barrier",
    "while",
    "conditional",
    "call",
    "tuple",
    "copy-done",
}
_DTYPES = {
    "bool": "pred", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2", "float8_e3m4": "f8e3m4",
    "float8_e4m3": "f8e4m3", "float8_e4m3b11fnuz": "f8e4m3b11fnuz", "float8_e4m3fnuz": "f8e4m3fnuz",
    "float8_e5m2fnuz": "f8e5m2fnuz", "float8_e8m0fnu": "f8e8m0fnu", "complex64": "c64", "complex128": "c128",
}  # fmt: skip


def assert_in_place(f, *args: Any, **kwargs: Any) -> None:
    """Compiles `f(*args)` and raises if it copies, gathers or rewrites a whole column of a table.

    Nothing runs. Sampling reads the rows it needs and insertion writes the rows it gets; a program that copies a column
    is slower by orders of magnitude, and XLA says nothing. The causes: a state that is not donated at the jit boundary;
    a state used twice (an old state read after the next was made); `jax.vmap` over a shared table.

    Args:
      f: a function, or the result of `jax.jit`. A plain function is compiled with every argument donated that holds a
        `ReplayState`; a jitted one as it is.
      *args, **kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: naming the column and the instruction.
      TypeError: if no argument holds a `ReplayState`.
    """
    is_state = lambda x: isinstance(x, ReplayState)  # noqa: E731
    held = [any(is_state(x) for x in jax.tree.leaves(a, is_leaf=is_state)) for a in args]
    states = [x for x in jax.tree.leaves((args, kwargs), is_leaf=is_state) if is_state(x)]
    if not states:
        raise TypeError(
            "assert_in_place: got no ReplayState among the arguments, wanted at least one. "
            "Call assert_in_place(step, state, ...)."
        )
    if not hasattr(f, "lower"):
        f = jax.jit(f, donate_argnums=tuple(i for i, h in enumerate(held) if h))
    text = f.lower(*args, **kwargs).compile().as_text()
    columns = {}
    for state in states:
        for path, x in jax.tree.leaves_with_path(state.columns):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            columns.setdefault((_hlo_dtype(x.dtype), _squeeze(x.shape)), name)
    for opcode, name, line in column_sized(text or "", columns):
        raise value_error(
            f"assert_in_place: column {name!r}",
            got=f"`{opcode}` of the whole column in the compiled program ({line.strip()[:160]})",
            wanted="reads and writes of single rows",
            fix="Donate the state (jax.jit(f, donate_argnums=...)), use each state once, and scan instead of vmap.",
        )


def column_sized(text: str, columns: dict[tuple[str, tuple[int, ...]], str]):
    """Yields (opcode, column, line) of each instruction that makes an array of a column's shape, or a batch of them."""
    # What happens inside a fusion makes no array of its own.
    fusions = set(re.findall(r" fusion\(.*?calls=%?([\w.\-]+)", text))
    fused = False
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            fused = header[1] in fusions
            continue
        match = _INSTRUCTION.match(line) or _ASYNC.match(line)
        if not match or fused:
            continue
        dtype, dims, opcode = match.groups()
        if opcode in _HARMLESS or (opcode == "custom-call" and "output_to_operand_aliasing" in line):
            continue
        if opcode == "custom-call" and '"gear_zeros"' in line:
            continue
        shape = _squeeze(int(d) for d in dims.split(",") if d)
        for (column_dtype, column_shape), name in columns.items():
            if dtype == column_dtype and column_shape and shape[-len(column_shape) :] == column_shape:
                yield opcode, name, line


def _squeeze(shape) -> tuple[int, ...]:
    return tuple(d for d in shape if d != 1)


def _hlo_dtype(dtype) -> str:
    name = jax.numpy.dtype(dtype).name
    if name in _DTYPES:
        return _DTYPES[name]
    return re.sub(r"^(float|uint|int)", lambda m: {"float": "f", "uint": "u", "int": "s"}[m[1]], name)
