"""The one exception of the library for unusable input: a single line that says what was expected, got, and what to do."""


class AnyformerError(ValueError):
    """Input that cannot be used. The command line prints it as one line and exits with code 2."""


class OutsideClass(AnyformerError):
    """A target that a machine (or the exact language itself) cannot hold; the message lists every reason."""

    def __init__(self, what: str, reasons: list[str]):
        self.reasons = tuple(reasons)
        super().__init__(f"{what}: " + "; ".join(reasons))


def require_size(owner: str, name: str, value: object, minimum: int = 1) -> None:
    """Raise unless ``value`` is an integer of at least ``minimum``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise AnyformerError(f"{owner}: {name} must be an integer >= {minimum}, got {value!r}")


def require_choice(owner: str, name: str, value: object, choices: tuple) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise AnyformerError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
