"""Mask rules: which keys a query may see, as a function of positions. They belong to the class and compare by value."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyformer.errors import AnyformerError, require_size
from anyformer.spec import Spec


class Mask(Spec, ABC):
    """Base of all mask rules."""

    causal = False
    """Whether no query ever sees a later key, so that what earlier tokens computed stays as it was."""

    @abstractmethod
    def allows(self, query: Any, key: Any) -> Any:
        """Boolean array: may the query at position ``query`` see the key at position ``key`` (broadcasting integers)?"""


@dataclass(frozen=True)
class Bidirectional(Mask):
    """Every key is allowed."""

    def allows(self, query: Any, key: Any) -> Any:
        return (query == query) & (key == key)


@dataclass(frozen=True)
class Causal(Mask):
    """Keys at or before the query."""

    causal = True

    def allows(self, query: Any, key: Any) -> Any:
        return key <= query


@dataclass(frozen=True)
class Window(Mask):
    """Sparse: keys from ``before`` positions before the query to ``after`` positions after it (sliding window)."""

    before: int
    after: int = 0

    def __post_init__(self) -> None:
        require_size("Window", "before", self.before, 0)
        require_size("Window", "after", self.after, 0)
        if max(self.before, self.after) >= 2**62:
            raise AnyformerError(f"Window: sizes must be below 2^62, got {self}")

    def allows(self, query: Any, key: Any) -> Any:
        return (query - key <= self.before) & (key - query <= self.after)

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return self.after == 0


@dataclass(frozen=True)
class Strided(Mask):
    """Sparse: keys at or before the query whose distance is a multiple of ``stride``, and the ``local`` nearest ones."""

    stride: int
    local: int = 1
    causal = True

    def __post_init__(self) -> None:
        require_size("Strided", "stride", self.stride)
        require_size("Strided", "local", self.local)

    def allows(self, query: Any, key: Any) -> Any:
        return (key <= query) & (((query - key) % self.stride == 0) | (query - key < self.local))


@dataclass(frozen=True)
class Offsets(Mask):
    """Keys whose distance ``key - query`` lies in one of the ``intervals`` (low, high), both ends allowed, None: unbounded."""

    intervals: tuple[tuple[int | None, int | None], ...]

    def __post_init__(self) -> None:
        for interval in self.intervals if isinstance(self.intervals, tuple) else (None,):
            ends: tuple[Any, Any] = interval if isinstance(interval, tuple) and len(interval) == 2 else (0.5, 0.5)
            whole = all(end is None or (type(end) is int and abs(end) < 2**62) for end in ends)
            if not whole or (None not in ends and ends[0] > ends[1]):
                raise AnyformerError(
                    f"Offsets: intervals must be pairs (low, high) of integers or None, low <= high, got {interval!r}"
                )

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return all(high is not None and high <= 0 for _, high in self.intervals)

    def allows(self, query: Any, key: Any) -> Any:
        distance = key - query
        allowed = distance != distance
        for low, high in self.intervals:
            inside = distance == distance
            inside = inside if low is None else inside & (distance >= low)
            allowed = allowed | (inside if high is None else inside & (distance <= high))
        return allowed


@dataclass(frozen=True)
class Neighbours(Mask):
    """An explicit directed graph: the query at position i may see the keys ``rows[i]``; positions past the rows see nothing."""

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        n = len(self.rows) if isinstance(self.rows, tuple) else 0
        require_size("Neighbours", "number of rows", n)
        if not all(isinstance(row, tuple) and all(type(j) is int and 0 <= j < n for j in row) for row in self.rows):
            raise AnyformerError(f"Neighbours: each row must be a tuple of positions 0..{n - 1}, got {self.rows!r}")

    def allows(self, query: Any, key: Any) -> Any:
        n = len(self.rows)
        table = [j in row for row in map(frozenset, self.rows) for j in range(n)]
        table = torch.tensor(table, device=query.device) if isinstance(query, Tensor) else np.array(table)
        inside = (query < n) & (key < n)
        return inside & table[query.clip(0, n - 1) * n + key.clip(0, n - 1)]
