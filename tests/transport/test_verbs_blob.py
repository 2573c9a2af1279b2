"""What the two sides of a verbs connection tell each other: round trips, and hostile bytes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_jax.transport import MalformedError
from gear_jax.transport import _verbs_blob as blob

GID = bytes.fromhex("20010db8000000000000000000000007")
SOUND = blob.End(blob.ETHERNET, 1024, 0, GID, 16, ((17, 0), (0xFFFFFF, 0xFFFFFF)))

numbers = st.integers(2, (1 << 24) - 1)
pairs = st.lists(st.tuples(numbers, st.integers(0, (1 << 24) - 1)), min_size=1, max_size=64, unique_by=lambda x: x[0])
gids = st.binary(min_size=16, max_size=16).filter(lambda gid: gid[0] != 0xFF and any(gid))
mtus, reads = st.sampled_from(blob.MTUS), st.integers(1, 255)
ethernet = st.builds(blob.End, st.just(blob.ETHERNET), mtus, st.just(0), gids, reads, pairs.map(tuple))
lids, maybe_gids = st.integers(1, 0xBFFF), gids | st.just(blob.NO_GID)
infiniband = st.builds(blob.End, st.just(blob.INFINIBAND), mtus, lids, maybe_gids, reads, pairs.map(tuple))


@given(ethernet | infiniband)
def test_round_trip(end):
    assert blob.decode(blob.encode(end)) == end


def test_the_layout_is_the_one_that_cpp_reads():
    end = dataclasses.replace(SOUND, queue_pairs=((0x010203, 0x040506),))
    want = b"GJVB" + bytes([1, 2, 0x00, 0x04, 0, 0, 16, 1]) + GID + bytes([3, 2, 1, 0, 6, 5, 4, 0])
    assert blob.encode(end) == want + (0xC5F327927C28196A).to_bytes(8, "little")
    assert blob.encode_key(0x01020304) == bytes([4, 3, 2, 1])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"mtu": 1000}, "MTU"),
        ({"mtu": 0}, "MTU"),
        ({"link": 3}, "link"),
        ({"reads": 0}, "reads"),
        ({"queue_pairs": ()}, "queue pairs"),
        ({"queue_pairs": tuple((i + 2, 0) for i in range(65))}, "queue pairs"),
        ({"queue_pairs": ((1, 0),)}, "queue pair number"),
        ({"queue_pairs": ((1 << 24, 0),)}, "queue pair number"),
        ({"queue_pairs": ((5, 0), (5, 1))}, "twice"),
        ({"queue_pairs": ((5, 1 << 24),)}, "sequence"),
        ({"gid": blob.NO_GID}, "GID"),
        ({"gid": b"\xff" + bytes(15)}, "multicast"),
        ({"lid": 4}, "LID"),
        ({"link": blob.INFINIBAND}, "LID"),
        ({"link": blob.INFINIBAND, "lid": 0xC000}, "LID"),
    ],
)
def test_each_wrong_field_is_refused_by_name(change, what):
    with pytest.raises(MalformedError, match=rf"verbs connection: .*{what}.*wanted"):
        blob.decode(blob.encode(dataclasses.replace(SOUND, **change)))


@given(st.binary(max_size=700) | st.binary(max_size=60).map(lambda tail: blob.seal(b"GJVB\x01\x02" + tail)))
def test_bytes_from_anywhere_are_refused_or_sound(data):
    try:
        end = blob.decode(data)
    except MalformedError as e:
        assert "wanted" in str(e)
    else:
        assert blob.encode(end) == data


some_changes = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4)


@given(ethernet, some_changes, st.booleans(), st.booleans())
def test_changed_bytes_are_refused_or_sound(end, changes, cut, seal):
    data = bytearray(blob.encode(end))
    for at, value in changes:
        data[at % len(data)] = value
    if cut:
        del data[changes[0][0] % len(data) :]
    if seal:
        data = blob.seal(bytes(data[:-8]))
    try:
        assert blob.encode(blob.decode(bytes(data))) == bytes(data)
    except MalformedError as e:
        assert "wanted" in str(e)


@given(ethernet, st.integers(0, 10**6), st.integers(1, 255))
def test_no_byte_changes_unseen(end, at, change):
    data = bytearray(blob.encode(end))
    data[at % len(data)] ^= change
    with pytest.raises(MalformedError):
        blob.decode(bytes(data))
