"""What `doctor` says of remote reads: what there is and would be used, and whether two processes here do read."""

from typing import Any

from gear_jax import transport
from gear_jax.testing._peers import Peers
from gear_jax.transport import _ucx

_BYTES = 1 << 20


def report() -> tuple[list[tuple[str, str]], str | None]:
    """(rows, what does not work or None). Where no transport can be used nothing is tried: nobody has set one up."""
    try:
        lacks = {name: transport.missing(name) for name in transport.KINDS}
    except ImportError as e:  # no library of the CPU; the report says so elsewhere
        return [("transports", f"not known: {_first_line(e)}")], None
    rows = [("ucx", lacks["ucx"] or f"UCX {_ucx.version()}")] if "ucx" in lacks else []
    used = next((name for name in transport.KINDS if not lacks[name]), None)
    if used is None:
        return [*rows, ("would be used", "none: `python -m pip install 'gear_jax[rdma]'` for reads over TCP")], None
    rows.append(("would be used", f"{used}, where every process of a job has it"))
    way, problem = _trial(used)
    return [*rows, ("two processes here", way)], problem


def _trial(name: str) -> tuple[str, str | None]:
    """Has a second process be read; how that went, and what does not work."""
    try:
        with Peers(name, (_BYTES,), start_timeout=20.0) as peers:
            peers.session.read(1, 0, 0, _BYTES)
            native: Any = peers.session._native
            way = native.way(1) if name == "ucx" else name
    except (transport.TransportError, AssertionError, OSError) as e:
        return f"do NOT read each other: {_first_line(e)}", f"{name}: {_first_line(e)}"
    if way == "UCX":
        way = "UCX, in three copies: one process may not trace the other (kernel.yama.ptrace_scope, CAP_SYS_PTRACE)"
    return f"read each other by {way}", None


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [""])[0]
