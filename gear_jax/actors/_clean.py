"""Rings whose processes are all dead. No jax in here."""

import dataclasses
import os
import pathlib

from gear_jax.actors._errors import RingElsewhereError, RingError, core
from gear_jax.actors._ring import DIRECTORY, PREFIX, open_ring

_UNFINISHED = ".new-"  # ffi/actors/segment.cc


@dataclasses.dataclass(frozen=True)
class Found:
    """A file of shared memory that is, or might be, a ring.

    Attributes:
      path: the file.
      nbytes: its size.
      holders: numbers of the living processes that have it mapped.
      stale: whether it can go: no living process holds it.
      problem: why it cannot be read, or None.
    """

    path: pathlib.Path
    nbytes: int
    holders: tuple[int, ...]
    stale: bool
    problem: str | None = None


def rings(directory: str = DIRECTORY) -> list[Found]:
    """All rings of this user, those that are damaged or were never finished included."""
    found = []
    for path in sorted(pathlib.Path(directory).glob(f"{PREFIX}{os.getuid()}.*")):
        try:
            found.append(_look(path, directory))
        except FileNotFoundError:
            continue  # somebody else has just removed it
    return found


def _look(path: pathlib.Path, directory: str) -> Found:
    status = path.stat()
    # Before it is mapped here.
    holders = _mapped_by(f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", str(status.st_ino))
    if _UNFINISHED in path.name:
        word = path.name.rsplit(_UNFINISHED, 1)[1]
        alive = word.isdecimal() and core().life_of(int(word)) in ("running", "stopped")
        return Found(path, status.st_size, holders, not holders and not alive, "never finished")
    try:
        ring = open_ring(path.name.split(".", 2)[2], directory)
    except RingElsewhereError as e:
        return Found(path, status.st_size, holders, False, str(e))
    except (RingError, ValueError) as e:  # of another version, or damaged: what it says about owners means nothing
        return Found(path, status.st_size, holders, not holders, str(e))
    lives = [ring.held.learner()[1], *(a["life"] for a in ring.report()["actors"])]
    alive = any(life in ("running", "stopped") for life in lives)
    return Found(path, status.st_size, holders, not holders and not alive)


def _mapped_by(device: str, inode: str) -> tuple[int, ...]:
    """The living processes that have a file mapped, as far as this user may know (those of the user, then)."""
    found = []
    for maps in pathlib.Path("/proc").glob("[0-9]*/maps"):
        try:
            with maps.open(errors="replace") as lines:
                if any(line.split(None, 5)[3:5] == [device, inode] for line in lines):
                    found.append(int(maps.parent.name))
        except OSError:
            continue  # it has ended, or is somebody else's
    return tuple(found)


def clean(directory: str = DIRECTORY) -> list[pathlib.Path]:
    """Removes the rings that no living process holds, and what is left of ones that were never finished.

    A ring that waits for its learner and its actors to be started again is removed too: nobody holds it.

    Returns:
      The files that are gone.
    """
    removed = []
    for ring in rings(directory):
        if ring.stale:
            ring.path.unlink(missing_ok=True)
            removed.append(ring.path)
    return removed
