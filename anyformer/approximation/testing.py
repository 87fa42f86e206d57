"""For the tests of a module of yours: one call that says what is wrong, and where.

def test_my_attention():
    assert_universal(MyAttention(8), tokens=5, dim=8, group="symmetric")
    assert_equivariant(MyAttention(8), symmetric(5), dim=8)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from anyformer.approximation.certify import certify
from anyformer.approximation.groups import Group, Permutation, compose, group_of
from anyformer.approximation.impossible import cycles
from anyformer.approximation.subjects import Subject, examine
from anyformer.approximation.tracing import Call
from anyformer.approximation.verdict import NotCertified, Verdict
from anyformer.approximation.zoo import call_of
from anyformer.errors import AnyformerError, require_number, require_size

TOLERANCE = 1e-9
"""Relative to the largest output, in float64; rounding inside (float32 softmax) is measured and added."""


def assert_universal(subject: Any, *, wanted: str = "certified", **question: Any) -> Verdict:
    """Fail unless :func:`certify` says yes at this strength (``certified`` or ``proved``); returns the verdict."""
    try:
        return certify(subject, **question).raise_if_not(wanted)
    except NotCertified as failed:
        raise AssertionError(str(failed)) from None


def assert_equivariant(
    module: nn.Module,
    group: Group | str | Sequence[Sequence[int]],
    *,
    tokens: int | None = None,
    dim: int,
    trials: int = 3,
    call: Call | None = None,
    tolerance: float = TOLERANCE,
) -> float:
    """Fail unless ``g(sigma X) = sigma g(X)`` for all generators and some products of them, at random parameters, in float64, eval mode
    and batches of one; the message names the worst element and where. Returns the largest error."""
    n = group.degree if isinstance(group, Group) and tokens is None else tokens
    if n is None:
        raise AnyformerError("assert_equivariant: tokens is needed where the group is not a Group")
    require_size("assert_equivariant", "trials", trials)
    require_number("assert_equivariant", "tolerance", tolerance, 0.0)
    acting = group_of(group, n)
    if not acting.generators:
        raise AnyformerError("assert_equivariant: the trivial group has nothing to test; name another one")
    subject = examine(module, call or call_of(module), n, dim, type(module).__name__)
    if isinstance(subject, str):
        raise AssertionError(f"{type(module).__name__}: {subject}")
    worst = max((_error(subject, sigma, trial) for sigma in _elements(acting) for trial in range(trials)), key=lambda e: e[0])
    error, size, sigma, slot = worst
    allowed = tolerance * (1 + size) + 10 * subject.state["noise"]
    if not error <= allowed:
        raise AssertionError(
            f"{subject.name} is not equivariant under {acting.name}: worst element {cycles(sigma)}, error {error:.2e} at token {slot} (allowed "
            f"{allowed:.1e}; outputs up to {size:.2g}; {len(_elements(acting))} elements, {trials} draws of parameters and tokens, float64)"
        )
    return error


def _elements(group: Group) -> tuple[Permutation, ...]:
    """All of a small group; else the generators and products of two."""
    if group.order <= 24:
        identity = tuple(range(group.degree))
        return tuple(g for g in group.elements if g != identity)
    products = (compose(a, b) for a in group.generators for b in group.generators)
    return tuple(dict.fromkeys((*group.generators, *products)))


def _error(subject: Subject, sigma: Permutation, trial: int) -> tuple[float, float, Permutation, int]:
    """Largest deviation, size of the outputs, the element, the token."""
    generator = torch.Generator().manual_seed(trial)
    x = torch.randn(1, subject.tokens, subject.dim, generator=generator, dtype=torch.float64)
    moved = torch.empty_like(x)
    moved[:, list(sigma)] = x
    parameters = subject.draw(50 + trial)
    plain, image = subject.run(parameters, x), subject.run(parameters, moved)
    off = (image[0, list(sigma)] - plain[0]).abs().amax(-1)
    slot = int(off.argmax())
    return float(off[slot]), float(plain.abs().max()), sigma, slot
