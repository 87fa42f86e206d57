"""A compiled program as a plain PyTorch module with the weights of an ordinary transformer.

    x = W_E[token] + W_pos[position]                                            d numbers a position, biases apart
    x += sum_h A_h (x W_V^h + b_V^h) W_O^h                                      A_h from (x W_Q^h + b_Q^h) (x W_K^h + b_K^h)^T
    x += (f(x W_in + b_in) * (x W_value + b_value)) W_out                       no W_value, b_value where no unit multiplies
    out = x W_U + b_U                                                           the code of the value, and the fault where there is one

The constant feature of the :class:`~anyformer.network.Network` has become the biases. Everything is written from the definitions with torch
alone and shares no code with the operators: this is the oracle of the network, and what other libraries read.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from anyformer.errors import AnyformerError, OutsideClass
from anyformer.maps import ConstantMap
from anyformer.network import Stage
from anyformer.operators import Attention, AverageHard, Gate, Identity, Softmax
from anyformer.rasp.compiled import CompiledProgram
from anyformer.rasp.layers import layers, unit_columns
from anyformer.rasp.sets import Reals

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": F.relu,
    "step": lambda z: (z > 0).to(z.dtype),
    "square": torch.square,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "reciprocal_or_zero": lambda z: torch.where(z.abs() < 1, 0.0, 1.0 / z),
}
"""The functions of hidden units."""

TIE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Scores within ``tie (1 + |maximum|)`` of the row's maximum are equal to average-hard attention."""


class RaspAttention(nn.Module):
    """H heads with a sink: one more key of score 0 and value 0. Head h may see the keys at distance ``key - query`` = j where
    ``allowed[h, j + n_max - 1]``, is average-hard where ``hard[h]``, and a softmax head elsewhere (its scale is in W_Q)."""

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    b_Q: Tensor
    b_K: Tensor
    b_V: Tensor
    allowed: Tensor
    hard: Tensor

    def __init__(self, heads: int, width: int, head_dim: int, rank: int, max_length: int, dtype: torch.dtype):
        super().__init__()
        sizes = {"W_Q": (width, head_dim), "W_K": (width, head_dim), "W_V": (width, rank), "W_O": (rank, width)}
        sizes |= {"b_Q": (head_dim,), "b_K": (head_dim,), "b_V": (rank,)}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.zeros(heads, *size, dtype=dtype)))
        self.register_buffer("allowed", torch.zeros(heads, 2 * max_length - 1, dtype=torch.bool))
        self.register_buffer("hard", torch.zeros(heads, dtype=torch.bool))

    def pattern(self, x: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch heads n n"]:
        """The attention patterns (rows: queries), without the sink's column."""
        q, k = (x[:, None] @ W + b[:, None] for W, b in ((self.W_Q, self.b_Q), (self.W_K, self.b_K)))
        place = torch.arange(x.shape[1], device=x.device)
        distance = place[None] - place[:, None] + self.allowed.shape[1] // 2
        scores = (q @ k.transpose(-1, -2)).masked_fill(~self.allowed[:, distance], -torch.inf)
        scores = F.pad(scores, (0, 1))
        top = scores.amax(-1, keepdim=True)
        ties = (scores >= top - TIE[x.dtype] * (1.0 + top.abs())).to(x.dtype)
        hard = ties / ties.sum(-1, keepdim=True)
        return torch.where(self.hard[:, None, None], hard, scores.softmax(-1))[..., :-1]

    def forward(self, x: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n d"]:
        values = x[:, None] @ self.W_V + self.b_V[:, None]
        return (self.pattern(x) @ values @ self.W_O).sum(1)


class RaspMLP(nn.Module):
    """K hidden units; ``functions`` are runs of (name, how many units)."""

    W_in: Tensor
    b_in: Tensor
    W_value: Tensor
    b_value: Tensor
    W_out: Tensor

    def __init__(self, functions: tuple[tuple[str, int], ...], width: int, gated: bool, dtype: torch.dtype):
        super().__init__()
        units = sum(count for _, count in functions)
        self.functions = functions
        sizes: dict[str, tuple[int, ...]] = {"W_in": (width, units), "b_in": (units,), "W_out": (units, width)}
        sizes |= {"W_value": (width, units), "b_value": (units,)} if gated else {}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.zeros(size, dtype=dtype)))
        self.gated = gated

    def forward(self, x: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n d"]:
        z = (x @ self.W_in + self.b_in).split([count for _, count in self.functions], -1)
        hidden = torch.cat([FUNCTIONS[name](part) for (name, _), part in zip(self.functions, z, strict=True)], -1)
        if self.gated:
            hidden = hidden * (x @ self.W_value + self.b_value)
        return hidden @ self.W_out


class RaspBlock(nn.Module):
    """One layer: ``attn`` and then ``mlp``, each with a skip connection; either may be missing."""

    def __init__(self, attn: RaspAttention | None, mlp: RaspMLP | None):
        super().__init__()
        self.attn = attn
        self.mlp = mlp

    def forward(self, x: Float[Tensor, "batch n d"], streams: list[Tensor] | None = None) -> Float[Tensor, "batch n d"]:
        for part in (self.attn, self.mlp):
            if part is not None:
                x = x + part(x)
                if streams is not None:
                    streams.append(x)
        return x


class RaspModule(nn.Module):
    """The transformer of a compiled program. ``forward`` takes what :meth:`CompiledProgram.encode` gives: token ids, or real tokens;
    ``streams`` gets the stream after every part of a layer."""

    embed: Any
    pos_embed: Any
    unembed: Any
    blocks: Any

    def __init__(
        self, tokens: int, max_length: int, blocks: list[RaspBlock], width: int, outputs: int, dtype: torch.dtype, real: bool
    ):
        super().__init__()
        self.real = real
        self.embed, self.pos_embed, self.unembed = nn.Module(), nn.Module(), nn.Module()
        self.embed.W_E = nn.Parameter(torch.zeros(tokens, width, dtype=dtype))
        self.pos_embed.W_pos = nn.Parameter(torch.zeros(max_length, width, dtype=dtype))
        self.blocks = nn.ModuleList(blocks)
        self.unembed.W_U = nn.Parameter(torch.zeros(width, outputs, dtype=dtype))
        self.unembed.b_U = nn.Parameter(torch.zeros(outputs, dtype=dtype))

    def forward(self, tokens: Shaped[Tensor, "batch n"], streams: list[Tensor] | None = None) -> Float[Tensor, "batch n outputs"]:
        W_E, W_pos = self.embed.W_E, self.pos_embed.W_pos
        if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= len(W_pos):
            raise AnyformerError(f"tokens of shape (batch, 1..{len(W_pos)}) expected, got {tuple(tokens.shape)}")
        if tokens.is_floating_point() != self.real:
            raise AnyformerError(f"{'real numbers' if self.real else 'token ids'} expected, got {tokens.dtype}")
        x = tokens[..., None].to(W_E.dtype) * W_E[0] if self.real else W_E[tokens]
        x = x + W_pos[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, streams)
        return x @ self.unembed.W_U + self.unembed.b_U


def to_module(compiled: CompiledProgram) -> RaspModule:
    """The plain module of a compiled program; its outputs are those of ``compiled.run``. Raises :class:`OutsideClass` for units whose
    function is not in :data:`FUNCTIONS` (registered by the user)."""
    if not isinstance(compiled, CompiledProgram):
        raise AnyformerError(f"to_module needs a compiled program, got {type(compiled).__name__}; make one with rasp.compile")
    network, real = compiled.network, isinstance(compiled.vocab, Reals)
    assert network.positions is not None
    dtype, width = network.embedding.dtype, network.embedding.shape[1] - 1
    blocks = [
        RaspBlock(
            None if layer.attention is None else _attention(layer.attention, width, compiled.max_length, dtype),
            None if layer.feed_forward is None else _mlp(layer.feed_forward, width, dtype),
        )
        for layer in layers(network)
    ]
    readout = network.final_readout()
    module = RaspModule(len(network.embedding), compiled.max_length, blocks, width, readout.shape[1], dtype, real)
    with torch.no_grad():
        if real:
            if compiled.token_place is not None:
                module.embed.W_E[0, compiled.token_place] = 1.0
        else:
            module.embed.W_E.copy_(network.embedding[:, :-1])
        module.pos_embed.W_pos.copy_(network.positions[:, :-1])
        module.unembed.W_U.copy_(readout[:-1])
        module.unembed.b_U.copy_(readout[-1])
    return module


def _attention(stage: Stage, width: int, max_length: int, dtype: torch.dtype) -> RaspAttention:
    banks = [b for b in stage.branches if not isinstance(b.operator, Identity)]
    strange = [type(b.operator).__name__ for b in banks if not (isinstance(b.operator, Attention) and b.operator.sink)]
    if strange:
        raise OutsideClass(
            "this network is no compiled program's", [f"{name} in a layer of attention heads with a sink" for name in strange]
        )
    heads = sum(b.operator.count for b in banks)
    dim, rank = max(b.operator.reads // 2 for b in banks), max(b.map.left.shape[2] for b in banks)  # type: ignore[attr-defined]
    attn = RaspAttention(heads, width, dim, rank, max_length, dtype)
    first = 0
    with torch.no_grad():
        for bank in banks:
            op, here = bank.operator, slice(first, first + bank.operator.count)
            assert isinstance(op, Attention) and isinstance(op.kernel, (Softmax, AverageHard)) and bank.probes is not None
            e, r = op.head_dim, bank.map.left.shape[2]  # type: ignore[attr-defined]
            query, key = bank.probes.view(width + 1, op.heads, 2, e).permute(2, 1, 0, 3)
            scale = 1.0 / e**0.5 if op.scale is None else op.scale
            left, right = bank.map.left, bank.map.right  # type: ignore[attr-defined]
            for name, columns in (("Q", query * scale), ("K", key), ("V", left)):
                getattr(attn, f"W_{name}")[here, :, : columns.shape[2]] = columns[:, :-1]
                getattr(attn, f"b_{name}")[here, : columns.shape[2]] = columns[:, -1]
            attn.W_O[here, :r] = right[:, :, :-1]
            attn.allowed[here] = _allowed(op, max_length)
            attn.hard[here] = isinstance(op.kernel, AverageHard)
            first += op.heads
    return attn


def _allowed(op: Attention, max_length: int) -> Bool[Tensor, "distances"]:
    """The mask rule by the distance key - query = 1 - n_max .. n_max - 1."""
    distance = torch.arange(1 - max_length, max_length)
    return torch.as_tensor(op.mask.allows(torch.zeros_like(distance), distance))


def _mlp(stage: Stage, width: int, dtype: torch.dtype) -> RaspMLP:
    banks = [b for b in stage.branches if not isinstance(b.operator, Identity)]
    functions = [(b.operator.function, b.operator.units) for b in banks if isinstance(b.operator, Gate)]
    strange = sorted({name for name, _ in functions} - FUNCTIONS.keys())
    if strange or len(functions) < len(banks):
        what = [f"units of {name}" for name in strange] or ["a feed-forward part that holds more than hidden units"]
        raise OutsideClass("this program has no plain module", what)
    gated = any(not isinstance(b.map, ConstantMap) for b in banks)
    mlp = RaspMLP(tuple(functions), width, gated, dtype)
    first = 0
    with torch.no_grad():
        for bank in banks:
            here = slice(first, first + bank.operator.count)
            gates, values, rows = unit_columns(bank)
            mlp.W_in[:, here], mlp.b_in[here] = gates[:, :-1].T, gates[:, -1]
            mlp.W_out[here] = rows[:, :-1]
            if gated:
                mlp.W_value[:, here], mlp.b_value[here] = values[:, :-1].T, values[:, -1]
            first += bank.operator.count
    return mlp
