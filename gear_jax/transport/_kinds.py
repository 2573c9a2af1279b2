"""The transports, and how a job comes to use one of them."""

import importlib
from collections.abc import Mapping
from typing import Any, cast

from gear_jax._errors import value_error
from gear_jax._numbers import is_integer
from gear_jax.transport._errors import transport_error
from gear_jax.transport._exposer import Kind

# In the order of preference; each is a module _<name> with the members of `Kind`.
KINDS = ("verbs", "ucx")

# What a session's options may be, and of which type: the fields of Options in ffi/transport/transport.h.
OPTIONS: dict[str, type] = {
    "chunk": int, "window": int, "queue_pairs": int, "device": str, "port": int, "gid_index": int, "mtu": int,
    "traffic_class": int, "retries": int, "ack_timeout": int,
}  # fmt: skip


def kind(name: str) -> Kind:
    """The module of a transport."""
    return cast(Kind, importlib.import_module(f"gear_jax.transport._{name}"))


def missing(name: str, options: dict[str, Any] | None = None) -> str:
    """Why this process cannot use a transport; "": it can."""
    check_name(name)
    return kind(name).missing(check_options(options or {}))


def check_name(name: str) -> None:
    """Raises ValueError if there is no such transport."""
    if name not in KINDS:
        raise value_error("transport", got=repr(name), wanted=f"one of {KINDS}", fix="Leave it out to have one chosen.")


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options as the C++ side takes them. Raises ValueError for one that there is not, or that has another type."""
    for name, value in options.items():
        if name not in OPTIONS:
            wanted = f"one of {sorted(OPTIONS)}"
            raise value_error(f"option {name!r}", got=repr(value), wanted=wanted, fix="Leave it out.")
        good = isinstance(value, str)
        if OPTIONS[name] is int:
            good = is_integer(value) and (-1 if name == "gid_index" else 0) <= value < 2**31
        if not good:
            wanted = "a string" if OPTIONS[name] is str else "a whole number >= 0"
            raise value_error(f"option {name!r}", got=repr(value), wanted=wanted, fix="Leave it out for the default.")
    return {name: int(value) if OPTIONS[name] is int else value for name, value in options.items()}


def choose(
    can: Mapping[int, Mapping[str, str]], wants: Mapping[int, str | None], chosen: Mapping[int, str | None]
) -> str:
    """The transport of a job; every process that knows the same comes to the same.

    Args:
      can: for each process, why it cannot use a transport, by name; "": it can.
      wants: the transport that each asks for, or None.
      chosen: the one that each uses already, or None.

    Returns:
      what is in use, else what is asked for, else the first of `KINDS` that all can use.

    Raises:
      TransportError: saying who lacks what.
    """
    in_use = {c for c in chosen.values() if c is not None}
    asked = {w for w in wants.values() if w is not None}
    if len(in_use) > 1 or len(asked) > 1 or (in_use and asked - in_use):
        got = {i: chosen.get(i) or wants.get(i) for i in sorted(wants) if chosen.get(i) or wants.get(i)}
        fix = "Give every process the same transport=, or none."
        raise transport_error("transports of the processes", got=got, wanted="one for all", fix=fix)
    names = in_use or asked or KINDS
    unknown = "it does not know it"
    lacks = {name: {i: w for i, c in sorted(can.items()) if (w := c.get(name, unknown))} for name in names}
    for name in names:
        if not lacks[name]:
            return name
    lines = [f"{name}, process {i}: {why}" for name in names for i, why in lacks[name].items()]
    raise transport_error(
        "transport", got="none that every process can use", wanted=f"one of {', '.join(names)}", fix="\n".join(lines)
    )
