"""Norms over probe coordinates, as operators: ``diag(r)`` with ``r = 1 / sqrt(mean(p^2) + eps)``, p the D columns probed.

A *standard* LayerNorm over all m coordinates of a fixed backbone cannot be simulated (arXiv 2605.31423, section on
limits): at X = 0 it could not produce a target's bias. A norm over the D probe coordinates lifts that limit.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from anyformer.errors import AnyformerError, require_size
from anyformer.operators import primitives as P
from anyformer.operators.operator import Context, Operator, Scaling, TokenMap


class Norm(Operator):
    """Base of the norms: one branch that reads ``dim`` columns."""

    dim: int
    eps: float
    noun = "norm"

    def __post_init__(self) -> None:
        require_size(type(self).__name__, "dim", self.dim)
        if not self.eps >= 0:
            raise AnyformerError(f"{type(self).__name__}: eps must be a number >= 0, got {self.eps!r}")

    @property
    def count(self) -> int:
        return 1

    @property
    def reads(self) -> int:
        return self.dim

    def read_name(self, i: int) -> str:
        return f"feature {i + 1}"

    @property
    def cacheable(self) -> bool:
        return True

    @abstractmethod
    def scale(self, p: Any) -> Any:
        """r for probes p (..., dim), shape (..., 1)."""

    def __call__(self, shared: Any, own: Any, ctx: Context) -> Scaling:
        return Scaling(self.scale(own)[..., 0])


@dataclass(frozen=True)
class RMSNorm(Norm):
    """``r = 1 / sqrt(mean(p^2) + eps)``."""

    dim: int
    eps: float = 1e-5

    def scale(self, p: Any) -> Any:
        return 1.0 / P.sqrt(P.row_sum(p * p) / self.dim + self.eps)


@dataclass(frozen=True)
class LayerNorm(Norm):
    """``r = 1 / sqrt(var(p) + eps)``; the centring of the values is part of the branch's map."""

    dim: int
    eps: float = 1e-5

    def scale(self, p: Any) -> Any:
        centred = p - P.row_sum(p) / self.dim
        return 1.0 / P.sqrt(P.row_sum(centred * centred) / self.dim + self.eps)


@dataclass(frozen=True)
class Normed(Operator):
    """Pre-norm: ``inner`` behind ``norm``, r its scale:

        inner reads  r * p_scaled + p_bias,        values  r * v

    All branches share the norm's columns, which give r. With ``bias`` each branch has as many columns again: they read the constant
    feature alone and are added unscaled. Reads of ``inner`` that read the constant feature alone (its last ones) are not scaled either.
    ``scale_values=False`` leaves the values alone (plain MLP units, whose value is the constant feature).
    """

    inner: Operator
    norm: Norm
    bias: bool = False
    scale_values: bool = True

    def __post_init__(self) -> None:
        if self.inner.shared:
            raise AnyformerError("Normed: the inner operator is itself behind a norm; one norm a stage")
        if self.inner.constant_reads != tuple(range(self.scaled_reads, self.inner.reads)):
            raise AnyformerError("Normed: the constant reads of the inner operator must be its last ones")

    @property
    def noun(self) -> str:  # type: ignore[override]
        return self.inner.noun

    @property
    def count(self) -> int:
        return self.inner.count

    @property
    def shared(self) -> int:
        return self.norm.dim

    @property
    def reads(self) -> int:
        return self.inner.reads + (self.scaled_reads if self.bias else 0)

    @property
    def scaled_reads(self) -> int:
        """How many (the first) reads of the inner operator are scaled: those that read more than the constant feature."""
        return self.inner.reads - len(self.inner.constant_reads)

    @property
    def constant_reads(self) -> tuple[int, ...]:
        return tuple(range(self.scaled_reads, self.reads))

    @property
    def cacheable(self) -> bool:
        return self.inner.cacheable

    def read_name(self, i: int) -> str:
        plain = i < self.inner.reads
        return self.inner.read_name(i if plain else i - self.inner.reads) + ("" if plain else " (bias)")

    def __call__(self, shared: Any, own: Any, ctx: Context) -> TokenMap:
        r = self.norm.scale(shared)
        w, f = self.inner.reads, self.scaled_reads
        scaled = own[..., :f] * r[..., None]
        if self.bias:
            scaled = scaled + own[..., w:]
        inner = self.inner(None, scaled if f == w else P.join(scaled, own[..., f:w]), ctx)
        return inner.scaled(r) if self.scale_values else inner
