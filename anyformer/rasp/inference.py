"""Which values every sequence can have (abstract interpretation): a graph becomes :class:`~anyformer.rasp.known.Known`.

A table is exact: it holds the value for every combination of source values, the undefined ones with their reasons. It is what makes
a compiled program right on all inputs, so a set that would be too large is refused or treated as an interval, never sampled.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from inspect import signature

import numpy as np

from anyformer.rasp.cardinality import alike, cardinality, never
from anyformer.rasp.graph import Graph, Node
from anyformer.rasp.known import Known, Table, column_of
from anyformer.rasp.operations import OPERATIONS, Operation, Value
from anyformer.rasp.ranges import DISCRETE, ROUNDINGS, RULES, Real, range_of
from anyformer.rasp.refusals import CannotCompile, Refusal
from anyformer.rasp.sets import UNREACHABLE, Finite, Reals, finite, hull, means, spaced

JOINT = 2**14
"""The largest number of combinations of source values that one table holds."""


def infer(graph: Graph, vocab: tuple[Value, ...] | Reals, max_length: int, joint: int = JOINT) -> Known:
    """The values of every node. Above ``joint`` combinations of sources a table over the arguments is taken where there is one: a layer
    later, but smaller."""
    inference = _Inference(Known(graph, vocab, max_length), joint)
    for k, node in enumerate(graph.nodes):
        inference.add(k, node)
    return inference.known


class _Inference:
    """Fills what is known, node by node."""

    def __init__(self, known: Known, joint: int):
        self.known = known
        self.graph = known.graph
        self.joint = joint

    def add(self, k: int, node: Node) -> None:
        """The next node, k."""
        known = self.known
        known.values.append(None)
        known.supports.append((k,))
        known.tables.append(None)
        if any(known.values[a] is None for a in node.arguments):
            return  # its problem is that of an argument
        try:
            if node.kind == "constant":
                self._finish(k, (), np.array(node.value, dtype=object).reshape(()))
            elif node.kind == "elementwise":
                self._elementwise(k, node)
            else:
                found = self._source(k, node)
                known.values[k] = found
                if isinstance(found, Finite):
                    self._finish_source(k, found)
        except CannotCompile as problem:
            known.problems.append(problem.inside(known.text(k)))

    def _finish(self, k: int, support: tuple[int, ...], table: Table) -> None:
        self.known.supports[k], self.known.tables[k] = support, table
        found = finite(table.reshape(-1).tolist())
        if not found.values and k in self.graph.roots:
            raise CannotCompile(Refusal.EMPTY, f"it has no value at all: {found.undefined}")
        self.known.values[k] = found

    def _source(self, k: int, node: Node) -> Finite | Real:
        known, n, vocab = self.known, self.known.max_length, self.known.vocab
        if node.kind == "tokens":
            return Real(float(vocab.low), float(vocab.high), raw=True) if isinstance(vocab, Reals) else finite(vocab)
        if node.kind == "indices":
            return Finite(tuple(range(n)))
        assert node.relation is not None
        keys = cardinality(known, node.relation)
        if node.kind == "width":
            if never(known, node.relation):
                return Finite((0,))
            return Finite(tuple(range(1 if keys.some else 0, (1 if keys.at_most_one else n) + 1)))
        values, same = known.of(node.arguments[0]), alike(known, node)
        default = () if keys.some else (node.value,)
        if isinstance(values, Finite):
            values = replace(values, undefined=None)  # selecting an undefined value is an error of the run
            if not values.values:
                return finite((node.value,))
            numbers = [v for v in values.values if isinstance(v, (int, float))]
            if 1 < len(numbers) < len(values.values) and not same:
                raise CannotCompile(Refusal.MIXED, f"{known.text(node.arguments[0])} mixes words and numbers, which have a mean")
        if node.kind == "softmax":
            return self._soft(node, values)
        if isinstance(values, Finite) and (same or not values.numeric or len(values.values) == 1):
            return finite((*values.values, *default))
        if not all(isinstance(d, (int, float)) for d in default):
            raise CannotCompile(Refusal.DEFAULT, f"the default {node.value!r} is no number, the values are")
        if isinstance(values, Finite):
            found = means(values, n)
            return finite((*found, *default)) if found is not None else hull(spaced(values, n), default)
        return hull(values if keys.at_most_one else values.mean(n), default)

    def _soft(self, node: Node, values: Finite | Real) -> Real:
        scores = self.known.of(node.arguments[1])
        for what, found in (("values", values), ("scores", scores)):
            if isinstance(found, Finite) and not found.numeric:
                raise CannotCompile(Refusal.WORDS, f"the {what} are no numbers")
        return hull(replace(range_of(values), denominator=None, raw=False), (node.value,))

    def _elementwise(self, k: int, node: Node) -> None:
        known, arguments = self.known, node.arguments
        joint = tuple(sorted({s for a in arguments for s in known.supports[a]}))
        direct = tuple(sorted(set(arguments) - self._constants(arguments)))
        for support, most in ((joint, self.joint), (direct, JOINT), (joint, JOINT)):
            sets = [known.finite_set(s) for s in support]
            if all(s is not None for s in sets) and math.prod(len(s.values) for s in sets if s) <= most:
                if support is direct and any(s.undefined or not s.values for s in sets if s):
                    continue
                self._finish(k, support, self._tabulated(node, support))
                return
        try:
            name, result = self._range(node)
        except CannotCompile as reason:
            kind, size = self._no_table(joint)
            raise CannotCompile(kind or reason.kind, f"{size}, and {reason}") from None
        if name in DISCRETE:
            self._finish_source(k, Finite(DISCRETE[name]))
        elif name in ROUNDINGS:
            self._finish_source(k, Finite(tuple(range(int(result.low), int(result.high) + 1))))
        else:
            known.values[k] = result

    def _range(self, node: Node) -> tuple[str | None, Real]:
        """The rule of an operation of real numbers, and the range that it gives."""
        assert node.operation is not None
        known, name, arguments = self.known, node.operation.known, node.arguments
        for a in arguments:
            found = known.of(a)
            if isinstance(found, Finite) and found.undefined:
                raise CannotCompile(Refusal.UNDEFINED, f"{known.text(a)} may have no value ({found.undefined})")
            if isinstance(found, Finite) and not found.numeric:
                raise CannotCompile(Refusal.WORDS, f"{known.text(a)} holds values that are no numbers")
        ranges = [known.compared_range(a, arguments) if name in DISCRETE else range_of(known.of(a)) for a in arguments]
        if name == "mul" and arguments[0] == arguments[1]:
            return name, real_operation(OPERATIONS["pow"], [ranges[0], Real(2.0, 2.0, 1)])  # a square is not negative
        return name, real_operation(node.operation, ranges)

    def _finish_source(self, k: int, found: Finite) -> None:
        """A node whose values are a set but not a table: others take it as a source."""
        self.known.values[k], self.known.supports[k], self.known.tables[k] = found, (k,), column_of(found)
        if found.numeric and len(set(found.code().values())) < len(found.values):
            raise CannotCompile(Refusal.INTEGERS, "it has integers that float64 does not tell apart")

    def _constants(self, arguments: tuple[int, ...]) -> set[int]:
        return {a for a in arguments if self.graph.nodes[a].kind == "constant"}

    def _no_table(self, joint: tuple[int, ...]) -> tuple[Refusal | None, str]:
        """Why a node has no table over its sources; the kind is None where nothing can be done about it."""
        real = [self.known.text(s) for s in joint if self.known.finite_set(s) is None]
        if real:
            return None, f"{', '.join(real)} is real-valued"
        size = math.prod(self.known.sizes(joint))
        return Refusal.EXPLODES, f"its value set explodes ({size:,} combinations of its sources, at most {JOINT:,})"

    def _tabulated(self, node: Node, support: tuple[int, ...]) -> Table:
        assert node.operation is not None
        columns = [self.known.spread(a, support) for a in node.arguments]
        with np.errstate(all="ignore"):  # the operation says itself where it has no value
            out = np.frompyfunc(_reachable(node.operation), len(columns), 1)(*columns)
        out = np.broadcast_to(np.asarray(out, dtype=object), self.known.sizes(support))
        beyond = self._beyond(support)
        if beyond is not None:
            out = out.copy()
            out[np.broadcast_to(beyond, out.shape)] = UNREACHABLE
        return out

    def _beyond(self, support: tuple[int, ...]) -> np.ndarray | None:
        """Where a position is not below the length, if a table has both as sources."""
        place = next((s for s in support if self.graph.nodes[s].kind == "indices"), None)
        whole = next((s for s in support if self.known.is_length(s)), None)
        if place is None or whole is None:
            return None
        axes = [[-1 if s == side else 1 for s in support] for side in (place, whole)]
        position, length = (np.array(self.known.set_of(s).values).reshape(a) for s, a in zip((place, whole), axes, strict=True))
        return position >= length


def real_operation(operation: Operation, ranges: list[Real]) -> Real:
    """The range of an operation of real numbers. Raises :class:`CannotCompile` where it has none."""
    rule = RULES.get(operation.known or "")
    if rule is None:
        what = operation.name if operation.listed else f"your function {operation.name}"
        raise CannotCompile(Refusal.NO_RULE, f"{what} is not an operation of real numbers (those are {', '.join(sorted(RULES))})")
    if len(ranges) != (takes := len(signature(rule).parameters)):
        raise CannotCompile(Refusal.NO_RULE, f"{operation.name} of real numbers takes {takes} values, got {len(ranges)}")
    found = rule(*ranges)
    if not math.isfinite(found.high - found.low):
        raise CannotCompile(Refusal.TOO_LARGE, "its value may be too large for a float")
    return found


def _reachable(operation: Operation) -> Callable[..., Value]:
    def apply(*values: Value) -> Value:
        return UNREACHABLE if any(v is UNREACHABLE for v in values) else operation(*values)

    return apply
