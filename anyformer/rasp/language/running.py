"""Running an expression that a program built; where it has no value, the error names the part that has none and where it stands."""

from typing import Any

from anyformer.errors import AnyformerError
from anyformer.rasp.interpreter import Evaluation
from anyformer.rasp.language.places import Place, RaspError
from anyformer.rasp.operations import Undefined
from anyformer.rasp.sequences import Elementwise, Selector, Sequence, children, in_order

Expression = Sequence | Selector
Places = dict[int, tuple[Expression, Place]]
"""By the identity of an expression: the expression (which keeps that identity alive), and where it was written."""


def run(program: Expression, tokens: list[Any], places: Places, place: Place | None = None, causal: bool = False) -> Any:
    """The values of a sequence, or the matrix (queries, keys) of a selector. ``place`` is told where the program has no own one."""
    evaluation = Evaluation(tokens, causal=causal)
    try:
        return evaluation.of(program)
    except AnyformerError as error:
        culprit, reason = _culprit(program, evaluation, error)
        place = _nearest(program, culprit, places) or place
        if place is None:
            raise
        raise RaspError(place, reason) from None


def _culprit(program: Expression, evaluation: Evaluation, error: AnyformerError) -> tuple[Expression, str]:
    """The first part that cannot be computed, or the part that is undefined where the program's output is."""
    for node in in_order((program,)):
        try:
            evaluation.raw(node)
        except AnyformerError as reason:
            return node, str(reason)
    position = next(p for p, value in enumerate(evaluation.raw(program)) if isinstance(value, Undefined))
    node, undefined = program, evaluation.raw(program)[position]
    while isinstance(node, Elementwise):
        parts = node.arguments
        if node.operation.known == "where":
            condition = evaluation.raw(parts[0])[position]
            parts = (parts[0],) if isinstance(condition, Undefined) else (parts[1 if condition else 2],)
        inner = [part for part in parts if isinstance(evaluation.raw(part)[position], Undefined)]
        if not inner:
            break
        node = inner[0]
    return node, f"{undefined.reason} (position {position} of the input)"


def _nearest(program: Expression, culprit: Expression, places: Places) -> Place | None:
    """The place of the smallest part with a place that contains the culprit."""
    above: dict[int, Place | None] = {id(program): places[id(program)][1] if id(program) in places else None}
    for node in reversed(in_order((program,))):
        for child in children(node):
            own = places.get(id(child))
            if own is not None or above.get(id(child)) is None:
                above[id(child)] = own[1] if own is not None else above.get(id(node))
    return above.get(id(culprit))
