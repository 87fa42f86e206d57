"""The reference semantics: a program on a list of tokens, position by position, in float64 (Python's numbers).

    aggregate_q = mean of the values that q selects (rounded once), or the default;   selector_width_q = number of selected keys

Undefined values (division by zero, a function that raises, NaN) are an error where they are output, averaged or compared.
"""

import math
from collections.abc import Sequence as List
from typing import Any

import numpy as np
from jaxtyping import Bool

from anyformer.errors import AnyformerError
from anyformer.rasp.operations import Undefined, Value
from anyformer.rasp.ranges import mean_of
from anyformer.rasp.sequences import (
    Aggregate,
    Combined,
    Constant,
    Elementwise,
    Indices,
    Select,
    Selector,
    SelectorWidth,
    Sequence,
    Tokens,
    in_order,
    printed,
)
from anyformer.rasp.sets import kinds

Matrix = Bool[np.ndarray, "queries keys"]


def interpret(program: Sequence | Selector, tokens: List[Value], *, causal: bool = False) -> Any:
    """The values of a sequence (a list), or the Boolean matrix (queries, keys) of a selector, on ``tokens``. With ``causal`` every selector is
    restricted to keys at or before the query."""
    return Evaluation(tokens, causal=causal).of(program)


class Evaluation:
    """A program on one input: ``values`` and ``matrices`` keep what was computed, so that a drawing or a trace can show it."""

    def __init__(self, tokens: List[Value], *, causal: bool = False):
        if len(tokens) == 0:
            raise AnyformerError("a program needs at least one token, got none")
        for token in tokens:
            if isinstance(token, float) and not math.isfinite(token):
                raise AnyformerError(f"a token must be finite, got {token}")
        self.tokens = list(tokens)
        self.causal = causal
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []  # ids stay valid while their expressions live

    def of(self, program: Sequence | Selector) -> Any:
        """The values of one expression; raises where one of them is undefined."""
        result = self.raw(program)
        if isinstance(program, Sequence):
            for position, value in enumerate(result):
                if isinstance(value, Undefined):
                    raise AnyformerError(f"{printed(program)} has no value at position {position}: {value.reason}")
        return result

    def raw(self, program: Sequence | Selector) -> Any:
        """The values of one expression, undefined ones included."""
        for node in in_order((program,)):
            if id(node) not in self._done:
                self._kept.append(node)
                self._done[id(node)] = self._values(node) if isinstance(node, Sequence) else self._matrix(node)
        return self._done[id(program)]

    def parts(self) -> list[list[Value]]:
        """The values of every sequence that was evaluated."""
        return [self._done[id(node)] for node in self._kept if isinstance(node, Sequence) and id(node) in self._done]

    def _values(self, node: Sequence) -> list[Value]:
        n = len(self.tokens)
        if isinstance(node, Tokens):
            return self.tokens
        if isinstance(node, Indices):
            return list(range(n))
        if isinstance(node, Constant):
            return [node.value] * n
        if isinstance(node, Elementwise):
            columns = [self._done[id(a)] for a in node.arguments]
            return [node.operation(*values) for values in zip(*columns, strict=True)]
        if isinstance(node, SelectorWidth):
            return [int(w) for w in self._done[id(node.selector)].sum(1)]
        assert isinstance(node, Aggregate)
        selected, values = self._done[id(node.selector)], self._done[id(node.values)]
        scores = None if node.scores is None else self._done[id(node.scores)]
        return [self._aggregated(node, q, np.flatnonzero(row).tolist(), values, scores) for q, row in enumerate(selected)]

    def _aggregated(self, node: Aggregate, query: int, keys: list[int], values: list[Value], scores: list[Value] | None) -> Value:
        try:
            return self._aggregate(node, query, keys, values, scores)
        except (TypeError, OverflowError) as error:  # values without an order or a product, sums beyond float64
            raise AnyformerError(f"{printed(node)}: position {query}: {error}") from None

    def _aggregate(self, node: Aggregate, query: int, keys: list[int], values: list[Value], scores: list[Value] | None) -> Value:
        for column in (values,) if scores is None else (values, scores):
            for k in keys:
                if isinstance(column[k], Undefined):
                    raise AnyformerError(
                        f"{printed(node)}: position {query} selects position {k}, which has no value: {column[k].reason}"
                    )
        if not keys:
            return node.default
        if node.how == "max":
            assert scores is not None
            best = max(scores[k] for k in keys)
            keys = [k for k in keys if scores[k] == best]
        if node.how == "softmax":
            assert scores is not None
            best = max(scores[k] for k in keys)
            weights = [math.exp(scores[k] - best) for k in keys]
            return math.fsum(w * values[k] for w, k in zip(weights, keys, strict=True)) / math.fsum(weights)
        chosen = [values[k] for k in keys]
        if all(value == chosen[0] for value in chosen):
            return chosen[0]
        for value in chosen:
            if not isinstance(value, (int, float)):
                raise AnyformerError(
                    f"{printed(node)}: position {query} selects {sorted(set(map(repr, chosen)))}, different values that have no mean"
                )
        return mean_of(chosen)

    def _matrix(self, node: Selector) -> Matrix:
        n = len(self.tokens)
        if isinstance(node, Combined):
            parts = [self._done[id(part)] for part in node.parts]
            matrix = (
                ~parts[0]
                if node.operation.name == "not"
                else parts[0] & parts[1]
                if node.operation.name == "and"
                else parts[0] | parts[1]
            )
        else:
            assert isinstance(node, Select)
            matrix = self._select(node, self._done[id(node.keys)], self._done[id(node.queries)])
        return np.tril(matrix) if self.causal and n > 1 else matrix

    def _select(self, node: Select, keys: list[Value], queries: list[Value]) -> Matrix:
        """One entry a pair of *different* values, then spread over the positions."""
        if node.predicate.known == "true":
            return np.ones((len(queries), len(keys)), dtype=bool)
        for side, column in (("key", keys), ("query", queries)):
            for position, value in enumerate(column):
                if isinstance(value, Undefined):
                    raise AnyformerError(f"{printed(node)}: the {side} at position {position} has no value: {value.reason}")
        key_kinds, key_of = kinds(keys)
        query_kinds, query_of = kinds(queries)
        if node.predicate.known == "eq":
            place = {key: i for i, key in enumerate(key_kinds)}
            table = np.zeros((len(query_kinds), len(key_kinds)), dtype=bool)
            for i, query in enumerate(query_kinds):
                if query in place:
                    table[i, place[query]] = True
        else:
            table = np.array([[self._entry(node, key, query) for key in key_kinds] for query in query_kinds], dtype=bool)
        return table[np.ix_(query_of, key_of)]

    @staticmethod
    def _entry(node: Select, key: Value, query: Value) -> bool:
        result = node.predicate(key, query)
        if isinstance(result, Undefined):
            raise AnyformerError(f"{printed(node)} has no value for the key {key!r} and the query {query!r}: {result.reason}")
        return bool(result)
