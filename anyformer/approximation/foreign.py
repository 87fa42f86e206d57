"""The verdict on a PyTorch module ``g``, as the attention part of ``X + g(X)``: no by the traced graph, yes by balls on it, else samples.

The module's own operations are traced; where they are analytic (after some parameters are put to 0, if need be: W_Q = 0 makes a
stabiliser's maximum a constant) its members are evaluated in ball arithmetic and Corollary 1 is proved about the traced graph. Where the
identity cannot be reached, Theorem 3 is used. Kinks that remain leave float64 samples of the module itself, with margins; choices (argmax,
top-k, hashing) leave nothing.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyformer.approximation.balls import Balls, Undecided, balls
from anyformer.approximation.feedforward import FeedForward, feed_forward_condition
from anyformer.approximation.graph_balls import evaluate, supported
from anyformer.approximation.groups import Group, group_of, symmetric, trivial
from anyformer.approximation.models import Draw, feed_forward_network
from anyformer.approximation.probing import MARGIN, Certificate, Probe, certify_by_probing
from anyformer.approximation.question import DRAWS, EQUIVARIANT
from anyformer.approximation.subjects import Subject, examine
from anyformer.approximation.tracing import MASKED, Call, Traced, trace
from anyformer.approximation.verdict import Claim, Hypothesis, LayerBounds, Verdict
from anyformer.errors import AnyformerError
from anyformer.network import Network
from anyformer.operators import Context


@dataclass(frozen=True, eq=False)
class SubFamily:
    """Some parameters put to 0 (masks, True: at 0), the others free."""

    zeros: dict[str, Tensor]
    says: str

    def apply(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The member at these numbers."""
        return {k: torch.where(self.zeros[k], 0.0, v) if k in self.zeros else v for k, v in values.items()}


@dataclass(frozen=True, eq=False)
class Inquiry:
    """A subject, its graph, and what is asked."""

    subject: Subject
    traced: Traced
    layers: int
    target: str | Group
    bits: int

    @property
    def n(self) -> int:
        """Tokens."""
        return self.subject.tokens

    def members(self, family: SubFamily, exact: bool) -> list[Any]:
        """Evaluators of members: feed-forward, X + g(X), feed-forward, ..., with parameters of their own in every layer."""
        out = []
        for r in range(DRAWS):
            draw = Draw(300 + r)
            nets = [feed_forward_network(draw, self.subject.dim) for _ in range(self.layers + 1)]
            parameters = [family.apply(self.subject.draw(1000 * r + k)) for k in range(self.layers)]
            out.append(lambda x, nets=nets, parameters=parameters: self._member(nets, parameters, x, exact))
        return out

    def _member(self, nets: list[Network], parameters: list[dict[str, Tensor]], x: Tensor, exact: bool) -> Any:
        state: Any = balls(x) if exact else x
        for k, net in enumerate(nets):
            state = _feed_forward(net, state)
            if k < len(parameters):
                run = evaluate(self.traced, parameters[k], state) if exact else self.subject.run(parameters[k], state)
                state = state + run
        return state


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
    name = type(module).__name__
    group = _group(target, tokens)
    claim = Claim(tokens, dim, layers, group, EQUIVARIANT)
    condition = feed_forward_condition(feed_forward or FeedForward())
    hypotheses = tuple(replace(h, name=f"H3 {h.name}") for h in condition.hypotheses)

    def say(strength: str, holds: bool | None, theorem: str, reason: str, **others: Any) -> Verdict:
        notes = (*others.pop("notes", ()), "untied parameters; m counts layers X + g(X); g is what was given")
        hypotheses_here = (*others.pop("hypotheses", ()), *hypotheses)
        return Verdict(name, others.pop("claim", claim), strength, holds, theorem, reason, hypotheses_here, notes=notes, **others)

    if target == "causal":
        raise AnyformerError("certify: group='causal' is for declared architectures; ask for a group of permutations here")
    subject = examine(module, call, tokens, dim, name)
    if isinstance(subject, str):
        return say("unknown", None, "no theorem here", subject)
    about: dict[str, Any] = {"notes": subject.notes, "details": {"state": subject.state}}
    if condition.holds is None:
        return say("unknown", None, "the feed-forward condition", condition.blocker, **about)
    if tokens == 1:
        because = "one token: feed-forward layers alone are dense in L^p(K)"
        return say("proved-family", True, "Theorem 1 with m = 0", because, layers=LayerBounds(0, 0), **about)
    traced = trace(subject.module, call, tokens, dim)
    if isinstance(traced, str):
        return say("unknown", None, "no theorem here", traced, **about)
    if traced.random:
        return say("unknown", None, "no theorem here", f"its forward draws random numbers: {', '.join(traced.random)}", **about)
    inquiry = Inquiry(subject, traced, layers, target, bits)
    missing = _unreachable(inquiry)
    if missing is not None:
        (s, u), always = missing
        depth = "at any depth" if always else f"in {layers} layers"
        because = f"token {s} does not depend on token {u} {depth}: nothing of it arrives, whatever the parameters"
        because += f" (traced graph, fixed scores <= -{MASKED:g} read as forbidden)"
        return say("proved-impossible", False, "reason N1", because, layers=LayerBounds(impossible=always), **about)
    proof = _prove(inquiry)
    if isinstance(proof, str):
        return _sampled(say, claim, about, _samples(inquiry, proof))
    certificate, family, residual = proof
    pairs = tokens * (tokens - 1)
    because = (
        f"{pairs}/{pairs} dependences and all separations outside G witnessed on the traced graph ({certificate.bits}-bit balls, smallest gap "
        f"{certificate.gap:.3g}, {certificate.evaluations} evaluations{'; ' + family.says if family.says else ''})"
    )
    how = f"every traced operation is analytic{' on that sub-family' if family.says else ''}"
    own = (
        Hypothesis("H1 analytic, parameters connected", "checked", how),
        Hypothesis("H2 identity reachable", "checked" if residual else "failed", _H2[residual]),
    )
    about["details"] = about["details"] | {"certificate": certificate.to_json(), "sub_family": family.says or "all parameters"}
    theorem = ("Corollary 1" if residual else "Theorem 3") + " (traced graph)"
    claimed = replace(claim, group=certificate.remaining if target == "auto" else group)
    return say("proved", True, theorem, because, hypotheses=own, claim=claimed, layers=LayerBounds(1, layers), **about)


def _sampled(say: Any, claim: Claim, about: dict[str, Any], found: dict[str, Any]) -> Verdict:
    """The verdict from what :func:`_samples` found."""
    others = {k: found[k] for k in ("hypotheses",) if k in found}
    if "certificate" in found:
        about = about | {"details": about["details"] | {"certificate": found["certificate"]}}
        others["claim"] = replace(claim, group=found["group"])
        others["layers"] = LayerBounds(1, claim.layers)
    return say(found["strength"], found["holds"], found["theorem"], found["reason"], **others, **about)


def _group(target: str | Group, n: int) -> Group | None:
    return None if target in ("auto", "causal") else group_of(target, n)


def _unreachable(inquiry: Inquiry) -> tuple[tuple[int, int], bool] | None:
    """A pair (s, u) that no member connects in m layers; and whether no depth would."""
    n, traced = inquiry.n, inquiry.traced
    if traced.unknown:
        return None
    values = inquiry.subject.draw(0)
    step = torch.stack([traced.vary(values, {}, torch.arange(n) == u).depends for u in range(n)], 1) | torch.eye(
        n, dtype=torch.bool
    )
    reached, power = torch.eye(n, dtype=torch.bool), torch.eye(n, dtype=torch.bool)
    for k in range(max(n, inquiry.layers)):
        power = (step.double() @ power.double()) > 0
        reached = power if k < inquiry.layers else reached
    if bool(reached.all()):
        return None
    s, u = (~reached).nonzero()[0].tolist()
    return (s, u), not bool(power[s, u])


def _prove(inquiry: Inquiry) -> tuple[Certificate, SubFamily, bool] | str:
    """A certificate in balls on the first analytic sub-family that has one; else what blocks."""
    traced, n = inquiry.traced, inquiry.n
    if traced.unknown:
        return f"nothing is known of {', '.join(traced.unknown)}"
    without = supported(traced)
    if without:
        return f"no ball form of {', '.join(without)}"
    first: str | None = None
    target = symmetric(n) if inquiry.target == "auto" else group_of(inquiry.target, n)
    for family in _sub_families(inquiry):
        values = family.apply(inquiry.subject.draw(0))
        seen = traced.vary(values, family.zeros)
        doubts = seen.hard + seen.kinks + seen.conditions
        if doubts:
            first = first or f"not analytic in its data: {', '.join(doubts)}"
            continue
        others = torch.arange(n) != 0
        if inquiry.layers == 1 and not bool(traced.vary(values, family.zeros, ~others).depends[others].all()):
            continue  # token 0 does not arrive everywhere in this sub-family
        residual = _identity_reachable(inquiry, family)
        aim = _guess(inquiry, family, residual) if inquiry.target == "auto" else target
        certificate = certify_by_probing(
            inquiry.members(family, exact=True), n, inquiry.subject.dim, aim, trivial(n), inquiry.bits, residual
        )
        if isinstance(certificate, str):
            first = first or certificate
            continue
        needed = certificate.dependent | (np.eye(n, dtype=bool) & residual)
        if needed.all() and certificate.stray is None and certificate.remaining.issubset(aim):
            return certificate, family, residual
        first = first or _what_is_missing(certificate)
    return first or "no sub-family was tried"


def _what_is_missing(certificate: Certificate) -> str:
    if certificate.independent is not None:
        s, u = certificate.independent
        return f"no witness that token {s} depends on token {u}"
    if certificate.stray is not None:
        s, t, _ = certificate.stray
        return f"slots {s} and {t} were not told apart"
    return f"not excluded: {certificate.remaining.name}; that is no proof that it is a symmetry"


def _guess(inquiry: Inquiry, family: SubFamily, residual: bool) -> Group:
    """What float64 samples leave: the group to aim at where none was named."""
    probe = Probe(inquiry.n, inquiry.subject.dim, trivial(inquiry.n))
    try:
        for r, member in enumerate(inquiry.members(family, exact=False)):
            probe.draw(member, 1 + r, 2, inquiry.subject.state["noise"])
    except Undecided:
        return symmetric(inquiry.n)
    return probe.remaining()


def _sub_families(inquiry: Inquiry) -> Iterator[SubFamily]:
    """All parameters; then every single block of weights at 0 (with all biases), then pairs: among them W_Q = 0 and W_K = 0."""
    yield SubFamily({}, "")
    shapes = inquiry.traced.shapes
    blocks: list[tuple[str, slice, str]] = []
    for name, shape in shapes.items():
        if len(shape) != 2:
            continue
        blocks.append((name, slice(None), name))
        if shape[0] % 3 == 0:
            third = shape[0] // 3
            blocks += [(name, slice(i * third, (i + 1) * third), f"{name}[part {i + 1} of 3]") for i in range(3)]
    biases = {k: torch.ones(s, dtype=torch.bool) for k, s in shapes.items() if len(s) == 1}
    for size in (1, 2):
        for chosen in itertools.combinations(blocks, size):
            zeros = dict(biases)
            for name, rows, _ in chosen:
                mask = zeros.get(name, torch.zeros(shapes[name], dtype=torch.bool)).clone()
                mask[rows] = True
                zeros[name] = mask
            yield SubFamily(zeros, " = ".join(c[2] for c in chosen) + " = 0, biases 0")


def _identity_reachable(inquiry: Inquiry, family: SubFamily) -> bool:
    """(H2) inside the family: one block of weights, with all biases, at 0 makes g = 0, by constant propagation."""
    values = inquiry.subject.draw(0)
    for other in itertools.islice(_sub_families(inquiry), 1, None):
        if other.says.count("=") > 2:
            return False
        both = {
            k: family.zeros.get(k, torch.zeros(1, dtype=torch.bool)) | other.zeros.get(k, torch.zeros(1, dtype=torch.bool))
            for k in inquiry.traced.shapes
        }
        masks = {k: m.expand(inquiry.traced.shapes[k]) for k, m in both.items()}
        at_zero = SubFamily(masks, "")
        if inquiry.traced.vary(at_zero.apply(values), masks).zero:
            return True
    return False


def _samples(inquiry: Inquiry, blocker: str) -> dict[str, Any]:
    """Corollary 1 (Theorem 3 where the identity is not reached) in float64 on the module itself; nothing where choices act on its data."""
    subject, n = inquiry.subject, inquiry.n
    hard = inquiry.traced.vary(subject.draw(0), {}).hard
    if hard:
        return _unknown(f"it chooses by its data ({', '.join(hard)}): not continuous, no theorem here speaks of it")
    everything = SubFamily({}, "")
    residual = _identity_reachable(inquiry, everything)
    noise = subject.state["noise"]
    probe = Probe(n, subject.dim, trivial(n))
    try:
        for depth in (1, 2):
            for r, member in enumerate(inquiry.members(everything, exact=False)):
                probe.draw(member, 1 + r, depth, noise)
    except Undecided as problem:
        return _unknown(str(problem))
    remaining = probe.remaining()
    certificate = probe.certificate(None, remaining, None if residual else probe.stray())
    group = remaining if inquiry.target == "auto" else group_of(inquiry.target, n)
    needed = certificate.dependent | (np.eye(n, dtype=bool) & residual)
    no_proof = f"(no proof: {blocker})"
    whole = residual and len(group.orbits) == 1 and group.is_product_of_symmetric
    if not (needed.all() and certificate.stray is None and (whole or remaining.issubset(group))):
        return _unknown(f"{_what_is_missing(certificate)} {no_proof}")
    return {
        "strength": "certified-at-samples",
        "holds": True,
        "theorem": "Corollary 1 at samples" if residual else "Theorem 3 at samples",
        "reason": f"all inequalities hold in float64, {MARGIN} times above the noise {noise:.1e} {no_proof}",
        "hypotheses": (
            Hypothesis("H1 analytic, parameters connected", "assumed", blocker),
            Hypothesis("H2 identity reachable", "checked" if residual else "failed", _H2[residual]),
        ),
        "group": group,
        "certificate": certificate.to_json(),
    }


_H2 = {True: "some parameters make g = 0", False: "not reachable: Theorem 3"}


def _unknown(reason: str) -> dict[str, Any]:
    return {"strength": "unknown", "holds": None, "theorem": "no theorem here", "reason": reason}
