"""The condition on feed-forward layers: nonlinear affine invariance (arXiv 2506.23551, Definition 2), and what it is needed for.

The maps ``h`` of a residual block ``Id + h`` must be closed under ``W h(A . - b)`` for all square W, A and all b, and hold one Lipschitz
map that is not affine. Then (docs/theory/universality.md, Lemma 0) the span of the h is dense in C(K; R^d): hypothesis (H3) of every
theorem here.

    plain  W2 act(W1 x + b)          gated  W3 (act(W1 x + b1) * (W2 x + b2))

A mean-subtracting LayerNorm in front breaks it: ``h(x + c 1) = h(x)``. An RMSNorm with eps > 0 does not: it is a homeomorphism onto a ball.
"""

from dataclasses import dataclass
from typing import Any

from anyformer.approximation.balls import BITS, balls, precision
from anyformer.approximation.verdict import Hypothesis
from anyformer.errors import AnyformerError, require_size
from anyformer.operators import LayerNorm, Norm, RMSNorm
from anyformer.operators.functions import scalar_function
from anyformer.spec import Spec

LIPSCHITZ = {"relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1, "tanh": 1.0, "sigmoid": 0.25, "elu_plus_one": 1.0}
"""Activations that are Lipschitz and no polynomial, with an upper bound of their Lipschitz constant."""

LOCALLY_LIPSCHITZ = {"exp"}
POLYNOMIAL = {"identity", "square"}
PARTIAL = {"log": "x <= 0", "sqrt": "x < 0", "rsqrt": "x <= 0", "reciprocal": "0"}
MAPS = ("input map", "hidden bias", "output map")


@dataclass(frozen=True)
class FeedForward(Spec):
    """``x + W2 act(W1 x + b)`` with ``width`` hidden units; ``act`` is a name of the registry of functions. ``frozen`` names the parts that are
    not trained (or not there): any of ``input map``, ``hidden bias``, ``output map``."""

    activation: str = "relu"
    width: int = 1
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_size(type(self).__name__, "width", self.width)
        scalar_function(self.activation)
        if not set(self.frozen) <= set(MAPS):
            raise AnyformerError(f"FeedForward: frozen may name {', '.join(MAPS)}; got {self.frozen!r}")


@dataclass(frozen=True)
class GatedFeedForward(FeedForward):
    """``x + W3 (act(W1 x + b1) * (W2 x + b2))``; without hidden biases (SwiGLU as usual) the condition is not known to hold."""

    activation: str = "silu"


@dataclass(frozen=True)
class Condition:
    """What the feed-forward condition rests on; ``holds`` is None where it is not known."""

    holds: bool | None
    hypotheses: tuple[Hypothesis, ...]

    @property
    def blocker(self) -> str:
        """The first part that failed."""
        return next((str(h) for h in self.hypotheses if h.status == "failed"), "")


def feed_forward_condition(feed_forward: FeedForward, norm: Norm | None = None) -> Condition:
    """Is (H3) met by residual layers of this kind, behind ``norm`` where there is one? (Lemma 0; table in docs/theory/universality.md)"""
    act, found = feed_forward.activation, []
    gated = isinstance(feed_forward, GatedFeedForward)

    def note(name: str, good: bool, how: str) -> None:
        found.append(Hypothesis(name, "checked" if good else "failed", how))

    for part in MAPS:
        if part in feed_forward.frozen:
            what = "the hidden bias is missing or frozen" if part == "hidden bias" else f"the {part} is frozen"
            note("closed under W h(A . - b)", False, f"{what}: the class is not closed, no theorem here applies")
    if not feed_forward.frozen:
        how = "both hidden maps with biases, put the second to 1" if gated else "input map, hidden bias and output map are free"
        note("closed under W h(A . - b)", True, how)
    if act in POLYNOMIAL:
        note("not a polynomial", False, f"{act} is a polynomial, which no theorem here covers")
    elif act in PARTIAL:
        note("locally Lipschitz on the line", False, f"{act} is not defined at {PARTIAL[act]}")
    elif act == "step":
        note("locally Lipschitz on the line", False, "step is not continuous")
    elif act in LIPSCHITZ or act in LOCALLY_LIPSCHITZ:
        constant = LIPSCHITZ.get(act)
        bound = f"constant at most {constant:g} |W1| |W2|" if constant is not None and not gated else "locally: a smooth formula"
        note("locally Lipschitz, not a polynomial", True, bound)
        found.append(_not_affine(act))
    else:
        note("locally Lipschitz, not a polynomial", False, f"nothing is known of the function {act!r}")
    found += _norm_hypotheses(norm)
    failed = any(h.status == "failed" for h in found)
    return Condition(None if failed else True, tuple(found))


def _not_affine(activation: str) -> Hypothesis:
    """``act(2) - act(0) - 2 (act(0) - act(-1))`` in balls: not 0, so act is not affine."""
    with precision(BITS):
        low, middle, high = scalar_function(activation)(balls([-1.0, 0.0, 2.0]))
        bend = high - middle - 2 * (middle - low)
        different = not bend.contains(0)
    how = f"slopes from 0 to 2 and from -1 to 0 differ by a bend of {float(bend.mid()):.3g}, {BITS}-bit balls"
    return Hypothesis("a member is not affine", "checked" if different else "failed", how)


def _norm_hypotheses(norm: Norm | None) -> list[Hypothesis]:
    if norm is None:
        return []
    if isinstance(norm, RMSNorm):
        good = norm.eps > 0
        return [
            Hypothesis("norm inside the block", "checked" if good else "failed", f"RMSNorm, eps = {norm.eps:g}: a homeomorphism")
        ]
    if isinstance(norm, LayerNorm):
        how = "a mean-subtracting LayerNorm in front of the feed-forward part: h(x + c 1) = h(x), the span is not dense"
        return [Hypothesis("norm inside the block", "failed", how)]
    return [Hypothesis("norm inside the block", "failed", f"nothing is known of {type(norm).__name__}")]


def read_feed_forward(module: Any) -> FeedForward | str:
    """The specification of a PyTorch module ``Linear, activation, (Dropout,) Linear``; a sentence where it is something else."""
    from torch import nn

    names = {
        nn.ReLU: "relu",
        nn.SiLU: "silu",
        nn.Tanh: "tanh",
        nn.Sigmoid: "sigmoid",
        nn.GELU: "gelu",
        nn.Identity: "identity",
    }
    parts = [p for p in module.modules() if not list(p.children()) and not isinstance(p, nn.Dropout)]
    kinds = [type(p) for p in parts]
    if len(parts) != 3 or kinds[0] is not nn.Linear or kinds[2] is not nn.Linear or kinds[1] not in names:
        seen = ", ".join(k.__name__ for k in kinds) or "no layers"
        return f"expected Linear, activation, Linear; got {seen}"
    first, act, last = parts
    frozen = [name for name, layer in (("input map", first), ("output map", last)) if not layer.weight.requires_grad]
    if first.bias is None or not first.bias.requires_grad:
        frozen.append("hidden bias")
    name = "gelu_tanh" if isinstance(act, nn.GELU) and act.approximate == "tanh" else names[kinds[1]]
    return FeedForward(name, first.out_features, tuple(sorted(frozen)))
