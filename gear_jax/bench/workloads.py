"""The workloads: what is stored, what is asked, and the bytes that a right answer has.

Shapes: N stored trajectories, T steps, B batch, W window. Every step carries a *code*, `trajectory * T +
step`, in one column, and every other value is a function of the code. So a batch from any library can be
checked against NumPy bit by bit, whatever that library tells about the rows it drew.
"""

import dataclasses
import functools

import numpy as np

SMALL_BYTES = 2_000_000  # a row below this is bound by the dispatch of a call, not by copying
_BASE_VALUES = 1 << 15  # float32 columns hold integers that stay exact


@dataclasses.dataclass(frozen=True)
class Column:
    """One column: its name, the shape of a step and the NumPy dtype's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def step_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: an operation on `size` trajectories.

    Attributes:
        workload: The workload's name.
        op: "sample", "add" or "update".
        size: Trajectories per call.
        unit: How the time is shown: "GB/s", "ms" or "us".
        target: Speed wanted as a multiple of the best peer's.
        ceiling: Share of a two-thread memcpy of the same rows wanted, or None.
    """

    workload: str
    op: str
    size: int
    unit: str
    target: float = 1.0
    ceiling: float | None = None

    @property
    def name(self) -> str:
        return f"{self.workload} {self.op} {self.size:,}"


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a table holds.

    Attributes:
        name: The workload's name. columns: The columns; the one named `code_column` carries the codes. steps:
        T. stored: N, the trajectories in the table, which is full. code_column: Name of the column with the
        codes. A uint8 column holds them in its first four bytes. window: W; None samples whole trajectories.
        random_lengths: Lengths are uniform in [1, T], and a window is the last W steps, padded before the
        first. alpha, beta: Exponents of a prioritised table, or None. rows: What is measured.
    """

    name: str
    columns: tuple[Column, ...]
    steps: int
    stored: int
    code_column: str
    window: int | None = None
    random_lengths: bool = False
    alpha: float | None = None
    beta: float | None = None
    rows: tuple[Row, ...] = ()

    @property
    def step_bytes(self) -> int:
        return sum(column.step_bytes for column in self.columns)

    @property
    def table_bytes(self) -> int:
        return self.step_bytes * self.steps * self.stored

    def row_bytes(self, row: Row) -> int:
        """Bytes of column data that one call of the row moves."""
        steps = self.window if row.op == "sample" and self.window else self.steps
        return self.step_bytes * steps * row.size

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Lengths int32[A] of the trajectories `ids` int64[A]."""
        if not self.random_lengths:
            return np.full(len(ids), self.steps, np.int32)
        return (1 + (np.asarray(ids) * 7919 + 101) % self.steps).astype(np.int32)

    def values(self, column: Column, codes: np.ndarray) -> np.ndarray:
        """What the column holds at the steps `codes` int64[...]: [..., *shape]."""
        codes = np.asarray(codes, np.int64)
        ids, steps = np.divmod(codes, self.steps)
        dtype = np.dtype(column.dtype)
        if column.name == self.code_column and dtype != np.uint8:
            return np.broadcast_to(
                codes.reshape(codes.shape + (1,) * len(column.shape)), codes.shape + column.shape
            ).astype(dtype)
        out = np.take(_base(self, column), steps, axis=0)
        out += ids.reshape(ids.shape + (1,) * len(column.shape)).astype(dtype)
        if column.name == self.code_column:
            stamp = codes.astype("<u4").reshape(-1, 1).view(np.uint8)
            out.reshape(len(stamp), -1)[:, :4] = stamp
        return out

    def trajectories(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Columns [A, T, *shape] of the trajectories `ids` int64[A], written over the whole of T."""
        codes = np.asarray(ids, np.int64)[:, None] * self.steps + np.arange(self.steps)
        return {column.name: self.values(column, codes) for column in self.columns}

    def codes(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """The codes int64[B, W] that a batch of columns [B, W, *shape] carries."""
        column = self.column(self.code_column)
        data = batch[column.name]
        flat = data.reshape(data.shape[0], data.shape[1], -1)
        if flat.dtype == np.uint8:
            return np.ascontiguousarray(flat[:, :, :4]).view("<u4")[:, :, 0].astype(np.int64)
        return flat[:, :, 0].astype(np.int64)

    def chunks(self, chunk_bytes: int = 64 << 20) -> list[np.ndarray]:
        """Ids 0..N-1 in runs of one size, each of about `chunk_bytes`, a divisor of N."""
        most = max(1, min(self.stored, chunk_bytes // (self.step_bytes * self.steps), 100_000))
        size = next(n for n in range(most, 0, -1) if self.stored % n == 0)
        return list(np.arange(self.stored).reshape(-1, size))


@functools.lru_cache(maxsize=16)
def _base(workload: Workload, column: Column) -> np.ndarray:
    rng = np.random.default_rng(len(column.name) + 17 * workload.steps)
    dtype = np.dtype(column.dtype)
    top = 256 if dtype == np.uint8 else _BASE_VALUES
    return rng.integers(0, top, (workload.steps, *column.shape)).astype(dtype)


def _rows(workload: str, op: str, sizes: tuple[int, ...], unit: str, **options) -> tuple[Row, ...]:
    return tuple(Row(workload, op, size, unit, **options) for size in sizes)


def workloads(quick: bool = False) -> dict[str, Workload]:
    """All workloads by name; `quick` keeps the shapes and cuts N and the number of rows."""
    cut = 8 if quick else 1
    small = (
        Column("observation", (11,), "float32"),
        Column("action", (3,), "float32"),
        Column("reward", (), "float32"),
    )
    embedding = (Column("embedding", (96,), "float32"), Column("token", (1,), "int32"))
    found = [
        Workload(
            "S1a",
            small,
            1000,
            1000 if quick else 2000,
            "reward",
            rows=_rows("S1a", "sample", (32, 512) if quick else (32, 128, 512, 1024), "GB/s"),
        ),
        Workload(
            "S1b",
            (Column("pixels", (64, 64, 3), "uint8"),),
            1000,
            128 // cut,
            "pixels",
            rows=_rows("S1b", "sample", (8,) if quick else (8, 32), "GB/s", ceiling=0.8),
        ),
        Workload(
            "S2",
            embedding,
            1000,
            2000 // cut,
            "token",
            window=100,
            random_lengths=True,
            rows=_rows("S2", "sample", (32, 256) if quick else (32, 256, 1024), "GB/s", target=2.0),
        ),
        Workload(
            "S3",
            (Column("image", (32, 32, 3), "uint8"),),
            1,
            500_000 // (5 * cut if quick else 1),
            "image",
            rows=_rows("S3", "sample", (256,), "ms") + _rows("S3", "add", (1, 128), "us"),
        ),
        Workload(
            "S4",
            (Column("index", (), "int32"),),
            1,
            1_000_000 // cut,
            "index",
            alpha=0.7,
            beta=0.5,
            rows=_rows("S4", "sample", (65_536,), "ms", target=2.0)
            + _rows("S4", "update", (65_536,), "ms", target=2.0)
            + _rows("S4", "sample", (256,), "ms")
            + _rows("S4", "update", (256,), "us"),
        ),
        Workload(
            "S5",
            (Column("frames", (84, 84, 4), "uint8"), Column("action", (), "int32")),
            20,
            1000 // cut,
            "action",
            rows=_rows("S5", "sample", (64,), "GB/s") + _rows("S5", "add", (1, 8), "GB/s"),
        ),
    ]
    return {workload.name: workload for workload in found}
