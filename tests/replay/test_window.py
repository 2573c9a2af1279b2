"""Windows and anchors of whole samples, against the rule as the documentation has it."""

import jax
import numpy as np
import pytest
from scipy import stats

import gear_jax as gear

T, C, B = 6, 4, 512
WINDOWS = {
    "whole": gear.Window(),
    "none": None,
    "here": gear.Window(0, 1),
    "past": gear.Window(-3, 4, "around", -1),
    "past_head": gear.Window(-3, 4, "head", -2),
    "past_tail": gear.Window(-3, 4, "tail", -3),
    "both": gear.Window(-2, 5, "around"),
    "both_tail": gear.Window(-2, 5, "tail", 9),
    "both_head": gear.Window(-2, 5, "head", 8),
    "future": gear.Window(1, 4, "around"),
    "future_head": gear.Window(1, 4, "head"),
    "far_off": gear.Window(50, 2, "tail", 5),
    "far_before": gear.Window(-(2**31) + 1, 2, "head", 6),
    "longer_than_T": gear.Window(-8, 17, "tail"),
}
FULL = {"whole": gear.Window(), "past": gear.Window(-2, 2), "future": gear.Window(1, 2), "here": gear.Window(0, 1)}


def expected(column, length, anchor, window):
    """Values and mask of one row; `column` holds what the slot holds, T steps."""
    window = window or gear.Window()
    whole = window.length is None
    first, width = (0, T) if whole else (anchor + window.offset, window.length)
    steps = [first + w for w in range(width)]
    valid = [s for s in steps if 0 <= s < length]
    padding = [None] * (width - len(valid))
    if window.pad == "head":
        steps = padding + valid
    elif window.pad == "tail":
        steps = valid + padding
    steps = [s if s is not None and 0 <= s < length else None for s in steps]
    return [window.pad_value if s is None else column[s] for s in steps], [s is not None for s in steps]


def table(windows, anchor):
    columns = {name: gear.ColumnSpec((), np.int32) for name in windows}
    return gear.make_replay(gear.TableSpec(columns, T, C), windows=windows, anchor=anchor)


def fill(replay, lengths):
    """Slots filled to the brim with a stale trajectory, then over with shorter ones."""
    names = replay.config.names
    stale = np.full((C, T), -7777, np.int32)
    state, _ = replay.add(replay.init(), dict.fromkeys(names, stale), np.full(C, T, np.int32))
    values = np.arange(1, C + 1, dtype=np.int32)[:, None] * 100 + np.arange(T, dtype=np.int32)
    state, handles = replay.add(state, dict.fromkeys(names, values), np.asarray(lengths, np.int32))
    assert handles.slot.tolist() == list(range(C))
    return state, values


@pytest.mark.parametrize("anchor", ["uniform", "start", "end"])
def test_every_row_is_what_the_rule_says(anchor):
    replay = table(WINDOWS, anchor)
    lengths = [1, 3, T, 4]
    state, values = fill(replay, lengths)
    _, s = replay.sample(state, jax.random.key(0), B)
    s = jax.tree.map(np.asarray, s)
    assert s.valid.all()
    for b in range(B):
        slot, t = s.handles.slot[b], s.anchor[b]
        assert s.length[b] == lengths[slot]
        allowed = {"uniform": range(lengths[slot]), "start": [0], "end": [lengths[slot]]}[anchor]
        assert t in allowed
        for name, window in WINDOWS.items():
            data, mask = expected(values[slot], lengths[slot], t, window)
            np.testing.assert_array_equal(s.data[name][b], data, err_msg=f"{name}, t = {t}, slot {slot}")
            np.testing.assert_array_equal(s.mask[name][b], mask, err_msg=f"{name}, t = {t}, slot {slot}")
    # A window that reaches no step is all padding, and its row is valid.
    assert (s.data["far_off"] == 5).all() and not s.mask["far_off"].any()
    assert (s.data["far_before"] == 6).all() and not s.mask["far_before"].any()
    if anchor == "uniform":
        for slot, n in enumerate(lengths):
            count = np.bincount(s.anchor[s.handles.slot == slot], minlength=n)
            assert n == 1 or stats.chisquare(count).pvalue > 1e-4


def test_full_keeps_every_window_inside_and_passes_over_what_is_too_short():
    replay = table(FULL, "full")
    lengths = [4, 5, T, 3]  # the windows reach from t - 2 to t + 2: five steps
    state, values = fill(replay, lengths)
    _, s = replay.sample(state, jax.random.key(0), B)
    s = jax.tree.map(np.asarray, s)
    assert set(s.handles.slot) == {1, 2}
    np.testing.assert_array_equal(s.probability, np.float32(0.5))
    assert all(s.mask[name].all() for name in ("past", "future", "here"))
    for b in range(B):
        for name, window in FULL.items():
            data, _ = expected(values[s.handles.slot[b]], s.length[b], s.anchor[b], window)
            np.testing.assert_array_equal(s.data[name][b], data)
    assert set(s.anchor[s.length == 5]) == {2} and set(s.anchor[s.length == T]) == {2, 3}
    count = np.bincount(s.anchor[s.length == T])[2:]
    assert stats.chisquare(count).pvalue > 1e-4


def test_full_with_nothing_long_enough():
    replay = table(FULL, "full")
    state, _ = fill(replay, [1, 2, 3, 4])
    assert not replay.can_sample(state)
    state, s = replay.sample(state, jax.random.key(0), B)
    assert not s.valid.any() and not s.mask["whole"].any() and (s.anchor == 0).all()
    assert replay.stats(state)["trajectories"] == C


def test_a_bad_value_of_padding_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match=r"pad_value: got 1\.5, wanted .*int32"):
        table({"a": gear.Window(0, 2, pad_value=1.5)}, "start")
