"""`top`: what learners and their rings are doing, live. No jax in here."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from gear_jax import metrics
from gear_jax.cli._output import Failure, table

_BAR = 24


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the screen: rows of cells, and columns that are aligned to the right."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    right: tuple[int, ...]


def run(paths: Sequence[str], once: bool, every: float) -> int:
    """Shows it once, or until Ctrl-C; returns the exit status."""
    if once:
        print("\n\n".join(_plain(s) for s in _sections(paths)) or _NOTHING)
        return 0
    try:
        from rich.console import Group
        from rich.live import Live
    except ImportError:
        return _repaint(paths, every)
    if not sys.stdout.isatty():
        return _repaint(paths, every)
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(Group(*([_rich(s) for s in _sections(paths)] or [_NOTHING])), refresh=True)
            time.sleep(every)


_NOTHING = (
    "nothing to show: no ring of actors, and no process that writes counters "
    "(gear_jax.metrics.Metrics([gear_jax.metrics.FileWriter()]))"
)


def _repaint(paths: Sequence[str], every: float) -> int:
    while True:
        text = "\n\n".join(_plain(s) for s in _sections(paths)) or _NOTHING
        clear = "\x1b[2J\x1b[H" if sys.stdout.isatty() else ""
        sys.stdout.write(f"{clear}{text}\n\n")
        sys.stdout.flush()
        time.sleep(every)


def _sections(paths: Sequence[str]) -> list[Section]:
    try:
        learners = metrics.published(paths)
    except ValueError as e:
        raise Failure(str(e)) from None
    found = [section for said in learners for section in _learner(said)]
    return found if paths else found + _rings()


def _learner(said: dict[str, Any]) -> list[Section]:
    numbers, rates = said["numbers"], said["rates"]
    age = max(0.0, time.time() - said["time"])
    step = f"step {numbers['step']:,}" + (f" ({rates['step']:,.1f}/s)" if "step" in rates else "")
    title = f"{said['name']} (process {said['pid']}{'' if said['alive'] else ', ended'}): {step}, {age:.1f} s ago"
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name, number in numbers.items():
        if name == "step" or "/actors/" in name:  # each ring has a part of its own
            continue
        group, _, rest = name.partition("/")
        rate = f"{rates[name]:,.1f}" if name in rates else ""
        groups.setdefault(group if rest else "", []).append((rest or name, _shown(number), rate, _bar(name, numbers)))
    sections = [Section(title, ("", "", "", ""), [], ())]
    for group, rows in groups.items():
        sections.append(Section(group, ("", "now", "a second", ""), rows, (1, 2)))
    return sections


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.4g}"


def _bar(name: str, numbers: dict[str, Any]) -> str:
    """For trajectories of a table, how full it is."""
    group, _, last = name.rpartition("/")
    whole = numbers.get(f"{group}/capacity" if group else "capacity")
    if last != "trajectories" or not whole:
        return ""
    full = round(_BAR * numbers[name] / whole)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {numbers[name] / whole:.0%}"


def _rings() -> list[Section]:
    from gear_jax.actors import RingError, open_ring
    from gear_jax.actors._clean import rings

    found = []
    try:
        there = rings()
    except ImportError:
        return []  # no compiled library: then this installation has no rings either
    for ring in there:
        if ring.problem or ring.stale:
            continue
        try:
            report = open_ring(str(ring.path)).report()
        except (RingError, ValueError):
            continue  # it has just gone
        waiting = report["committed"] - report["consumed"]
        title = (
            f"ring {ring.path.name.split('.', 2)[2]}: {report['committed']:,} trajectories committed, "
            f"{waiting:,} waiting, learner {report['learner']}"
        )
        rows = [
            (str(i), f"{a['life']}", f"{a['pid']}", f"{a['committed']:,}", f"{a['pending']:,}", f"{a['waited']:,.1f}")
            for i, a in enumerate(report["actors"])
        ]
        head = ("actor", "is", "process", "committed", "waiting", "waited, s")
        found.append(Section(title, head, rows, (2, 3, 4, 5)))
    return found


def _plain(section: Section) -> str:
    head = [section.head] if any(section.head) and section.rows else []
    body = table([*head, *section.rows], right=section.right) if section.rows else ""
    return "\n".join(x for x in (section.title, body) if x)


def _rich(section: Section) -> Any:
    from rich.table import Table
    from rich.text import Text

    if not section.rows:
        return Text(section.title, style="bold")
    made = Table(title=section.title, title_justify="left", box=None, show_header=any(section.head))
    for i, head in enumerate(section.head):
        made.add_column(head, justify="right" if i in section.right else "left")
    for row in section.rows:
        made.add_row(*(Text(cell) for cell in row))
    return made
