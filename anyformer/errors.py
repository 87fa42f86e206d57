"""The one exception of the library for unusable input: a single line that says what was expected, got, and what to do."""

import math


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
    """Raise unless ``value`` is one of ``choices``, and of the same type (1 is not True)."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise AnyformerError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def is_number(value: object) -> bool:
    """A finite number, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_number(owner: str, name: str, value: object, minimum: float = -math.inf) -> None:
    """Raise unless ``value`` is a finite number (no bool) of at least ``minimum``."""
    if not (is_number(value) and value >= minimum):  # type: ignore[operator]
        least = "" if minimum == -math.inf else f" >= {minimum:g}"
        raise AnyformerError(f"{owner}: {name} must be a finite number{least}, got {value!r}")


def require_numbers(owner: str, name: str, values: object) -> None:
    """Raise unless ``values`` is a non-empty tuple of finite numbers."""
    if not isinstance(values, tuple) or not values:
        raise AnyformerError(f"{owner}: {name} must be a tuple of numbers, got {values!r}")
    for value in values:
        require_number(owner, name, value)
