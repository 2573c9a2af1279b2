"""D4RL-style flat files: where episodes end, and what is not marked."""

import h5py
import numpy as np
import pytest

from gear_jax.datasets import D4RLSource, _d4rl

LENGTHS = (4, 1, 7, 3)


def ends(source):
    return [(e.length, e.terminated, e.truncated, e.unmarked_timeout) for e in source]


def test_columns_and_ends(make_episodes, make_d4rl):
    episodes = make_episodes(LENGTHS)
    source = D4RLSource(make_d4rl(episodes))
    assert len(source) == len(LENGTHS)
    for i, (got, want) in enumerate(zip(source, episodes, strict=True)):
        assert (got.id, got.length, got.unmarked_timeout) == (i, LENGTHS[i], False)
        assert (got.terminated, got.truncated) == (want["terminated"], want["truncated"])
        np.testing.assert_array_equal(got.columns["observation"], np.stack(want["observations"][:-1]))
        np.testing.assert_array_equal(got.columns["action"], np.stack(want["actions"]))
        np.testing.assert_array_equal(got.columns["reward"], want["rewards"].astype(np.float32))


def test_next_observations_and_columns_of_other_names(make_episodes, make_d4rl):
    episodes = make_episodes(LENGTHS)
    path = make_d4rl(episodes, next_observations=True, **{"infos/qpos": np.arange(15.0)})
    start = 0
    for got, want in zip(D4RLSource(path).episodes(["next_observation", "infos/qpos"]), episodes, strict=True):
        np.testing.assert_array_equal(got.columns["next_observation"], np.stack(want["observations"][1:]))
        np.testing.assert_array_equal(got.columns["infos"]["qpos"], np.arange(start, start + got.length))
        start += got.length


def test_groups_are_nested_columns(make_episodes, make_d4rl):
    episodes = make_episodes(LENGTHS)
    nested = {"observations": None, "observations/a": np.arange(15.0), "observations/b": np.ones((15, 2))}
    first = next(iter(D4RLSource(make_d4rl(episodes, **nested))))
    np.testing.assert_array_equal(first.columns["observation"]["a"], [0, 1, 2, 3])
    assert first.columns["observation"]["b"].shape == (4, 2)


def test_without_timeouts_the_end_of_the_file_is_unmarked(make_episodes, make_d4rl):
    path = make_d4rl(make_episodes((3, 2)), timeouts=False)  # terminated, truncated
    assert ends(D4RLSource(path)) == [(3, True, False, False), (2, False, True, True)]


def test_with_timeouts_the_end_of_the_file_is_unmarked_too(make_episodes, make_d4rl):
    episodes = make_episodes((3, 2))
    episodes[1]["truncated"] = False
    assert ends(D4RLSource(make_d4rl(episodes)))[1] == (2, False, True, True)


def test_a_time_limit_finds_unmarked_timeouts(make_episodes, make_d4rl):
    episodes = make_episodes((5, 5, 2))
    for episode, terminated in zip(episodes, (False, True, False), strict=True):
        episode.update(terminated=terminated, truncated=False)
    path = make_d4rl(episodes, timeouts=False)
    assert ends(D4RLSource(path)) == [(10, True, False, False), (2, False, True, True)]
    assert ends(D4RLSource(path, max_episode_steps=5)) == [
        (5, False, True, True),
        (5, True, False, False),  # a termination on the limit is a termination
        (2, False, True, True),
    ]


def test_next_observations_find_unmarked_timeouts(make_episodes, make_d4rl):
    episodes = make_episodes((5, 4, 2))
    for episode in episodes:
        # Within an episode the next observation is the next row's; the make_episodes draw sees to that.
        episode.update(terminated=False, truncated=False)
    path = make_d4rl(episodes, timeouts=False, next_observations=True)
    assert ends(D4RLSource(path)) == [(5, False, True, True), (4, False, True, True), (2, False, True, True)]


def test_a_nan_observation_is_no_reset(make_episodes, make_d4rl):
    episodes = make_episodes((5,))
    episodes[0]["observations"][2][1] = np.nan
    path = make_d4rl(episodes, timeouts=False, next_observations=True)
    assert ends(D4RLSource(path)) == [(5, True, False, False)]


def test_termination_and_timeout_on_one_step_are_both_kept(make_episodes, make_d4rl):
    path = make_d4rl(make_episodes((2, 2, 2)))
    assert ends(D4RLSource(path))[2] == (2, True, True, False)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("limit", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("by_next", [False, True])
def test_blocks_do_not_matter(make_episodes, make_d4rl, monkeypatch, block, limit, by_next):
    episodes = make_episodes((4, 1, 7, 3, 1, 1, 6))
    path = make_d4rl(episodes, timeouts=not by_next, next_observations=by_next)
    monkeypatch.setattr(_d4rl, "_BLOCK", block)
    want = []
    for i, episode in enumerate(episodes):
        left = len(episode["rewards"])
        while limit is not None and left > limit:
            want.append((limit, False, True, True))
            left -= limit
        # By next observations a truncation is found, but it is not marked.
        truncated = episode["truncated"] and (not by_next or not episode["terminated"])
        unmarked = by_next and not episode["terminated"]
        want.append((left, episode["terminated"], truncated, unmarked))
        assert i < len(episodes)
    assert ends(D4RLSource(path, max_episode_steps=limit)) == want


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64, np.float32])
def test_flags_of_any_dtype_and_of_one_column(make_episodes, make_d4rl, dtype):
    path = make_d4rl(make_episodes((2, 2)))
    with h5py.File(path, "a") as file:
        for name in ("terminals", "timeouts"):
            values = file[name][:].astype(dtype)[:, None]
            del file[name]
            file[name] = values
    assert ends(D4RLSource(path)) == [(2, True, False, False), (2, False, True, False)]


def test_compressed_files(make_episodes, make_d4rl):
    path = make_d4rl(make_episodes(LENGTHS))
    with h5py.File(path, "a") as file:
        for name in list(file):
            values = file[name][:]
            del file[name]
            file.create_dataset(name, data=values, compression="gzip", chunks=(5, *values.shape[1:]))
    assert [e.length for e in D4RLSource(path)] == list(LENGTHS)


def test_a_limit_below_one_is_refused(make_episodes, make_d4rl):
    with pytest.raises(ValueError, match="max_episode_steps"):
        D4RLSource(make_d4rl(make_episodes((2,))), max_episode_steps=0)


@pytest.mark.parametrize("options", [{}, {"timeouts": False}, {"timeouts": False, "next_observations": True}])
def test_one_step(make_episodes, make_d4rl, options):
    assert ends(D4RLSource(make_d4rl(make_episodes((1,)), **options))) == [(1, True, False, False)]
