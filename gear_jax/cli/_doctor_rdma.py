"""What `doctor` says of RDMA: devices and their addresses, memory that may be locked, GPUDirect, what would be used."""

import ipaddress
import pathlib
import resource
from typing import Any

from gear_jax import _cuda
from gear_jax._host_memory import human
from gear_jax.transport import _verbs, _verbs_blob
from gear_jax.transport._verbs_device import Gid, choose_gid

_SYS = pathlib.Path("/sys")
_PEERMEM = ("nvidia_peermem", "nv_peer_mem")
_SHOWN = 4  # GIDs of a port; a device may have hundreds


def report() -> list[tuple[str, str]]:
    """Rows for the table of RDMA."""
    return [*_devices(), ("locked memory", _locked()), ("GPUDirect", _gpu_direct()), ("verbs", _verbs_text())]


def _devices() -> list[tuple[str, str]]:
    """One row for each port, and one for each of its addresses; the kernel is asked, so it needs no library."""
    rows = []
    for device in sorted((_SYS / "class/infiniband").glob("*")):
        for port in sorted((device / "ports").glob("*"), key=lambda p: int(p.name)):
            link, gids = _read(port / "link_layer"), _gids(port)
            state, rate = _read(port / "state").split(": ")[-1], _read(port / "rate")
            rows.append((device.name, f"port {port.name}: {link}, {state}, {rate}{_lid(port, link)}"))
            rows += [("", text) for text in _addresses(gids, link)]
    return rows or [("devices", "none: this machine has no RDMA device, or none is given to this container")]


def _lid(port: pathlib.Path, link: str) -> str:
    return f", LID {int(_read(port / 'lid') or '0', 16)}" if link == "InfiniBand" else ""


def _gids(port: pathlib.Path) -> list[tuple[Gid, str]]:
    """The entries of a port's table that are in use, and what kind each is of."""
    found = []
    for path in (port / "gids").glob("*"):
        text, kind = _read(path), _read(port / "gid_attrs/types" / path.name)
        raw = ipaddress.IPv6Address(text).packed if text else _verbs_blob.NO_GID
        if raw != _verbs_blob.NO_GID:
            # The kernel calls RoCE v1 and InfiniBand the same.
            v1 = kind == "IB/RoCE v1" and _read(port / "link_layer") == "Ethernet"
            name = "RoCE v1" if v1 else "InfiniBand" if kind == "IB/RoCE v1" else kind
            found.append((Gid(int(path.name), raw, v1), name))
    return sorted(found, key=lambda entry: entry[0].index)


def _addresses(gids: list[tuple[Gid, str]], link: str) -> list[str]:
    chosen = choose_gid(gid for gid, _ in gids)
    lines = []
    for gid, kind in gids:
        if gid == chosen or len(lines) < _SHOWN:
            mark = ": the one that would be used" if gid == chosen else ""
            lines.append(f"GID {gid.index}: {ipaddress.IPv6Address(gid.raw)}, {kind}{mark}")
    if len(gids) > len(lines):
        lines.append(f"and {len(gids) - len(lines)} more GIDs")
    if chosen is None:
        ethernet = "give its network interface an IP address: no RoCE v2 GID that is not link-local"
        lines.append(ethernet if link == "Ethernet" else "no GID that is not link-local: its LID would be used")
    return lines


def _locked() -> str:
    """What a registration may lock."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{human(soft)} unless privileged: a table must fit in it; `ulimit -l unlimited`, LimitMEMLOCK=infinity"


def _gpu_direct() -> str:
    """Whether an RDMA device could reach a GPU's own memory; gear_jax reads into host memory."""
    driver = _cuda.library()
    if driver is None:
        return "no: this machine has no NVIDIA driver"
    ways = [f"module {name}" for name in _PEERMEM if (_SYS / "module" / name).is_dir()]
    ways += ["dma-buf"] if _exports_dma_buf(driver) else []
    unused = "; gear_jax does not use it: what is read goes through host memory"
    if not ways:
        return f"no: neither {_PEERMEM[0]} is loaded nor dma-buf there{unused}"
    return f"possible ({', '.join(ways)}){unused}"


def _exports_dma_buf(driver: Any) -> bool:
    try:
        return _cuda.exports_dma_buf(driver, 0)
    except _cuda.DriverError:
        return False


def _verbs_text() -> str:
    """Whether remote reads would go over verbs."""
    try:
        problem = _verbs.missing({})
    except ImportError as e:  # no library of the CPU; the report says so elsewhere
        problem = str(e)
    return f"not usable: {problem}" if problem else "usable: what is chosen where all processes can"


def _read(path: pathlib.Path) -> str:
    """The text of a file of sysfs, "" where there is none (an empty place of a table cannot be read)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
