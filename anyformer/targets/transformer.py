"""Targets of our own: one readable family of transformers, tokens in, logits out.

    x_0 = E[token] (+ P[position])
    attention    y = sum_h A_h x W_V^h W_O^h,   A_h = softmax(x W_Q^h (x W_K^h)^T / sqrt(d) + bias_h)
    layer        x <- y                          (the class of "Fixed Universal Transformers", arXiv 2605.31423, section 2)
                 x <- x + y                      (residual)
                 x <- x + f(norm(x))             (pre-norm, a final norm before the read-out)
                 x <- norm(x + f(x))             (post-norm)
    logits = x U

This is an ordinary ``nn.Module``: train it as any other. Its forward is its own (fused attention where patterns are
not asked for) and is what verification compares a program with.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.errors import AnyformerError, require_choice, require_size
from anyformer.spec import Spec
from anyformer.storage import patiently, read_folder, write_folder

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Spec):
    """Sizes and kinds of a :class:`Transformer`.

    ``features`` is D (d_in of the paper), ``head_dim`` d, ``kv_heads`` the number of key/value heads (grouped queries;
    default: ``heads``), ``value_dim`` the width of a head's values (default: ``head_dim``), ``mlp`` the number of
    hidden units (0: none). ``attention="hard"`` is average-hard attention: uniform over the keys whose score is within
    ``tie * (1 + |row maximum|)`` of the row maximum, tie = 1e-9 in float64 and 1e-4 in float32.
    """

    vocab: int
    heads: int
    layers: int
    head_dim: int
    features: int
    causal: bool = True
    attention: Literal["softmax", "hard"] = "softmax"
    kv_heads: int | None = None
    value_dim: int | None = None
    residual: bool = False
    norm: Literal["rms", "layer"] | None = None
    norm_position: Literal["pre", "post"] = "pre"
    norm_eps: float = 1e-5
    mlp: int = 0
    gated: bool = False
    activation: str = "gelu"
    bias: bool = False
    positions: Literal["learned", "rope", "alibi"] | None = None
    max_length: int | None = None
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        for name in ("vocab", "heads", "layers", "head_dim", "features"):
            require_size("Transformer", name, getattr(self, name))
        require_size("Transformer", "mlp", self.mlp, minimum=0)
        require_choice("Transformer", "attention", self.attention, ("softmax", "hard"))
        require_choice("Transformer", "norm", self.norm, (None, "rms", "layer"))
        require_choice("Transformer", "norm_position", self.norm_position, ("pre", "post"))
        require_choice("Transformer", "positions", self.positions, (None, "learned", "rope", "alibi"))
        require_choice("Transformer", "activation", self.activation, tuple(ACTIVATIONS))
        for name in ("causal", "residual", "gated", "bias"):
            require_choice("Transformer", name, getattr(self, name), (True, False))
        for name in ("norm_eps", "rope_base"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise AnyformerError(f"Transformer: {name} must be a positive number, got {value!r}")
        for name in ("kv_heads", "value_dim", "max_length"):
            if getattr(self, name) is not None:
                require_size("Transformer", name, getattr(self, name))
        if self.kv_heads and self.heads % self.kv_heads:
            raise AnyformerError(f"Transformer: kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if (self.positions == "learned") != (self.max_length is not None):
            raise AnyformerError('Transformer: max_length goes with positions="learned" (give both or neither)')
        if self.positions == "rope" and self.head_dim % 2:
            raise AnyformerError(f"Transformer: RoPE needs an even head_dim, got {self.head_dim}")
        if self.gated and not self.mlp:
            raise AnyformerError("Transformer: gated=True needs mlp >= 1 hidden units, got mlp=0")


class Transformer(nn.Module):
    """``Transformer(vocab=30, heads=2, layers=2, head_dim=28, features=30)``; see :class:`TransformerConfig`.

    Called with ``tokens`` (batch, n) it returns logits (batch, n, vocab). ``mask`` (batch, n) is True at real tokens,
    ``positions`` (batch, n) defaults to the count of real tokens before each one, so padding on either side is neutral.
    """

    def __init__(self, config: TransformerConfig | None = None, *, token_names: tuple[str, ...] | None = None, **sizes: Any):
        super().__init__()
        if config is not None and sizes:
            raise AnyformerError(f"Transformer: give a config or sizes, not both (got {', '.join(sizes)})")
        try:
            self.config = c = config if config is not None else TransformerConfig(**sizes)
        except TypeError as error:
            known = ", ".join(f.name for f in dataclasses.fields(TransformerConfig))
            raise AnyformerError(f"Transformer: {str(error).split('__init__() ')[-1]}; it takes {known}") from error
        self.token_names = None if token_names is None else check_names(token_names, c.vocab)
        self.embedding = nn.Embedding(c.vocab, c.features)
        self.positions = nn.Embedding(c.max_length, c.features) if c.max_length else None
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = make_norm(c) if c.norm and c.norm_position == "pre" else None
        self.readout = nn.Linear(c.features, c.vocab, bias=c.bias)
        for table in (self.embedding, self.positions):
            if table is not None:
                nn.init.normal_(table.weight, std=c.features**-0.5)

    def forward(
        self,
        tokens: Int[Tensor, "batch n"],
        *,
        mask: Bool[Tensor, "batch n"] | None = None,
        positions: Int[Tensor, "batch n"] | None = None,
    ) -> Float[Tensor, "batch n vocab"]:
        """Logits, with fused attention where it applies."""
        return self._run(tokens, mask, positions, patterns=None)

    def with_patterns(
        self,
        tokens: Int[Tensor, "batch n"],
        *,
        mask: Bool[Tensor, "batch n"] | None = None,
        positions: Int[Tensor, "batch n"] | None = None,
    ) -> tuple[Float[Tensor, "batch n vocab"], list[Float[Tensor, "batch heads n n"]]]:
        """Logits, and the attention pattern of every layer (batch, heads, queries, keys), computed unfused."""
        patterns: list[Tensor] = []
        return self._run(tokens, mask, positions, patterns), patterns

    def _run(self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, patterns: list[Tensor] | None) -> Tensor:
        c = self.config
        self._check(tokens, mask, positions)
        places = None if positions is None else positions.long()
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
            if mask is not None:
                places = (mask.long().cumsum(1) - 1).clamp(min=0)
        allowed = None
        if mask is not None or positions is not None:
            allowed = torch.ones(*tokens.shape, tokens.shape[1], dtype=torch.bool, device=tokens.device)
            if c.causal:
                allowed = places[:, :, None] >= places[:, None, :]
            if mask is not None:
                allowed = allowed & mask[:, None, :]
        x = self.embedding(tokens.long())
        if self.positions is not None:
            if int(places.max()) >= self.positions.num_embeddings:
                raise AnyformerError(f"position {int(places.max())} is past max_length {self.positions.num_embeddings}")
            x = x + self.positions(places)
        for block in self.blocks:
            x = block(x, places, allowed, patterns)
        return self.readout(x if self.norm is None else self.norm(x))

    def _check(self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
        integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.numel() == 0 or tokens.dtype not in integers:
            got = f"{tuple(tokens.shape)}, {tokens.dtype}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise AnyformerError(f"tokens must be integers of shape (batch, n), n >= 1; got {got}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab:
            raise AnyformerError(f"token ids must lie in 0..{self.config.vocab - 1}, got {low if low < 0 else high}")
        for name, value in (("mask", mask), ("positions", positions)):
            if value is not None and (not isinstance(value, Tensor) or value.shape != tokens.shape):
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise AnyformerError(f"{name} must have the shape of tokens {tuple(tokens.shape)}, got {got}")
        if mask is not None and mask.dtype != torch.bool:
            raise AnyformerError(f"mask must be Boolean (True at real tokens), got {mask.dtype}")
        if positions is not None and (positions.dtype not in integers or int(positions.min()) < 0):
            raise AnyformerError("positions must be integers >= 0")

    def save(self, folder: str | Path, token_names: tuple[str, ...] | None = None) -> None:
        """Write ``config.json`` and ``model.safetensors`` (and token names, in the configuration), atomically. ``token_names`` replaces
        those that the target was made with."""
        if token_names is not None:
            self.token_names = check_names(token_names, self.config.vocab)
        tensors = {k: v.detach().contiguous() for k, v in self.state_dict().items()}
        about = {"transformer": self.config.to_json(), "token_names": self.token_names and list(self.token_names)}
        card = f"# An anyformer target\n\n`anyformer.Transformer.load(folder)` reads it.\n\n```\n{self.config}\n```\n"
        write_folder(folder, "anyformer-target", about, tensors, card)

    @classmethod
    @patiently
    def load(cls, folder: str | Path) -> "Transformer":
        """Read a folder written by :meth:`save`; every tensor's name, shape and dtype is checked first."""
        stored = read_folder(folder, "anyformer-target")
        config = TransformerConfig.from_json(stored.config.get("transformer"))
        if config.layers > len(stored.shapes):
            raise AnyformerError(f"{folder}: {config.layers} layers are configured, there are only {len(stored.shapes)} tensors")
        with torch.device("meta"):
            module = cls(config, token_names=_names(stored.config.get("token_names")))
        stored.expect({k: (tuple(v.shape), None) for k, v in module.state_dict().items()})
        module.load_state_dict(stored.tensors(), assign=True)
        return module


def check_names(names: Any, vocab: int) -> tuple[str, ...]:
    """Token names as a tuple; raises unless they are ``vocab`` different, non-empty texts."""
    good = isinstance(names, (tuple, list)) and all(isinstance(n, str) and n for n in names)
    if not good or len(names) != vocab or len(set(names)) != vocab:
        raise AnyformerError(f"Transformer: {vocab} different token names expected (non-empty texts), got {names!r:.100}")
    return tuple(names)


def _names(names: Any) -> tuple[str, ...] | None:
    if names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
        raise AnyformerError("token_names must be a list of strings or null")
    return None if names is None else tuple(names)


def make_norm(c: TransformerConfig) -> nn.Module:
    """The normalisation that ``c`` names: torch's RMSNorm or LayerNorm over the features."""
    if c.norm == "rms":
        return nn.RMSNorm(c.features, eps=c.norm_eps)
    return nn.LayerNorm(c.features, eps=c.norm_eps, bias=c.bias)


class Block(nn.Module):
    """One layer: attention and, where ``mlp > 0``, an MLP, each with its norm and residual as configured."""

    def __init__(self, c: TransformerConfig):
        super().__init__()
        self.config = c
        self.attention = Attention(c)
        self.attention_norm = make_norm(c) if c.norm else None
        self.mlp = MLP(c) if c.mlp else None
        self.mlp_norm = make_norm(c) if c.mlp and c.norm else None

    def forward(self, x: Tensor, places: Tensor, allowed: Tensor | None, patterns: list[Tensor] | None) -> Tensor:
        x = self._wrap(x, self.attention_norm, lambda y: self.attention(y, places, allowed, patterns))
        return x if self.mlp is None else self._wrap(x, self.mlp_norm, self.mlp)

    def _wrap(self, x: Tensor, norm: nn.Module | None, f: Any) -> Tensor:
        if norm is None:
            return x + f(x) if self.config.residual else f(x)
        if self.config.norm_position == "pre":
            return x + f(norm(x)) if self.config.residual else f(norm(x))
        return norm(x + f(x) if self.config.residual else f(x))


class Attention(nn.Module):
    """Multi-head attention with separate ``W_Q, W_K, W_V, W_O`` (stored for all heads side by side)."""

    def __init__(self, c: TransformerConfig):
        super().__init__()
        self.config = c
        kv, e = c.kv_heads or c.heads, c.value_dim or c.head_dim
        self.W_Q = nn.Linear(c.features, c.heads * c.head_dim, bias=c.bias)
        self.W_K = nn.Linear(c.features, kv * c.head_dim, bias=c.bias)
        self.W_V = nn.Linear(c.features, kv * e, bias=c.bias)
        self.W_O = nn.Linear(c.heads * e, c.features, bias=c.bias)

    def forward(self, x: Tensor, places: Tensor, allowed: Tensor | None, patterns: list[Tensor] | None) -> Tensor:
        c = self.config
        q, k, v = (
            w(x).unflatten(-1, (-1, size)).transpose(1, 2)
            for w, size in ((self.W_Q, c.head_dim), (self.W_K, c.head_dim), (self.W_V, c.value_dim or c.head_dim))
        )
        if c.positions == "rope":
            q, k = rotate(q, places, c.rope_base), rotate(k, places, c.rope_base)
        if c.kv_heads and c.kv_heads < c.heads:
            k, v = (t.repeat_interleave(c.heads // c.kv_heads, dim=1) for t in (k, v))
        bias = self._bias(places, allowed, x.dtype)
        if patterns is None and c.attention == "softmax":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=c.causal and bias is None)
        else:
            pattern = self._pattern(q, k, bias)
            if patterns is not None:
                patterns.append(pattern)
            y = pattern @ v
        return self.W_O(y.transpose(1, 2).flatten(2))

    def _bias(self, places: Tensor, allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Additive bias (batch, heads or 1, n, n): ALiBi and the mask; None where plain (causal) attention will do."""
        c = self.config
        if allowed is None and c.positions != "alibi":
            return None
        if allowed is None:
            after = places[:, :, None] >= places[:, None, :]
            allowed = after if c.causal else torch.ones_like(after)
        bias = torch.zeros(allowed.shape, dtype=dtype, device=places.device).masked_fill(~allowed, -math.inf)[:, None]
        if c.positions == "alibi":
            distance = (places[:, None, :, None] - places[:, None, None, :]).abs()
            slopes = torch.tensor(alibi_slopes(c.heads), dtype=dtype, device=places.device)
            bias = bias - slopes[:, None, None] * distance
        return bias

    def _pattern(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        c = self.config
        scores = q @ k.mT / math.sqrt(c.head_dim)
        if bias is not None:
            scores = scores + bias
        elif c.causal:
            n = q.shape[-2]
            scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool, device=q.device).tril(), -math.inf)
        if c.attention == "softmax":
            return torch.softmax(scores, dim=-1).nan_to_num(0.0)
        tie = 1e-9 if q.dtype == torch.float64 else 1e-4
        top = scores.amax(-1, keepdim=True)
        chosen = ((scores >= top - tie * (1 + top.abs())) & (scores > -math.inf)).to(q.dtype)
        return chosen / chosen.sum(-1, keepdim=True).clamp(min=1)


class MLP(nn.Module):
    """``act(x W_1 + b_1) W_2 + b_2``, or gated: ``(act(x W_g + b_g) * (x W_1 + b_1)) W_2 + b_2``."""

    def __init__(self, c: TransformerConfig):
        super().__init__()
        self.activation = ACTIVATIONS[c.activation]
        self.gate = nn.Linear(c.features, c.mlp, bias=c.bias) if c.gated else None
        self.up = nn.Linear(c.features, c.mlp, bias=c.bias)
        self.down = nn.Linear(c.mlp, c.features, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


def rotate(x: Float[Tensor, "batch heads n d"], places: Int[Tensor, "batch n"], base: float) -> Float[Tensor, "batch heads n d"]:
    """RoPE: the pair (i, i + d/2) turns by ``position * base^(-2i/d)`` (Su et al. 2021, half-split layout)."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64, device=x.device)
    angle = places[:, None, :, None].double() * frequencies
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi slopes ``2^(-8 h / H)``, h = 1..H (Press et al. 2022)."""
    return [2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)]
