"""Pass 2: which values every sequence can have (abstract interpretation).

    Finite   a set of values, and with it the *table* of an element-wise expression over its sources
    Real     an interval, with what is known of the spacing: every value is p/q with q <= denominator

A table is exact: it holds the value for every combination of source values, the undefined ones with their reasons. It is what makes
a compiled program right on all inputs, so a set that would be too large is refused or treated as an interval, never sampled.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from anyformer.errors import AnyformerError
from anyformer.rasp.graph import Graph, Node, Relation
from anyformer.rasp.operations import Operation, Undefined, Value
from anyformer.rasp.ranges import DISCRETE, LARGEST_DENOMINATOR, RULES, Real, range_of, rational

JOINT = 2**14
"""The largest number of combinations of source values that one table holds."""

SET = 2**12
"""The largest set of values of an average."""

EXCLUDED = {"lt": ("eq", "gt", "ge"), "gt": ("eq", "lt", "le"), "eq": ("ne", "lt", "gt")}
"""Comparisons of the same values that cannot hold together."""

Table = Any
"""A numpy array of objects, one axis a source."""


class Unreachable:
    """In tables: a combination of source values that no input has (a position at or beyond the length)."""


UNREACHABLE = Unreachable()


@dataclass(frozen=True)
class Reals:
    """Tokens that are real numbers in [low, high], as float64."""

    low: int | float
    high: int | float

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


@dataclass
class Inference:
    """The values of every node of a graph. ``supports[k]`` are the nodes whose values determine node k (itself where it is a source),
    ``tables[k]`` its value for each combination of theirs; a node with neither is :class:`Real`, or cannot be compiled (``problems``)."""

    graph: Graph
    vocab: tuple[Value, ...] | Reals
    max_length: int

    def __post_init__(self) -> None:
        self.values: list[Finite | Real | None] = []
        self.supports: list[tuple[int, ...]] = []
        self.tables: list[Table | None] = []
        self.problems: list[str] = []
        for k, node in enumerate(self.graph.nodes):
            self.values.append(None)
            self.supports.append((k,))
            self.tables.append(None)
            self._infer(k, node)

    def of(self, k: int) -> Finite | Real:
        """The values of node k."""
        found = self.values[k]
        return Finite((0,)) if found is None else found  # a node with a problem: the program is refused as a whole

    def finite_set(self, k: int) -> Finite | None:
        """The set of node k, or None."""
        found = self.of(k)
        return found if isinstance(found, Finite) else None

    def text(self, k: int) -> str:
        """Node k as text."""
        return self.graph.texts.get(k, f"node {k}")

    def _infer(self, k: int, node: Node) -> None:
        if any(self.values[a] is None for a in node.arguments):
            return  # its problem is that of an argument
        if node.kind == "constant":
            self._finish(k, (), np.array(node.value, dtype=object).reshape(()))
        elif node.kind == "elementwise":
            self._elementwise(k, node)
        else:
            self.values[k] = self._source(k, node)
            found = self.values[k]
            if isinstance(found, Finite):
                self._finish_source(k, found)

    def _finish(self, k: int, support: tuple[int, ...], table: Table) -> None:
        self.supports[k], self.tables[k] = support, table
        self.values[k] = finite(table.reshape(-1).tolist())
        if not self.of(k).values:  # type: ignore[union-attr]
            self.values[k] = None
            self.problems.append(f"{self.text(k)} has no value at all: {finite(table.reshape(-1).tolist()).undefined}")

    def _source(self, k: int, node: Node) -> Finite | Real | None:
        n = self.max_length
        if node.kind == "tokens":
            return (
                finite(self.vocab)
                if isinstance(self.vocab, tuple)
                else Real(float(self.vocab.low), float(self.vocab.high), raw=True)
            )
        if node.kind == "indices":
            return Finite(tuple(range(n)))
        assert node.relation is not None
        one, _, always = self.cardinality(node.relation)
        if node.kind == "width":
            if self.never(node.relation):
                return Finite((0,))
            return Finite(tuple(range(1 if always else 0, (1 if one else n) + 1)))
        values = self.of(node.arguments[0])
        default = () if always else (node.value,)
        if isinstance(values, Finite):
            values = replace(values, undefined=None)  # selecting an undefined value is an error of the run
        if node.kind == "softmax":
            return self._soft(k, node, values)
        if isinstance(values, Finite) and (one or not values.numeric or len(values.values) == 1):
            return finite((*values.values, *default))
        if not all(isinstance(d, (int, float)) for d in default):
            self.problems.append(f"{self.text(k)}: the default {node.value!r} is no number, the values are")
            return None
        if isinstance(values, Finite):
            found = means(values, n)
            return finite((*found, *default)) if found is not None else _hull(spaced(values, n), default)
        return _hull(values if one else values.mean(n), default)

    def cardinality(self, r: int) -> tuple[bool, bool, bool]:
        """What is known of a relation: it selects at most one key, every position selects itself, every query selects some key."""
        relation = self.graph.relations[r]
        if relation.kind == "select":
            return self._selects(relation)
        parts = [self.cardinality(p) for p in relation.parts]
        if relation.kind == "and":
            itself = all(p[1] for p in parts)
            return any(p[0] for p in parts), itself, itself
        if relation.kind == "or":
            return False, any(p[1] for p in parts), any(p[2] for p in parts)
        return False, False, False

    def never(self, r: int) -> bool:
        """Whether a relation is seen to select nothing: parts that are anded compare the same keys and queries and exclude each other."""
        relation = self.graph.relations[r]
        if relation.kind == "select":
            return False
        if relation.kind != "and":
            return relation.kind == "or" and all(map(self.never, relation.parts))
        parts, todo = [], list(relation.parts)
        while todo:
            part = self.graph.relations[todo.pop()]
            if part.kind == "and":
                todo += part.parts
            elif part.kind == "select" and part.operation is not None:
                parts.append((part.keys, part.queries, part.operation.name))
        return any(
            a[:2] == b[:2] and b[2] in EXCLUDED.get(a[2], ()) for i, a in enumerate(parts) for b in parts[i + 1 :] + parts[:i]
        )

    def _selects(self, relation: Relation) -> tuple[bool, bool, bool]:
        assert relation.operation is not None
        name = relation.operation.name
        if name == "true":
            return self.max_length == 1, True, True
        itself = relation.keys == relation.queries and name in ("eq", "le", "ge")
        if name != "eq":
            return False, itself, itself
        keys = self.finite_set(relation.keys)
        support = self.supports[relation.keys]
        places = len(support) == 1 and self.graph.nodes[support[0]].kind == "indices"
        one = places and keys is not None and len(keys.values) == self.max_length
        return one, itself, itself or self._inside(relation)

    def _inside(self, relation: Relation) -> bool:
        """Whether the keys are the positions and every query, for every length, is one of them."""
        table, support = self.tables[relation.queries], self.supports[relation.queries]
        if self.graph.nodes[relation.keys].kind != "indices" or table is None:
            return False
        whole = next((s for s in support if self._is_length(s)), None)
        if whole is None:
            return all(v in (0, UNREACHABLE) for v in table.reshape(-1))
        lengths = np.broadcast_to(
            np.array(self._set(whole).values).reshape([-1 if s == whole else 1 for s in support]), table.shape
        )
        return all(
            v is UNREACHABLE or (isinstance(v, (int, float)) and v in range(int(n)))
            for v, n in zip(table.reshape(-1), lengths.reshape(-1), strict=True)
        )

    def _soft(self, k: int, node: Node, values: Finite | Real) -> Real | None:
        scores = self.of(node.arguments[1])
        for what, found in (("values", values), ("scores", scores)):
            if isinstance(found, Finite) and not found.numeric:
                self.problems.append(f"{self.text(k)}: the {what} are no numbers")
                return None
        return _hull(replace(range_of(values), denominator=None, raw=False), (node.value,))

    def _elementwise(self, k: int, node: Node) -> None:
        arguments = node.arguments
        joint = tuple(sorted({s for a in arguments for s in self.supports[a]}))
        for support in (joint, tuple(sorted(set(arguments) - self._constants(arguments)))):
            sets = [self.finite_set(s) for s in support]
            if all(s is not None for s in sets) and math.prod(len(s.values) for s in sets if s) <= JOINT:
                if support != joint and any(s.undefined for s in sets if s):
                    break
                self._finish(k, support, self._tabulated(node, support))
                return
        assert node.operation is not None
        ranges = []
        for a in arguments:
            found = self.of(a)
            if isinstance(found, Finite) and (not found.numeric or found.undefined):
                why = f"may have no value ({found.undefined})" if found.undefined else "holds values that are no numbers"
                self.problems.append(f"{self.text(k)}: {self._size(joint)}, and {self.text(a)} {why}")
                return
            ranges.append(range_of(found))
        name = node.operation.name
        if name == "mul" and arguments[0] == arguments[1]:
            name, ranges = "pow", [ranges[0], Real(2.0, 2.0, 1)]  # a square is not negative
        result = real_operation(name, ranges)
        if isinstance(result, str):
            self.problems.append(f"{self.text(k)}: {self._size(joint)}, and {result}")
        elif node.operation.name in DISCRETE:
            self._finish_source(k, Finite(DISCRETE[node.operation.name]))
        elif node.operation.name in ("floor", "ceil", "round"):
            self._finish_source(k, Finite(tuple(range(int(result.low), int(result.high) + 1))))
        else:
            self.values[k] = result

    def _finish_source(self, k: int, found: Finite) -> None:
        """A node whose values are a set but not a table: others take it as a source."""
        column = np.empty(len(found.values), dtype=object)
        column[:] = found.values
        self.values[k], self.supports[k], self.tables[k] = found, (k,), column

    def _constants(self, arguments: tuple[int, ...]) -> set[int]:
        return {a for a in arguments if self.graph.nodes[a].kind == "constant"}

    def _size(self, joint: tuple[int, ...]) -> str:
        sets = [self.finite_set(s) for s in joint]
        if all(s is not None for s in sets):
            size = math.prod(len(s.values) for s in sets if s)
            return f"its value set explodes ({size:,} combinations of its sources, at most {JOINT:,})"
        real = [self.text(s) for s, found in zip(joint, sets, strict=True) if found is None]
        return f"{', '.join(real)} is real-valued"

    def _tabulated(self, node: Node, support: tuple[int, ...]) -> Table:
        assert node.operation is not None
        columns = [self.spread(a, support) for a in node.arguments]
        out = np.frompyfunc(_reachable(node.operation), len(columns), 1)(*columns)
        out = np.broadcast_to(np.asarray(out, dtype=object), tuple(len(self._set(s).values) for s in support))
        beyond = self._beyond(support)
        if beyond is not None:
            out = out.copy()
            out[np.broadcast_to(beyond, out.shape)] = UNREACHABLE
        return out

    def _beyond(self, support: tuple[int, ...]) -> np.ndarray | None:
        """Where a position is not below the length, if a table has both as sources."""
        place = next((s for s in support if self.graph.nodes[s].kind == "indices"), None)
        whole = next((s for s in support if self._is_length(s)), None)
        if place is None or whole is None:
            return None
        axes = [[-1 if s == side else 1 for s in support] for side in (place, whole)]
        position, length = (np.array(self._set(s).values).reshape(a) for s, a in zip((place, whole), axes, strict=True))
        return position >= length

    def _is_length(self, k: int) -> bool:
        node = self.graph.nodes[k]
        if node.kind != "width" or node.relation is None:
            return False
        relation = self.graph.relations[node.relation]
        return relation.operation is not None and relation.operation.name == "true"

    def _set(self, k: int) -> Finite:
        found = self.finite_set(k)
        assert found is not None
        return found

    def spread(self, k: int, support: tuple[int, ...]) -> Table:
        """The table of node k with one axis for each of ``support`` (length 1 where it does not depend on it)."""
        if k in support and self.supports[k] != (k,):
            found = self._set(k)
            column = np.empty(len(found.values), dtype=object)
            column[:] = found.values
            return column.reshape([-1 if s == k else 1 for s in support])
        table = self.tables[k]
        assert table is not None
        own = self.supports[k]
        return table.reshape([table.shape[own.index(s)] if s in own else 1 for s in support])


def real_operation(name: str, ranges: list[Real]) -> Real | str:
    """The range of an operation of real numbers, or why it has none."""
    if name not in RULES:
        return f"{name} is not an operation of real numbers (those are {', '.join(sorted(RULES))})"
    return RULES[name](*ranges)


def _reachable(operation: Operation) -> Callable[..., Value]:
    def apply(*values: Value) -> Value:
        return UNREACHABLE if any(v is UNREACHABLE for v in values) else operation(*values)

    return apply


def means(values: Finite, n: int) -> list[int | float] | None:
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


def _hull(r: Real, extra: tuple[int | float, ...]) -> Real:
    if not extra:
        return r
    other = range_of(finite(extra))
    denominator = None if r.denominator is None or other.denominator is None else max(r.denominator, other.denominator)
    return replace(r, low=min(r.low, other.low), high=max(r.high, other.high), denominator=denominator, raw=False)
