"""The oracle: a dense transformer written from the definitions.

Right-multiplication throughout: a stream Z (n, m) is read as ``Z R_Q`` and moved as ``Z R_V``; one layer is

    Z <- [Z if there is a skip] + sum_h A_h Z R_V^h + (f(Z gate) * (Z up)) down + r * (Z R_V)     (the last: a norm)

Which matrices stand there is the layout's business (:mod:`anyformer.backbones.layouts`) or chance's (random backbones). Every
operator of the library is written out again here, head by head, with torch's own functions. Operators of the user's are called: only
the routing around them is checked.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.operators import (
    RBF,
    ALiBi,
    Attention,
    AverageHard,
    Bidirectional,
    Causal,
    Context,
    Convolution,
    CyclicShift,
    FeatureMap,
    FixedMatrix,
    Fourier,
    Gate,
    Identity,
    LayerNorm,
    Mixing,
    Normed,
    Offsets,
    Operator,
    Performer,
    RelativeBias,
    RMSNorm,
    Softmax,
    Strided,
    Window,
)
from anyformer.operators.functions import scalar_function
from anyformer.philox import gaussian

# --- one dense layer ----------------------------------------------------------------------------------------------------------


class LiteralBank(nn.Module):
    """One bank with dense matrices: reads ``own`` (m, count, copies, reads); routes ``R_V`` (count, m, m), or for gates ``up`` (m, K) and
    ``down`` (K, m), K = count * copies."""

    own: Tensor
    R_V: Tensor
    up: Tensor
    down: Tensor

    def __init__(self, op: Operator, own: Tensor, **matrices: Tensor):
        super().__init__()
        self.op = op
        self.register_buffer("own", own)
        for name, matrix in matrices.items():
            self.register_buffer(name, matrix)

    def forward(self, z: Tensor, shared: Tensor | None, ctx: Context, patterns: list[Tensor] | None) -> Tensor:
        op = self.op
        own = torch.einsum("bnm,mgcr->bngcr", z, self.own.to(z.dtype))
        scale = None
        scale_values = True
        if isinstance(op, Normed):
            assert shared is not None
            scale, scale_values = _norm_scale(op.norm, shared), op.scale_values
            width, free = op.inner.reads, op.inner.reads - len(op.inner.constant_reads)
            factor = torch.ones(*scale.shape, op.inner.reads, dtype=own.dtype)
            factor[..., :free] = scale[..., None]
            scaled = own[..., :width] * factor[:, :, None, None]
            if op.bias:
                scaled[..., :free] = scaled[..., :free] + own[..., width:]
            own, op = scaled, op.inner
        if isinstance(op, Gate):
            hidden = gate(op.function, own[..., 0].flatten(2)) * (z @ self.up.to(z.dtype))
            if scale is not None and scale_values:
                hidden = hidden * scale[..., None]
            return hidden @ self.down.to(z.dtype)
        values = z * scale[..., None] if scale is not None and scale_values else z
        total = torch.zeros_like(z)
        heads = _token_matrices(op, own[:, :, :, 0], ctx)
        if patterns is not None and isinstance(op, Attention):
            patterns.append(torch.stack(heads, dim=1))
        for head, route in zip(heads, self.R_V, strict=True):
            total = total + head @ (values @ route.to(z.dtype))
        return total


class LiteralLayer(nn.Module):
    """``Z <- [Z] + sum over banks``; ``shared`` (m, D) are the columns that a norm reads."""

    shared: Tensor | None

    def __init__(self, banks: list[LiteralBank], shared: Tensor | None, skip: bool):
        super().__init__()
        self.skip = skip
        self.banks = nn.ModuleList(banks)
        self.register_buffer("shared", shared)

    def forward(self, z: Tensor, ctx: Context, patterns: list[Tensor] | None) -> Tensor:
        shared = None if self.shared is None else z @ self.shared.to(z.dtype)
        total = z if self.skip else torch.zeros_like(z)
        for bank in self.banks:
            total = total + bank(z, shared, ctx, patterns)
        return total


def first_state(tokens: Tensor, program: Any, mask: Tensor | None, positions: Tensor | None) -> tuple[Tensor, Context]:
    """``E[token] + P[position]`` for a program, and where the tokens stand."""
    if positions is None:
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        if mask is not None:
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    z = program.embedding[tokens]
    if program.position_embedding is not None:
        z = z + program.position_embedding[positions]
    return z, Context(positions, mask)


class LiteralTransformer(nn.Module):
    """The dense machine: layers in order (the same module several times where weights are tied) and the read-out U (m, out)."""

    U: Tensor

    def __init__(self, layers: list[LiteralLayer], U: Tensor):
        super().__init__()
        self.order = layers
        self.layers = nn.ModuleList(dict.fromkeys(layers))
        self.register_buffer("U", U)

    def matrices(self) -> dict[str, Tensor]:
        """Every matrix by name; tied ones once."""
        return dict(self.named_buffers())

    def forward(
        self,
        tokens: Tensor,
        program: Any,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        patterns: list[Tensor] | None = None,
    ) -> Tensor:
        """Logits of a program; ``patterns``, a list, receives each attention bank's patterns."""
        z, ctx = first_state(tokens, program, mask, positions)
        for layer in self.order:
            z = layer(z, ctx, patterns)
        return z @ self.U.to(z.dtype)


# --- the operators, from their definitions --------------------------------------------------------------------------------------

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu_plus_one": lambda z: F.elu(z) + 1,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "step": lambda z: torch.heaviside(z, torch.zeros((), dtype=z.dtype)),
}


def gate(function: str, z: Tensor) -> Tensor:
    """A scalar function by its own formula, where the oracle has one."""
    if function in GATES:
        return GATES[function](z)
    return scalar_function(function)(z)


def _norm_scale(norm: Operator, p: Tensor) -> Tensor:
    if isinstance(norm, RMSNorm):
        return torch.rsqrt(p.square().mean(-1) + norm.eps)
    if isinstance(norm, LayerNorm):
        return torch.rsqrt(p.var(-1, unbiased=False) + norm.eps)
    return norm.scale(p)[..., 0]  # type: ignore[attr-defined]


def _token_matrices(op: Operator, own: Tensor, ctx: Context) -> list[Tensor]:
    """The (batch, n, n) matrix of every branch for own reads (batch, n, count, reads)."""
    n = own.shape[1]
    if isinstance(op, Identity):
        return [torch.eye(n, dtype=own.dtype).expand(own.shape[0], n, n)]
    if isinstance(op, (RMSNorm, LayerNorm)):
        return [torch.diag_embed(_norm_scale(op, own[:, :, 0]))]
    if isinstance(op, Attention):
        return [_head(op, own[:, :, h], h, ctx) for h in range(op.heads)]
    if isinstance(op, (Convolution, CyclicShift, Fourier, FixedMatrix)):
        return [_mixing(op, ctx).to(own.dtype)]
    token_map = op(None, own, ctx)  # an operator that is not known here: only the routing around it is checked
    if isinstance(token_map, Mixing):
        return [token_map.matrix[:, g].expand(own.shape[0], n, n) for g in range(op.count)]
    identity = torch.eye(n, dtype=own.dtype).expand(own.shape[0], n, n)[:, :, None].expand(-1, -1, op.count, -1)
    return list(token_map.apply(identity).unbind(2))


def _mixing(op: Operator, ctx: Context) -> Tensor:
    """Fixed mixings (batch, n, n), entry by entry; columns of masked keys are 0."""
    places = ctx.positions
    seen = torch.ones_like(places, dtype=torch.bool) if ctx.mask is None else ctx.mask
    out = torch.zeros(*places.shape, places.shape[1], dtype=torch.float64)
    for b, row in enumerate(places.tolist()):
        length = int(seen[b].sum())
        for i, at in enumerate(row):
            for j, key in enumerate(row):
                if not bool(seen[b, j]):
                    continue
                if isinstance(op, Convolution):
                    out[b, i, j] = op.taps[at - key] if 0 <= at - key < len(op.taps) else 0.0
                elif isinstance(op, CyclicShift):
                    out[b, i, j] = float(at % length == (key + op.offset) % length)
                elif isinstance(op, Fourier):
                    out[b, i, j] = (math.cos if op.part == "cos" else math.sin)(2 * math.pi * at * key / length)
                elif isinstance(op, FixedMatrix):
                    out[b, i, j] = op.rows[at][key]
    return out


def _head(op: Attention, own: Tensor, h: int, ctx: Context) -> Tensor:
    """The pattern of one head, row by row of its definition."""
    d, places = op.head_dim, ctx.positions
    q, k = own[..., :d], own[..., d : 2 * d]
    if op.qk_norm is not None:
        q = F.rms_norm(q, (d,), eps=op.qk_norm) * own[..., 2 * d : 3 * d]
        k = F.rms_norm(k, (d,), eps=op.qk_norm) * own[..., 3 * d :]
    if op.rotary is not None:
        q, k = (_turn(x, places, op.rotary.frequencies) for x in (q, k))
    q = q * (d**-0.5 if op.scale is None else op.scale)
    i, j = places[:, :, None], places[:, None, :]
    seen = _seen(op, i, j)
    if ctx.mask is not None:
        seen = seen & ctx.mask[:, None, :]
    kernel = op.kernel
    if isinstance(kernel, (FeatureMap, Performer)):
        if isinstance(kernel, FeatureMap):
            a, b = gate(kernel.function, q), gate(kernel.function, k)
        else:
            w = torch.from_numpy(gaussian(kernel.seed, 0, (d, kernel.projections), 1.0)).to(q.dtype)
            a, b = (torch.exp(x @ w - x.square().sum(-1, keepdim=True) / 2) for x in (q, k))
        weights = torch.einsum("bif,bjf->bij", a, b) * seen
        return torch.nan_to_num(weights / weights.sum(-1, keepdim=True), nan=0.0)
    scores = torch.einsum("bid,bjd->bij", q, k)
    if isinstance(kernel, RBF):  # by the distance itself, not by the expanded square
        scores = -kernel.gamma * (q[:, :, None] - k[:, None]).square().sum(-1)
    scores = scores + _bias(op, h, i, j, scores.dtype)
    scores = scores.masked_fill(~seen, -math.inf)
    if op.sink:
        scores = torch.cat((scores, torch.zeros_like(scores[..., :1])), dim=-1)
    if isinstance(kernel, RBF) and not kernel.normalised:
        pattern = scores.exp()
    elif isinstance(kernel, (Softmax, RBF)):
        pattern = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)
    elif isinstance(kernel, AverageHard):
        top = scores.max(dim=-1, keepdim=True).values
        tie = 1e-9 if scores.dtype == torch.float64 else 1e-4
        winners = ((scores >= top - tie * (1 + top.abs())) & (scores > -math.inf)).to(scores.dtype)
        pattern = torch.nan_to_num(winners / winners.sum(-1, keepdim=True), nan=0.0)
    else:
        return kernel(q[:, None], k[:, None], None, seen[:, None], op.sink)[:, 0]
    return pattern[..., : own.shape[1]]


def _turn(x: Tensor, places: Tensor, frequencies: tuple[float, ...]) -> Tensor:
    r = len(frequencies)
    angle = places[..., None].double() * torch.tensor(frequencies, dtype=torch.float64)
    turned = torch.complex(x[..., :r].double(), x[..., r : 2 * r].double()) * torch.exp(1j * angle)
    return torch.cat((turned.real.to(x.dtype), turned.imag.to(x.dtype), x[..., 2 * r :]), dim=-1)


def _seen(op: Attention, i: Tensor, j: Tensor) -> Tensor:
    mask, distance = op.mask, i - j
    if isinstance(mask, Bidirectional):
        return torch.ones_like(distance, dtype=torch.bool)
    if isinstance(mask, Causal):
        return distance >= 0
    if isinstance(mask, Window):
        return (distance <= mask.before) & (distance >= -mask.after)
    if isinstance(mask, Strided):
        return (distance >= 0) & ((distance.remainder(mask.stride) == 0) | (distance < mask.local))
    if isinstance(mask, Offsets):
        ends = [(-math.inf if low is None else low, math.inf if high is None else high) for low, high in mask.intervals]
        return (
            sum(((-distance >= low) & (-distance <= high) for low, high in ends), torch.zeros_like(distance, dtype=torch.bool))
            > 0
        )
    return mask.allows(i, j)


def _bias(op: Attention, h: int, i: Tensor, j: Tensor, dtype: torch.dtype) -> Tensor:
    if op.bias is None:
        return torch.zeros((), dtype=dtype)
    distance = i - j
    if isinstance(op.bias, ALiBi):
        return -(op.bias.slopes * op.heads)[h] * distance.abs().to(dtype)
    if isinstance(op.bias, RelativeBias):
        row = torch.tensor((op.bias.table * op.heads)[h], dtype=dtype)
        radius = len(row) // 2
        return row[distance.clamp(-radius, radius) + radius]
    whole = op.bias(torch.zeros((), dtype=dtype), i[:, None], j[:, None])
    return whole[:, h if whole.shape[1] > 1 else 0]
