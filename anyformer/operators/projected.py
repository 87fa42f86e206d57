"""Attention to a few mixtures of the tokens: Linformer."""

import math
from dataclasses import dataclass
from typing import Any

from anyformer.errors import AnyformerError, require_numbers, require_size
from anyformer.operators import primitives as P
from anyformer.operators.kernels import Softmax
from anyformer.operators.operator import Context, Mixing, Operator


@dataclass(frozen=True)
class Linformer(Operator):
    """``A = softmax(q (E k)^T / sqrt(d)) F`` (Wang et al. 2020): keys and values are mixed along the tokens by ``E`` and ``F``
    (projections, n) first. Each head reads ``[query (d), key (d)]``; the projections are part of the class, the number of tokens is fixed.
    """

    heads: int
    head_dim: int
    E: tuple[tuple[float, ...], ...]
    F: tuple[tuple[float, ...], ...]
    noun = "head"

    def __post_init__(self) -> None:
        require_size("Linformer", "heads", self.heads)
        require_size("Linformer", "head_dim", self.head_dim)
        for name in ("E", "F"):
            rows = getattr(self, name)
            for row in rows if isinstance(rows, tuple) and rows else (None,):
                require_numbers("Linformer", f"a row of {name}", row)
        if len(self.E) != len(self.F) or len({len(row) for row in self.E + self.F}) != 1:
            raise AnyformerError("Linformer: E and F must have one shape (projections, n)")

    @property
    def count(self) -> int:
        return self.heads

    @property
    def reads(self) -> int:
        return 2 * self.head_dim

    def read_name(self, i: int) -> str:
        part, column = divmod(i, self.head_dim)
        return f"{('query', 'key')[part]} {column + 1}"

    def _projection(self, like: Any, rows: Any, ctx: Context) -> Any:
        """(batch, 1, projections, n): the columns of the tokens that are here; 0 at padding."""
        n, highest = len(rows[0]), int(ctx.positions.max())
        if highest >= n:
            raise AnyformerError(f"Linformer: position {highest} is past its size {n}")
        columns = P.constant(like, rows)[:, ctx.positions].swapaxes(0, 1)
        return (columns if ctx.mask is None else P.select(columns, ctx.mask[:, None, :], 0.0))[:, None]

    def __call__(self, shared: Any, own: Any, ctx: Context) -> Mixing:
        own, d = own.swapaxes(1, 2), self.head_dim
        q, k = own[..., :d] / math.sqrt(d), self._projection(own, self.E, ctx) @ own[..., d:]
        everything = P.constant(q, 0.0) == P.constant(q, 0.0)
        weights = Softmax()(q, k, None, everything, False) @ self._projection(own, self.F, ctx)
        return Mixing(weights, weights)
