"""What a transport must do to let peers read this process's memory."""

from typing import Any, Protocol


class Exposer(Protocol):
    """The exposing side of one session. Its methods may be called from several threads at once.

    A reader and an exposer meet in three steps, over the control connection of the job: the reader's C++ side makes an
    offer (`Transport::Offer`), the exposer accepts it and answers with a blob, the reader connects with the blob and
    the regions (`Transport::Connect`). Both blobs are opaque to everything between them.
    """

    def regions(self) -> list[tuple[int, int, bytes]]:
        """(address, bytes, key) of every region, in the order given; keys admit reads only, within the bytes."""
        ...

    def accept(self, peer: int, offer: bytes) -> bytes:
        """Takes up a reader; returns the blob for its `Connect`. One that is there already is replaced.

        Raises:
          TransportError: if the offer is malformed, or the transport fails.
        """
        ...

    def drop(self, peer: int) -> None:
        """Forgets a reader, which is gone; nothing happens if there is none."""
        ...

    def close(self) -> None:
        """Lets nobody read any more. Called once, after the session's own reads have ended."""
        ...


class Kind(Protocol):
    """What the module of a transport (`_ucx`, `_verbs`) has."""

    def missing(self, options: dict[str, Any]) -> str:
        """Why this process cannot use the transport (what, got, wanted, fix); "": it can. Loads what it needs."""
        ...

    def expose(self, native: Any, memory: list[tuple[int, int]], options: dict[str, Any]) -> Exposer:
        """Exposes (address, bytes) of host memory.

        Args:
          native: the session's C++ side (`_gear_cpu.TransportSession`) over the same transport.
          memory: what to expose. It stays where it is until `close`.
          options: of the session, as the fields of `Options` in ffi/transport/transport.h.

        Raises:
          TransportError: if that fails.
        """
        ...
