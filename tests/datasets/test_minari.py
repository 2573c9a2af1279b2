"""Minari datasets in every storage, against what was written and against Minari's own reader."""

import gymnasium as gym
import minari
import numpy as np
import pytest

from gear_jax.datasets import MinariSource

STORAGES = ("hdf5", "arrow", "parquet")
LENGTHS = (4, 1, 7, 3)
NESTED = gym.spaces.Dict(
    {
        "position": gym.spaces.Box(-1, 1, (2, 3), np.float64),
        "where": gym.spaces.Tuple((gym.spaces.Discrete(5), gym.spaces.MultiBinary(4))),
    }
)
IMAGE = gym.spaces.Box(0, 255, (32, 40, 3), np.uint8)


@pytest.fixture(params=STORAGES)
def storage(request):
    return request.param


def test_columns_and_ends(make_episodes, make_minari, storage):
    episodes = make_episodes(LENGTHS)
    source = MinariSource(make_minari(episodes, storage))
    names = ("observation", "action", "reward", "next_observation")
    read = list(source.episodes(names))
    assert len(source) == len(read) == len(LENGTHS)
    for i, (got, want) in enumerate(zip(read, episodes, strict=True)):
        assert (got.id, got.length) == (i, LENGTHS[i])
        assert (got.terminated, got.truncated) == (want["terminated"], want["truncated"])
        assert not got.unmarked_timeout
        observations = np.stack(want["observations"])
        np.testing.assert_array_equal(got.columns["observation"], observations[:-1])
        np.testing.assert_array_equal(got.columns["next_observation"], observations[1:])
        np.testing.assert_array_equal(got.columns["action"], np.stack(want["actions"]))
        np.testing.assert_array_equal(got.columns["reward"], want["rewards"])
        assert got.columns["observation"].dtype == np.float32
        assert got.episode_return == pytest.approx(want["rewards"].sum())


def test_agrees_with_minari(make_episodes, make_minari, storage):
    folder = make_minari(make_episodes(LENGTHS), storage)
    for got, want in zip(MinariSource(folder), minari.MinariDataset(folder), strict=True):
        assert got.id == want.id
        np.testing.assert_array_equal(got.columns["observation"], want.observations[:-1])
        np.testing.assert_array_equal(got.columns["action"], want.actions)
        np.testing.assert_array_equal(got.columns["reward"], want.rewards)


def test_dict_and_tuple_spaces_are_nested_columns(make_episodes, make_minari, storage):
    episodes = make_episodes((3, 2), space=NESTED, action_space=gym.spaces.Discrete(3))
    folder = make_minari(episodes, storage, space=NESTED, action_space=gym.spaces.Discrete(3))
    for got, want in zip(MinariSource(folder), episodes, strict=True):
        observation = got.columns["observation"]
        assert set(observation) == {"position", "where"} and isinstance(observation["where"], tuple)
        steps = want["observations"][:-1]
        np.testing.assert_array_equal(observation["position"], np.stack([o["position"] for o in steps]))
        np.testing.assert_array_equal(observation["where"][0], np.stack([o["where"][0] for o in steps]))
        np.testing.assert_array_equal(observation["where"][1], np.stack([o["where"][1] for o in steps]))
        np.testing.assert_array_equal(got.columns["action"], want["actions"])


@pytest.mark.parametrize("jpeg", [True, False])
def test_images(make_episodes, make_minari, storage, jpeg):
    episodes = make_episodes((3, 2), space=IMAGE)
    folder = make_minari(episodes, storage, space=IMAGE, jpeg_encoding=jpeg)
    for got, want in zip(MinariSource(folder), minari.MinariDataset(folder), strict=True):
        assert got.columns["observation"].shape == (got.length, 32, 40, 3)
        assert got.columns["observation"].dtype == np.uint8
        np.testing.assert_array_equal(got.columns["observation"], want.observations[:-1])


def test_only_what_was_asked_for_is_read(make_episodes, make_minari, storage):
    source = MinariSource(make_minari(make_episodes(LENGTHS), storage))
    assert {name for episode in source.episodes(()) for name in episode.columns} == {"reward"}
    assert {name for e in source.episodes(["action"]) for name in e.columns} == {"reward", "action"}


def test_an_episode_without_end_flags_is_an_unmarked_timeout(make_episodes, make_minari, storage):
    episodes = make_episodes((3, 3))
    episodes[1].update(terminated=False, truncated=False)
    first, second = MinariSource(make_minari(episodes, storage))
    assert not first.unmarked_timeout
    assert second.unmarked_timeout and second.truncated and not second.terminated


def test_an_episode_longer_than_a_record_batch_stays_whole(make_episodes, make_minari):
    """Minari writes batches of 32,768 rows, and its reader takes each batch for an episode."""
    episodes = make_episodes((2, 3))
    rng = np.random.default_rng(1)
    length = 70_000
    episodes[0].update(
        observations=rng.random((length + 1, 3), np.float32),
        actions=np.zeros((length, 2), np.float32),
        rewards=rng.random(length),
    )
    first, second = MinariSource(make_minari(episodes, "arrow"))
    assert (first.length, second.length) == (length, 3)
    np.testing.assert_array_equal(first.columns["observation"], episodes[0]["observations"][:-1])


def test_by_id_folder_and_object(make_episodes, make_minari, storage):
    folder = make_minari(make_episodes(LENGTHS), storage)
    for dataset in ("test/case-v0", str(folder), folder.parent, minari.MinariDataset(folder)):
        assert len(list(MinariSource(dataset))) == len(LENGTHS)


def test_a_filter_is_kept(make_episodes, make_minari, storage):
    dataset = minari.MinariDataset(make_minari(make_episodes(LENGTHS), storage))
    long = dataset.filter_episodes(lambda episode: len(episode) > 3)
    assert [(e.id, e.length) for e in MinariSource(long)] == [(0, 4), (2, 7)]
    assert [e.id for e in MinariSource(dataset, episodes=[3, 1])] == [3, 1]


def test_episodes_that_do_not_exist_are_refused(make_episodes, make_minari):
    folder = make_minari(make_episodes((2,)))
    with pytest.raises(ValueError, match="episodes: got 1"):
        MinariSource(folder, episodes=[0, 1])


def test_reading_twice_gives_the_same(make_episodes, make_minari, storage):
    source = MinariSource(make_minari(make_episodes(LENGTHS), storage))
    for a, b in zip(source, source, strict=True):
        np.testing.assert_array_equal(a.columns["observation"], b.columns["observation"])
