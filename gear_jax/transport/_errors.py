"""What goes wrong between processes."""

from gear_jax._errors import message


class TransportError(RuntimeError):
    """A connection or a read has failed.

    Attributes:
      status: how a read has ended ("refused", "timeout", "lost" or "closed"); "" where it was no read.
    """

    def __init__(self, text: str, status: str = ""):
        super().__init__(text)
        self.status = status


class MalformedError(TransportError):
    """A peer, or somebody else, has sent what no peer sends."""


def transport_error(what: str, *, got: object, wanted: object, fix: str, status: str = "") -> TransportError:
    """A `TransportError` with the text of `gear_jax._errors.message`."""
    return TransportError(message(what, got=got, wanted=wanted, fix=fix), status)


def malformed(what: str, *, got: object, wanted: object) -> MalformedError:
    """A `MalformedError` about what was received."""
    fix = "Run the same gear_jax in every process of the job."
    return MalformedError(message(what, got=got, wanted=wanted, fix=fix))
