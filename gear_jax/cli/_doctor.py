"""`doctor`: what is installed, what is missing, and how to get it."""

import importlib.metadata
import os
import pathlib
import platform
import re
import sys

import gear_jax
from gear_jax.cli import _doctor_gpu, _doctor_rdma, _doctor_rings, _doctor_transport, _trial
from gear_jax.cli._output import table

_REQUIRED = ("jax", "jaxlib", "flax", "orbax-checkpoint", "tensorstore", "etils", "numpy")
_DONE = "a table was filled and sampled."
# extra -> what pip must be given for each of its packages; as in pyproject.toml.
EXTRAS = {
    "cuda": ("cupy-cuda13x>=13.6",),
    "datasets": ("h5py>=3.11", "minari[hdf5,arrow]>=0.5.3", "gymnasium[mujoco]>=1.2", "tqdm>=4.66"),
    "metrics": ("prometheus_client>=0.20", "tensorboardX>=2.6.2", "rich>=13.0"),
    "examples": ("optax>=0.2.5", "matplotlib>=3.9", "tqdm>=4.66"),
    "rdma": ("libucx-cu12>=1.22",),
    "bench": ("flashbax>=0.1.3", "cpprb>=11.0", "matplotlib>=3.9"),
}
_HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TRIAL = """
import jax, jax.numpy as jnp, gear_jax as gear
table = gear.TableSpec({"x": gear.ColumnSpec((3,), jnp.float32)}, trajectory_length=4, capacity=8)
replay = gear.make_replay(table, gear.selectors.Prioritized())
state, _ = replay.add(replay.init(), {"x": jnp.ones((2, 4, 3))}, jnp.array([4, 2], jnp.int32))
state, sample = replay.sample(state, jax.random.key(0), 16)
assert bool(sample.valid.all()) and bool(((sample.data["x"] == 1) == sample.mask["x"][..., None]).all())
"""


def run() -> int:
    """Prints the report; returns 0 if the CPU path works, and the GPU's and remote reads where they can be tried, else
    1."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU may be at work, and is tried below
    cpu_problem = _cpu_problem()
    gpu, gpu_problem, gpu_tried = _doctor_gpu.report()
    remote, remote_problem = _doctor_transport.report()
    parts = [
        ("System", table(_system())),
        ("Packages", table(_packages())),
        ("Devices", table(_devices())),
        ("Libraries", table([("CPU", _cpu_library()), ("CUDA", _cuda_library())])),
        ("GPU", table(gpu)),
        ("Remote reads", table(remote)),
        ("RDMA", table(_doctor_rdma.report())),
        ("Optional packages", _extras()),
        ("Rings of actors in shared memory", _doctor_rings.report()),
    ]
    for title, text in parts:
        print(f"{title}\n{text}\n")
    print(f"The CPU path does NOT work: {cpu_problem}" if cpu_problem else "The CPU path works: " + _DONE)
    if gpu_problem:
        print(f"The GPU path does NOT work: {gpu_problem}")
    elif gpu_tried:
        print("The GPU path works: " + _DONE.replace("table", "table in pinned_host"))
    if remote_problem:
        print(f"Remote reads do NOT work: {remote_problem}")
    return 1 if cpu_problem or gpu_problem or remote_problem else 0


def _system() -> list[tuple[str, str]]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return [
        ("gear_jax", f"{gear_jax.__version__}, {pathlib.Path(gear_jax.__file__).parent}"),
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("platform", f"{platform.platform()}, {len(os.sched_getaffinity(0))} CPUs, {memory:.1f} GiB of memory"),
        ("huge pages", _huge_pages()),
    ]


def _huge_pages() -> str:
    """Large tables and batches are faster behind huge pages; the library asks for them where it may."""
    try:
        setting = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text())
    except OSError:
        return "not known: this kernel does not say"
    mode = setting[1] if setting else "not known"
    if mode == "never":
        return f"never: slower large tables; as root, `echo madvise > {_HUGE_PAGES}`"
    return f"{mode}: used for large arrays"


def _packages() -> list[tuple[str, str]]:
    rows = []
    for name in _REQUIRED:
        version = _version(name) or f"missing: `python -m pip install {name}`"
        numbers = tuple(int(x) for x in re.findall(r"\d+", version)[:3])
        if name in ("jax", "jaxlib") and numbers and not (0, 10, 2) <= numbers < (0, 12):
            version += f": not supported, `python -m pip install '{name}>=0.10.2,<0.12'`"
        rows.append((name, version))
    return rows


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[tuple[str, str]]:
    try:
        import jax

        devices = jax.devices()
    except Exception as e:  # a backend may fail in any way it likes; the report goes on
        return [("jax", f"cannot start: {type(e).__name__}: {_first_line(e)}")]
    rows = [("default", f"{devices[0].platform}: {_devices_text(devices)}")]
    needs = {"cpu": "cpu", "gpu": "CUDA"}.get(devices[0].platform)
    if needs is None or (needs == "CUDA" and _library(needs) is None):
        fix = f"{_doctor_gpu.BUILD}, or set JAX_PLATFORMS=cpu" if needs else "set JAX_PLATFORMS=cpu"
        rows = [("default", f"{rows[0][1]}: no handlers in this build: {fix}")]
    if os.environ.get("JAX_PLATFORMS"):
        rows.append(("JAX_PLATFORMS", f"{os.environ['JAX_PLATFORMS']}: other platforms are not tried"))
    return rows


def _devices_text(devices) -> str:
    kinds = sorted({d.device_kind for d in devices})
    return f"{len(devices)} x {', '.join(kinds)}"


def _cpu_library() -> str:
    return _library("cpu") or "missing: run `python -m pip install .` in the project's root (needs a C++17 compiler)"


def _cuda_library() -> str:
    return _library("CUDA") or f"not in this build; for an NVIDIA GPU: {_doctor_gpu.BUILD}"


def _library(name: str) -> str | None:
    """How many operations a library holds, why it does not load, or None where it is not there."""
    from gear_jax import _native

    try:
        module = _native.load(name)
    except _native.LibraryMissingError:
        return None
    except ImportError as e:
        return f"does not load: {_first_line(e)}"
    if module is None:
        return None
    return f"loaded, {len(module.registrations())} operations: {module.__file__}"


def _extras() -> str:
    lines = []
    for extra, packages in EXTRAS.items():
        missing = [p for p in packages if _version(re.split(r"[\[<>=]", p)[0]) is None]
        if missing:
            command = "python -m pip install " + " ".join(f'"{p}"' for p in missing)
            names = ", ".join(re.split(r"[\[<>=]", p)[0] for p in missing)
            lines += [(extra, f"missing {names}:"), ("", command)]
        else:
            lines.append((extra, "all there"))
    return table(lines)


def _cpu_problem() -> str | None:
    """Fills and samples a table on the CPU, in a process of its own; None if that works."""
    return _trial.run(_TRIAL, JAX_PLATFORMS="cpu")[0]


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [""])[0]
