"""How a call is timed."""

import statistics
import time
from collections.abc import Callable
from typing import Any

_MOST_CALLS = 20_000
_WARM_CALLS = 2


def time_calls(run: Callable[[], Any], seconds: float, pipeline: bool = False, fewest: int = 3) -> tuple[float, int]:
    """Runs a call again and again, as a training loop would: a batch is dropped when the next one is there.

    Args:
        run: Does the operation once and returns when it is done. What it returns is freed inside the timing.
        seconds: How long to go on.
        pipeline: Take the mean over the run; a call may only hand over what was prepared during earlier ones.
        fewest: Least number of calls.

    Returns:
        Seconds per call (the median, or the mean of a pipeline) and the number of calls timed.
    """
    clock = time.perf_counter_ns
    result = None
    for _ in range(_WARM_CALLS):
        result = run()
    times: list[int] = []
    begin = clock()
    end = begin + int(seconds * 1e9)
    while len(times) < _MOST_CALLS:
        start = clock()
        result = run()
        stop = clock()
        times.append(stop - start)
        if stop >= end and len(times) >= fewest:
            break
    total = clock() - begin
    del result
    return (total / len(times) if pipeline else statistics.median(times)) / 1e9, len(times)
