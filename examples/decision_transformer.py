"""Trains a Decision Transformer from a replay table of recorded MuJoCo episodes, and plays with it.

    python examples/decision_transformer.py             # one seed
    python examples/decision_transformer.py --seeds 3   # the spread over seeds

Records the dataset (once), loads it into a table, and trains. The table is part of the learner: sampling, forward and
backward pass and the update are one jitted program that scans over steps, with everything donated. Then the policy is
asked for the best return of the dataset and swims in a batch of environments. See examples/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import statistics
import time
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from _model import DecisionTransformer, ModelConfig
from _policies import ENVIRONMENT, EPISODES
from flax import nnx
from record_dataset import record
from tqdm import tqdm

import gear_jax as gear
from gear_jax.flax import NNXReplay

COLUMNS = ("observation", "action", "return_to_go", "timestep")
ACTION_DROPOUT = 0.5
AVERAGE_DECAY = 0.998
ASKED = (0.25, 0.5, 0.75)  # lesser returns to ask for, as shares of the dataset's best


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What the dataset says about the problem.

    Attributes:
      mean_return, best_return: over the dataset's episodes.
      observation_mean, observation_std: over its steps, `float32[observation_size]`.
    """

    mean_return: float
    best_return: float
    observation_mean: jax.Array
    observation_std: jax.Array

    def normalise(self, observation: jax.Array) -> jax.Array:
        return (observation - self.observation_mean) / self.observation_std


class Result(NamedTuple):
    """One seed's run.

    Attributes:
      steps, returns: the learning curve; returns is `[evaluations, environments]`.
      losses: one for each train step.
      final: returns in fresh environments when asked for the dataset's best.
      asked: (share of the dataset's best that the policy was asked for, mean return it got).
      step_seconds: of a train step, compilation aside.
      sample_seconds: of a step that only samples.
    """

    steps: list[int]
    returns: list[np.ndarray]
    losses: np.ndarray
    final: np.ndarray
    asked: list[tuple[float, float]]
    step_seconds: float
    sample_seconds: float


def load(options: argparse.Namespace) -> tuple[NNXReplay, Task]:
    """Records the dataset unless it is there, and loads it into a table."""
    folder = record(options.datasets, episodes=options.episodes, seed=options.recording_seed, overwrite=True)
    spec = gear.datasets.table_spec(folder, columns={name: name for name in COLUMNS})
    replay = gear.make_replay(
        spec,
        # Good episodes are drawn more often. That is meant, so the loss takes no importance weights.
        selector=gear.selectors.Prioritized(alpha=options.alpha),
        # The step t and the K - 1 before it; near the start, padding comes first.
        windows=gear.Window(offset=1 - options.context, length=options.context, pad="head"),
    )
    table = NNXReplay(replay)
    state, summary = gear.datasets.load(
        replay, table(), folder, priority=lambda episode: max(episode.episode_return, 1.0)
    )
    mean, std = jax.jit(moments)(state.columns["observation"], state.length)
    table.state.set_value(state)
    return table, Task(summary.mean_return, summary.best_return, mean, std)


def moments(column: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and standard deviation over all steps of a column, `[P, S, T, size]`, given lengths `[P, S]`."""
    real = (jnp.arange(column.shape[2]) < length[..., None])[..., None]
    mean = jnp.mean(column, axis=(0, 1, 2), where=real)
    return mean, jnp.std(column, axis=(0, 1, 2), where=real) + 1e-6


class Learner(nnx.Module):
    """Everything that a train step changes: model, optimizer, the table, and the random streams.

    Attributes:
      average: a running average of the model, which plays: single steps of the optimizer make returns jump.
    """

    def __init__(self, table: NNXReplay, task: Task, options: argparse.Namespace, seed: int):
        self.task = task
        self.batch = options.batch
        columns = table.replay.config.table.columns
        config = ModelConfig(
            observation_size=columns["observation"].shape[0],
            action_size=columns["action"].shape[0],
            context=options.context,
            episode_steps=table.replay.config.table.trajectory_length,
            width=options.width,
            layers=options.layers,
            conditioned=not options.clone,
        )
        self.model = DecisionTransformer(config, nnx.Rngs(seed))
        self.average = DecisionTransformer(config, nnx.Rngs(seed))  # the same, in arrays of its own
        self.optimizer = nnx.Optimizer(self.model, make_optimizer(options), wrt=nnx.Param)
        self.table = table
        self.rngs = nnx.Rngs(seed)

    def step(self) -> jax.Array:
        """Samples a batch and learns from it; returns the loss, `float32[]`."""
        sample = self.table.sample(self.batch, key=self.rngs.sample())
        # Consecutive actions are much alike: a model that always sees the last ones copies them, and drifts when it
        # plays. So half of the windows come without.
        keep = jax.random.bernoulli(self.rngs.dropout(), 1.0 - ACTION_DROPOUT, (self.batch, 1, 1))

        def loss(model: DecisionTransformer) -> jax.Array:
            data, mask = sample.data, sample.mask["observation"]
            predicted = model(
                data["return_to_go"] / self.task.best_return,
                self.task.normalise(data["observation"]),
                jnp.where(keep, data["action"], 0.0),
                data["timestep"],
                mask,
            )
            return jnp.mean((predicted - data["action"]) ** 2, where=mask[..., None])

        value, gradient = nnx.value_and_grad(loss)(self.model)
        self.optimizer.update(self.model, gradient)
        steps = self.optimizer.step.get_value().astype(jnp.float32)
        decay = jnp.minimum(AVERAGE_DECAY, (1.0 + steps) / (10.0 + steps))
        average, new = nnx.state(self.average), nnx.state(self.model)
        nnx.update(self.average, jax.tree.map(lambda a, b: decay * a + (1.0 - decay) * b, average, new))
        return value


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    warmup = min(100, options.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, warmup, options.steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=1e-4))


@functools.partial(nnx.jit, static_argnames=("steps",), donate_argnames=("learner",))
def train(learner: Learner, steps: int) -> jax.Array:
    """Trains for some steps in one compiled program; returns the losses, `float32[steps]`."""
    scan = nnx.scan(
        lambda learner: (learner, learner.step()), length=steps, in_axes=nnx.Carry, out_axes=(nnx.Carry, 0)
    )
    return scan(learner)[1]


class Player:
    """Plays in a batch of environments, asking the model for a return."""

    def __init__(self, model: DecisionTransformer, task: Task, options: argparse.Namespace):
        self._envs = gym.make_vec(ENVIRONMENT, num_envs=options.envs, vectorization_mode="sync")
        sizes = self._envs.observation_space.shape[1], self._envs.action_space.shape[1]
        self._empty = functools.partial(empty_context, options.envs, options.context, *sizes)
        graph = nnx.graphdef(model)

        def act(parameters, context, observation, return_to_go, timestep):
            now = (return_to_go / task.best_return, task.normalise(observation), 0.0, timestep, True)
            context = [push(old, new) for old, new in zip(context, now, strict=True)]
            action = nnx.merge(graph, parameters)(*context)[:, -1]
            context[2] = context[2].at[:, -1].set(action)
            return tuple(context), action

        self._act = jax.jit(act, donate_argnums=1)

    def play(self, model: DecisionTransformer, target: float, seed: int) -> np.ndarray:
        """Returns each environment's return, `float64[environments]`, of one episode."""
        parameters, context = nnx.state(model), self._empty()
        observation, _ = self._envs.reset(seed=seed)
        total, playing = np.zeros(len(observation)), np.ones(len(observation), bool)
        timestep = 0
        while playing.any():
            to_go = np.asarray(target - total, np.float32)
            context, action = self._act(
                parameters, context, np.asarray(observation, np.float32), to_go, timestep
            )
            observation, reward, terminated, truncated, _ = self._envs.step(np.asarray(action))
            total += np.where(playing, reward, 0.0)
            playing &= ~(terminated | truncated)
            timestep += 1
        return total

    def close(self) -> None:
        self._envs.close()


def empty_context(batch: int, context: int, observation_size: int, action_size: int) -> tuple[jax.Array, ...]:
    """The model's arguments before the first step: padding throughout."""
    return (
        jnp.zeros((batch, context)),
        jnp.zeros((batch, context, observation_size)),
        jnp.zeros((batch, context, action_size)),
        jnp.zeros((batch, context), jnp.int32),
        jnp.zeros((batch, context), bool),
    )


def push(old: jax.Array, new: Any) -> jax.Array:
    """Drops the oldest step of `[B, K, ...]` and appends `new`, broadcast to `[B, ...]`."""
    new = jnp.broadcast_to(jnp.asarray(new, old.dtype), old[:, 0].shape)
    return jnp.concatenate([old[:, 1:], new[:, None]], axis=1)


def train_seed(table: NNXReplay, task: Task, options: argparse.Namespace, seed: int) -> Result:
    """Trains and evaluates with one seed."""
    learner = Learner(table, task, options, seed)
    player = Player(learner.average, task, options)
    steps, returns, losses, seconds = [], [], [], []

    def play(share: float, start: int) -> np.ndarray:
        return player.play(learner.average, share * task.best_return, seed=1_000_000 * seed + start)

    def evaluate(step: int) -> None:
        steps.append(step)
        returns.append(play(1.0, step))

    with tqdm(total=options.steps, desc=f"train seed {seed}", unit="step") as bar:
        evaluate(0)
        while bar.n < options.steps:
            start = time.perf_counter()
            losses.append(np.asarray(train(learner, options.chunk)))
            seconds.append(time.perf_counter() - start)
            bar.update(options.chunk)
            if bar.n % options.evaluate_every == 0 or bar.n >= options.steps:
                evaluate(bar.n)
            bar.set_postfix({"loss": f"{losses[-1].mean():.4f}", "return": f"{returns[-1].mean():.0f}"})
    final = play(1.0, 500_000)
    asked = [(share, float(play(share, 600_000).mean())) for share in ASKED]
    step_seconds = statistics.median(seconds[1:] or seconds) / options.chunk  # the first one compiles
    player.close()
    return Result(steps, returns, np.concatenate(losses), final, asked, step_seconds, time_sampling(table, options))


def time_sampling(table: NNXReplay, options: argparse.Namespace) -> float:
    """Seconds of one sample in a scan that does nothing else."""

    def step(state: gear.ReplayState, key: jax.Array):
        state, sample = table.replay.sample(state, key, options.batch)
        # Something of every column has to leave the step, as it does in training.
        return state, jax.tree.map(lambda x: x[0, 0], (sample.data, sample.mask))

    scan = jax.jit(lambda state, keys: jax.lax.scan(step, state, keys), donate_argnums=0)
    keys = jax.random.split(jax.random.key(0), options.chunk)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        state, taken = scan(table(), keys)
        jax.block_until_ready(taken)
        seconds.append(time.perf_counter() - start)
        table.state.set_value(state)
    return statistics.median(seconds[1:]) / options.chunk


def table_of(task: Task, results: list[Result], batch: int) -> str:
    """The outcome in words and numbers."""
    step = statistics.median(result.step_seconds for result in results)
    sample = statistics.median(result.sample_seconds for result in results)
    finals = np.array([result.final.mean() for result in results])
    spread = f"  (seeds: {', '.join(f'{value:.0f}' for value in finals)})" if len(finals) > 1 else ""
    environments = np.concatenate([result.final for result in results])
    rows = [
        ("dataset, mean return", f"{task.mean_return:.1f}"),
        ("dataset, best return", f"{task.best_return:.1f}"),
        ("policy, return", f"{finals.mean():.1f}{spread}"),
        ("  worst and best of the environments", f"{environments.min():.1f}, {environments.max():.1f}"),
        ("  over the dataset's mean", f"{finals.mean() / task.mean_return:.2f} x"),
        ("  over the dataset's best", f"{finals.mean() / task.best_return:.2f} x"),
        ("samples (windows) per second", f"{batch / step:,.0f}"),
        ("share of a step spent in replay", f"{sample / step:.2%}  ({sample * 1e6:.0f} µs of {step * 1e3:.1f} ms)"),
    ]
    for i, share in enumerate(ASKED):
        got = statistics.mean(result.asked[i][1] for result in results)
        rows.insert(-2, (f"  asked for {share * task.best_return:.1f} instead, return", f"{got:.1f}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}   {value}" for name, value in rows)


def plot(path: pathlib.Path, task: Task, results: list[Result]) -> None:
    """Draws the learning curve: the return of every evaluation above the loss."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(7, 6), height_ratios=(2, 1))
    for seed, result in enumerate(results):
        returns = np.array(result.returns)
        (line,) = top.plot(result.steps, returns.mean(axis=1), marker="o", markersize=3, label=f"policy, seed {seed}")
        top.fill_between(result.steps, returns.min(axis=1), returns.max(axis=1), alpha=0.2, color=line.get_color())
        window = max(len(result.losses) // 100, 1)
        smooth = np.convolve(result.losses, np.full(window, 1 / window), mode="valid")
        bottom.plot(np.arange(len(smooth)) + window, smooth, color=line.get_color())
    top.axhline(task.best_return, color="black", linestyle="--", linewidth=1, label="dataset, best")
    top.axhline(task.mean_return, color="black", linestyle=":", linewidth=1, label="dataset, mean")
    top.set(ylabel="return", title=f"Decision Transformer on {ENVIRONMENT}")
    top.set_ylim(bottom=min(0.0, top.get_ylim()[0]))
    top.legend(loc="lower right")
    bottom.set(xlabel="train step", ylabel="loss", yscale="log")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    outputs = pathlib.Path("outputs")
    parser.add_argument("--seeds", type=int, default=1, help="train with seeds 0 to N-1")
    parser.add_argument("--steps", type=int, default=1000, help="train steps; a multiple of --chunk")
    parser.add_argument("--chunk", type=int, default=100, help="train steps in one call of the compiled program")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps; a multiple of --chunk")
    parser.add_argument("--envs", type=int, default=8, help="environments to evaluate in")
    parser.add_argument("--batch", type=int, default=64, help="windows in a batch")
    parser.add_argument("--context", type=int, default=20, help="K, the steps that the model looks back on")
    parser.add_argument("--width", type=int, default=64, help="of the transformer")
    parser.add_argument("--layers", type=int, default=2, help="of the transformer")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak of the schedule")
    parser.add_argument("--alpha", type=float, default=2.0, help="episodes are drawn with return ** alpha")
    parser.add_argument("--clone", action="store_true", help="hide the return-to-go: behaviour cloning, for comparison")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="to record")
    parser.add_argument("--recording-seed", type=int, default=0, help="decides the dataset")
    parser.add_argument("--datasets", type=pathlib.Path, default=outputs / "datasets", help="where the recording goes")
    parser.add_argument("--plot", type=pathlib.Path, default=outputs / "learning_curve.png")
    options = parser.parse_args(arguments)
    for name in ("steps", "evaluate_every"):
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value < 1 or value % options.chunk:
            parser.error(f"{flag}: got {value}, wanted a multiple of --chunk {options.chunk}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    start = time.perf_counter()
    table, task = load(options)
    results = [train_seed(table, task, options, seed) for seed in range(options.seeds)]
    plot(options.plot, task, results)
    print(table_of(task, results, options.batch))
    print(f"learning curve in {options.plot}; {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
