"""How an attention layer and its input become tokens: one scalar a token, matrices row by row, in a stated order.

    X (n x d),  then of every head h:  A_h (d x d), V_h (d x d_v)                                             folded projections
                                       W_Q, W_K (d x d_k), b_Q, b_K (1 x d_k), W_V (d x d_v), b_V (1 x d_v)     separate ones
    W_O (heads d_v x d), b_O (1 x d)                                                                           with an output projection
    gamma_1, beta_1, gamma_2, beta_2 (1 x d)                                                                   with norms
    W_1 (d x r), b_1 (1 x r), W_2 (r x d), b_2 (1 x d)                                                          with a feed-forward part
    valid (1 x n): 1 for real tokens, 0 for padding                                                            with padding
    zeros: spare tokens, where a result needs more positions than the description has

The same order is the order of :attr:`Layer.matrices`, by name. (The paper leaves it open; Dutta et al., 2506.18739.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.errors import AnyformerError, require_choice, require_number, require_size


@dataclass(frozen=True)
class Layer:
    """The class of layers that one simulator runs: sizes and options, no numbers.

        head_h = softmax(scale * Q_h K_h^T) V_h,     folded: scale * X A_h X^T and X V_h
        out    = concat(heads) W_O + b_O,            or the sum of the heads without an output projection
        out    = X + out,  out + relu(out W_1 + b_1) W_2 + b_2       with ``residual`` and ``feed_forward`` units
        norm   = "post": LayerNorm after each of the two sums, "pre": of what enters each of the two parts (torch's TransformerEncoderLayer)

    ``scaled``: scale = 1/sqrt(d_k) (d for folded projections), else 1. ``causal``: query i sees keys j <= i.
    """

    n: int
    d: int
    d_v: int
    heads: int = 1
    d_k: int | None = None
    projections: str = "folded"
    biases: bool = False
    output: bool = False
    residual: bool = False
    feed_forward: int = 0
    norm: str | None = None
    eps: float = 1e-5
    scaled: bool = False
    causal: bool = False
    padding: bool = False

    def __post_init__(self) -> None:
        for name in ("n", "d", "d_v", "heads"):
            require_size("Layer", name, getattr(self, name))
        require_size("Layer", "feed_forward", self.feed_forward, 0)
        require_choice("Layer", "projections", self.projections, ("folded", "separate"))
        require_choice("Layer", "norm", self.norm, (None, "pre", "post"))
        require_number("Layer", "eps", self.eps, 0.0)
        if self.norm and not (self.residual and self.feed_forward):
            raise AnyformerError("Layer: a norm belongs to the whole encoder layer, with residual=True and feed_forward units")
        for name in ("biases", "output", "residual", "scaled", "causal", "padding"):
            require_choice("Layer", name, getattr(self, name), (True, False))
        if self.projections == "separate":
            require_size("Layer", "d_k", self.d_k)
        elif self.d_k is not None or self.biases:
            raise AnyformerError("Layer: d_k and biases belong to separate projections; folded ones have A (d x d) and V")
        if (self.residual or self.feed_forward) and self.outputs != self.d:
            raise AnyformerError(f"Layer: a residual needs outputs as wide as the input, got {self.outputs} and d = {self.d}")

    @property
    def outputs(self) -> int:
        """Columns of the layer's output."""
        return self.d if self.output else self.d_v

    @cached_property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Shape of every described matrix, in the order of the tokens."""
        found = {"X": (self.n, self.d)}
        for h in range(self.heads):
            if self.projections == "folded":
                found |= {f"A{h}": (self.d, self.d), f"V{h}": (self.d, self.d_v)}
                continue
            assert self.d_k is not None
            for letter, columns in (("Q", self.d_k), ("K", self.d_k), ("V", self.d_v)):
                found[f"W_{letter}{h}"] = (self.d, columns)
                if self.biases:
                    found[f"b_{letter}{h}"] = (1, columns)
        if self.output:
            found["W_O"] = (self.heads * self.d_v, self.d)
            if self.biases:
                found["b_O"] = (1, self.d)
        if self.norm:
            found |= {f"{name}_{i}": (1, self.d) for i in (1, 2) for name in ("gamma", "beta")}
        if self.feed_forward:
            r = self.feed_forward
            found |= {"W_1": (self.d, r), "b_1": (1, r), "W_2": (r, self.d), "b_2": (1, self.d)}
        if self.padding:
            found["valid"] = (1, self.n)
        return found

    @cached_property
    def starts(self) -> dict[str, int]:
        """Position of the first entry of every matrix."""
        starts, at = {}, 0
        for name, (rows, columns) in self.matrices.items():
            starts[name] = at
            at += rows * columns
        return starts

    @property
    def described(self) -> int:
        """Scalars of the description."""
        return sum(rows * columns for rows, columns in self.matrices.values())

    @property
    def tokens(self) -> int:
        """Length of the input: the description, and spare tokens where an intermediate result needs more positions."""
        widest = max(
            self.n, self.d, self.d_v, self.d_k or 0, self.feed_forward, self.outputs, self.heads * self.d_v if self.output else 0
        )
        return max(self.described, self.n * widest)

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return 1 / math.sqrt(self.d_k or self.d) if self.scaled else 1.0

    def encode(self, matrices: Mapping[str, Tensor]) -> list[float]:
        """``<T, X>``: the tokens of a layer and its input. Smaller matrices are padded with zeros on the right and below (rows of X only
        with ``padding``, where their keys are then masked: a zero key would still have weight)."""
        missing, unknown = set(self.matrices) - set(matrices) - {"valid"}, set(matrices) - set(self.matrices)
        if missing or unknown:
            raise AnyformerError(
                f"a layer is described by {', '.join(self.matrices)}; missing: {', '.join(sorted(missing)) or 'none'}, "
                f"unknown: {', '.join(sorted(unknown)) or 'none'}"
            )
        rows_used = matrices["X"].shape[0] if matrices["X"].ndim == 2 else -1
        out: list[float] = []
        for name, (rows, columns) in self.matrices.items():
            if name == "valid" and name not in matrices:
                out += [1.0] * rows_used + [0.0] * (self.n - rows_used)
                continue
            value = torch.as_tensor(matrices[name]).detach().double()
            if value.ndim != 2 or value.shape[0] > rows or value.shape[1] > columns:
                raise AnyformerError(f"{name} must have at most shape ({rows}, {columns}), got {tuple(value.shape)}")
            if name == "X" and value.shape[0] < rows and not self.padding:
                raise AnyformerError(
                    f"X must have {rows} rows, got {value.shape[0]}; a simulator with padding=True masks the missing ones"
                )
            padded = torch.zeros(rows, columns, dtype=torch.float64)
            padded[: value.shape[0], : value.shape[1]] = value
            out += padded.flatten().tolist()
        return out + [0.0] * (self.tokens - len(out))


def reference(layer: Layer, matrices: Mapping[str, Tensor]) -> Float[Tensor, "n outputs"]:
    """The layer's output by ``scaled_dot_product_attention`` in float64: what a simulator must give."""
    m = {name: torch.as_tensor(value).double() for name, value in matrices.items()}
    x = m["X"]
    n, d = x.shape

    def normed(stream: Tensor, i: int, where: str) -> Tensor:
        if layer.norm != where:
            return stream
        return torch.nn.functional.layer_norm(stream, (d,), m[f"gamma_{i}"][0], m[f"beta_{i}"][0], layer.eps)

    first, x = x, normed(x, 1, "pre")
    mask = torch.ones(n, n, dtype=torch.bool).tril() if layer.causal else None
    heads = []
    for h in range(layer.heads):
        if layer.projections == "folded":
            q, k, v = x @ m[f"A{h}"], x, x @ m[f"V{h}"]
        else:
            q, k, v = (x @ m[f"W_{c}{h}"] + (m[f"b_{c}{h}"] if layer.biases else 0.0) for c in "QKV")
        heads.append(
            torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=layer.scale)[0]
        )
    out = torch.cat(heads, 1) @ m["W_O"] if layer.output else sum(heads[1:], heads[0])
    if layer.output and layer.biases:
        out = out + m["b_O"]
    if layer.residual:
        out = normed(out + first, 1, "post")
    if layer.feed_forward:
        hidden = torch.relu(normed(out, 2, "pre") @ m["W_1"] + m["b_1"]) @ m["W_2"] + m["b_2"]
        out = normed(out + hidden, 2, "post") if layer.residual else hidden
    return out


def described(module: nn.Module, x: Tensor, *, causal: bool = False, padding: bool = False) -> tuple[Layer, dict[str, Tensor]]:
    """The class and the matrices of ``nn.MultiheadAttention`` (self-attention) or ``nn.TransformerEncoderLayer`` (ReLU) on ``x`` (n, d)."""
    encoder = module if isinstance(module, nn.TransformerEncoderLayer) else None
    attention = module if encoder is None else encoder.self_attn
    if not isinstance(attention, nn.MultiheadAttention) or attention.in_proj_weight is None or attention.bias_k is not None:
        raise AnyformerError(
            "a simulator reads nn.MultiheadAttention (one in_proj_weight, no bias_k) and nn.TransformerEncoderLayer, "
            f"got {type(module).__name__}"
        )
    if encoder is not None and encoder.activation is not torch.nn.functional.relu:
        raise AnyformerError("a simulator runs feed-forward parts with ReLU; this encoder layer has another activation")
    d, heads, d_k = attention.embed_dim, attention.num_heads, attention.head_dim
    biases = attention.in_proj_bias is not None
    found: dict[str, Tensor] = {"X": x}
    for part, letter in enumerate("QKV"):
        for h in range(heads):
            rows = slice(part * d + h * d_k, part * d + (h + 1) * d_k)
            found[f"W_{letter}{h}"] = attention.in_proj_weight[rows].T
            if biases:
                found[f"b_{letter}{h}"] = attention.in_proj_bias[rows][None]
    found["W_O"] = attention.out_proj.weight.T
    if biases:
        found["b_O"] = attention.out_proj.bias[None]
    options: dict[str, Any] = {}
    if encoder is not None:
        for i, (linear, norm) in enumerate(((encoder.linear1, encoder.norm1), (encoder.linear2, encoder.norm2)), 1):
            found[f"W_{i}"] = linear.weight.T
            found[f"b_{i}"] = torch.zeros(1, linear.out_features) if linear.bias is None else linear.bias[None]
            if isinstance(norm, nn.LayerNorm):
                found[f"gamma_{i}"], found[f"beta_{i}"] = (
                    norm.weight[None],
                    torch.zeros(1, d) if norm.bias is None else norm.bias[None],
                )
        normed = isinstance(encoder.norm1, nn.LayerNorm) and isinstance(encoder.norm2, nn.LayerNorm)
        options = {
            "residual": True,
            "feed_forward": encoder.linear1.out_features,
            "norm": ("pre" if encoder.norm_first else "post") if normed else None,
            "eps": encoder.norm1.eps if normed else 1e-5,
        }
    layer = Layer(
        n=x.shape[0],
        d=d,
        d_v=d_k,
        heads=heads,
        d_k=d_k,
        projections="separate",
        biases=biases,
        output=True,
        scaled=True,
        causal=causal,
        padding=padding,
        **options,
    )
    return layer, {name: found[name].detach().double() for name in layer.matrices if name in found}
