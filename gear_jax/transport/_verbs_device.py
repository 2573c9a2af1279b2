"""Which RDMA device, port and address a process is read from; ffi/transport/verbs_device.cc chooses by the same rules.

pyverbs is imported when a device is asked for: gear_jax does without it.
"""

import dataclasses
import importlib
import ipaddress
from collections.abc import Iterable
from typing import Any

from gear_jax._errors import message
from gear_jax.transport import _verbs_blob as blob
from gear_jax.transport._errors import TransportError

FIX = '`python -m gear_jax doctor` lists devices and addresses; transport="ucx" needs none.'
_INSTALL = "Debian, Ubuntu: apt-get install python3-pyverbs ibverbs-providers, for the system's Python."
# Of the verbs ABI.
_PORT_ACTIVE, _LINK_ETHERNET, _ROCE_V1 = 4, 2, 1


class VerbsError(TransportError):
    """Verbs cannot be used, or a call of theirs failed; the text says what, got, wanted and the fix."""


@dataclasses.dataclass(frozen=True)
class Gid:
    """An entry of a port's table: its index, its 16 bytes, whether it is of RoCE v1."""

    index: int
    raw: bytes
    roce_v1: bool = False


@dataclasses.dataclass(frozen=True)
class Device:
    """An open device and what connections over it need.

    Attributes:
      context: pyverbs' Context; whoever has the device closes it.
      link: INFINIBAND or ETHERNET.
      mtu: bytes: what was asked for, or the port's.
      gid_index: -1 where the port is addressed by its LID.
      max_reads: READs that a queue pair answers at a time.
    """

    context: Any
    name: str
    port: int
    link: int
    mtu: int
    lid: int
    gid_index: int
    gid: bytes
    max_reads: int


def is_link_local(raw: bytes) -> bool:
    """fe80::/10, which nobody beyond the link can reach, and on a loopback device not even itself."""
    return raw[0] == 0xFE and raw[1] & 0xC0 == 0x80


def choose_gid(gids: Iterable[Gid], index: int = -1) -> Gid | None:
    """The entry at `index`; for -1 the first RoCE v2 or InfiniBand one that is not link-local. None: there is none."""
    for gid in gids:
        if gid.raw == blob.NO_GID:
            continue
        if gid.index == index or (index < 0 and not gid.roce_v1 and not is_link_local(gid.raw)):
            return gid
    return None


def pyverbs(module: str) -> Any:
    """A module of pyverbs.

    Raises:
      VerbsError: where pyverbs is missing or does not load.
    """
    try:
        return importlib.import_module(f"pyverbs.{module}")
    except ImportError as e:  # a pyverbs for a newer libibverbs raises this too
        raise VerbsError(message("verbs: pyverbs", got=e, wanted="one that loads", fix=_INSTALL)) from e


def errors() -> tuple[type[Exception], ...]:
    """What pyverbs raises where a call of verbs fails."""
    return (pyverbs("pyverbs_error").PyverbsError,)


def open_device(device: str = "", port: int = 1, gid_index: int = -1, mtu: int = 0) -> Device:
    """Opens the device of that name, or the first one with an active port and a usable address.

    Args:
      device: "mlx5_0", or "" for the first that can be used.
      port: of the device.
      gid_index: an entry of the port's table; -1: the first RoCE v2 or InfiniBand one that is not link-local, on
        InfiniBand without one the LID.
      mtu: bytes, at most the port's; 0: the port's.

    Raises:
      VerbsError: where pyverbs or such a device is missing; the text has each device's reason.
    """
    module = pyverbs("device")
    try:
        names = [d.name.decode() for d in module.get_device_list()]
    except errors():  # the kernel has no RDMA at all
        names = []
    reasons = []
    for name in names:
        if device in ("", name):
            try:
                context = module.Context(name=name)
            except errors() as e:
                reasons.append(f"{name}: cannot be opened: {e}")
                continue
            found = _describe(context, name, port, gid_index, mtu)
            if isinstance(found, Device):
                return found
            context.close()
            reasons.append(f"{name}: {found}")
    wanted = f"the RDMA device {device}" if device else "an RDMA device"
    raise VerbsError(message("verbs", got="; ".join(reasons) or "none", wanted=wanted, fix=FIX))


def _describe(context: Any, name: str, port: int, gid_index: int, mtu: int) -> Device | str:
    """The device, or why it cannot be used."""
    try:
        attributes = context.query_port(port)
        max_reads = context.query_device().max_qp_rd_atom
    except errors():
        return f"no port {port}"
    if attributes.state != _PORT_ACTIVE:
        return f"port {port} is not active"
    link = blob.ETHERNET if attributes.link_layer == _LINK_ETHERNET else blob.INFINIBAND
    active = 128 << attributes.active_mtu
    if mtu > active:
        return f"its MTU is {active}, less than {mtu}"
    gid = choose_gid(_table(context, port, attributes.gid_tbl_len), gid_index)
    if gid is None and gid_index >= 0:
        return f"no GID at index {gid_index}"
    if gid is None and link == blob.ETHERNET:
        return "no RoCE v2 GID that is not link-local: give its network interface an IP address"
    index, raw = (-1, blob.NO_GID) if gid is None else (gid.index, gid.raw)
    lid = 0 if link == blob.ETHERNET else attributes.lid
    return Device(context, name, port, link, mtu or active, lid, index, raw, max_reads)


def _table(context: Any, port: int, entries: int) -> Iterable[Gid]:
    for index in range(entries):
        try:
            entry = context.query_gid_ex(port, index)
        except errors():  # an empty place
            continue
        yield Gid(index, ipaddress.IPv6Address(entry.gid_str()).packed, entry.gid_type == _ROCE_V1)
