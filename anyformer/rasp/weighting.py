"""Heads that weigh the selected keys by scores of their own: the best of them (average-hard attention by value), or softmax.

best      factor * (selected - 1/2) + score      the factor is above the range of the scores, so that no other key comes near
soft      exp(score) over the selected keys; the others and the sink lie :data:`SOFT_MARGIN` or more below every one of them
"""

import numpy as np

from anyformer.rasp.cardinality import alike
from anyformer.rasp.graph import Node
from anyformer.rasp.plan import Score, number
from anyformer.rasp.ranges import range_of
from anyformer.rasp.refusals import CannotCompile, Refusal
from anyformer.rasp.sets import Finite
from anyformer.rasp.workshop import Workshop

SOFT_MARGIN = 50.0
"""How far unselected keys lie below the selected ones in the score of a softmax head: exp(-50) = 2e-22."""

MOST_SLIP = 1e-2
"""The largest error of an exponent of a softmax head by rounding."""

TINY = 1e-300


def best(of: Workshop, k: int, node: Node, score: Score) -> Score:
    """Selected keys compete by their own score: factor * (selection) + score, with the factor above the range of the scores."""
    scores = of.known.of(node.arguments[1])
    r = range_of(scores)
    if of.softmax is not None:
        return _softly_best(of, k, node, score, of.softmax)
    factor = 2.0 * (2.0 * r.magnitude + 1.0)
    least = 10 * of.tie * (1.0 + factor / 2 + r.magnitude) + 8 * of.plan.slip(of.form(node.arguments[1]))
    if isinstance(scores, Finite):
        gaps = np.diff(np.sort(scores.codes()))
        if len(gaps) and float(gaps.min()) <= least:
            raise CannotCompile(
                Refusal.SCORES,
                f"{of.known.text(k)}: scores {gaps.min():.2g} apart are ties in this dtype, at least {least:.2g} is needed",
            )
    elif node.arguments[0] != node.arguments[1]:
        raise CannotCompile(
            Refusal.NEAR_SCORES, f"{of.known.text(k)}: real scores may be nearly equal; only their maximum itself is safe"
        )
    elif not alike(of.known, node):
        of.errors[k] += least / 10
        of.notes.append(f"{of.known.text(k)} averages scores within {least / 10:.2g} of the best")
    return score.plus(number(1.0), of.form(node.arguments[1]), factor)


def _softly_best(of: Workshop, k: int, node: Node, score: Score, scale: float) -> Score:
    """The same with a softmax head: finite scores so far apart that the others get no weight, real ones as far as the dtype allows.
    Of m scores x below the best, ``sum x exp(-c x) / (1 + sum exp(-c x)) <= m / (e c)``."""
    scores = of.known.of(node.arguments[1])
    r = range_of(scores)
    if isinstance(scores, Finite):
        gaps = np.diff(np.sort(scores.codes()))
        sharp = 1.0 / float(gaps.min()) if len(gaps) else 1.0
    else:
        fitting = (MOST_SLIP / (50 * of.eps * scale) - 1.0) / max(2.0 * r.magnitude, TINY)  # a third of the slip that is allowed
        sharp = min(0.5 * of.eps**-0.4 / max(r.high - r.low, TINY), max(fitting, 1.0))
    factor = 2.0 * (2.0 * sharp * r.magnitude + 1.0)
    slip = 8 * of.eps * scale * factor  # rounding of the exponents
    if slip > MOST_SLIP:
        apart = f"scores {1 / sharp:.2g} apart and as large as {r.magnitude:.3g}"
        raise CannotCompile(Refusal.SCORES, f"{of.known.text(k)}: {apart} do not fit the softmax score of this dtype")
    if all_numbers(of, node.arguments[0]):
        values = range_of(of.known.of(node.arguments[0]))
        of.errors[k] += 3 * slip * (values.high - values.low)
    if not isinstance(scores, Finite):
        if node.arguments[0] != node.arguments[1]:
            raise CannotCompile(
                Refusal.NEAR_SCORES, f"{of.known.text(k)}: real scores may be nearly equal; only their maximum itself is safe"
            )
        width = of.known.max_length / (np.e * scale * sharp)
        of.errors[k] += width
        of.notes.append(f"{of.known.text(k)} is a softmax of its scores, up to {width:.2g} below the best")
    return score.plus(number(1.0), sharp * of.form(node.arguments[1]), factor)


def all_numbers(of: Workshop, k: int) -> bool:
    """Whether node k has values and all are numbers."""
    found = of.known.of(k)
    return not isinstance(found, Finite) or (found.numeric and bool(found.values))


def soft(of: Workshop, k: int, node: Node, score: Score) -> Score:
    """exp(score) over the selected: the others, and the sink, lie SOFT_MARGIN or more below every selected key."""
    r = range_of(of.known.of(node.arguments[1]))
    factor = 2.0 * (r.high - r.low + SOFT_MARGIN)
    values = range_of(of.known.of(node.arguments[0]))
    slip = 4 * of.eps * factor  # rounding of the scores, an error of the exponent
    if slip > MOST_SLIP:
        raise CannotCompile(
            Refusal.SCORES, f"{of.known.text(k)}: scores in [{r.low:.3g}, {r.high:.3g}] do not fit the score of this dtype"
        )
    leak = of.known.max_length * float(np.exp(-SOFT_MARGIN)) * (values.magnitude + abs(float(node.value)))
    of.errors[k] = of.error(node.arguments[0]) + leak + 2 * (of.error(node.arguments[1]) + slip) * values.magnitude
    shift = SOFT_MARGIN - r.low - factor / 2
    return score.plus(number(1.0), of.form(node.arguments[1]) + number(shift), factor)
