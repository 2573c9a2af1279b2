"""What gear_jax promises beyond speed: the cost of an insert, its memory, and one compilation a shape.

Runs in a process of its own (`python -m gear_jax.bench.own_checks full|quick`, started by `runner`), because
peak memory belongs to a process. Prints one line of JSON.
"""

import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gear_jax as gear
from gear_jax.bench.engines.base import dispatch_at_once

_COMPILED = "/jax/core/compile/backend_compile_duration"


def _replay(capacity: int, steps: int, width: int, **options: Any) -> Any:
    columns = {"observation": gear.ColumnSpec((width,), jnp.float32)}
    table = gear.TableSpec(columns=columns, trajectory_length=steps, capacity=capacity)
    return gear.make_replay(table, **options)


def _batch(rows: int, steps: int, width: int) -> tuple[dict[str, jax.Array], jax.Array]:
    return {"observation": jnp.full((rows, steps, width), 7.0)}, jnp.full(rows, steps, jnp.int32)


def add_at_capacity(small: int, large: int, calls: int) -> dict[str, Any]:
    """Median seconds of `add` of one trajectory (100 x float32[16]) into full tables of two capacities."""
    tables = []
    values, lengths = _batch(1, 100, 16)
    for capacity in (small, large):
        replay = _replay(capacity, 100, 16)
        state = replay.init()
        fill_values, fill_lengths = _batch(1000, 100, 16)
        for _ in range(capacity // 1000):
            state, _ = replay.add(state, fill_values, fill_lengths)
        tables.append([replay, state, []])
    for _ in range(calls):
        for table in tables:
            replay, state, times = table
            start = time.perf_counter()
            state, _ = replay.add(state, values, lengths)
            jax.block_until_ready(state)
            times.append(time.perf_counter() - start)
            table[1] = state
    first, second = (statistics.median(table[2][5:]) for table in tables)
    return {"capacities": [small, large], "seconds": [first, second], "ratio": second / first}


def peak_of_add(rows: int) -> dict[str, Any]:
    """Peak resident bytes, beyond the start's, of adding `rows` trajectories at a time to a table of four
    times as many.

    A trajectory is 1000 x float32[64]; the table is filled, and half of it written again.
    """
    small = _replay(4, 1000, 64)  # loads and starts everything that an add needs
    state, _ = small.add(small.init(), *_batch(2, 1000, 64))
    jax.block_until_ready(state)
    replay = _replay(4 * rows, 1000, 64)
    before = _status("VmRSS")
    values, lengths = jax.block_until_ready(_batch(rows, 1000, 64))
    state = replay.init()
    for _ in range(6):
        state, _ = replay.add(state, values, lengths)
    jax.block_until_ready(state)
    peak = _status("VmHWM") - before
    needed = 5 * rows * 1000 * 64 * 4
    return {"table_and_batch": needed, "peak": peak, "ratio": peak / needed}


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def compilations(calls: int) -> dict[str, int]:
    """Programs compiled by the second and later calls of sample, update and add of one shape."""
    count = 0

    def listen(event: str, *_: Any, **__: Any) -> None:
        nonlocal count
        count += event == _COMPILED

    jax.monitoring.register_event_duration_secs_listener(listen)
    replay = _replay(64, 10, 4, selector=gear.selectors.Prioritized())
    state = replay.init()
    keys = list(jax.random.split(jax.random.key(0), calls))
    priorities = [jnp.full(8, float(i + 1)) for i in range(calls)]
    added = [
        ({"observation": np.full((4, 10, 4), float(i), np.float32)}, np.full(4, 10, np.int32)) for i in range(calls)
    ]
    first = 0
    for i in range(calls):
        state, _ = replay.add(state, *added[i])
        state, sample = replay.sample(state, keys[i], 8)
        state = replay.update_priorities(state, sample.handles, priorities[i])
        first = first or count
    return {"calls": calls, "first_call": first, "later_calls": count - first}


def main() -> int:
    """Prints the three results as JSON."""
    quick = sys.argv[1] == "quick"
    dispatch_at_once()
    found = {
        "peak_of_add": peak_of_add(200 if quick else 1000),
        "add_at_capacity": add_at_capacity(1000, 8000 if quick else 64_000, 60 if quick else 300),
        "compilations": compilations(20),
    }
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
