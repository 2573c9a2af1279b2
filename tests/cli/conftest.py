import tempfile

import pytest

from gear_jax.actors import _clean


@pytest.fixture(autouse=True)
def shm(monkeypatch):
    """The directory of shared memory that `doctor` looks at: not that of the machine, where others have rings."""
    rings, clean = _clean.rings, _clean.clean
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gear_jax_test.") as directory:
        monkeypatch.setattr(_clean, "rings", lambda *_: rings(directory))
        monkeypatch.setattr(_clean, "clean", lambda: clean(directory))
        yield directory
