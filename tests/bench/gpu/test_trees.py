"""Priorities in torch, on the CPU where torch is installed; what is said where it is not."""

import sys
import types

import numpy as np
import pytest

from gear_jax.bench.gpu import torch_trees
from gear_jax.bench.gpu.findings import Missing, Wrong

PLAIN = [name for name in torch_trees.TREES if name != torch_trees.TORCHRL]


@pytest.fixture
def given():
    rng = np.random.default_rng(0)
    slots = [rng.integers(0, 1000, 400, np.int32) for _ in range(3)]
    return rng.uniform(0.1, 1.0, 1000).astype(np.float32), slots, [np.full(400, 0.5, np.float32)] * 3


@pytest.mark.parametrize("name", PLAIN)
def test_plain_torch_draws_by_priority_and_updates(name, given):
    pytest.importorskip("torch")
    tree = torch_trees.TREES[name](*given, on_gpu=False)
    tree.check()
    tree.wait(tree.update(2))


def test_draws_that_ignore_the_priorities_are_wrong(given):
    torch = pytest.importorskip("torch")
    tree = torch_trees.TREES["torch.multinomial"](given[0] ** 8, *given[1:], on_gpu=False)
    slots = torch.arange(400)
    tree.sample = lambda i: (slots, tree.values[slots])
    with pytest.raises(Wrong, match="do not follow"):
        tree.check()
    tree.sample = lambda i: (slots, tree.values[slots] + 1)
    with pytest.raises(Wrong, match="not those of the slots"):
        tree.check()


@pytest.mark.parametrize("name", torch_trees.TREES)
def test_without_torch_the_reason_says_so(name, given, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Missing, match="not installed"):
        torch_trees.TREES[name](*given, on_gpu=False)


def test_a_torch_without_a_gpu_is_a_reason(monkeypatch):
    fake = types.SimpleNamespace(__version__="2.0", cuda=types.SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", fake)
    with pytest.raises(Missing, match=r"torch 2\.0 sees no GPU"):
        torch_trees.load_torch(on_gpu=True)


def test_the_extension_is_found_without_importing_the_package(monkeypatch, tmp_path):
    torch, package = types.SimpleNamespace(__version__="2.0"), tmp_path / "torchrl"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchrl", raising=False)
    monkeypatch.delitem(sys.modules, torch_trees._EXTENSION, raising=False)
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    with pytest.raises(Missing, match="without its extension"):
        torch_trees.load_extension(torch)
    (package / "_torchrl.so").write_bytes(b"no library")
    with pytest.raises(Missing, match=r"does not load beside torch 2\.0"):
        torch_trees.load_extension(torch)
    loaded = types.ModuleType(torch_trees._EXTENSION)
    monkeypatch.setitem(sys.modules, torch_trees._EXTENSION, loaded)
    assert torch_trees.load_extension(torch) is loaded
