"""How calls of JAX, of torch and of NumPy are timed. All times are seconds."""

import statistics
import time
from collections.abc import Callable
from typing import Any

_WARM = 3
_LONG = 0.1  # seconds of what needs no third warm call
_MOST = 400
_MOST_ROUNDS = 40


def in_flight(call: Callable[[int], Any], wait: Callable[[Any], Any], rounds: int, seconds: float) -> float:
    """Time of a call where calls follow one another and only the last one is waited for.

    Args:
      call: does the i-th call and returns its result, which is dropped when the next one is there.
      wait: waits for a result, and so for all calls before it.
      rounds: the median of so many repetitions counts.
      seconds: length of a repetition, about.
    """
    for i in range(_WARM):
        wait(call(i))
    start = time.perf_counter()
    wait(call(_WARM))
    once = time.perf_counter() - start
    calls = max(3, min(_MOST, int(seconds / max(once, 1e-7))))
    found = []
    for _ in range(rounds):
        result = None
        start = time.perf_counter()
        for i in range(calls):
            result = call(i)
        wait(result)
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found)


def each(call: Callable[[int], Any], wait: Callable[[Any], Any], calls: int) -> tuple[list[float], list[float]]:
    """Times of single calls, each waited for: until the call returns, and until its result is there."""
    for i in range(_WARM):
        wait(call(i))
    handed, done = [], []
    for i in range(calls):
        start = time.perf_counter()
        result = call(i)
        middle = time.perf_counter()
        wait(result)
        end = time.perf_counter()
        handed.append(middle - start)
        done.append(end - start)
    return handed, done


def percentile(times: list[float], percent: float) -> float:
    """The value that `percent` of the times are not above."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def between(short: Callable[[], Any], long: Callable[[], Any], more: int, rounds: int, seconds: float) -> float:
    """Time on the device of one piece of work: `long` does `more` of them more than `short`. Both wait.

    What a call costs beside the work is in both, so that it cancels out. The median counts of `rounds` repetitions, or
    of as many more (`_MOST_ROUNDS` at most) as fit into `seconds`. Where the noise is above the work, `long` over all
    its pieces is returned, which is too much rather than too little.
    """
    once = 0.0
    for warm in range(_WARM):
        start = time.perf_counter()
        short()
        long()
        once = time.perf_counter() - start
        if warm and once > _LONG:
            break
    found, whole = [], []
    for _ in range(max(rounds, min(_MOST_ROUNDS, int(seconds / max(once, 1e-7))))):
        times = []
        for run in (short, long):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        found.append((times[1] - times[0]) / more)
        whole.append(times[1] / (more + 1))
    middle = statistics.median(found)
    return middle if middle > 0 else statistics.median(whole)
