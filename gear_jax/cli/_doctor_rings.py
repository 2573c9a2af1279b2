"""`doctor`: the rings of actors in shared memory; `--clean-shm` removes those of the dead. No jax in here."""

from gear_jax.actors import _clean
from gear_jax.cli._output import human, table


def report() -> str:
    """A line for each ring of this user."""
    try:
        found = _clean.rings()
    except ImportError:
        return table([("", "not looked at: the compiled library is missing or does not load")])
    if not found:
        return table([("none", "")])
    rows = []
    for ring in found:
        state = f"held by process {', '.join(map(str, ring.holders))}" if ring.holders else "in use"
        if ring.stale:
            state = "no living process holds it: `python -m gear_jax doctor --clean-shm` removes it"
        rows.append((ring.path.name, human(ring.nbytes), state + (f" ({ring.problem})" if ring.problem else "")))
    return table(rows)


def clean() -> int:
    """Removes stale rings and says which; returns the exit status."""
    gone = _clean.clean()
    for path in gone:
        print(f"removed {path}")
    kept = _clean.rings()
    print(f"{len(gone)} ring(s) removed, {len(kept)} in use")
    return 0
