import numpy as np

from gear_jax.bench.workloads import workloads


def test_every_step_tells_its_trajectory_and_its_place(tiny):
    ids = np.array([0, 3, tiny.stored - 1, tiny.stored + 5])
    codes = tiny.codes(tiny.trajectories(ids))
    assert np.array_equal(codes // tiny.steps, np.repeat(ids[:, None], tiny.steps, 1))
    assert np.array_equal(codes % tiny.steps, np.tile(np.arange(tiny.steps), (len(ids), 1)))


def test_trajectories_have_the_columns_of_the_workload(tiny):
    data = tiny.trajectories(np.arange(3))
    for column in tiny.columns:
        assert data[column.name].shape == (3, tiny.steps, *column.shape)
        assert data[column.name].dtype == column.dtype


def test_values_differ_between_trajectories_and_repeat(tiny):
    first, again = tiny.trajectories(np.arange(4)), tiny.trajectories(np.arange(4))
    for column in tiny.columns:
        assert np.array_equal(first[column.name], again[column.name])
        assert not np.array_equal(first[column.name][0], first[column.name][1])


def test_lengths_lie_between_one_and_all_steps(windowed):
    lengths = windowed.lengths(np.arange(1000))
    assert lengths.min() == 1 and lengths.max() == windowed.steps


def test_chunks_hold_every_trajectory_once(tiny):
    chunks = tiny.chunks(chunk_bytes=10_000)
    assert np.array_equal(np.concatenate(chunks), np.arange(tiny.stored))
    assert len({len(chunk) for chunk in chunks}) == 1


def test_sizes_are_those_that_are_promised():
    full = workloads()
    assert full["S1a"].step_bytes * full["S1a"].steps == 60_000
    assert abs(full["S1b"].step_bytes * full["S1b"].steps - 12e6) < 0.5e6
    assert full["S2"].row_bytes(full["S2"].rows[0]) == 32 * 100 * 388
    assert (full["S3"].stored, full["S4"].stored) == (500_000, 1_000_000)
    assert full["S5"].row_bytes(full["S5"].rows[0]) == 64 * 20 * (84 * 84 * 4 + 4)


def test_codes_are_exact_in_their_columns():
    for workload in workloads().values():
        most = (workload.stored + 10_000) * workload.steps
        dtype = workload.column(workload.code_column).dtype
        assert most < {"float32": 2**24, "int32": 2**31, "uint8": 2**32}[dtype], workload.name
