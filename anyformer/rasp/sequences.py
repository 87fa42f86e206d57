"""RASP in Python: sequences, selectors, and the operators that build them. Nothing is computed here; an expression is a graph.

    sequence   a value at every position: tokens, indices, constants, element-wise operations, aggregates
    selector   an (n, n) Boolean matrix: which keys every query selects

    total = aggregate(select(indices, indices, LEQ), tokens) * (indices + 1)       # the running sum

The language is that of Weiss, Goldberg and Yahav, "Thinking like transformers" (2106.06981), with real numbers; ``aggregate`` is the
mean over the selected keys, or ``default`` (0) where none is selected. Two forms go beyond it: :func:`maximum` (hard attention to the
best selected key) and :func:`soft_aggregate` (one ordinary softmax head).
"""

import math
from collections.abc import Callable
from copy import copy
from typing import Any

from anyformer.errors import AnyformerError
from anyformer.rasp.operations import OPERATIONS, Operation, Value, operation

LIFTED = (bool, int, float, str)


class Sequence:
    """A value at every position. Python's operators build element-wise expressions; ``==`` too, so compare identities with ``is``."""

    label: str | None = None

    def named(self, label: str) -> "Sequence":
        """The same sequence under a name, which coordinates, drawings and messages then use."""
        named = copy(self)
        named.label = label
        return named

    def __repr__(self) -> str:
        return printed(self)

    def map(self, function: Callable[[Value], Value] | str) -> "Sequence":
        """``function`` at every position."""
        return Elementwise(operation(function), (self,))

    def __add__(self, other: Any) -> "Sequence":
        return _binary("add", self, other)

    def __radd__(self, other: Any) -> "Sequence":
        return _binary("add", other, self)

    def __sub__(self, other: Any) -> "Sequence":
        return _binary("sub", self, other)

    def __rsub__(self, other: Any) -> "Sequence":
        return _binary("sub", other, self)

    def __mul__(self, other: Any) -> "Sequence":
        return _binary("mul", self, other)

    def __rmul__(self, other: Any) -> "Sequence":
        return _binary("mul", other, self)

    def __truediv__(self, other: Any) -> "Sequence":
        return _binary("div", self, other)

    def __rtruediv__(self, other: Any) -> "Sequence":
        return _binary("div", other, self)

    def __floordiv__(self, other: Any) -> "Sequence":
        return _binary("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> "Sequence":
        return _binary("floordiv", other, self)

    def __mod__(self, other: Any) -> "Sequence":
        return _binary("mod", self, other)

    def __rmod__(self, other: Any) -> "Sequence":
        return _binary("mod", other, self)

    def __pow__(self, other: Any) -> "Sequence":
        return _binary("pow", self, other)

    def __rpow__(self, other: Any) -> "Sequence":
        return _binary("pow", other, self)

    def __neg__(self) -> "Sequence":
        return Elementwise(OPERATIONS["neg"], (self,))

    def __abs__(self) -> "Sequence":
        return Elementwise(OPERATIONS["abs"], (self,))

    def __eq__(self, other: Any) -> "Sequence":  # type: ignore[override]
        return _binary("eq", self, other)

    def __ne__(self, other: Any) -> "Sequence":  # type: ignore[override]
        return _binary("ne", self, other)

    def __lt__(self, other: Any) -> "Sequence":
        return _binary("lt", self, other)

    def __le__(self, other: Any) -> "Sequence":
        return _binary("le", self, other)

    def __gt__(self, other: Any) -> "Sequence":
        return _binary("gt", self, other)

    def __ge__(self, other: Any) -> "Sequence":
        return _binary("ge", self, other)

    def __and__(self, other: Any) -> "Sequence":
        return _binary("and", self, other)

    def __rand__(self, other: Any) -> "Sequence":
        return _binary("and", other, self)

    def __or__(self, other: Any) -> "Sequence":
        return _binary("or", self, other)

    def __ror__(self, other: Any) -> "Sequence":
        return _binary("or", other, self)

    def __invert__(self) -> "Sequence":
        return Elementwise(OPERATIONS["not"], (self,))

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise AnyformerError(
            "a sequence has no truth value before it runs: write & | ~ and where(...) instead of and, or, not, if"
        )

    def __iter__(self) -> Any:
        raise AnyformerError("a sequence has no items before it runs; use aggregate and select to move values")


class Tokens(Sequence):
    """The input."""


class Indices(Sequence):
    """0, 1, 2, ..."""


class Constant(Sequence):
    """The same value everywhere."""

    def __init__(self, value: Value):
        self.value = value


class Elementwise(Sequence):
    """An operation of the values at the same position."""

    def __init__(self, operation: Operation, arguments: tuple[Sequence, ...]):
        self.operation = operation
        self.arguments = arguments


class Aggregate(Sequence):
    """``how`` = "mean", the average of ``values`` over the selected keys; "max", the average over those of the selected keys whose
    ``scores`` are largest; "softmax", weighted with exp(scores) over the selected keys. ``default`` where none is selected."""

    def __init__(
        self, selector: "Selector", values: Sequence, default: Value = 0, how: str = "mean", scores: Sequence | None = None
    ):
        self.selector = selector
        self.values = values
        self.default = default
        self.how = how
        self.scores = scores


class SelectorWidth(Sequence):
    """How many keys each query selects."""

    def __init__(self, selector: "Selector"):
        self.selector = selector


class Selector:
    """Which keys each query selects. ``&``, ``|`` and ``~`` combine selectors of any keys and queries."""

    label: str | None = None

    def named(self, label: str) -> "Selector":
        """The same selector under a name."""
        named = copy(self)
        named.label = label
        return named

    def __repr__(self) -> str:
        return printed(self)

    def __and__(self, other: "Selector") -> "Selector":
        return Combined(OPERATIONS["and"], (self, _selector(other)))

    def __or__(self, other: "Selector") -> "Selector":
        return Combined(OPERATIONS["or"], (self, _selector(other)))

    def __invert__(self) -> "Selector":
        return Combined(OPERATIONS["not"], (self,))

    def __bool__(self) -> bool:
        raise AnyformerError("a selector has no truth value before it runs: write & | ~ instead of and, or, not")


class Select(Selector):
    """``predicate(key, query)`` for every pair of positions."""

    def __init__(self, keys: Sequence, queries: Sequence, predicate: Operation):
        self.keys = keys
        self.queries = queries
        self.predicate = predicate


class Combined(Selector):
    """and, or, not of selectors."""

    def __init__(self, operation: Operation, parts: tuple[Selector, ...]):
        self.operation = operation
        self.parts = parts


def lift(value: Any) -> Sequence:
    """A sequence; a constant becomes one."""
    if isinstance(value, Sequence):
        return value
    if isinstance(value, Selector):
        raise AnyformerError("a selector was given where a sequence is needed; aggregate it, or take its selector_width")
    if not isinstance(value, LIFTED):
        raise AnyformerError(f"a constant must be a number, a Boolean or a string, got {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise AnyformerError(f"a constant must be finite, got {value}")
    return Constant(value)


def _selector(value: Any) -> Selector:
    if not isinstance(value, Selector):
        raise AnyformerError(
            f"a selector is needed, got a {type(value).__name__}; make one with select(keys, queries, predicate)"
        )
    return value


def _binary(name: str, x: Any, y: Any) -> Sequence:
    return Elementwise(OPERATIONS[name], (lift(x), lift(y)))


tokens = Tokens()
indices = Indices()
EQ, NEQ, LT, LEQ, GT, GEQ, TRUE = (OPERATIONS[name] for name in ("eq", "ne", "lt", "le", "gt", "ge", "true"))


def select(keys: Any, queries: Any, predicate: Operation | Callable[[Value, Value], bool]) -> Selector:
    """The selector whose entry (query, key) is ``predicate(keys[key], queries[query])``."""
    return Select(lift(keys), lift(queries), operation(predicate))


full = Select(indices, indices, TRUE)


def aggregate(selector: Selector, values: Any, default: Value = 0) -> Sequence:
    """``out_q = mean of values_k over the keys k that q selects``; ``default`` where none is selected. Values that are no numbers have a
    mean only where all selected ones are equal."""
    return Aggregate(_selector(selector), lift(values), default)


def maximum(selector: Selector, values: Any, default: Value = 0) -> Sequence:
    """``out_q = max of values_k over the selected keys``: average-hard attention whose score is the value itself."""
    values = lift(values)
    return Aggregate(_selector(selector), values, default, "max", values)


def soft_aggregate(selector: Selector, scores: Any, values: Any, default: Value = 0) -> Sequence:
    """``out_q = sum_k exp(scores_k) values_k / sum_k exp(scores_k)`` over the selected keys: one head of ordinary softmax attention."""
    return Aggregate(_selector(selector), lift(values), default, "softmax", lift(scores))


def selector_width(selector: Selector) -> Sequence:
    """How many keys each query selects."""
    return SelectorWidth(_selector(selector))


length = selector_width(full).named("length")


def where(condition: Any, then: Any, otherwise: Any) -> Sequence:
    """``then`` where the condition holds, else ``otherwise``."""
    return Elementwise(OPERATIONS["where"], (lift(condition), lift(then), lift(otherwise)))


def assume(values: Any, low: int | float, high: int | float) -> Sequence:
    """``values``, which are known to lie in [low, high]: the compiler may use it, and an input on which they do not is an error of the run."""
    return Elementwise(OPERATIONS["assume"], (lift(values), lift(low), lift(high)))


def apply(function: Callable[..., Value] | str, *arguments: Any) -> Sequence:
    """A function of several values at the same position."""
    return Elementwise(operation(function), tuple(map(lift, arguments)))


def children(node: Sequence | Selector) -> tuple[Sequence | Selector, ...]:
    """What an expression is made of."""
    if isinstance(node, Elementwise):
        return node.arguments
    if isinstance(node, Aggregate):
        return (node.selector, node.values) + (() if node.scores is None else (node.scores,))
    if isinstance(node, SelectorWidth):
        return (node.selector,)
    if isinstance(node, Select):
        return node.keys, node.queries
    return node.parts if isinstance(node, Combined) else ()


def in_order(roots: tuple[Sequence | Selector, ...]) -> list[Sequence | Selector]:
    """Every expression under ``roots``, once, each after its parts."""
    done: dict[int, Sequence | Selector] = {}
    stack: list[tuple[Sequence | Selector, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if id(node) in done:
            continue
        if ready:
            done[id(node)] = node
        else:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(children(node)) if id(child) not in done)
    return list(done.values())


def restricted(program: Sequence) -> Sequence:
    """The program with every selector restricted to keys at or before the query: what it means to a causal transformer."""
    before = Select(indices, indices, LEQ)
    done: dict[int, Any] = {}
    for node in in_order((program,)):
        parts = [done[id(child)] for child in children(node)]
        if isinstance(node, Elementwise):
            new: Any = Elementwise(node.operation, tuple(parts))
        elif isinstance(node, Aggregate):
            new = Aggregate(parts[0] & before, parts[1], node.default, node.how, parts[2] if len(parts) > 2 else None)
        elif isinstance(node, SelectorWidth):
            new = SelectorWidth(parts[0] & before)
        elif isinstance(node, Select):
            new = Select(parts[0], parts[1], node.predicate)
        else:
            new = Combined(node.operation, tuple(parts)) if isinstance(node, Combined) else node
        if new is not node and node.label:
            new.label = node.label
        done[id(node)] = new
    return done[id(program)]


def printed(node: Sequence | Selector) -> str:
    """The expression as text; parts with a name by their name."""
    texts: dict[int, str] = {}
    for part in in_order((node,)):
        texts[id(part)] = part.label if part.label and part is not node else text_of(part, texts)
    return texts[id(node)]


def text_of(node: Sequence | Selector, texts: dict[int, str]) -> str:
    """The expression as text, given those of its parts by their ``id``."""
    return _text(node, [texts[id(child)] for child in children(node)])


def _text(node: Sequence | Selector, inner: list[str]) -> str:
    if isinstance(node, Constant):
        return repr(node.value)
    if isinstance(node, (Elementwise, Combined)):
        return _short(node.operation.printed(*inner))
    if isinstance(node, Select):
        return _short(f"select({inner[0]}, {inner[1]}, {node.predicate.name})")
    if isinstance(node, SelectorWidth):
        return _short(f"selector_width({inner[0]})")
    if isinstance(node, Aggregate):
        name = {"mean": "aggregate", "max": "maximum", "softmax": "soft_aggregate"}[node.how]
        default = "" if node.default == 0 else f", default={node.default!r}"
        return _short(f"{name}({', '.join(inner[:2])}{default})")
    return type(node).__name__.lower()


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
