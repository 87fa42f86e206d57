"""Attention kernels: from queries and keys to a pattern (rows: queries). All are row-wise and respect the mask exactly.

A row with no allowed key is 0. With ``sink`` one more key of score 0 and value 0 takes part (torch's ``add_zero_attn``):
the row then sums to less than 1.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from anyformer import philox
from anyformer.errors import AnyformerError, require_choice, require_number, require_size
from anyformer.operators import primitives as P
from anyformer.operators.functions import NON_NEGATIVE, POSITIVE, scalar_function
from anyformer.spec import Spec


class Kernel(Spec, ABC):
    """Base of all kernels."""

    additive_bias = True
    """Whether scores exist that a bias can be added to, or a sink's score compared with."""

    normalised = True
    """Whether every row with an allowed key sums to 1 (without a sink)."""

    def gap(self, q: Any, k: Any, bias: Any, allowed: Any, sink: bool) -> float | None:
        """Hard attention: the smallest relative score gap that a row decides by. None for continuous kernels."""
        return None

    @abstractmethod
    def __call__(self, q: Any, k: Any, bias: Any, allowed: Any, sink: bool) -> Any:
        """Patterns (batch, count, queries, keys) for ``q`` (batch, count, n, d), already times the operator's scale, and ``k``; bias and mask
        broadcast."""


def _squared_distances(x: Any, y: Any) -> Any:
    return P.row_sum(x * x) + P.row_sum(y * y).swapaxes(-1, -2) - 2.0 * P.products(x, y)


def _scores(q: Any, k: Any, bias: Any) -> Any:
    scores = P.products(q, k)
    return scores if bias is None else scores + bias


@dataclass(frozen=True)
class Softmax(Kernel):
    """``A_ij = exp(s_ij) / sum_k exp(s_ik)``, ``s = q k^T + bias``."""

    def __call__(self, q: Any, k: Any, bias: Any, allowed: Any, sink: bool) -> Any:
        return P.normalised_exp(_scores(q, k, bias), allowed, sink)


TIE = (1e-9, 1e-4)
"""Tie width of average-hard attention in float64 and in shorter floats."""


@dataclass(frozen=True)
class AverageHard(Kernel):
    """Uniform over the allowed keys whose score is within ``tie (1 + |row maximum|)`` of the row maximum.

    ``tie`` is 1e-9 in float64 and 1e-4 in float32. Exact simulation is claimed for targets whose other score gaps exceed ten
    times that; verification measures the gap (:meth:`gap`).
    """

    def _tops(self, scores: Any, allowed: Any, sink: bool) -> tuple[Any, Any]:
        """Row maxima (with the sink's 0) and the ``1 + |maximum|`` that gaps are relative to."""
        top = P.row_max(P.select(scores, allowed, -math.inf))
        top = P.select(top, top > (0.0 if sink else -math.inf), 0.0)
        return top, 1.0 + P.select(top, top >= 0, 0.0) - P.select(top, top < 0, 0.0)

    def __call__(self, q: Any, k: Any, bias: Any, allowed: Any, sink: bool) -> Any:
        scores = _scores(q, k, bias)
        top, magnitude = self._tops(scores, allowed, sink)
        slack = P.roundoff(scores, *TIE) * magnitude
        weights = P.select(scores * 0.0 + 1.0, allowed & (scores >= top - slack), 0.0)
        total = P.row_sum(weights)
        if sink:
            total = total + P.select(top * 0.0 + 1.0, top <= slack, 0.0)
        return weights / P.select(total, total > 0, 1.0)

    def gap(self, q: Any, k: Any, bias: Any, allowed: Any, sink: bool) -> float | None:
        """min over rows of (row maximum - best score that is no tie) / (1 + |row maximum|); inf where all tie. A sink's 0 is a score.

        Exact simulation is claimed where this exceeds ten times the tie width.
        """
        scores = _scores(q, k, bias)
        top, magnitude = self._tops(scores, allowed, sink)
        tie = P.roundoff(scores, *TIE)
        relative = (top - scores) / magnitude
        least = P.select(relative, allowed & (relative > tie), math.inf).min().item()
        if sink:
            below = top / magnitude
            least = min(least, P.select(below, below > tie, math.inf).min().item())
        return least


@dataclass(frozen=True)
class RBF(Kernel):
    """``A_ij`` proportional to ``exp(-gamma |s q_i - k_j|^2)``, s the operator's scale (give ``scale=1`` for a true RBF);
    ``normalised=False`` omits the division by the row sum (SkyFormer)."""

    gamma: float = 0.5
    normalised: bool = True

    def __post_init__(self) -> None:
        require_number("RBF", "gamma", self.gamma)
        if not self.gamma > 0:
            raise AnyformerError(f"RBF: gamma must be positive, got {self.gamma!r}")
        require_choice("RBF", "normalised", self.normalised, (True, False))

    def __call__(self, q: Any, k: Any, bias: Any, allowed: Any, sink: bool) -> Any:
        scores = -self.gamma * _squared_distances(q, k)
        if bias is not None:
            scores = scores + bias
        if self.normalised:
            return P.normalised_exp(scores, allowed, sink)
        return P.select(P.exp(P.select(scores, allowed, 0.0)), allowed, 0.0)


class _Features(Kernel):
    """``A_ij = phi(q_i) . phi(k_j) / sum_k phi(q_i) . phi(k_k)`` for a non-negative feature map ``phi``."""

    additive_bias = False

    @abstractmethod
    def features(self, x: Any) -> Any:
        """phi, on the last axis."""

    def __call__(self, q: Any, k: Any, bias: Any, allowed: Any, sink: bool) -> Any:
        weights = P.select(P.products(self.features(q), self.features(k)), allowed, 0.0)
        total = P.row_sum(weights)
        return weights / P.select(total, total > 0, 1.0)


@dataclass(frozen=True)
class FeatureMap(_Features):
    """Linear attention with an element-wise feature map >= 0 of ``s q`` and ``k``, s the operator's scale, e.g. ``elu_plus_one``
    (Katharopoulos et al. 2020)."""

    function: str = "elu_plus_one"

    def __post_init__(self) -> None:
        scalar_function(self.function)
        if self.function not in NON_NEGATIVE:
            raise AnyformerError(
                f"FeatureMap: {self.function!r} may take negative values, a feature map may not; known: {', '.join(sorted(NON_NEGATIVE))}"
            )

    @property
    def normalised(self) -> bool:
        """Whether every row sums to 1: features that may all be 0 leave an empty row."""
        return self.function in POSITIVE

    def features(self, x: Any) -> Any:
        return scalar_function(self.function)(x)


@dataclass(frozen=True)
class Performer(_Features):
    """Positive random features ``phi(x) = exp(w_r . x - |x|^2 / 2)``, w Gaussian from ``seed`` (Choromanski et al. 2021).

    The projection is part of the class: it comes from Philox integers and is the same on every machine.
    """

    projections: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        require_size("Performer", "projections", self.projections)
        require_size("Performer", "seed", self.seed, 0)
        if self.projections > 2**20 or self.seed >= 2**64:
            raise AnyformerError(f"Performer: at most 2^20 projections and a seed below 2^64, got {self}")

    def features(self, x: Any) -> Any:
        w = P.constant(x, philox.gaussian(self.seed, 0, (x.shape[-1], self.projections), 1.0).T[None, None].copy())
        return P.exp(P.products(x, w) - 0.5 * P.row_sum(x * x))


@dataclass(frozen=True)
class Polynomial(Kernel):
    """``A_ij = (s q_i . k_j + offset)^degree``, rows not normalised; degree 1 and offset 0 is linear attention."""

    degree: int = 1
    offset: float = 0.0
    additive_bias = False
    normalised = False

    def __post_init__(self) -> None:
        require_size("Polynomial", "degree", self.degree)
        require_number("Polynomial", "offset", self.offset)

    def __call__(self, q: Any, k: Any, bias: Any, allowed: Any, sink: bool) -> Any:
        base = P.products(q, k) + self.offset
        power = base
        for _ in range(self.degree - 1):
            power = power * base
        return P.select(power, allowed, 0.0)


@dataclass(frozen=True)
class Landmarks(Kernel):
    """SkyFormer (Chen et al. 2021): the Gaussian kernel through ``landmarks`` fixed points L, rows not normalised,

        A = K(s q, L) M K(L, k),       K(x, y) = exp(-|x - y|^2 / 2),       M = about (K(L, L) + ridge)^-1

    M by ``iterations`` steps of Newton and Schulz, ``M <- M (2 - (K + ridge) M)``, as their code does. The points are Gaussian from ``seed``
    and part of the class; their code draws them from the tokens at every forward.
    """

    landmarks: int = 4
    ridge: float = 0.1
    iterations: int = 6
    seed: int = 0
    additive_bias = False
    normalised = False

    def __post_init__(self) -> None:
        require_size("Landmarks", "landmarks", self.landmarks)
        require_size("Landmarks", "iterations", self.iterations)
        require_size("Landmarks", "seed", self.seed, 0)
        require_number("Landmarks", "ridge", self.ridge, 0.0)

    def __call__(self, q: Any, k: Any, bias: Any, allowed: Any, sink: bool) -> Any:
        points = P.constant(q, philox.gaussian(self.seed, 0, (q.shape[-1], self.landmarks), 1.0).T[None, None].copy())
        identity = P.constant(q, [[float(i == j) for j in range(self.landmarks)] for i in range(self.landmarks)])
        kernel = _gaussian(points, points) + self.ridge * identity
        inverse = identity / (self.landmarks + self.ridge)  # all eigenvalues of kernel lie below 1 / this
        for _ in range(self.iterations):
            inverse = inverse @ (2.0 * identity - kernel @ inverse)
        return P.select(P.products(_gaussian(q, points) @ inverse, _gaussian(k, points)), allowed, 0.0)


def _gaussian(x: Any, y: Any) -> Any:
    return P.exp(-0.5 * _squared_distances(x, y))
