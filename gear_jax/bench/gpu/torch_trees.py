"""Priorities in torch on the GPU: TorchRL's CUDA trees, and plain torch.

TorchRL's trees are in its extension module, which is loaded by itself: it needs torch and nothing else of what torchrl
asks for. The wheels on PyPI are built without CUDA. Built from source where nvcc is (0.13 or later), `torchrl._torchrl`
has `CudaSumSegmentTreeFp32`.
"""

import abc
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gear_jax.bench.gpu.findings import Missing, Wrong

TORCHRL = "TorchRL, CUDA tree"
_EXTENSION = "torchrl._torchrl"


class Tree(Protocol):
    """Priorities of N trajectories on torch's device; draws of B, and updates of B."""

    def sample(self, i: int) -> Any:
        """Draws B: slots `int64[B]` and their priorities `float32[B]`."""
        ...

    def update(self, i: int) -> Any:
        """Writes the i-th set of B priorities."""
        ...

    def check(self) -> None:
        """Compares a draw and an update with NumPy. Raises Wrong."""
        ...

    def wait(self, result: Any) -> None:
        """Waits until all work is done."""
        ...


def load_torch(on_gpu: bool) -> Any:
    """torch, with a GPU where one is asked for. Raises Missing."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise Missing(f"not installed: {error}") from error
    if on_gpu and not torch.cuda.is_available():
        raise Missing(f"torch {torch.__version__} sees no GPU")
    return torch


def load_extension(torch: Any) -> Any:
    """TorchRL's extension module. Raises Missing."""
    if _EXTENSION in sys.modules:
        return sys.modules[_EXTENSION]
    package = importlib.util.find_spec("torchrl")
    folders = list(package.submodule_search_locations or ()) if package else []
    files = [file for folder in folders for file in sorted(pathlib.Path(folder).glob("_torchrl*.so"))]
    if not files:
        raise Missing("not installed: torchrl" if not folders else "torchrl is installed without its extension")
    spec = importlib.util.spec_from_file_location(_EXTENSION, files[0])
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise Missing(f"torchrl's extension does not load beside torch {torch.__version__}: {error}") from error
    sys.modules[_EXTENSION] = module
    return module


class _Torch(abc.ABC):
    """What the trees share: the data on the device, the check and the wait."""

    def __init__(self, given: np.ndarray, slots: list[np.ndarray], fresh: list[np.ndarray], on_gpu: bool):
        self.torch = load_torch(on_gpu)
        self.device = self.torch.device("cuda" if on_gpu else "cpu")
        self.given, self.first = given, (slots[0], fresh[0])
        self.slots = [self.torch.from_numpy(x.astype(np.int64)).to(self.device) for x in slots]
        self.fresh = [self.torch.from_numpy(x).to(self.device) for x in fresh]
        self.batch = len(slots[0])

    def wait(self, result: Any) -> None:
        del result
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    @abc.abstractmethod
    def sample(self, i: int) -> Any: ...

    @abc.abstractmethod
    def update(self, i: int) -> Any: ...

    def check(self) -> None:
        want = self.given.astype(np.float32).copy()
        self._compare(want)
        self.update(0)
        slots, fresh = self.first
        # Not every library says which of several writes to a slot stays: only what was written once is compared.
        once = np.bincount(slots, minlength=len(want))[slots] == 1
        want[slots[once]] = fresh[once]
        want[slots[~once]] = np.nan
        self._compare(want)

    def _compare(self, want: np.ndarray) -> None:
        slots, values = (x.cpu().numpy() for x in self.sample(1))
        known = ~np.isnan(want[slots])
        if not np.allclose(values[known], want[slots[known]], rtol=1e-5):
            raise Wrong("a batch: wrong result, the priorities are not those of the slots")
        mean = np.nansum(want.astype(np.float64) ** 2) / np.nansum(want.astype(np.float64))
        if abs(want[slots[known]].mean() - mean) > 6 * np.nanstd(want) / np.sqrt(known.sum()):
            raise Wrong("a batch: wrong result, the draws do not follow the priorities")


class _TorchRL(_Torch):
    """What `PrioritizedSampler` does with its sum tree, and no more of it."""

    def __init__(self, given, slots, fresh, on_gpu):
        super().__init__(given, slots, fresh, on_gpu)
        extension = load_extension(self.torch)
        if on_gpu and not hasattr(extension, "CudaSumSegmentTreeFp32"):
            raise Missing("the installed torchrl was built without CUDA trees (PyPI's wheels are)")
        size = len(given)
        if on_gpu:
            self.tree = extension.CudaSumSegmentTreeFp32(size, self.device)
        else:
            self.tree = extension.SumSegmentTreeFp32(size)
        everything = self.torch.arange(size, device=self.device)
        self.tree[everything] = self.torch.from_numpy(given).to(self.device)
        self.zero = self.torch.zeros(1, dtype=self.torch.int64, device=self.device)
        self.end = self.torch.full((1,), size, dtype=self.torch.int64, device=self.device)

    def sample(self, i):
        total = self.tree.query(self.zero, self.end)
        points = self.torch.rand(self.batch, device=self.device) * total
        # A point may round up to the total, behind the last slot.
        slots = self.tree.scan_lower_bound(points).clamp_(max=len(self.given) - 1)
        return slots, self.tree[slots]

    def update(self, i):
        self.tree[self.slots[i % len(self.slots)]] = self.fresh[i % len(self.fresh)]


class _RunningSum(_Torch):
    """A plain array; a sample forms its running sum and searches it."""

    def __init__(self, given, slots, fresh, on_gpu):
        super().__init__(given, slots, fresh, on_gpu)
        self.values = self.torch.from_numpy(given.copy()).to(self.device)

    def sample(self, i):
        # float64: a float32 running sum of 10^7 values is wrong in its third digit.
        sums = self.torch.cumsum(self.values, 0, dtype=self.torch.float64)
        points = self.torch.rand(self.batch, dtype=self.torch.float64, device=self.device) * sums[-1]
        slots = self.torch.searchsorted(sums, points).clamp_(max=len(self.given) - 1)
        return slots, self.values[slots]

    def update(self, i):
        self.values[self.slots[i % len(self.slots)]] = self.fresh[i % len(self.fresh)]


class _Multinomial(_RunningSum):
    """A plain array and `torch.multinomial`."""

    def sample(self, i):
        slots = self.torch.multinomial(self.values, self.batch, replacement=True)
        return slots, self.values[slots]


TREES: dict[str, Callable[..., Tree]] = {
    TORCHRL: _TorchRL,
    "torch, cumsum and searchsorted": _RunningSum,
    "torch.multinomial": _Multinomial,
}
