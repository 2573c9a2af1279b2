"""Datasets into a real table."""

import dataclasses

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.datasets import (
    D4RLSource,
    Episode,
    LoadInterrupted,
    MinariSource,
    Source,
    UnmarkedTimeoutWarning,
    load,
    table_spec,
)
from gear_jax.testing.ops import to_numpy

LENGTHS = (4, 1, 7, 3, 5)


class Memory(Source):
    """Episodes from memory; `fail_at` = (pass, episode) breaks off there."""

    name = "memory"

    def __init__(self, episodes, fail_at=None):
        self._episodes, self._fail_at, self.passes = episodes, fail_at, 0

    def __len__(self):
        return len(self._episodes)

    def episodes(self, columns=()):
        self.passes += 1
        for i, episode in enumerate(self._episodes):
            if self._fail_at == (self.passes, i):
                raise OSError("the disk is gone")
            yield episode


@pytest.fixture
def memory(rng):
    def make(lengths, fail_at=None, terminated=False, **columns):
        episodes = []
        for i, length in enumerate(lengths):
            data = {
                "observation": rng.normal(size=(length, 3)).astype(np.float32),
                "action": rng.normal(size=(length, 2)).astype(np.float32),
                "reward": rng.normal(size=length),
            } | {name: value(length) for name, value in columns.items()}
            episodes.append(Episode(data, length, terminated, not terminated, "memory", i))
        return Memory(episodes, fail_at)

    return make


def trajectories(state):
    """What a table holds, partition by partition, slot by slot."""
    length = np.asarray(state.length).reshape(-1)
    columns = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), to_numpy(state.columns))
    return [jax.tree.map(lambda x, s=s: x[s, : length[s]], columns) for s in np.flatnonzero(length)]


def reference_return_to_go(rewards):
    return [sum(rewards[t:]) for t in range(len(rewards))]


@pytest.mark.parametrize(
    ("storage", "chunk"),
    [("hdf5", None), ("hdf5", 1), ("hdf5", 64), ("arrow", None), ("flat", 2), ("flat", 5)],
)
def test_the_table_holds_the_dataset(make_episodes, make_minari, make_d4rl, storage, chunk):
    episodes = make_episodes(LENGTHS)
    path = make_d4rl(episodes) if storage == "flat" else make_minari(episodes, storage)
    replay = gear.make_replay(table_spec(path))
    state, summary = load(replay, replay.init(), path, chunk=chunk, progress=False)
    rows = trajectories(state)
    assert len(rows) == len(episodes)
    for row, want in zip(rows, episodes, strict=True):
        np.testing.assert_array_equal(row["observation"], np.stack(want["observations"][:-1]))
        np.testing.assert_array_equal(row["action"], np.stack(want["actions"]))
        np.testing.assert_allclose(row["reward"], want["rewards"], rtol=1e-6)
        want_return_to_go = reference_return_to_go(want["rewards"])
        np.testing.assert_allclose(row["return_to_go"], want_return_to_go, rtol=1e-5, atol=1e-5)
    returns = [e["rewards"].sum() for e in episodes]
    assert (summary.episodes, summary.trajectories, summary.steps) == (5, 5, 20)
    np.testing.assert_allclose(summary.returns, returns, rtol=1e-5)
    np.testing.assert_array_equal(summary.lengths, LENGTHS)
    assert summary.mean_return == pytest.approx(np.mean(returns), rel=1e-5)
    assert summary.best_return == pytest.approx(max(returns), rel=1e-5)
    assert summary.worst_return == pytest.approx(min(returns), rel=1e-5)
    assert summary.terminated == sum(e["terminated"] for e in episodes)
    assert summary.truncated == sum(e["truncated"] for e in episodes)
    assert summary.unmarked_timeouts == ()
    assert "episodes  5 (5 trajectories, 20 steps)" in str(summary)


def test_a_minari_id_and_a_dict_space(make_episodes, make_minari):
    space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": gym.spaces.Tuple((gym.spaces.Discrete(4),))})
    episodes = make_episodes(LENGTHS, space=space)
    make_minari(episodes, "arrow", space=space)
    replay = gear.make_replay(table_spec("test/case-v0"))
    state, _ = load(replay, replay.init(), "test/case-v0", progress=False)
    for row, want in zip(trajectories(state), episodes, strict=True):
        steps = want["observations"][:-1]
        np.testing.assert_array_equal(row["observation"]["a"], np.stack([o["a"] for o in steps]))
        np.testing.assert_array_equal(row["observation"]["b"][0], np.stack([o["b"][0] for o in steps]))


def test_columns_are_renamed_picked_and_derived(make_episodes, make_minari):
    space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": gym.spaces.Discrete(4)})
    episodes = make_episodes(LENGTHS, space=space)
    folder = make_minari(episodes, space=space)
    columns = {
        "position": "observation/a",
        "step": ("timestep", "terminated", "truncated"),
        "next": "next_observation",
    }
    replay = gear.make_replay(table_spec(folder, columns=columns))
    state, _ = load(replay, replay.init(), folder, columns=columns, progress=False)
    for row, want in zip(trajectories(state), episodes, strict=True):
        length = len(want["rewards"])
        last = np.arange(length) == length - 1
        np.testing.assert_array_equal(row["position"], np.stack([o["a"] for o in want["observations"][:-1]]))
        np.testing.assert_array_equal(row["next"]["b"], [o["b"] for o in want["observations"][1:]])
        np.testing.assert_array_equal(row["step"][0], np.arange(length))
        np.testing.assert_array_equal(row["step"][1], last & want["terminated"])
        np.testing.assert_array_equal(row["step"][2], last & want["truncated"])
        assert row["step"][1].dtype == np.bool_


def test_a_whole_float_reward_table_takes_whole_number_rewards(memory):
    source = memory((3, 2), reward=lambda length: np.ones(length, np.int64))
    replay = gear.make_replay(table_spec(source))
    state, summary = load(replay, replay.init(), source, progress=False)
    np.testing.assert_array_equal(trajectories(state)[0]["return_to_go"], [3, 2, 1])
    assert summary.best_return == 3


def test_discount_and_bootstrap(memory):
    source = memory((3,), reward=lambda length: np.ones(length))
    replay = gear.make_replay(table_spec(source))
    state, _ = load(replay, replay.init(), source, gamma=0.5, bootstrap=lambda e: 4.0 + e.id, progress=False)
    np.testing.assert_allclose(trajectories(state)[0]["return_to_go"], [2.25, 2.5, 3.0])


def test_the_bootstrap_is_not_asked_after_a_termination(memory):
    source = memory((3,), terminated=True, reward=lambda length: np.ones(length))
    replay = gear.make_replay(table_spec(source))

    def bootstrap(episode):
        raise AssertionError("asked for the value of a terminal state")

    state, _ = load(replay, replay.init(), source, bootstrap=bootstrap, progress=False)
    np.testing.assert_array_equal(trajectories(state)[0]["return_to_go"], [3, 2, 1])


def test_return_to_go_can_come_from_the_dataset(memory):
    source = memory((3,), return_to_go=lambda length: np.full(length, 7.0))
    replay = gear.make_replay(table_spec(source))
    state, _ = load(replay, replay.init(), source, return_to_go=False, progress=False)
    np.testing.assert_array_equal(trajectories(state)[0]["return_to_go"], [7, 7, 7])


def test_priorities(memory):
    source = memory(LENGTHS)
    replay = gear.make_replay(table_spec(source), selector=gear.selectors.Prioritized())
    state, _ = load(replay, replay.init(), source, priority=lambda e: 10.0 * e.length, chunk=2, progress=False)
    np.testing.assert_array_equal(np.asarray(state.priority).reshape(-1), 10 * np.array(LENGTHS))


def test_without_priority_the_table_decides(memory):
    source = memory(LENGTHS)
    replay = gear.make_replay(table_spec(source), selector=gear.selectors.Prioritized())
    state, _ = load(replay, replay.init(), source, progress=False)
    np.testing.assert_array_equal(np.asarray(state.priority).reshape(-1), np.ones(5))


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf")])
def test_a_bad_priority_is_refused_before_anything_is_inserted(memory, value):
    source = memory(LENGTHS)
    replay = gear.make_replay(table_spec(source))
    state = replay.init()
    with pytest.raises(ValueError, match="memory: episode 3: got priority"):
        load(replay, state, source, priority=lambda e: value if e.id == 3 else 1.0, chunk=1, progress=False)
    assert replay.stats(state)["trajectories"] == 0


def test_an_episode_longer_than_the_table_is_named(memory):
    source = memory(LENGTHS)
    replay = gear.make_replay(table_spec(source, trajectory_length=5))
    state = replay.init()
    with pytest.raises(ValueError, match=r"memory: episode 2: got 7 steps.*trajectory_length of 5.*split"):
        load(replay, state, source, progress=False)
    assert replay.stats(state)["trajectories"] == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_long_episodes_are_split(memory, limit):
    source = memory(LENGTHS)
    columns = {name: name for name in ("reward", "return_to_go", "timestep", "truncated")}
    table = table_spec(source, columns=columns, trajectory_length=limit)
    replay = gear.make_replay(table)
    state, summary = load(replay, replay.init(), source, too_long="split", chunk=2, progress=False)
    rows = trajectories(state)
    assert summary.episodes == 5 and summary.trajectories == len(rows) == table.capacity
    assert [len(r["reward"]) for r in rows] == [
        min(limit, length - low) for length in LENGTHS for low in range(0, length, limit)
    ]
    joined = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    want = [reference_return_to_go(e.columns["reward"]) for e in source]
    np.testing.assert_allclose(joined["return_to_go"], np.concatenate(want), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(joined["timestep"], np.concatenate([np.arange(n) for n in LENGTHS]))
    np.testing.assert_array_equal(np.flatnonzero(joined["truncated"]), np.cumsum(LENGTHS) - 1)


def test_more_trajectories_than_slots_is_an_error_unless_asked_for(memory):
    source = memory(LENGTHS)
    replay = gear.make_replay(table_spec(source, capacity=3))
    state = replay.init()
    with pytest.raises(
        ValueError, match=r"memory: got 5 trajectories.*the 3 free slots.*capacity of 3.*=5, or pass too_many='evict'"
    ):
        load(replay, state, source, progress=False)
    state, _ = load(replay, state, source, too_many="evict", chunk=2, progress=False)
    assert sorted(len(row["reward"]) for row in trajectories(state)) == [3, 5, 7]


@pytest.mark.parametrize("chunk", [None, 1, 3, 4, 8])
def test_partitions_fill_evenly(memory, chunk):
    source = memory((2,) * 10)
    replay = gear.make_replay(table_spec(source, capacity=12), partitions=4)
    state, _ = load(replay, replay.init(), source, chunk=chunk, progress=False)
    assert replay.stats(state)["trajectories"] == 10
    assert replay.stats(state)["evicted"] == 0


def test_loading_adds_to_what_is_there(memory):
    source = memory(LENGTHS)
    replay = gear.make_replay(table_spec(source, capacity=10))
    state, _ = load(replay, replay.init(), source, progress=False)
    state, _ = load(replay, state, source, progress=False)
    assert replay.stats(state)["trajectories"] == 10


def test_a_dataset_loaded_twice_needs_twice_the_slots(make_episodes, make_d4rl):
    path = make_d4rl(make_episodes(LENGTHS))
    replay = gear.make_replay(table_spec(path, capacity=9))
    state, _ = load(replay, replay.init(), path, progress=False)
    with pytest.raises(ValueError, match=r"got 5 trajectories, wanted at most the 4 free slots.*capacity=10, or"):
        load(replay, state, path, progress=False)
    assert replay.stats(state)["trajectories"] == 5
    state, _ = load(replay, state, path, too_many="evict", progress=False)
    stats = replay.stats(state)
    assert (stats["trajectories"], stats["evicted"]) == (9, 1)


@pytest.mark.parametrize("partitions", [1, 2, 3, 6])
@pytest.mark.parametrize("chunk", [1, 4, 7, None])
def test_there_is_room_exactly_where_nothing_is_evicted(memory, partitions, chunk):
    sources = [memory((2,) * n) for n in (1, 4, 5, 8, 2, 3)]
    replay = gear.make_replay(table_spec(sources[0], capacity=18), partitions=partitions)
    state, refused = replay.init(), 0
    for source in sources:
        held = replay.stats(state)["evicted"]
        try:
            state, _ = load(replay, state, source, chunk=chunk, progress=False)
            assert replay.stats(state)["evicted"] == held
        except ValueError as error:
            assert "free slots" in str(error)
            state, _ = load(replay, state, source, chunk=chunk, too_many="evict", progress=False)
            assert replay.stats(state)["evicted"] > held
            refused += 1
    assert 0 < refused < len(sources)


def test_a_full_partition_is_named(memory):
    replay = gear.make_replay(table_spec(memory((2,)), capacity=4), partitions=2)
    state = replay.init()
    for _ in range(2):
        state, _ = load(replay, state, memory((2,)), progress=False)
    with pytest.raises(ValueError, match=r"1 trajectories, 1 of them for partition 0, which has 0 free.*capacity=6"):
        load(replay, state, memory((2,)), progress=False)


def test_open_slots_of_streams_are_not_free(memory):
    source = memory((2,) * 3)
    replay = gear.make_replay(table_spec(source, capacity=4), streams=2)
    state = replay.init()
    step = jax.tree.map(lambda x: jnp.zeros((2, *x.shape[3:]), x.dtype), state.columns)
    state, _ = replay.append(state, jnp.arange(2, dtype=jnp.int32), step, jnp.zeros(2, bool))
    with pytest.raises(ValueError, match=r"got 3 trajectories, wanted at most the 2 free slots"):
        load(replay, state, source, progress=False)


def test_the_state_of_another_table_is_refused_before_anything_is_read(memory):
    source = memory(LENGTHS)
    replay = gear.make_replay(table_spec(source))
    other = gear.make_replay(table_spec(source, capacity=7)).init()
    passes = source.passes
    with pytest.raises(ValueError, match="load: state: got columns"):
        load(replay, other, source, progress=False)
    assert source.passes == passes


@pytest.fixture
def compilations():
    """Counts the programs that XLA compiles."""
    count = [0]

    def listener(event, duration, **kwargs):
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield count
    jax.monitoring.unregister_event_duration_listener(listener)


def test_compiles_once(memory, compilations):
    replay = gear.make_replay(table_spec(memory((5,) * 48)))
    few, many = memory((5,) * 8), memory((5, 3) * 20)
    state, _ = load(replay, replay.init(), few, chunk=4, progress=False)
    compiled = compilations[0]
    assert compiled > 0
    state, _ = load(replay, state, many, chunk=4, progress=False)
    assert compilations[0] == compiled


def test_unmarked_timeouts_are_warned_about_by_name(make_episodes, make_d4rl):
    path = make_d4rl(make_episodes((3, 4, 2, 3, 3)), timeouts=False)
    columns = {"terminated": "terminated", "truncated": "truncated"}
    replay = gear.make_replay(table_spec(path, columns=columns))
    with pytest.warns(UnmarkedTimeoutWarning, match=f"1 of 4 episodes.*{path}: episode 3"):
        state, summary = load(replay, replay.init(), path, columns=columns, progress=False)
    assert summary.unmarked_timeouts == (f"{path}: episode 3",)
    assert (summary.terminated, summary.truncated) == (3, 1)
    last = trajectories(state)[3]
    assert last["truncated"][-1] and not last["terminated"].any()


def test_a_warning_made_an_error_leaves_the_state_alone(make_episodes, make_d4rl):
    path = make_d4rl(make_episodes((3, 2)), timeouts=False)
    replay = gear.make_replay(table_spec(path))
    state = replay.init()
    with pytest.raises(UnmarkedTimeoutWarning):
        load(replay, state, path, progress=False)
    assert replay.stats(state)["trajectories"] == 0


def test_a_failure_in_the_second_pass_gives_the_state_back(memory):
    source = memory(LENGTHS, fail_at=(2, 3))
    replay = gear.make_replay(table_spec(memory(LENGTHS)))
    with pytest.raises(LoadInterrupted, match=r"memory: reading failed.*the disk is gone") as caught:
        load(replay, replay.init(), source, chunk=2, progress=False)
    assert caught.value.episodes == 2
    assert replay.stats(caught.value.state)["trajectories"] == 2
    state, _ = load(replay, caught.value.state, memory((2,)), progress=False)
    assert replay.stats(state)["trajectories"] == 3


@pytest.mark.parametrize("change", ["longer", "fewer", "more"])
def test_a_dataset_that_changes_between_the_passes(memory, change):
    source = memory(LENGTHS)
    replay = gear.make_replay(table_spec(source, trajectory_length=9))

    class Changing(Memory):
        def episodes(self, columns=()):
            for i, episode in enumerate(super().episodes(columns)):
                if self.passes == 2 and i == 4:
                    if change == "fewer":
                        return
                    episode = dataclasses.replace(episode, length=6)
                yield episode
            if self.passes == 2 and change == "more":
                yield episode

    with pytest.raises(LoadInterrupted, match="changed while it was being loaded"):
        load(replay, replay.init(), Changing(list(source)), chunk=1, progress=False)


def test_progress_bar(memory, capsys):
    source = memory(LENGTHS)
    replay = gear.make_replay(table_spec(source))
    load(replay, replay.init(), source)
    shown = capsys.readouterr().err
    assert all(f"{verb} memory: 100%" in shown for verb in ("check", "load"))
    assert "5/5" in shown.split("load memory")[-1]
    load(replay, gear.make_replay(table_spec(source)).init(), source, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("argument", ["too_long", "too_many"])
def test_unknown_choices_are_refused(memory, argument):
    source = memory(LENGTHS)
    replay = gear.make_replay(table_spec(source))
    with pytest.raises(ValueError, match=f"{argument}: got 'keep'"):
        load(replay, replay.init(), source, **{argument: "keep"})


def test_a_consumed_state_is_refused_as_add_refuses_it(memory):
    source = memory(LENGTHS)
    replay = gear.make_replay(table_spec(source))
    state = replay.init()
    load(replay, state, source, progress=False)
    with pytest.raises(ValueError, match="consumed"):
        load(replay, state, source, progress=False)


def test_a_generator_is_refused(memory):
    replay = gear.make_replay(table_spec(memory((2,))))
    with pytest.raises(TypeError, match=r"source: got generator.*Source"):
        load(replay, replay.init(), (e for e in memory((2,))))


def test_a_sample_of_a_loaded_table(make_episodes, make_minari):
    source = MinariSource(make_minari(make_episodes(LENGTHS)))
    replay = gear.make_replay(table_spec(source), windows=gear.Window(offset=-2, length=3), anchor="uniform")
    state, _ = load(replay, replay.init(), source, progress=False)
    state, sample = replay.sample(state, jax.random.key(0), 16)
    assert sample.data["observation"].shape == (16, 3, 3)
    assert bool(jnp.all(sample.mask["reward"][:, -1]))


def test_both_kinds_of_source_fill_the_same_table(make_episodes, make_minari, make_d4rl):
    episodes = make_episodes(LENGTHS)
    replay = gear.make_replay(table_spec(make_minari(episodes)))
    states = []
    for source in (MinariSource("test/case-v0"), D4RLSource(make_d4rl(episodes))):
        state, _ = load(replay, replay.init(), source, progress=False)
        states.append(state.columns)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *states)
