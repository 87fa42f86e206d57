"""The writer of our own family, the reader's inverse: a Network becomes a :class:`Transformer`, where one has its class.

Heads are factored to their ranks (``M_h = W_V W_O``), units to rank one (``M_j = up_j down_j^T``); grouped key/value heads
are found again where keys are equal and the values of a group share one column space.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.classes import inner_operator
from anyformer.errors import AnyformerError
from anyformer.network import Branch, Network, Stage
from anyformer.operators import ALiBi, Attention, AverageHard, Causal, Gate, LayerNorm, Norm, Normed
from anyformer.targets.reading import network_class
from anyformer.targets.transformer import Transformer, TransformerConfig


def write_transformer(
    network: Network, token_names: tuple[str, ...] | None = None, threshold: float = 1e-12, bias: bool = True
) -> Transformer | None:
    """The module (float64) of a network, or None where no configuration has its class or a unit has a rank above one.

    ``threshold``: singular values below this share of the largest do not count. The caller compares the outputs: parts of
    the network that the family cannot hold are dropped here and show there.
    """
    config = find_config(network, bias)
    return None if config is None else _Writer(network, config, threshold).module(token_names)


def find_config(network: Network, bias: bool) -> TransformerConfig | None:
    """The configuration, with or without biases, whose class this network has (value and key/value sizes left open), or None."""
    operators = [[inner_operator(b.operator) for b in s.branches] for s in network.stages]
    flat = list(itertools.chain.from_iterable(operators))
    attention = next((op for op in flat if isinstance(op, Attention)), None)
    gate = next((op for op in flat if isinstance(op, Gate)), None)
    norms = [b.operator.norm if isinstance(b.operator, Normed) else b.operator for s in network.stages for b in s.branches]
    norm = next((op for op in norms if isinstance(op, Norm)), None)
    outputs = network.final_readout().shape[1]
    if attention is None or outputs != network.embedding.shape[0]:
        return None
    positions, base = None, 10000.0
    if network.positions is not None:
        positions = "learned"
    elif isinstance(attention.bias, ALiBi):
        positions = "alibi"
    elif attention.rotary is not None:
        positions = "rope"
        if len(attention.rotary.frequencies) > 1:
            base = round(attention.rotary.frequencies[1] ** (-attention.head_dim / 2), 6)
    sizes: dict[str, Any] = dict(
        vocab=outputs,
        heads=attention.heads,
        layers=sum(any(isinstance(op, Attention) for op in ops) for ops in operators),
        head_dim=attention.head_dim,
        features=network.embedding.shape[1] - network.constant,
        causal=isinstance(attention.mask, Causal),
        attention="hard" if isinstance(attention.kernel, AverageHard) else "softmax",
        norm=None if norm is None else ("layer" if isinstance(norm, LayerNorm) else "rms"),
        norm_eps=1e-5 if norm is None else norm.eps,
        mlp=gate.units if gate else 0,
        activation=gate.function if gate else "gelu",
        positions=positions,
        max_length=network.positions.shape[0] if network.positions is not None else None,
        rope_base=base,
    )
    wanted = network.network_class.for_tree().stages
    if bias and not network.constant:
        return None
    for residual, gated, place in itertools.product((True, False), (False, True), ("pre", "post")):
        try:
            config = TransformerConfig(**sizes, bias=bias, residual=residual, gated=gated, norm_position=place)
        except AnyformerError:
            continue
        if network_class(config).for_tree().stages == wanted:
            return config
    return None


class _Writer:
    def __init__(self, network: Network, config: TransformerConfig, threshold: float):
        self.network, self.config, self.threshold = network, config, threshold
        self.dim = config.features

    def module(self, token_names: tuple[str, ...] | None) -> Transformer | None:
        attention = [s for s in self.network.stages if s.network_class().attention is not None]
        size, group = self._value_sizes(attention)
        c = self.config
        self.group = group
        values = {"value_dim": None if size <= c.head_dim else size, "kv_heads": None if group == 1 else c.heads // group}
        self.config = c = TransformerConfig(**{**vars(c), **values})
        module = Transformer(c, token_names=token_names).double()
        stages = iter(self.network.stages)
        with torch.no_grad():
            self.set(module.embedding.weight, self.network.embedding[:, : self.dim])
            if module.positions is not None:
                assert self.network.positions is not None
                self.set(module.positions.weight, self.network.positions[:, : self.dim])
            for block in module.blocks:
                self.attention(block.attention, next(stages))  # type: ignore[arg-type]
                if c.norm and c.norm_position == "post":
                    self.norm(block.attention_norm, next(stages))  # type: ignore[arg-type]
                if c.mlp:
                    if not self.mlp(block.mlp, next(stages)):  # type: ignore[arg-type]
                        return None
                    if c.norm and c.norm_position == "post":
                        self.norm(block.mlp_norm, next(stages))  # type: ignore[arg-type]
            if module.norm is not None:
                self.norm(module.norm, next(stages))
            readout = self.network.final_readout()
            self.linear(module.readout, readout[: self.dim], readout[-1] if self.network.constant else None)
        return module

    def set(self, parameter: Tensor, value: Tensor) -> None:
        parameter.copy_(value)

    def linear(self, layer: nn.Linear, weights: Tensor, bias: Tensor | None = None) -> None:
        """Weights (D, w) and bias (w,) into a torch linear layer."""
        layer.weight.copy_(weights.T)
        if layer.bias is not None:
            layer.bias.zero_()
            if bias is not None:
                layer.bias.copy_(bias)

    def maps(self, branch: Branch) -> tuple[Tensor, Tensor | None]:
        """Feature parts (count, D, D) and constant rows (count, D) of a bank's maps."""
        dense = branch.map.to_dense().double()
        return dense[:, : self.dim, : self.dim], dense[:, -1, : self.dim] if self.network.constant else None

    def reads(self, branch: Branch) -> tuple[Tensor, Tensor | None]:
        """Scaled reads (D, count, w) and biases (count, w) of a bank."""
        assert branch.probes is not None
        op = branch.operator
        own = branch.probes.unflatten(1, (op.count, op.reads))
        if isinstance(op, Normed):
            w = op.inner.reads
            return own[: self.dim, :, :w], own[-1, :, w:] if op.bias else None
        return own[: self.dim], own[-1] if self.network.constant else None

    def shift(self, stage: Stage) -> Tensor | None:
        """All that branches whose rows sum to 1 add from the constant feature: the bias of the output."""
        if not self.network.constant:
            return None
        total = torch.zeros(self.dim, dtype=torch.float64)
        for branch in stage.branches:
            constants = self.maps(branch)[1]
            if branch.operator.stochastic or isinstance(inner_operator(branch.operator), Attention):
                assert constants is not None
                total = total + constants.sum(0)
        return total

    def _value_sizes(self, stages: list[Stage]) -> tuple[int, int]:
        """Width of the values of one key/value head, and how many query heads share one."""
        banks = [self._heads(s) for s in stages]
        for group in sorted((g for g in range(1, self.config.heads + 1) if self.config.heads % g == 0), reverse=True):
            sizes = [max(self._rank(torch.cat(list(m), 1)) for m in self.maps(b)[0].split(group)) for b in banks]
            if group == 1 or (max(sizes) <= self.config.head_dim and all(self._same_keys(b, group) for b in banks)):
                return max(sizes, default=1), group
        raise AssertionError("group 1 always returns")

    def _heads(self, stage: Stage) -> Branch:
        return next(b for b in stage.branches if isinstance(inner_operator(b.operator), Attention))

    def _rank(self, matrix: Tensor) -> int:
        s = torch.linalg.svdvals(matrix)
        return max(1, int((s > 100 * self.threshold * max(float(s[0]), 1e-300)).sum()))

    def _same_keys(self, branch: Branch, group: int) -> bool:
        weights, bias = self.reads(branch)
        d = self.config.head_dim
        keys = weights[:, :, d : 2 * d] if bias is None else torch.cat((weights, bias[None]))[:, :, d : 2 * d]
        heads = keys.unflatten(1, (-1, group))
        return bool((heads - heads[:, :, :1]).abs().max() <= 1e3 * self.threshold * keys.abs().max())

    def attention(self, layer: nn.Module, stage: Stage) -> None:
        c, branch = self.config, self._heads(stage)
        weights, bias = self.reads(branch)
        d, e = c.head_dim, c.value_dim or c.head_dim
        self.linear(layer.W_Q, weights[:, :, :d].flatten(1), None if bias is None else bias[:, :d].flatten())  # type: ignore[arg-type]
        keys, key_bias = weights[:, :: self.group, d : 2 * d], None if bias is None else bias[:: self.group, d : 2 * d].flatten()
        self.linear(layer.W_K, keys.flatten(1), key_bias)  # type: ignore[arg-type]
        left, right = [], []
        for maps in self.maps(branch)[0].split(self.group):
            u, s, v = torch.linalg.svd(torch.cat(list(maps), 1), full_matrices=False)
            rank = min(e, len(s))
            root = s[:rank].sqrt()
            pad = torch.zeros(self.dim, e - rank, dtype=u.dtype)
            left.append(torch.cat((u[:, :rank] * root, pad), 1))
            shared = torch.cat((root[:, None] * v[:rank], torch.zeros(e - rank, v.shape[1], dtype=v.dtype)))
            right += list(shared.split(self.dim, 1))
        self.linear(layer.W_V, torch.cat(left, 1))  # type: ignore[arg-type]
        self.linear(layer.W_O, torch.cat(right), self.shift(stage))  # type: ignore[arg-type]

    def mlp(self, layer: nn.Module, stage: Stage) -> bool:
        """False where a unit has rank above one."""
        banks = [b for b in stage.branches if isinstance(inner_operator(b.operator), Gate)]
        weights, bias = self.reads(banks[0])
        gate = (weights[:, :, 0], None if bias is None else bias[:, 0])
        maps, constants = self.maps(banks[0])
        if not self.config.gated:
            assert constants is not None
            self.linear(layer.up, *gate)  # type: ignore[arg-type]
            self.linear(layer.down, constants, self.shift(stage))  # type: ignore[arg-type]
            return True
        u, s, v = torch.linalg.svd(maps)
        second = s[:, 1].max() if s.shape[1] > 1 else torch.zeros(())
        if float(second) > 1e3 * self.threshold * max(float(s.max()), 1e-300):
            return False
        root = s[:, 0].sqrt()
        up, down = u[:, :, 0] * root[:, None], v[:, 0] * root[:, None]
        if len(banks) > 1:
            constants = self.maps(banks[1])[1]
        up_bias = None
        if self.network.constant and constants is not None and self.config.bias:
            up_bias = (constants * down).sum(1) / down.square().sum(1).clamp(min=1e-300)
        self.linear(layer.gate, *gate)  # type: ignore[arg-type]
        self.linear(layer.up, up.T, up_bias)  # type: ignore[arg-type]
        self.linear(layer.down, down, self.shift(stage))  # type: ignore[arg-type]
        return True

    def norm(self, layer: nn.Module, stage: Stage) -> None:
        branch = next(b for b in stage.branches if isinstance(b.operator, Norm))
        matrix = branch.map.to_dense()[0, : self.dim, : self.dim]
        centring = 1 - 1 / self.dim if isinstance(branch.operator, LayerNorm) and self.dim > 1 else 1.0
        layer.weight.copy_(matrix.diagonal() / centring)  # type: ignore[operator]
        if getattr(layer, "bias", None) is not None:
            shift = self.shift(stage)
            assert shift is not None
            layer.bias.copy_(shift)  # type: ignore[operator]
