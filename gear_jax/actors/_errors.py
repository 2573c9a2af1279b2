"""The errors of rings, one class for each thing that a caller may want to tell apart. No jax in here."""

import contextlib
from collections.abc import Iterator
from typing import Any

from gear_jax import _native
from gear_jax._errors import message


class RingError(RuntimeError):
    """Something is wrong with a ring or with what one did with it."""


class RingMissingError(RingError):
    """There is no ring of that name."""


class RingForeignError(RingError):
    """The file is no ring, one of another version or other columns, or damaged or cut short."""


class RingElsewhereError(RingForeignError):
    """It is a ring of another PID namespace (a container): whether its processes live cannot be told from here."""


class RingBusyError(RingError):
    """Another living process has what was asked for: the ring's learner, or an actor's lane."""


class RingSpaceError(RingError):
    """There is not enough shared memory for the ring."""


class RingClosedError(RingError):
    """The learner has closed the ring."""


class RingTimeoutError(RingError, TimeoutError):
    """The deadline has passed."""


class ActorFailedError(RingError):
    """An actor's process has ended with an error, and is not to be started again."""


def error(kind: type[RingError], what: str, *, got: object, wanted: object, fix: str) -> RingError:
    """An error of a class of this module, with the text of `message`."""
    return kind(message(what, got=got, wanted=wanted, fix=fix))


_KINDS = {
    "missing": RingMissingError,
    "exists": RingBusyError,
    "space": RingSpaceError,
    "foreign": RingForeignError,
    "elsewhere": RingElsewhereError,
    "busy": RingBusyError,
    "layout": RingError,
}


def core() -> Any:
    """The compiled part: `gear_jax._gear_cpu.actors`."""
    module = _native.load("cpu")
    assert module is not None
    return module.actors


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raises the core's errors as those of this module."""
    try:
        yield
    except core().Error as e:
        kind, text = e.args
        raise _KINDS[kind](text) from None
