"""`gear_jax.windows`: the step a sample's windows are placed at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from gear_jax import ops, windows
from gear_jax.specs import Window
from gear_jax.windows import Anchor, draw_anchor, make_anchor

LENGTHS = [0, 1, 2, 5, 9]


def drawn(anchor, lengths, turns=1, key=0):
    """[turns, len(lengths)]"""
    tiled = jnp.asarray(np.tile(np.asarray(lengths, np.int32), turns))
    t = jax.jit(lambda k, n: draw_anchor(anchor, k, n, 10**6))(jax.random.key(key), tiled)
    assert t.dtype == jnp.int32 and t.shape == tiled.shape
    return np.asarray(t).reshape(turns, len(lengths))


def test_start_and_end():
    assert drawn(make_anchor("start", [], 9), LENGTHS)[0].tolist() == [0, 0, 0, 0, 0]
    assert drawn(make_anchor("end", [], 9), LENGTHS)[0].tolist() == LENGTHS  # t = L, behind the last step


def test_uniform_is_any_step_equally_often():
    t = drawn(make_anchor("uniform", [Window(-50, 3)], 9), LENGTHS, 4000)
    assert (t[:, 0] == 0).all()
    for i, n in enumerate(LENGTHS[1:], 1):
        count = np.bincount(t[:, i], minlength=n)
        assert len(count) == n and (n == 1 or stats.chisquare(count).pvalue > 1e-4)


@pytest.mark.parametrize(
    "windows",
    [[Window(-2, 3)], [Window(0, 4)], [Window(-3, 2), Window(1, 2)], [Window(2, 2), None], [Window(-5, 1)], []],
)
def test_full_is_any_step_at_which_every_window_lies_inside(windows):
    """Against the definition, step by step."""
    anchor = make_anchor("full", windows, 9)
    placed = [w for w in windows if w is not None and w.length is not None]
    for n in range(1, 10):
        fits = [t for t in range(n) if all(t + w.offset >= 0 and t + w.offset + w.length <= n for w in placed)]
        assert (n >= anchor.min_length) == bool(fits), n
        if fits:
            t = drawn(anchor, [n] * 8, 64, key=n)
            assert sorted(set(t.reshape(-1).tolist())) == fits
    assert drawn(anchor, [0])[0, 0] == 0


def test_rules_that_cannot_be():
    with pytest.raises(ValueError, match=r"anchor: got 'mid', wanted one of \('uniform', 'full', 'start', 'end'\)"):
        make_anchor("mid", [], 9)
    assert make_anchor("full", [Window(-8, 9)], 9) == Anchor("full", 8, 9)
    with pytest.raises(
        ValueError, match=r"windows: got windows .* over 10 steps.*wanted at most trajectory_length = 9\."
    ):
        make_anchor("full", [Window(-8, 5), Window(0, 2)], 9)
    make_anchor("uniform", [Window(-8, 50)], 9)  # padded


def test_other_keys_draw_others():
    a, b = (drawn(make_anchor("uniform", [], 9), [9], 50, key=k) for k in (1, 2))
    assert (a != b).any()


@pytest.mark.parametrize("pad", ["around", "head", "tail"])
@pytest.mark.parametrize("window", [None, (0, 4), (-3, 5), (2, 1), (-20, 6), (9, 3), (1 - 2**31, 4)], ids=str)
def test_what_is_visible_is_what_a_gather_shows(window, pad):
    steps, anchors = 7, np.arange(-2, 10, dtype=np.int32)
    anchor, length = (x.reshape(-1) for x in np.meshgrid(anchors, np.arange(-1, 9, dtype=np.int32)))
    window = None if window is None else Window(*window, pad)
    column = jnp.zeros((1, 2, steps), jnp.uint8)
    wanted = ops.gather(column, np.ones_like(anchor), anchor, length, window)[1]
    got = windows.visible(window, jnp.asarray(anchor), jnp.asarray(length), steps)
    np.testing.assert_array_equal(got, wanted)
