"""How narrow can a universal machine be? The lower bound, where every registered machine stands, and the lemma in numbers.

Attention only, at the target's depth: fixed R_Q, R_K (m x d), R_V (m x m), and ``E`` (d_in x m) alone depends on the target. Such a
machine *matches attention* if every pattern of every target is reproduced for all inputs. FUT, Theorem 4.1 (arXiv 2605.31423):
m >= H^(L/2). A short proof that gives more (ours; docs/limits.md has it in full):

* If all patterns below layer L are matched, the stream is ``Z = sum_p A_p X E R_p``, p in [H]^(L-1), R_p the product of the R_V of p.
* *Lemma.* For all positive values v, u there are a target (feature 1 is multiplied by v[l,h] in head h of layer l, feature 2 by u[l,h])
  and an input at which the vectors ``A_p x_1``, ``A_p x_2`` (all p) and 1 are linearly independent. So the scores of layer L
  agree coefficient by coefficient: with S_h = R_Q R_K^T, e_a the row a of E, and c_h the strength of the target's last head h,

      e_a R_p S_h R_p'^T e_b^T  =  c_h v_p u_p'     (a = 1, b = 2),          = c_h v_p v_p'     (a = b = 1),      v_p = prod_l v[l,p_l]

* The left side is linear in ``e_a (x) e_b``, from a space of dimension m^2 (a = b: m (m + 1) / 2, symmetric tensors). The right sides
  span as many dimensions as there are different monomials. Hence

      m^2 >= H^(2L-1)    (d_in >= 2, d >= 2),          m (m + 1) / 2 >= H (H (H + 1) / 2)^(L-1)    (every d_in, d).

The second implies Theorem 4.1, since (H + 1) / 2 >= 1; the first leaves a factor of at most 4d sqrt(H) to the columns that
attention needs on a machine that exists, 2Hd (H^L - 1)/(H - 1). Both hold with a causal mask as well.
"""

from math import isqrt
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.costs import cost, lower_bound
from anyformer.maps import DenseMap
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Attention
from anyformer.targets.transformer import TransformerConfig

CLASSES = ((2, 2, 2, 4), (4, 2, 24, 4), (2, 2, 28, 30), (2, 3, 28, 30), (2, 4, 30, 30), (8, 6, 64, 512))
"""(H, L, d, d_in): the class of the figure, the sizes of the paper's experiments, and one of today's small models."""

BOUNDED = ("path-tree", "looped", "chain", "random")
"""Machines of the theorem's kind. Others may multiply, be deeper, or hold fewer targets, and stand where they stand."""


def symmetric_bound(heads: int, layers: int) -> int:
    """The smallest m with ``m (m + 1) / 2 >= H (H (H + 1) / 2)^(L-1)``, exactly; for every d_in and d."""
    needed = heads * (heads * (heads + 1) // 2) ** (layers - 1)
    m = max(isqrt(2 * needed) - 1, 1)
    while m * (m + 1) // 2 < needed:
        m += 1
    return m


def two_feature_bound(heads: int, layers: int) -> int:
    """The smallest m with ``m^2 >= H^(2L-1)``, exactly; for d_in >= 2 and d >= 2."""
    return lower_bound(heads, 2 * layers - 1)


def our_bound(heads: int, layers: int, head_dim: int, features: int) -> int:
    """The larger of the two bounds that hold for a class."""
    two = two_feature_bound(heads, layers) if min(head_dim, features) >= 2 else 1
    return max(symmetric_bound(heads, layers), two)


def path_vectors(heads: int, layers: int, tokens: int, seed: int = 0) -> Float[Tensor, "tokens vectors"]:
    """``A_p x_1, A_p x_2`` for all p in [H]^layers, and 1, of a target as the lemma chooses it: scores b[l,h] times feature 1 of query
    and key (of the stream), with different positive b, positive v and u. The columns have norm 1. Patterns come from the library's
    own forward."""
    generator = torch.Generator().manual_seed(seed)

    def positive(*shape: int) -> Tensor:
        return 0.5 + torch.rand(*shape, dtype=torch.float64, generator=generator)

    x = torch.stack((torch.linspace(-2, 2, tokens, dtype=torch.float64), positive(tokens)), dim=1)
    stages = []
    for _ in range(layers):
        probes = torch.zeros(2, 2 * heads, dtype=torch.float64)
        probes[0, ::2] = positive(heads) * 2.0 ** torch.arange(heads)
        probes[0, 1::2] = 1.0
        stages.append(Stage((Branch(Attention(heads, 1, scale=1.0), probes, DenseMap(torch.diag_embed(positive(heads, 2)))),)))
    patterns: list[Tensor] = []
    Network(x, tuple(stages)).run(torch.arange(tokens)[None], patterns=patterns)
    vectors = [x]
    for pattern in patterns:
        vectors = [head @ v for v in vectors for head in pattern[0]]
    columns = torch.cat((*vectors, torch.ones(tokens, 1, dtype=torch.float64)), dim=1)
    return columns / columns.norm(dim=0)


def independence(heads: int, layers: int, seed: int = 0) -> dict[str, Any]:
    """The lemma at one target: number of ``vectors``, their ``rank``, and smallest over largest singular value."""
    count = 2 * heads**layers + 1
    vectors = path_vectors(heads, layers, 4 * count, seed)
    singular = torch.linalg.svdvals(vectors)
    return {
        "heads": heads,
        "paths_through": layers,
        "vectors": count,
        "rank": int(torch.linalg.matrix_rank(vectors)),
        "smallest_over_largest": float(singular[-1] / singular[0]),
    }


def standing() -> list[dict[str, Any]]:
    """Where every registered machine stands: its width, and width / H^(L/2), for each of the classes."""
    rows = []
    for heads, layers, head_dim, features in CLASSES:
        config = TransformerConfig(vocab=features, heads=heads, layers=layers, head_dim=head_dim, features=features)
        bound, machines = lower_bound(heads, layers), {}
        for name, sizes in cost(config)["backbones"].items():
            width = sizes["width"]
            machines[name] = {"width": width} | ({"over_bound": width / bound} if width else {"reason": sizes["reason"]})
        rows.append(
            {
                "heads": heads,
                "layers": layers,
                "head_dim": head_dim,
                "features": features,
                "bound": bound,
                "our_bound": our_bound(heads, layers, head_dim, features),
                "machines": machines,
            }
        )
    return rows
