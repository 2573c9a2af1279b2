"""The environment variables that gear_jax reads, in one place."""

import os

from gear_jax._errors import value_error


def checks() -> bool:
    """`GEAR_JAX_CHECKS=1`: data-dependent faults (a slot out of range) become errors. Read at trace time."""
    value = os.environ.get("GEAR_JAX_CHECKS", "0")
    if value not in ("0", "1"):
        raise value_error(
            "GEAR_JAX_CHECKS", got=repr(value), wanted="'0' or '1'", fix="Set GEAR_JAX_CHECKS=1 or unset it."
        )
    return value == "1"


def timeout() -> int:
    """`GEAR_JAX_TIMEOUT`: seconds that processes wait for each other where they must agree (300)."""
    value = os.environ.get("GEAR_JAX_TIMEOUT", "300")
    if not value.isdecimal() or int(value) < 1:
        wanted = "a whole number of seconds, 1 or more"
        raise value_error("GEAR_JAX_TIMEOUT", got=repr(value), wanted=wanted, fix="Correct or unset it.")
    return int(value)


def ring() -> str | None:
    """`GEAR_JAX_RING`: the path of the ring that an actor's process writes to; `gear_jax.actors.ActorPool` sets it."""
    return os.environ.get("GEAR_JAX_RING")


def actor() -> int | None:
    """`GEAR_JAX_ACTOR`: the number of an actor's process, as `gear_jax.actors.ActorPool` sets it."""
    value = os.environ.get("GEAR_JAX_ACTOR")
    if value is not None and not value.isdecimal():
        raise value_error("GEAR_JAX_ACTOR", got=repr(value), wanted="a number", fix="Correct or unset it.")
    return None if value is None else int(value)
