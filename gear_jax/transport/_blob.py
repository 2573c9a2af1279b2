"""The messages of the control connections: JSON of a few known fields. What is not exactly that is refused.

`decode` raises `MalformedError` and nothing else, whatever the bytes.
"""

import base64
import binascii
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gear_jax._errors import type_error, value_error
from gear_jax.transport._errors import malformed

VERSION = 2
MAX_BYTES = 16 * 2**20  # of a message
MAX_PROCESSES = 2**20
MAX_REGIONS = 2**16
MAX_TEXT = 4096
MAX_NAMES = 16


@dataclasses.dataclass(frozen=True)
class Hello:
    """Who somebody is and what they can, the first message of both sides.

    Attributes:
      rank, processes: the number of the process, of how many.
      session: the number of its session.
      regions: how many it exposes.
      holds: what those hold, by name, in words.
      can: why it cannot use a transport, by name; "": it can.
      wants: the transport asked for, or None. chosen: the one in use, or None.
    """

    rank: int
    processes: int
    session: int
    regions: int
    holds: dict[str, str]
    can: dict[str, str]
    wants: str | None
    chosen: str | None


@dataclasses.dataclass(frozen=True)
class Open:
    """A reader's wish to read: the transport and its offer."""

    transport: str
    offer: bytes


@dataclasses.dataclass(frozen=True)
class Opened:
    """The answer: the exposer's blob, and (address, bytes, key) of its regions."""

    blob: bytes
    regions: list[tuple[int, int, bytes]]


@dataclasses.dataclass(frozen=True)
class Wait:
    """Not yet: ask again."""


@dataclasses.dataclass(frozen=True)
class Refused:
    """No, and why."""

    why: str


Message = Hello | Open | Opened | Wait | Refused


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    fields: dict[str, Any] = {"version": VERSION, "kind": type(message).__name__}
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if isinstance(value, bytes):
            value = _text(value)
        elif field.name == "regions" and isinstance(value, list):
            value = [[address, size, _text(key)] for address, size, key in value]
        elif field.name == "can":
            value = {name: why[:MAX_TEXT] for name, why in value.items()}
        elif field.name == "why":
            value = value[:MAX_TEXT]
        fields[field.name] = value
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(payload: bytes) -> Message:
    """The message that bytes hold.

    Raises:
      MalformedError: naming what is wrong with them.
    """
    if len(payload) > MAX_BYTES:
        raise malformed("message", got=f"{len(payload)} bytes", wanted=f"at most {MAX_BYTES}")
    try:
        fields = json.loads(payload.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise malformed("message", got=_short(payload), wanted="JSON") from None
    if not isinstance(fields, dict):
        raise malformed("message", got=_short(fields), wanted="an object")
    version = fields.pop("version", None)
    if not _whole(version, VERSION, VERSION):
        raise malformed("message version", got=_short(version), wanted=VERSION)
    kind = fields.pop("kind", None)
    readers = {"Hello": _hello, "Open": _open, "Opened": _opened, "Wait": _wait, "Refused": _refused}
    if not isinstance(kind, str) or kind not in readers:
        raise malformed("message kind", got=_short(kind), wanted=f"one of {sorted(readers)}")
    return readers[kind](fields)


def _hello(fields: dict[str, Any]) -> Hello:
    _names(fields, Hello)
    processes = _number(fields, "processes", 1, MAX_PROCESSES)
    return Hello(
        rank=_number(fields, "rank", 0, processes - 1),
        processes=processes,
        session=_number(fields, "session", 0, 2**31 - 1),
        regions=_number(fields, "regions", 0, MAX_REGIONS),
        holds=_words(fields, "holds"),
        can=_words(fields, "can"),
        wants=_name_or_none(fields, "wants"),
        chosen=_name_or_none(fields, "chosen"),
    )


def _open(fields: dict[str, Any]) -> Open:
    _names(fields, Open)
    transport = _name_or_none(fields, "transport")
    if transport is None:
        raise malformed("transport", got=None, wanted="a name")
    return Open(transport, _bytes(fields["offer"], "offer"))


def _opened(fields: dict[str, Any]) -> Opened:
    _names(fields, Opened)
    rows, regions = fields["regions"], []
    if not isinstance(rows, list) or len(rows) > MAX_REGIONS:
        raise malformed("regions", got=_short(rows), wanted=f"a list of at most {MAX_REGIONS}")
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != 3:
            raise malformed(f"region {i}", got=_short(row), wanted="address, bytes, key")
        address, size, key = row
        if not _whole(address, 0, 2**64 - 1) or not _whole(size, 0, 2**63 - 1) or address + size > 2**64:
            raise malformed(f"region {i}", got=_short(row[:2]), wanted="an address and bytes that end below 2^64")
        regions.append((address, size, _bytes(key, f"key of region {i}")))
    return Opened(_bytes(fields["blob"], "blob"), regions)


def _wait(fields: dict[str, Any]) -> Wait:
    _names(fields, Wait)
    return Wait()


def _refused(fields: dict[str, Any]) -> Refused:
    _names(fields, Refused)
    if not isinstance(fields["why"], str) or len(fields["why"]) > MAX_TEXT:
        raise malformed("why", got=_short(fields["why"]), wanted=f"text of at most {MAX_TEXT} letters")
    return Refused(fields["why"])


def _names(fields: dict[str, Any], kind: type) -> None:
    wanted = sorted(f.name for f in dataclasses.fields(kind))
    if sorted(fields) != wanted:
        raise malformed(f"fields of {kind.__name__}", got=_short(sorted(fields)), wanted=wanted)


def _number(fields: dict[str, Any], name: str, least: int, most: int) -> int:
    if not _whole(fields[name], least, most):
        raise malformed(name, got=_short(fields[name]), wanted=f"a whole number from {least} to {most}")
    return fields[name]


def _words(fields: dict[str, Any], name: str) -> dict[str, str]:
    value = fields[name]
    if not isinstance(value, dict) or len(value) > MAX_NAMES:
        raise malformed(name, got=_short(value), wanted=f"at most {MAX_NAMES} names with words")
    for key, words in value.items():
        if not 0 < len(key) <= 32 or not isinstance(words, str) or len(words) > MAX_TEXT:
            raise malformed(name, got=_short(value), wanted="names with words")
    return value


def cut_words(words: Mapping[str, str]) -> dict[str, str]:
    """Words by name, as a `Hello` takes them: long ones end with a digest of all.

    Raises:
      ValueError: for too many, or names that are too long. TypeError: for what are no words.
    """
    if len(words) > MAX_NAMES or not all(isinstance(name, str) and 0 < len(name) <= 32 for name in words):
        wanted = f"at most {MAX_NAMES} names of at most 32 letters"
        raise value_error("holds", got=sorted(map(str, words)), wanted=wanted, fix="Say it in fewer.")
    for name, text in words.items():
        if not isinstance(text, str):
            raise type_error(f"holds[{name!r}]", got=type(text).__name__, wanted="words", fix="Pass a string.")
    digest = lambda text: hashlib.sha256(text.encode()).hexdigest()[:16]  # noqa: E731
    return {name: x if len(x) <= 500 else f"{x[:500]}... (sha256 {digest(x)})" for name, x in words.items()}


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _name_or_none(fields: dict[str, Any], name: str) -> str | None:
    value = fields[name]
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= 32):
        raise malformed(name, got=_short(value), wanted="a name or nothing")
    return value


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _bytes(value: Any, name: str) -> bytes:
    try:
        if isinstance(value, str):
            return base64.b64decode(value.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        pass
    raise malformed(name, got=_short(value), wanted="bytes as base64")


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _short(value: Any) -> str:
    """What was got, short enough for a message. Numbers may be too long for `repr`."""
    try:
        text = repr(value[:64] if isinstance(value, bytes | str | list) else value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."
