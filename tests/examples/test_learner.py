"""The train loop: it learns, in place, whether or not samples overlap with it and wherever the table lies."""

import jax
import numpy as np
import pytest
from flax import nnx

import gear_jax as gear

T, OBSERVATION, ACTION, BATCH = 30, 8, 2, 4  # as `make_learner` has them


@pytest.fixture
def module(example):
    return example("_learner")


def sampled(learner):
    return learner.table.replay.stats(learner.table())["sampled"]


def lies(learner):
    """Address and memory kind of each column."""
    return [(x.unsafe_buffer_pointer(), x.sharding.memory_kind) for x in jax.tree.leaves(learner.table().columns)]


# As on a CPU, and as on a GPU. Two tables that overlap are two programs: each has a queue of its own.
job = pytest.mark.parametrize(("overlap", "memory"), [("--no-overlap", "device"), ("--overlap", "pinned_host")])


@job
def test_the_train_loop_copies_no_column(module, make_learner, memory, overlap):
    gear.assert_in_place(module.train, make_learner(overlap, memory=memory), steps=2)


@job
def test_the_train_loop_learns_where_the_table_lies_and_the_seed_decides(module, make_learner, memory, overlap):
    learner = make_learner(overlap, memory=memory)
    before = jax.tree.map(np.asarray, nnx.state(learner.model, nnx.Param))
    where, programs = lies(learner), module.train.jitted_fn._cache_size()
    assert {kind for _, kind in where} == {memory}
    losses = module.train(learner, steps=2)
    assert losses.shape == (2,) and np.isfinite(losses).all()
    assert sampled(learner) == (2 + (overlap == "--overlap")) * BATCH
    moved = jax.tree.map(lambda a, b: bool((a != np.asarray(b)).any()), before, nnx.state(learner.model, nnx.Param))
    assert any(jax.tree.leaves(moved))
    for _ in range(2):
        module.train(learner, steps=2)
    assert lies(learner) == where
    assert module.train.jitted_fn._cache_size() == programs + 1
    again = make_learner(overlap, memory=memory)
    np.testing.assert_allclose(module.train(again, steps=2), losses, rtol=1e-5)
    if overlap == "--no-overlap":
        other = make_learner(overlap, memory=memory, seed=1)
        assert not np.allclose(module.train(other, steps=2), losses, rtol=1e-3)


def test_a_step_learns_from_the_sample_that_the_last_one_started(module, make_learner):
    learner, other = make_learner("--overlap", memory="pinned_host"), make_learner()
    keys = nnx.Rngs(0)
    for key in (keys.sample(), keys.sample()):
        wanted = other.table.sample(BATCH, key=key)
        jax.tree.map(np.testing.assert_array_equal, learner.next(), (wanted.data, wanted.mask))
    for _ in range(2):
        module.train(learner, steps=3)
    assert np.asarray(learner.table.sample_done(learner.pending.get_value()).valid).all()


def test_on_one_batch_the_table_is_left_alone(module, make_learner):
    learner = make_learner("--overlap", "--learning-rate", "1e-2", "--steps", "40", memory="pinned_host")
    batch = learner.next()
    before = sampled(learner), lies(learner)
    losses = module.train_on(learner, *batch, steps=40)
    assert (sampled(learner), lies(learner)) == before
    assert np.mean(losses[-5:]) < 0.7 * losses[0]
    assert np.isfinite(module.train(learner, steps=2)).all()


def test_blocks_compute_in_bfloat16_and_all_else_is_float32(module, make_learner):
    learner = make_learner("--compute", "bfloat16")
    losses = module.train(learner, steps=2)
    assert losses.dtype == np.float32
    kept = jax.tree.leaves((nnx.state(learner.model, nnx.Param), nnx.state(learner.average, nnx.Param)))
    assert {x.dtype for x in kept} == {np.dtype(np.float32)}
    np.testing.assert_allclose(losses, module.train(make_learner(), steps=2), rtol=2e-2)


def test_parameters_are_counted(make_learner):
    learner = make_learner()
    block = 4 * 16 + 3 * 16 * 16 + (16 * 16 + 16) + (4 * 16 * 16 + 4 * 16) + (4 * 16 * 16 + 16)
    inputs = (16 + 16) + (OBSERVATION * 16 + 16) + (ACTION * 16 + 16) + T * 16
    assert learner.parameters == inputs + block + 2 * 2 * 16 + 16 * ACTION + ACTION
