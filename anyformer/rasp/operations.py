"""Element-wise operations: what a position computes from its own values. One table of named ones; any Python function is one too.

An operation never stops a program: where its function raises or gives no number (NaN, infinity), the value is :class:`Undefined`
with the reason. Undefined values travel on through operations and are an error only where they are output, averaged or compared by
a selector; ``where`` drops the one that it does not take.
"""

import math
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

MOST_BITS, MOST_CHARACTERS = 1023, 100_000
Value = Any
"""A number, a Boolean, a string, or any other hashable constant."""


@dataclass(frozen=True)
class Undefined:
    """The value of an operation that has none, and why."""

    reason: str


@dataclass(frozen=True)
class Operation:
    """A function of the values at one position. ``symbol`` prints it (``{0} + {1}``). Two operations are the same if name and function are.

    Values that are equal are one value: a function of your own sees whole numbers and Booleans as integers, so that it cannot tell 1, 1.0 and
    True apart (which an average, or a set of values, does not). What a function is called means nothing: only :attr:`known` ones have a rule.
    """

    name: str
    function: Callable[..., Value]
    symbol: str = ""

    @property
    def listed(self) -> bool:
        """Whether this is an entry of :data:`OPERATIONS`, not a function of your own that has the name of one."""
        return OPERATIONS.get(self.name) == self

    @property
    def known(self) -> str | None:
        """Which operation of the table it computes: an entry itself, or Python's own function for it (``abs``, ``math.exp``); else None."""
        return self.name if self.listed else PYTHON.get(id(self.function))

    def __call__(self, *values: Value) -> Value:
        """The value at one position."""
        if self.name == "where" and self.listed:
            chosen = values[0] if isinstance(values[0], Undefined) else values[1 if values[0] else 2]
            return chosen
        for value in values:
            if isinstance(value, Undefined):
                return value
        try:
            result = self.function(*(values if self.listed else map(plain, values)))
        except ZeroDivisionError:
            return Undefined(f"division by zero in {self.printed(*map(repr, values))}")
        except Exception as error:
            return Undefined(f"{self.printed(*map(repr, values))} raises {type(error).__name__}: {error}")
        if isinstance(result, float) and not math.isfinite(result):
            return Undefined(f"{self.printed(*map(repr, values))} is {result}")
        if isinstance(result, int) and result.bit_length() > MOST_BITS:
            return Undefined(f"{self.name} gives an integer of more than {MOST_BITS} bits, beyond what float64 holds")
        if isinstance(result, str) and len(result) > MOST_CHARACTERS:
            return Undefined(f"{self.name} gives a string of more than {MOST_CHARACTERS:,} characters")
        if not isinstance(result, Hashable):
            return Undefined(f"{self.printed(*map(repr, values))} is a {type(result).__name__}, which is no value")
        return result

    def printed(self, *arguments: str) -> str:
        """The operation applied to printed arguments."""
        return self.symbol.format(*arguments) if self.symbol else f"{self.name}({', '.join(arguments)})"


def plain(x: Value) -> Value:
    """The one spelling of a value: a whole number or a Boolean as an integer."""
    return int(x) if isinstance(x, bool) or (isinstance(x, float) and x.is_integer()) else x


def _number(x: Value) -> Value:
    if not isinstance(x, (int, float)):
        raise TypeError(f"{x!r} is no number")
    return x


def _numbers(function: Callable[..., Value]) -> Callable[..., Value]:
    return lambda *values: function(*map(_number, values))


def _add(x: Value, y: Value) -> Value:
    return x + y if isinstance(x, str) and isinstance(y, str) else _number(x) + _number(y)


def _power(x: Value, y: Value) -> Value:
    if isinstance(x, int) and isinstance(y, int) and abs(x) > 1 and y * (abs(x).bit_length() - 1) > MOST_BITS:
        raise OverflowError(f"the result has more than {MOST_BITS} bits")
    result = _number(x) ** _number(y)
    if isinstance(result, complex):
        raise ValueError("the result is no real number")
    return result


def _ordered(function: Callable[[Value, Value], bool]) -> Callable[[Value, Value], bool]:
    def compare(x: Value, y: Value) -> bool:
        if isinstance(x, str) != isinstance(y, str):
            raise TypeError("numbers and strings have no order")
        return function(x, y)

    return compare


def round_half_away(x: int | float) -> int:
    """The nearest integer; a half goes away from zero."""
    whole = math.floor(abs(x))
    rounded = whole + (abs(x) - whole >= 0.5)  # exact, where x + 0.5 may be rounded up to an integer
    return rounded if x >= 0 else -rounded


def _reciprocal_or_zero(x: int | float, least: int | float) -> float:
    return 1.0 / x if abs(x) >= least else 0.0


def _assume(x: Value, low: int | float, high: int | float) -> Value:
    if not low <= x <= high:
        raise ValueError(f"it was assumed to lie in [{low:g}, {high:g}]")
    return x


OPERATIONS: dict[str, Operation] = {
    op.name: op
    for op in (
        Operation("add", _add, "({0} + {1})"),
        Operation("sub", _numbers(lambda x, y: x - y), "({0} - {1})"),
        Operation("mul", _numbers(lambda x, y: x * y), "({0} * {1})"),
        Operation("div", _numbers(lambda x, y: x / y), "({0} / {1})"),
        Operation("floordiv", _numbers(lambda x, y: x // y), "({0} // {1})"),
        Operation("mod", _numbers(lambda x, y: x % y), "({0} % {1})"),
        Operation("pow", _power, "({0} ^ {1})"),
        Operation("neg", _numbers(lambda x: -x), "(-{0})"),
        Operation("abs", _numbers(abs)),
        Operation("min", _numbers(min)),
        Operation("max", _numbers(max)),
        Operation("relu", _numbers(lambda x: x if x > 0 else 0 * x)),
        Operation("floor", _numbers(math.floor)),
        Operation("ceil", _numbers(math.ceil)),
        Operation("round", _numbers(round_half_away)),
        Operation("exp", _numbers(math.exp)),
        Operation("log", _numbers(math.log)),
        Operation("sqrt", _numbers(math.sqrt)),
        Operation("rsqrt", _numbers(lambda x: 1 / math.sqrt(x))),
        Operation("reciprocal_or_zero", _numbers(_reciprocal_or_zero)),
        Operation("assume", _numbers(_assume)),
        Operation("shift", _numbers(lambda x: x)),
        Operation("eq", lambda x, y: bool(x == y), "({0} == {1})"),
        Operation("ne", lambda x, y: bool(x != y), "({0} != {1})"),
        Operation("lt", _ordered(lambda x, y: x < y), "({0} < {1})"),
        Operation("le", _ordered(lambda x, y: x <= y), "({0} <= {1})"),
        Operation("gt", _ordered(lambda x, y: x > y), "({0} > {1})"),
        Operation("ge", _ordered(lambda x, y: x >= y), "({0} >= {1})"),
        Operation("and", lambda x, y: bool(x and y), "({0} and {1})"),
        Operation("or", lambda x, y: bool(x or y), "({0} or {1})"),
        Operation("not", lambda x: not x, "(not {0})"),
        Operation("where", lambda c, x, y: x if c else y, "({1} if {0} else {2})"),
        Operation("indicator", lambda x: 1 if x else 0),
        Operation("true", lambda x, y: True),
    )
}
"""``reciprocal_or_zero(x, least)`` is 1/x where |x| >= least, else 0; ``assume`` is its first argument, which must lie between the others;
``shift`` is its argument, whose error does not reach the output (what a softmax subtracts from all scores);
``true`` is the predicate of the selector that selects everything."""

PYTHON = {
    id(function): name
    for name, function in {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "div": operator.truediv,
        "neg": operator.neg,
        "abs": abs,
        "min": min,
        "max": max,
        "floor": math.floor,
        "ceil": math.ceil,
        "exp": math.exp,
        "log": math.log,
        "sqrt": math.sqrt,
        "float": float,
        "eq": operator.eq,
        "ne": operator.ne,
        "lt": operator.lt,
        "le": operator.le,
        "gt": operator.gt,
        "ge": operator.ge,
    }.items()
}
"""Functions of Python, by identity, that are one of these operations on numbers (``round`` is none: it takes a half to the even side)."""


def operation(function: "Operation | Callable[..., Value] | str") -> Operation:
    """An operation by name, or from a Python function."""
    if isinstance(function, Operation):
        return function
    if isinstance(function, str):
        return OPERATIONS[function]
    return Operation(getattr(function, "__name__", "function"), function)
