"""Readers: a trained module becomes a :class:`Network`, or is refused with every part and reason.

``READERS`` says which reader a class of modules has; here is that of our own family, written in the algebra that all readers
share (:mod:`anyformer.targets.algebra`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.network import Network, Stage
from anyformer.operators import ALiBi, Attention, AverageHard, Bidirectional, Causal, LayerNorm, RMSNorm, Rotary, Softmax
from anyformer.targets.algebra import Affine, Algebra, Gain
from anyformer.targets.checking import number_problems, structure_problems
from anyformer.targets.transformer import ACTIVATIONS, MLP, Block, Transformer, TransformerConfig, alibi_slopes

MOST_LAYERS = 100_000
T = TypeVar("T")

READERS: dict[type[nn.Module] | str, Callable[[Any], Network]] = {}
"""Module type -> reader. A reader of your own is one entry. A type may be given by its full name, so that a library need not be
imported before somebody brings a module of it."""


def registered(table: Mapping[Any, T], module: object) -> T | None:
    """What a table of types (or their full names) holds for a module: for its class, or the nearest class above it."""
    for kind in type(module).__mro__:
        for key in (kind, f"{kind.__module__}.{kind.__qualname__}"):
            if key in table:
                return table[key]
    return None


def read(target: nn.Module | Network) -> Network:
    """The target in the common language, in float64, as a function of its tensors (gradients flow back to the module).

    Raises :class:`OutsideClass` with the list of every part that cannot be simulated exactly, and why.
    """
    if isinstance(target, Network):
        return target
    if not isinstance(target, nn.Module):
        raise AnyformerError(f"a target must be a module or a Network, got {type(target).__name__}")
    reader = registered(READERS, target)
    if reader is not None:
        return reader(target)
    parts = [(name, part) for name, part in target.named_modules() if not list(part.children())]
    reasons = [f"{name or 'the module itself'} ({type(part).__name__}): no reader for this part" for name, part in parts]
    known = ", ".join(kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__ for kind in READERS)
    raise OutsideClass(f"cannot read a {type(target).__name__} (readers: {known})", reasons)


def network_class(target: "nn.Module | Network | NetworkClass | TransformerConfig") -> NetworkClass:
    """The class of anything that has one. A configuration needs no tensors, however large it is."""
    if isinstance(target, NetworkClass):
        return target
    if isinstance(target, TransformerConfig):
        if target.layers > MOST_LAYERS:
            raise AnyformerError(f"a class has at most {MOST_LAYERS} layers, got {target.layers}")
        one, two = (_meta_class(replace(target, layers=n)) for n in (1, 2))
        tail = 2 * len(one.stages) - len(two.stages)  # the final norm, if any; what comes before is a layer
        layer = one.stages[: len(one.stages) - tail]
        return replace(one, stages=layer * target.layers + one.stages[len(layer) :])
    return read(target).network_class


def _meta_class(config: TransformerConfig) -> NetworkClass:
    try:
        with torch.device("meta"):
            return _read_transformer(Transformer(config)).network_class
    except (RuntimeError, OverflowError, TypeError):
        raise AnyformerError(f"sizes of this configuration overflow 64-bit integers: {config}") from None


def _refusals(module: Transformer) -> list[str]:
    """Whatever makes a Transformer something else than what its configuration says."""
    with torch.device("meta"):
        plain = Transformer(module.config, token_names=module.token_names)
    reasons = list(structure_problems(module, plain))
    for name, part in module.named_modules():
        if getattr(part, "config", module.config) != module.config:
            reasons.append(f"{name}: its config is not the transformer's")
        if isinstance(part, MLP) and part.activation is not ACTIVATIONS[module.config.activation]:
            reasons.append(f"{name}: its activation is not the configured {module.config.activation}")
    return [*reasons, *number_problems(module)]


def _read_checked(module: Transformer) -> Network:
    reasons = _refusals(module)
    if reasons:
        raise OutsideClass("this Transformer cannot be simulated exactly", reasons)
    return _read_transformer(module)


def _read_huggingface(model: Any) -> Network:
    from anyformer.targets.huggingface import read_huggingface

    return read_huggingface(model)


READERS[Transformer] = _read_checked
READERS["transformers.modeling_utils.PreTrainedModel"] = _read_huggingface


def _read_transformer(module: Transformer) -> Network:
    c = module.config
    norm = None if c.norm is None else (RMSNorm if c.norm == "rms" else LayerNorm)(c.features, c.norm_eps)
    pre = norm if c.norm_position == "pre" else None
    constant = c.bias or (c.mlp > 0 and not c.gated)
    algebra = Algebra(module.embedding.weight.double(), constant, pre, c.residual)
    stages: list[Stage] = []
    for block in module.blocks:
        assert isinstance(block, Block)
        parts = [(block.attention_norm, _attention(algebra, block, c))]
        if block.mlp is not None:
            parts.append((block.mlp_norm, _mlp(algebra, block, c)))
        for part_norm, stage in parts:
            stages.append(stage)
            if norm is not None and pre is None:
                stages.append(algebra.norm_stage(norm, Gain.of(part_norm), constant))
    if module.norm is not None:
        assert norm is not None
        stages.append(algebra.norm_stage(norm, Gain.of(module.norm), c.bias))
    readout = Affine.of(module.readout)
    kept = constant if module.norm is None else c.bias
    positions = None if module.positions is None else module.positions.weight.double()
    return Network(
        embedding=algebra.with_constant(algebra.like, 1.0),
        positions=None if positions is None else algebra.with_constant(positions, 0.0),
        stages=tuple(stages),
        readout=algebra.columns(readout.weights, readout.bias) if kept else readout.weights,
        constant=constant,
        source=module,
        token_names=module.token_names,
    )


def _attention(algebra: Algebra, block: Block, c: TransformerConfig) -> Stage:
    """The stage of an attention layer."""
    operator = Attention(
        heads=c.heads,
        head_dim=c.head_dim,
        mask=Causal() if c.causal else Bidirectional(),
        kernel=Softmax() if c.attention == "softmax" else AverageHard(),
        bias=ALiBi(tuple(alibi_slopes(c.heads))) if c.positions == "alibi" else None,
        rotary=Rotary.of_base(c.head_dim, c.rope_base) if c.positions == "rope" else None,
    )
    gain = None if block.attention_norm is None else Gain.of(block.attention_norm)
    projections = [Affine.of(getattr(block.attention, name)) for name in ("W_Q", "W_K", "W_V", "W_O")]
    return algebra.stage(algebra.heads(gain, operator, projections))


def _mlp(algebra: Algebra, block: Block, c: TransformerConfig) -> Stage:
    """The stage of an MLP."""
    mlp = block.mlp
    assert mlp is not None
    gain = None if block.mlp_norm is None else Gain.of(block.mlp_norm)
    gate = None if mlp.gate is None else Affine.of(mlp.gate)
    return algebra.stage(algebra.units(gain, c.activation, Affine.of(mlp.up), Affine.of(mlp.down), gate))
