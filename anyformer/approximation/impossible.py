"""The structural reasons that say no (N1 .. N7): each holds for every stack and all parameters. Nothing else in this library says no.

    N1  some token never depends on some other                        N4  mean-subtracting LayerNorms in front of both parts
    N2  rows are kept by a permutation outside G at this depth        N5  a mean-subtracting LayerNorm with a frozen affine part at the very end
    N3  a permutation outside G is a symmetry of every layer          N7  fixed position vectors at the input of a body with symmetries

N6 (one layer of single-head hard attention with first-index ties) concerns an operator that the language does not have. Proofs:
docs/theory/universality.md.
"""

from dataclasses import dataclass

import numpy as np

from anyformer.approximation.architecture import Architecture
from anyformer.approximation.criterion import Stack, unreached
from anyformer.approximation.groups import Group, Permutation
from anyformer.approximation.patterns import support_of
from anyformer.operators import LayerNorm


@dataclass(frozen=True)
class Reason:
    """A no: ``rule`` (N1 .. N7), the smallest part that decides, and whether it holds at every number of layers."""

    rule: str
    because: str
    always: bool
    witness: tuple[int, int] | tuple[Permutation, int] | None = None


def norms(architecture: Architecture) -> Reason | None:
    """N4 and N5."""
    if isinstance(architecture.attention_norm, LayerNorm) and isinstance(architecture.feed_forward_norm, LayerNorm):
        because = (
            "LayerNorm in front of both parts: T_s(X + c 1 at u) = T_s(X) + (c 1 if s = u), so not even f = 0 is approximated"
        )
        return Reason("N4", because, True)
    if isinstance(architecture.output_norm, LayerNorm):
        because = "the last operation is a mean-subtracting LayerNorm with a frozen affine part: outputs of one network lie in one hyperplane"
        return Reason("N5", because + "; a linear head behind it is another class", True)
    return None


def reach(architecture: Architecture, n: int) -> Reason | None:
    """N1: the supports of the masks alone, whatever the operators compute."""
    supports = []
    for layer in architecture.layers:
        support = support_of(layer, n)
        if support is None:
            return None
        supports.append(support)
    graph = np.logical_or.reduce(supports) if supports else np.zeros((n, n), dtype=bool)
    found = unreached(supports, graph)
    if found is None:
        return None
    (s, u, far), m = found, len(supports)
    more = "at no depth" if far < 0 else f"the mask needs {far} layers for that, there {'is' if m == 1 else 'are'} {m}"
    return Reason("N1", f"token {s} does not depend on token {u}: {more}", far < 0, (s, u))


def symmetric_layers(symmetry: Group, group: Group) -> Reason | None:
    """N3: a permutation outside G under which every layer is equivariant."""
    sigma = next((g for g in symmetry.generators if g not in group), None)
    if sigma is None:
        return None
    return Reason("N3", f"every layer is equivariant under {cycles(sigma)}, which is not in G", True, (sigma, 0))


def rows(stack: Stack, group: Group) -> Reason | None:
    """N2 and N3, by certified equal colours."""
    always = symmetric_layers(stack.symmetries(certain=False), group)
    if always is not None:
        return always
    found = stack.violation(group, certain=False)
    if found is None:
        return None
    sigma, s = found
    because = (
        f"slot {s} cannot tell X from sigma X, sigma = {cycles(sigma)} not in G: all rows of attention that it sees are kept"
    )
    return Reason("N2", because, False, (sigma, s))


def fixed_positions(architecture: Architecture, symmetry: Group) -> Reason | None:
    """N7, for generic position vectors: the body keeps a permutation sigma, so T(sigma(X + E) - E + E) = sigma T(X + E)."""
    positions = architecture.positions
    if positions is None or positions.kind != "fixed" or positions.where != "input" or symmetry.order == 1:
        return None
    sigma = symmetry.generators[0]
    because = f"fixed position vectors E at the input of a body that keeps {cycles(sigma)}: T(X' + E) = sigma T(X + E), X' = sigma(X + E) - E"
    return Reason("N7", because + ", on compact sets that hold X and X'", True, (sigma, 0))


def cycles(sigma: Permutation) -> str:
    """Cycle notation."""
    seen: set[int] = set()
    out = ""
    for i in range(len(sigma)):
        if i in seen or sigma[i] == i:
            continue
        cycle = [i]
        while (j := sigma[cycle[-1]]) != i:
            cycle.append(j)
        seen.update(cycle)
        out += f"({' '.join(map(str, cycle))})"
    return out or "the identity"
