"""The verdict on a declared architecture: no by structure, yes by a lemma, by Theorem 4, or by a proof in ball arithmetic; else unknown.

The order is that of the strength of what can be said (docs/certify.md): feed-forward condition; structural reasons for no; n = 1; families
settled for all n; the exact criterion; witnesses in balls.
"""

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from anyformer.approximation import impossible
from anyformer.approximation.architecture import Architecture
from anyformer.approximation.balls import BITS, Undecided, box, precision
from anyformer.approximation.criterion import distances, is_causal, layer_bounds
from anyformer.approximation.groups import Group, group_of, symmetric
from anyformer.approximation.impossible import Reason
from anyformer.approximation.lemmas import is_analytic
from anyformer.approximation.models import Draw, member
from anyformer.approximation.notes import kernel_limits_of, notes_on
from anyformer.approximation.patterns import support_of
from anyformer.approximation.probing import Certificate, certify_by_probing
from anyformer.approximation.question import CAUSAL, DRAWS, MOST_COMPUTED, ONE_TOKEN, TOO_MANY, Question, feed_forward_hypotheses
from anyformer.approximation.verdict import Hypothesis, LayerBounds, Verdict
from anyformer.errors import require_size
from anyformer.operators import Attention, AverageHard, Context, FeatureMap


def certify_architecture(architecture: Architecture, tokens: int, target: str | Group = "auto", bits: int = BITS) -> Verdict:
    """The verdict on an architecture with ``tokens`` tokens: ``target`` is a group (by word, or a :class:`Group`), ``causal``, or ``auto``."""
    require_size("certify", "tokens", tokens)
    if isinstance(target, str) and target not in ("causal", "auto"):
        group_of(target, tokens)
    question = Question(architecture, tokens, target, bits)
    if question.refusal:
        return _unknown(question, question.refusal)
    settled = _settled(question) if question.condition.holds else None
    if settled is not None:
        return settled
    reason = _reason(question)
    if reason is not None:
        return _no(question, reason)
    if question.condition.holds is None:
        return _unknown(question, question.condition.blocker, "the feed-forward condition")
    if tokens > MOST_COMPUTED:
        return _unknown(question, TOO_MANY)
    for attempt in (_by_theorem_4, _by_learned_positions, _by_balls):
        verdict = attempt(question)
        if verdict is not None:
            return verdict
    return _unknown(question, _blocker(question))


def _settled(question: Question) -> Verdict | None:
    """Without computing groups: one token, or a lemma for all n."""
    if question.architecture.output_norm is None and question.tokens == 1:
        return _verdict(question, "proved-family", True, "Theorem 1 with m = 0", ONE_TOKEN, layers=LayerBounds(0, 0))
    return _by_lemma(question) if impossible.norms(question.architecture) is None else None


def _reason(question: Question) -> Reason | None:
    """The first structural reason for a no, if there is one."""
    found = impossible.norms(question.architecture)
    n, stack, group = question.tokens, question.stack, question.group
    if found is None:
        found = _not_causal(question) if question.causal and not question.large else None
        found = found or (None if question.causal else impossible.reach(question.architecture, n))
    if found is None and group is not None and question.whole is not None:
        found = impossible.symmetric_layers(question.whole, group)
    if n > MOST_COMPUTED:
        return found
    if found is None and question.architecture.positions is not None:
        return impossible.fixed_positions(question.architecture, question.symmetry)
    if found is None and group is not None and stack is not None and all(p.complete for p in stack.patterns):
        found = impossible.rows(stack, group)
    if found is None and group is not None and question.architecture.layers and stack is None:
        found = impossible.symmetric_layers(question.symmetry, group)
    return found


def _not_causal(question: Question) -> Reason | None:
    """Causal maps: some token never depends on an earlier one, or slot s has a bad map besides the identity."""
    stack = question.stack
    if stack is None or question.architecture.positions is not None or not all(p.complete for p in stack.patterns):
        return None
    levels = stack.all_levels
    for s in range(question.tokens):
        for u in range(s):
            if levels[s, u] < 0:
                return Reason("N1", f"token {s} does not depend on token {u}", False, (s, u))
    if np.triu(levels >= 0, 1).any():
        return None  # not causal: nothing is claimed here
    for bad in stack.bad(certain=False):
        if bad.source != bad.target or bad.generators or bad.tau != tuple(range(question.tokens)):
            sigma = bad.generators[0] if bad.generators else bad.tau
            because = f"slot {bad.source} cannot tell X from X with its tokens moved by {impossible.cycles(sigma)}"
            return Reason("N2", because, False, (sigma, bad.source))
    return None


def _no(question: Question, reason: Reason) -> Verdict:
    bounds = LayerBounds(impossible=True) if reason.always else _bounds(question)
    covered = _covered(question) if reason.rule == "N1" else None
    details = {"rule": reason.rule, "every_number_of_layers": reason.always}
    if reason.witness is not None:
        details["witness"] = [list(x) if isinstance(x, tuple) else x for x in reason.witness]
    return _verdict(
        question,
        "proved-impossible",
        False,
        f"reason {reason.rule}",
        reason.because,
        layers=bounds,
        covered=covered,
        details=details,
    )


def _by_lemma(question: Question) -> Verdict | None:
    lemma, group = question.lemma, question.group
    if lemma is None or len(question.architecture.layers) < lemma.layers or (lemma.group is None) != question.causal:
        return None
    if lemma.group is not None and (group is None or not lemma.group.issubset(group)):
        return None
    bounds = _bounds(question) if lemma.group is not None else LayerBounds(lemma.layers, lemma.layers)
    if bounds.upper is None:
        bounds = replace(bounds, upper=lemma.layers)
    cell = _cell(question)
    if cell is None:
        return None
    details = {"range": lemma.holds_for} | cell | _witness(question)
    return _verdict(
        question, "proved-family", True, lemma.name, f"{lemma.because} ({lemma.holds_for})", layers=bounds, details=details
    )


def _by_theorem_4(question: Question) -> Verdict | None:
    stack, group = question.stack, question.group
    if stack is None or not question.theorem_4:
        return None
    if question.causal:
        if not is_causal(stack):
            return None
        return _verdict(question, "proved", True, "Theorem 4", "tokens 0 .. s are reached, and the identity is the only bad map")
    if group is None or stack.unreachable is not None or stack.violation(group, certain=True) is not None:
        return None
    because = "every token reaches every other, and all permutations that keep the rows a slot sees lie in G (exact arithmetic)"
    bounds = _bounds(question)
    return _verdict(question, "proved", True, "Theorem 4", because, layers=bounds, details=_witness(question))


def _by_learned_positions(question: Question) -> Verdict | None:
    """Trained position vectors at the input move the tokens of each position into a cube of its own, where an S_n-equivariant map is
    arbitrary."""
    architecture, n = question.architecture, question.tokens
    positions = architecture.positions
    if positions is None or (positions.where, positions.kind) != ("input", "trained") or question.causal:
        return None
    body = certify_architecture(replace(architecture, positions=None), n, symmetric(n), question.bits)
    if body.holds is not True:
        return None
    because = (
        f"the body is S_{n}-universal by {body.theorem}; trained positions put the tokens of each position into a cube of its own"
    )
    return _verdict(question, body.strength, True, "Theorem 1 and trained positions", because, layers=body.layers)


def _by_balls(question: Question) -> Verdict | None:
    """Corollary 1 (with H2) or Theorem 3 in balls, on members at rational parameters."""
    certificate = prove_in_balls(question)
    group = question.group
    if isinstance(certificate, str) or group is None:
        return None
    residual = question.identity_reachable
    if question.target == "auto":
        group = certificate.remaining
    if not certificate.proves(group, residual):
        return None
    exact = replace(question, target=group)
    bounds = _bounds(exact)
    if bounds.upper is None and question.architecture.homogeneous:
        bounds = replace(bounds, upper=len(question.architecture.layers))
    return _verdict(
        exact,
        "proved",
        True,
        ("Corollary 1" if residual else "Theorem 3") + " (model)",
        certificate.sentence("by members at rational parameters"),
        layers=bounds,
        details={"certificate": certificate.to_json()},
    )


def prove_in_balls(question: Question) -> Certificate | str:
    """The certificate of an architecture whose operators are analytic, or why there is none."""
    architecture = question.architecture
    for layer in architecture.layers:
        for op in layer.operators:
            if not is_analytic(op):
                return f"{op} is not analytic, and no cell without kinks is built for it"
    members = [member(architecture, question.tokens, 100 + r) for r in range(DRAWS)]
    problem = next((m for m in members if isinstance(m, str)), None)
    if problem is not None or not architecture.layers:
        return problem or "there is no attention layer"
    evaluators = [lambda x, m=m: m(x, exact=True) for m in members if not isinstance(m, str)]
    target = question.group if question.target != "auto" and question.group is not None else question.equivariance
    return certify_by_probing(
        evaluators, question.tokens, architecture.dim, target, question.equivariance, question.bits, question.identity_reachable
    )


def _witness(question: Question) -> dict[str, Any]:
    """One dependence of a member in balls, where the operators are analytic: the reason in numbers, and the proof's tie to the code."""
    first = Architecture(question.architecture.layers, question.architecture.dim)
    if question.tokens > 16 or not all(is_analytic(op) for layer in first.layers for op in layer.operators):
        return {}
    made = member(first, question.tokens, 100)
    if isinstance(made, str):
        return {}
    draw = Draw(1)
    c, a = draw(first.dim, scale=1.0), draw(first.dim, scale=1.0)
    plain = c.expand(2, question.tokens, -1).clone()
    plain[1, -1] = a
    try:
        with precision(question.bits):
            out = made(plain, exact=True)
    except Undecided:
        return {}
    if not all(x.is_finite() for x in out.ravel()):
        return {}
    gap = max(float((y - x).abs_lower()) for x, y in zip(out[0, 0], out[1, 0], strict=True))
    floats = made(plain, exact=False)
    off = max(abs(float(x.mid()) - y) for x, y in zip(out.ravel(), floats.ravel().tolist(), strict=True))
    return {"witness": {"slot": 0, "token": question.tokens - 1, "gap": gap, "bits": question.bits, "model_minus_float64": off}}


def _cell(question: Question) -> dict[str, Any] | None:
    """ReLU features: one box of reads on which all features are positive, by interval evaluation; None where the box has a kink or a weight
    that may be 0. Nothing to say for other kernels."""
    op = question.architecture.layers[0].operators[0]
    kernel = getattr(op, "kernel", None)
    if not (isinstance(kernel, FeatureMap) and kernel.function == "relu") or not isinstance(op, Attention):
        return {}
    low, high = np.full((1, question.tokens, op.count, op.reads), 0.75), np.full((1, question.tokens, op.count, op.reads), 1.25)
    turned = op.scale is not None and op.scale < 0
    if turned:  # queries of the other sign
        low[..., : op.head_dim], high[..., : op.head_dim] = -1.25, -0.75
    with precision(question.bits):
        try:
            weights = op(None, box(low, high), Context(np.arange(question.tokens)[None])).weights  # type: ignore[arg-type]
            if not all(x > 0 for x in np.ravel(weights)):
                return None
        except Undecided:
            return None
    says = f"all keys in this interval, queries in {'minus ' if turned else ''}this interval: every weight is positive, no kink is met"
    return {"cell": {"reads": [0.75, 1.25], "says": says + "; tokens near (1, .., 1), W_Q and W_K near such ones"}}


def _bounds(question: Question) -> LayerBounds:
    """Layers that the target needs, for architectures of one kind of layer."""
    architecture, n, group = question.architecture, question.tokens, question.group
    m, lemma = len(architecture.layers), question.lemma
    if group is None or not architecture.homogeneous or not m or question.large:
        return LayerBounds(min(m, int(n > 1)), None)
    if question.whole is not None and lemma is not None:
        if not question.whole.issubset(group):
            return LayerBounds(impossible=True)
        if group == question.whole or n > MOST_COMPUTED:
            return LayerBounds(lemma.layers if group == question.whole else 1, lemma.layers)
    if architecture.positions is not None:  # position vectors tell tokens apart; what arrives is as without them
        support = support_of(architecture.layers[0], n)
        far = None if support is None else distances(support)
        if far is None:
            return LayerBounds(int(n > 1), None)
        return LayerBounds(impossible=True) if (far < 0).any() else LayerBounds(int(far.max()), None)
    stack = question.stack
    if stack is None or not all(p.complete for p in stack.patterns):
        return LayerBounds(int(n > 1), None if lemma is None else lemma.layers)
    found = layer_bounds(stack.patterns[0], group)
    return found if question.theorem_4 or found.impossible else replace(found, lower=max(1, found.lower), upper=None)


def _covered(question: Question) -> str | None:
    """The class of Theorem 2 in words: what each slot depends on."""
    stack = question.stack
    if stack is None or not question.theorem_4:
        return None
    if is_causal(stack):
        return f"every {CAUSAL} (Theorem 4)"
    reach = {s: np.flatnonzero(stack.all_levels[s] >= 0).tolist() for s in range(min(4, question.tokens))}
    return "; ".join(f"f_{s} of tokens {', '.join(map(str, r))}" for s, r in reach.items()) + (
        " ..." if question.tokens > 4 else ""
    )


def _blocker(question: Question) -> str:
    if isinstance(question.patterns, str):
        return question.patterns
    if not question.identity_reachable and question.tokens > 1:
        return (
            "the identity is not reachable (no residual path, or fixed maps), and Theorem 3's inequalities were not all witnessed"
        )
    certificate = prove_in_balls(question)
    if isinstance(certificate, str):
        return certificate
    return certificate.missing(question.identity_reachable)


def _hypotheses(question: Question) -> tuple[Hypothesis, ...]:
    architecture = question.architecture
    analytic = all(is_analytic(op) for layer in architecture.layers for op in layer.operators)
    hard = any(isinstance(getattr(op, "kernel", None), AverageHard) for layer in architecture.layers for op in layer.operators)
    how = "every operator is analytic in parameters and tokens" if analytic else "on the sub-family or cell that is used"
    if hard:
        how = "on the sub-family of zero queries, where all scores tie"
    out = [
        Hypothesis("H1 analytic, parameters connected", "checked", how + "; one fixed mask; all real weights"),
        Hypothesis(
            "H2 identity reachable",
            "checked" if question.identity_reachable else "failed",
            "W_O = 0 with a residual path" if question.identity_reachable else "no residual path, or maps that are fixed",
        ),
        *feed_forward_hypotheses(question.condition),
    ]
    if architecture.attention_norm is not None:
        out.append(
            Hypothesis("norm in front of attention", "checked", f"{architecture.attention_norm}: Theorem 4 holds behind it")
        )
    return tuple(out)


def _unknown(question: Question, reason: str, theorem: str = "no theorem here") -> Verdict:
    """Nothing is claimed; how many layers would be enough is not known either."""
    bounds = LayerBounds(0) if question.refusal else replace(_bounds(question), upper=None)
    return _verdict(question, "unknown", None, theorem, reason, layers=bounds)


def _verdict(
    question: Question,
    strength: str,
    holds: bool | None,
    theorem: str,
    reason: str,
    layers: LayerBounds | None = None,
    covered: str | None = None,
    details: dict[str, Any] | None = None,
) -> Verdict:
    known = {} if question.refusal else {"symmetry": question.equivariance, "exact": _whole_symmetry(question)}
    limits = kernel_limits_of(question)
    return Verdict(
        subject=question.architecture.name,
        claim=question.claim,
        strength=strength,
        holds=holds,
        theorem=theorem,
        reason=reason,
        hypotheses=_hypotheses(question),
        layers=layers or _bounds(question),
        covered=covered,
        notes=(*notes_on(question), *(limit.sentence for limit in limits)),
        details={"bits": question.bits, "kernel_limits": [asdict(limit) for limit in limits]} | (details or {}),
        **known,
    )


def _whole_symmetry(question: Question) -> bool:
    """Whether :attr:`Question.equivariance` is proved to be everything."""
    if question.architecture.positions is not None:
        return False
    if question.whole is not None and question.theorem_4:
        return True
    stack = question.stack
    return stack is not None and all(p.complete for p in stack.patterns) and question.theorem_4
