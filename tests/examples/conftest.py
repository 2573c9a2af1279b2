import importlib
import pathlib

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports a file of the examples folder, as the scripts in it do."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module
