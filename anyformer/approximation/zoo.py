"""Attention modules of other packages: how each is applied to tokens (batch, n, d), and one small instance of each (extra ``certify-zoo``).

:data:`CALLS` is looked up by the full name of a module's type, so that ``certify(torch.nn.MultiheadAttention(...))`` needs nothing else.
:data:`ZOO` builds the instances of the table in docs/certify.md; no package is imported before it is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.approximation.tracing import Call
from anyformer.errors import AnyformerError


def plain(module: nn.Module, x: Tensor) -> Any:
    """``module(x)``."""
    return module(x)


def first(module: nn.Module, x: Tensor) -> Any:
    """The first of what ``module(x)`` returns."""
    out = module(x)
    return out[0] if isinstance(out, tuple) else out


def multihead(module: nn.Module, x: Tensor) -> Tensor:
    """Self-attention by torch's module, weights asked for, so that no fused path is taken."""
    x = x if module.batch_first else x.transpose(0, 1)
    out = module(x, x, x, need_weights=True)[0]
    return out if module.batch_first else out.transpose(0, 1)


def yoso(module: nn.Module, x: Tensor) -> Tensor:
    """YOSO with its mask of ones."""
    return module(x, torch.ones(x.shape[:2], dtype=x.dtype))[0]  # type: ignore[operator]


def longformer(module: nn.Module, x: Tensor) -> Tensor:
    """A sliding window without global tokens."""
    nowhere = torch.zeros(x.shape[:2], dtype=torch.bool)
    options = {"attention_mask": nowhere.to(x.dtype), "is_index_masked": nowhere, "is_index_global_attn": nowhere}
    return module(x, **options, is_global_attn=False)[0]


CALLS: dict[str, Call] = {
    "torch.nn.modules.activation.MultiheadAttention": multihead,
    "x_transformers.x_transformers.Attention": first,
    "transformers.models.big_bird.modeling_big_bird.BigBirdSelfAttention": first,
    "transformers.models.longformer.modeling_longformer.LongformerSelfAttention": longformer,
    "transformers.models.nystromformer.modeling_nystromformer.NystromformerSelfAttention": first,
    "transformers.models.yoso.modeling_yoso.YosoSelfAttention": yoso,
    "transformers.models.fnet.modeling_fnet.FNetBasicFourierTransform": first,
}
"""Full name of a module's type -> how it is applied; others are applied as ``module(x)``."""


def call_of(module: nn.Module) -> Call:
    """How a module is applied to tokens, by its type."""
    return CALLS.get(f"{type(module).__module__}.{type(module).__qualname__}", plain)


@dataclass(frozen=True)
class Exhibit:
    """One module of another package: ``build(n, d)``; ``tokens`` and ``dim`` at which the table certifies it, ``layers`` and ``group``
    asked for."""

    package: str
    build: Callable[[int, int], nn.Module]
    tokens: int = 4
    dim: int = 4
    layers: int = 1
    group: str = "symmetric"

    def make(self) -> nn.Module:
        """The module; raises where its package is missing."""
        torch.manual_seed(0)
        try:
            return self.build(self.tokens, self.dim)
        except ImportError as error:
            raise AnyformerError(
                f"{self.package} is not installed ({error}); install the extra: pip install 'anyformer[certify-zoo]'"
            ) from None


def _from(module: str, name: str, **arguments: Any) -> nn.Module:
    return getattr(import_module(module), name)(**arguments)


def _configured(kind: str, config: str, name: str, *more: Any, **arguments: Any) -> nn.Module:
    """A part of transformers from a tiny configuration."""
    made = getattr(import_module("transformers"), config)(
        num_attention_heads=2, vocab_size=8, pad_token_id=0, sep_token_id=None, **arguments
    )
    return getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), name)(made, *more)


ZOO: dict[str, Exhibit] = {
    "torch MultiheadAttention": Exhibit("torch", lambda n, d: nn.MultiheadAttention(d, 2, batch_first=True)),
    "performer-pytorch": Exhibit(
        "performer-pytorch", lambda n, d: _from("performer_pytorch", "SelfAttention", dim=d, heads=2, dim_head=2, nb_features=4)
    ),
    "linformer": Exhibit(
        "linformer", lambda n, d: _from("linformer", "LinformerSelfAttention", dim=d, seq_len=n, k=2, heads=2), group="trivial"
    ),
    "nystrom-attention (residual off)": Exhibit(
        "nystrom-attention",
        lambda n, d: _from("nystrom_attention", "NystromAttention", dim=d, dim_head=2, heads=2, num_landmarks=2, residual=False),
    ),
    "linear-attention-transformer": Exhibit(
        "linear-attention-transformer",
        lambda n, d: _from("linear_attention_transformer.linear_attention_transformer", "SelfAttention", dim=d, heads=2),
    ),
    "x-transformers": Exhibit(
        "x-transformers", lambda n, d: _from("x_transformers.x_transformers", "Attention", dim=d, dim_head=2, heads=2)
    ),
    "BigBird (full mode)": Exhibit(
        "transformers",
        lambda n, d: _configured(
            "big_bird", "BigBirdConfig", "BigBirdSelfAttention", hidden_size=d, attention_type="original_full"
        ),
    ),
    "Longformer": Exhibit(
        "transformers",
        lambda n, d: _configured(
            "longformer", "LongformerConfig", "LongformerSelfAttention", 0, hidden_size=d, attention_window=[2]
        ),
        tokens=8,
        layers=8,
        group="reflection",
    ),
    "Nystromformer": Exhibit(
        "transformers",
        lambda n, d: _configured(
            "nystromformer",
            "NystromformerConfig",
            "NystromformerSelfAttention",
            hidden_size=d,
            num_landmarks=2,
            segment_means_seq_len=n,
            conv_kernel_size=3,
        ),
        group="trivial",
    ),
    "YOSO (expectation)": Exhibit(
        "transformers", lambda n, d: _configured("yoso", "YosoConfig", "YosoSelfAttention", hidden_size=d, use_expectation=True)
    ),
    "FNet": Exhibit(
        "transformers",
        lambda n, d: _configured_fnet(d),
        layers=2,
        group="auto",
    ),
}


def _configured_fnet(d: int) -> nn.Module:
    made = import_module("transformers").FNetConfig(hidden_size=d, vocab_size=8, pad_token_id=0)
    return import_module("transformers.models.fnet.modeling_fnet").FNetBasicFourierTransform(made)
