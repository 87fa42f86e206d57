"""Sets of values: those of a vocabulary, of a table, of the averages of several numbers.

Finite(values, undefined)     values in a fixed order, True and 1 being one; and whether the undefined value may occur
Reals(low, high)              tokens that are real numbers
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from anyformer.errors import AnyformerError
from anyformer.rasp.operations import Undefined, Value
from anyformer.rasp.ranges import LARGEST_DENOMINATOR, Real, range_of, rational

SET = 2**12
"""The largest set of values of an average."""


class Unreachable:
    """In tables: a combination of source values that no input has (a position at or beyond the length)."""


UNREACHABLE = Unreachable()


@dataclass(frozen=True)
class Reals:
    """Tokens that are real numbers in [low, high], as float64."""

    low: float | int
    high: float | int

    def __post_init__(self) -> None:
        numbers = all(isinstance(x, (int, float)) and math.isfinite(x) for x in (self.low, self.high))
        if not numbers or self.low > self.high:
            raise AnyformerError(f"Reals: low and high must be finite numbers, low <= high, got {self.low!r}, {self.high!r}")


@dataclass(frozen=True)
class Finite:
    """A set of values in a fixed order, without the undefined one; ``undefined``: whether that one may occur, and why."""

    values: tuple[Value, ...]
    undefined: str | None = None

    @property
    def numeric(self) -> bool:
        """Whether all values are numbers or Booleans."""
        return all(isinstance(v, (int, float)) for v in self.values)

    def codes(self) -> np.ndarray:
        """One number a value: the number itself, or the place in the set where there are others."""
        return np.array([float(v) for v in self.values]) if self.numeric else np.arange(len(self.values), dtype=float)

    def code(self) -> dict[Value, float]:
        """The code of each value."""
        return dict(zip(self.values, self.codes().tolist(), strict=True))


def finite(values: Iterable[Value]) -> Finite:
    """The set of some values (True and 1 are one value), ordered where they have an order."""
    kept: dict[Value, Value] = {}
    undefined = None
    for value in values:
        if isinstance(value, Undefined):
            undefined = undefined or value.reason
        elif value is not UNREACHABLE:
            kept.setdefault(value, value)
    try:
        ordered = sorted(kept.values(), key=lambda v: (isinstance(v, str), v))
    except TypeError:
        ordered = sorted(kept.values(), key=repr)
    return Finite(tuple(ordered), undefined)


def distance(codes: np.ndarray) -> float:
    """The least distance of two numbers that differ by more than rounding, infinite where there is one only."""
    gaps = np.diff(np.unique(codes))
    gaps = gaps[gaps > 1e-12 * np.abs(codes).max(initial=0.0)]
    return float(gaps.min()) if len(gaps) else math.inf


def kinds(values: List[Value]) -> tuple[list[Value], list[int]]:
    """The different values, and which of them each entry is."""
    place: dict[Value, int] = {}
    which = [place.setdefault(value, len(place)) for value in values]
    return list(place), which


def means(values: Finite, n: int) -> list[float | int] | None:
    """All averages of 1 to n numbers of a set, or None where there are more than :data:`SET`.

    With D a common denominator the sums of k values are among the multiples of 1/D between k min and k max.
    """
    exact = [rational(float(v)) for v in values.values]
    numbers = [f for f in exact if f is not None]
    if len(numbers) < len(exact):
        return None
    common = math.lcm(*(f.denominator for f in numbers))
    low, high = (int(extreme * common) for extreme in (min(numbers), max(numbers)))
    step = math.gcd(*(int(f * common) - low for f in numbers)) or 1
    if (high - low) // step * n * (n + 1) // 2 > 4 * SET:
        return None
    found = {Fraction(p, k * common) for k in range(1, n + 1) for p in range(k * low, k * high + 1, step)}
    return [float(f) if f.denominator > 1 else int(f) for f in sorted(found)] if len(found) <= SET else None


def spaced(values: Finite, n: int) -> Real:
    """The range of averages of up to n numbers of a set: p/(D k) with D a common denominator of them."""
    found = range_of(values)
    exact = [rational(float(v)) for v in values.values]
    if found.denominator is None or any(f is None for f in exact):
        return Real(found.low, found.high)
    common = math.lcm(*(f.denominator for f in exact if f is not None)) * n
    return Real(found.low, found.high, common if common <= LARGEST_DENOMINATOR else None)


def hull(r: Real, extra: tuple[float | int, ...]) -> Real:
    """The range that also holds some more numbers."""
    if not extra:
        return r
    other = range_of(finite(extra))
    denominator = None if r.denominator is None or other.denominator is None else max(r.denominator, other.denominator)
    return replace(r, low=min(r.low, other.low), high=max(r.high, other.high), denominator=denominator, raw=False)
