"""The contract of the ops: oracles in NumPy, the transformations of JAX, and checks that run an op through both.

The oracles are loops written from the documentation. A check takes the op itself, so that a new implementation (another
platform, a kernel of one's own) is held to the same contract: `check_gather(my_gather, "vmap")` raises an
`AssertionError` that names the column and the element of the batch where the two differ.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gear_jax.ops import _hlo
from gear_jax.specs import Window
from gear_jax.testing._transforms import NOT_PINNED as NOT_PINNED
from gear_jax.testing._transforms import SHARED_TRANSFORMS, TRANSFORMS, batch_size, pick
from gear_jax.testing._transforms import place as place
from gear_jax.testing._transforms import to_numpy as to_numpy

# Every dtype of whole bytes.
DTYPES = (
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "complex64",
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
# Those that need `jax_enable_x64`.
X64_DTYPES = ("int64", "uint64", "float64", "complex128")


def dtype_of(name: str) -> np.dtype:
    """The NumPy dtype of a name in `DTYPES` or `X64_DTYPES`."""
    return np.dtype(getattr(jnp, name if name != "bool" else "bool_"))


def random_values(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Any values of a dtype but NaN, whose bits XLA may change in a slice or a copy of its own."""
    dtype = np.dtype(dtype)
    if dtype == np.dtype(bool):
        return rng.integers(0, 2, shape).astype(bool)
    data = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    values = data.view(dtype).reshape(shape)
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(values), np.ones((), dtype), values) if dtype.kind not in "iu" else values


def assert_same_bits(got: Any, wanted: Any, what: str = "") -> None:
    """Raises unless both trees have the same structure, shapes, dtypes and bits."""
    got_leaves, got_tree = jax.tree.flatten_with_path(got)
    wanted_leaves, wanted_tree = jax.tree.flatten(wanted)
    assert got_tree == wanted_tree, f"{what}: {got_tree} != {wanted_tree}"
    for (path, g), w in zip(got_leaves, wanted_leaves, strict=True):
        g, w, where = np.asarray(g), np.asarray(w), f"{what}{jax.tree_util.keystr(path)}"
        assert (g.shape, g.dtype) == (w.shape, w.dtype), f"{where}: {g.dtype}{g.shape} != {w.dtype}{w.shape}"
        same = (_bytes(g) == _bytes(w)).all(-1)
        assert same.all(), f"{where}: differs first at {tuple(np.argwhere(~same)[0])}"


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(*x.shape, 1).view(np.uint8)


def gather_oracle(
    column: np.ndarray, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, window: Window | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """`[B, W, *shape]` and `bool[B, W]` of one column `[P, S, T, *shape]`."""
    p, s, t = column.shape[:3]
    window = window or Window()
    whole = window.length is None
    width = t if window.length is None else window.length
    value = np.full((len(slots), width, *column.shape[3:]), np.asarray(window.pad_value).astype(column.dtype))
    mask = np.zeros((len(slots), width), bool)
    for b, (slot, start, length) in enumerate(zip(slots.tolist(), starts.tolist(), lengths.tolist(), strict=True)):
        if not 0 <= slot < p * s:
            continue
        first = 0 if whole else start + window.offset
        seen = [(w, first + w) for w in range(width) if 0 <= first + w < min(length, t)]
        move = {"around": 0, "head": width - 1 - seen[-1][0] if seen else 0, "tail": -seen[0][0] if seen else 0}
        for w, step in seen:
            value[b, w + move[window.pad]] = column[slot // s, slot % s, step]
            mask[b, w + move[window.pad]] = True
    return value, mask


def scatter_oracle(
    column: np.ndarray, slots: np.ndarray, values: np.ndarray, lengths: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """One column `[P, S, T, *shape]` after the rows `[A, T', *shape]` were written, the first row first."""
    p, s, t = column.shape[:3]
    column = column.copy()
    for a, (slot, start, length) in enumerate(zip(slots.tolist(), starts.tolist(), lengths.tolist(), strict=True)):
        if not 0 <= slot < p * s:
            continue
        for i in range(min(length, values.shape[1])):
            if 0 <= start + i < t:
                column[slot // s, slot % s, start + i] = values[a, i]
    return column


def sums_oracle(mass: np.ndarray) -> np.ndarray:
    """`float32[P, M]`: all levels over `float32[P, S]`; a node sums its 16 children, halves added elementwise."""

    def levels(row: np.ndarray) -> list[np.ndarray]:
        nodes = []
        for i in range(0, len(row), 16):
            child = np.zeros(16, np.float32)
            child[: len(row[i : i + 16])] = row[i : i + 16]
            while len(child) > 1:
                child = child[: len(child) // 2] + child[len(child) // 2 :]
            nodes.append(child[0])
        padded = np.zeros(-(-len(nodes) // 16) * 16, np.float32)
        padded[: len(nodes)] = nodes
        return [padded] if len(nodes) == 1 else [padded, *levels(np.asarray(nodes))]

    return np.stack([np.concatenate(levels(row)) for row in mass])


def random_rows(rng: np.random.Generator, table: Sequence[int], shape: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Slots, starts and lengths for a table of (P, S, T): mostly inside, some outside by a little, some by a lot."""
    p, s, t = table
    slots = rng.integers(-2, p * s + 2, shape)
    starts = rng.integers(-t - 3, t + 4, shape)
    lengths = rng.integers(-2, t + 3, shape)
    far = rng.integers(0, 12, shape)
    extremes = np.iinfo(np.int32)
    slots = np.where(far == 0, extremes.max, np.where(far == 1, extremes.min, slots))
    starts = np.where(far == 2, extremes.max, np.where(far == 3, extremes.min, starts))
    lengths = np.where(far == 4, extremes.max, np.where(far == 5, extremes.min, lengths))
    return tuple(x.astype(np.int32) for x in (slots, starts, lengths))


def check_gather(
    gather: Callable[..., Any],
    transform: str = "jit",
    *,
    dtypes: Sequence[str] = DTYPES,
    step_shape: Sequence[int] = (3,),
    table: Sequence[int] = (2, 3, 7),
    rows: int = 5,
    window: Window | None = Window(-2, 4),  # noqa: B008
    seed: int = 0,
    memory: str = "device",
) -> None:
    """Holds `gather(columns, slots, starts, lengths, windows)` to the oracle: a column of each dtype, random rows.

    Args:
      gather: like `gear_jax.ops.gather`.
      transform: a name in `TRANSFORMS` or `SHARED_TRANSFORMS`.
      dtypes: of the columns.
      step_shape: of one step.
      table: (P, S, T).
      rows: B.
      window: of all columns.
      seed: of the values and rows.
      memory: kind of the columns' memory; "pinned_host" for no transform in `NOT_PINNED`.

    Raises:
      AssertionError: where they differ.
    """
    rng, k = np.random.default_rng(seed), batch_size(transform)
    shared = transform in SHARED_TRANSFORMS
    lead = () if shared else (k,)
    columns = {d: random_values(rng, (*lead, *table, *step_shape), dtype_of(d)) for d in dtypes}
    ids = random_rows(rng, table, (k, rows))
    run = (SHARED_TRANSFORMS if shared else TRANSFORMS)[transform]
    got = run(lambda c, r: gather(c, *r, window)[:2], columns, ids, memory)
    for i in range(k):
        for d in dtypes:
            column = columns[d] if shared else columns[d][i]
            slots, starts, lengths = (x[i] for x in ids)
            wanted = gather_oracle(column, slots, starts, lengths, window)
            assert_same_bits(pick((got[0][d], got[1][d]), i), wanted, f"gather, {transform}, {d}, element {i}: ")


def check_scatter(
    scatter: Callable[..., Any],
    transform: str = "jit",
    *,
    dtypes: Sequence[str] = DTYPES,
    step_shape: Sequence[int] = (3,),
    table: Sequence[int] = (2, 3, 7),
    rows: int = 5,
    value_steps: int = 4,
    seed: int = 0,
    memory: str = "device",
) -> None:
    """Holds `scatter(columns, slots, values, lengths, starts)` to the oracle.

    Args:
      scatter: like `gear_jax.ops.scatter`.
      transform: a name in `TRANSFORMS`.
      dtypes: of the columns.
      step_shape: of one step.
      table: (P, S, T).
      rows: A; no two of them write the same slot.
      value_steps: T'.
      seed: of the values and rows.
      memory: as in `check_gather`.

    Raises:
      AssertionError: where they differ.
    """
    rng, k = np.random.default_rng(seed), batch_size(transform)
    columns = {d: random_values(rng, (k, *table, *step_shape), dtype_of(d)) for d in dtypes}
    values = {d: random_values(rng, (k, rows, value_steps, *step_shape), dtype_of(d)) for d in dtypes}
    slots, starts, lengths = random_rows(rng, table, (k, rows))
    capacity = table[0] * table[1]
    for row in slots:  # a slot once a row; what finds none is skipped
        unused = rng.permutation(capacity)[:rows]
        row[:] = np.where((row >= 0) & (row < capacity), np.append(unused, [-1] * (rows - len(unused))), row)
    given = columns, (slots, values, lengths, starts)
    got = TRANSFORMS[transform](lambda c, r: scatter(c, *r), *given, memory)
    for i in range(k):
        for d in dtypes:
            wanted = scatter_oracle(columns[d][i], slots[i], values[d][i], lengths[i], starts[i])
            assert_same_bits(got[d][i], wanted, f"scatter, {transform}, {d}, element {i}: ")


def check_sumtree_update(
    update: Callable[..., Any],
    transform: str = "jit",
    *,
    partitions: int = 2,
    leaves: int = 37,
    writes: int = 20,
    seed: int = 0,
) -> None:
    """Holds `update(priority, mass, sums, slots, new_priority, new_mass)` to the oracle; slots repeat or are outside.

    Args:
      update: like `gear_jax.ops.sumtree_update`.
      transform: a name in `TRANSFORMS`.
      partitions: P.
      leaves: S.
      writes: K.
      seed: of the values and slots.

    Raises:
      AssertionError: where they differ.
    """
    rng, k = np.random.default_rng(seed), batch_size(transform)
    priority, mass = rng.uniform(size=(2, k, partitions, leaves)).astype(np.float32)
    sums = np.stack([sums_oracle(m) for m in mass])
    slots = rng.integers(-2, partitions * leaves + 2, (k, writes)).astype(np.int32)
    slots[:, writes // 2 :] = slots[:, : writes - writes // 2]
    new = rng.uniform(size=(2, k, writes)).astype(np.float32)
    given = (priority, mass, sums), (slots, *new)
    got = TRANSFORMS[transform](lambda t, r: tuple(update(*t, *r)), *given, "device")
    for i in range(k):
        for row in range(writes):
            if 0 <= slots[i, row] < partitions * leaves:
                place = i, *divmod(slots[i, row], leaves)
                priority[place], mass[place] = new[0, i, row], new[1, i, row]
        wanted = priority[i], mass[i], sums_oracle(mass[i])
        assert_same_bits(pick(got, i), wanted, f"sumtree_update, {transform}, element {i}: ")


def check_sumtree_sample(
    sample: Callable[..., Any], transform: str = "jit", *, partitions: int = 3, leaves: int = 37, draws: int = 4096
) -> None:
    """Holds `sample(mass, sums, length, generation, bits)` to its distribution without chance: the bits are an even
    grid over [0, 1).

    Each slot takes a part of [0, 1) of the size of its probability, so that its draws are known to within one or two.

    Args:
      sample: like `gear_jax.ops.sumtree_sample`.
      transform: a name in `TRANSFORMS`.
      partitions: P.
      leaves: S.
      draws: B.

    Raises:
      AssertionError: for a draw without mass, a wrong probability or total, what another slot has, or a slot drawn too
        often or too rarely.
    """
    rng, k = np.random.default_rng(0), batch_size(transform)
    shape = (k, partitions, leaves)
    mass = (rng.uniform(size=shape) * (rng.uniform(size=shape) < 0.6)).astype(np.float32)
    sums = np.stack([sums_oracle(m) for m in mass])
    length, generation = rng.integers(0, 2**31, (2, *shape)).astype(np.int32)
    generation = generation.view(np.uint32)
    grid = (np.arange(draws, dtype=np.uint64) << np.uint64(32)) // np.uint64(draws)
    bits = np.broadcast_to(np.stack([grid, np.zeros_like(grid)], -1).astype(np.uint32), (k, draws, 2))
    table = mass, sums, length, generation
    results = TRANSFORMS[transform](lambda t, b: tuple(sample(*t, b)), table, bits, "device")
    for i in range(k):
        what, flat = f"sumtree_sample, {transform}, element {i}", mass[i].reshape(-1)
        slot, partition, probability, of_length, of_generation, least, total, ticket = (x[i] for x in results)
        assert ((slot >= 0) & (slot < flat.size)).all(), f"{what}: a slot outside the table"
        assert (flat[slot] > 0).all(), f"{what}: a slot without mass"
        assert_same_bits(probability, flat[slot] * (np.float32(1) / total), f"{what}: probability: ")
        np.testing.assert_allclose(total[0], flat.sum(dtype=np.float64), rtol=1e-6, err_msg=what)
        assert (partition == slot // leaves).all(), f"{what}: the partition of another slot"
        assert (of_length == length[i].reshape(-1)[slot]).all(), f"{what}: the length of another slot"
        assert (of_generation == generation[i].reshape(-1)[slot]).all(), f"{what}: the generation of another slot"
        for group, smallest in enumerate(least):
            assert smallest == probability[512 * group : 512 * (group + 1)].min(), f"{what}: least {group}"
        assert (ticket == 0).all(), f"{what}: the ticket changes"
        count = np.bincount(slot, minlength=flat.size)
        off = np.abs(count - draws * flat.astype(np.float64) / flat.sum(dtype=np.float64)).max()
        assert off <= 1.01, f"{what}: a slot is drawn {off} times too often or too rarely"


def column_sized(compiled_text: str, nbytes: int) -> list[str]:
    """The instructions of a compiled program that make an array of at least `nbytes`: copies, all-gathers, fusions, ...

    Args:
      compiled_text: `jax.jit(f).lower(...).compile().as_text()`.
      nbytes: the size of the column on one device.

    Returns:
      The lines. Our FFI calls are not among them: their results are outputs of their own size or alias an operand.
    """
    return list(dict.fromkeys(line.strip() for _, array, line in _hlo.made(compiled_text) if array.nbytes >= nbytes))


def assert_calls_in_place(compiled_text: str, columns: Any, platform: str) -> None:
    """Raises unless our calls in a compiled program get the columns where they lie, and write them in place.

    Args:
      compiled_text: `jax.jit(f).lower(...).compile().as_text()`.
      columns: pytree of the columns, arrays `[P, S, T, *shape]`, that the program was compiled for.
      platform: it was compiled for. On "cpu" all memory is one, and the text does not say which kind it is.

    Raises:
      AssertionError: if no call gets a column, if one gets a column of `pinned_host` in another memory (a copy of it),
        or if a write takes no operand's memory.
    """
    names = {
        (_hlo.dtype_name(x.dtype), tuple(x.shape)): jax.tree_util.keystr(path) or "0"
        for path, x in jax.tree.leaves_with_path(columns)
    }
    in_host = {x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(columns)} == {True}
    seen = 0
    for call in _hlo.calls(compiled_text):
        for array in call.operands:
            name = _hlo.named(array, names) if array else None
            if array and name is not None:
                seen += 1
                at_home = not in_host or array.space == _hlo.HOST or platform == "cpu"
                assert at_home, f"{call.target}: column {name} is not in host memory: {call.line.strip()}"
        assert call.aliased or "scatter" not in call.target, f"{call.target} writes a copy: {call.line.strip()}"
    assert seen, f"no call gets a column of {sorted(names)}"
