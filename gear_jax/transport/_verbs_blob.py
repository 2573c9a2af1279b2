"""What the two sides of a verbs connection tell each other, as bytes. `ffi/transport/verbs_blob.h` has the layout."""

import dataclasses
import struct

from gear_jax.transport._errors import malformed

INFINIBAND, ETHERNET = 1, 2  # link
MAX_QUEUE_PAIRS = 64
MTUS = (256, 512, 1024, 2048, 4096)
NO_GID = bytes(16)

_MAGIC, _VERSION = b"GJVB", 1
_HEADER = struct.Struct("<4sBBHHBB16s")
_QUEUE_PAIR = struct.Struct("<II")
_CHECKSUM = struct.Struct("<Q")
_LEAST = _HEADER.size + _CHECKSUM.size
_LAST_UNICAST_LID = 0xBFFF


@dataclasses.dataclass(frozen=True)
class End:
    """One side of a connection.

    Attributes:
      link: INFINIBAND or ETHERNET.
      mtu: bytes, one of MTUS.
      lid: of the port, 1 ... 49151 on InfiniBand; 0 on Ethernet.
      gid: 16 bytes; NO_GID (InfiniBand only) where the LID is the address.
      reads: that one queue pair may have under way, 1 ... 255: the reader's wish, then the answer to it.
      queue_pairs: (number, first packet sequence number) of each, both below 2^24.
    """

    link: int
    mtu: int
    lid: int
    gid: bytes
    reads: int
    queue_pairs: tuple[tuple[int, int], ...]


def encode(end: End) -> bytes:
    """Returns the bytes of an end."""
    header = (_MAGIC, _VERSION, end.link, end.mtu, end.lid, end.reads, len(end.queue_pairs), end.gid)
    return seal(_HEADER.pack(*header) + b"".join(_QUEUE_PAIR.pack(*pair) for pair in end.queue_pairs))


def decode(blob: bytes) -> End:
    """Returns the end that the bytes describe, of which nothing is trusted.

    Raises:
      MalformedError: for all that `encode` would not have made of a sound end; nothing else is raised.
    """
    _check(len(blob) >= _LEAST, "bytes of the blob", len(blob), f"{_LEAST} or more")
    magic, version, link, mtu, lid, reads, count, gid = _HEADER.unpack_from(blob)
    size = _HEADER.size + count * _QUEUE_PAIR.size + _CHECKSUM.size
    _check(magic == _MAGIC, "first 4 bytes", magic, _MAGIC)
    _check(version == _VERSION, "version", version, _VERSION)
    _check(link in (INFINIBAND, ETHERNET), "link", link, f"{INFINIBAND} (InfiniBand) or {ETHERNET} (Ethernet)")
    _check(mtu in MTUS, "MTU", mtu, f"one of {MTUS}")
    _check(reads > 0, "reads of a queue pair", reads, "1 or more")
    _check(0 < count <= MAX_QUEUE_PAIRS, "queue pairs", count, f"1 ... {MAX_QUEUE_PAIRS}")
    _check(len(blob) == size, "bytes of the blob", len(blob), size)
    _check(seal(blob[: -_CHECKSUM.size]) == blob, "checksum", "another", "that of the bytes before it")
    if link == ETHERNET:
        _check(gid != NO_GID, "GID", "none", "one, as the link is Ethernet")
        _check(lid == 0, "LID", lid, "0, as the link is Ethernet")
    else:
        _check(0 < lid <= _LAST_UNICAST_LID, "LID", lid, f"1 ... {_LAST_UNICAST_LID}, as the link is InfiniBand")
    _check(gid[0] != 0xFF, "GID", "a multicast group's", "one port's")
    pairs = tuple(_QUEUE_PAIR.iter_unpack(blob[_HEADER.size : -_CHECKSUM.size]))
    for number, psn in pairs:
        _check(2 <= number < 1 << 24, "queue pair number", number, "2 ... 2^24 - 1")
        _check(psn < 1 << 24, "packet sequence number", psn, "0 ... 2^24 - 1")
    _check(len({number for number, _ in pairs}) == count, "queue pair numbers", "one of them twice", "different ones")
    return End(link, mtu, lid, gid, reads, pairs)


def seal(data: bytes) -> bytes:
    """The bytes and their checksum (FNV-1a), which shows what was changed on the way; it is no protection."""
    check = 14695981039346656037
    for byte in data:
        check = (check ^ byte) * 1099511628211 % 2**64
    return data + _CHECKSUM.pack(check)


def encode_key(key: int) -> bytes:
    """The key of a region as the reading side takes it: 4 bytes, little-endian."""
    return struct.pack("<I", key)


def _check(right: bool, what: str, got: object, wanted: object) -> None:
    if not right:
        raise malformed(f"verbs connection: {what}", got=got, wanted=wanted)
