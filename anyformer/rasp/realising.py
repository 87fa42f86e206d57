"""Every node becomes a linear form of stream coordinates.

    finite, element-wise    a table over its sources (:mod:`anyformer.rasp.tabulating`), or a linear form of its arguments
    real, element-wise      a linear form, a multiplying unit, a ReLU, or a unit with the function itself
    selector_width          a head whose selected keys tie with the sink: w/(w+1), then a staircase
    aggregate               a head whose selected keys beat the sink: mean(values - default) + default, 0 where only the sink is left

What a run must not pass over (a value without a number that is averaged or output, an average of different words) adds to the *fault*
form, which is 0 on every input on which the program is defined.
"""

import numpy as np

from anyformer.rasp.cardinality import alike, cardinality, may_fail
from anyformer.rasp.graph import Node
from anyformer.rasp.known import Known
from anyformer.rasp.options import Options
from anyformer.rasp.plan import FAULT, Form, Part, Score, number
from anyformer.rasp.ranges import DISCRETE, ROUNDINGS, Real, constant_of, range_of
from anyformer.rasp.refusals import CannotCompile, Refusal
from anyformer.rasp.selecting import Selectors
from anyformer.rasp.sets import Finite, distance
from anyformer.rasp.smooth import Smooth
from anyformer.rasp.tabulating import Source
from anyformer.rasp.weighting import all_numbers, best, soft
from anyformer.rasp.workshop import Workshop

GATED = ("mul", "max", "min", "abs", "relu")
"""Operations of which one or two units do what a table of finite numbers does."""

LEAK = 1e-12
"""How much weight average-hard heads written as softmax heads leave to keys that are not selected."""


class Realisation(Workshop):
    """What every node becomes."""

    def __init__(self, known: Known, options: Options):
        super().__init__(known, options)
        self.smooth = Smooth(self.plan, options.mode, options.tolerance)
        self.selectors = Selectors(self)

    def needs(self, k: int) -> tuple[int, ...]:
        node = self.graph.nodes[k]
        tabulated = node.kind == "elementwise" and isinstance(self.known.of(k), Finite) and self.known.supports[k] != (k,)
        return () if tabulated and not self._is_linear(k, node) else node.arguments

    def _is_linear(self, k: int, node: Node) -> bool:
        """Whether the node is a sum, a difference or a multiple of numbers, and no table by itself."""
        if node.kind != "elementwise" or node.operation is None:
            return False
        if len(self.known.supports[k]) == 1 and self.known.supports[k] != (k,):
            return False
        sets = [self.known.of(a) for a in node.arguments]
        if any(isinstance(s, Finite) and (s.undefined or not s.numeric) for s in sets):
            return False
        constants = [constant_of(range_of(s)) for s in sets]
        name = node.operation.known
        by_constant = (name == "mul" and constants != [None, None]) or (name == "div" and bool(constants[1]))
        return name in ("add", "sub", "neg", "assume", "float", "shift") or by_constant

    def output_error(self, k: int) -> float:
        """A bound of how far the output k may be off: what is told apart by its set of values is not. Refuses what is not told apart."""
        off, found = self.plan.slip(self.form(k)), self.known.of(k)
        if not isinstance(found, Finite):
            return self.error(k) + off
        if off > distance(found.codes()) / 4:
            raise CannotCompile(
                Refusal.ROUNDING,
                f"{self.known.text(k)} may be off by {off:.1e}, too much for its values; {self.tables.steps.advice}",
            )
        return self.error(k)

    def watch_aggregate(self, k: int) -> None:
        """Build node k if it is an aggregate or width that may be undefined on some input, for its fault."""
        node = self.graph.nodes[k]
        if node.relation is not None and (may_fail(self.known, k) or self.selectors.may_fail(node.relation)):
            self.source(k) if node.kind == "width" else self.form(k)

    def make_source(self, k: int, node: Node) -> Source:
        found = self.known.of(k)
        assert isinstance(found, Finite)
        if node.kind == "tokens":
            return Source(self.plan.embedded(self.known.text(k), found.codes(), "tokens"), found.codes(), "tokens")
        if node.kind == "indices":
            return Source(self.plan.embedded(self.known.text(k), found.codes(), "indices"), found.codes(), "indices")
        if node.kind == "width" and len(found.values) == 1:
            return Source(number(float(found.values[0])), found.codes())
        if node.kind == "width":
            assert node.relation is not None
            score = self.selectors.score(node.relation).plus(number(1.0), number(-0.5)).merged()
            share = self.plan.attend(
                f"{self.known.text(k)} as w/(w+1)", score, "hard", number(1.0), self.selectors.text(node.relation)
            )
            widths = np.array(found.values, dtype=float)
            shared = Source(share, widths / (widths + 1.0))
            if not self.tables.steps.coarse:
                return shared
            whole = self.tables.form(
                self.known.text(k), [(k, shared)], widths
            )  # one layer more: tables of 1/2, 2/3, .. are lost to rounding
            return Source(whole, widths)
        return Source(self.form(k), found.codes())

    def make_form(self, k: int, node: Node) -> Form:
        found = self.known.of(k)
        if node.kind == "constant":
            return number(found.codes()[0]) if isinstance(found, Finite) else number(found.low)
        if node.kind in ("mean", "max", "softmax"):
            return self._aggregate(k, node)
        if node.kind == "tokens" and isinstance(found, Real):
            self.plan.token_input = self.plan.coordinate(self.known.text(k), 0)
            return self.plan.form(self.plan.token_input)
        if node.kind != "elementwise":
            assert isinstance(found, Finite)
            source = self.source(k)
            return source.form if node.kind != "width" else self.tabulated(k, found.code(), self.known.text(k))
        linear = self._linear(k, node)
        if linear is not None:
            return linear
        if not isinstance(found, Finite) or self.known.supports[k] == (k,) or self._early(k, node):
            return self._real(k, node)
        try:
            return self.tabulated(k, found.code(), self.known.text(k))
        except CannotCompile:
            if not self._gated(k, node):
                raise
            return self._real(k, node)

    def _linear(self, k: int, node: Node) -> Form | None:
        """Sums, differences and multiples of numbers cost nothing."""
        if node.operation is None or not self._is_linear(k, node):
            return None
        sets = [self.known.of(a) for a in node.arguments]
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
        sets = [self.known.of(a) for a in (k, *node.arguments)]
        plain = all(isinstance(s, Finite) and s.numeric and not s.undefined for s in sets)
        return node.operation.known in GATED and plain and len(self.known.supports[k]) > 1

    def _early(self, k: int, node: Node) -> bool:
        """Whether they do it no later than the table."""
        if not self._gated(k, node):
            return False
        forms = [self.form(a) for a in node.arguments]
        return self.plan.time(*forms) <= self.plan.time(*(self.source(s).form for s in self.known.supports[k]))

    def _assumed(self, k: int, a: int, inside: Real, low: Real, high: Real) -> Form:
        """The argument itself; where it leaves the interval by more than its error and rounding, the fault does not stay 0."""
        form, self.errors[k] = self.form(a), self.error(a)
        steep = FAULT / (self.tie * (1.0 + min(inside.magnitude, max(abs(low.low), abs(high.high)))))
        below, above = number(low.low - self.errors[k]) - form, form - number(high.high + self.errors[k])
        sides = [
            steep * Part("relu", side) for side, out in ((below, inside.low < low.low), (above, inside.high > high.high)) if out
        ]
        if sides:
            self.blame(self.plan.compute(f"{self.known.text(k)} is not where it was assumed", sides))
        return form

    def _times(self, k: int, factor: float | int, a: int) -> Form:
        self.errors[k] = abs(factor) * self.error(a)
        return factor * self.form(a)

    def _real(self, k: int, node: Node) -> Form:
        """An operation of real numbers that is not linear."""
        assert node.operation is not None
        name, a = node.operation.known, node.arguments
        assert name is not None
        forms = [self.form(i) for i in a]
        ranges = [range_of(self.known.of(i)) for i in a]
        errors = [self.error(i) + self.plan.slip(self.form(i)) for i in a]
        if name in DISCRETE:
            ranges = [self.known.compared_range(i, a) for i in a]
            if any(r.raw for r in ranges):
                self._rounded_inputs()
            if any(r.denominator not in (None, 1) for r in ranges):
                self.notes.append(
                    f"{self.known.text(k)} compares fractions as they are; float64 may round a tie of them to either side"
                )
            if all(r.raw for r in ranges):
                forms = [self._whole(i) for i in a]
        if name == "mul" and not any(errors):
            for i, other in ((0, 1), (1, 0)):
                inner = self.graph.nodes[a[i]]
                if inner.kind == "elementwise" and inner.operation and self.known.supports[a[i]] == (a[i],):
                    fused = self.smooth.fused(
                        inner.operation.known, self.known.text(k), [self.form(x) for x in inner.arguments], forms[other]
                    )
                    if fused is not None:
                        return fused
        if name in ROUNDINGS and ranges[0].raw:
            self._rounded_inputs()
        if name == "where":
            forms[0] = self.tabulated(
                a[0], {v: float(bool(v)) for v in self._set(a[0]).values}, f"whether {self.known.text(a[0])}"
            )
        try:
            form, error = self.smooth.operation(name, self.known.text(k), forms, ranges, errors, self.tables)
            found = self.known.of(k)
            if isinstance(found, Finite) and error:  # tables and outputs tell its values apart
                self.plan.slips[form.terms[-1][0]] = error
                error = 0.0
        except CannotCompile as reason:
            raise reason.inside(self.known.text(k)) from None
        self.errors[k] = error
        return form

    def _rounded_inputs(self) -> None:
        """In float32, comparisons and roundings of tokens are those of the numbers that the network is given."""
        if self.eps > 1e-10:
            self.notes.append("tokens are rounded to float32 before they are compared or rounded to integers")

    def _whole(self, k: int) -> Form:
        """The form of an input, or of whole numbers without any rounding: embedded, or the sum of steps of a staircase."""
        if not isinstance(self.known.of(k), Finite) or self.graph.nodes[k].kind in ("tokens", "indices", "constant"):
            return self.form(k)
        sources = [self.source(s) for s in self.known.supports[k]]
        levels = self.numbers(k, self.known.set_of(k).code())
        return self.tables.staircase(f"{self.known.text(k)}, rounded", sources, levels)

    def _set(self, k: int) -> Finite:
        found = self.known.finite_set(k)
        if found is None:
            needed = f"{self.known.text(k)} is real-valued where a condition is needed; compare it with something"
            raise CannotCompile(Refusal.REAL, needed)
        return found

    def _aggregate(self, k: int, node: Node) -> Form:
        """A head that averages ``values - default`` over what the selector selects; the sink has value 0, so that plus the default

        mean     score of the selector (lifted where every query selects some key: the sink is not needed then)
        max      that score times a factor + the node's own scores, so that the best of the selected keys are left
        softmax  the same, below a softmax kernel
        """
        assert node.relation is not None
        values, found, name = node.arguments[0], self.known.of(k), self.known.text(k)
        arguments = [self.known.of(a) for a in node.arguments]
        lifted = node.kind == "mean" and cardinality(self.known, node.relation).some
        selected, head = self.selectors.score(node.relation, lifted=lifted), self.selectors.text(node.relation)
        if any(isinstance(a, Finite) and not a.values for a in arguments):  # whatever is selected has no value
            self.blame(self.plan.attend(f"{name} averages no value", selected.merged(), "hard", number(1.0), head))
            return number(float(found.codes()[0]) if isinstance(found, Finite) else float(node.value))
        column, default, words = None, node.value, False
        if isinstance(found, Finite):
            words, default = not found.numeric, found.code().get(node.value, float(found.codes()[0]))
            column = self.tabulated(values, found.code(), self.known.text(values)) if words else None
        column, default = column or self.form(values), float(default)
        self.errors[k] = self.error(values)
        if self.softmax is not None and isinstance(node.value, (int, float)) and all_numbers(self, values):
            self.errors[k] += LEAK * (range_of(arguments[0]).magnitude + abs(node.value))
        weigh = {"mean": lambda *_: selected, "max": best, "softmax": soft}[node.kind]
        score = weigh(self, k, node, selected).merged()
        kernel = "soft" if node.kind == "softmax" else "hard"
        mean = self.plan.attend(name, score, kernel, column - number(default), head)
        for argument in dict.fromkeys(node.arguments):  # of any selected key, not only of the best
            undefined = self.known.of(argument)
            if isinstance(undefined, Finite) and undefined.undefined:
                flag = self.missing(argument)
                self.blame(self.plan.attend(f"{name} averages no value", selected.merged(), "hard", flag, head))
        if words and not alike(self.known, node):
            self._blame_different(k, node, score, mean, default, head)
        return mean + number(default)

    def _blame_different(self, k: int, node: Node, score: Score, mean: Form, default: float, head: str) -> None:
        """The variance of the codes that are averaged, mean(c^2) - mean(c)^2, is 0 only where all are the same word."""
        values, name = node.arguments[0], self.known.text(k)
        code = {value: (c - default) ** 2 for value, c in self.known.set_of(k).code().items()}
        square = self.tabulated(values, code, f"{self.known.text(values)}, squared code")
        squares = self.plan.attend(f"{name}, squared code", score, "hard", square, head)
        self.blame(squares - self.plan.compute(f"{name}, square of the mean code", [Part("identity", mean, mean)]))
