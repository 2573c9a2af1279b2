"""Every bad argument: its name, what it got, what it wanted, and the fix, before anything runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.selectors import Permutation, Prioritized, Uniform

SPEC = gear.ColumnSpec((2,), jnp.float32)
TABLE = gear.TableSpec({"a": SPEC, "b": gear.ColumnSpec((), jnp.int32)}, 5, 8)

MAKE = [
    (lambda: gear.make_replay({"a": SPEC}), TypeError, r"table: got dict, wanted a TableSpec\. Write .*TableSpec"),
    (lambda: gear.make_replay(gear.TableSpec({}, 5, 8)), ValueError, r"columns: got no column, wanted at least one"),
    (
        lambda: gear.make_replay(gear.TableSpec({"a": 3}, 5, 8)),
        TypeError,
        r"columns\['a'\]: got 3, wanted a ColumnSpec",
    ),
    (lambda: gear.make_replay(TABLE, "uniform"), TypeError, r"selector: got 'uniform', wanted a selector\. .*Uniform"),
    (lambda: gear.make_replay(TABLE, Uniform), TypeError, r"selector: got <class.*wanted a selector"),
    (
        lambda: gear.make_replay(TABLE, eviction=Permutation()),
        TypeError,
        r"eviction: got Permutation\(\), wanted .*rank",
    ),
    (lambda: gear.make_replay(TABLE, eviction=Uniform()), TypeError, r"eviction: .*Fifo"),
    (lambda: gear.make_replay(TABLE, anchor="middle"), ValueError, r"anchor: got 'middle', wanted one of .*uniform"),
    (lambda: gear.make_replay(TABLE, memory="disk"), ValueError, r"memory: got 'disk', wanted None or one of"),
    (lambda: gear.make_replay(TABLE, selection="local"), ValueError, r"selection: got 'local', wanted one of"),
    (lambda: gear.make_replay(TABLE, mesh=object()), TypeError, r"mesh: got object, wanted a jax.sharding.Mesh"),
    (lambda: gear.make_replay(TABLE, partitions=3), ValueError, r"partitions: got 3 for a capacity of 8, .*capacity=9"),
    (lambda: gear.make_replay(TABLE, partitions=0), ValueError, r"partitions: got 0, wanted at least 1"),
    (lambda: gear.make_replay(TABLE, partitions=2.0), TypeError, r"partitions: got 2\.0, wanted an integer"),
    (lambda: gear.make_replay(TABLE, streams=8), ValueError, r"streams: got 8 streams on 8 slots .*capacity"),
    (lambda: gear.make_replay(TABLE, streams=5, partitions=4), ValueError, r"streams: got 5 streams on 8 slots in 4"),
    (lambda: gear.make_replay(TABLE, streams=-1), ValueError, r"streams: got -1, wanted at least 0"),
    (lambda: gear.make_replay(TABLE, streams=True), TypeError, r"streams: got True, wanted an integer"),
    (
        lambda: gear.make_replay(TABLE, windows={"a": None}),
        ValueError,
        r"windows: got .*wanted a tree like the columns",
    ),
    (lambda: gear.make_replay(TABLE, windows={"a": 3, "b": None}), TypeError, r"windows.*: got 3, wanted a Window"),
    (lambda: gear.make_replay(TABLE, windows=7), (TypeError, ValueError), r"windows: got .*wanted .*Window"),
    (
        lambda: gear.make_replay(TABLE, windows=gear.Window(-3, 6), anchor="full"),
        ValueError,
        r"windows: got windows that together reach over 6 steps.*wanted at most trajectory_length = 5\. Shorten",
    ),
    (lambda: gear.footprint(TABLE, partitions=3), ValueError, r"partitions: got 3 for a capacity"),
    (lambda: gear.assert_in_place(lambda x: x, 3), TypeError, r"assert_in_place: got no ReplayState"),
]


@pytest.mark.parametrize(("call", "kind", "match"), MAKE, ids=range(len(MAKE)))
def test_make_replay(call, kind, match):
    with pytest.raises(kind, match=match):
        call()


def good(a=2, t=5):
    return {"a": np.zeros((a, t, 2), np.float32), "b": np.zeros((a, t), np.int32)}


LENGTHS = np.full(2, 3, np.int32)
ADD = {
    "missing": (
        ({"a": good()["a"]}, LENGTHS),
        ValueError,
        r"trajectories: got columns \['a'\].*missing \['b'\].*wanted",
    ),
    "unknown": (({**good(), "c": 1}, LENGTHS), ValueError, r"unknown \['c'\]"),
    "another tree": ((list(good().values()), LENGTHS), ValueError, r"trajectories: got columns .*wanted \['a', 'b'\]"),
    "shape": (
        ({**good(), "a": np.zeros((2, 5, 3), np.float32)}, LENGTHS),
        ValueError,
        r"trajectories\['a'\]: got shape \(2, 5, 3\), wanted \[A, T', 2\]",
    ),
    "rank": (({**good(), "b": np.zeros(2, np.int32)}, LENGTHS), ValueError, r"trajectories\['b'\]: got shape \(2,\)"),
    "float for int": (
        ({**good(), "b": np.zeros((2, 5), np.float32)}, LENGTHS),
        TypeError,
        r"trajectories\['b'\]: got dtype float32, wanted int32\. .*astype",
    ),
    "narrower": (
        ({**good(), "a": np.zeros((2, 5, 2), np.float16)}, LENGTHS),
        TypeError,
        r"got dtype float16, wanted float32",
    ),
    "bool for int": (({**good(), "b": np.zeros((2, 5), bool)}, LENGTHS), TypeError, r"got dtype bool, wanted int32"),
    "rows differ": (
        ({**good(), "b": np.zeros((3, 5), np.int32)}, LENGTHS),
        ValueError,
        r"trajectories\['b'\]: got \[A, T'\] = \(3, 5\), wanted \(2, 5\)",
    ),
    "steps differ": (({**good(), "b": np.zeros((2, 4), np.int32)}, LENGTHS), ValueError, r"got \[A, T'\] = \(2, 4\)"),
    "too long": (
        (good(t=6), LENGTHS),
        ValueError,
        r"trajectories: got T' = 6 steps, wanted at most trajectory_length = 5\. Split",
    ),
    "lengths float": ((good(), LENGTHS.astype(np.float32)), TypeError, r"lengths: got dtype float32, wanted int32"),
    "lengths shape": ((good(), LENGTHS[:1]), ValueError, r"lengths: got shape \(1,\), wanted \[A\] = \(2,\)"),
    "lengths rank": ((good(), np.int32(3)), ValueError, r"lengths: got shape \(\)"),
    "priorities shape": (
        (good(), LENGTHS, np.ones(3, np.float32)),
        ValueError,
        r"priorities: got shape \(3,\), wanted \(2,\)",
    ),
    "priorities int": (
        (good(), LENGTHS, np.ones(2, np.int32)),
        TypeError,
        r"priorities: got dtype int32, wanted float32",
    ),
}


@pytest.fixture(scope="module")
def replay():
    return gear.make_replay(TABLE, Prioritized())


@pytest.fixture(scope="module")
def state(replay):
    return replay.init()


@pytest.mark.parametrize("case", ADD)
def test_add(replay, state, case):
    args, kind, match = ADD[case]
    with pytest.raises(kind, match=match):
        replay.add(state, *args)
    with pytest.raises(kind, match=match):  # traced, nothing runs
        jax.eval_shape(replay.add, state, *args)
    assert not state.ticket.is_deleted()


def test_sample(replay, state):
    key = jax.random.key(0)
    for bad, kind in (
        (0, ValueError),
        (-3, ValueError),
        (2.0, TypeError),
        (True, TypeError),
        (jnp.int32(3), TypeError),
    ):
        with pytest.raises(kind, match=r"batch_size: got .*wanted .*static"):
            replay.sample(state, key, bad)
    with pytest.raises(TypeError, match=r"batch_size: got .*Tracer.*static_argnames"):
        jax.jit(replay.sample)(state, key, 3)
    for bad in (0, jax.random.split(key, 2), jnp.zeros(2, jnp.float32), jnp.zeros((2, 2), jnp.uint32)):
        with pytest.raises(ValueError, match=r"key: got .*wanted one jax\.random key"):
            replay.sample(state, bad, 3)
    with pytest.raises(TypeError, match=r"out: got dict, wanted a Sample"):
        replay.sample(state, key, 3, out={})


def test_out_of_another_batch_size(replay):
    state = replay.init()
    state, s = replay.sample(state, jax.random.key(0), 3)
    with pytest.raises(ValueError, match=r"out: got .*wanted .*same batch size"):
        replay.sample(state, jax.random.key(0), 4, out=s)
    state, _ = replay.sample(state, jax.random.key(0), 3, out=s)
    with pytest.raises(ValueError, match=r"out: got a sample that an earlier call has consumed"):
        replay.sample(state, jax.random.key(0), 3, out=s)


def test_update_priorities(replay, state):
    h = gear.Handle(jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.uint32))
    cases = [
        (
            (np.zeros(3), np.ones(3, np.float32)),
            TypeError,
            r"handles: got ndarray, wanted a Handle\. Pass Sample\.handles",
        ),
        ((h, np.ones(2, np.float32)), ValueError, r"priorities: got shape \(2,\), wanted \(3,\)"),
        ((h, np.ones(3, np.int32)), TypeError, r"priorities: got dtype int32"),
        (
            (h.replace(slot=h.slot[:2]), np.ones(2, np.float32)),
            ValueError,
            r"handles: got slot \(2,\), generation \(3,\)",
        ),
        ((h.replace(slot=np.zeros(3, np.float32)), np.ones(3, np.float32)), TypeError, r"handles: got slot float32"),
    ]
    for args, kind, match in cases:
        with pytest.raises(kind, match=match):
            replay.update_priorities(state, *args)


def test_what_is_no_state(replay):
    for call in (
        lambda s: replay.add(s, good(), LENGTHS),
        lambda s: replay.sample(s, jax.random.key(0), 3),
        lambda s: replay.update_priorities(s, gear.Handle(jnp.zeros(1, int), jnp.zeros(1, jnp.uint32)), np.ones(1)),
        lambda s: replay.can_sample(s),
        lambda s: replay.stats(s),
    ):
        with pytest.raises(TypeError, match=r"state: got tuple, wanted a ReplayState\. Pass replay\.init"):
            call((1, 2))


def test_the_state_of_another_table(replay):
    other = gear.make_replay(gear.TableSpec({"a": SPEC}, 5, 8)).init()
    with pytest.raises(ValueError, match=r"state: got .*wanted .*"):
        replay.add(other, good(), LENGTHS)
    wider = gear.make_replay(gear.TableSpec(TABLE.columns, 5, 16), Prioritized()).init()
    with pytest.raises(ValueError, match=r"state: got .*wanted .*"):
        replay.sample(wider, jax.random.key(0), 3)
