"""Where the columns lie: what `memory` means, what `init` refuses, and how its errors name the way out."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import gear_jax as gear
from gear_jax import _cuda, _host_memory, ops
from gear_jax._host_memory import GIB, LIMIT
from gear_jax.ops import _place
from gear_jax.replay import _memory

TABLE = gear.TableSpec({"a": gear.ColumnSpec((), jnp.float32), "b": gear.ColumnSpec((3,), jnp.uint8)}, 4, 8)


def kinds(replay):
    return {x.sharding.memory_kind for x in jax.tree.leaves(replay.init().columns)}


@pytest.mark.cpu
def test_on_a_cpu_columns_lie_in_the_device_s_memory_unless_told_otherwise():
    assert kinds(gear.make_replay(TABLE)) == kinds(gear.make_replay(TABLE, memory="device")) == {"device"}
    assert kinds(gear.make_replay(TABLE, memory="pinned_host")) == {"pinned_host"}


@pytest.mark.gpu
def test_on_a_gpu_columns_lie_in_page_locked_host_memory_unless_told_otherwise():
    assert kinds(gear.make_replay(TABLE)) == kinds(gear.make_replay(TABLE, memory="pinned_host")) == {"pinned_host"}
    assert kinds(gear.make_replay(TABLE, memory="device")) == {"device"}


@pytest.mark.gpu
def test_a_table_in_host_memory_takes_none_of_the_gpu_s_own():
    code = """
import jax, numpy as np, gear_jax as gear
table = gear.TableSpec({"a": gear.ColumnSpec((1 << 20,), np.uint8)}, 64, 16)  # 1 GiB
replay = gear.make_replay(table)
state = replay.init()
for _ in range(3):
    state, _ = replay.add(state, {"a": np.ones((1, 2, 1 << 20), np.uint8)}, np.full(1, 2, np.int32))
assert jax.devices()[0].memory_stats()["peak_bytes_in_use"] < 64 << 20
assert np.asarray(state.columns["a"])[0, :3, :2].all() and not np.asarray(state.columns["a"])[0, 3:].any()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.cpu
@pytest.mark.parametrize("memory", [None, "pinned_host", "device"])
def test_make_replay_starts_no_backend(memory):
    # The flag is read when the backend starts.
    code = f"""
import os, jax, gear_jax as gear
table = gear.TableSpec({{"a": gear.ColumnSpec((), "float32")}}, 4, 8)
replay = gear.make_replay(table, memory={memory!r})
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
assert jax.device_count() == 3
assert replay.init().columns["a"].sharding.memory_kind == {memory or "device"!r}
"""
    env = {**os.environ, "XLA_FLAGS": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr


def test_columns_and_index_are_on_the_default_device(memory):
    device = jax.devices()[-1]
    with jax.default_device(device):
        state = gear.make_replay(TABLE, memory=memory).init()
    assert {d for x in jax.tree.leaves(state) for d in x.devices()} == {device}


def test_the_footprint_names_the_memory():
    size = 4 * 8 * 7
    got = gear.footprint(TABLE, memory="pinned_host")
    assert got.tiers == {"device": got.index, "pinned_host": size} and got.problem is None
    assert f"pinned_host, each of 1 device(s): {size} B" in str(got)
    assert gear.footprint(TABLE, memory="device").tiers == {"device": got.index + size}


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose default device is a GPU, with 200 GiB of free host memory; the arrays stay on the CPU."""
    device = SimpleNamespace(platform="gpu", local_hardware_id=0)
    for module in (_place, _memory):
        monkeypatch.setattr(module, "default_device", lambda: device)
    monkeypatch.setattr(_host_memory, "available", lambda: 200 * GIB)
    monkeypatch.setattr(_cuda, "library", lambda: None)
    monkeypatch.delenv(LIMIT, raising=False)
    monkeypatch.setattr(_memory, "_locked", 0)
    return device


HUGE = gear.TableSpec({"a": gear.ColumnSpec((1 << 20,), jnp.uint8)}, 1000, 100)  # 98 GiB


def test_a_table_that_does_not_fit_the_pool_is_refused(gpu, monkeypatch):
    replay = gear.make_replay(HUGE)
    said = rf"page-locked memory: got XLA's limit of 64 GiB for each GPU, wanted 98 GiB, .*Set {LIMIT}=104 before jax"
    with pytest.raises(MemoryError, match=said):
        replay.init()
    got = gear.footprint(HUGE)
    assert LIMIT in str(got) and got.tiers["pinned_host"] == 100 * 1000 << 20
    assert gear.footprint(HUGE, memory="device").problem is None
    monkeypatch.setenv(LIMIT, "104")
    assert gear.footprint(HUGE).problem is None


def test_a_table_that_does_not_fit_the_host_is_refused(gpu, monkeypatch):
    monkeypatch.setattr(_host_memory, "available", lambda: 50 * GIB)
    monkeypatch.setenv(LIMIT, "104")
    with pytest.raises(MemoryError, match=r"got 50 GiB of host memory.*wanted 97\.66 GiB.*Lower TableSpec\.capacity"):
        gear.make_replay(HUGE).init()
    monkeypatch.setattr(_memory, "_locked", 60 * GIB)  # the pool has as much already, of a table that may be gone
    assert gear.footprint(HUGE).problem is None


def test_columns_are_made_one_by_one_in_the_order_that_locks_less(gpu, monkeypatch):
    made = []

    def zeros(shape, dtype, memory):
        made.append((shape, memory))
        return jnp.zeros(shape, dtype)

    monkeypatch.setattr(ops, "zeros", zeros)
    columns = _memory.make_columns(gear.make_replay(TABLE).config)
    assert [c.shape for c in columns] == [(1, 8, 4), (1, 8, 4, 3)]
    assert made == [((1, 8, 4), "pinned_host"), ((1, 8, 4, 3), "pinned_host")]
    assert _memory._locked == 2 << 20


def test_no_more_memory_in_the_pool_is_an_error_with_a_way_out(gpu, monkeypatch):
    def zeros(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory with xla_gpu_host_bfc\nmore")

    monkeypatch.setattr(ops, "zeros", zeros)
    said = rf"got RESOURCE_EXHAUSTED: Out of host memory with xla_gpu_host_bfc, wanted .*Delete tables.*set {LIMIT}=65"
    with pytest.raises(MemoryError, match=said):
        gear.make_replay(TABLE).init()

    def other(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(ops, "zeros", other)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        gear.make_replay(TABLE).init()


def test_a_gpu_that_cannot_reach_host_memory_is_refused(gpu, monkeypatch):
    device = _cuda.Device("An old GPU", (2, 0), False, True)
    monkeypatch.setattr(_cuda, "library", object)
    monkeypatch.setattr(_cuda, "devices", lambda driver: [device])
    with pytest.raises(RuntimeError, match=r'An old GPU: got no mapped host memory.*memory="device"'):
        gear.make_replay(TABLE).init()
