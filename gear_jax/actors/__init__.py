"""Trajectories from other processes: actors write them into shared memory, the learner adds them to its table.

An actor's process needs NumPy and this module, which does not import jax; `Ingest`, the learner's side, does.
"""

import importlib
from typing import TYPE_CHECKING

from gear_jax.actors._clean import clean
from gear_jax.actors._errors import (
    ActorFailedError,
    RingBusyError,
    RingClosedError,
    RingElsewhereError,
    RingError,
    RingForeignError,
    RingMissingError,
    RingSpaceError,
    RingTimeoutError,
)
from gear_jax.actors._limiter import RateLimiter, RateLimitTimeoutError
from gear_jax.actors._pool import ActorPool
from gear_jax.actors._relay import Relay
from gear_jax.actors._remote import RemoteActors
from gear_jax.actors._ring import Ring, make_ring, open_ring
from gear_jax.actors._writer import Writer

if TYPE_CHECKING:
    from gear_jax.actors._ingest import Drained, Ingest

__all__ = [
    "ActorFailedError",
    "ActorPool",
    "Drained",
    "Ingest",
    "RateLimitTimeoutError",
    "RateLimiter",
    "Relay",
    "RemoteActors",
    "Ring",
    "RingBusyError",
    "RingClosedError",
    "RingElsewhereError",
    "RingError",
    "RingForeignError",
    "RingMissingError",
    "RingSpaceError",
    "RingTimeoutError",
    "Writer",
    "clean",
    "make_ring",
    "open_ring",
]


def __getattr__(name: str):
    if name not in ("Drained", "Ingest"):
        raise AttributeError(f"module 'gear_jax.actors' has no attribute {name!r}")
    value = getattr(importlib.import_module("gear_jax.actors._ingest"), name)
    globals()[name] = value
    return value
