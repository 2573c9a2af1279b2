"""Runs rows one after the other; what is known is handed on after each."""

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from gear_jax.bench.gpu import machine
from gear_jax.bench.gpu.bench import Bench, OutOfTime
from gear_jax.bench.gpu.findings import Findings, Wrong
from gear_jax.bench.gpu.rows import ROWS
from gear_jax.bench.gpu.sizes import Sizes


def run(
    sizes: Sizes, names: Sequence[str], say: Callable[[str], None], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Runs rows.

    Args:
      sizes: how large everything is.
      names: the rows' names; they run in the order of `ROWS`.
      say: shows progress.
      save: is given the result so far, after each row.

    Returns:
      {"machine", "options", "rows": {name: {"memcpy", "figures", "targets", "peers", "notes", "seconds"}}}. A row that
      did not end has "wrong", "failed" or "stopped" with the reason, beside what it had found by then.
    """
    bench = Bench(sizes, say)
    bench.copies()
    result: dict[str, Any] = {
        "machine": machine.describe(),
        "options": {"size": sizes.name, "limit": sizes.limit, "rows": list(names)},
        "memcpy": bench.no_copies or "measured before each row",
        "rows": {},
    }
    chosen = [row for row in ROWS if row.name in names]
    for place, row in enumerate(chosen):
        say(f"{bench.spent():5.1f} s  {row.name}: {row.about}")
        found, begin = Findings(bench.copies()), time.monotonic()
        ended: dict[str, str] = {}
        try:
            bench.check_time()
            row.run(bench, found)
        except OutOfTime as error:
            ended = {"stopped": str(error)}
        except Wrong as error:
            ended = {"wrong": str(error)}
        except Exception as error:  # the other rows still count; the table says what it was
            traceback.print_exc()
            ended = {"failed": f"{type(error).__name__}: {error}"[:500]}
        # A row that broke off may have consumed a table.
        later = set() if ended else {name for other in chosen[place + 1 :] for name in other.tables}
        bench.drop(set(bench.layouts) - later)
        result["rows"][row.name] = found.as_dict() | ended | {"seconds": time.monotonic() - begin}
        for reason in ended.items():
            say("  {}: {}".format(*reason))
        save(result)
    return result
