"""The exposing side of verbs: memory that peers read one-sidedly, and the queue pairs that they read it through.

The reading side is C++ (ffi/transport/verbs.h). Only integers and bytes pass between the two.
"""

import ipaddress
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from gear_jax import _native
from gear_jax._errors import message, value_error
from gear_jax.transport import _verbs_blob as blob
from gear_jax.transport import _verbs_device
from gear_jax.transport._errors import malformed
from gear_jax.transport._verbs_device import VerbsError, pyverbs

# Of the verbs ABI.
_RC, _REMOTE_READ = 2, 4
_INIT, _RTR, _RTS = 1, 2, 3
_TO_INIT = 1 << 0 | 1 << 4 | 1 << 5 | 1 << 3  # state, pkey index, port, access flags
_TO_RTR = 1 << 0 | 1 << 7 | 1 << 8 | 1 << 20 | 1 << 12 | 1 << 17 | 1 << 15  # ... AV, MTU, peer, PSN, reads, RNR timer
_TO_RTS = 1 << 0 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 16 | 1 << 13  # ... timeout, retries, RNR retries, PSN, reads
_LOCKED = "Raise the limit on locked memory (`ulimit -l unlimited`; `LimitMEMLOCK=infinity` in a systemd unit)."


_DEVICE = ("device", "port", "gid_index", "mtu")
_EXPOSING = (*_DEVICE, "traffic_class", "retries", "ack_timeout")


def missing(options: dict[str, Any]) -> str:
    """See `Kind`: the exposing side needs pyverbs and a device, the reading side a build with verbs and libibverbs."""
    try:
        _verbs_device.open_device(**_only(_DEVICE, options)).context.close()
    except VerbsError as e:
        return str(e)
    library: Any = _native.load("cpu")
    return library.transport_missing("verbs", options)


def expose(native: Any, memory: list[tuple[int, int]], options: dict[str, Any]) -> "VerbsExposer":
    """See `Kind`."""
    del native  # reads only
    return VerbsExposer(memory, **_only(_EXPOSING, options))


def _only(names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


class VerbsExposer:
    """Exposes memory of this process to its peers, for reading only.

    The memory itself is registered, once, and must stay where it is until `close`. A peer sees no more than the bytes
    of the regions. Peers are accepted and dropped at any time. Thread-safe.
    """

    def __init__(
        self,
        regions: Sequence[tuple[int, int]],
        *,
        device: str = "",
        port: int = 1,
        gid_index: int = -1,
        mtu: int = 0,
        traffic_class: int = 0,
        retries: int = 7,
        ack_timeout: int = 18,
    ):
        """Registers the regions.

        Args:
          regions: (address, bytes) of each; 0 bytes are allowed.
          device: "mlx5_0", or "" for the first that can be used.
          port: of the device.
          gid_index: an entry of the port's GID table; -1: the first RoCE v2 or InfiniBand one that is not link-local.
          mtu: bytes, 256 ... 4096, at most the port's; 0: the port's.
          traffic_class: of the packets, 0 ... 255.
          retries: 0 ... 7, as of the reading side.
          ack_timeout: exponent: 4.096 us * 2^ack_timeout; 1 ... 31.

        Raises:
          VerbsError: where there is no such device, or memory cannot be registered.
          ValueError: for an option out of its range.
        """
        _range("port", port, 1, 255)
        _range("gid_index", gid_index, -1, 255)
        _range("traffic_class", traffic_class, 0, 255)
        _range("retries", retries, 0, 7)
        _range("ack_timeout", ack_timeout, 1, 31)
        if mtu and mtu not in blob.MTUS:
            raise _option("mtu", mtu, f"0 (the port's) or one of {blob.MTUS}")
        self._traffic_class, self._retries, self._ack_timeout = traffic_class, retries, ack_timeout
        self._lock = threading.Lock()
        self._peers: dict[int, list[Any]] = {}
        self._registrations: list[Any] = []
        self._regions: list[tuple[int, int, bytes]] = []
        self._device: _verbs_device.Device | None = _verbs_device.open_device(device, port, gid_index, mtu)
        try:
            self._domain = _call("making a protection domain", pyverbs("pd").PD, self._device.context)
            # Queue pairs need one; nothing ever completes here.
            self._completions = _call("making a completion queue", pyverbs("cq").CQ, self._device.context, 1)
            for address, size in regions:
                self._regions.append((address, size, self._register(address, size)))
        except BaseException:
            self.close()
            raise

    def regions(self) -> list[tuple[int, int, bytes]]:
        """(address, bytes, key) of each region, for the peers of the job and nobody else."""
        return list(self._regions)

    @property
    def device(self) -> str:
        """The name of the device, "" once closed."""
        return self._device.name if self._device else ""

    @property
    def peers(self) -> list[int]:
        """The peers that have queue pairs now, ascending."""
        with self._lock:
            return sorted(self._peers)

    def accept(self, peer: int, offer: bytes) -> bytes:
        """Makes the queue pairs for a peer's reading side, in place of earlier ones, and brings them to RTS.

        Args:
          peer: its number.
          offer: what its reading side's Offer gave. It is not trusted.

        Returns:
          The answer, for its Connect.

        Raises:
          MalformedError: for an offer that no peer makes, or for another kind of link than this device's.
          VerbsError: where a call of verbs fails.
        """
        theirs = blob.decode(offer)
        with self._lock:
            device = self._open()
            if theirs.link != device.link:
                names = {blob.INFINIBAND: "InfiniBand", blob.ETHERNET: "Ethernet"}
                wanted = f"{names[device.link]}, as {device.name} here"
                raise malformed("verbs connection: link", got=names[theirs.link], wanted=wanted)
            self._drop(peer)
            reads = max(1, min(theirs.reads, device.max_reads, 255))
            pairs = self._peers.setdefault(peer, [])
            ours = []
            try:
                for end in theirs.queue_pairs:
                    first = secrets.randbelow(1 << 24)
                    pairs.append(self._queue_pair(device, theirs, end, first, reads))
                    ours.append((pairs[-1].qp_num, first))
            except BaseException:
                self._drop(peer)
                raise
        return blob.encode(blob.End(device.link, device.mtu, device.lid, device.gid, reads, tuple(ours)))

    def drop(self, peer: int) -> None:
        """Destroys a peer's queue pairs: it can read nothing from then on. Nothing happens if it has none."""
        with self._lock:
            self._drop(peer)

    def close(self) -> None:
        """Drops all peers, ends the registrations and closes the device. A second call does nothing."""
        with self._lock:
            for peer in list(self._peers):
                self._drop(peer)
            for registration in self._registrations:
                registration.close()
            self._registrations.clear()
            device, self._device = self._device, None
            if device is not None:
                device.context.close()  # and all that was made of it

    def __enter__(self) -> "VerbsExposer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> _verbs_device.Device:
        if self._device is None:
            fix = "Make a new VerbsExposer."
            raise VerbsError(message("VerbsExposer", got="one that is closed", wanted="an open one", fix=fix))
        return self._device

    def _drop(self, peer: int) -> None:
        for pair in self._peers.pop(peer, ()):
            pair.close()

    def _register(self, address: int, size: int) -> bytes:
        if size == 0:
            return blob.encode_key(0)
        what = f"registration of {size} bytes"
        made = _call(what, pyverbs("mr").MR, self._domain, size, _REMOTE_READ, address=address, fix=_LOCKED)
        self._registrations.append(made)
        return blob.encode_key(made.rkey)

    def _queue_pair(self, device: _verbs_device.Device, theirs: blob.End, end: tuple[int, int], first: int, reads: int):
        """A queue pair in RTS, for the one of the peer that `end` describes."""
        qp, addr = pyverbs("qp"), pyverbs("addr")
        cap = qp.QPCap(max_send_wr=1, max_recv_wr=1)
        init = qp.QPInitAttr(qp_type=_RC, scq=self._completions, rcq=self._completions, cap=cap)
        made = _call("making a queue pair", qp.QP, self._domain, init)
        try:
            attributes = qp.QPAttr(qp_state=_INIT, port_num=device.port)
            attributes.qp_access_flags = _REMOTE_READ
            _call("queue pair to INIT", made.modify, attributes, _TO_INIT)
            attributes.qp_state = _RTR
            attributes.path_mtu = (min(device.mtu, theirs.mtu) // 128).bit_length() - 1
            attributes.dest_qp_num, attributes.rq_psn = end
            attributes.max_dest_rd_atomic, attributes.min_rnr_timer = reads, 12
            attributes.ah_attr = self._address(addr, device, theirs)
            fix = "The peer's GID must be reachable from this one's: choose gid_index."
            _call("queue pair to RTR", made.modify, attributes, _TO_RTR, fix=fix)
            attributes.qp_state, attributes.sq_psn = _RTS, first
            attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = self._ack_timeout, self._retries, 7
            attributes.max_rd_atomic = 0  # this side reads nothing
            _call("queue pair to RTS", made.modify, attributes, _TO_RTS)
        except BaseException:
            made.close()
            raise
        return made

    def _address(self, addr: Any, device: _verbs_device.Device, theirs: blob.End) -> Any:
        if device.gid_index < 0 or theirs.gid == blob.NO_GID:
            return addr.AHAttr(dlid=theirs.lid, port_num=device.port)
        gid = addr.GID(ipaddress.IPv6Address(theirs.gid).exploded)
        route = addr.GlobalRoute(dgid=gid, sgid_index=device.gid_index, hop_limit=64, traffic_class=self._traffic_class)
        return addr.AHAttr(dlid=theirs.lid, port_num=device.port, is_global=1, gr=route)


def _call(what: str, f: Any, *args: Any, fix: str = _verbs_device.FIX, **kwargs: Any) -> Any:
    try:
        return f(*args, **kwargs)
    except _verbs_device.errors() as e:
        raise VerbsError(message(f"verbs: {what}", got=e, wanted="success", fix=fix)) from e


def _range(what: str, got: int, low: int, high: int) -> None:
    if not low <= got <= high:
        raise _option(what, got, f"{low} ... {high}")


def _option(what: str, got: object, wanted: object) -> ValueError:
    return value_error(f"verbs: {what}", got=got, wanted=wanted, fix="Correct the option.")
