"""Bad data: an error that names file, episode and column, and nothing inserted."""

import contextlib
import json
import shutil

import gymnasium as gym
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

import gear_jax as gear
from gear_jax.datasets import D4RLSource, DatasetError, MinariSource, load, open_source, table_spec

LENGTHS = (4, 2, 5)
TABLE = gear.TableSpec(
    {
        "observation": gear.ColumnSpec((3,), np.float32),
        "action": gear.ColumnSpec((2,), np.float32),
        "reward": gear.ColumnSpec((), np.float32),
    },
    trajectory_length=8,
    capacity=16,
)


@pytest.fixture(scope="module")
def shared_replay():
    return gear.make_replay(TABLE)


@pytest.fixture
def refused(shared_replay):
    """Asserts that loading raises ValueError with all the words, and that the state is as good as before."""

    def check(source, *words, table=None, **options):
        replay = shared_replay if table is None else gear.make_replay(table)
        state = replay.init()
        with pytest.raises(ValueError) as caught:
            load(replay, state, source, chunk=1, progress=False, **options)
        for word in map(str, words):
            assert word in str(caught.value)
        assert replay.stats(state)["trajectories"] == 0
        assert not np.asarray(state.length).any()

    return check


@pytest.fixture
def hdf5(make_episodes, make_minari):
    """A Minari HDF5 dataset whose file is changed by a function; returns the folder."""

    def make(change):
        folder = make_minari(make_episodes(LENGTHS))
        with h5py.File(folder / "main_data.hdf5", "a") as file:
            change(file)
        return folder

    return make


def replace(group, name, values):
    del group[name]
    if values is not None:
        group[name] = values


@pytest.fixture
def arrow(make_episodes, make_minari):
    """A Minari Arrow dataset; a function changes the columns (a dict) of episode 1; returns the folder."""

    def make(change):
        folder = make_minari(make_episodes(LENGTHS), "arrow")
        path = folder / "1" / "part-0.arrow"
        with pa.ipc.open_file(pa.BufferReader(path.read_bytes())) as reader:
            table = reader.read_all()
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        change(columns)
        table = pa.table(columns)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return folder

    return make


# Minari, HDF5


@pytest.mark.parametrize("column", ["observations", "actions", "rewards", "terminations", "truncations"])
def test_hdf5_missing_column(hdf5, refused, column):
    folder = hdf5(lambda file: replace(file["episode_1"], column, None))
    refused(folder, folder, "episode 1", f"'{column}'", "no such column")


@pytest.mark.parametrize("column", ["observations", "actions", "terminations", "truncations"])
def test_hdf5_ragged_column(hdf5, refused, column):
    def change(file):
        replace(file["episode_1"], column, file["episode_1"][column][:-1])

    folder = hdf5(change)
    refused(folder, folder, "episode 1", f"'{column}'", "rows", "ragged")


def test_hdf5_rows_of_different_lengths(hdf5, refused):
    def change(file):
        del file["episode_1/observations"]
        ragged = file["episode_1"].create_dataset("observations", (3,), h5py.vlen_dtype(np.float32))
        for i in range(3):
            ragged[i] = np.zeros(i + 2, np.float32)

    folder = hdf5(change)
    refused(folder, folder, "episode 1", "'observations'", "ragged")


@pytest.mark.parametrize("column", ["observations", "actions"])
def test_hdf5_misshapen_column(hdf5, refused, column):
    folder = hdf5(lambda file: replace(file["episode_1"], column, file["episode_1"][column][:, :1]))
    refused(folder, folder, "episode 1", f"'{column}'", "shape (1,)")


def test_hdf5_rewards_of_two_numbers(hdf5, refused):
    folder = hdf5(lambda file: replace(file["episode_1"], "rewards", np.zeros((2, 2))))
    refused(folder, folder, "episode 1", "'rewards'", "(2, 2)")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_hdf5_rewards_that_are_not_finite(hdf5, refused, value):
    def change(file):
        file["episode_1/rewards"][1] = value

    folder = hdf5(change)
    refused(folder, folder, "episode 1", "reward", value, "step 1")


@pytest.mark.parametrize("column", ["observation", "action"])
def test_hdf5_other_values_that_are_not_finite(hdf5, refused, column):
    def change(file):
        file[f"episode_2/{column}s"][3, 1] = np.nan

    folder = hdf5(change)
    refused(folder, folder, "episode 2", f"'{column}'", "nan at step 3")


def test_nan_rewards_are_refused_where_the_table_holds_no_rewards(hdf5, refused):
    def change(file):
        file["episode_1/rewards"][0] = np.nan

    folder = hdf5(change)
    table = gear.TableSpec({"action": gear.ColumnSpec((2,), np.float32)}, trajectory_length=8, capacity=16)
    refused(folder, folder, "episode 1", "reward", "nan", table=table)


def test_hdf5_empty_episode(hdf5, refused):
    def change(file):
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            keep = 1 if name == "observations" else 0
            replace(file["episode_1"], name, file["episode_1"][name][:keep])

    folder = hdf5(change)
    refused(folder, folder, "episode 1", "'rewards'", "empty episode")


def test_hdf5_flag_before_the_end(hdf5, refused):
    def change(file):
        file["episode_0/terminations"][1] = True

    folder = hdf5(change)
    refused(folder, folder, "episode 0", "'terminations'", "step 1 of 4")


def test_hdf5_text(hdf5, refused):
    folder = hdf5(lambda file: replace(file["episode_1"], "actions", ["left", "right"]))
    refused(folder, folder, "episode 1", "'actions'")


def test_hdf5_missing_episode(hdf5, refused):
    folder = hdf5(lambda file: replace(file, "episode_2", None))
    refused(folder, folder, "episode 2", "no such episode")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_hdf5_truncated_file(hdf5, refused, share):
    folder = hdf5(lambda file: None)
    path = folder / "main_data.hdf5"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    refused(folder, path, "HDF5")


def test_hdf5_file_gone(hdf5, refused):
    folder = hdf5(lambda file: None)
    (folder / "main_data.hdf5").unlink()
    refused(folder, folder)


def test_hdf5_damaged_in_the_middle(make_episodes, make_minari, refused):
    folder = make_minari(make_episodes(LENGTHS))
    path = folder / "main_data.hdf5"
    with h5py.File(path, "a") as file:
        rewards = file["episode_1/rewards"][:]
        del file["episode_1/rewards"]
        file["episode_1"].create_dataset("rewards", data=rewards, chunks=(2,), fletcher32=True)
        where = file["episode_1/rewards"].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[where] ^= 0xFF
    path.write_bytes(data)
    refused(folder, path, "episode 1", "'rewards'", "unreadable")


def test_metadata_gone_or_damaged(hdf5, refused):
    folder = hdf5(lambda file: None)
    metadata = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text("{")
    refused(folder, folder, "Minari cannot open")
    del metadata["total_episodes"]
    (folder / "metadata.json").write_text(json.dumps(metadata))
    refused(folder, folder, "total_episodes")
    (folder / "metadata.json").unlink()
    refused(folder, folder, "no dataset")


def test_no_such_dataset(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    refused("nothing/here-v0", "nothing/here-v0", tmp_path, "record_dataset.py")


# Minari, Arrow


@pytest.mark.parametrize("column", ["observations", "actions", "rewards", "terminations", "truncations"])
def test_arrow_missing_column(arrow, refused, column):
    folder = arrow(lambda columns: columns.pop(column))
    refused(folder, folder, "episode 1", f"'{column}'", "no such column")


def test_arrow_ragged_rows(arrow, refused):
    folder = arrow(lambda columns: columns.update(observations=pa.array([[1.0], [1.0, 2.0], [1.0]])))
    refused(folder, folder, "episode 1", "'observations'", "ragged")


@pytest.mark.parametrize("column", ["observations", "actions"])
def test_arrow_misshapen_column(arrow, refused, column):
    wide = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(21, np.float32)), 7)
    folder = arrow(lambda columns: columns.update({column: wide}))
    refused(folder, folder, "episode 1", f"'{column}'", "7 values")


@pytest.mark.parametrize("column", ["observations", "rewards", "terminations"])
def test_arrow_missing_values(arrow, refused, column):
    def change(columns):
        values = columns[column].to_pylist()
        columns[column] = pa.array([None, *values[1:]], columns[column].type)

    folder = arrow(change)
    refused(folder, folder, "episode 1", f"'{column}'", "missing values")


def test_arrow_missing_values_within_a_step(arrow, refused):
    values = pa.FixedSizeListArray.from_arrays(pa.array([None, *range(8)], pa.float32()), 3)
    folder = arrow(lambda columns: columns.update(observations=values))
    refused(folder, folder, "episode 1", "'observations'", "missing values")


def test_arrow_nan_rewards(arrow, refused):
    folder = arrow(lambda columns: columns.update(rewards=pa.array([np.nan, 0.0, 0.0])))
    refused(folder, folder, "episode 1", "reward", "nan", "step 0")


def test_arrow_empty_episode(arrow, refused):
    def change(columns):
        columns.update({name: values[:1] for name, values in columns.items()})

    folder = arrow(change)
    refused(folder, folder, "episode 1", "empty episode")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_arrow_truncated_file(arrow, refused, share):
    folder = arrow(lambda columns: None)
    path = folder / "1" / "part-0.arrow"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    refused(folder, folder / "1", "episode 1", "unreadable")


def test_arrow_missing_episode(arrow, refused):
    folder = arrow(lambda columns: None)
    shutil.rmtree(folder / "2")
    refused(folder, folder / "2", "episode 2")


def test_a_nested_column_without_an_entry(make_episodes, make_minari, refused):
    space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (3,)), "b": gym.spaces.Box(-1, 1, (3,))})
    folder = make_minari(make_episodes(LENGTHS, space=space), space=space)
    with h5py.File(folder / "main_data.hdf5", "a") as file:
        del file["episode_1/observations/b"]
    refused(folder, folder, "episode 1", "'observations/b'", columns={**COLUMNS, "observation": "observation/a"})


COLUMNS = {name: name for name in TABLE.columns}

# D4RL


@pytest.mark.parametrize("column", ["observations", "actions", "rewards", "terminals"])
def test_flat_missing_column(make_episodes, make_d4rl, refused, column):
    path = make_d4rl(make_episodes(LENGTHS), **{column: None})
    refused(path, path, "episode", f"'{column}'", "no such column")


@pytest.mark.parametrize("column", ["observations", "actions", "rewards", "terminals", "timeouts"])
def test_flat_ragged_column(make_episodes, make_d4rl, refused, column):
    path = make_d4rl(make_episodes(LENGTHS))
    with h5py.File(path, "a") as file:
        values = file[column][:8]
        del file[column]
        file[column] = values
    refused(path, path, "episode 2", f"'{column}'", "8 rows", "11")


def test_flat_misshapen_column(make_episodes, make_d4rl, refused):
    path = make_d4rl(make_episodes(LENGTHS), actions=np.zeros((11, 5), np.float32))
    refused(path, path, "episode 0", "'action'", "(5,)", "(2,)")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_flat_rewards_that_are_not_finite(make_episodes, make_d4rl, refused, value):
    rewards = np.zeros(11, np.float32)
    rewards[5] = value
    path = make_d4rl(make_episodes(LENGTHS), rewards=rewards)
    refused(path, path, "episode 1", "'reward'", value, "step 1")


@pytest.mark.parametrize("column", ["terminals", "timeouts"])
def test_flat_flags_that_are_no_flags(make_episodes, make_d4rl, refused, column):
    path = make_d4rl(make_episodes(LENGTHS), **{column: np.arange(11)})
    refused(path, path, "episode 0", f"'{column}'", "flag")


def test_flat_empty_file(make_episodes, make_d4rl, refused):
    path = make_d4rl(make_episodes((1,)), rewards=np.zeros(0))
    refused(path, path, "episode 0", "'rewards'", "0 rows")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_flat_truncated_file(make_episodes, make_d4rl, refused, share):
    path = make_d4rl(make_episodes(LENGTHS))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    refused(path, path, "HDF5")


def test_flat_no_such_file(refused, tmp_path):
    refused(tmp_path / "gone.hdf5", tmp_path / "gone.hdf5", "no such file")
    with pytest.raises(ValueError, match="no such file"):
        D4RLSource(tmp_path / "gone.hdf5")


def test_flat_next_observations_of_another_shape(make_episodes, make_d4rl, refused):
    path = make_d4rl(make_episodes(LENGTHS), timeouts=False, next_observations=np.zeros((11, 4)))
    refused(path, path, "'next_observations'", "(4,)")


def test_flat_scalar_column(make_episodes, make_d4rl, refused):
    path = make_d4rl(make_episodes(LENGTHS), actions=np.float32(1.0))
    refused(path, path, "'actions'")


# The table


@pytest.mark.parametrize(
    ("stored", "table", "word"),
    [
        (np.float32, np.int32, "dtype float32"),
        (np.float64, np.uint8, "dtype float64"),
        (np.int64, np.bool_, "dtype int64"),
        (np.complex64, np.float32, "dtype complex64"),
    ],
)
def test_wrong_dtype(make_episodes, make_d4rl, refused, stored, table, word):
    path = make_d4rl(make_episodes(LENGTHS), actions=np.ones((11, 2), stored))
    spec = gear.TableSpec({"action": gear.ColumnSpec((2,), table)}, trajectory_length=8, capacity=16)
    refused(path, path, "episode 0", "'action'", word, np.dtype(table).name, table=spec)


@pytest.mark.parametrize(("stored", "table"), [(300, np.uint8), (-1, np.uint8), (2**40, np.int32)])
def test_whole_numbers_out_of_range(make_episodes, make_d4rl, refused, stored, table):
    actions = np.zeros((11, 2), np.int64)
    actions[5, 1] = stored
    path = make_d4rl(make_episodes(LENGTHS), actions=actions)
    spec = gear.TableSpec({"action": gear.ColumnSpec((2,), table)}, trajectory_length=8, capacity=16)
    refused(path, path, "episode 1", "'action'", f"{stored} at step 1", table=spec)


def test_floats_out_of_range(make_episodes, make_d4rl, refused):
    actions = np.zeros((11, 2))
    actions[5, 1] = 1e300
    path = make_d4rl(make_episodes(LENGTHS), actions=actions)
    refused(path, path, "episode 1", "'action'", "1e+300 at step 1")


def test_whole_numbers_within_range_are_taken(make_episodes, make_d4rl):
    path = make_d4rl(make_episodes(LENGTHS), actions=np.full((11, 2), 255, np.int64))
    spec = gear.TableSpec({"action": gear.ColumnSpec((2,), np.uint8)}, trajectory_length=8, capacity=16)
    replay = gear.make_replay(spec)
    state, _ = load(replay, replay.init(), path, progress=False)
    assert int(np.asarray(state.columns["action"])[0, 0, 0, 0]) == 255


def test_bfloat16_tables_are_taken(make_episodes, make_d4rl):
    import jax.numpy as jnp

    spec = gear.TableSpec({"action": gear.ColumnSpec((2,), jnp.bfloat16)}, trajectory_length=8, capacity=16)
    path = make_d4rl(make_episodes(LENGTHS), actions=np.full((11, 2), 0.5, np.float64))
    replay = gear.make_replay(spec)
    state, _ = load(replay, replay.init(), path, progress=False)
    assert float(np.asarray(state.columns["action"])[0, 0, 0, 0]) == 0.5


def test_a_table_column_that_the_dataset_lacks(make_episodes, make_minari, refused):
    folder = make_minari(make_episodes(LENGTHS))
    spec = gear.TableSpec({"velocity": gear.ColumnSpec((), np.float32)}, trajectory_length=8, capacity=16)
    refused(folder, folder, "'velocity'", "no such column", table=spec)


@pytest.mark.parametrize(
    "columns",
    [
        {"observation": "observation"},
        {**COLUMNS, "extra": "reward"},
        ("observation", "action", "reward"),
    ],
)
def test_a_mapping_that_does_not_fit_the_table(make_episodes, make_minari, refused, columns):
    folder = make_minari(make_episodes(LENGTHS))
    refused(folder, "columns", columns=columns)


def test_a_mapping_of_something_else(make_episodes, make_minari):
    folder = make_minari(make_episodes(LENGTHS))
    replay = gear.make_replay(TABLE)
    with pytest.raises(TypeError, match=r"columns\['action'\].*the name of a dataset column"):
        load(replay, replay.init(), folder, columns={**COLUMNS, "action": 3}, progress=False)


def test_a_table_that_is_no_dict_needs_a_mapping(make_episodes, make_minari, refused):
    folder = make_minari(make_episodes(LENGTHS))
    spec = gear.TableSpec((gear.ColumnSpec((2,), np.float32),), trajectory_length=8, capacity=16)
    refused(folder, "columns", "None", table=spec)


def test_a_nested_dataset_column_for_a_flat_table_column(make_episodes, make_minari, refused):
    space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (3,))})
    folder = make_minari(make_episodes(LENGTHS, space=space), space=space)
    refused(folder, folder, "episode 0", "'observation'", "nested")


def test_table_spec_of_bad_data(hdf5, make_episodes, make_d4rl):
    folder = hdf5(lambda file: replace(file["episode_0"], "actions", None))
    with pytest.raises(ValueError, match="episode 0: column 'actions'"):
        table_spec(folder)
    with pytest.raises(ValueError, match="no such column"):
        table_spec(MinariSource(folder), columns={"x": "nothing"})


def test_errors_over_data_have_a_class(hdf5):
    folder = hdf5(lambda file: replace(file["episode_1"], "rewards", np.zeros((2, 2))))
    source = MinariSource(folder)
    with pytest.raises(DatasetError, match=f"^{folder}: episode 1: column 'rewards': got"):
        list(source)


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("kind", ["hdf5", "arrow", "flat"])
def test_damage_anywhere_is_a_value_error_or_harmless(make_episodes, make_minari, make_d4rl, kind, part):
    episodes = make_episodes(LENGTHS)
    path = dataset = make_d4rl(episodes) if kind == "flat" else make_minari(episodes, kind)
    if kind != "flat":
        path = dataset / {"hdf5": "main_data.hdf5", "arrow": "1/part-0.arrow"}[kind]
    data = bytearray(path.read_bytes())
    fifth = len(data) // 5
    data[part * fifth : (part + 1) * fifth] = bytes(fifth)
    path.write_bytes(data)
    with contextlib.suppress(ValueError):
        assert len(list(open_source(dataset))) >= 1
