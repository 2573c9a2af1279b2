"""Messages of the control connections: what is sent arrives, and what is not a message is refused, whatever it is."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_jax.transport import MalformedError, _blob

names = st.text(min_size=1, max_size=32)
reasons = st.text(max_size=100)


@st.composite
def hellos(draw):
    processes = draw(st.integers(1, _blob.MAX_PROCESSES))
    return _blob.Hello(
        rank=draw(st.integers(0, processes - 1)),
        processes=processes,
        session=draw(st.integers(0, 2**31 - 1)),
        regions=draw(st.integers(0, _blob.MAX_REGIONS)),
        holds=draw(st.dictionaries(names, reasons, max_size=4)),
        can=draw(st.dictionaries(names, reasons, max_size=4)),
        wants=draw(st.none() | names),
        chosen=draw(st.none() | names),
    )


regions = st.integers(0, 2**63 - 1).flatmap(
    lambda size: st.tuples(st.integers(0, 2**64 - size), st.just(size), st.binary(max_size=50)).filter(
        lambda region: region[0] < 2**64
    )
)
messages = st.one_of(
    hellos(),
    st.builds(_blob.Open, names, st.binary(max_size=200)),
    st.builds(_blob.Opened, st.binary(max_size=200), st.lists(regions, max_size=4)),
    st.just(_blob.Wait()),
    st.builds(_blob.Refused, reasons),
)


@given(messages)
def test_what_is_sent_arrives(message):
    assert _blob.decode(_blob.encode(message)) == message


@given(st.binary(max_size=500))
def test_any_bytes_are_refused(payload):
    with pytest.raises(MalformedError, match="got"):
        _blob.decode(payload)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=500)
@given(messages, st.data())
def test_a_message_with_another_field_is_read_or_refused(message, data):
    fields = json.loads(_blob.encode(message))
    name = data.draw(st.sampled_from(sorted(fields)) | st.text(max_size=10))
    if data.draw(st.booleans()):
        fields[name] = data.draw(values)
    else:
        fields.pop(name, None)
    try:
        got = _blob.decode(json.dumps(fields).encode())
    except MalformedError as e:
        assert len(str(e)) < 2000
    else:
        assert type(got) in (_blob.Hello, _blob.Open, _blob.Opened, _blob.Wait, _blob.Refused)
        assert _blob.decode(_blob.encode(got)) == got


@given(messages, st.data())
def test_a_cut_or_changed_message_raises_nothing_else(message, data):
    payload = bytearray(_blob.encode(message))
    del payload[data.draw(st.integers(0, len(payload))) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if payload:
            payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        _blob.decode(bytes(payload))
    except MalformedError:
        pass


HELLO = _blob.Hello(0, 2, 0, 3, {}, {"ucx": ""}, None, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 2), ("rank", -1), ("rank", True), ("rank", 0.0), ("rank", None), ("rank", "0"), ("processes", 0),
        ("processes", 2**40), ("session", 2**31), ("regions", _blob.MAX_REGIONS + 1), ("can", []), ("can", {"ucx": 1}),
        ("can", {"": ""}), ("can", {str(i): "" for i in range(17)}), ("wants", ""), ("wants", "x" * 33), ("chosen", 7),
        ("version", 1), ("version", 3), ("holds", None), ("holds", {"x": 3}),
        ("version", True), ("kind", "Goodbye"), ("kind", None), ("more", 1),
    ],
)  # fmt: skip
def test_every_field_is_checked(field, value):
    fields = json.loads(_blob.encode(HELLO)) | {field: value}
    with pytest.raises(MalformedError, match="Run the same gear_jax"):
        _blob.decode(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "region",
    [
        [0, 1], [0, 1, "", 2], [-1, 1, ""], [0, -1, ""], [2**64, 0, ""], [2**64 - 1, 2, ""], [0, 2**63, ""],
        [0.5, 1, ""], [0, 1, "é"], [0, 1, "AAA"], [0, 1, None], "abc", {"a": 1},
    ],
)  # fmt: skip
def test_regions_are_checked(region):
    fields = {"version": 2, "kind": "Opened", "blob": "", "regions": [region]}
    with pytest.raises(MalformedError):
        _blob.decode(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "payload",
    [b"[" * 100_000, b"1" * 5000, b'{"version":2,"kind":"Wait","version":NaN}', b"\xff", b"null", b'"Hello"', b"{}"],
    ids=range(7),
)
def test_json_that_hurts_parsers_is_refused(payload):
    with pytest.raises(MalformedError):
        _blob.decode(payload)


def test_too_long_a_message_is_refused():
    with pytest.raises(MalformedError, match="at most"):
        _blob.decode(b" " * (_blob.MAX_BYTES + 1))


def test_long_reasons_are_cut():
    long = dataclasses.replace(HELLO, can={"ucx": "x" * 10_000})
    assert len(_blob.decode(_blob.encode(long)).can["ucx"]) == _blob.MAX_TEXT
    assert len(_blob.decode(_blob.encode(_blob.Refused("x" * 10_000))).why) == _blob.MAX_TEXT
