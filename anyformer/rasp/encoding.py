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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from anyformer.errors import AnyformerError, OutsideClass, require_choice, require_number, require_size
from anyformer.targets.checking import structure_problems


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
        require_number("Layer", "eps", self.eps)
        if self.eps <= 0:
            raise AnyformerError(
                f"Layer: eps must be positive, got {self.eps!r}: 1/sqrt(variance) has no value where all entries are equal"
            )
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

    def smaller(self, matrices: Mapping[str, Tensor]) -> "Layer":
        """The layer that these matrices describe: this one, or one of fewer rows (with ``padding``) or columns, which runs on its simulator.
        Raises :class:`AnyformerError` unless all of them fit together and into this class."""
        if not isinstance(matrices, Mapping):
            raise AnyformerError(f"a layer is described by a dict of matrices, {', '.join(self.matrices)}; got {_what(matrices)}")
        missing, unknown = set(self.matrices) - set(matrices) - {"valid"}, set(matrices) - set(self.matrices)
        if missing or unknown:
            raise AnyformerError(
                f"a layer is described by {', '.join(self.matrices)}; missing: {', '.join(sorted(missing)) or 'none'}, "
                f"unknown: {', '.join(sorted(map(str, unknown))) or 'none'}"
            )
        for name, (rows, columns) in self.matrices.items():
            if name in matrices:
                _require_matrix(name, matrices[name], rows, columns)
        x = matrices["X"]
        if x.shape[0] < self.n and not self.padding:
            raise AnyformerError(
                f"X must have {self.n} rows, got {x.shape[0]}; a simulator with padding=True masks the missing ones"
            )
        if x.shape[1] < self.d and self.norm:
            raise AnyformerError(
                f"X must have {self.d} columns, got {x.shape[1]}: a LayerNorm averages over all of them; make a simulator with d = {x.shape[1]}"
            )
        separate = self.projections == "separate"
        small = replace(
            self,
            n=x.shape[0],
            d=x.shape[1],
            d_v=matrices["W_V0" if separate else "V0"].shape[1],
            d_k=matrices["W_Q0"].shape[1] if separate else None,
            feed_forward=matrices["W_1"].shape[1] if self.feed_forward else 0,
        )
        for name, shape in small.matrices.items():
            if name in matrices and tuple(matrices[name].shape) != shape:
                sizes = ", ".join(f"{k} = {getattr(small, k)}" for k in ("n", "d", "d_v", "d_k") if getattr(small, k) is not None)
                raise AnyformerError(f"{name} must have shape {shape} in a layer of {sizes}, got {tuple(matrices[name].shape)}")
        if "valid" in matrices:
            _require_valid(matrices["valid"])
        return small

    def encode(self, matrices: Mapping[str, Tensor]) -> list[float]:
        """``<T, X>``: the tokens of a layer and its input. The matrices of a smaller layer are padded with zeros on the right and below, those
        of W_O head by head (fewer rows of X only with ``padding``, where their keys are then masked: a zero key would still have weight); with
        ``scaled`` its W_Q and b_Q, or A, are multiplied by what its own scale is larger."""
        small = self.smaller(matrices)
        larger = small.scale / self.scale
        out: list[float] = []
        for name, (rows, columns) in self.matrices.items():
            padded = torch.zeros(rows, columns, dtype=torch.float64)
            value = matrices[name].detach().double() if name in matrices else torch.ones(1, small.n)
            if name.startswith(("W_Q", "b_Q", "A")):
                value = larger * value
            if name == "W_O":
                heads = padded.view(self.heads, self.d_v, columns)
                heads[:, : small.d_v, : small.d] = value.view(small.heads, small.d_v, small.d)
            else:
                padded[: value.shape[0], : value.shape[1]] = value
            out += padded.flatten().tolist()
        return out + [0.0] * (self.tokens - len(out))

    def seen(self, matrices: Mapping[str, Tensor]) -> Bool[Tensor, "n"]:
        """Which rows of the output have a value: a query whose keys are all padding has none."""
        valid = torch.zeros(self.n, dtype=torch.bool)
        given = matrices.get("valid")
        valid[: matrices["X"].shape[0]] = True if given is None else given[0].bool()
        return valid.cumsum(0) > 0 if self.causal else valid.any().expand(self.n)

    def entry(self, position: int) -> str:
        """What the token at a position is, as ``W_Q0[1, 2]``."""
        name = next((name for name in reversed(self.matrices) if self.starts[name] <= position < self.described), None)
        if name is None:
            return f"spare token {position}"
        row, column = divmod(position - self.starts[name], self.matrices[name][1])
        return f"{name}[{row}, {column}]"


def _what(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _require_matrix(name: str, value: object, rows: int, columns: int) -> None:
    """Raise unless this is a matrix of real numbers of at least one and at most so many rows and columns."""
    if not isinstance(value, Tensor) or value.is_complex() or value.is_meta:
        got = f"a {value.device} tensor of {value.dtype}" if isinstance(value, Tensor) else _what(value)
        raise AnyformerError(f"{name} must be a tensor of real numbers of shape ({rows}, {columns}), got {got}")
    if value.ndim != 2 or not (1 <= value.shape[0] <= rows and 1 <= value.shape[1] <= columns):
        raise AnyformerError(f"{name} must have at most shape ({rows}, {columns}) and not be empty, got {tuple(value.shape)}")


def _require_valid(valid: Tensor) -> None:
    if not bool(((valid == 0) | (valid == 1)).all()) or not bool(valid.any()):
        raise AnyformerError(
            f"valid must hold 1 for real tokens and 0 for padding, and at least one 1, got {[f'{v:g}' for v in valid[0].tolist()]}"
        )


def reference(layer: Layer, matrices: Mapping[str, Tensor]) -> Float[Tensor, "n outputs"]:
    """The layer's output by ``scaled_dot_product_attention`` in float64: what a simulator must give (NaN in a row without keys). Of a
    smaller layer, :meth:`Layer.smaller`, the smaller output."""
    layer = layer.smaller(matrices)
    m = {name: torch.as_tensor(value).double() for name, value in matrices.items()}
    x = m["X"]
    n, d = x.shape

    def normed(stream: Tensor, i: int, where: str) -> Tensor:
        if layer.norm != where:
            return stream
        return torch.nn.functional.layer_norm(stream, (d,), m[f"gamma_{i}"][0], m[f"beta_{i}"][0], layer.eps)

    first, x = x, normed(x, 1, "pre")
    mask = torch.ones(n, n, dtype=torch.bool).tril() if layer.causal else None
    if "valid" in m:
        keys = m["valid"].bool().expand(n, n)
        mask = keys if mask is None else mask & keys
    heads = []
    for h in range(layer.heads):
        if layer.projections == "folded":
            q, k, v = x @ m[f"A{h}"], x, x @ m[f"V{h}"]
        else:
            q, k, v = (x @ m[f"W_{c}{h}"] + (m[f"b_{c}{h}"] if layer.biases else 0.0) for c in "QKV")
        head = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=layer.scale)[0]
        heads.append(head if mask is None else torch.where(mask.any(1, keepdim=True), head, torch.nan))
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
    """The class and the matrices of ``nn.MultiheadAttention`` (self-attention) or ``nn.TransformerEncoderLayer`` (ReLU) on ``x`` (n, d).
    Raises :class:`OutsideClass` with every reason why the module computes something else than they say."""
    if not isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
        raise AnyformerError(f"a simulator reads nn.MultiheadAttention and nn.TransformerEncoderLayer, got {_what(module)}")
    reasons = list(_foreign(module))
    if reasons:
        raise OutsideClass(f"this {type(module).__name__} computes something else than a simulator is told", reasons)
    encoder = module if isinstance(module, nn.TransformerEncoderLayer) else None
    attention: Any = module if encoder is None else encoder.self_attn
    d, heads, d_k = attention.embed_dim, attention.num_heads, attention.head_dim
    if not isinstance(x, Tensor) or x.is_complex() or x.ndim != 2 or x.shape[1] != d or not len(x):
        raise AnyformerError(f"x must be a tensor of real numbers of shape (n, {d}), n >= 1, got {_what(x)}")
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
                found[f"gamma_{i}"] = torch.ones(1, d) if norm.weight is None else norm.weight[None]
                found[f"beta_{i}"] = torch.zeros(1, d) if norm.bias is None else norm.bias[None]
        options = {"residual": True, "feed_forward": encoder.linear1.out_features}
        if isinstance(encoder.norm1, nn.LayerNorm):
            options |= {"norm": "pre" if encoder.norm_first else "post", "eps": encoder.norm1.eps}
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


def _foreign(module: nn.MultiheadAttention | nn.TransformerEncoderLayer) -> Iterator[str]:
    """Why a module is no plain one of its type: it is compared, part by part, with one that is built anew from its sizes."""
    encoder = module if isinstance(module, nn.TransformerEncoderLayer) else None
    attention = module if encoder is None else encoder.self_attn
    if not isinstance(attention, nn.MultiheadAttention):
        yield f"self_attn: {_what(attention)} stands in place of MultiheadAttention"
        return
    d, heads, biases = attention.embed_dim, attention.num_heads, attention.in_proj_bias is not None
    same: dict[str, Any] = {"batch_first": attention.batch_first, "bias": biases, "device": "meta"}
    plain: nn.Module = nn.MultiheadAttention(d, heads, attention.dropout, **same)
    if encoder is not None:
        activation, norms = encoder.activation, (encoder.norm1, encoder.norm2)
        if activation not in (torch.relu, nn.functional.relu) and not isinstance(activation, nn.ReLU):
            yield f"its activation is {getattr(activation, '__name__', activation)}, and feed-forward parts with ReLU are described"
        if not isinstance(encoder.linear1, nn.Linear):
            yield f"linear1: {_what(encoder.linear1)} stands in place of Linear"
            return
        same |= {"norm_first": encoder.norm_first, "layer_norm_eps": getattr(norms[0], "eps", 1e-5)}
        made = nn.ReLU() if isinstance(activation, nn.Module) else activation
        plain = nn.TransformerEncoderLayer(d, heads, encoder.linear1.out_features, attention.dropout, made, **same)
        for name, norm in zip(("norm1", "norm2"), norms, strict=True):
            if all(type(norm) is nn.Identity for norm in norms):
                setattr(plain, name, nn.Identity())
            elif isinstance(norm, nn.LayerNorm):
                kept = {"elementwise_affine": norm.elementwise_affine, "bias": norm.bias is not None, "device": "meta"}
                setattr(plain, name, nn.LayerNorm(d, same["layer_norm_eps"], **kept))
    yield from structure_problems(module, plain)
    for name, part in module.named_modules():
        dropout = part.dropout if isinstance(part, nn.MultiheadAttention) else getattr(part, "p", 0.0)
        if part.training and dropout:
            yield f"{name or 'the module itself'}: it drops {dropout:.0%} at random while it trains; call .eval() first"
