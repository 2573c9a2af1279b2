"""How the trajectories of a drain are spread over the rows of one `add`. No jax in here."""

import numpy as np


def bucket(n: int, most: int, multiple: int = 1) -> int:
    """A, the rows of the call: n or more, one of few numbers (`most` divided by powers of 4), so that it compiles
    seldom.

    Args:
      n: trajectories, 1 to `most`.
      most: R, of the ring.
      multiple: A is a multiple of this.
    """
    a = -(-most // multiple) * multiple
    while a > 1:
        less = -(-a // (4 * multiple)) * multiple
        if less < n or less == a:
            break
        a = less
    return a


def places(n: int, a: int, turn: int) -> np.ndarray:
    """Which of A rows the n trajectories take, in their order: `int64[n]`, rising.

    A table's rule of placement goes by the row: row k of A may go to the partitions around k / A of all. The rows
    between that stay empty are spread evenly, and move on by one each `turn`, so that no partition is left out.
    """
    if n == a:
        return np.arange(a)
    gaps = (turn + np.arange(a - n) * a // (a - n)) % a
    return np.delete(np.arange(a), gaps)
