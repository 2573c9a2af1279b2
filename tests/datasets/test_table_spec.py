"""Tables derived from datasets."""

import gymnasium as gym
import jax
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.datasets import table_spec

LENGTHS = (4, 1, 7, 3)


@pytest.mark.parametrize("storage", ["hdf5", "arrow"])
def test_shapes_dtypes_and_the_longest_episode(make_episodes, make_minari, storage):
    space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2, 3), np.float64), "b": gym.spaces.Discrete(4)})
    table = table_spec(make_minari(make_episodes(LENGTHS, space=space), storage, space=space))
    assert (table.trajectory_length, table.capacity) == (7, 4)
    integer = np.dtype(jax.dtypes.canonicalize_dtype(np.int64))
    assert table.columns == {
        "observation": {
            "a": gear.ColumnSpec((2, 3), jax.dtypes.canonicalize_dtype(np.float64)),
            "b": gear.ColumnSpec((), integer),
        },
        "action": gear.ColumnSpec((2,), np.float32),
        "reward": gear.ColumnSpec((), jax.dtypes.canonicalize_dtype(np.float64)),
        "return_to_go": gear.ColumnSpec((), jax.dtypes.canonicalize_dtype(np.float64)),
    }


def test_flat_files(make_episodes, make_d4rl):
    table = table_spec(make_d4rl(make_episodes(LENGTHS)), capacity=100, return_to_go=False)
    assert (table.trajectory_length, table.capacity) == (7, 100)
    assert set(table.columns) == {"observation", "action", "reward"}


def test_columns_give_the_structure(make_episodes, make_d4rl):
    path = make_d4rl(make_episodes(LENGTHS))
    table = table_spec(path, columns=("observation", {"done": "terminated", "t": "timestep"}))
    assert table.columns[0] == gear.ColumnSpec((3,), np.float32)
    assert table.columns[1] == {"done": gear.ColumnSpec((), np.bool_), "t": gear.ColumnSpec((), np.int32)}


def test_whole_number_rewards_become_floats(make_episodes, make_d4rl):
    table = table_spec(make_d4rl(make_episodes(LENGTHS), rewards=np.ones(15, np.int64)))
    assert table.columns["reward"].dtype == np.float32


def test_a_shorter_table_counts_the_pieces(make_episodes, make_d4rl):
    table = table_spec(make_d4rl(make_episodes(LENGTHS)), trajectory_length=3)
    assert (table.trajectory_length, table.capacity) == (3, 2 + 1 + 3 + 1)


def test_an_unknown_column_is_named(make_episodes, make_minari):
    folder = make_minari(make_episodes(LENGTHS))
    with pytest.raises(ValueError, match=f"{folder}.*'velocity'"):
        table_spec(folder, columns={"v": "velocity"})
    with pytest.raises(ValueError, match=f"{folder}: episode 0: column 'observation/x'"):
        table_spec(folder, columns={"v": "observation/x"})
