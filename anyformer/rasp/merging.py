"""Coordinates that are only ever read together become one: a sum of k products needs one number, not k.

Two coordinates that are written at the same time by the same kind of writer, and that occur in the same forms with the same ratio of
coefficients, are merged: what is written is the weighted sum, and the forms read it once.
"""

from collections import defaultdict
from collections.abc import Iterable

from anyformer.rasp.plan import Form, Plan, Score, number


def merge(plan: Plan, outputs: list[Form]) -> list[Form]:
    """Merge what can be merged in a pruned plan; returns the outputs in terms of what is left."""
    changed = True
    while changed:
        changed, outputs = _once(plan, outputs)
    return outputs


def _once(plan: Plan, outputs: list[Form]) -> tuple[bool, list[Form]]:
    seen: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for i, form in enumerate(_distinct(plan, outputs)):
        for c, coefficient in form.terms:
            seen[c].append((i, coefficient))
    kinds = _writers(plan)
    groups: dict[tuple, list[tuple[int, float]]] = defaultdict(list)
    for c, places in seen.items():
        first = places[0][1]
        if kinds.get(c):
            groups[kinds[c], plan.coordinates[c].time, tuple((i, w / first) for i, w in places)].append((c, first))
    into: dict[int, tuple[int, float]] = {}
    for members in groups.values():
        keep, scale = members[0]
        for c, factor in members[1:]:
            into[c] = keep, factor / scale
    if not into:
        return False, outputs
    _rewrite_writes(plan, into)
    for head in plan.heads:
        head.score = Score(tuple((_without(q, into), _without(k, into)) for q, k in head.score.pairs), head.score.offsets)
        head.writes = {c: _without(form, into) for c, form in head.writes.items()}
    for unit in plan.units:
        unit.gate = _without(unit.gate, into)
        unit.value = None if unit.value is None else _without(unit.value, into)
    return True, [_without(form, into) for form in outputs]


def _distinct(plan: Plan, outputs: list[Form]) -> Iterable[Form]:
    """Every form that is read, once."""
    forms = [form for head in plan.heads for form in (*head.score.forms(), *head.writes.values())]
    forms += [form for unit in plan.units for form in (unit.gate, unit.value) if form is not None]
    return dict.fromkeys([*forms, *outputs])


def _writers(plan: Plan) -> dict[int, str]:
    """What writes each coordinate: "tokens", "indices", "heads" or "units"."""
    kinds = dict.fromkeys(plan.token_columns, "tokens") | dict.fromkeys(plan.index_columns, "indices")
    kinds |= {c: "heads" for head in plan.heads for c in head.writes}
    return kinds | {c: "units" for unit in plan.units for c in unit.writes}


def _without(form: Form, into: dict[int, tuple[int, float]]) -> Form:
    """The form without merged coordinates: the one that is kept carries their sum already."""
    return Form(tuple((c, w) for c, w in form.terms if c not in into), form.constant)


def _rewrite_writes(plan: Plan, into: dict[int, tuple[int, float]]) -> None:
    for columns in (plan.token_columns, plan.index_columns):
        for c, (keep, factor) in into.items():
            if c in columns:
                columns[keep] = columns[keep] + factor * columns.pop(c)
    for head in plan.heads:
        for c, (keep, factor) in into.items():
            if c in head.writes:
                head.writes[keep] = head.writes.get(keep, number(0.0)) + factor * head.writes.pop(c)
    for unit in plan.units:
        for c, (keep, factor) in into.items():
            if c in unit.writes:
                unit.writes[keep] = unit.writes.get(keep, 0.0) + factor * unit.writes.pop(c)
