"""Attention: ``A = kernel(scale * q k^T + bias)`` under a mask rule, with RoPE and an inner norm of q and k where asked for."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anyformer.errors import AnyformerError, require_choice, require_number, require_numbers, require_size
from anyformer.operators import primitives as P
from anyformer.operators.kernels import Kernel, Softmax
from anyformer.operators.masks import Bidirectional, Mask
from anyformer.operators.operator import Context, Mixing, Operator, Past
from anyformer.spec import Spec


class PositionBias(Spec, ABC):
    """A fixed additive bias of the scores: a function of query and key position, per head."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """How many heads it is for; 1: the same for all."""

    @abstractmethod
    def __call__(self, like: Any, query: Any, key: Any) -> Any:
        """Bias (batch, heads or 1, n, n) for integer positions ``query`` (batch, 1, n, 1) and ``key`` (batch, 1, 1, n)."""


@dataclass(frozen=True)
class ALiBi(PositionBias):
    """``-slope_h |i - j|`` (Press et al. 2022)."""

    slopes: tuple[float, ...]

    def __post_init__(self) -> None:
        require_numbers("ALiBi", "slopes", self.slopes)

    @property
    def heads(self) -> int:
        return len(self.slopes)

    def __call__(self, like: Any, query: Any, key: Any) -> Any:
        distance = P.constant(like, abs(query - key))
        return P.constant(like, self.slopes).reshape(1, -1, 1, 1) * (0.0 - distance)


@dataclass(frozen=True)
class RelativeBias(PositionBias):
    """``table[h][clip(i - j, -radius, radius) + radius]``: a fixed relative bias, one row of 2 radius + 1 numbers a head."""

    table: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for row in self.table if isinstance(self.table, tuple) else (None,):
            require_numbers("RelativeBias", "a row", row)
        widths = {len(row) for row in self.table}
        if len(widths) != 1 or widths.pop() % 2 != 1:
            raise AnyformerError("RelativeBias: every head needs a row of the same odd length 2 radius + 1")

    @property
    def heads(self) -> int:
        return len(self.table)

    def __call__(self, like: Any, query: Any, key: Any) -> Any:
        radius = len(self.table[0]) // 2
        index = (query - key).clip(-radius, radius) + radius
        table = P.constant(like, self.table)
        return table[:, index[:, 0]].swapaxes(0, 1)


@dataclass(frozen=True)
class TableBias(PositionBias):
    """``rows[h][i][j]``: any fixed bias of the pair (query i, key j), one square table a head."""

    rows: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        tables = self.rows if isinstance(self.rows, tuple) and self.rows else ((),)
        for table in tables:
            if (
                not isinstance(table, tuple)
                or not table
                or any(not isinstance(row, tuple) or len(row) != len(table) for row in table)
            ):
                raise AnyformerError("TableBias: every head needs a non-empty square table")
            for row in table:
                require_numbers("TableBias", "a row", row)
        if len({len(table) for table in tables}) != 1:
            raise AnyformerError("TableBias: all heads need tables of one size")

    @property
    def heads(self) -> int:
        return len(self.rows)

    def __call__(self, like: Any, query: Any, key: Any) -> Any:
        highest, size = int(max(query.max(), key.max())), len(self.rows[0])
        if highest >= size:
            raise AnyformerError(f"TableBias: position {highest} is past its size {size}")
        return P.constant(like, self.rows)[:, query[:, 0], key[:, 0]].swapaxes(0, 1)


@dataclass(frozen=True)
class Rotary(Spec):
    """RoPE: the pair (i, i + r) of the first 2r columns turns by ``position * frequencies[i]`` (r = number of frequencies)."""

    frequencies: tuple[float, ...]

    def __post_init__(self) -> None:
        require_numbers("Rotary", "frequencies", self.frequencies)

    @classmethod
    def of_base(cls, head_dim: int, base: float = 10000.0) -> "Rotary":
        """The usual frequencies ``base^(-2i/d)``."""
        return cls(tuple(base ** (-2 * i / head_dim) for i in range(head_dim // 2)))

    def __call__(self, x: Any, positions: Any) -> Any:
        r = len(self.frequencies)
        cos, sin = (t[:, None] for t in P.cos_sin(x, positions, self.frequencies))
        a, b = x[..., :r], x[..., r : 2 * r]
        turned = P.join(a * cos - b * sin, b * cos + a * sin)
        return turned if x.shape[-1] == 2 * r else P.join(turned, x[..., 2 * r :])


@dataclass(frozen=True)
class Attention(Operator):
    """A bank of attention heads. Each reads ``[query (d), key (d)]``; with ``qk_norm`` (an epsilon, as in Qwen3)
    ``[query, key, query weight, key weight]``, where the weights read the constant feature alone:

        q = query / sqrt(mean(query^2) + qk_norm) * query_weight.

    ``mask`` says which keys a query may see, ``kernel`` how scores become a pattern, ``bias`` adds to the scores by position,
    ``rotary`` turns q and k, and with ``sink`` a key of score 0 and value 0 takes part. ``scale`` multiplies q and defaults to
    1/sqrt(d). Grouped queries are heads whose key columns are equal: a matter of the target, not of the class.
    """

    heads: int
    head_dim: int
    mask: Mask = field(default_factory=Bidirectional)
    kernel: Kernel = field(default_factory=Softmax)
    scale: float | None = None
    bias: PositionBias | None = None
    rotary: Rotary | None = None
    qk_norm: float | None = None
    sink: bool = False
    noun = "head"

    def __post_init__(self) -> None:
        require_size("Attention", "heads", self.heads)
        require_size("Attention", "head_dim", self.head_dim)
        for name, value in (("scale", self.scale), ("qk_norm", self.qk_norm)):
            if value is not None:
                require_number("Attention", name, value, 0.0 if name == "qk_norm" else -math.inf)
        require_choice("Attention", "sink", self.sink, (True, False))
        kinds = {"mask": Mask, "kernel": Kernel, "bias": PositionBias | None, "rotary": Rotary | None}
        for name, kind in kinds.items():
            value, expected = getattr(self, name), getattr(kind, "__name__", str(kind).split(".")[-1])
            if not isinstance(value, kind):
                raise AnyformerError(f"Attention: {name} must be a {expected}, got {value!r}")
        if self.bias is not None and not self.kernel.additive_bias:
            raise AnyformerError(f"Attention: a {type(self.kernel).__name__} kernel has no scores that a bias could be added to")
        if self.sink and not (self.kernel.additive_bias and self.kernel.normalised):
            raise AnyformerError(f"Attention: a sink needs a kernel with scores and normalised rows, not {self.kernel}")
        if self.rotary is not None and 2 * len(self.rotary.frequencies) > self.head_dim:
            raise AnyformerError(f"Attention: {len(self.rotary.frequencies)} rotary pairs do not fit head_dim {self.head_dim}")
        if self.bias is not None and self.bias.heads not in (1, self.heads):
            raise AnyformerError(
                f"Attention: {self.heads} heads need a bias for {self.heads} heads, got one for {self.bias.heads}"
            )

    @property
    def count(self) -> int:
        return self.heads

    @property
    def reads(self) -> int:
        return 2 * self.head_dim if self.qk_norm is None else 4 * self.head_dim

    @property
    def constant_reads(self) -> tuple[int, ...]:
        return tuple(range(2 * self.head_dim, self.reads))

    @property
    def cacheable(self) -> bool:
        return self.mask.causal

    @property
    def stochastic(self) -> bool:
        return not self.sink and self.kernel.normalised

    def read_name(self, i: int) -> str:
        part, column = divmod(i, self.head_dim)
        return f"{('query', 'key', 'query weight', 'key weight')[part]} {column + 1}"

    def scores_input(self, own: Any, ctx: Context, past: Past | None = None) -> tuple[Any, Any, Any, Any]:
        """Queries (scaled), keys (batch, heads, n, d; after those of the ``past``), bias and the Boolean mask, as the kernel takes them."""
        d = self.head_dim
        own = own.swapaxes(1, 2)
        q, k = own[..., :d], own[..., d : 2 * d]
        if self.qk_norm is not None:
            q, k = (
                x / P.sqrt(P.row_sum(x * x) / d + self.qk_norm) * weight
                for x, weight in ((q, own[..., 2 * d : 3 * d]), (k, own[..., 3 * d :]))
            )
        if self.rotary is not None:
            q, k = self.rotary(q, ctx.positions), self.rotary(k, ctx.positions)
        scale = 1 / math.sqrt(d) if self.scale is None else self.scale
        if past is not None:
            k = past.all_keys(k)
        query, key = ctx.positions[:, None, :, None], ctx.key_positions[:, None, None, :]
        bias = None if self.bias is None else self.bias(q, query, key)
        return q * scale, k, bias, ctx.allowed(self.mask)

    def __call__(self, shared: Any, own: Any, ctx: Context) -> Mixing:
        past = None if ctx.cache is None else ctx.cache.next_past()
        scores = self.scores_input(own, ctx, past)
        pattern = self.kernel(*scores, self.sink)
        return Mixing(pattern, pattern, partial(self.kernel.gap, *scores, self.sink), past=past)
