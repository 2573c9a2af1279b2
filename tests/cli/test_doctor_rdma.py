"""What `doctor` says of RDMA, on machines made up for it; the guest's own is in tests/rdma."""

import resource
from types import SimpleNamespace

import pytest

from gear_jax import _cuda, cli
from gear_jax.cli import _doctor, _doctor_gpu, _doctor_rdma, _doctor_transport
from gear_jax.transport import _verbs

NONE = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL, ROUTABLE = "fe80:0000:0000:0000:0000:0000:0000:0001", "0000:0000:0000:0000:0000:ffff:0a00:0001"
V1, V2 = "IB/RoCE v1", "RoCE v2"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without RDMA and without a GPU; `port` gives it a device's port."""
    (tmp_path / "class/infiniband").mkdir(parents=True)
    (tmp_path / "module").mkdir()

    def port(device, number, link, gids, *, state="4: ACTIVE", lid="0x0"):
        at = tmp_path / "class/infiniband" / device / "ports" / str(number)
        (at / "gids").mkdir(parents=True)
        (at / "gid_attrs/types").mkdir(parents=True)
        files = {"link_layer": link, "state": state, "rate": "200 Gb/sec (4X HDR)", "lid": lid}
        for name, text in files.items():
            (at / name).write_text(text + "\n")
        for index, (gid, kind) in enumerate(gids):
            (at / "gids" / str(index)).write_text(gid + "\n")
            if kind:
                (at / "gid_attrs/types" / str(index)).write_text(kind + "\n")

    state = SimpleNamespace(port=port, sys=tmp_path, verbs="")
    monkeypatch.setattr(_doctor_rdma, "_SYS", tmp_path)
    monkeypatch.setattr(_cuda, "library", lambda: None)
    monkeypatch.setattr(_verbs, "missing", lambda options: state.verbs)
    return state


def text():
    return "\n".join(f"{name}: {said}" for name, said in _doctor_rdma.report())


def test_roce(machine):
    gids = [(LINK_LOCAL, V1), (LINK_LOCAL, V2), (ROUTABLE, V1), (ROUTABLE, V2), (NONE, ""), (NONE, "")]
    machine.port("mlx5_1", 1, "Ethernet", gids)
    machine.port("mlx5_0", 1, "Ethernet", gids[:2], state="1: DOWN")
    said = text()
    assert said.index("mlx5_0: port 1: Ethernet, DOWN, 200 Gb/sec") < said.index("mlx5_1: port 1: Ethernet, ACTIVE")
    assert "GID 0: fe80::1, RoCE v1\n" in said
    assert "GID 3: ::ffff:10.0.0.1, RoCE v2: the one that would be used" in said.replace(
        "::ffff:a00:1", "::ffff:10.0.0.1"
    )
    assert said.count("would be used") == 1 and "GID 4" not in said
    assert said.count("give its network interface an IP address") == 1  # mlx5_0
    assert "verbs: usable" in said


def test_infiniband(machine):
    machine.port("mlx5_0", 2, "InfiniBand", [(LINK_LOCAL, V1)], lid="0x1f")
    said = text()
    assert "port 2: InfiniBand, ACTIVE, 200 Gb/sec (4X HDR), LID 31" in said
    assert "GID 0: fe80::1, InfiniBand" in said and "its LID would be used" in said


def test_many_addresses(machine):
    machine.port("mlx5_0", 1, "Ethernet", [(LINK_LOCAL, V2)] * 9 + [(ROUTABLE, V2)] * 3)
    said = text()
    assert "GID 9: " in said and said.count("GID ") == 5 and "and 7 more GIDs" in said


def test_nothing_there(machine):
    machine.verbs = "verbs: got none, wanted an RDMA device. Use another."
    said = text()
    assert "devices: none: this machine has no RDMA device" in said
    assert "verbs: not usable: verbs: got none" in said
    assert "GPUDirect: no: this machine has no NVIDIA driver" in said


@pytest.mark.parametrize(
    ("module", "dma_buf", "said"),
    [
        (None, False, "no: neither nvidia_peermem is loaded nor dma-buf there; gear_jax does not use it"),
        ("nvidia_peermem", False, "possible (module nvidia_peermem); gear_jax does not use it"),
        ("nv_peer_mem", True, "possible (module nv_peer_mem, dma-buf); gear_jax does not use it"),
        (None, _cuda.DriverError("cuInit"), "no: neither"),
    ],
)
def test_gpu_direct(machine, monkeypatch, module, dma_buf, said):
    def exports(driver, ordinal):
        if isinstance(dma_buf, Exception):
            raise dma_buf
        return dma_buf

    if module:
        (machine.sys / "module" / module).mkdir()
    monkeypatch.setattr(_cuda, "library", lambda: "a driver")
    monkeypatch.setattr(_cuda, "exports_dma_buf", exports)
    assert f"GPUDirect: {said}" in text()


@pytest.mark.parametrize(
    ("soft", "said"), [(resource.RLIM_INFINITY, "unlimited"), (8 << 20, "8 MiB unless privileged")]
)
def test_locked_memory(machine, monkeypatch, soft, said):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, soft))
    assert f"locked memory: {said}" in text()


def test_it_is_part_of_the_report(machine, monkeypatch, capsys):
    monkeypatch.setattr(_doctor, "_cpu_problem", lambda: None)
    monkeypatch.setattr(_doctor_gpu, "report", lambda: ([("GPU", "none")], None, False))
    monkeypatch.setattr(_doctor_transport, "report", lambda: ([("ucx", "none")], None))
    for name in ("_cpu_library", "_cuda_library"):
        monkeypatch.setattr(_doctor, name, lambda: "one")
    assert cli.main(["doctor"]) == 0
    assert "RDMA\n" in capsys.readouterr().out
