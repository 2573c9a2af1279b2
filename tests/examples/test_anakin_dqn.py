"""The DQN in one program: its environment, its loss, and that it learns in place."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear


@pytest.fixture
def cartpole(example):
    return example("_cartpole")


def test_the_environment_is_gymnasium_s(cartpole):
    rng, step = np.random.default_rng(0), jax.jit(cartpole.step)
    for seed in range(3):
        env = gymnasium.make("CartPole-v1")
        start, _ = env.reset(seed=seed)
        cart, over = cartpole.Cart(jnp.asarray(start), jnp.int32(0)), False
        while not over:
            action = int(rng.integers(2)) if seed else int(cart.observation[2] + cart.observation[3] > 0)
            observation, reward, terminated, truncated, _ = env.step(action)
            cart, got = step(cart, action)
            np.testing.assert_allclose(cart.observation, observation, rtol=1e-5, atol=1e-6)
            cart = cart._replace(observation=jnp.asarray(observation))  # float32 against float64: errors must not grow
            assert (float(got.reward), bool(got.terminated), bool(got.truncated)) == (reward, terminated, truncated)
            over = terminated or truncated
        env.close()
    carts = jax.vmap(cartpole.reset)(jax.random.split(jax.random.key(0), 100))
    assert np.abs(carts.observation).max() <= 0.05 and np.unique(carts.observation).size > 300
    assert not np.asarray(carts.steps).any()


def test_an_episode_is_cut_after_500_steps(cartpole):
    cart = cartpole.Cart(jnp.zeros(4), jnp.int32(498))
    cart, got = cartpole.step(cart, jnp.int32(1))
    assert not got.truncated
    _, got = cartpole.step(cart, jnp.int32(0))
    assert got.truncated and not got.terminated


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_the_loss_is_that_of_a_return_written_out(example, length, terminated):
    """Windows of n + 1 = 4 steps that a segment of `length` steps fills or not."""
    module, rng = example("_dqn"), np.random.default_rng(length)
    dqn = module.Dqn(module.Network(2, 8), module.Settings(1, 3, 0.9, 0.1, 1e-3, 8))
    learner = dqn.init(jax.random.key(0), 3)
    other = dqn.init(jax.random.key(1), 3).params
    replay = gear.make_replay(module.table(3, 4, 2), windows=gear.Window(0, 4), anchor="start")
    rows = {
        "observation": rng.normal(size=(1, 4, 3)).astype(np.float32),
        "action": rng.integers(0, 2, (1, 4)).astype(np.int32),
        "reward": rng.normal(size=(1, 4)).astype(np.float32),
        "terminated": np.zeros((1, 4), bool),
    }
    rows["terminated"][0, length - 1] = terminated
    state, _ = replay.add(replay.init(), rows, np.array([length], np.int32))
    _, batch = replay.sample(state, jax.random.key(0), 1)
    values = lambda params: np.asarray(dqn.network.apply(params, rows["observation"][0]))  # noqa: E731
    here, there, k = values(learner.params), values(other), length if terminated else length - 1
    wanted = sum(0.9**i * rows["reward"][0, i] for i in range(k))
    if not terminated:
        wanted += 0.9**k * there[k, here[k].argmax()]
    error = abs(here[0, rows["action"][0, 0]] - wanted)
    huber = 0.5 * error**2 if error <= 1 else error - 0.5
    got = dqn._loss(learner.params, other, batch)
    np.testing.assert_allclose(got, 0.0 if k == 0 else huber, rtol=1e-5)
    after, loss = dqn.learn(learner._replace(target=other), batch)
    np.testing.assert_allclose(loss, got)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), after.params, learner.params)
    assert any(jax.tree.leaves(changed)) == (k > 0)


def test_the_program_learns_and_copies_no_column(example, tmp_path, capsys):
    module = example("anakin_dqn")
    arguments = ["--turns", "4000", "--evaluate-every", "250", "--evaluate-envs", "16", "--target", "150"]
    options = module.parse(arguments)
    job = module.Job(options)
    gear.assert_in_place(lambda carry: jax.lax.scan(job.turn, carry, jnp.arange(3)), job.init(0))
    plot = tmp_path / "curve.png"
    assert module.main([*arguments, "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "seed 0: reached 150" in said
    lines = [line for line in said.splitlines() if "greedy return" in line]
    assert [int(line.split()[1]) for line in lines] == [250 * (i + 1) for i in range(len(lines))]
    assert float(lines[-1].split()[-1]) >= 150 > max(float(line.split()[-1]) for line in lines[:-1])
    assert plot.stat().st_size > 5000
    assert module.main([*arguments[:1], "250", *arguments[2:-1], "500"]) == 1  # a target out of reach
    assert "seed 0: missed 500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--turns", "100"], "--turns: got 100, wanted a multiple of --evaluate-every 500"),
        (["--batch", "0"], "--batch: got 0, wanted at least 1"),
        (["--segment", "8"], "--segment: got 8, wanted more than --n 8"),
        (["--envs", "2000"], "--capacity: got 1536, wanted more than --envs 2000"),
    ],
)
def test_bad_arguments(example, capsys, arguments, text):
    with pytest.raises(SystemExit, match="2"):
        example("anakin_dqn").parse(arguments)
    assert text in capsys.readouterr().err
