"""What is known of the values of every node of a graph: the result of :mod:`anyformer.rasp.inference`.

Finite   a set of values, and with it the *table* of an element-wise expression over its sources
Real     an interval, with what is known of the spacing: every value is p/q with q <= denominator
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anyformer.rasp.graph import Graph
from anyformer.rasp.operations import Value
from anyformer.rasp.ranges import Real, range_of
from anyformer.rasp.refusals import CannotCompile
from anyformer.rasp.sets import Finite, Reals

Table = Any
"""A numpy array of objects, one axis a source."""


@dataclass
class Known:
    """The values of every node of a graph. ``supports[k]`` are the nodes whose values determine node k (itself where it is a source),
    ``tables[k]`` its value for each combination of theirs; a node with neither is :class:`Real`, or cannot be compiled (``problems``)."""

    graph: Graph
    vocab: tuple[Value, ...] | Reals
    max_length: int
    values: list[Finite | Real | None] = field(default_factory=list)
    supports: list[tuple[int, ...]] = field(default_factory=list)
    tables: list[Table | None] = field(default_factory=list)
    problems: list[CannotCompile] = field(default_factory=list)

    def of(self, k: int) -> Finite | Real:
        """The values of node k."""
        found = self.values[k]
        return Finite((0,)) if found is None else found  # a node with a problem: the program is refused as a whole

    def finite_set(self, k: int) -> Finite | None:
        """The set of node k, or None."""
        found = self.of(k)
        return found if isinstance(found, Finite) else None

    def set_of(self, k: int) -> Finite:
        """The set of node k, which has one."""
        found = self.finite_set(k)
        assert found is not None
        return found

    def sizes(self, support: tuple[int, ...]) -> tuple[int, ...]:
        """How many values each source has."""
        return tuple(len(self.set_of(s).values) for s in support)

    def text(self, k: int) -> str:
        """Node k as text."""
        return self.graph.texts.get(k, f"node {k}")

    def is_length(self, k: int) -> bool:
        """Whether node k is the number of tokens: the width of the selector that selects everything."""
        node = self.graph.nodes[k]
        return node.kind == "width" and node.relation is not None and self.graph.relations[node.relation].trivial

    def compared_range(self, k: int, arguments: tuple[int, ...]) -> Real:
        """The range of one side of a comparison: whole numbers of a set beside an input are as exact as that (they are computed so)."""
        found = self.of(k)
        others = [self.of(a) for a in arguments]
        whole = isinstance(found, Finite) and all(float(v).is_integer() and abs(v) < 2**20 for v in found.values)
        beside = any(isinstance(other, Real) and other.raw for other in others)
        return replace(range_of(found), raw=True) if beside and whole else range_of(found)

    def spread(self, k: int, support: tuple[int, ...]) -> Table:
        """The table of node k with one axis for each of ``support`` (length 1 where it does not depend on it)."""
        if k in support and self.supports[k] != (k,):
            return column_of(self.set_of(k)).reshape([-1 if s == k else 1 for s in support])
        table = self.tables[k]
        assert table is not None
        own = self.supports[k]
        return table.reshape([table.shape[own.index(s)] if s in own else 1 for s in support])


def column_of(found: Finite) -> Table:
    """The values of a set as a table over itself."""
    column = np.empty(len(found.values), dtype=object)
    column[:] = found.values
    return column
