"""Rings whose processes are all dead. No jax in here."""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
from collections.abc import Iterator

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
      stale: whether it can go: no living process has it open, or is making it.
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
    # Before it is opened here.
    with _alone(path) as alone:
        pass
    holders = _mapped_by(f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", str(status.st_ino))
    free = alone and not holders
    if _UNFINISHED in path.name:
        word = path.name.rsplit(_UNFINISHED, 1)[1]
        alive = word.isdecimal() and core().life_of(int(word)) in ("running", "stopped")
        return Found(path, status.st_size, holders, free and not alive, "never finished")
    try:
        ring = open_ring(path.name.split(".", 2)[2], directory)
    except RingElsewhereError as e:
        return Found(path, status.st_size, holders, False, str(e))
    except (RingError, ValueError) as e:  # of another version, or damaged: what it says about owners means nothing
        return Found(path, status.st_size, holders, free, str(e))
    lives = [ring.held.learner()[1], *(a["life"] for a in ring.report()["actors"])]
    alive = any(life in ("running", "stopped") for life in lives)
    return Found(path, status.st_size, holders, free and not alive)


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[bool]:
    """Whether no process has a file open as a ring, or is making it; inside, none can (ffi/actors/segment.h)."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait
    except OSError:  # it is gone, or nothing that could be a ring
        yield False
        return
    try:
        yield _locks(file, path)
    finally:
        os.close(file)


def _locks(file: int, path: pathlib.Path) -> bool:
    """Locks an open file, if nobody else has, and it is still the one of the path."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), path.lstat())
    except OSError:  # it is held, or gone, or in a file system that has no locks
        return False


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
        if not ring.stale:
            continue
        with _alone(ring.path) as alone:  # somebody may have found it meanwhile
            if alone:
                ring.path.unlink()
                removed.append(ring.path)
    return removed
