"""The families of causal language models that are read, part by part, into the common language.

    Llama, Mistral, Qwen2, Qwen3    x + attention(rms(x)), x + (act(rms(x) W_g) * rms(x) W_u) W_d;  RoPE, grouped queries
    GPT-2                           x + attention(ln(x)), x + act(ln(x) W_1) W_2;  learned positions
    GPT-NeoX, Pythia                x + attention(ln_1(x)) + act(ln_2(x) W_1) W_2 in one stage;  RoPE on part of a head

A model is read where :mod:`anyformer.targets.huggingface.refusals` finds nothing that the reading would get wrong. Verification
runs transformers' own eager code (:func:`own_forward`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anyformer.errors import AnyformerError
from anyformer.network import LazyStages, Network, Stage
from anyformer.operators import Attention, Causal, LayerNorm, Norm, RMSNorm, Rotary
from anyformer.targets.algebra import Affine, Algebra, Gain, Part

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "linear": "identity",
}
"""transformers' name -> ours, where both are one formula."""


@dataclass(frozen=True)
class Family:
    """One ``model_type``: its class, its reader, and the entries of ``config.json`` that it cannot do without."""

    model: str
    read: Callable[[Any], Network]
    needed: tuple[str, ...]
    stored_as: tuple[tuple[str, str], ...] = ()
    """Tensors that files hold under another name: (in files, in the model)."""

    @property
    def config(self) -> str:
        """The name of its configuration's class."""
        return self.model.replace("ForCausalLM", "Config").replace("LMHeadModel", "Config")


def import_transformers() -> Any:
    """The transformers package, or one line that says how to get it."""
    try:
        import transformers
    except ImportError:
        raise AnyformerError("Hugging Face models need the transformers package: pip install 'anyformer[hf]'") from None
    return transformers


def own_forward(model: Any, tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Logits and all attention patterns by transformers' own eager code; a float64 model's float32 islands run in float64."""
    seen = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    places = (seen.long().cumsum(1) - 1).clamp(min=0) if positions is None else positions.long()
    with _eager(model), float64_islands(next(model.parameters()).dtype == torch.float64):
        out = model(
            input_ids=tokens.long(),
            attention_mask=seen.long(),
            position_ids=places,
            use_cache=False,
            output_attentions=True,
            return_dict=True,
        )
    return out.logits, list(out.attentions)


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """The model with attention that gives its patterns; afterwards as it was."""
    before, rotary = model.config._attn_implementation, getattr(model.base_model, "rotary_emb", None)
    known = dict(vars(rotary)) if rotary is not None else {}
    model.set_attn_implementation("eager")
    if (
        rotary is not None and getattr(rotary, "rope_type", None) == "longrope"
    ):  # both lists are one: not to be computed anew in float64
        rotary.long_inv_freq = rotary.inv_freq.clone()
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        if rotary is not None and "long_inv_freq" not in known:
            vars(rotary).pop("long_inv_freq", None)


@contextmanager
def float64_islands(wanted: bool) -> Iterator[None]:
    """Whatever asks torch for float32 gets float64: norms, softmax and rotary angles that a model always rounds to float32 are
    evaluated at the precision of its weights."""
    if not wanted:
        yield
        return
    with _Float64():
        yield


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class _Float64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        return func(*map(_wide, args), **{k: _wide(v) for k, v in (kwargs or {}).items()})


# --- readers ----------------------------------------------------------------------------------------------------------------------


Layer = Callable[[Any], tuple[Stage, ...]]


def _network(model: Any, algebra: Algebra, layers: Any, read: Layer, norm: Norm, final: Any, positions: Any = None) -> Network:
    """Layers between a table and a final norm with a read-out, which may be the table itself. A layer is read each time it is looked at, so
    that a large model is not held twice."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    gain = Gain.of(final)
    readout = algebra.like.T if head.weight is table else head.weight.double().T
    kept = gain.bias is not None
    return Network(
        embedding=algebra.with_constant(algebra.like, 1.0),
        positions=None if positions is None else algebra.with_constant(positions.weight.double(), 0.0),
        stages=LazyStages([*(partial(read, layer) for layer in layers), lambda: (algebra.norm_stage(norm, gain, kept),)]),
        readout=torch.cat((readout, readout.new_zeros(1, readout.shape[1]))) if kept else readout,
        constant=algebra.constant,
        source=model,
    )


def _scale(scaling: float, head_dim: int) -> float | None:
    """The scale of scores, None where it is the usual one."""
    return None if scaling == head_dim**-0.5 else scaling


def _rotary(rotary: Any) -> Rotary | None:
    """The model's own frequencies: the float32 numbers of its buffer; None where nothing turns."""
    frequencies = tuple(rotary.inv_freq.double().tolist())
    return Rotary(frequencies) if frequencies else None


def _read_llama(model: Any) -> Network:
    """Llama, Mistral, Qwen2 and Qwen3."""
    config, base = model.config, model.model
    normed = hasattr(base.layers[0].self_attn, "q_norm") if len(base.layers) else False
    constant = normed or any(name.endswith("bias") for name, _ in model.named_parameters())
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
    algebra = Algebra(base.embed_tokens.weight.double(), constant, norm)
    rotary = _rotary(base.rotary_emb)

    def read(layer: Any) -> tuple[Stage, ...]:
        a, mlp = layer.self_attn, layer.mlp
        operator = Attention(
            heads=config.num_attention_heads,
            head_dim=a.head_dim,
            mask=Causal(),
            scale=_scale(a.scaling * base.rotary_emb.attention_scaling**2, a.head_dim),
            rotary=rotary,
            qk_norm=a.q_norm.variance_epsilon if normed else None,
        )
        projections = [Affine.of(p) for p in (a.q_proj, a.k_proj, a.v_proj, a.o_proj)]
        weights = [n.weight.double() for n in (a.q_norm, a.k_norm)] if normed else []
        attention = algebra.heads(Gain.of(layer.input_layernorm), operator, projections, weights)
        up, down, gate = (Affine.of(p) for p in (mlp.up_proj, mlp.down_proj, mlp.gate_proj))
        units = algebra.units(Gain.of(layer.post_attention_layernorm), ACTIVATIONS[config.hidden_act], up, down, gate)
        return algebra.stage(attention), algebra.stage(units)

    return _network(model, algebra, base.layers, read, norm, base.norm)


def _read_gpt2(model: Any) -> Network:
    """GPT-2; its layers hold their weights as (in, out), queries, keys and values side by side."""
    config, base = model.config, model.transformer
    norm = LayerNorm(config.n_embd, config.layer_norm_epsilon)
    algebra = Algebra(base.wte.weight.double(), True, norm)

    def affine(conv: Any, part: int = 0, parts: int = 1) -> Affine:
        return Affine(conv.weight.double().chunk(parts, 1)[part], conv.bias.double().chunk(parts)[part])

    def read(block: Any) -> tuple[Stage, ...]:
        a = block.attn
        operator = Attention(heads=a.num_heads, head_dim=a.head_dim, mask=Causal(), scale=_scale(a.scaling, a.head_dim))
        projections = [affine(a.c_attn, i, 3) for i in range(3)]
        attention = algebra.heads(Gain.of(block.ln_1), operator, [*projections, affine(a.c_proj)])
        function = ACTIVATIONS[config.activation_function]
        units = algebra.units(Gain.of(block.ln_2), function, affine(block.mlp.c_fc), affine(block.mlp.c_proj))
        return algebra.stage(attention), algebra.stage(units)

    return _network(model, algebra, base.h, read, norm, base.ln_f, base.wpe)


def _read_neox(model: Any) -> Network:
    """GPT-NeoX; queries, keys and values of one head lie side by side."""
    config, base = model.config, model.gpt_neox
    norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
    algebra = Algebra(base.embed_in.weight.double(), True, norm)
    rotary = _rotary(base.rotary_emb)

    def read(layer: Any) -> tuple[Stage, ...]:
        a, mlp = layer.attention, layer.mlp
        operator = Attention(
            heads=config.num_attention_heads,
            head_dim=a.head_size,
            mask=Causal(),
            scale=_scale(a.scaling * base.rotary_emb.attention_scaling**2, a.head_size),
            rotary=rotary,
        )
        fused, biases = Affine.of(a.query_key_value).heads(3 * a.head_size), (None, None, None)
        if fused.bias is not None:
            biases = tuple(b.flatten() for b in fused.bias.chunk(3, -1))
        projections = [Affine(w.flatten(1), b) for w, b in zip(fused.weights.chunk(3, -1), biases, strict=True)]
        parts = (
            algebra.heads(Gain.of(layer.input_layernorm), operator, [*projections, Affine.of(a.dense)]),
            _neox_units(algebra, layer, config, mlp),
        )
        return (algebra.stage(*parts),) if config.use_parallel_residual else tuple(algebra.stage(part) for part in parts)

    return _network(model, algebra, base.layers, read, norm, base.final_layer_norm)


def _neox_units(algebra: Algebra, layer: Any, config: Any, mlp: Any) -> Part:
    gain, up, down = Gain.of(layer.post_attention_layernorm), Affine.of(mlp.dense_h_to_4h), Affine.of(mlp.dense_4h_to_h)
    return algebra.units(gain, ACTIVATIONS[config.hidden_act], up, down)


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

FAMILIES = {
    "llama": Family("LlamaForCausalLM", _read_llama, (*_SIZES, "rms_norm_eps")),
    "mistral": Family("MistralForCausalLM", _read_llama, (*_SIZES, "rms_norm_eps")),
    "qwen2": Family("Qwen2ForCausalLM", _read_llama, (*_SIZES, "rms_norm_eps")),
    "qwen3": Family("Qwen3ForCausalLM", _read_llama, (*_SIZES, "rms_norm_eps")),
    "gpt2": Family(
        "GPT2LMHeadModel", _read_gpt2, ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon")
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", _read_neox, (*_SIZES, "layer_norm_eps"), (("embed_out.weight", "lm_head.weight"),)),
}
"""``model_type`` -> family. A further family is one entry."""
