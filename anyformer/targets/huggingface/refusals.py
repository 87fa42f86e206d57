"""What a transformers model may hold that the reading would get wrong: each a reason, all of them listed."""

from collections.abc import Iterator
from typing import Any

import torch

from anyformer.targets.checking import number_problems, structure_problems
from anyformer.targets.huggingface.families import ACTIVATIONS, FAMILIES, import_transformers

WATCHERS = ("transformers.utils.output_capturing",)
"""transformers records attention patterns by forward hooks that stay once they were used; they change nothing."""

FIXED_ROPE = ("default", "linear", "llama3", "yarn", "proportional", "longrope")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def refusals(model: Any) -> list[str]:
    """Every reason why a model cannot be read exactly; none: it can."""
    family = FAMILIES.get(model.config.model_type)
    reasons = []
    if family is None or type(model) is not getattr(import_transformers(), family.model, None):
        known = ", ".join(f.model for f in FAMILIES.values())
        reasons.append(
            f"the class {type(model).__name__} (model_type {model.config.model_type!r}) has no reader; these have: {known}"
        )
    reasons += config_problems(model.config)
    if getattr(model, "_hf_peft_config_loaded", False):
        reasons.append("adapters are loaded: merge them into the weights first")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        reasons.append("its weights are quantised")
    if not reasons:
        reasons += _model_problems(model)
    return [*reasons, *number_problems(model, "; model.float() makes them float32")]


def _model_problems(model: Any) -> Iterator[str]:
    """What differs from a model built anew from the configuration, and a rotary that is not fixed or not whole."""
    try:
        with torch.device("meta"):
            plain = type(model)(model.config)
    except Exception as error:
        yield f"no {type(model).__name__} can be made from its configuration: {' '.join(str(error).split()):.200}"
        return
    yield from structure_problems(model, plain, WATCHERS)
    for name, part in model.named_modules():
        if getattr(part, "config", model.config) is not model.config:
            yield f"{name}: its config is not the model's"
    heads, kv_heads = model.config.num_attention_heads, getattr(model.config, "num_key_value_heads", 1)
    if heads % kv_heads:
        yield f"{heads} heads cannot share {kv_heads} keys"
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None or not isinstance(getattr(rotary, "inv_freq", None), torch.Tensor):
        if hasattr(plain.base_model, "rotary_emb"):
            yield "rotary_emb.inv_freq: missing, the rotary frequencies were configured"
        return
    config = model.config
    size, turned = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        2 * rotary.inv_freq.numel(),
    )
    partial = config.model_type == "gpt_neox"
    if turned > size or (turned < size and not partial):
        yield f"RoPE turns {turned} coordinates of heads of {size}"
    if partial and turned < size and rotary.attention_scaling != 1:
        yield (
            f"RoPE multiplies the {turned} coordinates that it turns by {rotary.attention_scaling:g}, but not the other "
            f"{size - turned} of a head"
        )


def config_problems(config: Any) -> Iterator[str]:
    """What a configuration asks for that no reading holds."""
    get = lambda name, otherwise=None: getattr(config, name, otherwise)  # noqa: E731
    if get("quantization_config") is not None:
        yield "its weights are quantised (quantization_config)"
    for name in SOFTCAPS:
        if get(name) is not None:
            yield f"soft-capping of logits or scores ({name}={get(name)})"
    for name in EXPERTS:
        if get(name) is not None:
            yield f"mixture of experts ({name}={get(name)})"
    if get("add_cross_attention") or get("is_encoder_decoder"):
        yield "cross attention"
    if get("is_causal", True) is False:
        yield "attention that is not causal (is_causal=False)"
    if get("reorder_and_upcast_attn"):
        yield "scores rounded to float32 (reorder_and_upcast_attn=True): set it to False, it is the same function"
    yield from _window_problems(config)
    activation = get("hidden_act", get("activation_function"))
    if activation is not None and activation not in ACTIVATIONS:
        yield f"the activation {activation!r} is not known; these are: {', '.join(ACTIVATIONS)}"
    yield from _rope_problems(get("rope_parameters"))


WINDOW_BY_LAYER = ("qwen2", "qwen3")
"""Families whose own code asks ``layer_types`` where the window is in force; the others' windows are in force wherever they are set."""


def _window_problems(config: Any) -> Iterator[str]:
    """A sliding window: positions are unbounded under RoPE, so that any window is in force for some sequence."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    other = sorted({kind for kind in kinds or () if kind != "full_attention"})
    if other:
        yield f"layers of type {', '.join(other)} (sliding_window={window})"
    elif window is not None and getattr(config, "model_type", None) not in WINDOW_BY_LAYER:
        yield f"a sliding window of {window} is in force: set config.sliding_window = None if no sequence is longer"


def _rope_problems(parameters: Any) -> Iterator[str]:
    """RoPE whose frequencies depend on the length, or that is not known."""
    if not parameters:
        return
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        yield "RoPE that differs from layer to layer"
        return
    kind = parameters.get("rope_type", "default")
    if kind == "dynamic" or (kind == "longrope" and parameters.get("long_factor") != parameters.get("short_factor")):
        yield f"the frequencies of {kind} RoPE depend on the length of the sequence"
    elif kind not in FIXED_ROPE:
        yield f"RoPE of type {kind!r} is not known; these are: {', '.join(FIXED_ROPE)}"
