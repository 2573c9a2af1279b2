"""A DQN that learns in this process, in JAX, while Gymnasium environments run in others.

Each actor's process steps `--envs` environments (CartPole-v1) and asks the learner for their actions through shared
memory; the learner answers all that ask with one call of the policy, also while a train program runs. Segments of
episodes come back the same way and are added to the table in place. A rate limiter keeps the two in proportion. The
greedy policy plays every so often; the run ends when its mean return reaches `--target`. The name is that of "Podracer
architectures for scalable Reinforcement Learning" (Hessel et al., 2021).

`python -m gear_jax top`, in another terminal, shows what goes on.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
import time
from typing import Any, NamedTuple

import _dqn_cli
import _gym_actor
import jax
import jax.numpy as jnp
import numpy as np
from _dqn import Dqn, Learner, Network, Settings, table

import gear_jax as gear
from gear_jax.actors import ActorPool, Ingest, RateLimiter
from gear_jax.metrics import FileWriter, Metrics, MetricsWriter, PrometheusWriter, TensorBoardWriter

HIGHEST = _gym_actor.MOST_STEPS  # the return of an episode that never fails


class Outcome(NamedTuple):
    """Of a run.

    Attributes:
      steps: `int[E]`, steps of the environments that were in the table at each evaluation.
      returns: `float[E]`, the greedy policy's mean return.
      seconds: `float[E]`, from the first call on, compilation included.
      counters: at the end, those of `gear_jax.metrics`.
    """

    steps: np.ndarray
    returns: np.ndarray
    seconds: np.ndarray
    counters: dict[str, int | float]


class Job:
    """The learner's programs."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        settings = Settings(
            options.batch, options.n, options.discount, options.average, options.learning_rate, options.width
        )
        self.dqn = Dqn(Network(_gym_actor.ACTIONS, options.width), settings)
        spec = table(_gym_actor.OBSERVATION, options.segment, options.capacity)
        self.replay = gear.make_replay(spec, windows=gear.Window(0, options.n + 1))
        # The train program draws all its batches at once, as far as anybody who waits can tell.
        self.limiter = RateLimiter(
            options.samples_per_insert,
            batch_size=options.batch * options.updates,
            capacity=options.capacity,
            min_size=options.min_size,
        )

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
    def train(self, replay: gear.ReplayState, learner: Learner, key: jax.Array):
        """`--updates` train steps. Returns the table, the learner, the parameters to act with, and the loss."""

        def step(carry, key):
            replay, learner = carry
            replay, batch = self.replay.sample(replay, key, self.options.batch)
            learner, loss = self.dqn.learn(learner, batch)
            return (replay, learner), loss

        keys = jax.random.split(key, self.options.updates)
        (replay, learner), losses = jax.lax.scan(step, (replay, learner), keys)
        # Their own memory: those of the learner are given up to the next call, which runs while actors ask.
        return replay, learner, jax.tree.map(jnp.copy, learner.params), jnp.mean(losses)

    @functools.partial(jax.jit, static_argnums=0)
    def act(self, params: Any, observation: jax.Array, seed: jax.Array, random: jax.Array) -> jax.Array:
        """Actions for all that ask."""
        return self.dqn.act(params, observation, jax.random.key(seed), random)

    def policy(self, params: Any, seed: int, random: float):
        """For `Ingest.serve`."""

        def answer(asked):
            return {"action": self.act(params, asked["observation"], np.uint32(seed), np.float32(random))}

        return answer

    def evaluate(self, params: Any, seed: int) -> float:
        """The greedy policy's mean return over `--evaluate-envs` episodes."""
        n = self.options.evaluate_envs
        environments = _gym_actor.make(n)
        observation, _ = environments.reset(seed=seed)
        going, total = np.ones(n, bool), np.zeros(n)
        for _ in range(HIGHEST):
            action = np.asarray(self.act(params, observation, np.uint32(0), np.float32(0)))
            observation, reward, terminated, _, _ = environments.step(action)
            total += reward * going
            going &= ~terminated
            if not going.any():
                break
        environments.close()
        return float(total.mean())


class Run:
    """One run: what the loop holds."""

    def __init__(self, job: Job, ingest: Ingest, seed: int):
        self.job, self.ingest, self.seed = job, ingest, seed
        self.state = job.replay.init()
        self.learner = job.dqn.init(jax.random.key(seed), _gym_actor.OBSERVATION)
        self.acting = jax.tree.map(jnp.copy, self.learner.params)
        self.key, self.calls, self.loss = jax.random.key(seed + 1), 0, jnp.zeros(())

    @property
    def steps(self) -> int:
        """Steps of the environments that have come into the table."""
        return self.ingest.stats()["steps"]

    def policy(self):
        """What actors are answered with now."""
        options = self.job.options
        random = max(options.least_random, 1.0 - self.steps / options.random_steps)
        self.calls += 1
        return self.job.policy(self.acting, self.calls, random)

    def turn(self, pool: ActorPool) -> None:
        """Waits until the limiter lets a call of the train program begin; answers actors until it ends."""
        ready = False
        while not ready:
            self.state, ready = self.ingest.await_sample(self.state, timeout=2.0, policy=lambda x: self.policy()(x))
            pool.check()
        key = jax.random.fold_in(self.key, self.calls)
        self.state, self.learner, acting, loss = self.job.train(self.state, self.learner, key)
        while not loss.is_ready():
            self.ingest.serve(self.policy(), timeout=0.001)
        self.acting, self.loss = acting, loss

    def counters(self) -> dict[str, Any]:
        """For `Metrics.write`."""
        return {
            "replay": self.job.replay.stats(self.state),
            "ingest": self.ingest.stats(),
            "loss": self.loss,
        }


def train(options: argparse.Namespace, seed: int, say=print) -> Outcome:
    """One run."""
    job, curve = Job(options), []
    ask = {"observation": gear.ColumnSpec((_gym_actor.OBSERVATION,), np.float32)}
    answer = {"action": gear.ColumnSpec((), np.int32)}
    started = time.perf_counter()
    with (
        Metrics(writers(options), every=1.0) as metrics,
        Ingest(
            job.replay, actors=options.actors, slots=2 * options.envs, ask=ask, answer=answer, rows=options.envs,
            limiter=job.limiter,
        ) as ingest,
        ActorPool(_gym_actor.play, ingest.ring, args=(options.envs, seed), restart=3) as pool,
    ):  # fmt: skip
        run = Run(job, ingest, seed)
        for number in range(1, options.turns + 1):
            run.turn(pool)
            if metrics.due():
                metrics.write(number * options.updates, **run.counters())
            if number % options.evaluate_every:
                continue
            value = job.evaluate(run.acting, number)
            curve.append((run.steps, value, time.perf_counter() - started))
            say(
                f"update {number * options.updates:6d}  steps {run.steps:9,d}  loss {float(run.loss):7.4f}  "
                f"greedy return {value:6.1f}  {curve[-1][2]:5.1f} s"
            )
            if value >= options.target:
                break
        counters = metrics.write(number * options.updates, **run.counters())
    return Outcome(*map(np.array, zip(*curve, strict=True)), counters)


def writers(options: argparse.Namespace) -> list[MetricsWriter]:
    """Whom the command line asks to tell of the counters, and `top`."""
    told: list[MetricsWriter] = [FileWriter()]
    if options.tensorboard:
        told.append(TensorBoardWriter(options.tensorboard))
    if options.prometheus is not None:
        told.append(PrometheusWriter(options.prometheus))
    return told


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Trains a DQN on CartPole-v1: Gymnasium in other processes, the learner in this one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--seeds", type=int, default=1, help="train with seeds 0 to N-1, one after the other")
    add("--actors", type=int, default=2, help="processes")
    add("--envs", type=int, default=8, help="environments of each")
    add("--turns", type=int, default=4000, help="calls of the train program, at most; a multiple of --evaluate-every")
    add("--updates", type=int, default=8, help="train steps in a call")
    add("--evaluate-every", type=int, default=50, help="calls")
    add("--evaluate-envs", type=int, default=64, help="episodes of an evaluation")
    add("--target", type=float, default=475.0, help="the mean return to stop at")
    add("--samples-per-insert", type=float, default=512.0, help="windows learnt from for each segment that comes in")
    add("--min-size", type=int, default=50, help="segments in the table before the first call")
    add("--segment", type=int, default=64, help="T, the most steps that a trajectory of the table holds")
    add("--capacity", type=int, default=1536, help="segments in the table")
    add("--batch", type=int, default=128, help="windows in a batch")
    add("--n", type=int, default=8, help="rewards in a return")
    add("--width", type=int, default=64, help="of the network's two layers")
    add("--discount", type=float, default=0.99, help="of a reward one step later")
    add("--average", type=float, default=0.01, help="share of the target network that a step replaces")
    add("--learning-rate", type=float, default=5e-4, help="of Adam")
    add("--random-steps", type=float, default=20_000, help="steps until the share of random actions is the least")
    add("--least-random", type=float, default=0.05, help="share of random actions after that")
    add("--tensorboard", type=pathlib.Path, metavar="DIRECTORY", help="write curves there (needs tensorboardX)")
    add("--prometheus", type=int, metavar="PORT", help="serve counters there (needs prometheus_client)")
    add("--plot", type=pathlib.Path, help="draw the learning curves to this file (needs matplotlib)")
    options = parser.parse_args(arguments)
    counts = "seeds actors envs turns updates evaluate_every evaluate_envs segment capacity batch n".split()
    _dqn_cli.check(parser, options, counts)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Trains; the exit status is 0 if every seed reached the target."""
    options = parse(arguments)
    outcomes = []
    for seed in range(options.seeds):
        outcome = train(options, seed)
        outcomes.append(outcome)
        how = "reached" if outcome.returns[-1] >= options.target else "missed"
        counters, seconds = outcome.counters, outcome.seconds[-1]
        print(
            f"seed {seed}: {how} {options.target:g} with {outcome.returns[-1]:.1f} after {outcome.steps[-1]:,} steps, "
            f"{seconds:.1f} s; {outcome.steps[-1] / seconds:,.0f} steps/s, {counters['replay/sampled'] / seconds:,.0f} "
            f"samples/s, {counters['replay/sampled'] / counters['replay/inserted']:.0f} samples per insert"
        )
    if options.plot:
        _dqn_cli.plot(options.plot, outcomes, options.target, HIGHEST, "actors in other processes", "seconds")
        print(f"learning curves: {options.plot}")
    return 0 if all(o.returns[-1] >= options.target for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
