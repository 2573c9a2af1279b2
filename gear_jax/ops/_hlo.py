"""Compiled programs, read as text: the arrays that their instructions make, and what our own calls are given."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import jax

HOST = 5
"""The number of the host's memory in a layout: `f32[8,4]{1,0:S(5)}`. The text of a CPU's program has none."""

# `%name = `, behind which come the shape of the result and the opcode.
_NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([\w\-]+)\(")
# One array: `f32[1,8,4]{2,1,0:T(8,128)S(5)}`, of which the layout may be missing.
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
# `%name (params) -> result {` or `ENTRY %name ...`: where a computation begins.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
# These hand an array on, or run other computations, which are read too.
_HARMLESS = {
    "parameter", "get-tuple-element", "bitcast", "opt-barrier", "add-dependency", "while", "conditional", "call",
    "tuple", "send",
}  # fmt: skip
_DTYPES = {
    "bool": "pred", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2", "float8_e3m4": "f8e3m4",
    "float8_e4m3": "f8e4m3", "float8_e4m3b11fnuz": "f8e4m3b11fnuz", "float8_e4m3fnuz": "f8e4m3fnuz",
    "float8_e5m2fnuz": "f8e5m2fnuz", "float8_e8m0fnu": "f8e8m0fnu", "complex64": "c64", "complex128": "c128",
}  # fmt: skip

Key = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a program: its dtype by HLO's name, its shape, and the number of the memory that it lies in."""

    dtype: str
    shape: tuple[int, ...]
    space: int = 0

    @property
    def key(self) -> Key:
        return self.dtype, self.shape

    @property
    def nbytes(self) -> int:
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return math.prod(self.shape) * max(1, int(bits[1]) // 8 if bits else 1)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one of our handlers.

    Attributes:
      target: the handler's name.
      operands: the arrays that it is given; None for one whose instruction is not in the text.
      aliased: whether a result takes an operand's memory.
      line: the instruction.
    """

    target: str
    operands: tuple[Array | None, ...]
    aliased: bool
    line: str


def dtype_name(dtype) -> str:
    """HLO's name of a dtype."""
    name = jax.numpy.dtype(dtype).name
    if name in _DTYPES:
        return _DTYPES[name]
    return re.sub(r"^(float|uint|int)", lambda m: {"float": "f", "uint": "u", "int": "s"}[m[1]], name)


def named(array: Array, columns: Mapping[Key, str]) -> str | None:
    """The name of the column that an array has the dtype and shape of, as it is or in a batch of tables."""
    keys = array.key, (array.dtype, array.shape[1:])
    return next((columns[key] for key in keys if key in columns), None)


def made(text: str) -> Iterator[tuple[str, Array, str]]:
    """Yields (opcode, array, line) of each array that an instruction of a program makes.

    Instructions that hand an array on are not among them, nor are our own calls, whose results are of their own size or
    alias an operand, nor what happens inside a fusion, which makes no array of its own.
    """
    fusions = set(re.findall(r" fusion(?:-start)?\(.*?calls=%?([\w.\-]+)", text))
    fused = False
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            fused = header[1] in fusions
        elif not fused:
            for opcode, array in _made(line):
                yield opcode, array, line


def calls(text: str) -> list[Call]:
    """The calls of our handlers in a program."""
    results, found = {}, []
    for line in text.splitlines():
        split = _split(line)
        if split:
            name, parts, opcode, rest = split
            results[name] = [a for p in parts for a in _arrays(p)]
            if opcode == "custom-call" and 'custom_call_target="gear_' in rest:
                found.append((line, rest))
    return [_call(line, rest, results) for line, rest in found]


def _call(line: str, rest: str, results: dict[str, list[Array]]) -> Call:
    target = re.search(r'custom_call_target="(\w+)"', rest)
    begin = rest.index("custom-call(") + len("custom-call")
    operands = []
    for part in _parts(rest[begin + 1 : begin + _span(rest[begin:]) - 1]):
        name = part.split()[-1].removeprefix("%") if part.split() else ""
        operands.append(results[name][0] if len(results.get(name, ())) == 1 else None)
    return Call(target[1] if target else "", tuple(operands), "output_to_operand_aliasing" in rest, line)


def _split(line: str):
    """(name, results as text, opcode, all behind the name) of an instruction; None if a line is none."""
    name = _NAME.match(line)
    if not name:
        return None
    rest = re.sub(r"/\*.*?\*/", "", line[name.end() :])
    end = _span(rest) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if not opcode:
        return None
    parts = _parts(rest[1 : end - 1]) if rest.startswith("(") else [rest[:end]]
    return name[1], parts, opcode[1], rest


def _made(line: str) -> Iterator[tuple[str, Array]]:
    split = _split(line)
    if not split or split[2] in _HARMLESS or split[2].endswith(("-done", "-update")):
        return
    _, parts, opcode, rest = split
    if opcode == "custom-call":
        if 'custom_call_target="gear_' in rest:
            return
        aliased = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", rest)
        outputs = re.findall(r"\{([\d, ]*)\}: \(", aliased[1]) if aliased else []
        parts = [x for i, x in enumerate(parts) if str(i) not in outputs and "" not in outputs]
    elif opcode in ("copy-start", "recv"):
        parts = parts[:1]  # (result, operand, context)
    elif opcode.endswith("-start") and opcode != "all-reduce-start":
        parts = parts[1:2]  # (operands, results, context)
    for part in parts:
        for array in _arrays(part):
            yield opcode, array


def _arrays(text: str) -> list[Array]:
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        space = _SPACE.search(layout)
        found.append(Array(dtype, tuple(int(d) for d in dims.split(",") if d), int(space[1]) if space else 0))
    return found


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
