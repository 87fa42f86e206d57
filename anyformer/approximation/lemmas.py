"""Families that are settled for all n (Proposition 6; proofs in docs/theory/universality.md): matched by what the operators are, not by
numbers."""

from dataclasses import dataclass, replace

import numpy as np

from anyformer.approximation import groups
from anyformer.approximation.architecture import Architecture, ColourBias
from anyformer.approximation.groups import Group
from anyformer.approximation.patterns import KERNELS, pattern_of
from anyformer.operators import (
    ALiBi,
    Attention,
    AverageHard,
    Bidirectional,
    Causal,
    FeatureMap,
    FixedMatrix,
    LayerNorm,
    Linformer,
    Mask,
    Neighbours,
    Operator,
    Polynomial,
    Softmax,
    Window,
)
from anyformer.operators.mixing import FixedMixing


@dataclass(frozen=True)
class Lemma:
    """``layers`` attention layers approximate all ``group``-equivariant maps (None: all causal maps); ``exact``: no smaller number does, and the
    group is the whole symmetry. ``holds_for`` is the range, ``because`` the proof in a line."""

    name: str
    group: Group | None
    layers: int
    exact: bool
    holds_for: str
    because: str


def match(architecture: Architecture, n: int) -> Lemma | None:
    """The lemma that settles an architecture of one kind of layer, whatever n; None where there is none."""
    if not _plain(architecture) or n < 2:
        return None
    op = architecture.layers[0].operators[0]
    if isinstance(op, Linformer):
        means = np.sum(np.array(op.F), 0)
        if len(set(means.tolist())) == n and means.min() > 0:
            because = "W_Q = 0 leaves sum_u f_u V x_u with f_u = mean_r F_ru, distinct"
            return Lemma("Proposition 6.2", groups.trivial(n), 1, True, "every n and d, any number of projections", because)
        return None
    if isinstance(op, FixedMatrix):
        entries = {x for row in op.rows for x in row}
        if len(entries) == 1 and entries != {0.0}:
            return _symmetric(n, "a multiple of mean pooling: dF_s/dx_u = W / n")
        return None
    if type(op) is not Attention or type(op.kernel) not in KERNELS:
        return None
    lemma = _attention(op, architecture, n)
    if lemma is not None and isinstance(architecture.attention_norm, LayerNorm):
        return replace(lemma, holds_for=lemma.holds_for + "; d >= 2 behind a LayerNorm")
    return lemma


def _plain(architecture: Architecture) -> bool:
    layers = architecture.layers
    if not layers or not architecture.homogeneous or len(layers[0].operators) != 1 or layers[0].maps is not None:
        return False
    plain = architecture.positions is None and architecture.output_norm is None
    return architecture.skip == "residual" and plain and architecture.good_norm


def _symmetric(n: int, because: str) -> Lemma:
    return Lemma("Proposition 6.1", groups.symmetric(n), 1, True, "every n and d", because)


def _attention(op: Attention, architecture: Architecture, n: int) -> Lemma | None:
    full, norm = isinstance(op.mask, Bidirectional), architecture.attention_norm
    if op.rotary is not None:
        turns_by_one = 1.0 in op.rotary.frequencies and architecture.dim >= 2 and norm is None and isinstance(op.kernel, Softmax)
        if not turns_by_one or op.bias is not None or op.qk_norm is not None or op.scale == 0:
            return None  # at scale 0 nothing is left of what is turned
        because = (
            "logits r cos(u - v + phi) can be had on tokens with a constant first coordinate; they keep no other permutation"
        )
        if full:
            return Lemma("Proposition 6.6", groups.trivial(n), 1, True, "every n, d >= 2, a rotary pair of frequency 1", because)
        if isinstance(op.mask, Causal):
            return Lemma("Proposition 6.8", None, 1, True, "every n, d >= 2, a rotary pair of frequency 1", because)
        return None
    if op.bias is None:
        return _without_bias(op, n, norm is None)
    if not isinstance(op.kernel, Softmax) or op.sink:
        return None
    if isinstance(op.bias, ALiBi) and all(op.bias.slopes):
        if full:
            least = 1 if n <= 3 else 2
            because = "all rows kept: |i - j| is kept up to reflection; row s alone: s + k and s - k may change places"
            return Lemma("Proposition 6.5", groups.reflection(n), least, True, "every n and d, m = 2 (m = 1 iff n <= 3)", because)
        if isinstance(op.mask, Causal):
            return Lemma("Proposition 6.8", None, 1, True, "every n and d", "the entries of row s differ")
    if isinstance(op.bias, ColourBias) and full:
        return _circulant(np.asarray(op.bias.colours), n)
    return None


def _without_bias(op: Attention, n: int, unnormed: bool) -> Lemma | None:
    if isinstance(op.mask, Bidirectional):
        kernel = op.kernel
        if op.scale == 0 and (isinstance(kernel, Polynomial) or (isinstance(kernel, FeatureMap) and kernel.function == "relu")):
            return None  # the queries are 0 whatever the parameters
        if isinstance(kernel, Polynomial):
            return _symmetric(n, "sum_u (q.k_u + c)^p V x_u is a polynomial that depends on every x_u") if unnormed else None
        if isinstance(kernel, FeatureMap) and kernel.function == "relu":
            because = "on a cell of positive features attention is analytic; at a constant input dF_s/dx_u = W_V W_O / n"
            return _symmetric(n, because) if unnormed else None
        if isinstance(pattern_of(op, n), str):
            return None
        because = "queries and keys 0 leave averages with equal weights: dF_s/dx_u is a multiple of W_V W_O, not 0"
        return _symmetric(n, because + (" (all scores tie)" if isinstance(kernel, AverageHard) else ""))
    if not op.kernel.normalised or isinstance(pattern_of(op, n), str):
        return None
    if isinstance(op.mask, Causal):
        least = 1 if n <= 2 else 2
        because = "row v has v + 1 equal entries: two layers tell all v apart, one sees the last row alone"
        return Lemma("Proposition 6.8", None, least, True, "every n and d, m = 2 (m = 1 for n <= 2)", because)
    return _mask(op.mask, n)


def _mask(mask: Mask, n: int) -> Lemma | None:
    if isinstance(mask, Window) and mask.before == mask.after and mask.before >= 1 and n >= 2 * mask.before + 1:
        w = mask.before
        steps = -(-(n - 1) // w)
        because = "ceil((n - 1) / w) steps reach everything, one more sees every row; the rows keep the reflection alone"
        return Lemma("Proposition 6.7", groups.reflection(n), steps + 1, False, "every d, n >= 2 w + 1", because)
    if not isinstance(mask, Neighbours) or len(mask.rows) != n or n < 3:
        return None
    rows = [frozenset(row) for row in mask.rows]
    name = "Proposition 6.9"
    if all(row == {i, (i + 1) % n} for i, row in enumerate(rows)):
        return Lemma(
            name, groups.cyclic(n), n - 1, True, "every n >= 3 and d", "a directed ring: preserved edges close a Hamiltonian path"
        )
    if all(row == {(i - 1) % n, i, (i + 1) % n} for i, row in enumerate(rows)):
        return Lemma(
            name, groups.dihedral(n), n // 2, True, "every n >= 3 and d", "a ring: preserved edges close a Hamiltonian path"
        )
    if rows[0] == set(range(n)) and all(row == {0, i} for i, row in enumerate(rows) if i):
        leaves = Group(n, tuple(groups.transposition(n, i, i + 1) for i in range(1, n - 1)))
        return Lemma(name, leaves, 2, True, "every n >= 3 and d", "a star: leaves reach each other through the hub")
    return None


def _circulant(colours: np.ndarray, n: int) -> Lemma | None:
    if colours.shape[0] != n:
        return None
    first = colours[0]
    places = np.arange(n)
    if not np.array_equal(colours, first[(places[None, :] - places[:, None]) % n]):
        return None
    if len(set(first.tolist())) == n:
        because = "b[sigma u - sigma s] = b[u - s] for all u: sigma is a shift"
        return Lemma("Proposition 6.3", groups.cyclic(n), 1, True, "every n and d, distinct b[(j - i) mod n]", because)
    mirrored = all(first[k] == first[-k % n] for k in range(n)) and len(set(first.tolist())) == n // 2 + 1
    if mirrored:
        least = 1 if n <= 4 else 2
        because = "all rows kept: cyclic distance is kept; one row: s + k and s - k may change places"
        return Lemma("Proposition 6.4", groups.dihedral(n), least, True, "every n and d, m = 2 (m = 1 iff n <= 4)", because)
    return None


def is_analytic(op: Operator) -> bool:
    """Whether the operator is analytic in probes and parameters everywhere: no ReLU, no elu, no argmax."""
    if type(op) is not Attention:
        return isinstance(op, (Linformer, FixedMixing))
    if type(op.kernel) not in KERNELS:
        return False
    if isinstance(op.kernel, FeatureMap):
        return op.kernel.function in ("exp", "sigmoid")
    return not isinstance(op.kernel, AverageHard) and (op.qk_norm is None or op.qk_norm > 0)
