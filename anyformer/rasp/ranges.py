"""Intervals of real values, with what is known of their spacing, and one rule an operation.

    Real(low, high, denominator, raw)     every value lies in [low, high] and is p/q with q <= denominator (None: any real number)

Two different values p/q and p'/q' differ by at least 1/(q q'), so a comparison of them can be decided in spite of rounding. ``raw`` values
are inputs themselves, without rounding: comparisons of them are exact whatever their spacing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from anyformer.rasp.operations import round_half_away
from anyformer.rasp.refusals import CannotCompile, Refusal

LARGEST_DENOMINATOR = 2**40


@dataclass(frozen=True)
class Real:
    """An interval [low, high] of values."""

    low: float
    high: float
    denominator: int | None = None
    raw: bool = False

    @property
    def magnitude(self) -> float | int:
        """The largest absolute value."""
        return max(abs(self.low), abs(self.high))

    def mean(self, n: int) -> "Real":
        """Averages of 1 to n values: with a common denominator D of the values p/D k."""
        if self.denominator is None:
            return replace(self, raw=False)
        if self.denominator > 36:
            return Real(self.low, self.high)
        return Real(self.low, self.high, _capped(math.lcm(*range(1, self.denominator + 1)) * n))

    def gap(self, other: Fraction | int = 1) -> float | None:
        """The least distance of a value from a different rational number with denominator ``other``; None where there is none."""
        return None if self.denominator is None else 1 / (self.denominator * Fraction(other).denominator)


def _capped(denominator: int | None) -> int | None:
    return None if denominator is None or denominator > LARGEST_DENOMINATOR else denominator


@lru_cache(2**14)
def rational(value: float | int) -> Fraction | None:
    """The rational number with a denominator below 2^20 whose float this is, or None: 0.1 + 0.2 is near 3/10 and not equal to 0.3."""
    found = Fraction(value).limit_denominator(2**20)
    return found if float(found) == value else None


def mean_of(numbers: list[float | int]) -> float:
    """The average, of floats that stand for simple fractions that of the fractions: rounded once, so that equal averages are equal."""
    if all(isinstance(v, int) for v in numbers):
        return sum(numbers) / len(numbers)
    total = Fraction(0)
    for v in numbers:
        exact = rational(float(v))
        if exact is None:
            return math.fsum(numbers) / len(numbers)
        total += exact
    return float(total / len(numbers))


def range_of(values: Any) -> Real:
    """The interval of a set of numbers (or an interval as it is)."""
    if isinstance(values, Real):
        return values
    numbers = [float(v) for v in values.values]
    denominator: int | None = 1
    for number in numbers:
        exact = rational(number)
        denominator = None if exact is None or denominator is None else max(denominator, exact.denominator)
    return Real(min(numbers), max(numbers), denominator, raw=False)


def constant_of(r: Real) -> float | int | None:
    """The value, where there is only one."""
    return r.low if r.low == r.high else None


def _product(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else _capped(a * b)


def _add(x: Real, y: Real) -> Real:
    return Real(x.low + y.low, x.high + y.high, _product(x.denominator, y.denominator))


def _neg(x: Real) -> Real:
    return replace(x, low=-x.high, high=-x.low)


def _sub(x: Real, y: Real) -> Real:
    return _add(x, _neg(y))


def _mul(x: Real, y: Real) -> Real:
    corners = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
    return Real(min(corners), max(corners), _product(x.denominator, y.denominator))


def _reciprocal(y: Real) -> Real:
    if y.low <= 0 <= y.high:
        raise CannotCompile(Refusal.DIVISOR, f"it divides by values in [{y.low:g}, {y.high:g}], which holds 0")
    whole = constant_of(y)
    exact = rational(1 / whole) if whole is not None else None
    return Real(min(1 / y.low, 1 / y.high), max(1 / y.low, 1 / y.high), None if exact is None else exact.denominator)


def _div(x: Real, y: Real) -> Real:
    return _mul(x, _reciprocal(y))


def _reciprocal_or_zero(x: Real, least: Real) -> Real:
    bound = constant_of(least)
    if bound is None or bound <= 0:
        raise CannotCompile(Refusal.NO_RULE, "reciprocal_or_zero needs a constant least > 0")
    return Real(-1 / bound if x.low < 0 else 0.0, 1 / bound if x.high > 0 else 0.0)


def _pow(x: Real, y: Real) -> Real:
    exponent = constant_of(y)
    if exponent is None or exponent != int(exponent) or not 0 <= exponent <= 16:
        raise CannotCompile(Refusal.NO_RULE, "a power of real numbers needs a constant exponent 0, 1, .., 16")
    out = Real(1.0, 1.0, 1)
    for _ in range(int(exponent)):
        out = _mul(out, x)
    if exponent % 2 == 0:
        out = replace(out, low=0.0 if x.low <= 0 <= x.high else min(x.low**exponent, x.high**exponent))
    return out


def _outside(x: Real, wanted: str) -> CannotCompile:
    return CannotCompile(Refusal.DOMAIN, f"its argument lies in [{x.low:g}, {x.high:g}], {wanted}")


def _monotone(function: Callable[[float], float], where: float = -math.inf, open_end: bool = False) -> Callable[[Real], Real]:
    def rule(x: Real) -> Real:
        if x.low < where or (open_end and x.low == where):
            raise _outside(x, f"it must be {'above' if open_end else 'at least'} {where:g}")
        try:
            return Real(function(x.low), function(x.high))
        except OverflowError:
            raise CannotCompile(
                Refusal.TOO_LARGE, f"its argument lies in [{x.low:g}, {x.high:g}], where it is too large for a float"
            ) from None

    return rule


def _rsqrt(x: Real) -> Real:
    if x.low <= 0:
        raise _outside(x, "it must be above 0")
    return Real(1 / math.sqrt(x.high), 1 / math.sqrt(x.low))


def _abs(x: Real) -> Real:
    low = 0.0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
    return Real(low, x.magnitude, x.denominator, x.raw)


def _relu(x: Real) -> Real:
    return replace(x, low=max(x.low, 0.0), high=max(x.high, 0.0))


def _max(x: Real, y: Real) -> Real:
    return Real(max(x.low, y.low), max(x.high, y.high), _wider(x, y))


def _min(x: Real, y: Real) -> Real:
    return Real(min(x.low, y.low), min(x.high, y.high), _wider(x, y))


def _wider(x: Real, y: Real) -> int | None:
    return None if x.denominator is None or y.denominator is None else max(x.denominator, y.denominator)


def _assume(x: Real, low: Real, high: Real) -> Real:
    inside = Real(max(x.low, low.low), min(x.high, high.high), x.denominator, x.raw)
    if inside.low > inside.high:
        raise CannotCompile(Refusal.DOMAIN, f"it is assumed to lie where it never does, its range is [{x.low:g}, {x.high:g}]")
    return inside


def _where(c: Real, x: Real, y: Real) -> Real:
    return Real(min(x.low, y.low), max(x.high, y.high), _wider(x, y))


def _compared(x: Real, y: Real) -> Real:
    """A comparison is a Boolean; it needs to know how near to each other different values can be."""
    if not decidable(x, y):
        text = "it compares real numbers that may come as near to each other as they like, which rounding decides"
        raise CannotCompile(Refusal.NEAR_VALUES, text)
    return Real(0.0, 1.0, 1)


def decidable(x: Real, y: Real) -> bool:
    """Whether rounding cannot change how x and y compare: unrounded inputs, or rational values far enough apart."""
    if (x.raw or constant_of(x) is not None) and (y.raw or constant_of(y) is not None):
        return True
    gap = _sub(x, y).gap()
    return gap is not None and gap > 1e-10 * (1 + x.magnitude + y.magnitude)


def _rounded(function: Callable[[float], int]) -> Callable[[Real], Real]:
    def rule(x: Real) -> Real:
        if x.denominator is None and not x.raw:
            raise CannotCompile(Refusal.NEAR_JUMP, "it rounds real numbers that may come as near to a jump as they like")
        if x.high - x.low > 2**12:
            text = f"it rounds values in [{x.low:g}, {x.high:g}], a range of more than {2**12} integers"
            raise CannotCompile(Refusal.EXPLODES, text)
        return Real(float(function(x.low)), float(function(x.high)), 1)

    return rule


ROUNDINGS: dict[str, tuple[Callable[[float], int], float]] = {
    "floor": (math.floor, 0.0),
    "ceil": (math.ceil, 1.0),
    "round": (round_half_away, 0.5),
}
"""What rounds to integers, and how far below j the jump to j is."""

RULES: dict[str, Callable[..., Real]] = {
    "float": lambda x: x,
    "shift": lambda x: replace(x, raw=False, denominator=None),
    "add": _add,
    "sub": _sub,
    "neg": _neg,
    "mul": _mul,
    "div": _div,
    "reciprocal_or_zero": _reciprocal_or_zero,
    "pow": _pow,
    "exp": _monotone(math.exp),
    "log": _monotone(math.log, 0.0, open_end=True),
    "sqrt": _monotone(math.sqrt, 0.0),
    "rsqrt": _rsqrt,
    "abs": _abs,
    "relu": _relu,
    "max": _max,
    "min": _min,
    "where": _where,
    "assume": _assume,
    "eq": _compared,
    "ne": _compared,
    "lt": _compared,
    "le": _compared,
    "gt": _compared,
    "ge": _compared,
} | {name: _rounded(function) for name, (function, _) in ROUNDINGS.items()}
"""How each operation acts on intervals: the range of its values; raises :class:`CannotCompile` where it has none."""

DISCRETE = dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), (False, True))
"""Operations of real numbers whose values are a set; those of floor, ceil and round are the integers of their range."""
