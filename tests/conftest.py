"""The conditions that the whole suite runs under: eight devices on a CPU, no implicit promotion of dtypes or ranks.

The suite compiles some ten thousand small programs and runs each a few times, so XLA's CPU code is not optimized, and a
worker compiles the same program once. `XLA_FLAGS=--xla_backend_optimization_level=3` tests optimized code.

`JAX_PLATFORMS=cuda` runs it on a GPU: a table then lies in `pinned_host` unless a test says otherwise.
"""

import os
import tempfile

# Before jax starts its backend; what stands in XLA_FLAGS comes last, so it wins.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        os.environ.get("XLA_FLAGS", ""),
    ]
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import jax
import pytest

from gear_jax import _native

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

if os.environ["JAX_PLATFORMS"] == "cpu":
    # A directory of this process alone: JAX writes the files in place, and another process would read half of one.
    _cache = tempfile.TemporaryDirectory(prefix="gear_jax-tests-")
    jax.config.update("jax_compilation_cache_dir", _cache.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The examples are the same in every run, and a compilation in the midst of one is not slowness.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=50)
hypothesis.settings.load_profile("suite")


def pytest_collection_modifyitems(items):
    """Skips what the platform, or the number of its devices, does not allow; the markers are in pyproject.toml."""
    gpu = jax.default_backend() == "gpu"
    if gpu and _native.load("CUDA") is None:
        raise pytest.UsageError("JAX_PLATFORMS=cuda needs a build with GEAR_JAX_CUDA=ON; this one has no CUDA library")
    for item in items:
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU, got {jax.default_backend()}"))
        if item.get_closest_marker("cpu") and gpu:
            item.add_marker(pytest.mark.skip(reason="about the CPU"))
        wanted = item.get_closest_marker("devices")
        if wanted and jax.device_count() < wanted.args[0]:
            reason = f"needs {wanted.args[0]} devices, got {jax.device_count()}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["device", "pinned_host"])
def memory(request):
    """Each kind of memory that columns can lie in; on a CPU both are the same memory, and the programs differ."""
    return request.param


@pytest.fixture(autouse=True)
def _no_checks(monkeypatch):
    """A test that wants `GEAR_JAX_CHECKS` sets it."""
    monkeypatch.delenv("GEAR_JAX_CHECKS", raising=False)


@pytest.fixture
def checks(monkeypatch):
    """Data-dependent faults are errors in this test."""
    monkeypatch.setenv("GEAR_JAX_CHECKS", "1")
