"""What the commands share: how they print and how they fail. No jax in here."""

import sys
from collections.abc import Sequence

from gear_jax._host_memory import human

__all__ = ["Failure", "bars", "human", "table"]


class Failure(Exception):
    """Ends a command with a message and exit status 1, without a traceback."""


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Rows of cells in columns that line up, two spaces in; columns in `right` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row):
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return ("  " + "  ".join(cells)).rstrip()

    return "\n".join(line(row) for row in rows)


def bars(counts: Sequence[int], labels: Sequence[str], *, width: int = 40) -> str:
    """A histogram: a line for each count, its bar scaled to the largest. A count above 0 shows at least a sliver."""
    blocks = " ▏▎▍▌▋▊▉█"
    unicode = _prints(blocks)
    largest = max([1, *counts])
    rows = []
    for label, count in zip(labels, counts, strict=True):
        eighths = max(1, round(count / largest * width * 8)) if count else 0
        full, part = divmod(eighths, 8)
        bar = "█" * full + blocks[part] * (part > 0) if unicode else "#" * -(-eighths // 8)
        rows.append((label, f"{count:,}", bar))
    return table(rows, right=(0, 1))


def _prints(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
