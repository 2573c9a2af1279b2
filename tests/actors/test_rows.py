"""How a drain's trajectories are spread over rows."""

import numpy as np
import pytest

from gear_jax.actors._rows import bucket, places


@pytest.mark.parametrize("most, multiple", [(1, 1), (5, 1), (32, 1), (100, 8), (1024, 1)])
def test_few_sizes_hold_every_number(most, multiple):
    sizes = {n: bucket(n, most, multiple) for n in range(1, most + 1)}
    assert all(a >= n and a % multiple == 0 for n, a in sizes.items())
    assert len(set(sizes.values())) <= 2 + np.log(most) / np.log(4)
    assert list(sizes.values()) == sorted(sizes.values())
    assert sizes[1] == multiple


@pytest.mark.parametrize("a", [1, 2, 7, 16])
def test_rows_rise_and_every_row_has_its_turn(a):
    for n in range(1, a + 1):
        seen = np.zeros(a, int)
        for turn in range(a):
            at = places(n, a, turn)
            assert len(at) == n and (np.diff(at) > 0).all() and 0 <= at[0] and at[-1] < a
            seen[at] += 1
        assert (seen == n).all()
