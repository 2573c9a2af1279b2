"""The layers: imports go down only, `jax._src` is nobody's, and the thin modules work without jax."""

import ast
import pathlib
import subprocess
import sys

import pytest

import gear_jax

ROOT = pathlib.Path(gear_jax.__file__).parent
LAYERS = {
    "_errors": 0, "_env": 0, "_typing": 0, "_host_memory": 0, "metrics": 1,
    "specs": 1, "_native": 1, "_cuda": 1, "_numbers": 1,
    "ops": 2, "transport": 2, "_random": 2, "_axis": 2,
    "selectors": 3, "windows": 3, "external": 3,
    "replay": 4,
    "sharding": 5, "actors": 5, "checkpoint": 5, "_checkpoint": 5, "datasets": 5, "_prefetch": 5,
    "flax": 6, "cli": 6, "bench": 6, "testing": 6, "__main__": 6,
}  # fmt: skip
FILES = sorted(p for p in ROOT.rglob("*.py") if p.name != "__init__.py" or p.parent != ROOT)
NO_JAX = [p for p in FILES if LAYERS.get(p.relative_to(ROOT).parts[0].removesuffix(".py"), 9) < 2]


def imported(path):
    """The absolute names of all modules and members that a file imports, wherever in it, type checking apart."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ("gear_jax", *path.relative_to(ROOT).parent.parts)
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{a.name}" for a in node.names)


def test_every_module_has_a_layer():
    assert {p.relative_to(ROOT).parts[0].removesuffix(".py") for p in FILES} <= set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path):
    mine = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imported(path):
        assert not name.startswith(("jax._src", "jaxlib._")), f"{path} imports {name}"
        parts = name.split(".")
        if parts[0] == "gear_jax" and len(parts) > 1 and parts[1] in LAYERS and parts[1] != mine:
            assert LAYERS[parts[1]] <= LAYERS[mine], f"{mine} (layer {LAYERS[mine]}) imports {name}"


@pytest.mark.parametrize("path", NO_JAX, ids=lambda p: p.stem)
def test_the_lowest_layers_know_no_jax(path):
    assert not [name for name in imported(path) if name.split(".")[0] in ("jax", "jaxlib", "flax")]


def test_ops_know_neither_specs_nor_tables():
    for path in (ROOT / "ops").glob("*.py"):
        names = [n for n in imported(path) if n.startswith("gear_jax.")]
        assert not [n for n in names if n.split(".")[1] in ("specs", "windows", "selectors", "replay")], path


@pytest.mark.parametrize(
    "code",
    [
        "import gear_jax",
        "import gear_jax.specs",
        "from gear_jax import TableSpec, Window, specs",
        "from gear_jax.actors import ActorPool, Writer, make_ring",
        "import gear_jax.actors._run",
        "import gear_jax.transport; gear_jax.transport.missing('ucx')",
        "from gear_jax.testing import transports",
        "from gear_jax.actors import RateLimiter",
        "import gear_jax.metrics, gear_jax.cli._top",
    ],
)
def test_importing_does_not_import_jax(code):
    check = f"{code}; import sys; assert not {{'jax', 'jaxlib', 'flax'}} & set(sys.modules), 'jax was imported'"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_public_names_load_on_use():
    for name in gear_jax.__all__:
        assert getattr(gear_jax, name) is not None
    assert set(gear_jax.__all__) <= set(dir(gear_jax))
    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing'"):
        gear_jax.no_such_thing  # noqa: B018


@pytest.mark.cpu
def test_importing_starts_no_backend():
    # The flag is read when the backend starts.
    flag = "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=3'"
    code = f"import gear_jax as g, jax; g.make_replay; g.ops.gather; {flag}; assert jax.device_count() == 3"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
