"""Operations of real numbers as units of a feed-forward part.

    product          identity(x) * y                       one multiplying unit, exact
    max, abs, relu   y + relu(x - y)                       exact
    comparison       [x - y > 0]                           where rounding cannot decide it
    exp, log, 1/x    a unit with that function (analytic mode), or a piecewise-linear table of ReLU units (standard mode)

The table interpolates f on knots z_0 < z_1 < ... of [low, high]: |f - table| <= max |f''| h^2 / 8 on an interval of length h. Knots are put so
that this is ``tolerance`` on each; the error of an argument is multiplied by the Lipschitz constant.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from anyformer.rasp.options import Mode
from anyformer.rasp.plan import Form, Part, Plan, number
from anyformer.rasp.ranges import ROUNDINGS, RULES, Real
from anyformer.rasp.refusals import CannotCompile, Refusal
from anyformer.rasp.steps import Step
from anyformer.rasp.tabulating import Tabulation

KNOTS = 2**14
"""The largest number of knots of one table."""


@dataclass(frozen=True)
class Curve:
    """A smooth function: itself, its slope and its second derivative, the last two largest in absolute value at an end of an interval."""

    value: Callable[[float], float]
    slope: Callable[[float], float]
    curvature: Callable[[float], float]


CURVES = {
    "exp": Curve(math.exp, math.exp, math.exp),
    "log": Curve(math.log, lambda x: 1 / x, lambda x: -1 / x**2),
    "sqrt": Curve(math.sqrt, lambda x: 0.5 / math.sqrt(x) if x else math.inf, lambda x: -0.25 * x**-1.5 if x else -math.inf),
    "rsqrt": Curve(lambda x: x**-0.5, lambda x: -0.5 * x**-1.5, lambda x: 0.75 * x**-2.5),
    "reciprocal": Curve(lambda x: 1 / x, lambda x: -1 / x**2, lambda x: 2 / x**3),
    "square": Curve(lambda x: x * x, lambda x: 2 * x, lambda _: 2.0),
}

RAMPS = ("relu", "abs", "max", "min")
"""Operations that are piecewise linear with one corner."""


class Smooth:
    """Writes operations of real numbers into a plan."""

    def __init__(self, plan: Plan, mode: Mode, tolerance: int | float):
        self.plan = plan
        self.mode = mode
        self.tolerance = tolerance

    def operation(
        self, name: str, text: str, x: list[Form], r: list[Real], e: list[float], tables: Tabulation
    ) -> tuple[Form, float]:
        """The form of an operation, and a bound of its error; ``r`` are the ranges of the arguments, ``e`` bounds of their errors."""
        if name == "mul":
            error = e[0] * r[1].magnitude + e[1] * r[0].magnitude + e[0] * e[1]
            if x[0] == x[1] and self.mode == "analytic":
                return self.plan.compute(text, [Part("square", x[0])]), error
            return self._product(text, x[0], x[1]), error
        if name == "div":
            return self._quotient(text, x, r, e)
        if name == "where":
            return x[2] + self._product(text, x[0], x[1] - x[2]), max(e[1], e[2])
        if name in RAMPS:
            linear, ramps = self._ramp(name, x)
            return linear + self.plan.compute(text, [sign * Part("relu", gate) for gate, sign in ramps]), sum(e)
        if name == "pow":
            return self._power(text, x[0], r[0], e[0], int(r[1].low))
        if name in ROUNDINGS:
            return self._rounded(name, text, x[0], r[0], e[0], tables), 0.0
        if name in ("eq", "ne", "lt", "le", "gt", "ge"):
            return self._compared(name, text, x, r, e, tables), 0.0
        if name == "reciprocal_or_zero":
            return self._reciprocal_or_zero(text, x[0], r[1].low, e[0])
        return self._function(name, text, x[0], r[0], e[0])

    def fused(self, name: str | None, text: str, x: list[Form], y: Form) -> Form | None:
        """``f(x) y`` in one step, where f is a unit by itself or a sum of ReLU units and a linear form; else None."""
        if name in CURVES and self.mode == "analytic":
            return self.plan.compute(text, [Part(name, x[0], y)])
        if name in RAMPS:
            linear, ramps = self._ramp(name, x)
            parts = [sign * Part("relu", gate, y) for gate, sign in ramps]
            return self.plan.compute(text, parts + ([] if linear == number(0.0) else [Part("identity", linear, y)]))
        return None

    def _product(self, text: str, x: Form, y: Form) -> Form:
        return self.plan.compute(text, [Part("identity", x, y)])

    def _quotient(self, text: str, x: list[Form], r: list[Real], e: list[float]) -> tuple[Form, float]:
        if self.mode == "analytic":
            least = min(abs(r[1].low), abs(r[1].high))
            form = self.plan.compute(text, [Part("reciprocal", x[1], x[0])])
            return form, (e[0] + e[1] * r[0].magnitude / least) / least if e[0] or e[1] else 0.0
        inverse, error = self._function("reciprocal", f"1 / denominator of {text}", x[1], r[1], e[1])
        bound = e[0] / min(abs(r[1].low), abs(r[1].high)) + error * r[0].magnitude + e[0] * error
        return self._product(text, x[0], inverse), bound

    @staticmethod
    def _ramp(name: str, x: list[Form]) -> tuple[Form, list[tuple[Form, float]]]:
        """A linear form and ReLU units (gate, sign) whose sum is the operation."""
        if name == "relu":
            return number(0.0), [(x[0], 1.0)]
        if name == "abs":
            return number(0.0), [(x[0], 1.0), (-1.0 * x[0], 1.0)]
        return x[1], [(x[0] - x[1], 1.0) if name == "max" else (x[1] - x[0], -1.0)]

    def _power(self, text: str, x: Form, r: Real, error: float, exponent: int) -> tuple[Form, float]:
        if exponent == 0:
            return number(1.0), 0.0
        form = x
        for i in range(2, exponent + 1):
            form = self._product(f"{text}, power {i}", form, x)
        return form, exponent * (r.magnitude + error) ** (exponent - 1) * error

    def _rounded(self, name: str, text: str, x: Form, r: Real, error: float, tables: Tabulation) -> Form:
        """A staircase with a step to every integer of the range: floor(x) = floor(low) + sum_j [x >= j]."""
        function, below = ROUNDINGS[name]
        gap = r.gap(Fraction(below))
        steps: list[Part] = []
        slip = 0.0
        for j in range(function(r.low) + 1, function(r.high) + 1):
            at = j - below
            inclusive = function(at) == j  # floor: always, ceil: never, round: above zero, since a half goes away from it
            units, off = self._from(x, at, inclusive, gap, error, tables, r.magnitude)
            steps, slip = steps + units, slip + off
        if not steps:
            return number(function(r.low))
        tables.steps.require(slip, 1.0)
        return self.plan.compute(text, steps, slip) + number(function(r.low))

    def _from(
        self, x: Form, at: float, inclusive: bool, gap: float | None, error: float, tables: Tabulation, largest: float
    ) -> tuple[list[Part], float]:
        """Units that add 1 where x >= at (inclusive) or x > at, for |x| up to ``largest``, and how far they may be off."""
        if gap is None:  # unrounded input
            if self.mode == "standard":
                raise CannotCompile(Refusal.JUMP, "a jump at any real number is no ReLU table; use analytic mode")
            if inclusive:
                return [-1.0 * Part("step", number(at) - x), Part("step", number(1.0))], 0.0
            return [Part("step", x - number(at))], 0.0
        if error >= gap / 4:
            raise CannotCompile(
                Refusal.NEAR_JUMP, f"its argument has an error of up to {error:.2g}, too much for values {gap:.2g} apart"
            )
        low, high = (at - 0.75 * gap, at - 0.25 * gap) if inclusive else (at + 0.25 * gap, at + 0.75 * gap)
        step, largest = Step(low, high, 1.0), largest + error
        return tables.steps.units(x, step, largest), tables.steps.slip(x, step, largest)

    def _compared(self, name: str, text: str, x: list[Form], r: list[Real], e: list[float], tables: Tabulation) -> Form:
        z = x[0] - x[1]
        difference = RULES["sub"](r[0], r[1])
        raw = all(s.raw or s.low == s.high for s in r)
        gap, error = None if raw else difference.gap(), e[0] + e[1]
        above, off = self._from(z, 0.0, False, gap, error, tables, difference.magnitude)
        below, _ = self._from(-1.0 * z, 0.0, False, gap, error, tables, difference.magnitude)
        parts, base = {
            "gt": (above, 0.0),
            "le": (_times(above, -1.0), 1.0),
            "lt": (below, 0.0),
            "ge": (_times(below, -1.0), 1.0),
            "ne": (above + below, 0.0),
            "eq": (_times(above + below, -1.0), 1.0),
        }[name]
        slip = 2 * off if name in ("ne", "eq") else off
        tables.steps.require(slip, 1.0)
        return self.plan.compute(text, parts, slip) + number(base)

    def _reciprocal_or_zero(self, text: str, x: Form, least: float, error: float) -> tuple[Form, float]:
        if self.mode == "standard":
            raise CannotCompile(Refusal.JUMP, "a jump from 0 to 1/least is no ReLU table; use analytic mode")
        form = self.plan.compute(text, [(1 / least) * Part("reciprocal_or_zero", (1 / least) * x)])
        return form, error / least**2

    def _function(self, name: str, text: str, x: Form, r: Real, error: float) -> tuple[Form, float]:
        """exp, log, sqrt, 1/x: a unit with that function, or its table."""
        curve = CURVES[name]
        if self.mode == "analytic":
            steepest = max(abs(curve.slope(r.low)), abs(curve.slope(r.high))) if error else 0.0
            return self.plan.compute(text, [Part(name, x)]), error * steepest
        low, high = r.low - error, r.high + error
        if name in ("log", "reciprocal", "rsqrt", "sqrt") and low <= 0 < high:
            raise CannotCompile(Refusal.DIVISOR, f"its argument may come as near to 0 as {low:.2g}; no table holds that")
        knots = _knots(curve, low, high, self.tolerance)
        parts: list[Part] = []
        before = 0.0
        for a, b in itertools.pairwise(knots):
            slope = (curve.value(b) - curve.value(a)) / (b - a)
            parts.append((slope - before) * Part("relu", x - number(a)))
            before = slope
        steepest = max(abs(curve.slope(low)), abs(curve.slope(high)))
        form = self.plan.compute(text, parts) if parts else number(0.0)
        return form + number(curve.value(low)), self.tolerance + error * steepest


def _times(parts: list[Part], factor: float) -> list[Part]:
    return [factor * part for part in parts]


def _knots(curve: Curve, low: float, high: float, tolerance: int | float) -> list[float]:
    """Knots between which linear interpolation is right to ``tolerance``; |f''| is largest at an end of each interval."""
    knots = [low]
    while knots[-1] < high:
        a = knots[-1]
        h = high - a
        while max(abs(curve.curvature(a)), abs(curve.curvature(a + h))) * h * h / 8 > tolerance:
            h *= 0.8
        knots.append(min(high, a + h))
        if len(knots) > KNOTS:
            raise CannotCompile(
                Refusal.KNOTS,
                f"a table of more than {KNOTS:,} ReLU units is needed on [{low:g}, {high:g}] for an error of {tolerance:g}",
            )
    return knots
