"""Pass 4: every node becomes a linear form of stream coordinates.

    finite, element-wise    a table over its sources (:mod:`anyformer.rasp.tabulating`), or a linear form of its arguments
    real, element-wise      a linear form, a multiplying unit, a ReLU, or a unit with the function itself
    selector_width          a head whose selected keys tie with the sink: w/(w+1), then a staircase
    aggregate               a head whose selected keys beat the sink: mean(values - default) + default, 0 where only the sink is left

What a run must not pass over (a value without a number that is averaged or output, an average of different words) adds to the *fault*
form, which is 0 on every input on which the program is defined.
"""

from typing import Any

import numpy as np

from anyformer.rasp.graph import Graph, Node
from anyformer.rasp.operations import Undefined
from anyformer.rasp.plan import FAULT, Form, Plan, number
from anyformer.rasp.ranges import DISCRETE, Real, constant_of, range_of
from anyformer.rasp.selecting import Selectors
from anyformer.rasp.smooth import Smooth
from anyformer.rasp.tabulating import CannotCompile, Mode, Source, Tabulation
from anyformer.rasp.values import Finite, Inference, Unreachable
from anyformer.rasp.weighting import all_numbers, best, soft

TIES = {np.float64: 1e-9, np.float32: 1e-4}
"""Relative tie width of average-hard attention, by dtype (:data:`anyformer.operators.kernels.TIE`)."""

GATED = ("mul", "max", "min", "abs", "relu")
"""Operations of which one or two units do what a table of finite numbers does."""

LEAK = 1e-12
"""How much weight average-hard heads written as softmax heads leave to keys that are not selected."""


class Realisation:
    """The plan of a graph, built as it is asked for forms."""

    def __init__(
        self, graph: Graph, inference: Inference, *, mode: Mode, dtype: Any, tolerance: int | float, softmax: float | None = None
    ):
        self.graph = graph
        self.inference = inference
        self.mode = mode
        self.eps = float(np.finfo(dtype).eps)
        self.tie = TIES[dtype]
        self.softmax = softmax
        self.plan = Plan()
        self.tables = Tabulation(self.plan, mode, self.eps)
        self.smooth = Smooth(self.plan, mode, tolerance)
        self.selectors = Selectors(self)
        self.fault = number(0.0)
        self.errors: dict[int, float] = {}
        self.notes: list[str] = []
        self._forms: dict[int, Form] = {}
        self._sources: dict[int, Source] = {}
        self._faulty: set[int] = set()

    def text(self, k: int) -> str:
        """Node k as text."""
        return self.graph.texts.get(k, f"node {k}")

    def form(self, k: int) -> Form:
        """The number of node k: its value, or its code where its values are no numbers."""
        stack = [k]
        while k not in self._forms:  # no recursion: expressions may be thousands of operations deep
            node = stack[-1]
            waiting = [a for a in self._needs(node) if a not in self._forms]
            if waiting:
                stack += waiting[::-1]
                continue
            if node not in self._forms:
                self._forms[node] = self._form(node, self.graph.nodes[node])
            stack.pop()
        return self._forms[k]

    def _needs(self, k: int) -> tuple[int, ...]:
        """Nodes whose forms the form of node k is made of: none where it is a table."""
        node = self.graph.nodes[k]
        tabulated = node.kind == "elementwise" and isinstance(self.inference.of(k), Finite) and self.inference.supports[k] != (k,)
        return () if tabulated and not self._is_linear(k, node) else node.arguments

    def _is_linear(self, k: int, node: Node) -> bool:
        """Whether the node is a sum, a difference or a multiple of numbers, and no table by itself."""
        if node.kind != "elementwise" or node.operation is None:
            return False
        if len(self.inference.supports[k]) == 1 and self.inference.supports[k] != (k,):
            return False
        sets = [self.inference.of(a) for a in node.arguments]
        if any(isinstance(s, Finite) and (s.undefined or not s.numeric) for s in sets):
            return False
        constants = [constant_of(range_of(s)) for s in sets]
        name = node.operation.known
        by_constant = (name == "mul" and constants != [None, None]) or (name == "div" and bool(constants[1]))
        return name in ("add", "sub", "neg", "assume", "float", "shift") or by_constant

    def error(self, k: int) -> float:
        """A bound of how far the form of node k may be from the value (functions in standard mode; rounding aside)."""
        self.form(k)
        return self.errors.get(k, 0.0)

    def tabulated(self, k: int, values: dict[Any, float], what: str) -> Form:
        """The form of a function of node k, given by its value for each of the node's values (missing: does not matter)."""
        table = self.inference.tables[k]
        assert table is not None
        numbers = np.array(
            [np.nan if isinstance(v, (Undefined, Unreachable)) else values.get(v, np.nan) for v in table.reshape(-1)]
        )
        return self.over(self.inference.supports[k], numbers.reshape(table.shape), what)

    def over(self, support: tuple[int, ...], table: np.ndarray, what: str) -> Form:
        """The form of a function of several sources."""
        return self.tables.form(what, [(s, self.source(s)) for s in support], table)

    def source(self, k: int) -> Source:
        """Node k as something that tables read."""
        if k not in self._sources:
            self._sources[k] = self._source(k, self.graph.nodes[k])
        return self._sources[k]

    def blame(self, form: Form) -> None:
        """Add to the fault (after the form was built, which may add to it too)."""
        self.fault = self.fault + form

    def watch(self, k: int) -> None:
        """Add to the fault wherever node k has no value."""
        table = self.inference.tables[k]
        if k in self._faulty or table is None or self.inference.of(k).undefined is None:  # type: ignore[union-attr]
            return
        self._faulty.add(k)
        self.blame(self.missing(k))

    def watch_aggregate(self, k: int) -> None:
        """Build node k if it is an aggregate or width that may be undefined on some input, for its fault."""
        node, undefined = self.graph.nodes[k], self.inference.may_fail
        if node.relation is not None and (undefined(k) or self.selectors.may_fail(node.relation)):
            self.source(k) if node.kind == "width" else self.form(k)

    def missing(self, k: int) -> Form:
        """1 where node k has no value, else 0."""
        table = self.inference.tables[k]
        if table is None:
            return number(0.0)
        flags = np.array([float(isinstance(v, Undefined)) for v in table.reshape(-1)]).reshape(table.shape)
        return self.over(self.inference.supports[k], flags, f"{self.text(k)} has no value")

    def _source(self, k: int, node: Node) -> Source:
        found = self.inference.of(k)
        assert isinstance(found, Finite)
        if node.kind == "tokens":
            return Source(self.plan.embedded(self.text(k), found.codes(), "tokens"), found.codes(), "tokens")
        if node.kind == "indices":
            return Source(self.plan.embedded(self.text(k), found.codes(), "indices"), found.codes(), "indices")
        if node.kind == "width" and len(found.values) == 1:
            return Source(number(float(found.values[0])), found.codes())
        if node.kind == "width":
            assert node.relation is not None
            score = self.selectors.score(node.relation).plus(number(1.0), number(-0.5)).merged()
            share = self.plan.attend(f"{self.text(k)} as w/(w+1)", score, "hard", number(1.0), self.selectors.text(node.relation))
            widths = np.array(found.values, dtype=float)
            return Source(share, widths / (widths + 1.0))
        return Source(self.form(k), found.codes())

    def _form(self, k: int, node: Node) -> Form:
        found = self.inference.of(k)
        if node.kind == "constant":
            return number(found.codes()[0]) if isinstance(found, Finite) else number(found.low)
        if node.kind in ("mean", "max", "softmax"):
            return self._aggregate(k, node)
        if node.kind == "tokens" and isinstance(found, Real):
            self.plan.token_input = self.plan.coordinate(self.text(k), 0)
            return self.plan.form(self.plan.token_input)
        if node.kind != "elementwise":
            assert isinstance(found, Finite)
            source = self.source(k)
            return source.form if node.kind != "width" else self.tabulated(k, found.code(), self.text(k))
        linear = self._linear(k, node)
        if linear is not None:
            return linear
        if not isinstance(found, Finite) or self.inference.supports[k] == (k,) or self._early(k, node):
            return self._real(k, node)
        try:
            return self.tabulated(k, found.code(), self.text(k))
        except CannotCompile:
            if not self._gated(k, node):
                raise
            return self._real(k, node)

    def _linear(self, k: int, node: Node) -> Form | None:
        """Sums, differences and multiples of numbers cost nothing."""
        if node.operation is None or not self._is_linear(k, node):
            return None
        sets = [self.inference.of(a) for a in node.arguments]
        constants = [constant_of(range_of(s)) for s in sets]
        name, a = node.operation.known, node.arguments
        if name in ("add", "sub"):
            sign = 1.0 if name == "add" else -1.0
            self.errors[k] = self.error(a[0]) + self.error(a[1])
            return self.form(a[0]) + sign * self.form(a[1])
        if name == "neg":
            self.errors[k] = self.error(a[0])
            return -1.0 * self.form(a[0])
        if name == "float":
            return self._times(k, 1.0, a[0])
        if name == "shift":
            return self.form(a[0])
        if name == "assume":
            return self._assumed(k, a[0], *(range_of(s) for s in sets))
        for i, other in ((0, 1), (1, 0)):
            factor = constants[i] if name == "mul" else None
            if factor is not None:
                return self._times(k, factor, a[other])
        if name == "div" and constants[1]:
            return self._times(k, 1.0 / constants[1], a[0])
        return None

    def _gated(self, k: int, node: Node) -> bool:
        """Whether the one or two units of a real product, maximum, .. do what a table of several sources does."""
        assert node.operation is not None
        sets = [self.inference.of(a) for a in (k, *node.arguments)]
        plain = all(isinstance(s, Finite) and s.numeric and not s.undefined for s in sets)
        return node.operation.known in GATED and plain and len(self.inference.supports[k]) > 1

    def _early(self, k: int, node: Node) -> bool:
        """Whether they do it no later than the table."""
        if not self._gated(k, node):
            return False
        forms = [self.form(a) for a in node.arguments]
        return self.plan.time(*forms) <= self.plan.time(*(self.source(s).form for s in self.inference.supports[k]))

    def _assumed(self, k: int, a: int, inside: Real, low: Real, high: Real) -> Form:
        """The argument itself; where it leaves the interval by more than its error and rounding, the fault does not stay 0."""
        form, self.errors[k] = self.form(a), self.error(a)
        steep = FAULT / (self.tie * (1.0 + min(inside.magnitude, max(abs(low.low), abs(high.high)))))
        below, above = number(low.low - self.errors[k]) - form, form - number(high.high + self.errors[k])
        sides = [
            ("relu", side, None, steep) for side, out in ((below, inside.low < low.low), (above, inside.high > high.high)) if out
        ]
        if sides:
            self.blame(self.plan.compute(f"{self.text(k)} is not where it was assumed", sides))
        return form

    def _times(self, k: int, factor: float | int, a: int) -> Form:
        self.errors[k] = abs(factor) * self.error(a)
        return factor * self.form(a)

    def _real(self, k: int, node: Node) -> Form:
        """An operation of real numbers that is not linear."""
        assert node.operation is not None
        name, a = node.operation.known, node.arguments
        forms = [self.form(i) for i in a]
        ranges = [range_of(self.inference.of(i)) for i in a]
        errors = [self.error(i) for i in a]
        if name in DISCRETE:
            ranges = [self.inference.compared_range(i, a) for i in a]
            if any(r.raw for r in ranges):
                self._rounded_inputs()
            if any(r.denominator not in (None, 1) for r in ranges):
                self.notes.append(
                    f"{self.text(k)} compares fractions as they are; float64 may round a tie of them to either side"
                )
            if all(r.raw for r in ranges):
                forms = [self._whole(i) for i in a]
        if name == "mul" and not any(errors):
            for i, other in ((0, 1), (1, 0)):
                inner = self.graph.nodes[a[i]]
                if inner.kind == "elementwise" and inner.operation and self.inference.supports[a[i]] == (a[i],):
                    fused = self.smooth.fused(
                        inner.operation.known, self.text(k), [self.form(x) for x in inner.arguments], forms[other]
                    )
                    if fused is not None:
                        return fused
        if name in ("floor", "ceil", "round") and ranges[0].raw:
            self._rounded_inputs()
        if name == "where":
            forms[0] = self.tabulated(a[0], {v: float(bool(v)) for v in self._set(a[0]).values}, f"whether {self.text(a[0])}")
        try:
            form, self.errors[k] = self.smooth.operation(name, self.text(k), forms, ranges, errors, self.tables)
        except CannotCompile as reason:
            raise CannotCompile(f"{self.text(k)}: {reason}") from None
        return form

    def _rounded_inputs(self) -> None:
        """In float32, comparisons and roundings of tokens are those of the numbers that the network is given."""
        if self.eps > 1e-10:
            self.notes.append("tokens are rounded to float32 before they are compared or rounded to integers")

    def _whole(self, k: int) -> Form:
        """The form of an input, or of whole numbers without any rounding: embedded, or the sum of steps of a staircase."""
        if not isinstance(self.inference.of(k), Finite) or self.graph.nodes[k].kind in ("tokens", "indices", "constant"):
            return self.form(k)
        table, found = self.inference.tables[k], self._set(k).code()
        assert table is not None
        levels = np.array([found.get(v, np.nan) if not isinstance(v, Unreachable) else np.nan for v in table.reshape(-1)])
        sources = [self.source(s) for s in self.inference.supports[k]]
        return self.tables.staircase(f"{self.text(k)}, rounded", sources, levels.reshape(table.shape))

    def _set(self, k: int) -> Finite:
        found = self.inference.finite_set(k)
        if found is None:
            raise CannotCompile(f"{self.text(k)} is real-valued where a condition is needed; compare it with something")
        return found

    def _aggregate(self, k: int, node: Node) -> Form:
        assert node.relation is not None
        values, found, name = node.arguments[0], self.inference.of(k), self.text(k)
        lifted = node.kind == "mean" and self.inference.cardinality(node.relation)[2]
        score, head = self.selectors.score(node.relation, lifted=lifted), self.selectors.text(node.relation)
        arguments = [self.inference.of(a) for a in node.arguments]
        if any(isinstance(a, Finite) and not a.values for a in arguments):  # whatever is selected has no value
            self.blame(self.plan.attend(f"{name} averages no value", score.merged(), "hard", number(1.0), head))
            return number(float(found.codes()[0]) if isinstance(found, Finite) else float(node.value))
        if isinstance(found, Finite):
            code = found.code()
            column = self.form(values) if found.numeric else self.tabulated(values, code, self.text(values))
            default = code.get(node.value, float(found.codes()[0]))
        else:
            column, default = self.form(values), float(node.value)
        self.errors[k] = self.error(values)
        if self.softmax is not None and isinstance(node.value, (int, float)):
            self.errors[k] += LEAK * (range_of(arguments[0]).magnitude + abs(node.value)) if all_numbers(self, values) else 0.0
        selected = score.merged()
        if node.kind == "max":
            score = best(self, k, node, score)
        elif node.kind == "softmax":
            score = soft(self, k, node, score)
        kernel = "soft" if node.kind == "softmax" else "hard"
        score = score.merged()
        mean = self.plan.attend(name, score, kernel, column - number(default), head)
        for argument in dict.fromkeys(node.arguments):  # of any selected key, not only of the best
            undefined = self.inference.of(argument)
            if isinstance(undefined, Finite) and undefined.undefined:
                flag = self.missing(argument)
                self.blame(self.plan.attend(f"{name} averages no value", selected, "hard", flag, head))
        if isinstance(found, Finite) and not found.numeric and not self.inference.alike(node):
            code = {value: (c - default) ** 2 for value, c in found.code().items()}
            square = self.tabulated(values, code, f"{self.text(values)}, squared code")
            squares = self.plan.attend(f"{name}, squared code", score, kernel, square, head)
            product = self.plan.compute(f"{name}, square of the mean code", [("identity", mean, mean, 1.0)])
            self.blame(squares - product)
        return mean + number(default)
