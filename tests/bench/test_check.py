import numpy as np
import pytest

from gear_jax.bench.check import Batch, WrongBatch, check_batch, check_priorities


def _windows(workload, ids):
    """The right batch: the last W steps, zeros and a false mask before the first."""
    lengths, width = workload.lengths(ids), workload.window
    whole = workload.trajectories(ids)
    mask = np.arange(width) >= width - np.minimum(lengths, width)[:, None]
    data = {}
    for name, values in whole.items():
        data[name] = np.zeros((len(ids), width, *values.shape[2:]), values.dtype)
        for row, length in enumerate(lengths):
            kept = min(length, width)
            data[name][row, width - kept :] = values[row, length - kept : length]
    return data, mask


@pytest.fixture
def right(windowed):
    ids = np.arange(16) * 2
    return windowed, ids, *_windows(windowed, ids)


def test_a_right_batch_passes(right):
    workload, ids, data, mask = right
    assert not mask.all()
    drawn = check_batch(workload, 16, Batch(data, mask), workload.stored)
    assert np.array_equal(drawn, ids)


def test_whole_trajectories_pass(tiny):
    if tiny.window:
        pytest.skip("windows have their own test")
    ids = np.arange(24)
    drawn = check_batch(tiny, 24, Batch(tiny.trajectories(ids)), tiny.stored if tiny.alpha is None else 24)
    assert np.array_equal(drawn, ids)


def _changed(name, change):
    def apply(data, mask):
        change(data[name], mask)

    return apply


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_changed("embedding", lambda x, _: x.__setitem__((3, -1, 2), -5.0)), "not the bytes"),
        (_changed("embedding", lambda x, _: x.__setitem__(slice(None), np.roll(x, 1, 0))), "not the bytes"),
        (
            _changed("token", lambda x, _: x.__setitem__(slice(None), np.roll(x, 1, 1))),
            "trajectories|consecutive|end",
        ),
        (_changed("token", lambda x, _: x.__setitem__((0, -1), 10**6)), "never stored|mixes|mask"),
        (lambda data, mask: mask.__setitem__((0, 0), not mask[0, 0]), "mask"),
    ],
    ids=["value", "rows swapped", "shifted", "unknown step", "mask"],
)
def test_a_wrong_batch_is_found(right, spoil, text):
    workload, _, data, mask = right
    spoil(data, mask)
    with pytest.raises(WrongBatch, match=text):
        check_batch(workload, 16, Batch(data, mask), workload.stored)


def test_padding_that_is_not_zero_is_found(right):
    workload, _, data, mask = right
    data["embedding"][np.nonzero(~mask)] = 9.0
    with pytest.raises(WrongBatch, match="not the bytes"):
        check_batch(workload, 16, Batch(data, mask), workload.stored)


def test_the_same_trajectory_again_and_again_is_found(windowed):
    data, mask = _windows(windowed, np.full(16, 3))
    with pytest.raises(WrongBatch, match="different trajectories"):
        check_batch(windowed, 16, Batch(data, mask), windowed.stored)


def test_shape_dtype_and_missing_columns_are_found(right):
    workload, _, data, mask = right
    for bad, text in [
        ({"token": data["token"]}, "missing"),
        (data | {"embedding": data["embedding"][:, 1:]}, "shape"),
        (data | {"embedding": data["embedding"].astype(np.float64)}, "float64"),
    ]:
        with pytest.raises(WrongBatch, match=text):
            check_batch(workload, 16, Batch(bad, mask), workload.stored)


def test_loose_windows_may_cross_an_end_but_hold_what_was_stored(windowed):
    codes = np.arange(16)[:, None] * 13 + np.arange(4)
    data = {c.name: windowed.values(c, codes) for c in windowed.columns}
    check_batch(windowed, 16, Batch(data, placement="loose"), windowed.stored)
    with pytest.raises(WrongBatch):
        check_batch(windowed, 16, Batch(data, placement="within"), windowed.stored)


def test_ignored_priorities_and_wrong_weights_are_found():
    favoured, rng = np.arange(100), np.random.default_rng(0)
    drawn = np.concatenate([rng.integers(0, 100, 950), rng.integers(100, 10_000, 50)])
    weight = np.where(drawn < 100, 0.1, 1.0)
    check_priorities(favoured, drawn, weight)
    with pytest.raises(WrongBatch, match="ignored"):
        check_priorities(favoured, rng.integers(0, 10_000, 1000), None)
    with pytest.raises(WrongBatch, match="weight"):
        check_priorities(favoured, drawn, rng.uniform(size=1000))
    with pytest.raises(WrongBatch, match="smaller"):
        check_priorities(favoured, drawn, np.where(drawn < 100, 1.0, 0.1))
