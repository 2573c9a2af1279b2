"""Verbs on a device, both sides in one process. Imports no jax, which takes long there.

For the guest of `tools/softroce` (make test-rdma, which sets `GEAR_JAX_RDMA=1`): some of it is about that device.
"""

import dataclasses
import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from gear_jax import _native
from gear_jax.cli import _doctor_rdma
from gear_jax.transport import MalformedError, _verbs, _verbs_blob, _verbs_device
from gear_jax.transport._verbs import VerbsError, VerbsExposer

if os.environ.get("GEAR_JAX_RDMA") != "1":
    pytest.skip("for a machine that has Soft-RoCE and nothing else: make test-rdma", allow_module_level=True)

MIB = 1 << 20


def memory(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class Pair:
    """An exposing side and a session that reads it as peer 1 of 2, in one process."""

    def __init__(self, arrays, exposing=None, **options):
        self.arrays = arrays
        self.exposer = VerbsExposer([(a.ctypes.data, a.nbytes) for a in arrays], **(exposing or {}))
        self.session = _native.load("cpu").TransportSession("verbs", 0, 2, [], options)

    def connect(self, regions=None):
        answer = self.exposer.accept(0, self.session.offer(1))
        self.session.connect(1, answer, regions or self.exposer.regions())
        return self

    def read(self, region, offset, size):
        """(how it ended, the bytes)"""
        to = np.full(size, 0xEE, np.uint8)
        return self.session.read([(1, region, offset, size, to.ctypes.data)])[0], to

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.session.close()
        self.exposer.close()


def resources():
    """What the kernel counts on the device (`pd 3 cq 3 qp 5 ... mr 2`), and this process's file descriptors."""
    run = subprocess.run(["rdma", "resource"], capture_output=True, text=True, timeout=60, check=True)
    return dict(re.findall(r"(\w+) (\d+)", run.stdout)), len(os.listdir("/proc/self/fd"))


def test_any_size_at_any_place():
    array = memory(9 * MIB + 5)
    with Pair([array, memory(1), memory(0)]).connect() as pair:
        for size in (0, 1, 2, 63, 64, 65, 4096, 4097, MIB, MIB + 1, 5 * MIB):
            for offset in (0, 1, 4095, array.nbytes - size):
                ended, got = pair.read(0, offset, size)
                assert ended == "ok" and np.array_equal(got, array[offset : offset + size]), (size, offset)
        assert pair.read(1, 0, 1)[1] == pair.arrays[1]
        assert pair.read(2, 0, 0)[0] == "ok"
        assert pair.session.region_bytes(1, 2) == 0


def test_what_is_written_later_is_read():
    array = memory(MIB)
    with Pair([array]).connect() as pair:
        array[:] = memory(MIB, seed=1)
        assert np.array_equal(pair.read(0, 0, MIB)[1], array)


def test_beyond_a_region_nothing_reaches_the_peer():
    with Pair([memory(5000)]).connect() as pair:
        for region, offset, size in ((0, 5000, 1), (0, 4000, 1001), (0, 2**63, 8), (1, 0, 1), (-1, 0, 1)):
            ended, got = pair.read(region, offset, size)
            assert ended == "refused" and (got == 0xEE).all()
        assert pair.read(0, 0, 5000)[0] == "ok", "the connection was never touched"


def test_a_wrong_key_is_refused_by_the_peer_and_a_new_connection_mends_it():
    with Pair([memory(MIB)]) as pair:
        address, size, key = pair.exposer.regions()[0]
        wrong = bytes([key[0], key[1] ^ 0x5A, *key[2:]])
        pair.connect([(address, size, wrong)])
        ended, got = pair.read(0, 0, 1000)
        assert ended == "refused" and (got == 0xEE).all()
        assert pair.read(0, 0, 1000)[0] == "lost", "an error spends the queue pairs"
        pair.session.disconnect(1)
        assert np.array_equal(pair.connect().read(0, 0, 1000)[1], pair.arrays[0][:1000])


def test_a_region_that_claims_more_than_there_is():
    with Pair([memory(10000)]) as pair:
        address, size, key = pair.exposer.regions()[0]
        assert pair.connect([(address, size + 1, key)]).read(0, 9000, 1001)[0] == "refused"


def test_a_key_opens_its_own_region_only():
    with Pair([memory(4096, 1), memory(4096, 2)]) as pair:
        (address, size, _), (_, _, other) = pair.exposer.regions()
        assert pair.connect([(address, size, other)]).read(0, 0, 100)[0] == "refused"


def test_a_dropped_peer_reads_nothing_and_comes_back():
    with Pair([memory(MIB)], timeout=1.0).connect() as pair:
        pair.exposer.drop(0)
        assert pair.exposer.peers == []
        ended, got = pair.read(0, 0, 4096)
        assert ended == "timeout" and (got == 0xEE).all()
        assert pair.session.alive() == [True, False]
        assert pair.read(0, 0, 4096)[0] == "lost"
        pair.connect()
        assert pair.session.alive() == [True, True] and pair.exposer.peers == [0]
        assert pair.read(0, 0, 4096)[0] == "ok"
        assert pair.session.counters()["reconnects"] == 1


def test_closing_the_exposing_side_ends_what_peers_read():
    with Pair([memory(MIB)], timeout=1.0).connect() as pair:
        pair.exposer.close()
        pair.exposer.close()
        assert pair.read(0, 0, 4096)[0] == "timeout"
        offer = _verbs_blob.encode(_verbs_blob.End(_verbs_blob.ETHERNET, 1024, 0, b"\x20" + bytes(15), 1, ((17, 0),)))
        with pytest.raises(VerbsError, match="one that is closed, wanted an open one"):
            pair.exposer.accept(0, offer)


def test_thousands_of_reads_and_hundreds_of_connections_leave_nothing():
    array = memory(MIB)
    with Pair([array]).connect() as pair:
        pair.read(0, 0, 1)
        before = resources()
        to = np.empty(500 * 64, np.uint8)
        for _ in range(10):
            pieces = [(1, 0, i * 999, 64, to.ctypes.data + i * 64) for i in range(500)]
            assert set(pair.session.read(pieces)) == {"ok"}
        assert np.array_equal(to[-64:], array[499 * 999 :][:64])
        for _ in range(100):
            assert pair.connect().read(0, 0, 100)[0] == "ok"
        assert resources() == before
    assert int(before[0]["qp"]) >= 4 and before[0]["mr"] == "2"  # two on each side; the region and the staging memory


@pytest.mark.parametrize("options", [
    {"mtu": 256}, {"mtu": 1024}, {"queue_pairs": 1}, {"queue_pairs": 7}, {"chunk": 1000, "window": 3},
    {"traffic_class": 96}, {"retries": 0}, {"ack_timeout": 14}, {"gid_index": 1}, {"device": "rxe0", "port": 1},
])  # fmt: skip
def test_options(options):
    exposing = {k: v for k, v in options.items() if k not in ("queue_pairs", "chunk", "window")}
    with Pair([memory(300_001)], exposing, **options).connect() as pair:
        ended, got = pair.read(0, 0, 300_001)
        assert ended == "ok" and np.array_equal(got, pair.arrays[0])


def test_sides_that_differ_in_mtu_meet_in_the_middle():
    with Pair([memory(MIB)], {"mtu": 512}).connect() as pair:
        assert pair.read(0, 0, MIB)[0] == "ok"


def test_the_first_gid_is_link_local_and_is_not_taken():
    device = _verbs_device.open_device()
    assert device.gid_index == 1 and not _verbs_device.is_link_local(device.gid)
    device.context.close()
    first = _verbs_device.open_device(gid_index=0)
    assert _verbs_device.is_link_local(first.gid)
    first.context.close()
    with Pair([memory(1)], {"gid_index": 0}) as pair, pytest.raises(VerbsError, match=r"RTR.*choose gid_index"):
        pair.connect()  # on lo, link-local addresses reach nothing
    for options, words in (({"gid_index": 200}, "no GID at index 200"), ({"port": 7}, "no port 7"),
                           ({"device": "mlx5_9"}, "wanted the RDMA device mlx5_9")):  # fmt: skip
        assert words in _verbs.missing(options)
        with pytest.raises(RuntimeError, match=words):
            _native.load("cpu").TransportSession("verbs", 0, 2, [], options)


def test_hostile_offers_leave_nothing():
    with Pair([memory(1)]) as pair:
        end = _verbs_blob.decode(pair.session.offer(1))
        before = resources()
        offers = [
            b"",
            b"GJVB",
            bytes(28),
            _verbs_blob.encode(dataclasses.replace(end, link=_verbs_blob.INFINIBAND, lid=5)),
        ]
        offers.append(_verbs_blob.encode(end) + b"\0")
        for offer in offers:
            with pytest.raises(MalformedError, match="verbs connection"):
                pair.exposer.accept(0, offer)
        assert pair.exposer.peers == [] and resources() == before


def test_hostile_answers_are_refused():
    with Pair([memory(100)]) as pair:
        sound = pair.exposer.accept(0, pair.session.offer(1))
        for answer, regions in ((sound[:-1], pair.exposer.regions()), (b"", []), (sound, [(0, 1, b"12345")]),
                                (sound, [(2**64 - 1, 2, b"1234")])):  # fmt: skip
            with pytest.raises(RuntimeError, match="wanted"):
                pair.session.connect(1, answer, regions)
            pair.session.offer(1)
        assert pair.connect().read(0, 0, 100)[0] == "ok"


def test_nobody_can_write():
    """A peer that uses its queue pair for an RDMA WRITE is refused by the device."""
    pyverbs = _verbs_device.pyverbs
    array = memory(4096)
    before, device = array.copy(), _verbs_device.open_device()
    with VerbsExposer([(array.ctypes.data, array.nbytes)]) as exposer:
        qp, wr = pyverbs("qp"), pyverbs("wr")
        domain, queue = pyverbs("pd").PD(device.context), pyverbs("cq").CQ(device.context, 4)
        source = pyverbs("mr").MR(domain, 64, 1)
        caps = qp.QPCap(max_send_wr=1, max_recv_wr=1)
        pair = qp.QP(domain, qp.QPInitAttr(qp_type=2, scq=queue, rcq=queue, cap=caps))
        me = _verbs_blob.End(device.link, device.mtu, device.lid, device.gid, 1, ((pair.qp_num, 0),))
        theirs = _verbs_blob.decode(exposer.accept(0, _verbs_blob.encode(me)))
        attributes = qp.QPAttr(qp_state=1, port_num=1)
        pair.modify(attributes, _verbs._TO_INIT)
        attributes.qp_state, attributes.path_mtu, attributes.min_rnr_timer = 2, 5, 12
        attributes.dest_qp_num, attributes.rq_psn = theirs.queue_pairs[0]
        attributes.ah_attr = exposer._address(pyverbs("addr"), device, theirs)
        pair.modify(attributes, _verbs._TO_RTR)
        attributes.qp_state, attributes.sq_psn, attributes.timeout, attributes.retry_cnt = 3, 0, 14, 2
        pair.modify(attributes, _verbs._TO_RTS)
        address, _, key = exposer.regions()[0]
        request = wr.SendWR(opcode=0, num_sge=1, sg=[wr.SGE(source.buf, 64, source.lkey)], send_flags=2)
        request.set_wr_rdma(int.from_bytes(key, "little"), address)
        pair.post_send(request)
        completions = []
        for _ in range(10**6):
            completions = queue.poll()[1]
            if completions:
                break
        assert completions[0].status in (9, 10)  # IBV_WC_REM_INV_REQ_ERR (of the queue pair), IBV_WC_REM_ACCESS_ERR
        device.context.close()
    assert np.array_equal(array, before)


def test_the_limit_on_locked_memory_is_named():
    code = """
        import numpy as np
        from gear_jax.transport import _verbs
        array = np.zeros(1 << 20, np.uint8)
        try:
            _verbs.VerbsExposer([(array.ctypes.data, array.nbytes)])
        except _verbs.VerbsError as e:
            print(e)
    """
    dropped = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", "--memlock=65536"]
    command = [*dropped, sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "registration of 1048576 bytes: got" in run.stdout and "ulimit -l unlimited" in run.stdout


def test_doctor():
    text = "\n".join(f"{name}: {said}" for name, said in _doctor_rdma.report())
    assert "rxe0: port 1: Ethernet, ACTIVE" in text
    assert "GID 0: fe80:" in text and "RoCE v2: the one that would be used" in text
    assert "locked memory: unlimited" in text and "verbs: usable" in text


def test_jax_was_not_imported():
    assert "jax" not in sys.modules
