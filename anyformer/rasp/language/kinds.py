"""The kinds of value of a ``.rasp`` program, and what is required of them.

An atom is a number, a Boolean or a string; a list and a dictionary hold any values; sequences and selectors are expressions of
:mod:`anyformer.rasp`, which have no values before they run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyformer.errors import AnyformerError
from anyformer.rasp.language.places import Place, RaspError
from anyformer.rasp.operations import MOST_BITS, OPERATIONS, Operation, Undefined
from anyformer.rasp.sequences import Selector, Sequence, lift

MOST_ITEMS = 100_000
MOST_DIGITS = 300


@dataclass(frozen=True)
class Argument:
    """A value and the place of the expression that gave it."""

    value: Any
    place: Place


@dataclass(frozen=True)
class Predicate:
    """A comparison given to a function, as in ``select(keys, queries, ==)``."""

    operation: Operation


@dataclass(frozen=True)
class Ran:
    """What a sequence or a selector gave on an input: a list, or a matrix of Booleans (queries, keys)."""

    program: Sequence | Selector
    tokens: list[Any]
    values: Any


@dataclass(frozen=True)
class Primitive:
    """A function of the language itself. It gets :class:`Argument` values, ``least`` to ``most`` of them."""

    name: str
    parameters: str
    least: int
    most: int
    function: Callable[..., Any]


def is_atom(value: Any) -> bool:
    """Whether a value is a number, a Boolean or a string."""
    return isinstance(value, (bool, int, float, str))


def kind(value: Any) -> str:
    """What a value is, in words."""
    for types, name in _KINDS:
        if isinstance(value, types):
            return name
    return "a function"


_KINDS: list[tuple[Any, str]] = [
    (Sequence, "a sequence"),
    (Selector, "a selector"),
    (bool, "a Boolean"),
    ((int, float), "a number"),
    (str, "a string"),
    (list, "a list"),
    (dict, "a dictionary"),
    (Predicate, "a comparison"),
    (Ran, "the result of a run"),
]


def as_sequence(argument: Argument) -> Sequence:
    """A sequence; an atom becomes the same value at every position."""
    value = argument.value
    if isinstance(value, Selector):
        advice = "aggregate it, or take its selector_width"
        raise RaspError(argument.place, f"a selector where a sequence is needed; {advice}")
    if not isinstance(value, Sequence) and not is_atom(value):
        raise RaspError(argument.place, f"{kind(value)} where a sequence is needed")
    return within(argument.place, lift, value)


def as_selector(argument: Argument) -> Selector:
    """A selector, and nothing else."""
    if not isinstance(argument.value, Selector):
        advice = "make one with select(keys, queries, ==)"
        raise RaspError(argument.place, f"{kind(argument.value)} where a selector is needed; {advice}")
    return argument.value


def as_atom(argument: Argument) -> Any:
    """An atom: known before the program runs."""
    if not is_atom(argument.value):
        raise RaspError(argument.place, f"{kind(argument.value)} where a number, a Boolean or a string is needed")
    return argument.value


def as_integer(argument: Argument) -> int:
    """An integer that is known before the program runs."""
    if not isinstance(argument.value, int) or isinstance(argument.value, bool):
        got = repr(argument.value) if isinstance(argument.value, (float, bool)) else kind(argument.value)
        raise RaspError(argument.place, f"{got} where an integer is needed")
    return argument.value


def as_list(argument: Argument) -> list[Any]:
    """A list."""
    if not isinstance(argument.value, list):
        raise RaspError(argument.place, f"{kind(argument.value)} where a list is needed")
    return argument.value


def as_predicate(argument: Argument) -> Operation:
    """One of the six comparisons."""
    if not isinstance(argument.value, Predicate):
        raise RaspError(argument.place, f"{kind(argument.value)} where a comparison (== != < <= > >=) is needed")
    return argument.value.operation


def as_input(argument: Argument) -> list[Any]:
    """The tokens of a string or of a list of atoms: all strings, all Booleans, or all numbers."""
    tokens = list(argument.value) if isinstance(argument.value, (str, list)) else None
    if not tokens:
        got = "an empty one" if tokens == [] else kind(argument.value)
        raise RaspError(argument.place, f"an input is a string or a list of tokens that is not empty, got {got}")
    for token in tokens:
        if not is_atom(token):
            raise RaspError(argument.place, f"a token is a number, a Boolean or a string, got {kind(token)}")
        if isinstance(token, int) and token.bit_length() > MOST_BITS:
            raise RaspError(argument.place, f"an integer token has at most {MOST_BITS} bits, got {token.bit_length()}")
        if kind(token) != kind(tokens[0]):
            raise RaspError(argument.place, f"the tokens of an input are of one kind, got {kind(tokens[0])} and {kind(token)}")
    return tokens


def within(place: Place, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``; an error of the library gets a place."""
    try:
        return function(*arguments)
    except RaspError:
        raise
    except AnyformerError as error:
        raise RaspError(place, str(error)) from None


def parsed_number(text: str, place: Place) -> int | float:
    """The number that a text spells."""
    digits = text.lstrip("+-")
    if digits.isdigit():
        if len(digits) > MOST_DIGITS:
            raise RaspError(place, f"an integer of {len(digits)} digits is too long (at most {MOST_DIGITS})")
        return int(text)
    return calculate(place, "add", float(text), 0.0)


def calculate(place: Place, name: str, *values: Any) -> Any:
    """An element-wise operation of atoms, at once."""
    result = OPERATIONS[name](*values)
    if isinstance(result, Undefined):
        raise RaspError(place, result.reason)
    return result
