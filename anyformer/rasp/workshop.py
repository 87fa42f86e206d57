"""Where a plan is made: what is known of the graph, the plan so far, and the linear form of every node that was asked for.

Selectors, weighted heads and tables work here; what a node becomes is said by :class:`~anyformer.rasp.realising.Realisation`.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from anyformer.operators.kernels import TIE
from anyformer.rasp.graph import Node
from anyformer.rasp.known import Known
from anyformer.rasp.operations import Undefined
from anyformer.rasp.options import Options
from anyformer.rasp.plan import Form, Plan, number
from anyformer.rasp.sets import Finite, Unreachable
from anyformer.rasp.tabulating import Source, Tabulation


class Workshop(ABC):
    """The plan of a graph, built as it is asked for forms."""

    def __init__(self, known: Known, options: Options):
        self.known = known
        self.graph = known.graph
        self.eps = float(torch.finfo(options.dtype).eps)
        self.tie = TIE[options.dtype != torch.float64]
        self.softmax = options.softmax
        self.plan = Plan()
        self.tables = Tabulation(self.plan, options.mode, self.eps)
        self.fault = number(0.0)
        self.errors: dict[int, float] = {}
        self.notes: list[str] = []
        self._forms: dict[int, Form] = {}
        self._sources: dict[int, Source] = {}
        self._faulty: set[int] = set()

    @abstractmethod
    def make_form(self, k: int, node: Node) -> Form:
        """The form of node k, made for the first time."""

    @abstractmethod
    def make_source(self, k: int, node: Node) -> Source:
        """Node k as something that tables read, made for the first time."""

    @abstractmethod
    def needs(self, k: int) -> tuple[int, ...]:
        """Nodes whose forms the form of node k is made of: none where it is a table."""

    def form(self, k: int) -> Form:
        """The number of node k: its value, or its code where its values are no numbers."""
        stack = [k]
        while k not in self._forms:  # no recursion: expressions may be thousands of operations deep
            node = stack[-1]
            waiting = [a for a in self.needs(node) if a not in self._forms]
            if waiting:
                stack += waiting[::-1]
                continue
            if node not in self._forms:
                self._forms[node] = self.make_form(node, self.graph.nodes[node])
            stack.pop()
        return self._forms[k]

    def source(self, k: int) -> Source:
        """Node k as something that tables read."""
        if k not in self._sources:
            self._sources[k] = self.make_source(k, self.graph.nodes[k])
        return self._sources[k]

    def error(self, k: int) -> float:
        """A bound of how far the form of node k may be from the value (functions in standard mode; rounding aside)."""
        self.form(k)
        return self.errors.get(k, 0.0)

    def tabulated(self, k: int, values: dict[Any, float], what: str) -> Form:
        """The form of a function of node k, given by its value for each of the node's values (missing: does not matter)."""
        return self.over(self.known.supports[k], self.numbers(k, values), what)

    def numbers(self, k: int, values: dict[Any, float]) -> np.ndarray:
        """The table of node k with these numbers for its values, NaN where there is none."""
        table = self.known.tables[k]
        assert table is not None
        column = [np.nan if isinstance(v, (Undefined, Unreachable)) else values.get(v, np.nan) for v in table.reshape(-1)]
        return np.array(column).reshape(table.shape)

    def over(self, support: tuple[int, ...], table: np.ndarray, what: str) -> Form:
        """The form of a function of several sources."""
        return self.tables.form(what, [(s, self.source(s)) for s in support], table)

    def blame(self, form: Form) -> None:
        """Add to the fault (after the form was built, which may add to it too)."""
        self.fault = self.fault + form

    def watch(self, k: int) -> None:
        """Add to the fault wherever node k has no value."""
        found = self.known.of(k)
        if k in self._faulty or self.known.tables[k] is None or not isinstance(found, Finite) or found.undefined is None:
            return
        self._faulty.add(k)
        self.blame(self.missing(k))

    def missing(self, k: int) -> Form:
        """1 where node k has no value, else 0."""
        table = self.known.tables[k]
        if table is None:
            return number(0.0)
        flags = np.array([float(isinstance(v, Undefined)) for v in table.reshape(-1)]).reshape(table.shape)
        return self.over(self.known.supports[k], flags, f"{self.known.text(k)} has no value")
