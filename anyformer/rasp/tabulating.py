"""Functions of finite sets as linear forms: affine where possible, from the embedding where they are functions of the token or of the
position alone, else a staircase of step units over one linear form z of the sources:

    f = f(z_0) + sum_i (f(z_i) - f(z_(i-1))) [z > (z_i + z_(i-1)) / 2]

A staircase is exact on the set and forgets rounding: noise below a quarter of a gap of z changes nothing. In standard mode a step is two
ReLU units with a slope in the middle of the gap (:mod:`anyformer.rasp.steps`, which bounds what rounding leaves of their difference). A
function of several sources needs one z that tells all combinations apart which f tells apart; of
several candidates (sums, differences, mixed radix) the one with the fewest steps is taken.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import numpy as np

from anyformer.rasp.options import Mode
from anyformer.rasp.plan import Form, Part, Plan, number
from anyformer.rasp.refusals import CannotCompile, Refusal
from anyformer.rasp.steps import Step, Steps


@dataclass(frozen=True)
class Source:
    """A node that tables read: its linear form in the stream, and the code of each of its values there."""

    form: Form
    codes: np.ndarray
    embedded: Literal["tokens", "indices"] | None = None


class Tabulation:
    """Writes functions of sources into a plan, each once."""

    def __init__(self, plan: Plan, mode: Mode, eps: float):
        self.plan = plan
        self.eps = eps
        self.steps = Steps(mode, eps)
        self._done: dict[tuple, Form] = {}

    def form(self, name: str, sources: list[tuple[int, Source]], table: np.ndarray) -> Form:
        """The form of a function; ``table`` has an axis for each (number, source), NaN where the value does not matter."""
        sources, table = _needed(sources, table)
        key = (tuple(k for k, _ in sources), table.shape, table.tobytes())
        if key not in self._done:
            self._done[key] = self._form(name, [source for _, source in sources], table)
        return self._done[key]

    def _form(self, name: str, sources: list[Source], table: np.ndarray) -> Form:
        if not sources:
            value = float(table) if table.ndim == 0 else float(np.nan_to_num(table.reshape(-1)[0]))
            return number(0.0 if np.isnan(value) else value)
        parts = _separated(table)
        if parts is not None and len(sources) > 1:
            pairs = zip(sources, parts, strict=True)
            return sum((self._form(name, [s], part) for s, part in pairs), number(0.0))
        if len(sources) == 1:
            line = _affine(sources[0].codes, table, self.eps)
            if line is not None:
                return line[0] * sources[0].form + number(line[1])
            if sources[0].embedded:
                return self.plan.embedded(name, np.nan_to_num(table), sources[0].embedded)
        return self.staircase(name, sources, table)

    def staircase(self, name: str, sources: list[Source], table: np.ndarray) -> Form:
        """A function as steps over one linear form of its sources: whole numbers without rounding."""
        best: tuple[int, Form, list[tuple[float, float]], list[float], list[np.ndarray]] | None = None
        for weights in _projections(sources, table):
            terms = [w * s.codes.reshape(_axis(i, table.ndim)) for i, (w, s) in enumerate(zip(weights, sources, strict=True))]
            z = sum(terms)
            gate = sum((w * s.form for w, s in zip(weights, sources, strict=True)), number(0.0))
            slip = self.plan.slip(gate)
            steps = _steps(np.broadcast_to(z, table.shape).reshape(-1), table.reshape(-1), self.eps, slip)
            if steps is not None and (best is None or len(steps[0]) < best[0]):
                best = (len(steps[0]), gate, *steps, terms)
        if best is None:
            digits = "float32" if self.eps > 1e-10 else "float64"
            close = f"its {table.size:,} combinations are too close to each other for {digits} to tell apart"
            raise CannotCompile(Refusal.COMBINATIONS, f"{name}: {close}")
        _, gate, gaps, levels, terms = best
        if not gaps:
            return number(levels[0])
        steps = [Step(*gap, b - a) for gap, a, b in zip(gaps, levels, levels[1:], strict=False)]
        known, largest = ~np.isnan(table), float(np.abs(sum(terms)).max())
        members = [np.broadcast_to(term, table.shape)[known] for term in terms]
        slip = self.steps.measured(members, steps, table[known] - levels[0], largest)
        least = float(np.diff(np.unique(levels)).min())
        try:
            self.steps.require(slip, least)
        except CannotCompile as reason:
            raise reason.inside(name) from None
        units: list[Part] = [unit for step in steps for unit in self.steps.units(gate, step, largest)]
        return self.plan.compute(name, units, slip, max(abs(level - levels[0]) for level in levels)) + number(levels[0])


def _axis(i: int, ndim: int) -> list[int]:
    return [-1 if j == i else 1 for j in range(ndim)]


def _needed(sources: list[tuple[int, Source]], table: np.ndarray) -> tuple[list[tuple[int, Source]], np.ndarray]:
    """Without the sources that the table does not depend on (don't-cares filled along them)."""
    for axis in reversed(range(table.ndim)):
        low, high = np.fmin.reduce(table, axis=axis, keepdims=True), np.fmax.reduce(table, axis=axis, keepdims=True)
        if bool(((low == high) | np.isnan(low)).all()):
            table = low.squeeze(axis)
            sources = sources[:axis] + sources[axis + 1 :]
    return sources, table


def _separated(table: np.ndarray) -> list[np.ndarray] | None:
    """Functions of one axis each whose sum is the table, or None."""
    if table.ndim < 2 or np.isnan(table).any():
        return None
    corner = table.reshape(-1)[0]
    parts = []
    for axis in range(table.ndim):
        part = table[tuple(slice(None) if i == axis else 0 for i in range(table.ndim))]
        parts.append(part if axis == 0 else part - corner)
    total = sum(part.reshape(_axis(i, table.ndim)) for i, part in enumerate(parts))
    return parts if np.array_equal(total, table) else None


def _affine(codes: np.ndarray, values: np.ndarray, eps: float) -> tuple[float, float] | None:
    """Slope and intercept of a line through (code, value), or None. Integers must fit exactly, others to rounding, which may not come near
    the distance of two values."""
    known = ~np.isnan(values)
    x, y = codes[known], values[known]
    if len(x) < 2:
        return None
    slope = (y[-1] - y[0]) / (x[-1] - x[0])
    intercept = y[0] - slope * x[0]
    least = 4e-16 * float(np.abs(y).max())
    rounding, gaps = eps * float((np.abs(slope * x) + abs(intercept)).max()), np.diff(np.unique(y))
    if len(gaps) and rounding > 1e-3 * min(float(gaps.min()), 1.0 + float(np.abs(y).min())):
        return None
    return (float(slope), float(intercept)) if np.allclose(slope * x + intercept, y, rtol=4e-16, atol=least) else None


def _projections(sources: list[Source], table: np.ndarray) -> Iterator[list[float]]:
    """Weights of the sources in z."""
    count = len(sources)
    if count == 1:
        yield [1.0]
        return
    if count == 2:
        yield [1.0, -1.0]
        yield [1.0, 1.0]
    orders = list(permutations(range(count))) if count <= 3 else [tuple(range(count)), tuple(reversed(range(count)))]
    for order in orders:
        weights, unit = [0.0] * count, 1.0
        for i in order:
            codes = np.sort(sources[i].codes)
            gap = float(np.diff(codes).min()) if len(codes) > 1 else 1.0
            weights[i] = unit / gap
            unit *= (codes[-1] - codes[0]) / gap + 1.0
        yield weights


def _steps(z: np.ndarray, f: np.ndarray, eps: float, slip: float) -> tuple[list[tuple[float, float]], list[float]] | None:
    """The gaps of z at which f changes, and the levels of f before, between and after them; None where z, which may be off by ``slip`` and
    by rounding, does not tell f apart."""
    known = ~np.isnan(f)
    z, f = z[known], f[known]
    order = np.argsort(z, kind="stable")
    z, f = z[order], f[order]
    least = 256 * eps * max(1e-300, float(np.abs(z).max())) + 8 * slip
    changes = np.flatnonzero(f[1:] != f[:-1])
    if bool((z[changes + 1] - z[changes] <= least).any()):
        return None
    gaps = [(float(z[i]), float(z[i + 1])) for i in changes]
    return gaps, [float(f[0]), *(float(f[i + 1]) for i in changes)]
