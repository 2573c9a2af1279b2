"""The conditions that the whole suite runs under: eight devices on a CPU, no implicit promotion of dtypes or ranks.

The suite compiles some ten thousand small programs and runs each a few times, so XLA's CPU code is not optimized, and a
worker compiles the same program once. `XLA_FLAGS=--xla_backend_optimization_level=3` tests optimized code.
`XLA_FLAGS=--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters` takes a third less time, for a first look:
XLA then fuses other operations than in users' programs, and moves some float8_e5m2fnuz wrongly.

`JAX_PLATFORMS=cuda` runs it on a GPU: a table then lies in `pinned_host` unless a test says otherwise.
"""

import faulthandler
import gc
import importlib.util
import itertools
import os
import pathlib
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

# Where a worker of pytest-xdist leaves what it dies of, and what there is to say of those that died.
_LAST_WORDS = "GEAR_JAX_TESTS_LAST_WORDS"
_deaths: list[str] = []

# The examples are the same in every run, and a compilation in the midst of one is not slowness.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=50)
hypothesis.settings.load_profile("suite")


@pytest.hookimpl(trylast=True)  # pytest's own plugin has had the fault handler before
def pytest_configure(config):
    """A worker that dies of a signal writes the stacks of its threads into a file of its own."""
    if hasattr(config, "workerinput"):
        path = os.path.join(os.environ[_LAST_WORDS], config.workerinput["workerid"])
        config.gear_jax_stacks = open(f"{path}.stacks", "w")
        faulthandler.enable(config.gear_jax_stacks)
    elif config.pluginmanager.hasplugin("dsession"):
        config.gear_jax_last_words = tempfile.TemporaryDirectory(prefix="gear_jax-tests-")
        os.environ[_LAST_WORDS] = config.gear_jax_last_words.name


@pytest.fixture(scope="session", autouse=True)
def _captured_where_others_can_read(request):
    """Libraries say on the standard error why they end the process; pytest captures that into a file without a name."""
    config = request.config
    if not hasattr(config, "workerinput") or config.option.capture != "fd":
        return
    captured = os.fstat(2)
    path = os.path.join(os.environ[_LAST_WORDS], config.workerinput["workerid"])
    named = os.open(f"{path}.stderr", os.O_RDWR | os.O_CREAT, 0o600)
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.path.samestat(os.fstat(fd), captured):
                os.dup2(named, fd, inheritable=fd == 2)
        except OSError:  # that of the listing itself
            pass
    os.close(named)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    if error is None:
        return
    name = node.gateway.id
    _deaths.append(f"worker {name} ended with {node.gateway._io.popen.wait()} (-N: signal N)")
    for file in sorted(pathlib.Path(os.environ[_LAST_WORDS]).glob(f"{name}.*")):
        _deaths.append(f"{file.name}:\n{file.read_text(errors='replace')[-20_000:]}")


def pytest_terminal_summary(terminalreporter):
    if _deaths:
        terminalreporter.section("workers that died")
        for words in _deaths:
            terminalreporter.write_line(words)


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


_tests = itertools.count(1)
_MAX_MAPPINGS = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Drops compiled programs before they fill the process's address space: each is some mappings of memory, of which
    Linux gives a process 65,530, and XLA ends a process that gets no more.
    """
    if next(_tests) % 20 == 0 and _mappings() > _MAX_MAPPINGS // 4:
        jax.clear_caches()
        gc.collect()


def _mappings():
    with open("/proc/self/maps", "rb") as maps:
        return sum(1 for _ in maps)


@pytest.fixture(params=["device", "pinned_host"])
def memory(request):
    """Each kind of memory that columns can lie in; on a CPU both are the same memory, and the programs differ."""
    return request.param


@pytest.fixture
def fake_gpu(monkeypatch):
    """A `.device` that stands for a GPU, and the `.calls` of its `.cuda` and `.cupy`; `lose_cupy()` removes that."""
    spec = importlib.util.spec_from_file_location("fake_gpu", pathlib.Path(__file__).with_name("fake_gpu.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield from module.gpu(monkeypatch)


@pytest.fixture(autouse=True)
def _no_checks(monkeypatch):
    """A test that wants `GEAR_JAX_CHECKS` sets it."""
    monkeypatch.delenv("GEAR_JAX_CHECKS", raising=False)


@pytest.fixture
def checks(monkeypatch):
    """Data-dependent faults are errors in this test."""
    monkeypatch.setenv("GEAR_JAX_CHECKS", "1")
