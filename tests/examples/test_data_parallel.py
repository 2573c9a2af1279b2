"""Data-parallel training: any number of devices and either way of mapping learns the same."""

import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import gear_jax as gear

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
# What differs is the order in which float32 are summed; over 20 steps it comes to less than 1e-6. One wrong row in each
# batch of 8 makes 1e-3 to 1e-1.
SAME = 2e-5
TINY = "--steps 12 --chunk 4 --batch 16 --window 4 --trajectory 12 --capacity 32 --insert 8 --width 16".split()


def pointers(columns):
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(columns) for shard in x.addressable_shards]


@pytest.mark.devices(4)
def test_the_decision_transformer_on_1_2_and_4_devices(example, make_learner):
    """The same table in four partitions, the same global batch: the same loss curve up to the order of sums."""
    module = example("_learner")
    arguments = ["--batch", "8", "--steps", "20", "--learning-rate", "1e-2"]
    table = {"partitions": 4, "selector": gear.selectors.Prioritized(alpha=2.0)}
    curves = [module.train(make_learner(*arguments, **table), steps=20)]
    for n in (1, 2, 4):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]), ("replay",))
        learner = make_learner(*arguments, mesh=mesh, **table)
        curves.append(module.train(learner, steps=20))
        assert len(learner.table().columns["observation"].sharding.device_set) == n
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], rtol=SAME)
    assert np.mean(curves[0][-5:]) < 0.7 * curves[0][0]


@pytest.mark.devices(4)
def test_the_learner_s_program_over_a_mesh(example, make_learner, memory, caplog):
    """Compiled once, no column copied, and all but the table on every device."""
    module = example("_learner")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("replay",))
    learner = make_learner(mesh=mesh, memory=memory)
    gear.assert_in_place(module.train, learner, steps=2)
    where = pointers(learner.table().columns)
    module.train(learner, steps=2)
    with jax.log_compiles():
        for _ in range(3):
            module.train(learner, steps=2)
    assert not [record for record in caplog.records if "compil" in record.getMessage().lower()]
    assert pointers(learner.table().columns) == where
    assert learner.model.head.kernel.get_value().sharding.is_fully_replicated


@pytest.fixture(scope="module")
def curve():
    """The loss curve of the loops on one device."""
    sys.path.insert(0, str(EXAMPLES))
    import pjit_train

    sys.path.remove(str(EXAMPLES))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return pjit_train.main(["--devices", "1", *TINY])


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("pjit_train", "--devices 8 --model 2"),
        ("pjit_train", "--devices 4 --model 4 --memory pinned_host"),
        ("pmap_train", "--devices 4"),
        ("pmap_train", "--devices 8 --memory pinned_host"),
    ],
)
def test_the_loops_learn_the_same(example, curve, capsys, name, arguments):
    losses = example(name).main([*arguments.split(), *TINY])
    np.testing.assert_allclose(losses, curve, rtol=SAME)
    assert losses[-4:].mean() < losses[:4].mean()
    done = capsys.readouterr()
    assert "loss=" in done.err
    assert re.search(r"devices +" + arguments.split()[1] + r" \(", done.out)
    assert re.search(r"loss, first and last chunk +[\d.]+, [\d.]+\n", done.out)
    assert re.search(r"samples \(windows\) per second +[\d,]+\n", done.out)
    assert re.search(r"share of a step spent in replay +[\d.]+% +\(\d+ µs\)\n", done.out)


@pytest.mark.devices(4)
@pytest.mark.parametrize(("name", "memory"), [("pjit_train", "device"), ("pmap_train", "pinned_host")])
def test_the_loops_leave_the_table_where_it_is(example, name, memory):
    loop, system = example("_loop"), example("_world").System()
    parser = loop.make_parser(None)
    parser.add_argument("--model", type=int, default=2)
    options = loop.parse(parser, ["--devices", "4", "--memory", memory, *TINY])
    job = example(name).Job(options, *system.play(16, options.trajectory))
    where = pointers(job.state.columns)
    for i in range(3):
        job.train(jax.random.split(jax.random.key(i), 4), *system.play(8, options.trajectory))
    job.replay_alone(jax.random.split(jax.random.key(9), 4))
    assert pointers(job.state.columns) == where
    state = job.state if name == "pjit_train" else gear.sharding.take_back(job.state, job.index)
    stats = job.replay.stats(state)
    assert (stats["inserted"], stats["sampled"], stats["stale_updates"]) == (16 + 3 * 8, 16 * 16, 0)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.columns)} == {memory}


@pytest.mark.devices(4)
def test_parameters_are_cut_along_the_model_axis(example):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    layout = example("pjit_train").layout
    specs = [layout(mesh, jax.ShapeDtypeStruct(shape, np.float32)).spec for shape in ((), (3,), (4,), (5, 6))]
    assert [tuple(spec) for spec in specs] == [(), (), ("model",), (None, "model")]


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("pjit_train", "--devices 0"),
        ("pjit_train", "--devices 9999"),
        ("pjit_train", "--devices 4 --model 3"),
        ("pmap_train", "--devices 4 --batch 6"),
        ("pmap_train", "--devices 4 --insert 2"),
        ("pmap_train", "--chunk 7 --steps 15"),
        ("pmap_train", "--window 99"),
    ],
)
def test_what_the_loops_refuse(example, capsys, name, flag):
    with pytest.raises(SystemExit):
        example(name).main(flag.split())
    assert f"{flag.split()[-2]}: got" in capsys.readouterr().err


@pytest.mark.cpu
def test_devices_are_made_of_a_cpu(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    command = [sys.executable, "-W", "error", EXAMPLES / "pmap_train.py", "--devices", "2", *TINY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"devices +2 \(", done.stdout) and "arning" not in done.stderr
