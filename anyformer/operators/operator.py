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
from anyformer.operators import primitives as P
from anyformer.operators.alignment import contract
from anyformer.spec import Spec

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""dtypes of token ids and positions; all are used as int64."""


class Past:
    """What one attention bank remembers of earlier tokens: ``keys`` and ``values`` (batch, heads, n, ..), ready to be used."""

    keys: Any = None
    values: Any = None

    def __init__(self) -> None:
        self._parts: list[Past] = []
        self._used = 0

    def begin(self) -> None:
        """Start a run: its parts come in the same order again."""
        self._used = 0

    def next_part(self) -> "Past":
        """What the next part of the bank remembers of its values: a run may contract a bank in parts."""
        if self._used == len(self._parts):
            self._parts.append(Past())
        self._used += 1
        return self._parts[self._used - 1]

    def all_keys(self, new: Float[Tensor, "batch heads n d"]) -> Float[Tensor, "batch heads keys d"]:
        """Append the keys of new tokens; returns all."""
        self.keys = new if self.keys is None else torch.cat((self.keys, new), dim=2)
        return self.keys

    def all_values(self, new: Float[Tensor, "batch heads n c"]) -> Float[Tensor, "batch heads keys c"]:
        """Append the values of new tokens; returns all."""
        self.values = new if self.values is None else torch.cat((self.values, new), dim=2)
        return self.values


class Cache:
    """Keys and values of earlier tokens, bank by bank in the order of a run: a run with a cache computes its new tokens only.

    ``positions`` and ``mask`` (batch, n) are those of all tokens so far. Every operator of the run must be ``cacheable``.
    """

    positions: Any = None
    mask: Any = None

    def __init__(self) -> None:
        self._owner: Any = None
        self._pasts: list[Past] = []
        self._used = 0

    def belongs_to(self, owner: Any) -> None:
        """Raise unless this cache is new or has only been used with ``owner``, a program."""
        if self._owner is not None and self._owner is not owner:
            raise AnyformerError("this cache was used with another program; begin a new one")
        self._owner = owner

    def next_past(self) -> Past:
        """What the next attention bank of this run remembers."""
        if self._used == len(self._pasts):
            self._pasts.append(Past())
        self._used += 1
        self._pasts[self._used - 1].begin()
        return self._pasts[self._used - 1]

    def begin(self, positions: Int[Tensor, "batch n"], mask: Bool[Tensor, "batch n"] | None) -> None:
        """Start a run on new tokens at these positions."""
        seen = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
        self._used = 0
        self.positions = positions if self.positions is None else torch.cat((self.positions, positions), dim=1)
        self.mask = seen if self.mask is None else torch.cat((self.mask, seen), dim=1)

    def next_positions(self) -> Int[Tensor, "batch 1"]:
        """The position after that of the last real token of each sequence."""
        return torch.where(self.mask, self.positions + 1, 0).amax(1, keepdim=True)

    def __len__(self) -> int:
        return 0 if self.positions is None else self.positions.shape[1]


@dataclass(frozen=True)
class Context:
    """Where the tokens stand: ``positions`` (batch, n) integers, ``mask`` (batch, n), True at real tokens, or None; with a ``cache``
    the keys are all tokens so far, the queries the new ones."""

    positions: Int[Any, "batch n"]
    mask: Bool[Any, "batch n"] | None = None
    cache: Cache | None = None
    _allowed: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def key_positions(self) -> Int[Any, "batch keys"]:
        """Positions of the keys."""
        return self.positions if self.cache is None else self.cache.positions

    def allowed(self, rule: Any) -> Any:
        """Boolean (batch, 1, queries, keys), or (1, ..) where all rows are alike: keys that the mask rule and ``mask`` let each query
        see; formed once a rule."""
        if rule not in self._allowed:
            queries, keys = self.positions, self.key_positions
            mask = self.mask if self.cache is None else self.cache.mask
            if mask is None and all(isinstance(x, Tensor) and x.stride(0) == 0 for x in (queries, keys)):
                queries, keys = queries[:1], keys[:1]
            allowed = rule.allows(queries[:, None, :, None], keys[:, None, None, :])
            self._allowed[rule] = allowed if mask is None else allowed & mask[:, None, None, :]
        return self._allowed[rule]

    def rows(self, block: slice) -> "Context":
        """The context of some rows of the batch (without its cache)."""
        return Context(self.positions[block], None if self.mask is None else self.mask[block])

    @classmethod
    def of(
        cls,
        tokens: Int[Tensor, "batch n"],
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> "Context":
        """Check the shapes; positions default to the number of real tokens before each one (0, 1, 2, ... unpadded; after those in the
        cache, which :meth:`begin` is still to be told). ``mask`` and ``positions`` are those of the new tokens."""
        for name, value in (("mask", mask), ("positions", positions)):
            if value is not None and not (isinstance(value, Tensor) and value.shape == tokens.shape):
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise AnyformerError(f"{name} must have the shape of tokens {tuple(tokens.shape)}, got {got}")
        if mask is not None and mask.dtype != torch.bool:
            raise AnyformerError(f"mask must be Boolean (True at real tokens), got {mask.dtype}")
        if cache is not None and cache.positions is not None and cache.positions.shape[0] != tokens.shape[0]:
            raise AnyformerError(f"the cache holds {cache.positions.shape[0]} sequences, got {tokens.shape[0]}; begin a new one")
        if positions is None:
            seen = torch.ones_like(tokens) if mask is None else mask.long()
            before = 0 if cache is None or cache.positions is None else cache.next_positions()
            places = (before + seen.cumsum(1) - 1).clamp(min=0)
        elif positions.dtype not in INTEGERS or int(positions.min()) < 0:
            raise AnyformerError(f"positions must be integers >= 0, got {positions.dtype}")
        else:
            places = positions.long()
        return cls(places, mask, cache)

    def begin(self) -> None:
        """Tell the cache that a run of these tokens begins: once all is checked."""
        if self.cache is not None:
            self.cache.begin(self.positions, self.mask)


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
        """The maps of branches ``first`` to ``last - 1`` alone, to be used once."""


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
            total = (P.rows_apart(self.weights)[..., None, :] @ values)[..., 0, :]
        return total if onto is None else onto + total


@dataclass(frozen=True, eq=False)
class Mixing(TokenMap):
    """Dense in tokens: ``weights`` (batch, count, queries, keys) of values that are first multiplied by ``scale`` (batch, keys, 1), where there
    is one; ``pattern`` is what the operator's pattern is called. With a ``past`` the keys go on from there."""

    weights: Any
    pattern: Any = None
    gap: Callable[[], float | None] = lambda: None
    """For hard attention: the smallest relative score gap that a row decides by; None for continuous kernels."""
    scale: Any = None
    past: Past | None = None

    @property
    def matrix(self) -> Any:
        """The maps themselves (batch, count, queries, keys), the scale of the values included."""
        return self.weights if self.scale is None else self.weights * self.scale[:, None, None, :, 0]

    def apply(self, values: Any) -> Any:
        values = (values if self.scale is None else values * self.scale[..., None]).swapaxes(1, 2)
        return (self.weights @ (values if self.past is None else self.past.all_values(values))).swapaxes(1, 2)

    def scaled(self, r: Any) -> "Mixing":
        return replace(self, scale=r if self.scale is None else self.scale * r)

    def part(self, first: int, last: int) -> "Mixing":
        past = None if self.past is None else self.past.next_part()
        if past is None and self.weights.shape[1] == last - first:
            return self
        return replace(self, weights=self.weights[:, first:last], past=past)

    def contract(self, values: Any, onto: Any = None) -> Any:
        if not isinstance(values, Tensor) or self.past is not None:
            return self.apply(values).sum(2) + (0 if onto is None else onto)
        matrix = self.matrix
        if matrix.shape[0] != values.shape[0]:
            matrix = matrix.expand(values.shape[0], -1, -1, -1)
        return contract(matrix, values, onto)


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

    @property
    def cacheable(self) -> bool:
        """Whether a run may go on from a cache: tokens are not mixed, or no query sees later keys and keys are remembered."""
        return False

    def read_name(self, i: int) -> str:
        """What own read ``i`` means, e.g. ``query 3``."""
        return f"read {i + 1}"

    @abstractmethod
    def __call__(self, shared: Any, own: Float[Any, "batch n count reads"], ctx: Context) -> TokenMap:
        """The maps on tokens for probes ``shared`` (batch, n, shared) and ``own`` (batch, n, count, reads)."""
