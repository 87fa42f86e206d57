"""An operator: a linear map on tokens that sees the stream only through linear probes .

    Op(X P) X M        P: probes (features -> reads),  M: a map of features,  Op: (queries, keys) acts on tokens

Here an operator is a *bank* of ``count`` like operators, one a branch: the heads of a layer, the units of an MLP. Each
branch reads ``reads`` probe columns of its own; all of them may read ``shared`` columns in common (the features of a norm).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.errors import AnyformerError
from anyformer.spec import Spec

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""dtypes of token ids and positions; all are used as int64."""


@dataclass(frozen=True)
class Context:
    """Where the tokens stand: ``positions`` (batch, n) integers, ``mask`` (batch, n), True at real tokens, or None."""

    positions: Int[Any, "batch n"]
    mask: Bool[Any, "batch n"] | None = None
    _allowed: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def allowed(self, rule: Any) -> Any:
        """Boolean (batch, 1, queries, keys): keys that the mask rule and ``mask`` let each query see; formed once a rule."""
        if rule not in self._allowed:
            allowed = rule.allows(self.positions[:, None, :, None], self.positions[:, None, None, :])
            self._allowed[rule] = allowed if self.mask is None else allowed & self.mask[:, None, None, :]
        return self._allowed[rule]

    def rows(self, block: slice) -> "Context":
        """The context of some rows of the batch."""
        return Context(self.positions[block], None if self.mask is None else self.mask[block])

    @classmethod
    def of(cls, tokens: Int[Tensor, "batch n"], mask: Tensor | None = None, positions: Tensor | None = None) -> "Context":
        """Check the shapes; positions default to the number of real tokens before each one (0, 1, 2, ... unpadded)."""
        for name, value in (("mask", mask), ("positions", positions)):
            if value is not None and value.shape != tokens.shape:
                raise AnyformerError(f"{name} must have the shape of tokens {tuple(tokens.shape)}, got {tuple(value.shape)}")
        if mask is not None and mask.dtype != torch.bool:
            raise AnyformerError(f"mask must be Boolean (True at real tokens), got {mask.dtype}")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
            if mask is not None:
                positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        elif positions.dtype not in INTEGERS or int(positions.min()) < 0:
            raise AnyformerError(f"positions must be integers >= 0, got {positions.dtype}")
        return cls(positions.long(), mask)


class TokenMap(ABC):
    """What an operator bank became for one batch: ``count`` linear maps on tokens."""

    pattern: Any = None
    """The attention patterns (batch, count, queries, keys), or None for operators that mix no tokens."""

    @abstractmethod
    def apply(self, values: Float[Any, "batch n count c"]) -> Float[Any, "batch n count c"]:
        """Branch g maps ``values[:, :, g]``."""

    @abstractmethod
    def scaled(self, r: Float[Any, "batch n 1"]) -> "TokenMap":
        """The same maps of values that are first multiplied by ``r``, a number a token."""

    @abstractmethod
    def contract(self, values: Float[Any, "batch n count c"], onto: Any = None) -> Float[Any, "batch n c"]:
        """The sum over branches of :meth:`apply`, added to ``onto`` where that is given."""

    @abstractmethod
    def part(self, first: int, last: int) -> "TokenMap":
        """The maps of branches ``first`` to ``last - 1`` alone."""


@dataclass(frozen=True, eq=False)
class Scaling(TokenMap):
    """Diagonal in tokens: ``weights`` (batch, n, count); None means 1 everywhere."""

    weights: Any = None

    def apply(self, values: Any) -> Any:
        return values if self.weights is None else values * self.weights[..., None]

    def scaled(self, r: Any) -> "Scaling":
        return Scaling(r if self.weights is None else self.weights * r)

    def part(self, first: int, last: int) -> "Scaling":
        if self.weights is None or self.weights.shape[-1] == last - first:
            return self
        return Scaling(self.weights[..., first:last])

    def contract(self, values: Any, onto: Any = None) -> Any:
        if self.weights is None:
            total = values.sum(2) if values.shape[2] > 1 else values[:, :, 0]
        else:
            total = (self.weights[..., None, :] @ values)[..., 0, :]
        return total if onto is None else onto + total


@dataclass(frozen=True, eq=False)
class Mixing(TokenMap):
    """Dense in tokens: ``weights`` (batch, count, queries, keys); ``pattern`` is what the operator's pattern is called."""

    weights: Any
    pattern: Any = None
    gap: Callable[[], float | None] = lambda: None
    """For hard attention: the smallest relative score gap that a row decides by; None for continuous kernels."""

    def apply(self, values: Any) -> Any:
        return (self.weights @ values.swapaxes(1, 2)).swapaxes(1, 2)

    def scaled(self, r: Any) -> "Mixing":
        return Mixing(self.weights * r[:, None, None, :, 0], self.pattern, self.gap)

    def part(self, first: int, last: int) -> "Mixing":
        return self if self.weights.shape[1] == last - first else replace(self, weights=self.weights[:, first:last])

    def contract(self, values: Any, onto: Any = None) -> Any:
        if not isinstance(values, Tensor):
            return self.apply(values).sum(2) + (0 if onto is None else onto)
        total = onto
        for g in range(values.shape[2]):  # strided views of the state: no copies, one fused multiply-and-add a head
            weights, seen = self.weights[:, g], values[:, :, g]
            if total is not None and weights.shape[0] == total.shape[0]:
                total = torch.baddbmm(total, weights, seen)
            else:
                total = weights @ seen if total is None else total + weights @ seen
        return total


class Operator(Spec, ABC):
    """Base of all operators: frozen, compared by value. A new one defines the members below and nothing else."""

    noun = "branch"
    """What one branch is called in the names of coordinates: head, unit, ..."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of branches in the bank."""

    @property
    def shared(self) -> int:
        """Probe columns that all branches read (0 or the width of a norm)."""
        return 0

    @property
    @abstractmethod
    def reads(self) -> int:
        """Probe columns of each single branch."""

    @property
    def constant_reads(self) -> tuple[int, ...]:
        """Those of the ``reads`` that may read nothing but the constant feature (biases behind a norm)."""
        return ()

    @property
    def stochastic(self) -> bool:
        """True where every row of the pattern that has an allowed key sums to 1, so that it keeps the constant feature."""
        return False

    def read_name(self, i: int) -> str:
        """What own read ``i`` means, e.g. ``query 3``."""
        return f"read {i + 1}"

    @abstractmethod
    def __call__(self, shared: Any, own: Float[Any, "batch n count reads"], ctx: Context) -> TokenMap:
        """The maps on tokens for probes ``shared`` (batch, n, shared) and ``own`` (batch, n, count, reads)."""
