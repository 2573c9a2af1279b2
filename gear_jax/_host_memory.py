"""Page-locked host memory: what XLA's pool gives a table, and what the machine has. No jax in here.

XLA takes host memory for arrays in `pinned_host` from a pool, one for each GPU of a process. The pool is read from the
environment when the backend starts, grows by regions of twice the last one's size, and gives nothing back.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from gear_jax._errors import message

GIB = 1 << 30
LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # in GiB, whatever its name says
PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
_DEFAULT_GIB, _DEFAULT_GIB_PREALLOCATED = 64, 16
_ALIGNMENT = 256  # what the pool rounds up to
_FIRST_REGION = 2 << 20
_SPLIT = 128 << 20  # the pool hands out a free piece whole if less than this would be left of it
_UNLIMITED = 1 << 60  # control groups of version 1 say "no limit" with a number near 2**63
_ROOT = pathlib.Path("/")


@dataclasses.dataclass(frozen=True)
class Pool:
    """XLA's pool of page-locked memory.

    Attributes:
      limit: the most bytes it takes.
      preallocated: whether it takes them all when the backend starts.
    """

    limit: int
    preallocated: bool = False


def pool(environ: Mapping[str, str] = os.environ) -> Pool:
    """The pool that XLA makes in an environment; what XLA cannot read counts as not set, as it does there."""
    preallocated = environ.get(PREALLOCATE, "").lower() in ("1", "true")
    try:
        gib = int(environ[LIMIT])
    except (KeyError, ValueError):
        gib = _DEFAULT_GIB_PREALLOCATED if preallocated else _DEFAULT_GIB
    return Pool(gib * GIB, preallocated)


def locked(sizes: Sequence[int], pool: Pool) -> int | None:
    """The bytes that a new pool page-locks to hold arrays of `sizes` bytes, made in this order; None: they do not fit.

    More than their sum: a region is twice as large as the last one until it holds the array that it is for.
    """
    taken, free, region = 0, [], min(_FIRST_REGION, pool.limit)
    if pool.preallocated:
        taken, free = pool.limit, [pool.limit]
    for size in sizes:
        size = max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT
        piece = min((f for f in free if f >= size), default=None)
        if piece is not None:
            free.remove(piece)
        else:
            room = (pool.limit - taken) // _ALIGNMENT * _ALIGNMENT
            if size > room:
                return None
            fits = size <= region
            while size > region:
                region *= 2
            piece = min(region, room)
            taken += piece
            region *= 2 if fits else 1
        if piece >= 2 * size or piece - size >= _SPLIT:
            free.append(piece - size)
    return taken


def order(sizes: Sequence[int], pool: Pool) -> list[int]:
    """The order in which to make arrays of `sizes` bytes, as their numbers: by size, the way that locks less."""
    up = sorted(range(len(sizes)), key=lambda i: sizes[i])
    taken = [locked([sizes[i] for i in o], pool) for o in (up[::-1], up)]
    return up if taken[1] is not None and (taken[0] is None or taken[1] < taken[0]) else up[::-1]


def _locked(sizes: Sequence[int], pool: Pool) -> int | None:
    return locked([sizes[i] for i in order(sizes, pool)], pool)


def limit_for(sizes: Sequence[int]) -> tuple[int, int]:
    """The least `LIMIT`, in GiB, that a new pool needs for arrays of `sizes`, and one with room for other arrays."""

    def fitting(gib: int) -> int:
        while _locked(sizes, Pool(gib * GIB)) is None:
            gib += 1
        return gib

    least = fitting(-(-sum(sizes) // GIB))
    return least, fitting(least + max(1, least // 16))


@dataclasses.dataclass(frozen=True)
class Group:
    """A control group that limits this process.

    Attributes:
      path: its directory.
      limit: bytes that its processes may take together.
      left: bytes of them that are free, or could be freed.
    """

    path: pathlib.Path
    limit: int
    left: int


def groups(root: pathlib.Path = _ROOT) -> list[Group]:
    """The control groups (version 1 or 2; of a container, say) that limit the memory of this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, path in (x.split(":", 2) for x in lines if x.count(":") >= 2):
        mounts, names = ("sys/fs/cgroup", "sys/fs/cgroup/unified"), ("memory.max", "memory.current", "inactive_file")
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            mounts = ("sys/fs/cgroup/memory",)
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for mount in mounts:
            found += _groups_above(root / mount, path, *names)
    return found


def _groups_above(mount: pathlib.Path, path: str, limit: str, usage: str, freeable: str) -> Iterator[Group]:
    # In a container the path may be the host's, and the mount only the container's own group.
    group = mount / path.strip("/")
    for directory in (group, *group.parents):
        if directory != mount and mount not in directory.parents:
            return
        most, used = _number(directory / limit), _number(directory / usage)
        if most is not None and used is not None and most < _UNLIMITED:
            yield Group(directory, most, max(0, most - used + _field(directory / "memory.stat", freeable)))


def available(root: pathlib.Path = _ROOT) -> int | None:
    """Bytes that can still be page-locked: the machine's available memory, or what a control group leaves of it.

    None where the kernel does not say.
    """
    machine = _field(root / "proc/meminfo", "MemAvailable:") << 10
    left = [g.left for g in groups(root)] + ([machine] if machine else [])
    return min(left, default=None)


def _number(path: pathlib.Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def _field(path: pathlib.Path, name: str) -> int:
    """The number behind a name in a file of lines `name number`; 0 where there is none."""
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return next((int(x[1]) for x in lines if len(x) > 1 and x[0] == name), 0)
    except (OSError, ValueError):
        return 0


def problem(sizes: Sequence[int], platform: str, environ: Mapping[str, str], available: int | None) -> str | None:
    """Why arrays of `sizes` bytes cannot be made in `pinned_host`, and what to do; None if they can.

    Args:
      sizes: of the arrays, made in the `order` of this module.
      platform: of the device; on "cpu" nothing is page-locked, and this is None.
      environ: what the backend was started with.
      available: bytes that can still be page-locked; None: not known.
    """
    if platform == "cpu":
        return None
    total, now = sum(sizes), pool(environ)
    least, roomy = limit_for(sizes)
    if now.preallocated:
        available = None  # the pool has what it will ever have
    if available is not None and total > available:
        return message(
            "page-locked memory", got=f"{human(available)} of host memory that is free, or that the container may take",
            wanted=f"{human(total)}, the table's columns",
            fix="Lower TableSpec.capacity or trajectory_length, or give the machine or the container more memory.",
        )  # fmt: skip
    taken = _locked(sizes, now)
    if taken is None:
        return message(
            "page-locked memory", got=f"XLA's limit of {now.limit // GIB} GiB for each GPU",
            wanted=f"{least} GiB, for columns of {human(total)}",
            fix=f"Set {LIMIT}={roomy} before jax starts its backend.",
        )  # fmt: skip
    if available is not None and taken > available:
        # The pool would go beyond the table to the next power of two; its limit holds it back.
        return message(
            "page-locked memory", got=f"a pool of XLA's that grows to {human(taken)} for columns of {human(total)}",
            wanted=f"at most {human(available)}, the host memory that is free or that the container may take",
            fix=f"Set {LIMIT}={least} before jax starts its backend.",
        )  # fmt: skip
    return None


def human(n: float) -> str:
    """Bytes as text: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} TiB"
