"""``certify``: one call, one verdict, for a named family, an operator, an architecture, or a PyTorch module."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from anyformer.approximation.architecture import Architecture, Layer
from anyformer.approximation.balls import require_flint
from anyformer.approximation.certifying import certify_architecture
from anyformer.approximation.families import REMARKS, family
from anyformer.approximation.feedforward import FeedForward
from anyformer.approximation.foreign import certify_module
from anyformer.approximation.groups import Group, group_of
from anyformer.approximation.question import BITS
from anyformer.approximation.tracing import Call
from anyformer.approximation.verdict import Verdict
from anyformer.approximation.zoo import call_of
from anyformer.errors import AnyformerError, require_size
from anyformer.operators import Operator


def certify(
    subject: Any,
    *,
    tokens: int,
    dim: int,
    layers: int = 1,
    group: str | Group | Sequence[Sequence[int]] = "auto",
    feed_forward: FeedForward | None = None,
    bits: int = BITS,
    call: Call | None = None,
) -> Verdict:
    """Is G-UAP(m) true of this kind of attention (arXiv 2506.23551, Definition 1), and how is it known?

    ``subject``: the name of a family, an operator (one bank a layer), or an :class:`Architecture` (whose layers count). ``group``:
    symmetric, trivial, cyclic, dihedral, reflection, generators, ``causal`` (all causal maps), or ``auto`` (the smallest that can be claimed).
    """
    for name, value in (("tokens", tokens), ("dim", dim)):
        require_size("certify", name, value)
    require_size("certify", "layers", layers, 0)
    require_flint()
    target = group if isinstance(group, str) and group in ("auto", "causal") else group_of(group, tokens)
    if isinstance(subject, nn.Module):
        return certify_module(subject, tokens, dim, layers, target, feed_forward, call or call_of(subject), bits)
    remark = ()
    if isinstance(subject, str):
        remark = (REMARKS[subject],) if subject in REMARKS else ()
        architecture = family(subject, tokens, dim, layers)
    elif isinstance(subject, Operator):
        architecture = Architecture((Layer((subject,)),) * layers, dim, name=type(subject).__name__)
    elif isinstance(subject, Architecture):
        architecture = subject
    else:
        raise AnyformerError(
            f"certify: expected a family, an operator, an Architecture or a module, got {type(subject).__name__}"
        )
    if feed_forward is not None:
        architecture = replace(architecture, feed_forward=feed_forward)
    verdict = certify_architecture(architecture, tokens, target, bits)
    return replace(verdict, notes=verdict.notes + remark)
