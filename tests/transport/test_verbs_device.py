"""Which device, port and address are chosen, with devices made up for it; those of the guest are in tests/rdma."""

import ipaddress
import sys
import types

import pytest

from gear_jax.transport import _verbs, _verbs_blob, _verbs_device
from gear_jax.transport._verbs_device import Gid

LINK_LOCAL, ROUTABLE, OTHER = (ipaddress.ip_address(x).packed for x in ("fe80::1", "::ffff:10.0.0.1", "2001:db8::5"))
ACTIVE, DOWN, IB, ETHERNET, V1, V2 = 4, 1, 1, 2, 1, 2


class PyverbsError(Exception):
    """What pyverbs raises."""


class Context:
    """A device: `ports` maps a number to (state, link, lid, active MTU's code, [(gid, type)])."""

    open = 0

    def __init__(self, ports):
        self.ports = ports
        Context.open += 1

    def query_port(self, port):
        if port not in self.ports:
            raise PyverbsError("no such port")
        state, link, lid, mtu, gids = self.ports[port]
        return types.SimpleNamespace(state=state, link_layer=link, lid=lid, active_mtu=mtu, gid_tbl_len=len(gids))

    def query_device(self):
        return types.SimpleNamespace(max_qp_rd_atom=16)

    def query_gid_ex(self, port, index):
        raw, kind = self.ports[port][4][index]
        if raw is None:
            raise PyverbsError("empty")
        return types.SimpleNamespace(gid_str=lambda: str(ipaddress.IPv6Address(raw)), gid_type=kind)

    def close(self):
        Context.open -= 1


@pytest.fixture
def devices(monkeypatch):
    """Puts devices in pyverbs' place: {name: ports}, or None for a kernel without RDMA."""
    Context.open = 0

    def put(found):
        def device_list():
            if found is None:
                raise PyverbsError("Failed to get devices list")
            return [types.SimpleNamespace(name=name.encode()) for name in found]

        def context(name):
            if found[name] is None:
                raise PyverbsError("Permission denied")
            return Context(found[name])

        device = types.SimpleNamespace(get_device_list=device_list, Context=context)
        for name, module in {"pyverbs": types.ModuleType("pyverbs"), "pyverbs.device": device}.items():
            monkeypatch.setitem(sys.modules, name, module)
        error = types.SimpleNamespace(PyverbsError=PyverbsError)
        monkeypatch.setitem(sys.modules, "pyverbs.pyverbs_error", error)

    return put


def test_the_first_gid_that_others_reach():
    table = [Gid(0, LINK_LOCAL), Gid(1, ROUTABLE, roce_v1=True), Gid(2, _verbs_blob.NO_GID), Gid(3, OTHER)]
    table.append(Gid(4, ROUTABLE))
    assert _verbs_device.choose_gid(table).index == 3
    assert _verbs_device.choose_gid(table, 0).index == 0
    assert _verbs_device.choose_gid(table, 1).roce_v1
    assert _verbs_device.choose_gid(table, 2) is None
    assert _verbs_device.choose_gid(table[:3]) is None
    assert _verbs_device.choose_gid([]) is None


def test_the_first_device_that_can_be_used(devices):
    roce = [(LINK_LOCAL, V1), (LINK_LOCAL, V2), (None, 0), (ROUTABLE, V1), (ROUTABLE, V2)]
    devices(
        {
            "shut": None,
            "down": {1: (DOWN, ETHERNET, 0, 3, roce)},
            "bare": {1: (ACTIVE, ETHERNET, 0, 3, roce[:2])},
            "good": {1: (ACTIVE, ETHERNET, 9, 3, roce), 2: (ACTIVE, IB, 7, 5, [(LINK_LOCAL, 0)])},
        }
    )
    found = _verbs_device.open_device()
    assert (found.name, found.gid_index, found.gid, found.mtu, found.lid) == ("good", 4, ROUTABLE, 1024, 0)
    assert found.max_reads == 16
    found.context.close()
    assert Context.open == 0, "what was opened on the way stayed open"
    found = _verbs_device.open_device(port=2)  # InfiniBand: the LID is enough within a subnet
    assert (found.link, found.lid, found.gid_index, found.gid) == (_verbs_blob.INFINIBAND, 7, -1, _verbs_blob.NO_GID)
    assert found.mtu == 4096
    assert _verbs_device.open_device("bare", gid_index=1).gid_index == 1, "what is asked for by index is taken"
    assert _verbs_device.open_device("good", mtu=512).mtu == 512


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "other"}, "got none, wanted the RDMA device other"),
        ({"device": "shut"}, "shut: cannot be opened: Permission denied"),
        ({"device": "down"}, "down: port 1 is not active"),
        ({"device": "bare"}, "give its network interface an IP address"),
        ({"device": "bare", "port": 3}, "no port 3"),
        ({"device": "bare", "gid_index": 4}, "no GID at index 4"),
        ({"device": "bare", "mtu": 4096}, "its MTU is 1024, less than 4096"),
        ({}, "shut: .*; down: .*; bare: "),
    ],
)
def test_why_there_is_none(devices, arguments, words):
    link_local = [(LINK_LOCAL, V2)]
    ports = {"shut": None, "down": {1: (DOWN, ETHERNET, 0, 3, [])}, "bare": {1: (ACTIVE, ETHERNET, 0, 3, link_local)}}
    devices(ports)
    with pytest.raises(_verbs_device.VerbsError, match=words) as caught:
        _verbs_device.open_device(**arguments)
    assert "doctor" in str(caught.value)
    assert Context.open == 0
    assert _verbs.missing(arguments) == str(caught.value)


def test_a_kernel_without_rdma(devices):
    devices(None)
    assert "got none, wanted an RDMA device" in _verbs.missing({})


def test_no_pyverbs(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    monkeypatch.setitem(sys.modules, "pyverbs.device", None)
    assert "apt-get install python3-pyverbs" in _verbs.missing({})


@pytest.mark.parametrize(
    ("option", "value"),
    [("port", 0), ("port", 256), ("gid_index", -2), ("mtu", 1500), ("traffic_class", 256), ("retries", 8),
     ("ack_timeout", 0), ("ack_timeout", 32)],
)  # fmt: skip
def test_options_out_of_range(option, value):
    with pytest.raises(ValueError, match=rf"verbs: {option}: got {value}, wanted"):
        _verbs.VerbsExposer([], **{option: value})
