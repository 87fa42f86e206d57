"""The verdict on a PyTorch module ``g``, as the attention part of ``X + g(X)``: no by the traced graph, yes by balls on it, else samples.

The module's own operations are traced; where they are analytic (after some parameters are put to 0, if need be: W_Q = 0 makes a
stabiliser's maximum a constant) its members are evaluated in ball arithmetic and Corollary 1 is proved about the traced graph. Where the
identity is not found, Theorem 3 is used. Kinks that remain leave float64 samples of the module itself, with margins; choices (argmax,
top-k, hashing, casts to integers) and operations that nothing is known of leave nothing, and what balls could not tell apart is not asked
of samples: they would see rounding.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyformer.approximation.balls import Balls, Undecided, balls
from anyformer.approximation.criterion import unreached
from anyformer.approximation.feedforward import Condition, FeedForward, feed_forward_condition
from anyformer.approximation.graph_balls import NoBallForm, evaluate, supported
from anyformer.approximation.groups import Group, group_of, symmetric, trivial
from anyformer.approximation.models import Draw, feed_forward_network
from anyformer.approximation.probing import MARGIN, Certificate, Probe, certify_by_probing
from anyformer.approximation.question import DRAWS, EQUIVARIANT, MOST_COMPUTED, ONE_TOKEN, TOO_MANY, feed_forward_hypotheses
from anyformer.approximation.subfamilies import EVERYTHING, SubFamily, identity_reachable, sub_families
from anyformer.approximation.subjects import Subject, examine
from anyformer.approximation.tracing import Call, Traced, Varying, trace
from anyformer.approximation.verdict import Claim, Hypothesis, LayerBounds, Verdict
from anyformer.errors import AnyformerError
from anyformer.network import Network
from anyformer.operators import Context

NO_THEOREM = "no theorem here"
SMALLEST = 1e-12
"""A smaller gap is no proof about a module that holds tables of rounded numbers: their exact values may be more symmetric."""
NUDGE = 1e-4
"""How far tokens are moved to see whether anything moves with them."""
ULPS = 64
"""The noise of a stack is so many times what the last digit of its input moves."""


@dataclass(frozen=True, eq=False)
class Asked:
    """What is asked of a module; ``subject`` once it has been examined."""

    name: str
    claim: Claim
    target: str | Group
    bits: int
    condition: Condition
    subject: Subject | None = None

    def verdict(
        self,
        strength: str,
        holds: bool | None,
        theorem: str,
        reason: str,
        layers: LayerBounds | None = None,
        group: Group | None = None,
        hypotheses: tuple[Hypothesis, ...] = (),
        details: dict[str, Any] | None = None,
    ) -> Verdict:
        """The verdict, with what is known of the module's state."""
        examined = self.subject
        return Verdict(
            self.name,
            self.claim if group is None else replace(self.claim, group=group),
            strength,
            holds,
            theorem,
            reason,
            (*hypotheses, *feed_forward_hypotheses(self.condition)),
            layers or LayerBounds(),
            notes=(
                *(() if examined is None else examined.notes),
                "untied parameters; m counts layers X + g(X); g is what was given",
            ),
            details=({} if examined is None else {"state": examined.state}) | (details or {}),
        )

    def unknown(self, reason: str, theorem: str = NO_THEOREM) -> Verdict:
        """Nothing is claimed."""
        return self.verdict("unknown", None, theorem, reason)


@dataclass(frozen=True, eq=False)
class Inquiry:
    """A module that has been examined and traced, and what is asked of it."""

    asked: Asked
    subject: Subject
    traced: Traced

    @property
    def n(self) -> int:
        """Tokens."""
        return self.subject.tokens

    @property
    def layers(self) -> int:
        """Layers ``X + g(X)``."""
        return self.asked.claim.layers

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Numbers for all parameters, for constant propagation."""
        return self.subject.draw(0)

    @cached_property
    def seen(self) -> Varying:
        """Constants propagated, all parameters free."""
        return EVERYTHING.vary(self.traced, self.values)

    @cached_property
    def residual(self) -> bool:
        """(H2), all parameters free."""
        return identity_reachable(self.traced, self.values, EVERYTHING)

    def members(self, family: SubFamily, seen: Varying | None = None) -> list[Any]:
        """Evaluators of members: feed-forward, X + g(X), feed-forward, ..., with parameters of their own in every layer; in balls where it is
        given what a propagation showed of the family, else in float64."""
        out = []
        for r in range(DRAWS):
            draw = Draw(300 + r)
            nets = [feed_forward_network(draw, self.subject.dim) for _ in range(self.layers + 1)]
            parameters = [family.apply(self.subject.draw(1000 * r + k)) for k in range(self.layers)]
            out.append(lambda x, nets=nets, parameters=parameters: self._member(nets, parameters, x, seen))
        return out

    def _member(self, nets: list[Network], parameters: list[dict[str, Tensor]], x: Tensor, seen: Varying | None) -> Any:
        state: Any = x if seen is None else balls(x)
        for k, net in enumerate(nets):
            state = _feed_forward(net, state)
            if k < len(parameters):
                own = parameters[k]
                run = self.subject.run(own, state) if seen is None else evaluate(self.traced, own, state, seen.forbidden)
                state = state + run
        return state

    def unreached(self, family: SubFamily) -> tuple[int, int, int] | None:
        """A pair of tokens that no member of the family connects in m layers, and how many layers would (-1: no number)."""
        n = self.n
        step = torch.stack([family.vary(self.traced, self.values, torch.arange(n) == u).depends for u in range(n)], 1)
        return unreached([step.numpy()] * self.layers, step.numpy())


def _feed_forward(net: Network, x: Any) -> Any:
    n = x.shape[1]
    if isinstance(x, Balls):
        ones = balls(np.ones((*x.shape[:-1], 1)))
        places = np.broadcast_to(np.arange(n), x.shape[:2])
        return net.stream(np.concatenate((x, ones), -1).view(Balls), Context(places))[..., :-1]  # type: ignore[arg-type]
    stream = torch.cat((x, x.new_ones(*x.shape[:-1], 1)), -1)
    return net.stream(stream, Context(torch.arange(n).expand(x.shape[:2])))[..., :-1]


def certify_module(
    module: nn.Module,
    tokens: int,
    dim: int,
    layers: int,
    target: str | Group,
    feed_forward: FeedForward | None,
    call: Call,
    bits: int,
) -> Verdict:
    """The verdict on ``layers`` layers ``X + g(X)`` with parameters of their own, between feed-forward layers of any number."""
    if target == "causal":
        raise AnyformerError(
            "certify: group='causal' is for declared architectures, as certify(Attention(2, 2, mask=Causal()), ..., group='causal'); "
            "a module is asked about a group of permutations"
        )
    name = type(module).__name__
    group = None if target == "auto" else group_of(target, tokens)
    claim = Claim(tokens, dim, layers, group, EQUIVARIANT)
    asked = Asked(name, claim, target, bits, feed_forward_condition(feed_forward or FeedForward()))
    subject = examine(module, call, tokens, dim, name)
    if isinstance(subject, str):
        return asked.unknown(subject)
    asked = replace(asked, subject=subject)
    if asked.condition.holds is None:
        return asked.unknown(asked.condition.blocker, "the feed-forward condition")
    if tokens == 1:
        return asked.verdict("proved-family", True, "Theorem 1 with m = 0", ONE_TOKEN, LayerBounds(0, 0))
    traced = trace(subject.module, call, tokens, dim)
    if isinstance(traced, str):
        return asked.unknown(traced)
    if traced.random:
        return asked.unknown(f"its forward draws random numbers: {', '.join(traced.random)}")
    if traced.in_place:
        return asked.unknown(f"its forward writes in place into what was there before: {', '.join(traced.in_place)}")
    verdict = _decided(Inquiry(asked, subject, traced))
    if verdict.holds is not None and subject.changed:
        return asked.unknown(subject.changed)
    return verdict


def _decided(inquiry: Inquiry) -> Verdict:
    """No by the graph, yes by balls, yes at samples, or unknown."""
    missing = None if inquiry.traced.unknown else inquiry.unreached(EVERYTHING)
    if missing is not None:
        return _no(inquiry, *missing)
    blocker = TOO_MANY if inquiry.n > MOST_COMPUTED else _refused(inquiry.seen)
    if blocker:
        return inquiry.asked.unknown(blocker)
    proof = _prove(inquiry)
    if isinstance(proof, Unproved):
        return inquiry.asked.unknown(proof.reason) if proof.evaluated else _samples(inquiry, proof.reason)
    return _yes(inquiry, *proof)


def _no(inquiry: Inquiry, s: int, u: int, far: int) -> Verdict:
    depth = "at any depth" if far < 0 else f"in {inquiry.layers} layers"
    because = f"token {s} does not depend on token {u} {depth}: nothing of it arrives, whatever the parameters (traced graph"
    finite = any(bool(mask.any()) for mask in inquiry.seen.forbidden.values())
    because += "; scores that a mask puts far below their row are read as forbidden)" if finite else ")"
    return inquiry.asked.verdict("proved-impossible", False, "reason N1", because, LayerBounds(impossible=far < 0))


def _refused(seen: Varying) -> str:
    """What leaves no theorem, and no samples either; empty where nothing does."""
    if seen.hard:
        return f"it chooses by its data ({', '.join(seen.hard)}): not continuous, no theorem here speaks of it"
    if seen.unknown:
        return f"nothing is known of {', '.join(seen.unknown)}, which acts on its data: it may be a choice"
    if seen.masks:
        return f"a finite mask meets {', '.join(seen.masks)} outside a softmax: neither read as forbidden nor as a number"
    return ""


def _yes(inquiry: Inquiry, certificate: Certificate, family: SubFamily, residual: bool) -> Verdict:
    how = f"every traced operation is analytic{' on that sub-family' if family.says else ''}"
    return inquiry.asked.verdict(
        "proved",
        True,
        ("Corollary 1" if residual else "Theorem 3") + " (traced graph)",
        certificate.sentence("on the traced graph", family.says),
        LayerBounds(1, inquiry.layers),
        certificate.remaining if inquiry.asked.target == "auto" else None,
        (Hypothesis("H1 analytic, parameters connected", "checked", how), _identity(residual)),
        {"certificate": certificate.to_json(), "sub_family": family.says or "all parameters"},
    )


def _identity(residual: bool) -> Hypothesis:
    if residual:
        return Hypothesis("H2 identity reachable", "checked", "some parameters make g = 0")
    return Hypothesis("H2 identity reachable", "failed", "no parameters were found that make g = 0: Theorem 3 is used")


@dataclass(frozen=True)
class Unproved:
    """Why there is no certificate in balls; ``evaluated``: members were evaluated, and were not told apart enough."""

    reason: str
    evaluated: bool = False


def _prove(inquiry: Inquiry) -> tuple[Certificate, SubFamily, bool] | Unproved:
    """A certificate in balls on the first analytic sub-family that has one; else what blocks."""
    without = supported(inquiry.traced)
    if without:
        return Unproved(f"no ball form of {', '.join(without)}")
    first, tried, evaluated = "", list[SubFamily](), False
    for family in _families(inquiry):
        if any(larger.holds(family) for larger in tried):
            continue  # generic members of a larger family told no more apart
        seen = inquiry.seen if family is EVERYTHING else family.vary(inquiry.traced, inquiry.values)
        doubts = seen.hard + seen.unknown + seen.masks + seen.kinks + seen.conditions
        if doubts:
            first = first or f"not analytic in its data: {', '.join(doubts)}"
            continue
        if family is not EVERYTHING and inquiry.unreached(family) is not None:
            continue  # some token does not arrive in this sub-family
        tried.append(family)
        residual = identity_reachable(inquiry.traced, inquiry.values, family)
        found = _certificate(inquiry, family, seen, residual)
        if isinstance(found, Certificate):
            return found, family, residual
        first, evaluated = first or found.reason, evaluated or (found.evaluated and family is EVERYTHING)
    return Unproved(first or "no sub-family was tried", evaluated)


def _families(inquiry: Inquiry) -> Iterator[SubFamily]:
    yield EVERYTHING
    yield from sub_families(inquiry.traced.shapes, (1, 2))


def _certificate(inquiry: Inquiry, family: SubFamily, seen: Varying, residual: bool) -> Certificate | Unproved:
    """A proof in balls on one sub-family, or what is missing."""
    n, target = inquiry.n, inquiry.asked.target
    aim = group_of(target, n) if target != "auto" else _guess(inquiry, family)
    try:
        found = certify_by_probing(
            inquiry.members(family, seen), n, inquiry.subject.dim, aim, trivial(n), inquiry.asked.bits, residual
        )
    except NoBallForm as missing:
        return Unproved(str(missing))
    if isinstance(found, str):
        return Unproved(found)
    if not found.proves(found.remaining if target == "auto" else aim, residual):
        return Unproved(found.missing(residual), evaluated=True)
    if found.gap < SMALLEST and inquiry.traced.rounded:
        return Unproved(
            f"the smallest gap, {found.gap:.1e}, may be the rounding of numbers that the module holds", evaluated=True
        )
    return found


def _guess(inquiry: Inquiry, family: SubFamily) -> Group:
    """What float64 samples leave: the group to aim at where none was named."""
    probe = Probe(inquiry.n, inquiry.subject.dim, trivial(inquiry.n))
    try:
        for r, member in enumerate(inquiry.members(family)):
            probe.draw(member, 1 + r, 2, inquiry.subject.state["noise"])
    except Undecided:
        return symmetric(inquiry.n)
    return probe.remaining()


def _amplified(member: Any, n: int, dim: int) -> float:
    """What becomes of the last digit of the input of a whole stack."""
    x = Draw(7)(1, n, dim, scale=1.0)
    moved = x * (1 + torch.finfo(x.dtype).eps * Draw(8)(1, n, dim, scale=1.0).sign())
    return ULPS * float((member(moved) - member(x)).abs().max())


def _is_step(inquiry: Inquiry) -> bool:
    """Whether g is constant around every sample: sign(v) written as v / |v|, a norm over one number. Steps are no continuous mixing."""
    subject, shape = inquiry.subject, (1, inquiry.n, inquiry.subject.dim)
    moved = []
    for r in range(DRAWS):
        draw, own = Draw(500 + r), subject.draw(500 + r)
        x, nudge = draw(*shape, scale=1.0), NUDGE * draw(*shape, scale=1.0)
        moved.append(float((subject.run(own, x + nudge) - subject.run(own, x)).abs().max()))
    return max(moved) <= MARGIN * subject.state["noise"]


def _samples(inquiry: Inquiry, blocker: str) -> Verdict:
    """Corollary 1 (Theorem 3 where the identity is not found) in float64 on the module itself."""
    subject, n, target = inquiry.subject, inquiry.n, inquiry.asked.target
    residual, noise = inquiry.residual, subject.state["noise"]
    if _is_step(inquiry):
        return inquiry.asked.unknown(f"it is constant around every sample, a step: no theorem here speaks of it ({blocker})")
    probe = Probe(n, subject.dim, trivial(n))
    try:
        for depth in (1, 2):
            for r, member in enumerate(inquiry.members(EVERYTHING)):
                noise = max(noise, _amplified(member, n, subject.dim))
                probe.draw(member, 1 + r, depth, noise)
    except Undecided as problem:
        return inquiry.asked.unknown(str(problem))
    remaining = probe.remaining()
    certificate = probe.certificate(None, remaining, None if residual else probe.stray())
    group = remaining if target == "auto" else group_of(target, n)
    no_proof = f"(no proof: {blocker})"
    if not certificate.proves(group, residual):
        return inquiry.asked.unknown(f"{certificate.missing(residual)} {no_proof}")
    return inquiry.asked.verdict(
        "certified-at-samples",
        True,
        "Corollary 1 at samples" if residual else "Theorem 3 at samples",
        f"all inequalities hold in float64, {MARGIN} times above the noise {noise:.1e} {no_proof}",
        LayerBounds(1, inquiry.layers),
        group,
        (Hypothesis("H1 analytic, parameters connected", "assumed", blocker), _identity(residual)),
        {"certificate": certificate.to_json()},
    )
