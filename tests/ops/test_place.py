"""Where arrays go by default, and the platforms that a build can work on."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from gear_jax import _cuda, _native, ops
from gear_jax.ops import _place


@pytest.mark.cpu
def test_the_default_device():
    assert _place.default_device() == jax.devices()[0]
    with jax.default_device(jax.devices()[-1]):
        assert _place.default_device() == jax.devices()[-1]
    with jax.default_device("cpu"):
        assert _place.default_device().platform == "cpu"


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_memory_kinds(monkeypatch, platform):
    monkeypatch.setattr(_place, "default_device", lambda: SimpleNamespace(platform=platform))
    assert _place.memory_kind(None) == ("pinned_host" if platform == "gpu" else "device")
    assert [_place.memory_kind(m) for m in _place.MEMORIES] == list(_place.MEMORIES)


def test_tracing():
    seen = []
    look = lambda x: (seen.append(_place.tracing()), x)[1]  # noqa: E731
    look(0)
    jax.vmap(look)(jnp.ones(2))
    jax.jit(look)(0.0)
    jax.eval_shape(lambda: look(jnp.ones(2)))
    jax.lax.scan(lambda c, _: (look(c), None), 0.0, length=2)
    assert seen == [False, False, True, True, True]


@pytest.fixture
def on_gpu(monkeypatch):
    """on_gpu(runtime): the default backend is a GPU, and the build's library for CUDA is of `runtime` (None: none)."""

    def set_up(runtime, driver=None):
        held = ["cpu"] if runtime is None else ["cpu", "CUDA"]
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(_native, "registrations", lambda: [(p, "gear_zeros", None) for p in held])
        monkeypatch.setattr(_native, "load", lambda platform: SimpleNamespace(runtime_version=lambda: runtime))
        monkeypatch.setattr(_cuda, "library", lambda: driver)
        return ops.check_platform.__wrapped__

    return set_up


def test_this_platform_is_one_of_this_build():
    ops.check_platform()


def test_a_gpu_without_the_library_for_cuda(on_gpu):
    said = r"default backend: got 'gpu', wanted one of \['cpu'\].*`GEAR_JAX_CUDA=ON pip install \.`.*JAX_PLATFORMS=cpu"
    with pytest.raises(RuntimeError, match=said):
        on_gpu(None)()


def test_another_platform(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(RuntimeError, match=r"got 'tpu', wanted one of .*handlers for\. Set JAX_PLATFORMS=cpu before"):
        ops.check_platform.__wrapped__()


def test_a_driver_that_is_too_old(on_gpu, monkeypatch):
    monkeypatch.setattr(_cuda, "supported_cuda", lambda driver: driver)
    on_gpu(13000, driver=13000)()
    on_gpu(13000)()  # jax found its GPU without this driver
    with pytest.raises(RuntimeError, match=r"CUDA driver: got .*for CUDA up to 12\.4, wanted one for CUDA 13"):
        on_gpu(13000, driver=12040)()
