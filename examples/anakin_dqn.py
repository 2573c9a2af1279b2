"""A DQN whose whole training is one call of one compiled program: environments, policy, replay table and learner.

The environment is CartPole-v1, written in JAX. In each turn every one of `--envs` environments takes a step, which goes
into the table (`Replay.append`: an environment is a stream), then a batch is drawn and learnt from. Every
`--evaluate-every` turns the greedy policy plays; the program ends when its mean return reaches `--target`, or after
`--turns`. The name is that of "Podracer architectures for scalable Reinforcement Learning" (Hessel et al., 2021).
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
import time
from typing import Any, NamedTuple

import _cartpole
import _dqn_cli
import jax
import jax.numpy as jnp
import numpy as np
from _dqn import Dqn, Learner, Network, Settings, table

import gear_jax as gear

HIGHEST = _cartpole.MOST_STEPS  # the return of an episode that never fails


class Carry(NamedTuple):
    """What goes from turn to turn: the table first, so that it keeps its memory."""

    replay: gear.ReplayState
    learner: Learner
    carts: _cartpole.Cart
    key: jax.Array


class Outcome(NamedTuple):
    """Of a run.

    Attributes:
      turns: `int[E]`, of each evaluation.
      returns: `float[E]`, the greedy policy's mean return.
      seconds: `float[E]`, when it was known, from the beginning of the call.
      compile_seconds: of the program.
      stats: of the table at the end.
    """

    turns: np.ndarray
    returns: np.ndarray
    seconds: np.ndarray
    compile_seconds: float
    stats: dict[str, int | float]


class Job:
    """The program, for one set of options."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.dqn = Dqn(
            Network(_cartpole.ACTIONS, options.width),
            Settings(options.batch, options.n, options.discount, options.average, options.learning_rate, options.width),
        )
        spec = table(_cartpole.OBSERVATION, options.segment, options.capacity)
        self.replay = gear.make_replay(spec, windows=gear.Window(0, options.n + 1), streams=options.envs)

    def init(self, seed: int) -> Carry:
        """What the first turn begins with."""
        keys = jax.random.split(jax.random.key(seed), 4)
        carts = jax.vmap(_cartpole.reset)(jax.random.split(keys[0], self.options.envs))
        return Carry(self.replay.init(keys[1]), self.dqn.init(keys[2], _cartpole.OBSERVATION), carts, keys[3])

    def turn(self, carry: Carry, number: jax.Array) -> tuple[Carry, jax.Array]:
        """A step of all environments, and a step of the learner. Returns the loss too."""
        options = self.options
        key, act_key, reset_key, sample_key = jax.random.split(carry.key, 4)
        random = jnp.maximum(options.least_random, 1.0 - number / options.random_turns)
        action = self.dqn.act(carry.learner.params, carry.carts.observation, act_key, random)
        carts, got = jax.vmap(_cartpole.step)(carry.carts, action)
        over = got.terminated | got.truncated
        step = {
            "observation": carry.carts.observation,
            "action": action,
            "reward": got.reward,
            "terminated": got.terminated,
        }
        replay, _ = self.replay.append(carry.replay, jnp.arange(options.envs, dtype=jnp.int32), step, over)
        fresh = jax.vmap(_cartpole.reset)(jax.random.split(reset_key, options.envs))
        new = lambda a, b: jnp.where(over.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
        replay, batch = self.replay.sample(replay, sample_key, options.batch)
        learner, loss = self.dqn.learn(carry.learner, batch)
        return Carry(replay, learner, jax.tree.map(new, fresh, carts), key), loss

    def evaluate(self, params: Any, key: jax.Array) -> jax.Array:
        """The greedy policy's mean return over `--evaluate-envs` episodes: `float32[]`."""

        def step(state, _):
            carts, going, total = state
            action = self.dqn.act(params, carts.observation, key, jnp.float32(0))
            carts, got = jax.vmap(_cartpole.step)(carts, action)
            return (carts, going & ~got.terminated, total + got.reward * going), None

        n = self.options.evaluate_envs
        carts = jax.vmap(_cartpole.reset)(jax.random.split(key, n))
        state = carts, jnp.ones((n,), bool), jnp.zeros((n,))
        return jnp.mean(jax.lax.scan(step, state, None, length=HIGHEST)[0][2])

    @functools.partial(jax.jit, static_argnums=(0, 2), donate_argnums=1)
    def run(self, carry: Carry, tell: Any) -> tuple[Carry, jax.Array]:
        """All of it. `tell(evaluation, return, loss)` is called after each evaluation, while the program goes on.

        Returns the carry, and the returns `float32[E]`; NaN for evaluations that were not needed.
        """
        options = self.options
        most = options.turns // options.evaluate_every

        def chunk(state):
            number, carry, returns = state
            turns = number * options.evaluate_every + jnp.arange(options.evaluate_every)
            carry, loss = jax.lax.scan(self.turn, carry, turns)
            value = self.evaluate(carry.learner.params, jax.random.fold_in(carry.key, 0))
            jax.debug.callback(tell, number, value, jnp.mean(loss))
            return number + 1, carry, returns.at[number].set(value)

        def goes_on(state):
            number, _, returns = state
            return (number < most) & ~(returns[number - 1] >= options.target)

        state = jnp.int32(0), carry, jnp.full((most,), jnp.nan)
        _, carry, returns = jax.lax.while_loop(goes_on, chunk, state)
        return carry, returns


def train(options: argparse.Namespace, seed: int, say=print) -> Outcome:
    """One run."""
    job, seen = Job(options), []

    def tell(number, value, loss):
        seen.append((int(number), time.perf_counter()))
        turns = (int(number) + 1) * options.evaluate_every
        steps = turns * options.envs
        say(f"turn {turns:6d}  steps {steps:9,d}  loss {float(loss):7.4f}  greedy return {float(value):6.1f}")

    carry = job.init(seed)
    started = time.perf_counter()
    program = Job.run.lower(job, carry, tell).compile()
    compiled = time.perf_counter()
    carry, returns = program(carry)
    returns = np.asarray(returns)
    jax.effects_barrier()
    returns = returns[: int(np.isfinite(returns).sum())]
    turns = (np.arange(len(returns)) + 1) * options.evaluate_every
    seconds = np.array([at - compiled for _, at in sorted(seen)])
    return Outcome(turns, returns, seconds, compiled - started, job.replay.stats(carry.replay))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Trains a DQN on CartPole-v1, environments and replay included, in one compiled program.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--seeds", type=int, default=1, help="train with seeds 0 to N-1, one after the other")
    add("--turns", type=int, default=20_000, help="at most; a multiple of --evaluate-every")
    add("--evaluate-every", type=int, default=500, help="turns")
    add("--evaluate-envs", type=int, default=64, help="episodes of an evaluation")
    add("--target", type=float, default=475.0, help="the mean return to stop at")
    add("--envs", type=int, default=16, help="environments that collect")
    add("--segment", type=int, default=64, help="T, the most steps that a trajectory of the table holds")
    add("--capacity", type=int, default=1536, help="trajectories in the table")
    add("--batch", type=int, default=128, help="windows in a batch")
    add("--n", type=int, default=8, help="rewards in a return")
    add("--width", type=int, default=64, help="of the network's two layers")
    add("--discount", type=float, default=0.99, help="of a reward one step later")
    add("--average", type=float, default=0.01, help="share of the target network that a step replaces")
    add("--learning-rate", type=float, default=5e-4, help="of Adam")
    add("--random-turns", type=float, default=3000, help="turns until the share of random actions is the least")
    add("--least-random", type=float, default=0.05, help="share of random actions after that")
    add("--plot", type=pathlib.Path, help="draw the learning curves to this file (needs matplotlib)")
    options = parser.parse_args(arguments)
    counts = ("turns", "evaluate_every", "envs", "segment", "batch", "n", "seeds", "evaluate_envs")
    _dqn_cli.check(parser, options, counts)
    if options.capacity <= options.envs:
        parser.error(f"--capacity: got {options.capacity}, wanted more than --envs {options.envs}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Trains; the exit status is 0 if every seed reached the target."""
    options = parse(arguments)
    outcomes = []
    for seed in range(options.seeds):
        outcome = train(options, seed)
        outcomes.append(outcome)
        how = "reached" if outcome.returns[-1] >= options.target else "missed"
        steps = outcome.turns[-1] * options.envs
        print(
            f"seed {seed}: {how} {options.target:g} with {outcome.returns[-1]:.1f} after "
            f"{outcome.turns[-1]:,} turns, {steps:,} steps, {outcome.seconds[-1]:.1f} s "
            f"(and {outcome.compile_seconds:.1f} s of compilation); {steps / outcome.seconds[-1]:,.0f} steps/s, "
            f"{outcome.stats['sampled'] / outcome.seconds[-1]:,.0f} samples/s"
        )
    if options.plot:
        _dqn_cli.plot(options.plot, outcomes, options.target, HIGHEST, "one program", "seconds, compilation aside")
        print(f"learning curves: {options.plot}")
    return 0 if all(o.returns[-1] >= options.target for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
