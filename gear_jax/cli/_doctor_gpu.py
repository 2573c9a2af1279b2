"""What `doctor` says of a GPU: its driver, its way to host memory, what may be page-locked, and a trial."""

import importlib.metadata
import json
import os
import resource
from typing import Any

from gear_jax import _cuda, _host_memory, _native
from gear_jax._host_memory import human
from gear_jax.cli import _trial

BUILD = "`GEAR_JAX_CUDA=ON pip install .` in the project's root (it needs nvcc)"
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_LOCKED = 256 << 20
_TRIAL = f"""
import json, time
import jax, jax.numpy as jnp, numpy as np, gear_jax as gear
table = gear.TableSpec({{"x": gear.ColumnSpec((3,), jnp.float32)}}, trajectory_length=4, capacity=8)
replay = gear.make_replay(table, gear.selectors.Prioritized(), memory="pinned_host")
state, _ = replay.add(replay.init(), {{"x": jnp.ones((2, 4, 3))}}, jnp.array([4, 2], jnp.int32))
state, sample = replay.sample(state, jax.random.key(0), 16)
assert bool(sample.valid.all()) and bool(((sample.data["x"] == 1) == sample.mask["x"][..., None]).all())

device, values = jax.devices()[0], np.ones({_LOCKED}, np.uint8)
host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
def put():
    start = time.perf_counter()
    array = jax.device_put(values, host).block_until_ready()
    seconds = time.perf_counter() - start
    array.delete()
    return seconds
# The second time XLA's pool has the memory: what it took less is the page-locking.
print(json.dumps({{"version": device.client.platform_version, "seconds": put() - put()}}))
"""


def report() -> tuple[list[tuple[str, str]], str | None, bool]:
    """(rows, what does not work or None, whether a trial ran)."""
    driver = _cuda.library()
    if driver is None:
        return [("GPU", "none: this machine has no NVIDIA driver")], None, False
    rows, problem = _driver(driver)
    rows += _memory()
    plugin = next((x for x in _PLUGINS if _version(x)), None)
    rows.append(("jax", f"{plugin} {_version(plugin)}" if plugin else _no_plugin(driver)))
    if plugin is None or _runtime() is None:
        return rows, None, False  # nobody has set this up, so it is no fault if it does not work
    if problem:
        return rows, problem, False
    why, said = _trial.run(_TRIAL, JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_PREALLOCATE="false")
    return rows + _measured(said), why, True


def _driver(driver: Any) -> tuple[list[tuple[str, str]], str | None]:
    """Rows of the driver and the devices, and what keeps them from working."""
    try:
        newest, devices = _cuda.supported_cuda(driver), _cuda.devices(driver)
    except _cuda.DriverError as e:
        return [("driver", f"does not work: {e}")], str(e)
    rows = [("driver", f"{_cuda.driver_version() or 'of unknown version'}, for CUDA up to {_cuda.version(newest)}")]
    problem = None if devices else "the NVIDIA driver sees no GPU"
    for i, device in enumerate(devices):
        major, minor = device.compute_capability
        why = _cuda.host_memory_problem(device)
        text = "its kernels reach page-locked host memory" if why is None else why
        rows.append((f"GPU {i}", f"{device.name}, compute capability {major}.{minor}: {text}"))
        problem = problem or why
    runtime = _runtime()
    lacking = _cuda.batch_copy_problem(newest, newest if runtime is None else runtime)
    rows.append(("copy engines", lacking or "gathers of large windows, called outside of programs, may use them"))
    return rows, problem or (_cuda.driver_problem(driver, runtime) if runtime else None)


def _memory() -> list[tuple[str, str]]:
    pool, available = _host_memory.pool(), _host_memory.available()
    how = f"{_host_memory.LIMIT}={os.environ[_host_memory.LIMIT]}" if _host_memory.LIMIT in os.environ else "default"
    rows = [
        ("pinned pool", f"{human(pool.limit)} for each GPU of a process ({how}; {_host_memory.LIMIT} sets it)"),
        ("free memory", "not known" if available is None else f"{human(available)} that could be page-locked"),
    ]
    for group in _host_memory.groups():
        text = f"{human(group.limit)} in all, {human(group.left)} left: {group.path}"
        rows.append(("container limit", text))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = f"{human(soft)}: CUDA's allocations do not count, RDMA's do"
    return [*rows, ("RLIMIT_MEMLOCK", "unlimited" if soft == resource.RLIM_INFINITY else limited)]


def _measured(said: str) -> list[tuple[str, str]]:
    try:
        found = json.loads(said.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return []
    rows = [("jax's CUDA", " ".join(str(found["version"]).split()))]
    if found["seconds"] > 0:
        speed = _LOCKED / found["seconds"]
        text = f"{speed / 1e9:.2g} GB/s: a table of 64 GiB takes {64 * _host_memory.GIB / speed:.0f} s to make"
        rows.append(("page-locking", text))
    return rows


def _no_plugin(driver: Any) -> str:
    try:
        major = min(13, _cuda.supported_cuda(driver) // 1000)
    except _cuda.DriverError:
        major = 13
    return f"without CUDA: `python -m pip install 'jax[cuda{major}]'`"


def _runtime() -> int | None:
    """The CUDA version of this build's library, None where there is none that loads."""
    try:
        module = _native.load("CUDA")
    except ImportError:
        return None
    return None if module is None else module.runtime_version()


def _version(name: str | None) -> str | None:
    try:
        return importlib.metadata.version(name or "")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
