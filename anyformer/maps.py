"""Maps of features, ``X -> X M_g`` for a bank of g = 1..count matrices: dense, low rank, diagonal, identity, or read from the constant.

Each map is applied in two halves around an operator, ``op(enter(X))`` then ``leave``, so that a low-rank map mixes tokens
at its rank; ``pull`` multiplies a matrix of later reads from the left, which is all that compilation needs. ``to_dense`` is
the oracle of all of them. The *constant feature*, where there is one, is the last feature and is 1 at every token.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anyformer.operators import primitives as P

MapKind = Literal["identity", "constant", "diagonal", "centred", "general"]


class LinearMap(ABC):
    """A bank of ``count`` matrices (D, D')."""

    kind: MapKind = "general"
    """What a class knows of the map: the identity (plus a bias), a read of the constant feature alone, a diagonal (after centring), or
    anything."""

    rank: int | None = None
    """The inner width of a low-rank map; None where there is none."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of matrices in the bank."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(D, D') of each matrix."""

    @abstractmethod
    def enter(self, x: Float[Any, "batch n D"]) -> Float[Any, "batch n count r"]:
        """The first half, before the operator mixes tokens."""

    @abstractmethod
    def leave(self, mixed: Float[Any, "batch n count r"]) -> Float[Any, "batch n out"]:
        """The second half, summed over the bank."""

    @abstractmethod
    def pull(self, reads: Float[Tensor, "out w"]) -> Float[Tensor, "count D w"]:
        """``M_g @ reads`` for every g."""

    @abstractmethod
    def to_dense(self) -> Float[Tensor, "count D out"]:
        """The matrices themselves."""

    def some(self, branches: Sequence[int]) -> "LinearMap":
        """The bank of these branches alone. Every tensor of a bank has one row a branch (an identity is a bank of one)."""
        if len(branches) == self.count:
            return self
        rows = {name: value[list(branches)] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **rows)  # type: ignore[type-var]

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the numbers."""


@dataclass(frozen=True, eq=False)
class DenseMap(LinearMap):
    """``matrices`` (count, D, D')."""

    matrices: Float[Tensor, "count D out"]

    @property
    def count(self) -> int:
        return self.matrices.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrices.shape[1], self.matrices.shape[2]

    def enter(self, x: Any) -> Any:
        return P.einsum(x, "bnd,gde->bnge", self.matrices)

    def leave(self, mixed: Any) -> Any:
        return mixed.sum(2)

    def pull(self, reads: Tensor) -> Tensor:
        return self.matrices.to(reads.dtype) @ reads

    def to_dense(self) -> Tensor:
        return self.matrices

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.matrices,)


@dataclass(frozen=True, eq=False)
class LowRankMap(LinearMap):
    """``left`` (count, D, r) times ``right`` (count, r, D'): a head's W_V W_O, a gated unit's up down^T."""

    left: Float[Tensor, "count D r"]
    right: Float[Tensor, "count r out"]

    @property
    def count(self) -> int:
        return self.left.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[1], self.right.shape[2]

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.left.shape[2]

    def enter(self, x: Any) -> Any:
        return P.einsum(x, "bnd,gdr->bngr", self.left)

    def leave(self, mixed: Any) -> Any:
        return P.einsum(mixed, "bngr,gre->bne", self.right)

    def pull(self, reads: Tensor) -> Tensor:
        return self.left.to(reads.dtype) @ (self.right.to(reads.dtype) @ reads)

    def to_dense(self) -> Tensor:
        return self.left @ self.right

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.left, self.right)


@dataclass(frozen=True, eq=False)
class IdentityMap(LinearMap):
    """The identity on ``features``, plus ``shift`` (D,) times the constant feature where a bias moves in here."""

    features: int
    shift: Float[Tensor, "D"] | None = None
    kind = "identity"
    count = 1  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, int]:
        return self.features, self.features

    def enter(self, x: Any) -> Any:
        return (x if self.shift is None else x + x[..., -1:] * P.weight(x, self.shift))[:, :, None]

    def leave(self, mixed: Any) -> Any:
        return mixed[:, :, 0]

    def pull(self, reads: Tensor) -> Tensor:
        if self.shift is None:
            return reads[None]
        last = reads[-1:] + self.shift.to(reads.dtype)[None] @ reads
        return torch.cat((reads[:-1], last))[None]

    def to_dense(self) -> Tensor:
        like = torch.empty(0) if self.shift is None else self.shift
        matrix = torch.eye(self.features, dtype=like.dtype, device=like.device)
        if self.shift is not None:
            matrix = torch.cat((matrix[:-1], matrix[-1:] + self.shift))
        return matrix[None]

    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.shift is None else (self.shift,)


@dataclass(frozen=True, eq=False)
class ConstantMap(LinearMap):
    """``e_const row_g^T``: the value is the constant feature; ``rows`` (count, D'), each times its number of ``scales`` where they are given (a
    gated unit's up-bias times what the unit writes)."""

    features: int
    rows: Float[Tensor, "count out"]
    scales: Float[Tensor, "count"] | None = None
    kind = "constant"

    def scaled_rows(self) -> Float[Tensor, "count out"]:
        """The rows, each times its scale."""
        return self.rows if self.scales is None else self.scales[:, None] * self.rows

    @property
    def count(self) -> int:
        return self.rows.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.features, self.rows.shape[1]

    def enter(self, x: Any) -> Any:
        return P.spread(x[..., None, -1:], self.count)

    def leave(self, mixed: Any) -> Any:
        return mixed[..., 0] @ P.weight(mixed, self.scaled_rows())

    def pull(self, reads: Tensor) -> Tensor:
        last = self.scaled_rows().to(reads.dtype) @ reads
        return torch.cat((last.new_zeros(self.count, self.features - 1, reads.shape[1]), last[:, None]), dim=1)

    def to_dense(self) -> Tensor:
        zeros = self.rows.new_zeros(self.count, self.features - 1, self.rows.shape[1])
        return torch.cat((zeros, self.scaled_rows()[:, None]), dim=1)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.rows,) if self.scales is None else (self.scales, self.rows)


@dataclass(frozen=True, eq=False)
class DiagonalMap(LinearMap):
    """``diag(weights)`` on the first features (the weight of a norm), for LayerNorm behind the centring matrix: ``(I - 11^T/D) diag(weights)``.

    The stream has ``features`` of them before and ``out`` after: one more than the D weights where it holds the constant feature, which
    is neither read nor written.
    """

    weights: Float[Tensor, "D"]
    features: int
    out: int
    centred: bool = False
    count = 1  # type: ignore[assignment]

    @property
    def kind(self) -> MapKind:  # type: ignore[override]
        return "centred" if self.centred else "diagonal"

    @property
    def shape(self) -> tuple[int, int]:
        return self.features, self.out

    def enter(self, x: Tensor) -> Tensor:
        x = x[..., : len(self.weights)]
        return (x - x.mean(-1, keepdim=True) if self.centred else x)[:, :, None]

    def leave(self, mixed: Tensor) -> Tensor:
        return F.pad(mixed[:, :, 0] * self.weights, (0, self.out - len(self.weights)))

    def pull(self, reads: Tensor) -> Tensor:
        rows = self.weights.to(reads.dtype)[:, None] * reads[: len(self.weights)]
        if self.centred:
            rows = rows - rows.mean(0, keepdim=True)
        return F.pad(rows, (0, 0, 0, self.features - len(self.weights)))[None]

    def to_dense(self) -> Tensor:
        matrix = torch.diag(self.weights)
        if self.centred:
            matrix = matrix - matrix.mean(0, keepdim=True)
        return F.pad(matrix, (0, self.out - len(self.weights), 0, self.features - len(self.weights)))[None]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weights,)
