"""How a job comes to use one transport."""

import numpy as np
import pytest

from gear_jax.transport import KINDS, TransportError, _kinds, missing

YES = dict.fromkeys(KINDS, "")
LAST = KINDS[-1]


def choose(can, wants=None, chosen=None):
    def of_all(some):
        return {i: (some or {}).get(i) for i in range(len(can))}

    return _kinds.choose(dict(enumerate(can)), of_all(wants), of_all(chosen))


def test_the_first_that_all_can_use():
    assert choose([YES, YES, YES]) == KINDS[0]
    no = {**dict.fromkeys(KINDS, "no device"), LAST: ""}
    assert choose([YES, no]) == LAST


def test_what_is_asked_for_is_used():
    assert choose([YES, YES], wants={1: LAST}) == LAST
    assert choose([YES, YES], wants={0: LAST, 1: LAST}) == LAST


def test_who_comes_later_takes_what_is_in_use():
    assert choose([YES, YES, YES], chosen={1: LAST}) == LAST
    assert choose([YES, YES], wants={0: LAST}, chosen={1: LAST}) == LAST


def test_an_error_says_who_lacks_what():
    with pytest.raises(TransportError, match="process 1: no library here"):
        choose([YES, {**YES, LAST: "no library here"}], wants={0: LAST})
    with pytest.raises(TransportError, match="process 1: it does not know it"):
        choose([YES, {}])
    with pytest.raises(TransportError, match="process 0: gone"):
        choose([dict.fromkeys(KINDS, "gone"), YES])


def test_those_that_ask_must_agree():
    with pytest.raises(TransportError, match="one for all"):
        choose([YES, YES], wants={0: "verbs", 1: "ucx"})
    with pytest.raises(TransportError, match="one for all"):
        choose([YES, YES], wants={0: "verbs"}, chosen={1: "ucx"})
    with pytest.raises(TransportError, match="one for all"):
        choose([YES, YES], chosen={0: "verbs", 1: "ucx"})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"speed": 1}, "'speed'"), ({"chunk": "1"}, "'chunk'"), ({"chunk": -1}, "'chunk'"), ({"chunk": 1.5}, "'chunk'"),
        ({"window": True}, "'window'"), ({"device": 3}, "'device'"), ({"gid_index": -2}, "'gid_index'"),
        ({"mtu": 2**31}, "'mtu'"),
    ],
)  # fmt: skip
def test_options_are_checked(options, match):
    with pytest.raises(ValueError, match=match):
        _kinds.check_options(options)


def test_options_pass():
    got = _kinds.check_options({"gid_index": -1, "device": "mlx5_0", "chunk": np.int64(0)})
    assert got == {"gid_index": -1, "device": "mlx5_0", "chunk": 0}
    assert type(got["chunk"]) is int  # the core takes no NumPy number


def test_an_unknown_transport_is_an_error():
    with pytest.raises(ValueError, match="pigeon"):
        missing("pigeon")


def test_every_kind_has_what_it_must():
    for name in KINDS:
        assert isinstance(missing(name), str)
        assert callable(_kinds.kind(name).expose)
