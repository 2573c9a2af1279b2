"""The DQN whose actors are processes: what they write, and that it learns."""

import os
import tempfile
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.actors import Ingest, RingClosedError, Writer

SECONDS = 60.0


def test_actors_write_what_the_environments_do(example):
    """Segments follow the dynamics step by step, end where they should, and their episodes come one after the other."""
    actor, cartpole, dqn = example("_gym_actor"), example("_cartpole"), example("_dqn")
    envs, longest = 3, 16
    replay = gear.make_replay(dqn.table(4, longest, 64))
    ask, answer = {"observation": gear.ColumnSpec((4,), "float32")}, {"action": gear.ColumnSpec((), "int32")}
    found, failed = [], []

    def look(drained):
        for slot, n in zip(drained.slot, drained.length, strict=True):
            found.append({k: c[slot, :n].copy() for k, c in zip(ring.ring.names, ring.ring.columns, strict=True)})
        return np.ones(len(drained.slot), bool)

    def play():
        with Writer(ring.ring) as writer:
            try:
                actor.play(writer, envs, seed=4)
            except RingClosedError:
                pass
            except Exception as e:
                failed.append(e)

    def policy(asked):  # tumbles now and then, and holds out at other times
        x = asked["observation"]
        return {"action": (x[:, 2] + x[:, 3] * (x[:, 0] < 0.05) > 0).astype(np.int32)}

    state = replay.init()
    with Ingest(replay, actors=1, slots=2 * envs, ask=ask, answer=answer, rows=envs) as ring:
        thread = threading.Thread(target=play)
        thread.start()
        while len(found) < 60 and not failed:
            assert ring.serve(policy, timeout=SECONDS)
            state, _ = ring.drain(state, admit=look)
    thread.join(SECONDS)
    assert not failed and not thread.is_alive()
    step, starts = jax.jit(cartpole.step), 0
    for rows in found:
        n = len(rows["action"])
        assert n == longest or rows["terminated"][-1]
        assert not rows["terminated"][:-1].any() and (rows["reward"] == 1).all()
        starts += bool((np.abs(rows["observation"][0]) <= 0.05).all())
        np.testing.assert_array_equal(rows["action"], policy(rows)["action"])
        for t in range(n):
            cart, got = step(cartpole.Cart(jnp.asarray(rows["observation"][t]), jnp.int32(0)), rows["action"][t])
            assert bool(got.terminated) == rows["terminated"][t]
            if t + 1 < n:
                np.testing.assert_allclose(rows["observation"][t + 1], cart.observation, rtol=1e-4, atol=1e-6)
    assert {len(r["action"]) == longest for r in found} == {True, False}
    ends = sum(r["terminated"][-1] for r in found)
    assert starts >= ends > 3  # each episode that ended was a new one


def test_the_train_program_copies_no_column(example):
    module = example("sebulba_dqn")
    job = module.Job(module.parse(["--updates", "2", "--batch", "8"]))
    learner = job.dqn.init(jax.random.key(0), 4)
    gear.assert_in_place(type(job).train, job, job.replay.init(), learner, jax.random.key(1))


def test_it_learns_and_leaves_nothing(example, tmp_path, capsys, monkeypatch):
    module = example("sebulba_dqn")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir("/dev/shm"))
    arguments = "--evaluate-every 25 --turns 1000 --evaluate-envs 16 --target 120 --min-size 20".split()
    curve = tmp_path / "curve.png"
    assert module.main([*arguments, "--plot", str(curve)]) == 0
    said = capsys.readouterr().out
    assert "seed 0: reached 120" in said and "samples per insert" in said
    assert curve.stat().st_size > 5000
    ours = f"gear_jax.{os.getuid()}.{os.getpid()}-"
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith(ours)]
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--turns", "100", "--evaluate-every", "30"], "--turns: got 100, wanted a multiple of --evaluate-every 30"),
        (["--actors", "0"], "--actors: got 0, wanted at least 1"),
        (["--segment", "8"], "--segment: got 8, wanted more than --n 8"),
    ],
)
def test_bad_arguments(example, capsys, arguments, text):
    with pytest.raises(SystemExit, match="2"):
        example("sebulba_dqn").parse(arguments)
    assert text in capsys.readouterr().err


def test_settings_that_can_end_in_a_deadlock_are_refused(example):
    module = example("sebulba_dqn")
    with pytest.raises(ValueError, match="min_size: got 2000, for a table of 1536 trajectories"):
        module.Job(module.parse(["--min-size", "2000"]))
