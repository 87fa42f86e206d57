"""Selectors as attention scores: 1/2 where a key is selected, at most -1/2 where not, so that all selected keys tie and a sink of score 0
wins where none is.

    distance      key - query in some intervals            a mask rule, no score at all
    equality      1/2 - s (k - q)^2                         three products; s is one over the least distance of different values, squared
                  1/2 - s (k - q)^2 + s q^2                 two products, where every query selects some key: the sink is not needed then,
                                                            and what depends on the query alone moves all keys alike
    any other     sum_i [k in class i] P(i, q)              as many products as the smaller side has classes of values

``and`` adds scores (of m parts, less (m - 1)/2) and intersects distances. ``or`` and ``not`` are one predicate of the values that their
parts read, over all combinations of them.
"""

import math
from typing import Any

import numpy as np

from anyformer.rasp.cardinality import cardinality
from anyformer.rasp.graph import Relation
from anyformer.rasp.operations import Undefined
from anyformer.rasp.plan import Form, Intervals, Part, Score, number
from anyformer.rasp.ranges import RULES, Real, range_of
from anyformer.rasp.refusals import CannotCompile, Refusal
from anyformer.rasp.sets import Finite, Unreachable, kinds
from anyformer.rasp.workshop import Workshop

PAIRS = 2**16
"""The largest number of (key, query) combinations of values that one predicate is tabulated on."""

POSITIONS = 2**24
"""The same for predicates of positions alone."""

CLASSES = 2**10
"""The largest number of products of one head."""

NUMPY = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}

Compared = tuple[float, tuple[Form, Form], tuple[Form, Form | None]]
"""The scale s of an equality, the forms of k and q, and of their squares; None for q^2 where the score is lifted."""


class Selectors:
    """The scores of a graph's relations."""

    def __init__(self, workshop: Workshop):
        self._of = workshop
        self._scores: dict[tuple[int, bool], Score] = {}

    def text(self, r: int) -> str:
        """Relation r as text."""
        return self._of.graph.relation_texts.get(r, f"selector {r}")

    def score(self, r: int, *, lifted: bool = False) -> Score:
        """The score of relation r. ``lifted``: selected keys may have more than 1/2, others are at least 1 below them, and the sink is below
        (every query selects some key)."""
        if (r, lifted) not in self._scores:
            try:
                self._scores[r, lifted] = self._score(r, lifted)
            except CannotCompile as reason:
                raise reason.inside(self.text(r)) from None
        return self._scores[r, lifted]

    def _score(self, r: int, lifted: bool) -> Score:
        n = self._of.known.max_length
        pairs: list[tuple[Form, Form]] = []
        allowed: np.ndarray | None = None
        count = 0
        for part, negated in self._factors(r, False):
            distances = self._distances(part, negated)
            if distances is not None:
                allowed = distances if allowed is None else allowed & distances
            else:
                pairs += self._equality(part, negated, lifted) or self._general(part, negated)
                count += 1
        self._require_quiet(r, pairs)
        pairs.append((number(1.0), number(0.5 - 0.5 * count)))
        return Score(tuple(pairs), None if allowed is None or allowed.all() else _intervals(allowed, n))

    def _require_quiet(self, r: int, pairs: list[tuple[Form, Form]]) -> None:
        """Refuse a score that steps of ReLU units may move across 0, or out of a tie where two keys may be selected:
        |delta(q k)| <= delta(q) |k| + |q| delta(k), and what no key knows of moves all scores alike."""
        plan = self._of.plan
        off = [sum(plan.slip(a) * plan.size(b) for a, b in ((q, k), (k, q)) if plan.slip(a)) for q, k in pairs]
        apart = sum(o for o, (_, k) in zip(off, pairs, strict=True) if k.terms)
        if sum(off) > 1 / 8 or (apart > self._of.tie / 4 and not cardinality(self._of.known, r).at_most_one):
            raise CannotCompile(
                Refusal.ROUNDING,
                f"its score reads differences of ReLU units and may be off by {sum(off):.1e}: at most 0.12 is safe, and {self._of.tie / 4:.1e} "
                f"between keys that are selected together; {self._of.tables.steps.advice}",
            )

    def _factors(self, r: int, negated: bool) -> list[tuple[int, bool]]:
        """Relations that are anded together, each as it is or negated."""
        relation = self._of.graph.relations[r]
        if relation.kind == "not":
            return self._factors(relation.parts[0], not negated)
        if relation.kind == ("or" if negated else "and"):
            return [factor for part in relation.parts for factor in self._factors(part, negated)]
        return [(r, negated)]

    def _leaves(self, r: int) -> list[Relation]:
        relation = self._of.graph.relations[r]
        return [relation] if relation.kind == "select" else [leaf for part in relation.parts for leaf in self._leaves(part)]

    def _supports(self, r: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sources that keys and queries depend on."""
        supports = self._of.known.supports
        sides = ([supports[getattr(leaf, side)] for leaf in self._leaves(r) if not leaf.trivial] for side in ("keys", "queries"))
        keys, queries = (tuple(sorted({s for support in side for s in support})) for side in sides)
        return keys, queries

    def _distances(self, r: int, negated: bool) -> np.ndarray | None:
        """Allowed[key - query + n - 1] where the relation depends on the distance alone, else None."""
        graph, n = self._of.graph, self._of.known.max_length
        keys, queries = self._supports(r)
        if any(graph.nodes[s].kind != "indices" for s in (*keys, *queries)) or any(
            self._of.known.tables[side] is None for leaf in self._leaves(r) for side in (leaf.keys, leaf.queries)
        ):
            return None
        if n * n > POSITIONS:
            return None
        matrix = np.broadcast_to(self._table(r, keys, queries), (n if keys else 1, n if queries else 1))
        matrix = np.broadcast_to(matrix, (n, n)) ^ negated
        if not np.array_equal(matrix[1:, 1:], matrix[:-1, :-1]):
            return None
        return np.concatenate((matrix[0, :0:-1], matrix[:, 0]))

    def _table(self, r: int, keys: tuple[int, ...], queries: tuple[int, ...]) -> np.ndarray:
        """The relation over all combinations of source values, (keys, queries) each flattened."""
        sizes = [math.prod(self._of.known.sizes(side)) for side in (keys, queries)]
        places = all(self._of.graph.nodes[s].kind == "indices" for s in (*keys, *queries))
        if sizes[0] * sizes[1] > (POSITIONS if places else PAIRS):
            most = POSITIONS if places else PAIRS
            raise CannotCompile(
                Refusal.EXPLODES,
                f"its value set explodes: {sizes[0]:,} x {sizes[1]:,} combinations of keys and queries, at most {most:,}",
            )
        return np.broadcast_to(self._evaluated(r, keys, queries), (sizes[0], sizes[1]))

    def _evaluated(self, r: int, keys: tuple[int, ...], queries: tuple[int, ...]) -> np.ndarray:
        relation = self._of.graph.relations[r]
        if relation.kind != "select":
            parts = [self._evaluated(p, keys, queries) for p in relation.parts]
            if relation.kind == "not":
                return ~parts[0]
            return parts[0] & parts[1] if relation.kind == "and" else parts[0] | parts[1]
        if relation.trivial:
            return np.ones((1, 1), dtype=bool)
        columns = []
        for node, support in ((relation.keys, keys), (relation.queries, queries)):
            spread = self._of.known.spread(node, support)
            columns.append(np.broadcast_to(spread, self._of.known.sizes(support)).reshape(-1))
        return self._predicate(relation, *columns)

    def _predicate(self, relation: Relation, keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
        """predicate(key, query) for every pair of different values; an undefined value is selected by nothing (the run reports it)."""
        assert relation.operation is not None
        key_kinds, key_of = kinds(keys.tolist())
        query_kinds, query_of = kinds(queries.tolist())
        name = relation.operation.known
        if name in NUMPY and all(map(_is_number, (*key_kinds, *query_kinds))):
            k, q = (np.array(side, dtype=float) for side in (key_kinds, query_kinds))
            table = NUMPY[name](k[:, None], q[None])
        else:
            table = np.zeros((len(key_kinds), len(query_kinds)), dtype=bool)
            for i, key in enumerate(key_kinds):
                for j, query in enumerate(query_kinds):
                    if not isinstance(key, (Undefined, Unreachable)) and not isinstance(query, (Undefined, Unreachable)):
                        result = relation.operation(key, query)
                        if isinstance(result, Undefined):
                            raise CannotCompile(
                                Refusal.PREDICATE,
                                f"its predicate has no value for the key {key!r} and the query {query!r}: {result.reason}",
                            )
                        table[i, j] = bool(result)
        return table[np.ix_(key_of, query_of)]

    def may_fail(self, r: int) -> bool:
        """Whether a key or query of the relation may have no value."""
        sides = (self._of.known.of(k) for leaf in self._leaves(r) if not leaf.trivial for k in (leaf.keys, leaf.queries))
        return any(isinstance(side, Finite) and side.undefined is not None for side in sides)

    def _watch(self, r: int) -> None:
        for leaf in self._leaves(r):
            if not leaf.trivial:
                self._of.watch(leaf.keys)
                self._of.watch(leaf.queries)

    def _equality(self, r: int, negated: bool, lifted: bool) -> list[tuple[Form, Form]] | None:
        """``1/2 - s (k - q)^2`` (lifted: plus ``s q^2``) where that is what it is and rounding leaves it alone, else None."""
        relation, known = self._of.graph.relations[r], self._of.known
        if negated or relation.kind != "select" or relation.operation is None or relation.operation.known != "eq":
            return None
        keys, queries = known.of(relation.keys), known.of(relation.queries)
        if isinstance(keys, Finite) and isinstance(queries, Finite):
            found = self._coded(r, relation, keys, queries, lifted)
        else:
            found = self._real(relation, keys, queries, lifted)
        if found is None:
            return None
        s, (k, q), (k2, q2) = found
        if q2 is None:  # 1/2 - s (k - q)^2 + s q^2 = 2 s q k + (1/2 - s k^2)
            return [(2.0 * s * q, k), (number(1.0), -s * k2 + number(0.5))]
        return [(2.0 * s * q, k), (number(1.0), -s * k2), (-s * q2 + number(0.5), number(1.0))]

    def _coded(self, r: int, relation: Relation, keys: Finite, queries: Finite, lifted: bool) -> Compared | None:
        """Equality of finite sets: of their numbers, or of codes that both sides have in common."""
        if not keys.values or not queries.values:
            return None
        numeric = keys.numeric and queries.numeric
        codes = _codes(keys, queries)
        numbers = np.unique([*codes[0].values(), *codes[1].values()])
        gap = float(np.diff(numbers).min()) if len(numbers) > 1 else 1.0
        largest = [max(map(abs, side.values())) for side in codes]
        scale = 1.0 / gap**2
        if not self._safe(scale, sum(largest), bool((numbers == np.round(numbers)).all())):
            return None
        self._watch(r)
        sides = list(zip((relation.keys, relation.queries), codes, strict=True))
        k, q = (
            self._of.form(node) if numeric else self._of.tabulated(node, code, self._named(node, "coded")) for node, code in sides
        )
        squares = [
            None
            if side and lifted and self._separable(scale, largest[1])
            else self._of.tabulated(node, {v: c * c for v, c in code.items()}, self._named(node, "squared"))
            for side, (node, code) in enumerate(sides)
        ]
        return scale, (k, q), (squares[0] or number(0.0), squares[1])

    def _real(self, relation: Relation, keys: Finite | Real, queries: Finite | Real, lifted: bool) -> Compared:
        """Equality of real numbers with a known spacing."""
        if any(isinstance(side, Finite) and (not side.numeric or side.undefined) for side in (keys, queries)):
            raise CannotCompile(Refusal.WORDS, "it compares real numbers with values that are none")
        gap = RULES["sub"](range_of(keys), range_of(queries)).gap()
        errors = self._of.error(relation.keys) + self._of.error(relation.queries)
        if gap is None or errors > gap / 64:
            near = "it compares real numbers that may come as near to each other as they like"
            raise CannotCompile(Refusal.NEAR_VALUES, near)
        scale = 1.0 / gap**2
        magnitude = range_of(keys).magnitude + range_of(queries).magnitude
        if not self._safe(scale, magnitude, gap == 1):
            close = f"values {gap:.2g} apart and as large as {magnitude:.3g} do not fit the score of this dtype"
            raise CannotCompile(Refusal.SCORES, close)
        k, q = self._of.form(relation.keys), self._of.form(relation.queries)
        k2 = self._squared(relation.keys, k)
        q2 = None if lifted and self._separable(scale, range_of(queries).magnitude) else self._squared(relation.queries, q)
        return scale, (k, q), (k2, q2)

    def _squared(self, node: int, form: Form) -> Form:
        return self._of.plan.compute(self._named(node, "squared"), [Part("identity", form, form)])

    def _named(self, node: int, what: str) -> str:
        return f"{self._of.known.text(node)}, {what}"

    def _safe(self, scale: float, magnitude: float, whole: bool) -> bool:
        """Whether rounding of the score stays far below the tie width (whole numbers are not rounded at all)."""
        largest = scale * magnitude**2
        if whole and scale == 1.0 and largest < 1 / self._of.eps:
            return True
        return 16 * self._of.eps * largest < self._of.tie / 4

    def _separable(self, scale: float, largest: float) -> bool:
        """Whether scores 1 below ``1/2 + s q^2`` are no ties with it."""
        return 10 * self._of.tie * (1.5 + scale * largest**2) < 1

    def _general(self, r: int, negated: bool) -> list[tuple[Form, Form]]:
        """``P(key, query) - 1/2`` by classes of values that behave alike, on the side that has fewer."""
        keys, queries = self._supports(r)
        self._require_finite(r)
        table = self._table(r, keys, queries) ^ negated
        self._watch(r)
        key_rows, key_class = np.unique(table, axis=0, return_inverse=True)
        _, query_class = np.unique(table, axis=1, return_inverse=True)
        key_class, query_class = key_class.reshape(-1), query_class.reshape(-1)
        first_query = np.array([np.flatnonzero(query_class == j)[0] for j in range(query_class.max() + 1)])
        p = key_rows[:, first_query] - 0.5  # classes of keys x classes of queries
        if min(p.shape) > CLASSES:
            raise CannotCompile(Refusal.CLASSES, f"its head needs {min(p.shape):,} products, at most {CLASSES:,}")
        sides = ((keys, key_class), (queries, query_class))
        if p.shape[0] <= p.shape[1]:
            key_forms = self._indicators(r, *sides[0], "key")
            query_forms = self._columns(r, *sides[1], p, "query")
        else:
            query_forms = self._indicators(r, *sides[1], "query")
            key_forms = self._columns(r, *sides[0], p.T, "key")
        return list(zip(query_forms, key_forms, strict=True))

    def _require_finite(self, r: int) -> None:
        for leaf in self._leaves(r):
            for side in () if leaf.trivial else (leaf.keys, leaf.queries):
                if self._of.known.tables[side] is None:
                    raise CannotCompile(
                        Refusal.REAL,
                        f"{self._of.known.text(side)} is real-valued; only equality of values with a known spacing compiles",
                    )

    def _indicators(self, r: int, support: tuple[int, ...], classes: np.ndarray, side: str) -> list[Form]:
        """[1, (value in class 1), (value in class 2), ..]."""
        shape = self._of.known.sizes(support)
        names = (f"{self.text(r)}, {side} class {i}" for i in range(1, classes.max() + 1))
        return [number(1.0)] + [
            self._of.over(support, (classes == i).astype(float).reshape(shape), name) for i, name in enumerate(names, 1)
        ]

    def _columns(self, r: int, support: tuple[int, ...], classes: np.ndarray, p: np.ndarray, side: str) -> list[Form]:
        """[P(0, q), P(1, q) - P(0, q), ..] as functions of the other side: by its own indicators where they are fewer."""
        rows = np.concatenate((p[:1], p[1:] - p[:1]))
        if rows.shape[1] <= rows.shape[0]:
            ones = self._indicators(r, support, classes, side)
            return [self._mixed(row, ones) for row in rows]
        shape = self._of.known.sizes(support)
        names = (f"{self.text(r)}, {side} row {i}" for i in range(len(rows)))
        return [self._of.over(support, row[classes].reshape(shape), name) for row, name in zip(rows, names, strict=True)]

    @staticmethod
    def _mixed(row: np.ndarray, ones: list[Form]) -> Form:
        """``sum_j row_j [class j]`` with the indicators of classes 1, 2, ..."""
        total = number(row[0])
        for weight, form in zip(row[1:] - row[0], ones[1:], strict=True):
            total = total + float(weight) * form
        return total


def _codes(keys: Finite, queries: Finite) -> tuple[dict[Any, float], dict[Any, float]]:
    """One code for both sides: numbers are themselves, of other values a query that is no key has -1."""
    if keys.numeric and queries.numeric:
        return keys.code(), queries.code()
    k = {value: float(i) for i, value in enumerate(keys.values)}
    return k, {value: k.get(value, -1.0) for value in queries.values}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _intervals(allowed: np.ndarray, n: int) -> Intervals:
    """The allowed distances as intervals, unbounded at the ends."""
    out: list[tuple[int | None, int | None]] = []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], allowed, [False])).astype(int)))
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        low, high = int(first) - (n - 1), int(last) - 1 - (n - 1)
        out.append((None if low == 1 - n else low, None if high == n - 1 else high))
    return tuple(out)
