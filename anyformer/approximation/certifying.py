"""The verdict on a declared architecture: no by structure, yes by a lemma, by Theorem 4, or by a proof in ball arithmetic; else unknown.

The order is that of the strength of what can be said (docs/certify.md): feed-forward condition; structural reasons for no; n = 1; families
settled for all n; the exact criterion; witnesses in balls.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from anyformer.approximation import impossible
from anyformer.approximation.architecture import Architecture
from anyformer.approximation.balls import Undecided, box, precision
from anyformer.approximation.criterion import is_causal, layer_bounds
from anyformer.approximation.groups import Group, group_of, symmetric
from anyformer.approximation.impossible import Reason
from anyformer.approximation.lemmas import is_analytic
from anyformer.approximation.models import Draw, member
from anyformer.approximation.probing import Certificate, certify_by_probing
from anyformer.approximation.question import BITS, CAUSAL, DRAWS, Question
from anyformer.approximation.verdict import Hypothesis, LayerBounds, Verdict
from anyformer.errors import AnyformerError, require_size
from anyformer.operators import AverageHard, Context, FeatureMap


def certify_architecture(architecture: Architecture, tokens: int, target: str | Group = "auto", bits: int = BITS) -> Verdict:
    """The verdict on an architecture with ``tokens`` tokens: ``target`` is a group (by word, or a :class:`Group`), ``causal``, or ``auto``."""
    require_size("certify", "tokens", tokens)
    if isinstance(target, str) and target not in ("causal", "auto"):
        group_of(target, tokens)
    question = Question(architecture, tokens, target, bits)
    for reason in _reasons(question):
        return _no(question, reason)
    if question.condition.holds is None:
        return _verdict(question, "unknown", None, "the feed-forward condition", question.condition.blocker)
    if tokens == 1:
        because = "one token: feed-forward layers alone are dense in L^p(K)"
        return _verdict(question, "proved-family", True, "Theorem 1 with m = 0", because, layers=LayerBounds(0, 0))
    for attempt in (_by_lemma, _by_theorem_4, _by_learned_positions, _by_balls):
        verdict = attempt(question)
        if verdict is not None:
            return verdict
    return _verdict(question, "unknown", None, "no theorem here", _blocker(question))


def _reasons(question: Question) -> list[Reason]:
    """The first structural reason for a no, if there is one."""
    found = impossible.norms(question.architecture)
    n, stack, group = question.tokens, question.stack, question.group
    if found is None and not question.causal:
        found = impossible.reach(question.architecture, n)
    if found is None and question.causal:
        found = _not_causal(question)
    if found is None and question.architecture.positions is not None:
        found = impossible.fixed_positions(question.architecture, question.symmetry)
        return [] if found is None else [found]
    if found is None and group is not None and stack is not None and all(p.complete for p in stack.patterns):
        found = impossible.rows(stack, group)
    if found is None and group is not None and question.architecture.layers and stack is None:
        outside = next((g for g in question.symmetry.generators if g not in group), None)
        if outside is not None:
            found = Reason(
                "N3", f"every layer is equivariant under {impossible.cycles(outside)}, which is not in G", True, (outside, 0)
            )
    return [] if found is None else [found]


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
    details = {"range": lemma.holds_for} | _cell(question) | _witness(question)
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
    done = certificate.remaining.issubset(group) and certificate.stray is None
    needed = certificate.dependent | (np.eye(question.tokens, dtype=bool) & residual)
    if not (done and needed.all()):
        return None
    theorem = "Corollary 1" if residual else "Theorem 3"
    pairs = int((~np.eye(question.tokens, dtype=bool)).sum())
    because = (
        f"{pairs}/{pairs} dependences and all separations witnessed by members at rational parameters "
        f"({certificate.bits}-bit balls, smallest gap {certificate.gap:.3g}, {certificate.evaluations} evaluations)"
    )
    exact = replace(question, target=group)
    return _verdict(
        exact,
        "proved",
        True,
        theorem + " (model)",
        because,
        layers=_bounds(exact),
        details={"certificate": certificate.to_json()},
    )


def prove_in_balls(question: Question) -> Certificate | str:
    """The certificate of an architecture whose operators are analytic, or why there is none."""
    architecture = question.architecture
    for layer in architecture.layers:
        for op in layer.operators:
            if not is_analytic(op):
                return f"{op} is not analytic, and no cell without kinks is built for it"
    if isinstance(question.patterns, str) and "made for" in question.patterns:
        return question.patterns
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
    with precision(question.bits):
        out = made(plain, exact=True)
        gap = max(float((y - x).abs_lower()) for x, y in zip(out[0, 0], out[1, 0], strict=True))
        floats = made(plain, exact=False)
        off = max(abs(float(x.mid()) - y) for x, y in zip(out.ravel(), floats.ravel().tolist(), strict=True))
    return {"witness": {"slot": 0, "token": question.tokens - 1, "gap": gap, "bits": question.bits, "model_minus_float64": off}}


def _cell(question: Question) -> dict[str, Any]:
    """ReLU features: one box of reads on which no kink is met, checked by interval evaluation."""
    op = question.architecture.layers[0].operators[0]
    kernel = getattr(op, "kernel", None)
    if not (isinstance(kernel, FeatureMap) and kernel.function == "relu"):
        return {}
    shape = (1, question.tokens, op.count, op.reads)
    places = np.arange(question.tokens)[None]
    with precision(question.bits):
        try:
            op(None, box(np.full(shape, 0.75), np.full(shape, 1.25)), Context(places))  # type: ignore[arg-type]
        except Undecided as problem:
            raise AnyformerError(f"no cell without kinks: {problem}") from None
    return {
        "cell": {
            "reads": [0.75, 1.25],
            "says": "all reads in this interval: no kink is met; tokens near (1, .., 1), W_Q and W_K near positive ones",
        }
    }


def _bounds(question: Question) -> LayerBounds:
    """Layers that the target needs, for architectures of one kind of layer."""
    architecture, n, group, stack = question.architecture, question.tokens, question.group, question.stack
    m = len(architecture.layers)
    if group is None or not architecture.homogeneous or not m:
        return LayerBounds(min(m, int(n > 1)), None)
    if stack is None or not all(p.complete for p in stack.patterns):
        return LayerBounds(int(n > 1), None if question.lemma is None else question.lemma.layers)
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
    if certificate.independent is not None:
        return f"no witness that token {certificate.independent[0]} depends on token {certificate.independent[1]}"
    return f"not excluded: {certificate.remaining.name}; that is no proof that it is a symmetry"


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
        *(replace(h, name=f"H3 {h.name}") for h in question.condition.hypotheses),
    ]
    if architecture.attention_norm is not None:
        out.append(
            Hypothesis("norm in front of attention", "checked", f"{architecture.attention_norm}: Theorem 4 holds behind it")
        )
    return tuple(out)


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
    stack = question.stack
    complete = stack is not None and question.architecture.positions is None and all(p.complete for p in stack.patterns)
    notes = ["m counts attention layers; untied parameters"]
    if question.target == "auto" and question.group is not None:
        notes.append(
            "G was not given: it is the smallest group for which the claim holds, the claim holds for every larger one too"
        )
    if not question.causal and question.group is not None and len(question.group.orbits) > 1:
        notes.append("in the sup norm the claim fails: constant sequences stay constant, and G is not transitive on positions")
    return Verdict(
        subject=question.architecture.name,
        claim=question.claim,
        strength=strength,
        holds=holds,
        theorem=theorem,
        reason=reason,
        hypotheses=_hypotheses(question),
        layers=layers or _bounds(question),
        symmetry=question.equivariance,
        exact=complete and question.theorem_4,
        covered=covered,
        notes=tuple(notes),
        details={"state": "a specification: no module was run", "bits": question.bits} | (details or {}),
    )
