"""`assert_in_place`: finds whole-column copies in a compiled step."""

import re
from typing import Any

import jax

from gear_jax._errors import value_error
from gear_jax.replay._state import ReplayState

# `%name = `, behind which come the shape of the result and the opcode.
_NAME = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = ")
_OPCODE = re.compile(r" ([\w\-]+)\(")
# One array: `f32[1,8,4]{2,1,0}`, of which the layout may be missing.
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
# `%name (params) -> result {` or `ENTRY %name ...`: where a computation begins.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
# These hand an array on, or run other computations, which are read too.
_HARMLESS = {
    "parameter", "get-tuple-element", "bitcast", "opt-barrier", "while", "conditional", "call", "tuple", "send",
}  # fmt: skip
_DTYPES = {
    "bool": "pred", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2", "float8_e3m4": "f8e3m4",
    "float8_e4m3": "f8e4m3", "float8_e4m3b11fnuz": "f8e4m3b11fnuz", "float8_e4m3fnuz": "f8e4m3fnuz",
    "float8_e5m2fnuz": "f8e5m2fnuz", "float8_e8m0fnu": "f8e8m0fnu", "complex64": "c64", "complex128": "c128",
}  # fmt: skip


def assert_in_place(f, *args: Any, **kwargs: Any) -> None:
    """Compiles `f(*args, **kwargs)` and raises if it copies, gathers or rewrites a whole column of a table.

    It looks for instructions whose result, or a part of it, has a column's dtype and its shape `[P, S, T, *shape]`, or
    `[V, P, S, T, *shape]` (a batch of tables). Nothing runs.

    Sampling reads the rows it needs and insertion writes the rows it gets; a program that copies a column is slower by
    orders of magnitude, and XLA says nothing. The causes: a state that is not donated at the jit boundary; a state used
    twice (an old state read after the next was made); `jax.vmap` over a shared table; a `lax.cond` of which not only
    the branch for True uses the table (see `Replay`).

    Args:
      f: a function, or the result of `jax.jit`. A plain function is compiled with every argument donated that holds a
        `ReplayState`, by place or by name; a jitted one (`jax.jit`, `nnx.jit`) as it is.
      *args, **kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s.

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
    text = f.lower(*args, **kwargs).compile().as_text()
    columns = {}
    for state in states:
        for path, x in jax.tree.leaves_with_path(state.columns):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            columns.setdefault((_hlo_dtype(x.dtype), tuple(x.shape)), name)
    for opcode, name, line in column_sized(text or "", columns):
        raise value_error(
            f"assert_in_place: column {name!r}",
            got=f"`{opcode}` of the whole column in the compiled program ({line.strip()[:160]})",
            wanted="reads and writes of single rows",
            fix="Donate the state (jax.jit(f, donate_argnums=...)), use each state once, scan instead of vmap, let "
            "only the branch of cond for True use the table (or add with lengths of 0 instead).",
        )


def _states(tree: Any) -> list[ReplayState]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ReplayState))
    return [x for x in leaves if isinstance(x, ReplayState)]


def column_sized(text: str, columns: dict[tuple[str, tuple[int, ...]], str]):
    """Yields (opcode, column, line) of each instruction that makes an array of a column's shape, or a batch of them.

    Args:
      text: a compiled program.
      columns: the name of each column by HLO dtype and shape.
    """
    # What happens inside a fusion makes no array of its own.
    fusions = set(re.findall(r" fusion(?:-start)?\(.*?calls=%?([\w.\-]+)", text))
    fused = False
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            fused = header[1] in fusions
        elif not fused:
            for opcode, dtype, shape in _made(line):
                for key in ((dtype, shape), (dtype, shape[1:])):
                    if key in columns:
                        yield opcode, columns[key], line


def _made(line: str):
    """Yields (opcode, dtype, shape) of each array that an instruction makes, of several where its result is a tuple."""
    name = _NAME.match(line)
    if not name:
        return
    rest = re.sub(r"/\*.*?\*/", "", line[name.end() :])
    end = _span(rest) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if not opcode or opcode[1] in _HARMLESS or opcode[1].endswith(("-done", "-update")):
        return
    parts = _parts(rest[1 : end - 1]) if rest.startswith("(") else [rest[:end]]
    if opcode[1] == "custom-call":
        # Our own calls write rows, or arrays that alias an operand.
        if 'custom_call_target="gear_' in rest:
            return
        aliased = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", rest)
        outputs = re.findall(r"\{([\d, ]*)\}: \(", aliased[1]) if aliased else []
        parts = [x for i, x in enumerate(parts) if str(i) not in outputs and "" not in outputs]
    elif opcode[1] in ("copy-start", "recv"):
        parts = parts[:1]  # (result, operand, context)
    elif opcode[1].endswith("-start") and opcode[1] != "all-reduce-start":
        parts = parts[1:2]  # (operands, results, context)
    for dtype, dims in _ARRAY.findall(" ".join(parts)):
        yield opcode[1], dtype, tuple(int(d) for d in dims.split(",") if d)


def _span(text: str) -> int:
    """Where the bracket that `text` begins with is closed: the index behind it."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0:
            return i + 1
    return len(text)


def _parts(text: str) -> list[str]:
    """Splits at the commas that are in no bracket."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    return [*parts, text[begin:]]


def _hlo_dtype(dtype) -> str:
    name = jax.numpy.dtype(dtype).name
    if name in _DTYPES:
        return _DTYPES[name]
    return re.sub(r"^(float|uint|int)", lambda m: {"float": "f", "uint": "u", "int": "s"}[m[1]], name)
