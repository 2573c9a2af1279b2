"""The recorder: a real MuJoCo environment, into a Minari dataset, into a table."""

import pathlib
import subprocess
import sys

import minari
import numpy as np
import pytest

import gear_jax as gear

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delenv("MINARI_DATASETS_PATH", raising=False)
    import record_dataset

    return record_dataset


class Constant:
    name = "constant"

    def __init__(self, rng):
        self._action = rng.uniform(-1, 1, size=1).astype(np.float32)

    def __call__(self, observation):
        return self._action


def contents(folder):
    return list(gear.datasets.MinariSource(folder))


@pytest.mark.parametrize("storage", ["hdf5", "arrow"])
def test_records_and_loads(recorder, tmp_path, storage):
    folder = recorder.record(tmp_path, environment="InvertedPendulum-v5", episodes=6, storage=storage, progress=False)
    replay = gear.make_replay(gear.datasets.table_spec(folder))
    state, summary = gear.datasets.load(replay, replay.init(), folder, progress=False)
    assert summary.episodes == 6 and summary.terminated == 6
    assert replay.stats(state)["steps"] == summary.steps
    assert minari.MinariDataset(folder / "data").env_spec.id == "InvertedPendulum-v5"
    assert [path.name for path in tmp_path.iterdir()] == ["invertedpendulum"]  # no scratch left


def test_a_relative_folder(recorder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = recorder.record("out/data", environment="InvertedPendulum-v5", episodes=2, progress=False)
    assert folder.is_absolute() and folder.is_relative_to(tmp_path)
    assert len(contents(folder)) == 2


def test_the_demo_environment_by_random_and_scripted_policies(recorder, tmp_path):
    drawn = []

    def draw(rng):
        drawn.append(recorder.draw_policy(rng))
        return drawn[-1]

    folder = recorder.record(tmp_path, episodes=6, draw=draw, progress=False)
    (first, *_) = contents(folder)
    assert len({policy.name for policy in drawn}) == 2
    assert first.truncated and not first.terminated and not first.unmarked_timeout


def test_the_same_arguments_record_the_same(recorder, tmp_path):
    options = {"environment": "InvertedPendulum-v5", "episodes": 3, "draw": Constant, "progress": False}
    a = contents(recorder.record(tmp_path / "a", seed=1, **options))
    b = contents(recorder.record(tmp_path / "b", seed=1, **options))
    c = contents(recorder.record(tmp_path / "c", seed=2, **options))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x.columns["observation"], y.columns["observation"])
    assert not np.array_equal(a[0].columns["action"][0], c[0].columns["action"][0])


def test_an_existing_recording_is_reused_or_refused(recorder, tmp_path):
    options = {"environment": "InvertedPendulum-v5", "episodes": 2, "progress": False}
    folder = recorder.record(tmp_path, **options)
    stamp = (folder / "data" / "main_data.hdf5").stat().st_mtime_ns
    assert recorder.record(tmp_path, **options) == folder
    assert (folder / "data" / "main_data.hdf5").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="overwrite=True"):
        recorder.record(tmp_path, seed=1, **options)
    recorder.record(tmp_path, seed=1, overwrite=True, **options)
    assert (folder / "data" / "main_data.hdf5").stat().st_mtime_ns != stamp


def test_a_recording_that_breaks_off_leaves_nothing(recorder, tmp_path):
    def draw(rng):
        draw.count += 1
        if draw.count == 3:
            raise KeyboardInterrupt
        return Constant(rng)

    draw.count = 0
    with pytest.raises(KeyboardInterrupt):
        recorder.record(tmp_path, environment="InvertedPendulum-v5", episodes=5, draw=draw, progress=False)
    assert not list(tmp_path.rglob("metadata.json"))


@pytest.mark.parametrize("options", [{"storage": "csv"}, {"episodes": 0}])
def test_bad_arguments(recorder, tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        recorder.record(tmp_path, **options)


def test_the_command(tmp_path):
    command = [sys.executable, "-W", "error", EXAMPLES / "record_dataset.py", "--env", "InvertedPendulum-v5"]
    command += ["--episodes", "3", "--seed", "5", "--storage", "arrow", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "3 episodes" in done.stdout and "best" in done.stdout
    assert "record invertedpendulum/mixed-arrow-v0" in done.stderr
