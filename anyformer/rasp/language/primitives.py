"""What the language knows without a library: tokens, indices, and the functions that no ``.rasp`` program could define.

The published language has the reserved ones; the additions (``abs``, ``exp``, ``maximum``, ...) may be redefined by a program.
"""

from collections.abc import Callable
from typing import Any

from anyformer.rasp.language.kinds import (
    MOST_ITEMS,
    Argument,
    Primitive,
    as_atom,
    as_integer,
    as_list,
    as_predicate,
    as_selector,
    as_sequence,
    calculate,
    kind,
)
from anyformer.rasp.language.places import RaspError
from anyformer.rasp.operations import OPERATIONS, Operation
from anyformer.rasp.sequences import (
    Elementwise,
    Sequence,
    aggregate,
    full,
    indices,
    length,
    maximum,
    select,
    selector_width,
    soft_aggregate,
    tokens,
)


def _select(keys: Argument, queries: Argument, predicate: Argument) -> Any:
    return select(as_sequence(keys), as_sequence(queries), as_predicate(predicate))


def _aggregate(selector: Argument, values: Argument, default: Argument | None = None) -> Any:
    return aggregate(as_selector(selector), as_sequence(values), 0 if default is None else as_atom(default))


def _maximum(selector: Argument, values: Argument, default: Argument | None = None) -> Any:
    return maximum(as_selector(selector), as_sequence(values), 0 if default is None else as_atom(default))


def _soft_aggregate(selector: Argument, scores: Argument, values: Argument) -> Any:
    return soft_aggregate(as_selector(selector), as_sequence(scores), as_sequence(values))


def _range(*bounds: Argument) -> list[int]:
    numbers = [as_integer(bound) for bound in bounds]
    if len(numbers) == 3 and numbers[2] == 0:
        raise RaspError(bounds[2].place, "the step of a range must not be 0")
    result = range(*numbers)
    if len(result) > MOST_ITEMS:
        raise RaspError(bounds[0].place, f"a range of {len(result):,} numbers is too long (at most {MOST_ITEMS:,})")
    return list(result)


def _zip(*lists: Argument) -> list[list[Any]]:
    columns = [as_list(column) for column in lists]
    for argument, column in zip(lists, columns, strict=True):
        if len(column) != len(columns[0]):
            raise RaspError(argument.place, f"zip needs lists of equal length, got {len(columns[0])} and {len(column)} items")
    return [list(row) for row in zip(*columns, strict=True)]


def _len(items: Argument) -> int:
    if not isinstance(items.value, (list, dict, str)):
        hint = "; length is the number of tokens" if isinstance(items.value, Sequence) else ""
        raise RaspError(items.place, f"len counts the items of a list, got {kind(items.value)}{hint}")
    return len(items.value)


def _elementwise(name: str) -> Callable[[Argument], Any]:
    """An operation of one value: of a sequence at every position, of an atom at once."""

    def apply(x: Argument) -> Any:
        sequence = as_sequence(x)
        return sequence.map(OPERATIONS[name]) if isinstance(x.value, Sequence) else calculate(x.place, name, x.value)

    return apply


def _converted(name: str, function: Callable[[Any], Any]) -> Sequence:
    return Elementwise(Operation(name, function), (tokens,)).named(f"tokens_{name}")


_X, _MANY = "x", 10_000
RESERVED: dict[str, Any] = {
    "tokens_asis": tokens,
    "tokens_str": _converted("str", str),
    "tokens_int": _converted("int", int),
    "tokens_float": _converted("float", float),
    "tokens_bool": _converted("bool", bool),
    "indices": indices,
    "length": length,
    "full_s": full,
    "True": True,
    "False": False,
    "select": Primitive("select", "keys, queries, comparison", 3, 3, _select),
    "aggregate": Primitive("aggregate", "selector, values, default", 2, 3, _aggregate),
    "selector_width": Primitive("selector_width", "selector", 1, 1, lambda s: selector_width(as_selector(s))),
    "round": Primitive("round", _X, 1, 1, _elementwise("round")),
    "indicator": Primitive("indicator", _X, 1, 1, _elementwise("indicator")),
    "range": Primitive("range", "start, stop, step", 1, 3, _range),
    "zip": Primitive("zip", "list, list, ...", 1, _MANY, _zip),
    "len": Primitive("len", "list", 1, 1, _len),
}
ADDED: dict[str, Any] = {
    "maximum": Primitive("maximum", "selector, values, default", 2, 3, _maximum),
    "soft_aggregate": Primitive("soft_aggregate", "selector, scores, values", 3, 3, _soft_aggregate),
} | {name: Primitive(name, _X, 1, 1, _elementwise(name)) for name in ("abs", "floor", "ceil", "exp", "log", "sqrt", "relu")}
WORDS = ("if", "else", "not", "and", "or", "in", "for", "def", "return", "out", "get")
"""Reserved besides the names above; ``out`` is the last value, ``get`` is reserved by the published language and unused."""
