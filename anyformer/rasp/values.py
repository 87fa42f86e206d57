"""Pass 2: which values every sequence can have (abstract interpretation).

    Finite   a set of values, and with it the *table* of an element-wise expression over its sources
    Real     an interval, with what is known of the spacing: every value is p/q with q <= denominator

A table is exact: it holds the value for every combination of source values, the undefined ones with their reasons. It is what makes
a compiled program right on all inputs, so a set that would be too large is refused or treated as an interval, never sampled.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import numpy as np

from anyformer.rasp.graph import Graph, Node, Relation
from anyformer.rasp.operations import Operation, Value
from anyformer.rasp.ranges import DISCRETE, RULES, Real, range_of
from anyformer.rasp.sets import UNREACHABLE, Finite, Reals, Unreachable, finite, hull, means, spaced

__all__ = ["UNREACHABLE", "Finite", "Inference", "Reals", "Unreachable", "finite"]

JOINT = 2**14
"""The largest number of combinations of source values that one table holds."""

EXCLUDED = {"lt": ("eq", "gt", "ge"), "gt": ("eq", "lt", "le"), "eq": ("ne", "lt", "gt")}
"""Comparisons of the same values that cannot hold together."""

Table = Any
"""A numpy array of objects, one axis a source."""


@dataclass
class Inference:
    """The values of every node of a graph. ``supports[k]`` are the nodes whose values determine node k (itself where it is a source),
    ``tables[k]`` its value for each combination of theirs; a node with neither is :class:`Real`, or cannot be compiled (``problems``)."""

    graph: Graph
    vocab: tuple[Value, ...] | Reals
    max_length: int
    joint: int = JOINT
    """Above this many combinations of sources, a table over the arguments is taken where there is one: a layer later, but smaller."""

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
        self.values[k] = found = finite(table.reshape(-1).tolist())
        if not found.values and k in self.graph.roots:
            self.values[k] = None
            self.problems.append(f"{self.text(k)} has no value at all: {found.undefined}")

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
        values, alike = self.of(node.arguments[0]), self.alike(node)
        default = () if always else (node.value,)
        if isinstance(values, Finite):
            values = replace(values, undefined=None)  # selecting an undefined value is an error of the run
            if not values.values:
                return finite((node.value,))
            numbers = [v for v in values.values if isinstance(v, (int, float))]
            if 1 < len(numbers) < len(values.values) and not alike:
                self.problems.append(f"{self.text(k)}: {self.text(node.arguments[0])} mixes words and numbers, which have a mean")
                return None
        if node.kind == "softmax":
            return self._soft(k, node, values)
        if isinstance(values, Finite) and (alike or not values.numeric or len(values.values) == 1):
            return finite((*values.values, *default))
        if not all(isinstance(d, (int, float)) for d in default):
            self.problems.append(f"{self.text(k)}: the default {node.value!r} is no number, the values are")
            return None
        if isinstance(values, Finite):
            found = means(values, n)
            return finite((*found, *default)) if found is not None else hull(spaced(values, n), default)
        return hull(values if one else values.mean(n), default)

    def may_fail(self, k: int) -> bool:
        """Whether aggregate k may meet keys without a value, or different words."""
        node = self.graph.nodes[k]
        found = [s for s in map(self.of, node.arguments) if isinstance(s, Finite)]
        return any(s.undefined for s in found) or (bool(found) and not found[0].numeric and not self.alike(node))

    def alike(self, node: Node) -> bool:
        """Whether the values that a query averages are surely all the same: those of one key, or of keys with one value."""
        assert node.relation is not None
        if self.cardinality(node.relation)[0]:
            return True
        if node.kind == "max" and self.graph.nodes[node.arguments[1]].kind == "indices":
            return True
        todo = [node.relation]
        while todo:
            relation = self.graph.relations[todo.pop()]
            todo += relation.parts if relation.kind == "and" else ()
            if relation.operation is not None and relation.kind == "select" and relation.operation.known == "eq":
                keys = self.supports[relation.keys]
                if keys == (relation.keys,) == self.supports[node.arguments[0]]:
                    return True
        return False

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
                parts.append((part.keys, part.queries, part.operation.known))
        return any(
            a[:2] == b[:2] and b[2] in EXCLUDED.get(a[2], ()) for i, a in enumerate(parts) for b in parts[i + 1 :] + parts[:i]
        )

    def _selects(self, relation: Relation) -> tuple[bool, bool, bool]:
        assert relation.operation is not None
        name = relation.operation.known
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
        return hull(replace(range_of(values), denominator=None, raw=False), (node.value,))

    def _elementwise(self, k: int, node: Node) -> None:
        arguments = node.arguments
        joint = tuple(sorted({s for a in arguments for s in self.supports[a]}))
        direct = tuple(sorted(set(arguments) - self._constants(arguments)))
        for support, most in ((joint, self.joint), (direct, JOINT), (joint, JOINT)):
            sets = [self.finite_set(s) for s in support]
            if all(s is not None for s in sets) and math.prod(len(s.values) for s in sets if s) <= most:
                if support is direct and any(s.undefined or not s.values for s in sets if s):
                    continue
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
        name = node.operation.known
        if name in DISCRETE:
            ranges = [self.compared_range(a, arguments) for a in arguments]
        if name == "mul" and arguments[0] == arguments[1]:
            name, ranges = "pow", [ranges[0], Real(2.0, 2.0, 1)]  # a square is not negative
        result = real_operation(name, ranges, node.operation)
        if isinstance(result, str):
            self.problems.append(f"{self.text(k)}: {self._size(joint)}, and {result}")
        elif name in DISCRETE:
            self._finish_source(k, Finite(DISCRETE[name]))
        elif name in ("floor", "ceil", "round"):
            self._finish_source(k, Finite(tuple(range(int(result.low), int(result.high) + 1))))
        else:
            self.values[k] = result

    def compared_range(self, k: int, arguments: tuple[int, ...]) -> Real:
        """The range of one side of a comparison: whole numbers of a set beside an input are as exact as that (they are computed so)."""
        found = self.of(k)
        other = any(isinstance(self.of(a), Real) and self.of(a).raw for a in arguments)  # type: ignore[union-attr]
        whole = isinstance(found, Finite) and all(float(v).is_integer() and abs(v) < 2**20 for v in found.values)
        return replace(range_of(found), raw=True) if other and whole else range_of(found)

    def _finish_source(self, k: int, found: Finite) -> None:
        """A node whose values are a set but not a table: others take it as a source."""
        column = np.empty(len(found.values), dtype=object)
        column[:] = found.values
        if found.numeric and len(set(found.code().values())) < len(found.values):
            self.problems.append(f"{self.text(k)} has integers that float64 does not tell apart")
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
        with np.errstate(all="ignore"):  # the operation says itself where it has no value
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
        return relation.operation is not None and relation.operation.known == "true"

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


def real_operation(name: str | None, ranges: list[Real], operation: Operation) -> Real | str:
    """The range of an operation of real numbers by the rule called ``name``, or why it has none."""
    if name not in RULES:
        what = operation.name if operation.listed else f"your function {operation.name}"
        return f"{what} is not an operation of real numbers (those are {', '.join(sorted(RULES))})"
    if len(ranges) != (takes := len(signature(RULES[name]).parameters)):
        return f"{operation.name} of real numbers takes {takes} values, got {len(ranges)}"
    found = RULES[name](*ranges)
    if isinstance(found, Real) and not math.isfinite(found.high - found.low):
        return "its value may be too large for a float"
    return found


def _reachable(operation: Operation) -> Callable[..., Value]:
    def apply(*values: Value) -> Value:
        return UNREACHABLE if any(v is UNREACHABLE for v in values) else operation(*values)

    return apply
