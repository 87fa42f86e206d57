"""Attention with a given symmetry: one learned bias for every orbit of pairs.

    g(X)_i = sum_h W_h sum_j softmax_j( q_i . k_j / sqrt(d) + beta_{h, o(i,j)} ) v_j        o(i, j): the orbit of (i, j) under G

Equivariant under the *2-closure* ``G2 = {sigma : (sigma i, sigma j) in the orbit of (i, j) for all i, j}``, which holds G. Two layers ``X
+ g(X)`` between feed-forward layers approximate every continuous G2-equivariant map; one does iff for every s the stabiliser of s in G2 is
the direct product of the symmetric groups on its orbits (docs/theory/universality.md). No bias of pairs tells G from G2; averaging does
(:class:`Averaged`).
"""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.approximation.architecture import Architecture, ColourBias, Layer
from anyformer.approximation.certifying import certify_architecture
from anyformer.approximation.groups import Group, inverse
from anyformer.approximation.verdict import Verdict
from anyformer.errors import AnyformerError, require_size
from anyformer.operators import Attention
from anyformer.operators import primitives as P


def pair_orbits(group: Group) -> np.ndarray:
    """(n, n) integers: equal numbers are one orbit of ordered pairs."""
    n = group.degree
    colours = np.full((n, n), -1)
    for i, j in np.ndindex(n, n):
        if colours[i, j] >= 0:
            continue
        colour = colours.max() + 1
        colours[i, j], frontier = colour, [(i, j)]
        while frontier:
            a, b = frontier.pop()
            for g in group.generators:
                if colours[g[a], g[b]] < 0:
                    colours[g[a], g[b]] = colour
                    frontier.append((g[a], g[b]))
    return colours


class EquivariantAttention(nn.Module):
    """``g`` above: (batch, n, dim) -> (batch, n, dim); use it as ``x + g(x)``.

    ``certificate`` is the verdict for ``layers``, the least number of such layers that its true symmetry ``symmetry`` (the 2-closure)
    needs; ``remark`` says where that is larger than the ``group`` asked for.
    """

    orbits: Tensor

    def __init__(self, group: Group, dim: int, heads: int = 1):
        super().__init__()
        _require_group("equivariant_attention", group)
        require_size("equivariant_attention", "dim", dim)
        require_size("equivariant_attention", "heads", heads)
        if dim % heads:
            raise AnyformerError(f"equivariant_attention: {heads} heads do not divide {dim} features")
        self.group, self.dim, self.heads = group, dim, heads
        colours = pair_orbits(group)
        self.register_buffer("orbits", torch.from_numpy(colours), persistent=False)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.bias = nn.Parameter(0.02 * torch.randn(heads, int(colours.max()) + 1))
        bank = Layer((Attention(1, max(1, dim // heads), bias=ColourBias.of(colours)),))
        name = f"attention with one bias for each orbit of pairs under {group.name}"
        once = certify_architecture(Architecture((bank,), dim, name=name), group.degree)
        self.symmetry = once.symmetry or group
        enough = certify_architecture(Architecture((bank,), dim, name=name), group.degree, self.symmetry)
        self.layers = 1 if enough.holds else 2
        self.certificate: Verdict = certify_architecture(
            Architecture((bank,) * self.layers, dim, name=name), group.degree, self.symmetry
        )
        self.remark = ""
        if not self.symmetry.issubset(group):
            self.remark = (
                f"its symmetry is {self.symmetry.name}, larger than {group.name}: biases of pairs cannot tell them apart (2-closure); "
                f"for maps that are {group.name}-equivariant alone use Averaged"
            )

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
        batch, n, _ = x.shape
        if n != self.group.degree:
            raise AnyformerError(f"equivariant_attention: the group acts on {self.group.degree} tokens, got {n}")

        def heads(y: Tensor) -> Tensor:
            return y.reshape(batch, n, self.heads, -1).transpose(1, 2)

        q, k, v = (heads(layer(x)) for layer in (self.query, self.key, self.value))
        everything = torch.ones(1, 1, n, n, dtype=torch.bool, device=x.device)
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + self.bias[:, self.orbits]
        weights = P.normalised_exp(scores, everything, False)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, n, -1))

    def extra_repr(self) -> str:
        return (
            f"{self.group.name} on {self.group.degree} tokens, {self.bias.shape[1]} orbits of pairs, {self.layers} layers needed"
        )


def _require_group(owner: str, group: Group) -> None:
    if not isinstance(group, Group):
        raise AnyformerError(f"{owner}: group must be a Group (cyclic(5), Group(3, ((1, 2, 0),)), ..), got {group!r}")


def equivariant_attention(group: Group, n: int, dim: int, heads: int = 1) -> EquivariantAttention:
    """Attention on n tokens that is equivariant under a permutation group given by generators, with its certificate."""
    _require_group("equivariant_attention", group)
    if group.degree != n:
        raise AnyformerError(f"equivariant_attention: the group acts on {group.degree} points, there are {n} tokens")
    return EquivariantAttention(group, dim, heads)


class Averaged(nn.Module):
    """``(1 / |G|) sum over gamma in G of gamma^-1 T gamma``: exactly G-equivariant whatever ``inner`` T is, and G-universal on G-invariant
    compact sets where T comes from a class that is universal for the trivial group; |G| evaluations."""

    moves: Tensor
    back: Tensor

    def __init__(self, inner: nn.Module, group: Group):
        super().__init__()
        _require_group("Averaged", group)
        self.inner, self.group = inner, group
        self.register_buffer("moves", torch.tensor(group.elements), persistent=False)
        self.register_buffer("back", torch.tensor([inverse(g) for g in group.elements]), persistent=False)

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
        total = torch.zeros_like(x)
        for gamma, undo in zip(self.moves.unbind(), self.back.unbind(), strict=True):
            total = total + self.inner(x[:, undo])[:, gamma]  # (gamma X)_i = x_{gamma^-1 i}
        return total / len(self.moves)
