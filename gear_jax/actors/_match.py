"""Whether a ring is like what it is to be used for. No jax in here."""

from typing import Any

from gear_jax.actors import _columns
from gear_jax.actors._errors import RingForeignError, error
from gear_jax.actors._ring import Ring


def check_asked(ring: Ring, ask: Any, answer: Any) -> None:
    """Raises a RingForeignError if a ring was made for other questions or answers."""
    for what, arrays, tree in (("ask", ring.ask, ask), ("answer", ring.answer, answer)):
        if tree is not None:
            got = [(name, x.shape[2:], x.dtype) for name, x in arrays.items()]
            wanted = [(name, spec.shape, spec.dtype) for name, spec in _columns.specs(what, tree)]
            _compare(ring, what, got, wanted)


def check_columns(ring: Ring, config: Any) -> None:
    """Raises a RingForeignError if a ring has other columns, or another T, than the table of a `Config`."""
    if ring.steps != config.steps:
        _compare(ring, "T", [("T", (), ring.steps)], [("T", (), config.steps)])
    got = [(name, x.shape[2:], x.dtype) for name, x in zip(ring.names, ring.columns, strict=True)]
    wanted = [(name, spec.shape, spec.dtype) for name, spec in zip(config.names, config.columns, strict=True)]
    _compare(ring, "columns", sorted(got), sorted(wanted))


def _compare(ring: Ring, what: str, got: list[Any], wanted: list[Any]) -> None:
    if [x[:2] for x in got] != [x[:2] for x in wanted] or [x[2] for x in got] != [x[2] for x in wanted]:
        show = lambda entries: ", ".join(f"{name}: {x}{list(shape)}" for name, shape, x in entries)  # noqa: E731
        raise error(
            RingForeignError, f"ring {ring.name!r}: {what}", got=show(got), wanted=show(wanted),
            fix="Make the ring from this table: Ingest(replay, actors=...).",
        )  # fmt: skip
