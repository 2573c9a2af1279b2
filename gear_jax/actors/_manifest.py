"""What a relay shows of its ring to the learner's host, and what that shows in return. No jax in here.

A relay exposes three regions: 0 the ring's memory, 1 the manifest (a header, and an entry for each trajectory that is
committed and not acknowledged), 2 what the columns are, as JSON. The learner's host exposes 0, the acknowledgements,
one for each process of its job. Each only reads the other's: nobody may write to foreign memory.
"""

import json
import zlib
from typing import Any

import numpy as np

from gear_jax.actors._errors import RingForeignError, error
from gear_jax.actors._ring import Ring

REGIONS = 3
MAGIC = 0x59414C4552524147  # "GARRELAY"
VERSION = 1

HEADER = np.dtype(
    [
        ("magic", "<u8"), ("version", "<u4"), ("capacity", "<u4"),
        ("ring", "<u8"),  # its identity (ffi/actors/layout.h): the numbers of another one mean other trajectories
        ("published", "<u8"),  # the number of the last commit that has an entry
        ("consumed", "<u8"),  # up to here the slots are others' again
        ("pad", "<u8", (3,)),
    ]
)  # fmt: skip
ENTRY = np.dtype(
    [
        ("number", "<u8"), ("version", "<i8"), ("checksum", "<u8"), ("slot", "<u4"), ("length", "<u4"),
        ("flags", "<u4"), ("priority", "<f4"),
        ("check", "<u8"),  # of the others: an entry that is being written does not pass
    ]
)  # fmt: skip
# With a check of its own: of a new ring with the old one's number, half of each, much would be lost.
ACKNOWLEDGED = np.dtype([("ring", "<u8"), ("number", "<u8"), ("check", "<u8"), ("pad", "<u8")])

MOST_JSON = 1 << 20


class Manifest:
    """The relay's own: the entry of commit number k stands at k mod the slots of the ring.

    Args:
      ring: the ring that is shown.
    """

    def __init__(self, ring: Ring):
        capacity = ring.actors * ring.slots  # no more can be committed and not acknowledged
        self.ring = int(ring.held.identity)
        self.memory = np.zeros(HEADER.itemsize + capacity * ENTRY.itemsize, np.uint8)
        self._header = self.memory[: HEADER.itemsize].view(HEADER)[0]
        self._entries = self.memory[HEADER.itemsize :].view(ENTRY)
        self._header["version"], self._header["capacity"] = VERSION, capacity
        self._header["ring"] = self.ring
        self._header["published"] = self._header["consumed"] = ring.held.consumed
        self._header["magic"] = MAGIC

    @property
    def published(self) -> int:
        return int(self._header["published"])

    @property
    def consumed(self) -> int:
        return int(self._header["consumed"])

    @consumed.setter
    def consumed(self, number: int) -> None:
        self._header["consumed"] = number

    def publish(self, fields: dict[str, np.ndarray]) -> None:
        """Adds entries for commits, in order; `fields` are those of `Batch.fields`."""
        if not len(fields["number"]):
            return
        rows = np.zeros(len(fields["number"]), ENTRY)
        for name in ("number", "version", "checksum", "slot", "length", "flags", "priority"):
            rows[name] = fields[name]
        rows["check"] = checks(rows)
        self._entries[(rows["number"] % len(self._entries)).astype(np.int64)] = rows
        self._header["published"] = rows["number"][-1]


def acknowledged(ring: int, number: int) -> np.ndarray:
    """What the learner's host says: that it has the commits of a ring up to a number."""
    row = np.zeros(1, ACKNOWLEDGED)
    row["ring"], row["number"] = ring, number
    row["check"] = checks(row)
    return row[0]


def acknowledgement(raw: np.ndarray, ring: int) -> int:
    """The number that was said for a ring, 0 if none was, or it is being written."""
    row = raw.view(ACKNOWLEDGED)
    return int(row["number"][0]) if row["ring"][0] == ring and row["check"][0] == checks(row)[0] else 0


def checks(rows: np.ndarray) -> np.ndarray:
    """The check of each entry, or acknowledgement."""
    plain = rows.copy()
    plain["check"] = 0
    return np.array([zlib.crc32(row.tobytes()) | 1 << 32 for row in plain], np.uint64)


def read_header(raw: np.ndarray, region_bytes: int, who: str) -> Any:
    """A header as read from a relay, checked against the size of its region; None while it is being made.

    Raises:
      RingForeignError: if it is none of this version.
    """
    header = raw.view(HEADER)[0]
    if header["magic"] == 0:
        return None
    got = (int(header["magic"]), int(header["version"]), HEADER.itemsize + int(header["capacity"]) * ENTRY.itemsize)
    if got != (MAGIC, VERSION, region_bytes) or not header["capacity"]:
        raise error(
            RingForeignError, who, got=f"a manifest (magic, version, bytes) {got}",
            wanted=f"{(MAGIC, VERSION, region_bytes)}", fix="Run the same version of gear_jax on all machines.",
        )  # fmt: skip
    return header


def places(first: int, last: int, capacity: int) -> list[tuple[int, int]]:
    """(offset in the region, entries) that hold the commits first ... last: one run, or two round the end."""
    begin, count = first % capacity, last - first + 1
    head = min(count, capacity - begin)
    runs = [(begin, head)] + ([(0, count - head)] if count > head else [])
    return [(HEADER.itemsize + at * ENTRY.itemsize, n) for at, n in runs]


def good(rows: np.ndarray, first: int) -> np.ndarray:
    """Those of the entries for the commits from `first` on that are whole, up to the first that is not."""
    expected = np.uint64(first) + np.arange(len(rows), dtype=np.uint64)
    right = (rows["number"] == expected) & (rows["check"] == checks(rows))
    return rows[: len(rows) if right.all() else int(np.argmin(right))]


def describe(ring: Ring) -> np.ndarray:
    """The ring's columns, as bytes."""
    base = ring.held.bytes().ctypes.data
    columns = [
        [name, x.dtype.name, list(x.shape[2:]), x.ctypes.data - base]
        for name, x in zip(ring.names, ring.columns, strict=True)
    ]
    text = json.dumps({"steps": ring.steps, "slots": ring.actors * ring.slots, "columns": columns})
    return np.frombuffer(text.encode(), np.uint8).copy()


def offsets(raw: bytes, ring: Ring, who: str, region_bytes: int) -> tuple[int, dict[str, int]]:
    """The slots of a relay's ring, and the byte at which each of the own ring's columns begins in it.

    Raises:
      RingForeignError: if the relay's columns or T are others, do not lie in its region, or this is no description.
    """
    fix = "Make the relay's ring for the learner's TableSpec."
    own = [(name, x.dtype.name, list(x.shape[2:])) for name, x in zip(ring.names, ring.columns, strict=True)]
    wanted = _shown(ring.steps, own)
    try:
        text = json.loads(raw[:MOST_JSON].decode())
        steps, slots = int(text["steps"]), int(text["slots"])
        columns = [(str(n), str(d), [int(i) for i in shape], int(at)) for n, d, shape, at in text["columns"]]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        got = f"{type(e).__name__} in what it says of its columns"
        raise error(RingForeignError, who, got=got, wanted=wanted, fix=fix) from None
    got = _shown(steps, [c[:3] for c in columns])
    if got != wanted or slots < 1:
        raise error(RingForeignError, who, got=got, wanted=wanted, fix=fix)
    found = {name: offset for name, _, _, offset in columns}
    for name, x in zip(ring.names, ring.columns, strict=True):
        end = found[name] + slots * steps * x[0, 0].nbytes
        if found[name] < 0 or end > region_bytes:
            got, wanted = f"column {name!r} at bytes {found[name]} to {end}", f"bytes below {region_bytes}"
            raise error(RingForeignError, who, got=got, wanted=wanted, fix="Start the relay anew.")
    return slots, found


def _shown(steps: int, columns: list[Any]) -> str:
    return f"T = {steps}, " + ", ".join(f"{n}: {d}{list(s)}" for n, d, s in sorted(columns))
