"""What an actor writes, and what it is told when it cannot."""

import time

import numpy as np
import pytest

import gear_jax as gear
from gear_jax.actors import RingBusyError, RingClosedError, RingTimeoutError, Writer, make_ring
from gear_jax.actors._errors import core


def committed(ring):
    """Everything that is committed, as the learner would see it."""
    learner = core().Learner(ring.held)
    fields = learner.collect(100).fields()
    learner.leave()
    return fields


def test_steps_are_written_where_the_learner_reads(ring, step):
    with Writer(ring) as writer:
        assert [writer.append(step(10 + t)) for t in range(3)] == [1, 2, 3]
        assert writer.length == 3
        assert writer.commit(priority=0.5, version=-4, checksum=2**64 - 1) == 1
        assert writer.length == 0
        writer.append(step(50))
        assert writer.commit() == 2
    found = committed(ring)
    assert found["length"].tolist() == [3, 1] and found["flags"].tolist() == [3, 0]
    assert found["version"].tolist() == [-4, 0] and found["checksum"].tolist() == [2**64 - 1, 0]
    assert found["sequence"].tolist() == [0, 1] and found["lane"].tolist() == [0, 0]
    action, done, image, position = ring.columns
    for slot, codes in zip(found["slot"], ([10, 11, 12], [50]), strict=True):
        for t, code in enumerate(codes):
            wanted = step(code)
            assert action[slot, t] == wanted["action"] and done[slot, t] == wanted["done"]
            np.testing.assert_array_equal(image[slot, t], wanted["observation"]["image"])
            np.testing.assert_array_equal(position[slot, t], wanted["observation"]["position"])


def test_in_place(ring, trajectory):
    with Writer(ring, actor=1) as writer:
        views = writer.begin()
        assert writer.begin()["action"] is views["action"]  # the open slot
        assert np.shares_memory(views["observation"]["image"], ring.columns[2])
        views["action"][:] = trajectory(3, 4)["action"]
        assert writer.commit(length=4) == 1
    assert ring.columns[0][committed(ring)["slot"][0]].tolist() == [3, 4, 5, 6]


def test_a_table_of_one_column_without_a_name(shm):
    ring = make_ring(gear.TableSpec(gear.ColumnSpec((2,), "float32"), 3, 1), 1, directory=shm)
    with Writer(ring) as writer:
        writer.append(np.ones(2, np.float32))
        assert writer.begin().shape == (3, 2)
        writer.commit()
    ring.unlink()


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"extra": 1}, ValueError, r"step: columns: got .*unknown \['extra'\]"),
        ({"action": None}, ValueError, r"missing \['action'\]"),
        ({"action": np.zeros((1,), np.int32)}, ValueError, r"step\['action'\]: got shape \(1,\), wanted \(\)"),
        ({"action": np.float32(1)}, TypeError, r"step\['action'\]: got float32, wanted int32.*astype\('int32'\)"),
        ({"action": 1.5}, TypeError, r"step\['action'\]: got float, wanted int32"),
        ({"done": 1}, TypeError, r"step\['done'\]: got int, wanted bool"),
        ({"action": np.uint32(1)}, TypeError, "got uint32, wanted int32"),
        ({"action": [[1]]}, ValueError, r"unknown \['action/0/0'\]"),
    ],
)
def test_other_columns_are_refused_and_nothing_is_lost(ring, step, change, error, text):
    with Writer(ring) as writer:
        writer.append(step(0))
        bad = {k: v for k, v in {**step(1), **change}.items() if v is not None}
        with pytest.raises(error, match=text):
            writer.append(bad)
        assert writer.length == 1
        assert writer.append(step(1)) == 2
        assert writer.commit() == 1
    assert committed(ring)["length"].tolist() == [2]


def test_what_jax_would_take(ring, step):
    with Writer(ring) as writer:
        writer.append({**step(1), "action": np.int64(7), "done": True})
        writer.append({**step(1), "action": -8, "done": np.array(False)})
        wide = {"image": step(0)["observation"]["image"].tolist(), "position": np.arange(3.0)}
        with pytest.raises(ValueError, match="unknown"):  # a list is a tree of numbers
            writer.append({**step(1), "observation": wide})
        wide["image"] = np.array(wide["image"], np.uint8)
        writer.append({**step(1), "observation": wide})
        assert writer.begin()["action"][:3].tolist() == [7, -8, 1]


def test_arrays_however_they_lie(ring, step):
    """Those that are copied at once, and those that are not."""
    wanted = step(5)
    image, position = wanted["observation"]["image"], wanted["observation"]["position"]
    forms = [
        {"image": image, "position": position},
        {"image": np.asfortranarray(image), "position": np.stack([position, position], axis=1)[:, 0]},
        {"image": image[::-1].copy()[::-1], "position": position.astype(">f4")},
        {"position": memoryview(position), "image": image.view(np.ndarray)},
    ]
    image.setflags(write=False)
    with Writer(ring) as writer:
        for observation in forms:
            writer.append({**wanted, "observation": observation})
        views = writer.begin()["observation"]
        for t in range(len(forms)):
            np.testing.assert_array_equal(views["image"][t], image)
            np.testing.assert_array_equal(views["position"][t], position)


def test_dtypes_that_python_cannot_describe(shm):
    import ml_dtypes

    ring = make_ring(gear.TableSpec({"x": gear.ColumnSpec((2,), ml_dtypes.bfloat16)}, 2, 1), 1, directory=shm)
    with Writer(ring) as writer:
        writer.append({"x": np.array([1, 2], ml_dtypes.bfloat16)})
        assert writer.begin()["x"][0].astype(np.float32).tolist() == [1, 2]
        with pytest.raises(TypeError, match="got uint16, wanted bfloat16"):
            writer.append({"x": np.zeros(2, np.uint16)})
    ring.unlink()


def test_longer_than_the_table_takes(ring, step):
    with Writer(ring) as writer:
        for t in range(4):
            writer.append(step(t))
        with pytest.raises(ValueError, match=r"step: got step 4 of a trajectory, wanted at most T = 4 steps. Commit"):
            writer.append(step(4))
        for length in (0, 5, -1):
            with pytest.raises(ValueError, match=f"commit: length: got {length} steps, wanted 1 to T = 4"):
                writer.commit(length)
        assert writer.commit() == 1
        with pytest.raises(ValueError, match="commit: length: got no open trajectory"):
            writer.commit()


@pytest.mark.parametrize(
    "options", [{"version": 2**63}, {"version": 1.5}, {"checksum": -1}, {"length": 1.0}, {"priority": "x"}]
)
def test_what_is_no_number(ring, step, options):
    with Writer(ring) as writer:
        writer.append(step(1))
        with pytest.raises(TypeError, match=f"commit: got .*{next(iter(options))}.*wanted an integer"):
            writer.commit(**options)
        assert writer.length == 1
        assert writer.commit(np.int32(1), np.float32(2), np.int64(-3), np.uint64(4)) == 1


def test_back_pressure(ring, step):
    with Writer(ring, timeout=np.float32(0.1)) as writer:
        for _ in range(3):
            writer.append(step(0))
            writer.commit()
        start = time.monotonic()
        with pytest.raises(RingTimeoutError, match=r"begin: timeout: got no learner on ring .*the actor's 3 slots"):
            writer.append(step(0))
        with pytest.raises(TimeoutError):
            writer.append(step(0), timeout=0.3)
        assert 0.35 < time.monotonic() - start < 20
        learner = core().Learner(ring.held)
        with pytest.raises(RingTimeoutError, match=r"a learner \(process \d+\) that is running"):
            writer.append(step(0), timeout=0)
        learner.consume(learner.collect(1))
        assert writer.append(step(0)) == 1
        learner.leave()
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout: got"):
            Writer(ring, timeout=timeout)
    with pytest.raises(TypeError, match="timeout: got 'x'"):
        Writer(ring, timeout="x")


def test_abandon(ring, step):
    with Writer(ring, timeout=0) as writer:
        for _ in range(9):
            writer.append(step(1))
            writer.abandon()
        writer.abandon()
        assert writer.length == 0
        writer.append(step(2))
        assert writer.commit() == 1
        writer.append(step(3))
    assert ring.report()["actors"][0]["open"] == 0  # closed with it
    assert committed(ring)["length"].tolist() == [1]


def test_a_ring_that_is_closed(ring, step):
    writer = Writer(ring)
    writer.append(step(0))
    ring.held.close()
    assert ring.closed
    for call in (writer.commit, lambda: writer.act(step(0)["observation"]), lambda: Writer(ring)):
        with pytest.raises(RingClosedError, match="its learner has closed"):
            call()
    writer.abandon()
    with pytest.raises(RingClosedError):
        writer.append(step(0))
    writer.close()
    writer.close()
    with pytest.raises(RingClosedError, match="got a closed one"):
        writer.append(step(0))


def test_lanes(ring, monkeypatch):
    first, second = Writer(ring), Writer(ring)
    assert (first.actor, second.actor) == (0, 1)
    with pytest.raises(RingBusyError, match=r"2 lanes that living processes hold"):
        Writer(ring)
    with pytest.raises(RingBusyError, match=r"lane 1 that living"):
        Writer(ring, actor=1)
    with pytest.raises(RingBusyError, match=r"got number 2, wanted one below 2"):
        Writer(ring, actor=2)
    second.close()
    monkeypatch.setenv("GEAR_JAX_RING", ring.path)
    monkeypatch.setenv("GEAR_JAX_ACTOR", "1")
    assert Writer().actor == 1
    monkeypatch.setenv("GEAR_JAX_ACTOR", "x")
    with pytest.raises(ValueError, match="GEAR_JAX_ACTOR: got 'x'"):
        Writer()
    monkeypatch.delenv("GEAR_JAX_RING")
    with pytest.raises(ValueError, match="no GEAR_JAX_RING"):
        Writer()
