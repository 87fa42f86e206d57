"""Readers: a trained module becomes a :class:`Network`, or is refused with every part and reason.

The algebra (x: features, r: the norm's scale, C: the centring matrix of LayerNorm, g, b: its weight and bias):

* pre-norm attention: ``q = r (x C g W_Q) + (b W_Q + b_Q)``: scaled columns, and bias columns that read the constant feature;
* the value's bias ``b W_V + b_V`` needs no branch, since rows of a pattern sum to 1: it moves, through W_O, into the shift of
  the residual branch (or of the branch that carries the constant where there is no residual);
* a gated unit is ``diag(act(z_j))`` with the map ``up_j down_j^T``; behind a norm its up-bias is a second branch, unscaled;
* a plain unit is ``diag(act(z_j))`` on the constant feature, ``e_const w2_j^T``;
* a post-norm is a stage of its own: a norm branch and a branch that carries the constant.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.errors import AnyformerError, OutsideClass
from anyformer.maps import ConstantMap, DiagonalMap, IdentityMap, LowRankMap
from anyformer.network import Branch, Network, NetworkClass, Stage
from anyformer.operators import (
    ALiBi,
    Attention,
    AverageHard,
    Bidirectional,
    Causal,
    Gate,
    Identity,
    LayerNorm,
    Normed,
    Operator,
    RMSNorm,
    Rotary,
    Softmax,
)
from anyformer.targets.transformer import ACTIVATIONS, MLP, Block, Transformer, TransformerConfig, alibi_slopes

MOST_LAYERS = 100_000

READERS: dict[type[nn.Module], Callable[[Any], Network]] = {}
"""Module type -> reader. A reader of your own is one entry."""


def read(target: nn.Module | Network) -> Network:
    """The target in the common language, in float64, as a function of its tensors (gradients flow back to the module).

    Raises :class:`OutsideClass` with the list of every part that cannot be simulated exactly, and why.
    """
    if isinstance(target, Network):
        return target
    if not isinstance(target, nn.Module):
        raise AnyformerError(f"a target must be a module or a Network, got {type(target).__name__}")
    for kind in type(target).__mro__:
        if kind in READERS:
            return READERS[kind](target)
    parts = [(name, part) for name, part in target.named_modules() if not list(part.children())]
    reasons = [f"{name or 'the module itself'} ({type(part).__name__}): no reader for this part" for name, part in parts]
    known = ", ".join(kind.__name__ for kind in READERS)
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
        plain = Transformer(module.config)
    parts, configured = (dict(m.named_modules(remove_duplicate=False)) for m in (module, plain))
    reasons = []
    for name, expected in configured.items():
        if name not in parts and name.rpartition(".")[0] in parts:
            reasons.append(f"{name}: missing, a {type(expected).__name__} was configured")
    for name, part in parts.items():
        where, expected = name or "the module itself", configured.get(name)
        if expected is None:
            reasons.append(f"{where} ({type(part).__name__}): not a part of the configured transformer")
        elif type(part) is not type(expected):
            reasons.append(f"{where}: a {type(part).__name__} stands in place of {type(expected).__name__}")
        else:
            for option in ("eps", "max_norm"):
                got, wanted = getattr(part, option, None), getattr(expected, option, None)
                if got != wanted:
                    reasons.append(f"{where}: its {option} is {got}, the configured one is {wanted}")
            if getattr(part, "config", module.config) != module.config:
                reasons.append(f"{where}: its config is not the transformer's")
        own = set() if expected is None else set(vars(expected))
        for replaced in sorted(k for k in vars(part) if k not in own and callable(getattr(type(part), k, None))):
            reasons.append(f"{where}: its {replaced} was replaced")
        if part._forward_hooks or part._forward_pre_hooks:
            reasons.append(f"{where}: forward hooks may change what it computes")
        if isinstance(part, MLP) and part.activation is not ACTIVATIONS[module.config.activation]:
            reasons.append(f"{where}: its activation is not the configured {module.config.activation}")
    dtypes = {p.dtype for p in module.parameters()}
    if not dtypes <= {torch.float32, torch.float64} or len(dtypes) > 1:
        reasons.append(f"parameters must all be float32 or all float64, got {', '.join(sorted(map(str, dtypes)))}")
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, expected in plain.named_parameters():
        got = parameters.get(name)
        if got is None and name.rpartition(".")[0] in parts:
            reasons.append(f"{name}: missing, a parameter of shape {tuple(expected.shape)} was configured")
        elif got is not None and got.shape != expected.shape:
            reasons.append(f"{name} has shape {tuple(got.shape)}, the configured one {tuple(expected.shape)}")
    known = dict(plain.named_parameters())
    reasons += [f"{name}: a parameter that the configuration does not have" for name in parameters if name not in known]
    for name, parameter in module.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            reasons.append(f"{name} holds NaN or infinite weights")
    return reasons


def _read_checked(module: Transformer) -> Network:
    reasons = _refusals(module)
    if reasons:
        raise OutsideClass("this Transformer cannot be simulated exactly", reasons)
    return replace(_read_transformer(_in_float64(module)), source=module)


def _in_float64(module: Transformer) -> Transformer:
    """The same module with every parameter replaced by its float64 value (still a function of the parameter): what the reader
    multiplies, norms into maps, is then as exact as the path products."""
    with torch.device("meta"):
        twin = Transformer(module.config, token_names=module.token_names)
    for name, parameter in module.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = twin.get_submodule(path)
        del owner._parameters[leaf]
        setattr(owner, leaf, parameter.double())
    return twin


READERS[Transformer] = _read_checked


def _read_transformer(module: Transformer) -> Network:
    c = module.config
    reader = _Reader(c)
    embedding, positions = module.embedding.weight, None if module.positions is None else module.positions.weight
    stages: list[Stage] = []
    for block in module.blocks:
        assert isinstance(block, Block)
        parts = [(block.attention_norm, reader.attention(block))]
        if block.mlp is not None:
            parts.append((block.mlp_norm, reader.mlp(block)))
        for norm, stage in parts:
            stages.append(stage)
            if c.norm and c.norm_position == "post":
                stages.append(reader.norm_stage(norm, reader.constant))
    if module.norm is not None:
        stages.append(reader.norm_stage(module.norm, c.bias))
    readout = module.readout.weight.T
    if c.bias:
        readout = torch.cat((readout, module.readout.bias[None]))
    elif reader.constant and module.norm is None:
        readout = torch.cat((readout, readout.new_zeros(1, c.vocab)))
    return Network(
        embedding=reader.with_constant(embedding, 1.0),
        positions=None if positions is None else reader.with_constant(positions, 0.0),
        stages=tuple(stages),
        readout=readout,
        constant=reader.constant,
        source=module,
        token_names=module.token_names,
    )


class _Reader:
    """One configuration's algebra. ``constant``: whether the stream needs the feature that is always 1."""

    def __init__(self, c: TransformerConfig):
        self.c = c
        self.constant = c.bias or (c.mlp > 0 and not c.gated)
        self.pre = c.norm is not None and c.norm_position == "pre"

    def with_constant(self, table: Tensor, value: float) -> Tensor:
        """Append the constant feature's column."""
        return torch.cat((table, table.new_full((table.shape[0], 1), value)), 1) if self.constant else table

    def columns(self, weights: Tensor, last: Tensor | None = None) -> Tensor:
        """Columns (D, w) as columns of the stream: ``last`` (w,) is what the constant feature contributes (default 0)."""
        if not self.constant:
            return weights
        return torch.cat((weights, (weights.new_zeros(weights.shape[1]) if last is None else last)[None]))

    def rows(self, weights: Tensor) -> Tensor:
        """Rows (..., D) as rows of the stream, writing nothing into the constant feature."""
        return torch.cat((weights, weights.new_zeros(*weights.shape[:-1], 1)), -1) if self.constant else weights

    def norm_op(self) -> RMSNorm | LayerNorm:
        return (RMSNorm if self.c.norm == "rms" else LayerNorm)(self.c.features, self.c.norm_eps)

    def weigh(self, norm: nn.Module, linear: Tensor) -> tuple[Tensor, Tensor | None]:
        """``C g W`` and ``b W`` for a linear map W (D, w) behind a norm."""
        weighted = norm.weight[:, None] * linear  # type: ignore[index, operator]
        if self.c.norm == "layer":
            weighted = weighted - weighted.mean(0, keepdim=True)
        bias = getattr(norm, "bias", None)
        return weighted, None if bias is None else bias @ linear

    def behind(self, norm: nn.Module | None, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """What a linear layer (behind its pre-norm, if any) reads: scaled columns (D, w), and its bias (w,) or None."""
        weights, bias = linear.weight.T, linear.bias
        if self.pre and norm is not None:
            weights, extra = self.weigh(norm, weights)
            bias = bias if extra is None else bias + extra
        return weights, bias

    def reads(self, parts: list[tuple[Tensor, Tensor | None]]) -> Tensor:
        """Own probe columns of a bank: per branch all scaled columns, then (behind a norm, with biases) all bias columns.

        ``parts``: weights (D, count, w) and biases (count, w).
        """
        weights = torch.cat([w for w, _ in parts], -1)
        if not self.c.bias:
            return self.columns(weights.flatten(1))
        bias = torch.cat([b for _, b in parts if b is not None], -1)
        if not self.pre:
            return self.columns(weights.flatten(1), bias.flatten())
        scaled = torch.cat((weights, torch.zeros_like(weights)), -1)
        constant = torch.cat((torch.zeros_like(bias), bias), -1)
        return self.columns(scaled.flatten(1), constant.flatten())

    def wrap(self, operator: Operator, scale_values: bool = True) -> Operator:
        """Behind the pre-norm, if there is one."""
        return Normed(operator, self.norm_op(), self.c.bias, scale_values) if self.pre else operator

    def stage(self, branches: tuple[Branch, ...], like: Tensor) -> Stage:
        """Branches, behind the pre-norm if there is one: its columns are the features."""
        return Stage(branches, self.features(like), "features") if self.pre else Stage(branches)

    def features(self, like: Tensor) -> Tensor:
        """Probe columns that read the D features."""
        return self.columns(torch.eye(self.c.features, dtype=like.dtype, device=like.device))

    def carrier(self, shift: Tensor | None, like: Tensor) -> tuple[Branch, ...]:
        """The residual branch with a bias moved in; without residual, the branch that carries constant and bias, if any."""
        width = self.c.features + self.constant
        if self.c.residual:
            return (Branch(Identity(), None, IdentityMap(width, None if shift is None else self.rows(shift))),)
        if not self.constant:
            return ()
        shift = like.new_zeros(self.c.features) if shift is None else shift
        return (self.constant_branch(shift),)

    def constant_branch(self, row: Tensor) -> Branch:
        row = torch.cat((row, row.new_ones(1)))
        return Branch(Identity(), None, ConstantMap(self.c.features + 1, row[None]))

    def attention(self, block: Block) -> Stage:
        """One stage: the residual, and H heads reading [query, key] with maps W_V W_O."""
        c, a = self.c, block.attention
        e, group = c.value_dim or c.head_dim, c.heads // (c.kv_heads or c.heads)

        def per_head(linear: nn.Linear, size: int, repeat: int) -> tuple[Tensor, Tensor | None]:
            weights, bias = self.behind(block.attention_norm, linear)
            weights = weights.unflatten(1, (-1, size)).repeat_interleave(repeat, 1)
            return weights, None if bias is None else bias.unflatten(0, (-1, size)).repeat_interleave(repeat, 0)

        query, key = per_head(a.W_Q, c.head_dim, 1), per_head(a.W_K, c.head_dim, group)
        value, value_bias = per_head(a.W_V, e, group)
        out = a.W_O.weight.T.unflatten(0, (-1, e))
        shift = None
        if c.bias:
            assert value_bias is not None
            shift = torch.einsum("he,hed->d", value_bias, out) + a.W_O.bias
        left = self.columns(value.flatten(1)).unflatten(1, (-1, e)).permute(1, 0, 2)
        operator = Attention(
            heads=c.heads,
            head_dim=c.head_dim,
            mask=Causal() if c.causal else Bidirectional(),
            kernel=Softmax() if c.attention == "softmax" else AverageHard(),
            bias=ALiBi(tuple(alibi_slopes(c.heads))) if c.positions == "alibi" else None,
            rotary=Rotary.of_base(c.head_dim, c.rope_base) if c.positions == "rope" else None,
        )
        maps = LowRankMap(left, self.rows(out))
        heads = Branch(self.wrap(operator), self.reads([query, key]), maps, kv_heads=c.kv_heads if group > 1 else None)
        return self.stage((*self.carrier(shift, out), heads), out)

    def mlp(self, block: Block) -> Stage:
        """One stage: the residual, and r units; see the module's text for plain and gated ones."""
        c, mlp, norm = self.c, block.mlp, block.mlp_norm
        assert mlp is not None
        down = self.rows(mlp.down.weight.T)

        def units(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
            weights, bias = self.behind(norm, linear)
            return weights[..., None], None if bias is None else bias[..., None]

        gate, width = Gate(c.mlp, c.activation), c.features + self.constant
        reads = self.reads([units(mlp.up if mlp.gate is None else mlp.gate)])
        if mlp.gate is None:
            banks = [Branch(self.wrap(gate, scale_values=False), reads, ConstantMap(width, down))]
        else:
            up, up_bias = self.behind(norm, mlp.up)
            left = self.columns(up, None if self.pre else up_bias).T[..., None]
            banks = [Branch(self.wrap(gate), reads, LowRankMap(left, down[:, None]))]
            if self.pre and up_bias is not None:
                banks.append(Branch(self.wrap(gate, scale_values=False), reads, ConstantMap(width, up_bias[:, None] * down)))
        return self.stage((*self.carrier(mlp.down.bias, mlp.down.weight), *banks), down)

    def norm_stage(self, norm: nn.Module | None, keep_constant: bool) -> Stage:
        """Post-norm or final norm: the norm branch, and the constant branch with the norm's bias."""
        assert norm is not None
        weight: Tensor = norm.weight  # type: ignore[assignment]
        width = self.c.features + self.constant
        weigh = DiagonalMap(weight, width, self.c.features + keep_constant, centred=self.c.norm == "layer")
        branches = [Branch(self.norm_op(), self.features(weight), weigh, reads="features")]
        if keep_constant:
            bias = getattr(norm, "bias", None)
            branches.insert(0, self.constant_branch(weight.new_zeros(self.c.features) if bias is None else bias))
        return Stage(tuple(branches))
