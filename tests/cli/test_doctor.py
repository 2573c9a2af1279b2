"""`doctor`: what it reports where things are missing."""

import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import gear_jax
from gear_jax import _native, cli
from gear_jax.cli import _doctor, _doctor_gpu, _doctor_transport


@pytest.fixture
def works(monkeypatch):
    """The trials are skipped: other tests run them."""
    monkeypatch.setattr(_doctor, "_cpu_problem", lambda: None)
    monkeypatch.setattr(_doctor_gpu, "report", lambda: ([("GPU", "none")], None, False))
    monkeypatch.setattr(_doctor_transport, "report", lambda: ([("ucx", "none")], None))


def report(capsys, *, status=0):
    assert cli.main(["doctor"]) == status
    return capsys.readouterr().out


def test_whole_report_with_a_real_trial(capsys):
    text = report(capsys)
    for part in (gear_jax.__version__, jax.__version__, "huge pages", "operations", "The CPU path works"):
        assert part in text
    assert f"{jax.device_count()} x " in text
    assert "missing" not in text.split("Optional packages")[0]


def test_remote_reads_that_fail(capsys, monkeypatch, works):
    monkeypatch.setattr(_doctor_transport, "report", lambda: ([("ucx", "none")], "no such luck"))
    assert "Remote reads do NOT work: no such luck" in report(capsys, status=1)


def test_cpu_path_that_fails(capsys, monkeypatch):
    monkeypatch.setattr(_doctor, "_TRIAL", "raise RuntimeError('no such luck')")
    assert "The CPU path does NOT work: RuntimeError: no such luck" in report(capsys, status=1)


@pytest.mark.parametrize(
    ("trial", "problem"),
    [
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("pass", None),
    ],
)
def test_trials(monkeypatch, trial, problem):
    monkeypatch.setattr(_doctor, "_TRIAL", trial)
    got = _doctor._cpu_problem()
    assert got is None if problem is None else problem in got


def test_trial_that_hangs(monkeypatch):
    def hang(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "did not end" in _doctor._cpu_problem()


def test_missing_packages_and_how_to_get_them(capsys, monkeypatch, works):
    monkeypatch.setattr(_doctor, "_version", lambda name: None if name in ("h5py", "tqdm", "jaxlib") else "1.0")
    text = report(capsys)
    assert "missing: `python -m pip install jaxlib`" in text
    assert 'python -m pip install "h5py>=3.11" "tqdm>=4.66"' in text
    assert "bench     all there" in text


@pytest.mark.parametrize(
    ("version", "good"), [("0.10.1", False), ("0.10.2", True), ("0.11.9", True), ("0.12.0", False)]
)
def test_unsupported_jax(capsys, monkeypatch, works, version, good):
    monkeypatch.setattr(_doctor, "_version", lambda name: version)
    assert ("not supported" in report(capsys)) != good


def test_libraries(capsys, monkeypatch, works):
    missing = _native.LibraryMissingError("any text")

    def load(platform):
        if platform == "cpu":
            raise missing
        raise ImportError("libcudart.so.13: cannot open shared object file\nmore")

    monkeypatch.setattr(_native, "load", load)
    text = report(capsys)
    assert "CPU   missing: run `python -m pip install .`" in text
    assert "CUDA  does not load: libcudart.so.13: cannot open shared object file\n" in text


def test_a_missing_library_is_an_error_of_its_own(monkeypatch):
    def find(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(_native.importlib, "import_module", find)
    with pytest.raises(_native.LibraryMissingError, match=r"missing from this installation. Run `pip install .`"):
        _native.load.__wrapped__("cpu")
    assert _native.load.__wrapped__("CUDA") is None
    assert _doctor._library("cpu") is not None  # loaded before, and kept


def load(*platforms):
    library = SimpleNamespace(registrations=dict, __file__="x")
    return lambda platform: library if platform in platforms else None


def test_no_cuda_library_is_no_fault(capsys, monkeypatch, works):
    monkeypatch.setattr(_native, "load", load("cpu"))
    assert "CUDA  not in this build; for an NVIDIA GPU: `GEAR_JAX_CUDA=ON pip install .`" in report(capsys)


@pytest.mark.parametrize(
    ("platform", "libraries", "said"),
    [
        ("cpu", ["cpu"], "cpu: 1 x A device\n"),
        ("gpu", ["cpu", "CUDA"], "gpu: 1 x A device\n"),
        ("gpu", ["cpu"], "gpu: 1 x A device: no handlers in this build: `GEAR_JAX_CUDA=ON pip install .`"),
        ("tpu", ["cpu", "CUDA"], "tpu: 1 x A device: no handlers in this build: set JAX_PLATFORMS=cpu\n"),
    ],
)
def test_the_platform_of_the_devices(capsys, monkeypatch, works, platform, libraries, said):
    device = SimpleNamespace(platform=platform, device_kind="A device")
    monkeypatch.setattr(_native, "load", load(*libraries))
    with monkeypatch.context() as m:
        m.setattr(jax, "devices", lambda *a: [device])
        assert said in report(capsys)


def test_devices(capsys, monkeypatch, works):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert "no handlers" not in report(capsys)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "other platforms are not tried" in report(capsys)

    def fail():
        raise RuntimeError("Unable to initialize backend\nand more")

    monkeypatch.setattr(jax, "devices", fail)
    assert "cannot start: RuntimeError: Unable to initialize backend\n" in report(capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("always [madvise] never", "madvise: used for large arrays"),
        ("always madvise [never]", "as root, `echo madvise >"),
        (None, "not known"),
    ],
)
def test_huge_pages(monkeypatch, tmp_path, text, said):
    path = tmp_path / "enabled"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(_doctor, "_HUGE_PAGES", path)
    assert said in _doctor._huge_pages()


def test_extras_are_those_of_the_package():
    project = tomllib.loads((Path(gear_jax.__file__).parent.parent / "pyproject.toml").read_text())["project"]
    extras = {k: tuple(x.split(";")[0].strip() for x in v) for k, v in project["optional-dependencies"].items()}
    extras.pop("dev")
    assert extras == _doctor.EXTRAS
