"""Observations out, actions back, with deadlines on both sides."""

import subprocess
import sys
import threading
import time

import actor_targets as targets
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.actors import ActorPool, Ingest, RingClosedError, RingTimeoutError, Writer, make_ring

pytestmark = pytest.mark.usefixtures("bridge")
COLUMNS = {"x": gear.ColumnSpec((), "int32"), "actor": gear.ColumnSpec((), "int32")}
ASK, ANSWER = {"seen": gear.ColumnSpec((2,), "float32")}, {"act": gear.ColumnSpec((), "float32")}


@pytest.fixture
def replay():
    return gear.make_replay(gear.TableSpec(COLUMNS, 2, 64))


@pytest.fixture
def ingest(replay, shm):
    with Ingest(replay, actors=3, slots=8, ask=ASK, answer=ANSWER, rows=3, directory=shm) as made:
        yield made


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_round_trips(ingest, rows):
    sizes = []

    @jax.jit
    def double(observation):
        return {"act": observation["seen"][:, 0] * 2}

    def policy(observation):
        sizes.append(observation["seen"].shape[0])
        return double(observation)

    with ActorPool(targets.ask, ingest.ring, args=(5, rows)) as pool:
        answered = 0
        while answered < 3 * 5 * max(rows, 1):
            answered += ingest.serve(policy, timeout=30, least=3, linger=0.01)
        assert pool.wait(30)
    assert answered == 15 * max(rows, 1) == ingest.stats()["rows_answered"]
    assert ingest.stats()["questions"] == 15
    assert set(sizes) <= {1, 2, 4, 8, 16}
    assert ingest.serve(policy) == 0


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"least": 0}, ValueError, r"least: got 0, wanted 1 to \d+, the actors of the ring"),
        ({"least": 99}, ValueError, "least: got 99, wanted 1 to"),
        ({"least": True}, TypeError, "least: got True, wanted an integer"),
        ({"linger": -1}, ValueError, "linger: got -1.*linger=30"),
    ],
)
def test_what_it_cannot_wait_for(ingest, options, kind, words):
    with pytest.raises(kind, match=words):
        ingest.serve(lambda o: o, **options)


def test_both_sides_have_deadlines(ingest):
    start = time.monotonic()
    assert ingest.serve(lambda o: o, timeout=0.2) == 0
    with Writer(ingest.ring) as writer:
        with pytest.raises(RingTimeoutError, match=r"act: timeout: got a learner .* that is running"):
            writer.act({"seen": np.zeros(2, np.float32)}, timeout=0.2)
        assert 0.4 < time.monotonic() - start < 20
        # What was withdrawn is not answered.
        assert ingest.serve(lambda o: pytest.fail("asked"), timeout=0.05) == 0


_LEARNER = """
import sys, time
from gear_jax.actors import open_ring
from gear_jax.actors._errors import core
learner = core().Learner(open_ring(sys.argv[1]).held)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_learner_that_is_killed_keeps_nobody_waiting(shm):
    ring = make_ring(gear.TableSpec(COLUMNS, 2, 64), 1, 1, ask=ASK, answer=ANSWER, directory=shm)
    words = [sys.executable, "-c", _LEARNER, ring.path]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as learner, Writer(ring) as writer:
        assert learner.stdout is not None and learner.stdout.readline() == b"ready\n"
        writer.append({"x": 1, "actor": 0})
        writer.commit()
        killer = threading.Timer(0.3, learner.kill)
        killer.start()
        start = time.monotonic()
        with pytest.raises(RingTimeoutError, match=r"act: timeout: got a learner .* that is dead"):
            writer.act({"seen": np.zeros(2, np.float32)}, timeout=1.5)
        with pytest.raises(RingTimeoutError, match=r"begin: timeout: got a learner .* that is dead"):
            writer.append({"x": 2, "actor": 0}, timeout=0.3)
        assert 1.7 < time.monotonic() - start < 20
        killer.join()
    ring.unlink()


def asked(ingest, policy, **options):
    """What `Writer.act` gives, with a policy that answers it; and what `serve` raises."""
    result = []

    def ask():
        with Writer(ingest.ring) as writer:
            try:
                result.append(writer.act({"seen": np.ones((2, 2), np.float32)}, timeout=10))
            except Exception as e:
                result.append(e)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        ingest.serve(policy, timeout=30, **options)
    finally:
        ingest.ring.held.close()
        thread.join(30)
    return result[0]


def test_answers_of_numpy_and_wider_than_asked(ingest):
    got = asked(ingest, lambda o: {"act": o["seen"][:, 1].astype(np.float64) + 1})
    np.testing.assert_array_equal(got["act"], [2, 2])


@pytest.mark.parametrize(
    "answer, error, text",
    [
        ({"other": np.zeros(2, np.float32)}, ValueError, r"policy's answer: got \['other'\], wanted \['act'\]"),
        ({"act": np.zeros(1, np.float32)}, TypeError, r"policy's answer\['act'\]: got shape \(1,\), wanted 2 rows"),
        ({"act": np.zeros((2, 1), np.float32)}, ValueError, r"policy's answer\['act'\]: got shape \(2, 1\)"),
        ({"act": np.zeros(2, np.int32)}, TypeError, r"policy's answer\['act'\]: got int32, wanted float32"),
    ],
)
def test_answers_that_do_not_fit(ingest, answer, error, text):
    with pytest.raises(error, match=text):
        asked(ingest, lambda o: answer)


def test_a_closed_ring_answers_nobody(ingest):
    def policy(observation):
        ingest.ring.held.close()
        raise KeyError("policy")

    with pytest.raises(KeyError, match="policy"):
        assert isinstance(asked(ingest, policy), RingClosedError)


@pytest.mark.parametrize(
    "observation, error, text",
    [
        ({"seen": np.zeros((4, 2), np.float32)}, ValueError, "observation: got 4 rows, wanted 1 to 3"),
        ({"seen": np.zeros((0, 2), np.float32)}, ValueError, "observation: got 0 rows"),
        ({"seen": np.zeros(3, np.float32)}, ValueError, r"observation\['seen'\]: got shape \(3,\), wanted \(2,\)"),
        ({"seen": np.zeros(2, np.int32)}, TypeError, r"observation\['seen'\]: got int32"),
        ({"sean": np.zeros(2, np.float32)}, ValueError, r"observation: columns: got .*unknown \['sean'\]"),
        ({"seen": 1.0}, ValueError, r"observation\['seen'\]: got shape"),
    ],
)
def test_questions_that_do_not_fit(ingest, observation, error, text):
    with Writer(ingest.ring) as writer, pytest.raises(error, match=text):
        writer.act(observation)


def test_a_ring_without_questions(replay, shm):
    with Ingest(replay, actors=1, directory=shm) as ingest, Writer(ingest.ring) as writer:
        with pytest.raises(ValueError, match="act: got a ring without ask"):
            writer.act({})
        with pytest.raises(ValueError, match="serve: got a ring without ask"):
            ingest.serve(lambda o: o)


def test_a_single_column_has_no_name(replay, shm):
    space = gear.ColumnSpec((), jnp.int32)
    with Ingest(replay, actors=1, ask=space, answer=space, directory=shm) as ingest:
        result = []

        def ask():
            with Writer(ingest.ring) as writer:
                result.append(writer.act(5, timeout=10))

        thread = threading.Thread(target=ask)
        thread.start()
        assert ingest.serve(lambda o: o + 1, timeout=10) == 1
        thread.join(30)
        assert result == [6]
