"""``certify``: one call, one verdict, for a named family, an operator, an architecture, or a PyTorch module."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from anyformer.approximation.architecture import Architecture, Layer
from anyformer.approximation.balls import BITS, require_flint
from anyformer.approximation.certifying import certify_architecture
from anyformer.approximation.families import REMARKS, family
from anyformer.approximation.feedforward import FeedForward
from anyformer.approximation.foreign import certify_module
from anyformer.approximation.groups import TARGETS, Group, group_of
from anyformer.approximation.tracing import Call
from anyformer.approximation.verdict import Verdict
from anyformer.approximation.zoo import call_of
from anyformer.errors import AnyformerError, require_size
from anyformer.operators import Operator

MOST_TOKENS = 256
"""Beyond this a table of pairs, and the generators of S_n, are no longer quick; nothing that is settled for all n changes there."""

MOST_BITS = 4096


def certify(
    subject: Any,
    *,
    tokens: int,
    dim: int,
    layers: int | None = None,
    group: str | Group | Sequence[Sequence[int]] = "auto",
    feed_forward: FeedForward | None = None,
    bits: int = BITS,
    call: Call | None = None,
) -> Verdict:
    """Is G-UAP(m) true of this kind of attention (arXiv 2506.23551, Definition 1), and how is it known?

    ``subject``: the name of a family, an operator (one bank a layer), an :class:`Architecture` (whose ``dim`` and layers count), or a PyTorch
    module ``g: (batch, tokens, dim) -> (batch, tokens, dim)``, applied by ``call(module, x)``, which stands for layers ``X + g(X)``.
    ``layers``: m, 1 where none is given. ``group``: symmetric, trivial, cyclic, dihedral, reflection, a :class:`Group`, generators,
    ``causal`` (all causal maps), or ``auto`` (the smallest that can be claimed). ``feed_forward``: what stands between attention layers
    (ReLU, two matrices, biases). ``bits``: the precision of proofs in balls.

    Raises :class:`AnyformerError` for what cannot be asked: unknown words, groups on other points, sizes that do not fit. What can be asked
    and not answered is the verdict ``unknown``.
    """
    _require_sizes(tokens, dim, layers, bits)
    if feed_forward is not None and not isinstance(feed_forward, FeedForward):
        raise AnyformerError(
            f"certify: feed_forward must be a FeedForward, got {feed_forward!r}; say FeedForward({feed_forward!r})"
        )
    require_flint()
    target = group if isinstance(group, str) and group in TARGETS else group_of(group, tokens)
    m = 1 if layers is None else layers
    if isinstance(subject, nn.Module):
        return certify_module(subject, tokens, dim, m, target, feed_forward, _call(subject, call), bits)
    if call is not None:
        raise AnyformerError("certify: call is for modules; a declared architecture is not run")
    remark = (REMARKS[subject],) if isinstance(subject, str) and subject in REMARKS else ()
    architecture = _architecture(subject, tokens, dim, layers)
    if feed_forward is not None:
        architecture = replace(architecture, feed_forward=feed_forward)
    verdict = certify_architecture(architecture, tokens, target, bits)
    return replace(verdict, notes=verdict.notes + remark)


def _require_sizes(tokens: int, dim: int, layers: int | None, bits: int) -> None:
    for name, value, least in (
        ("tokens", tokens, 1),
        ("dim", dim, 1),
        ("layers", 1 if layers is None else layers, 0),
        ("bits", bits, 16),
    ):
        require_size("certify", name, value, least)
    if tokens > MOST_TOKENS:
        raise AnyformerError(
            f"certify: tokens must be at most {MOST_TOKENS}, got {tokens}; ask for fewer: a proved-family verdict holds for every n of its range"
        )
    if layers is not None and layers > MOST_TOKENS:
        raise AnyformerError(f"certify: layers must be at most {MOST_TOKENS}, got {layers}; {MOST_TOKENS} reach every token")
    if bits > MOST_BITS:
        raise AnyformerError(f"certify: bits must be at most {MOST_BITS}, got {bits}; {BITS} are usual")


def _call(module: nn.Module, call: Call | None) -> Call:
    if call is not None and not callable(call):
        raise AnyformerError(f"certify: call must be a function of the module and its tokens, got {call!r}")
    return call or call_of(module)


def _architecture(subject: Any, tokens: int, dim: int, layers: int | None) -> Architecture:
    """What a word, an operator or an architecture stands for."""
    m = 1 if layers is None else layers
    if isinstance(subject, str):
        return family(subject, tokens, dim, m)
    if isinstance(subject, Operator):
        return Architecture((Layer((subject,)),) * m, dim, name=type(subject).__name__)
    if not isinstance(subject, Architecture):
        raise AnyformerError(
            f"certify: expected a family, an operator, an Architecture or a module, got {type(subject).__name__}"
        )
    for name, asked, own in (("dim", dim, subject.dim), ("layers", layers, len(subject.layers))):
        if asked is not None and asked != own:
            raise AnyformerError(
                f"certify: {name}={asked} was given, the architecture has {own}; give it {name}={asked} or leave {name} at {own}"
            )
    return subject
