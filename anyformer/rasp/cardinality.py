"""How many keys a selector selects, as far as its predicate, its keys and its queries tell."""

from dataclasses import dataclass

import numpy as np

from anyformer.rasp.graph import Node, Relation
from anyformer.rasp.known import Known
from anyformer.rasp.sets import UNREACHABLE, Finite

EXCLUDED = {"lt": ("eq", "gt", "ge"), "gt": ("eq", "lt", "le"), "eq": ("ne", "lt", "gt")}
"""Comparisons of the same values that cannot hold together."""


@dataclass(frozen=True)
class Cardinality:
    """What is known of a relation: every query selects at most one key, every position selects itself, every query selects some key."""

    at_most_one: bool = False
    itself: bool = False
    some: bool = False


def cardinality(known: Known, r: int) -> Cardinality:
    """How many keys relation r selects."""
    relation = known.graph.relations[r]
    if relation.kind == "select":
        return _selects(known, relation)
    parts = [cardinality(known, p) for p in relation.parts]
    if relation.kind == "and":
        itself = all(p.itself for p in parts)
        return Cardinality(any(p.at_most_one for p in parts), itself, itself)
    if relation.kind == "or":
        return Cardinality(False, any(p.itself for p in parts), any(p.some for p in parts))
    return Cardinality()


def _selects(known: Known, relation: Relation) -> Cardinality:
    assert relation.operation is not None
    if relation.trivial:
        return Cardinality(known.max_length == 1, True, True)
    name = relation.operation.known
    itself = relation.keys == relation.queries and name in ("eq", "le", "ge")
    if name != "eq":
        return Cardinality(False, itself, itself)
    keys, support = known.finite_set(relation.keys), known.supports[relation.keys]
    places = len(support) == 1 and known.graph.nodes[support[0]].kind == "indices"
    one = places and keys is not None and len(keys.values) == known.max_length
    return Cardinality(one, itself, itself or _inside(known, relation))


def _inside(known: Known, relation: Relation) -> bool:
    """Whether the keys are the positions and every query, for every length, is one of them."""
    table, support = known.tables[relation.queries], known.supports[relation.queries]
    if known.graph.nodes[relation.keys].kind != "indices" or table is None:
        return False
    whole = next((s for s in support if known.is_length(s)), None)
    if whole is None:
        return all(v in (0, UNREACHABLE) for v in table.reshape(-1))
    lengths = np.array(known.set_of(whole).values).reshape([-1 if s == whole else 1 for s in support])
    return all(
        v is UNREACHABLE or (isinstance(v, (int, float)) and v in range(int(n)))
        for v, n in zip(table.reshape(-1), np.broadcast_to(lengths, table.shape).reshape(-1), strict=True)
    )


def never(known: Known, r: int) -> bool:
    """Whether a relation is seen to select nothing: parts that are anded compare the same keys and queries and exclude each other."""
    relation = known.graph.relations[r]
    if relation.kind == "or":
        return all(never(known, part) for part in relation.parts)
    if relation.kind != "and":
        return False
    parts, todo = [], list(relation.parts)
    while todo:
        part = known.graph.relations[todo.pop()]
        if part.kind == "and":
            todo += part.parts
        elif part.kind == "select" and part.operation is not None:
            parts.append((part.keys, part.queries, part.operation.known))
    return any(a[:2] == b[:2] and b[2] in EXCLUDED.get(a[2], ()) for i, a in enumerate(parts) for b in parts[i + 1 :] + parts[:i])


def alike(known: Known, node: Node) -> bool:
    """Whether the values that a query averages are surely all the same: those of one key, or of keys with one value."""
    assert node.relation is not None
    if cardinality(known, node.relation).at_most_one:
        return True
    if node.kind == "max" and known.graph.nodes[node.arguments[1]].kind == "indices":
        return True
    todo = [node.relation]
    while todo:
        relation = known.graph.relations[todo.pop()]
        todo += relation.parts if relation.kind == "and" else ()
        equal = relation.kind == "select" and relation.operation is not None and relation.operation.known == "eq"
        if equal and known.supports[relation.keys] == (relation.keys,) == known.supports[node.arguments[0]]:
            return True
    return False


def may_fail(known: Known, k: int) -> bool:
    """Whether aggregate k may meet keys without a value, or different words."""
    node = known.graph.nodes[k]
    found = [s for s in map(known.of, node.arguments) if isinstance(s, Finite)]
    return any(s.undefined for s in found) or (bool(found) and not found[0].numeric and not alike(known, node))
