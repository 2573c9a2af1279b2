"""One shape for every error message: what, got, wanted, and the call that fixes it."""


def message(what: str, *, got: object, wanted: object, fix: str) -> str:
    """Returns the text of an error.

    Args:
      what: the argument or thing at fault.
      got: what it was.
      wanted: what it should have been.
      fix: the call or change that mends it.
    """
    return f"{what}: got {got}, wanted {wanted}. {fix}"


def value_error(what: str, *, got: object, wanted: object, fix: str) -> ValueError:
    """A `ValueError` with the text of `message`."""
    return ValueError(message(what, got=got, wanted=wanted, fix=fix))


def type_error(what: str, *, got: object, wanted: object, fix: str) -> TypeError:
    """A `TypeError` with the text of `message`."""
    return TypeError(message(what, got=got, wanted=wanted, fix=fix))
