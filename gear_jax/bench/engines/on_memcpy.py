"""The machine's ceiling: memcpy of a sample's rows into memory that is used again, on one and two threads.

A C helper does the copies; it is compiled when the engine starts (`cc`, or the compiler that `CC` names).
"""

import ctypes
import os
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np

from ..check import Batch
from ..workloads import Row
from .base import Call, Unsupported
from .on_numpy import NumPy


def _build() -> ctypes.CDLL:
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        raise Unsupported(f"no C compiler {compiler!r}: install one or name it in CC")
    source = pathlib.Path(__file__).with_name("memcpy_rows.c")
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "memcpy_rows.so")
        subprocess.run([compiler, "-O3", "-fPIC", "-shared", "-pthread", source, "-o", library], check=True)
        return ctypes.CDLL(library)


class Memcpy(NumPy):
    """NumPy's table, copied row by row."""

    @staticmethod
    def versions() -> dict[str, str]:
        return {"libc": os.confstr("CS_GNU_LIBC_VERSION") or "unknown"}

    def fill(self) -> None:
        self.copy_rows = _build().copy_rows
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self.copy_rows.argtypes = [pointer, pointer, pointer, pointer, count, count, count, ctypes.c_int]
        super().fill()

    def calls(self, row: Row) -> list[Call]:
        if row.op != "sample" or self.workload.alpha is not None:
            raise Unsupported("a ceiling is given for samples of column data")
        return [self._copy(row.size, threads) for threads in (1, 2)]

    def _copy(self, size: int, threads: int) -> Call:
        w, rng = self.workload, self.rng
        width = w.window or w.steps
        out = {name: np.zeros((size, width, *column.shape[2:]), column.dtype) for name, column in self.table.items()}
        plan = []
        for name, column in self.table.items():
            step = column[0, 0].nbytes
            plan.append((column.ctypes.data, out[name].ctypes.data, step * w.steps, step * width, step))
        # Any window of whole steps: the ceiling has no padding.
        placement = "within" if w.window else "exact"
        copy_rows = self.copy_rows

        def run():
            index = rng.integers(0, w.stored, size)
            first = rng.integers(0, w.steps - width + 1, size)
            for source, target, stride, row_bytes, step in plan:
                start = first * step
                copy_rows(source, target, index.ctypes.data, start.ctypes.data, size, stride, row_bytes, threads)
            return out

        name = "1 thread" if threads == 1 else f"{threads} threads"
        return Call(name, run, lambda data: Batch(data, placement=placement))
