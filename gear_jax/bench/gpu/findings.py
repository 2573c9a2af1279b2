"""What a row found: figures, verdicts on the targets, peers. Plain values, so that JSON holds all of it."""

from typing import Any

KERNEL = "device"
IN_FLIGHT = "in flight"
CALL = "call"
SCAN = "scan"
HOW = {
    KERNEL: "device time: one program with n of it, less one with 1, over n - 1",
    IN_FLIGHT: "calls from Python one after the other, one wait at the end; wall time over their number",
    CALL: "a call from Python and the wait for its result; wall time, the median call",
    SCAN: "`lax.scan` in one program; wall time over its length",
}


class Wrong(AssertionError):
    """A result differs from NumPy's."""


class Missing(Exception):
    """A peer, or what it needs, is not there; the text is for the table."""


def reason(error: Exception) -> str:
    """Why a peer was not measured, in one line."""
    text = str(error) if isinstance(error, Missing) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:200]


class Findings:
    """One row's results; they are kept where a row fails halfway.

    Args:
      copies: `cudaMemcpy` in GB/s, measured just before the row: {"h2d": ..., "d2h": ...}; {} where there is none.
    """

    def __init__(self, copies: dict[str, float]):
        self.copies = copies
        self.figures: list[dict[str, Any]] = []
        self.targets: list[dict[str, Any]] = []
        self.peers: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def figure(self, what: str, value: float, unit: str, timed: str = "", **more: Any) -> float:
        """Adds a figure; `timed` is one of `HOW`, `more` goes into the JSON as it is. Returns the value."""
        self.figures.append({"what": what, "value": value, "unit": unit, "timed": timed, **more})
        return value

    def rate(self, what: str, size: int, seconds: float, timed: str, of: str | None = None, **more: Any) -> float:
        """Adds a speed: `size` bytes in `seconds`, beside the copy `of` ("h2d", "d2h"). Returns GB/s."""
        value = size / seconds / 1e9
        peak = self.copies.get(of) if of else None
        more |= {"seconds": seconds, "bytes": size}
        if of and peak:
            more |= {"of": of, "peak": peak, "ratio": value / peak}
        return self.figure(what, value, "GB/s", timed, **more)

    def of_copy(self, value: float, of: str) -> float | None:
        """A speed in GB/s as a share of `cudaMemcpy` in that direction; None where that was not measured."""
        return value / self.copies[of] if of in self.copies else None

    def at_least(self, what: str, bound: float, of: str, value: float | None, shown: str, counts: bool = True) -> None:
        """A target: `value` (in units of `of`) is at least `bound`. None, or not `counts`: no verdict."""
        self._target(what, f">= {bound:g} {of}".strip(), value, shown, counts, lambda x: x >= bound)

    def at_most(self, what: str, bound: float, of: str, value: float | None, shown: str, counts: bool = True) -> None:
        """A target: `value` (in units of `of`) is at most `bound`. None, or not `counts`: no verdict."""
        self._target(what, f"<= {bound:g} {of}".strip(), value, shown, counts, lambda x: x <= bound)

    def _target(self, what, wanted, value, shown, counts, good) -> None:
        reached = bool(good(value)) if value is not None and counts else None
        found = {"what": what, "wanted": wanted, "value": value, "shown": shown, "reached": reached}
        self.targets.append(found)

    def peer(self, name: str, what: str, value: float, unit: str, ours: float | None, **more: Any) -> None:
        """A peer's figure, and how many times ours it is slower (`ours` in the same unit)."""
        ratio = None
        if ours is not None:
            ratio = ours / value if unit == "GB/s" else value / ours
        self.peers.append({"name": name, "what": what, "value": value, "unit": unit, "ratio": ratio, **more})

    def no_peer(self, name: str, what: str, why: str, **more: Any) -> None:
        """A peer that could not be measured, and why."""
        self.peers.append({"name": name, "what": what, "missing": why, **more})

    def note(self, text: str) -> None:
        """A sentence for below the row's tables."""
        self.notes.append(text)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("figures", "targets", "peers", "notes")
        return {"memcpy": self.copies} | {name: getattr(self, name) for name in names}
