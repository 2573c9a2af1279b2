"""Each check, shown what it is there for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import ops
from gear_jax.bench.gpu import engines, inserting, peers, priorities, sequences, tables, training
from gear_jax.bench.gpu.findings import Findings, Wrong


@pytest.fixture
def found():
    return Findings({})


def test_an_insert_that_writes_nothing_is_wrong(tiny, found, monkeypatch):
    monkeypatch.setattr(ops, "scatter", lambda columns, slots, values: columns)
    with pytest.raises(Wrong, match="rows differ"):
        inserting.insert(tiny, found)


def test_an_insert_into_a_copy_is_wrong(tiny, found, monkeypatch):
    addresses = iter(range(100))
    monkeypatch.setattr(tables, "pointer", lambda column: next(addresses))
    with pytest.raises(Wrong, match="lie elsewhere"):
        inserting.insert(tiny, found)


def test_masses_that_an_update_left_alone_are_wrong(tiny, found, monkeypatch):
    real, calls = ops.sumtree_update, []

    def first_only(priority, mass, sums, *rest):
        calls.append(rest)
        return real(priority, mass, sums, *rest) if len(calls) == 1 else (priority, mass, sums)

    monkeypatch.setattr(ops, "sumtree_update", first_only)
    with pytest.raises(Wrong, match="sumtree_update"):
        priorities.priorities(tiny, found)


def _drawn(slot, mass, total=None):
    total = np.asarray([mass.sum() if total is None else total], np.float32)
    probability = mass[slot] * (np.float32(1) / total)
    nothing = jnp.zeros(1, jnp.int32)
    slot = jnp.asarray(slot, jnp.int32)
    generation = slot.astype(jnp.uint32)
    return ops.Draws(slot, nothing, jnp.asarray(probability), nothing, generation, nothing, jnp.asarray(total), nothing)


def test_draws_are_checked_for_range_mass_total_and_frequency():
    mass = np.concatenate([np.full(500, 0.1, np.float32), np.full(500, 1.0, np.float32)])
    rng = np.random.default_rng(0)
    good = rng.choice(1000, 4000, p=mass.astype(float) / mass.sum(dtype=float))
    priorities._check_draws(_drawn(good, mass), mass)
    drawn = _drawn(good, mass)
    for wrong, text in (
        (drawn._replace(slot=drawn.slot.at[0].set(-1)), "drew slots"),
        (drawn._replace(probability=drawn.probability * 2), "probabilities are not those of the slots"),
        (drawn._replace(generation=drawn.generation + jnp.uint32(1)), "generations are not those of the slots"),
        (_drawn(good, mass, total=1.0), "a total of 1"),
        (_drawn(rng.integers(0, 1000, 4000), mass), "mean mass"),
    ):
        with pytest.raises(Wrong, match=text):
            priorities._check_draws(wrong, mass)


def _job(tiny):
    layout = dataclasses.replace(tiny.layouts["windows"], slots=6)
    columns = tables.make(layout, "device")
    spans = dict.fromkeys(columns, (-2, 3))
    index = [(np.arange(4, dtype=np.int32), np.arange(2, 6, dtype=np.int32))] * 3
    return peers.Job(tiny, layout, columns, spans, index)


def test_a_job_names_slots_and_steps_of_its_windows(tiny):
    job = _job(tiny)
    slots, steps = job.steps("action", 1)
    assert slots.tolist() == [[0], [1], [2], [3]] and steps.tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    job.check({n: np.asarray(c)[0][job.steps(n, 0)] for n, c in job.columns.items()}, 0)


def test_runs_of_steps_must_be_stored(tiny):
    job = _job(tiny)
    flat = np.asarray(job.columns["observation"]).reshape(-1, 11)
    runs = np.stack([flat[k : k + 3] for k in (0, 40, 100)])
    peers._check_runs(job, {"observation": runs})
    with pytest.raises(AssertionError, match="not stored"):
        peers._check_runs(job, {"observation": runs[:, [0, 2, 1]]})


def test_a_table_in_hbm_is_of_the_size_that_peers_may_have(tiny):
    job = peers._in_hbm(dataclasses.replace(_job(tiny), layout=tiny.layouts["main"], spans={"x": (0, 1)}))
    assert job.layout.size <= tiny.sizes.peer_bytes
    assert all(slots.max() < job.layout.slots for slots, _ in job.index)


def test_a_replay_is_filled_in_the_order_of_its_slots(tiny):
    layout = tables.Layout(8, 3, {"x": (2, "uint8"), "y": (0, "float32")})
    replay = sequences.make_replay(layout)
    state = sequences.fill(replay, replay.init(), layout, 2)
    steps = np.tile(np.arange(3), (8, 1))
    for name, column in state.columns.items():
        np.testing.assert_array_equal(np.asarray(column)[0], tables.expected(layout, name, np.arange(8), steps))
    with pytest.raises(ValueError, match="3 at a time"):
        sequences.fill(replay, replay.init(), layout, 3)


def test_training_has_overlapped_ways(tiny, found):
    training.training(tiny, found)
    assert [figure["what"] for figure in found.figures] == [
        "a train step on a fixed batch",
        "a train step in one program, one after the other",
        "a train step sample_start and sample_done in one program",
        "a train step sample_start and sample_done called from Python",
    ]
    assert found.targets[0]["value"] is not None and not found.notes
    assert found.figures[0]["ratio_to_fixed"] == 1.0


def test_a_train_step_goes_down():
    params = [jnp.eye(8, dtype=jnp.bfloat16) * jnp.bfloat16(0.5)]
    data = jax.random.randint(jax.random.key(0), (16, 1, 8), 0, 256, jnp.uint8)

    def loss(params):
        x = data[:, 0].astype(jnp.float32) / 255
        return float(jnp.mean((jax.nn.relu(x @ params[0].astype(jnp.float32)) - x) ** 2))

    before = loss(params)
    for _ in range(200):
        params = training._train(params, data)
    assert params[0].dtype == jnp.bfloat16 and loss(params) < before


def test_work_beside_gathers_is_compared_with_the_same_alone():
    events, calls = [], []

    def run():
        events.append(len(calls))
        return len(events)

    def elapsed(which):  # the second, fourth ... time there are gathers beside it
        return 0.010 if which % 2 else 0.013

    assert engines._slower(3, run, elapsed, calls.append, 0.001) == pytest.approx(1.3)
    assert len(events) == 8 and len(calls) == 4 * (3 + 15)
    # A gather is under way when the work beside it begins, and none when it is alone.
    assert [n % 18 for n in events] == [0, 1] * 4 and calls[:18] == list(range(18))


def test_the_crossover_is_where_no_larger_window_is_slower(found):
    engines._judge(found, {4096: 1.2, 1 << 18: 0.9, 1 << 20: 1.1, 4 << 20: 1.0})
    (figure,) = found.figures
    assert figure["value"] == 1024.0 and figure["unit"] == "KiB"
    (target,) = found.targets
    assert target["reached"] and target["shown"] == "windows of 4 MiB" and target["value"] == 1.0
    engines._judge(found, {4096: 0.1, 1 << 20: 1.1, 4 << 20: 0.9})
    assert not found.targets[1]["reached"] and found.notes == [
        "The copy engines are slower than the kernel at the largest windows."
    ]
