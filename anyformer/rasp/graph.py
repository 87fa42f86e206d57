"""An expression becomes a graph in which equal parts are one node (and constant parts are constants).

Numbers of nodes are in order: every node comes after its arguments.
"""

from dataclasses import dataclass, field

from anyformer.rasp.operations import OPERATIONS, Operation, Undefined, Value
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
    text_of,
)


@dataclass(frozen=True)
class Node:
    """A sequence. ``kind``: "constant", "elementwise", or what does not come from values at the same position: "tokens", "indices", "width",
    "mean", "max", "softmax". ``arguments``: nodes, for an aggregate its values (and scores)."""

    kind: str
    operation: Operation | None = None
    arguments: tuple[int, ...] = ()
    relation: int | None = None
    value: Value = None
    value_type: type | None = None


@dataclass(frozen=True)
class Relation:
    """A selector: "select" with its key and query nodes, or and, or, not of relations."""

    kind: str
    operation: Operation | None = None
    keys: int = -1
    queries: int = -1
    parts: tuple[int, ...] = ()

    @property
    def trivial(self) -> bool:
        """Whether it selects everything."""
        return self.operation is not None and self.operation.known == "true"


@dataclass
class Graph:
    """Nodes and relations of a program; ``texts`` print them (a named one by its name)."""

    nodes: list[Node] = field(default_factory=list)
    relations: list[Relation] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    relation_texts: dict[int, str] = field(default_factory=dict)
    roots: tuple[int, ...] = ()
    split_widths: bool = False
    """Whether the width of ``a or b`` is written as width(a) + width(b) - width(a and b): more heads, smaller tables."""
    _node_numbers: dict[Node, int] = field(default_factory=dict)
    _relation_numbers: dict[Relation, int] = field(default_factory=dict)

    @classmethod
    def of(cls, *programs: Sequence, split_widths: bool = False) -> "Graph":
        """The graph of these sequences."""
        graph = cls(split_widths=split_widths)
        number: dict[int, int] = {}
        texts: dict[int, str] = {}
        for part in in_order(programs):
            texts[id(part)] = part.label or text_of(part, texts)
            if isinstance(part, Sequence):
                k = number[id(part)] = graph._number(part, number)
                if part.label or k not in graph.texts:
                    graph.texts[k] = texts[id(part)]
            else:
                k = number[id(part)] = graph.add_relation(_relation(part, number))
                if part.label or k not in graph.relation_texts:
                    graph.relation_texts[k] = texts[id(part)]
        graph.roots = tuple(number[id(program)] for program in programs)
        return graph

    def add(self, node: Node) -> int:
        """The number of a node; equal nodes have one."""
        if node not in self._node_numbers:
            self._node_numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self._node_numbers[node]

    def add_relation(self, relation: Relation) -> int:
        """The number of a relation; equal relations have one."""
        if relation not in self._relation_numbers:
            self._relation_numbers[relation] = len(self.relations)
            self.relations.append(relation)
        return self._relation_numbers[relation]

    def constant(self, value: Value) -> int:
        """The number of a constant."""
        return self.add(Node("constant", value=value, value_type=type(value)))

    def _number(self, part: Sequence, number: dict[int, int]) -> int:
        if isinstance(part, SelectorWidth) and self.split_widths:
            return self._width(number[id(part.selector)])
        return self.add(self._node(part, number))

    def _width(self, r: int) -> int:
        """The width of a relation, split at every ``or`` of different keys or queries."""
        relation = self.relations[r]
        if relation.kind != "or":
            return self.add(Node("width", relation=r))
        a, b = relation.parts
        both = self.add_relation(Relation("and", parts=(a, b)))
        self.relation_texts.setdefault(both, f"({self.relation_texts[a]} and {self.relation_texts[b]})")
        total = self.add(Node("elementwise", OPERATIONS["add"], (self._width(a), self._width(b))))
        out = self.add(Node("elementwise", OPERATIONS["sub"], (total, self._width(both))))
        self.texts.setdefault(total, f"selector_width({self.relation_texts[a]}) + selector_width({self.relation_texts[b]})")
        return out

    def _node(self, part: Sequence, number: dict[int, int]) -> Node:
        if isinstance(part, (Tokens, Indices)):
            return Node(type(part).__name__.lower())
        if isinstance(part, Constant):
            return Node("constant", value=part.value, value_type=type(part.value))
        if isinstance(part, SelectorWidth):
            return Node("width", relation=number[id(part.selector)])
        if isinstance(part, Aggregate):
            arguments = (part.values,) if part.scores is None else (part.values, part.scores)
            places = tuple(number[id(a)] for a in arguments)
            kind, default = part.how, part.default
            return Node(kind, arguments=places, relation=number[id(part.selector)], value=default, value_type=type(default))
        assert isinstance(part, Elementwise)
        places = tuple(number[id(a)] for a in part.arguments)
        if all(self.nodes[a].kind == "constant" for a in places):
            value = part.operation(*(self.nodes[a].value for a in places))
            if not isinstance(value, Undefined):
                return Node("constant", value=value, value_type=type(value))
        return Node("elementwise", part.operation, places)


def _relation(part: Selector, number: dict[int, int]) -> Relation:
    if isinstance(part, Combined):
        return Relation(part.operation.name, parts=tuple(number[id(p)] for p in part.parts))
    assert isinstance(part, Select)
    return Relation("select", part.predicate, number[id(part.keys)], number[id(part.queries)])
