"""The way back: a Network of a Llama-like class becomes a Hugging Face model's folder, which transformers loads as any other.

    per layer   residual + RMSNorm'd heads (causal softmax, RoPE), residual + RMSNorm'd gated units;  a final RMSNorm, a read-out

Weights of norms are folded into the matrices behind them and become ones (the final norm keeps its own), biases of values stand in the
bias of the output: the same function. Maps in a reader's form (low rank) are taken as they are; dense ones are factored. Before anything
is written, transformers' own forward on the new model is compared with the Network.
"""

import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyformer import philox
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.maps import ConstantMap, DiagonalMap, IdentityMap
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Attention, Causal, Gate, Identity, Normed, RMSNorm, Softmax
from anyformer.storage import holds_ours
from anyformer.targets.huggingface.families import ACTIVATIONS, float64_islands, import_transformers
from anyformer.targets.huggingface.folders import quiet
from anyformer.targets.huggingface.ropes import NONE, rope_options

NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"} | {
    ours: theirs for theirs, ours in ACTIVATIONS.items() if ours not in ("silu", "gelu", "gelu_tanh")
}
"""Our name -> transformers'."""

AGREES = {torch.float64: 1e-6, torch.float32: 1e-4}
"""dtype of a network's numbers -> largest relative error of the written model; more means that it is not the network. The ranks of dense
maps are decided at the same precision."""


@torch.no_grad()
def to_huggingface(network: Network) -> Any:
    """The transformers model (float64) of a Network, its logits checked against the Network's."""
    transformers = import_transformers()
    agrees, network = AGREES.get(network.embedding.dtype, 1e-4), network.to(torch.float64)
    problems = list(_problems(network))
    if problems:
        raise OutsideClass(NONE, problems)
    writer = _Writer(network, agrees)
    with quiet(transformers):
        model = writer.model(transformers)
    tokens = torch.from_numpy(philox.integers(0, 0, (2, 12), network.embedding.shape[0]))
    with float64_islands(True):
        got = model(input_ids=tokens, use_cache=False).logits
    expected = network.run(tokens)
    error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    if not error <= agrees:
        raise AnyformerError(
            f"{NONE}: the nearest one is off by {error:.1e} of the largest logit "
            "(its maps have larger ranks, or its RoPE is of another kind)"
        )
    return model.eval()


def _is_residual(branch: Branch) -> bool:
    return isinstance(branch.operator, Identity) and isinstance(branch.map, IdentityMap)


def _problems(network: Network):
    """Every part of a network that no Llama-like model has."""
    if network.positions is not None:
        yield "it has a table of positions"
    stages = network.stages
    if len(stages) < 3 or len(stages) % 2 == 0:
        yield f"{len(stages)} stages are not attention and MLP in turn and a final norm"
        return
    norms, heads, units = set(), set(), set()
    for s, stage in enumerate(stages[:-1]):
        where, operators = f"stage {s + 1}", [b.operator for b in stage.branches[1:]]
        if not _is_residual(stage.branches[0]):
            yield f"{where} has no residual"
        for op in operators:
            if not isinstance(op, Normed):
                yield f"{where}: {type(op).__name__} without a norm before it"
            elif s % 2 == 0 and not isinstance(op.inner, Attention):
                yield f"{where}: {type(op.inner).__name__} where attention was expected"
            elif s % 2 and not isinstance(op.inner, Gate):
                yield f"{where}: {type(op.inner).__name__} where gated units were expected"
            else:
                norms.add(op.norm)
                (units if s % 2 else heads).add(op.inner)
        maps = [b.map for b in stage.branches[1:]]
        if s % 2 == 0 and len(maps) != 1:
            yield f"{where}: {len(maps)} banks where one of heads was expected"
        if s % 2 and (not maps or isinstance(maps[0], ConstantMap) or any(not isinstance(m, ConstantMap) for m in maps[1:])):
            yield f"{where}: its units are not gated"
    last = stages[-1].branches
    if len(last) != 1 or not isinstance(last[0].operator, RMSNorm):
        yield "it does not end in an RMSNorm"
    else:
        norms.add(last[0].operator)
    for what, kinds in (("norms", norms), ("heads", heads), ("units", units)):
        if len(kinds) > 1:
            yield f"its {what} differ from layer to layer"
    for norm in norms:
        if not isinstance(norm, RMSNorm):
            yield f"{type(norm).__name__} in place of RMSNorm"
    for op in heads:
        plain = Attention(op.heads, op.head_dim, Causal(), Softmax(), op.scale, None, op.rotary, op.qk_norm)
        if op != plain:
            yield f"attention of another kind than causal softmax with RoPE: {op}"
        if op.qk_norm is not None and any(n.eps != op.qk_norm for n in norms):
            yield "its q/k norm has another epsilon than its norms"
    for op in units:
        if op.function not in NAMES:
            yield f"the function {op.function!r} is no activation of transformers"


class _Writer:
    """A network's numbers in the places of a Llama-like model."""

    def __init__(self, network: Network, agrees: float):
        self.agrees = agrees
        self.network, self.dim = network, network.embedding.shape[1] - network.constant
        self.attention_stages, self.mlp_stages = network.stages[:-1:2], network.stages[1:-1:2]
        self.operator: Attention = self.attention_stages[0].branches[1].operator.inner  # type: ignore[attr-defined]
        self.final: RMSNorm = network.stages[-1].branches[0].operator  # type: ignore[assignment]
        self.values = [self._values(s.branches[1]) for s in self.attention_stages]
        kv = {v[2] for v in self.values}
        self.kv_heads = kv.pop() if len(kv) == 1 else self.operator.heads

    def model(self, transformers: Any) -> Any:
        """The model, float64."""
        op, gate = self.operator, self.mlp_stages[0].branches[1].operator.inner  # type: ignore[attr-defined]
        readout = self.network.final_readout()[: self.dim]
        tied = torch.equal(self.network.embedding[:, : self.dim].T, readout)
        attention_bias = any(self._has_bias(s) for s in self.attention_stages)
        mlp_bias = any(self._has_bias(s) for s in self.mlp_stages)
        kind = "Qwen3" if op.qk_norm is not None else "Llama"
        if kind == "Llama" and self.dim % op.heads and not (attention_bias or mlp_bias):
            kind = "Mistral"  # Llama's configuration asks for features that heads divide
        if mlp_bias and kind == "Qwen3":
            raise OutsideClass(NONE, ["a q/k norm together with biases of an MLP"])
        options = {"Llama": dict(attention_bias=attention_bias, mlp_bias=mlp_bias), "Mistral": dict(sliding_window=None)}
        options["Qwen3"] = dict(attention_bias=attention_bias)
        rope, self.rope_scaling = rope_options(op, self.network.source)
        try:
            config = getattr(transformers, f"{kind}Config")(
                vocab_size=self.network.embedding.shape[0],
                hidden_size=self.dim,
                intermediate_size=gate.units,
                num_hidden_layers=len(self.attention_stages),
                num_attention_heads=op.heads,
                num_key_value_heads=self.kv_heads,
                head_dim=op.head_dim,
                hidden_act=NAMES[gate.function],
                rms_norm_eps=self.final.eps,
                tie_word_embeddings=tied,
                **rope,
                **_tokens_of(self.network),
                **options[kind],
            )
            model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
        except (ValueError, RuntimeError, TypeError) as error:
            if isinstance(error, AnyformerError):
                raise
            reasons = [f"transformers refuses its sizes: {' '.join(str(error).split()):.200}"]
            raise OutsideClass(NONE, reasons) from None
        model.model.embed_tokens.weight.copy_(self.network.embedding[:, : self.dim])
        for layer, heads, units, values in zip(
            model.model.layers, self.attention_stages, self.mlp_stages, self.values, strict=True
        ):
            self.attention(layer.self_attn, heads, values)
            self.mlp(layer.mlp, units)
        model.model.norm.weight.copy_(self._final_weight())
        if not tied:
            model.lm_head.weight.copy_(readout.T)
        return model

    def reads(self, branch: Branch) -> Tensor:
        """Probe columns (D or D + 1, count, reads)."""
        assert branch.probes is not None
        return branch.probes.unflatten(1, (branch.operator.count, branch.operator.reads))

    def _has_bias(self, stage: Stage) -> bool:
        dense = any(b.map.kind == "general" and b.map.rank is None for b in stage.branches)
        noise = self.agrees * float(self.network.embedding.abs().max()) if dense else 0.0
        return bool((self._shift(stage).abs() > noise).any()) or any(b.operator.bias for b in stage.branches[1:])  # type: ignore[attr-defined]

    def attention(self, layer: Any, stage: Stage, values: tuple[Tensor, Tensor, int]) -> None:
        branch, op, d = stage.branches[1], self.operator, self.operator.head_dim
        reads, group = self.reads(branch), op.heads // self.kv_heads
        own = reads[: self.dim]
        turned = (1.0 if op.scale is None else op.scale * math.sqrt(d)) / self.rope_scaling**2
        if op.qk_norm is not None:
            fixed = reads[-1, :, 2 * d : 4 * d]
            if float((fixed - fixed[:1]).abs().max()) > self.agrees * float(fixed.abs().max()):
                raise OutsideClass(NONE, ["weights of a q/k norm that differ between heads"])
            layer.q_norm.weight.copy_(fixed[0, :d] * turned)
            layer.k_norm.weight.copy_(fixed[0, d:])
            turned = 1.0
        layer.q_proj.weight.copy_((own[:, :, :d] * turned).flatten(1).T)
        layer.k_proj.weight.copy_(own[:, ::group, d : 2 * d].flatten(1).T)
        left, right, kv_heads = values
        left = left.repeat_interleave(self.kv_heads // kv_heads, 0)  # where layers share differently, every head has its own
        layer.v_proj.weight.copy_(_padded(left, d, 2).permute(0, 2, 1).flatten(0, 1))
        layer.o_proj.weight.copy_(_padded(right, d, 1).flatten(0, 1).T)
        if layer.o_proj.bias is not None:
            normed: Normed = branch.operator  # type: ignore[assignment]
            bias = reads[-1, :, op.reads :] if normed.bias else reads.new_zeros(op.heads, 2 * d)
            layer.q_proj.bias.copy_((bias[:, :d] * (1.0 if op.qk_norm is not None else turned)).flatten())
            layer.k_proj.bias.copy_(bias[::group, d:].flatten())
            layer.v_proj.bias.zero_()
            layer.o_proj.bias.copy_(self._shift(stage))

    def mlp(self, layer: Any, stage: Stage) -> None:
        gated, *constants = stage.branches[1:]
        reads, m = self.reads(gated), gated.map
        if m.rank == 1:
            up, down = m.tensors()[0][:, : self.dim, 0], m.tensors()[1][:, 0, : self.dim]
        else:
            u, s, v = torch.linalg.svd(m.to_dense()[:, : self.dim, : self.dim], full_matrices=False)
            up, down = u[:, :, 0] * s[:, :1].sqrt(), v[:, 0] * s[:, :1].sqrt()
        layer.gate_proj.weight.copy_(reads[: self.dim, :, 0].T)
        layer.up_proj.weight.copy_(up)
        layer.down_proj.weight.copy_(down.T)
        if layer.down_proj.bias is None:
            return
        normed: Normed = gated.operator  # type: ignore[assignment]
        layer.gate_proj.bias.copy_(reads[-1, :, 1] if normed.bias else torch.zeros(m.count))
        layer.up_proj.bias.zero_()
        if constants:  # rows up_bias_j down_j
            rows = sum(b.map.scaled_rows()[:, : self.dim] for b in constants)  # type: ignore[attr-defined]
            layer.up_proj.bias.copy_((rows * down).sum(1) / down.square().sum(1).clamp(min=1e-300))
        layer.down_proj.bias.copy_(self._shift(stage))

    def _shift(self, stage: Stage) -> Tensor:
        """What a stage adds to every token: the residual's shift, and what dense heads read from the constant feature (their rows
        sum to 1)."""
        shift = stage.branches[0].map.shift  # type: ignore[attr-defined]
        total = torch.zeros(self.dim, dtype=torch.float64) if shift is None else shift[: self.dim]
        branch = stage.branches[1]
        if self.network.constant and branch.map.rank is None and isinstance(branch.operator.inner, Attention):  # type: ignore[attr-defined]
            total = total + branch.map.to_dense()[:, -1, : self.dim].sum(0)
        return total

    def _values(self, branch: Branch) -> tuple[Tensor, Tensor, int]:
        """Left factors (kv heads, D, r), right factors (heads, r, D) of the value maps, and the number of kv heads."""
        m, heads = branch.map, self.operator.heads
        if m.rank is not None and m.rank <= self.operator.head_dim:
            left, right = m.tensors()
            kv_heads = branch.kv_heads or heads
            return left[:: heads // kv_heads, : self.dim], right[..., : self.dim], kv_heads
        dense = m.to_dense()[:, : self.dim, : self.dim]
        d = self.operator.head_dim
        keys = self.reads(branch)[:, :, d : 2 * d]
        for group in (g for g in range(heads, 0, -1) if heads % g == 0):
            stacks = [torch.cat(list(part), 1) for part in dense.split(group)]
            shared = keys.unflatten(1, (-1, group))
            off = float((shared - shared[:, :, :1]).abs().max())
            split = [torch.linalg.svd(stack, full_matrices=False) for stack in stacks]
            lost = max(float(s[d:].max()) / max(float(s[0]), 1e-300) if len(s) > d else 0.0 for _, s, _ in split)
            if group == 1 or (off <= self.agrees * float(keys.abs().max()) and lost <= self.agrees):
                left = [u[:, :d] * s[:d].sqrt() for u, s, _ in split]
                right = [list((s[:d].sqrt()[:, None] * v[:d]).split(self.dim, 1)) for _, s, v in split]
                return torch.stack(left), torch.stack([r for part in right for r in part]), heads // group
        raise AssertionError("one head a group always returns")

    def _final_weight(self) -> Tensor:
        m = self.network.stages[-1].branches[0].map
        return m.weights if isinstance(m, DiagonalMap) else m.to_dense()[0, : self.dim, : self.dim].diagonal()


def _padded(factor: Tensor, size: int, axis: int) -> Tensor:
    """Zeros up to ``size``: a head may hold fewer values than queries."""
    shape = list(factor.shape)
    shape[axis] = size - shape[axis]
    return torch.cat((factor, factor.new_zeros(shape)), axis) if shape[axis] > 0 else factor


def _tokens_of(network: Network) -> dict[str, Any]:
    """What the source's configuration says of special tokens, where there is one."""
    config = getattr(network.source, "config", None)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(config, name, None) for name in names}


def check_free(folder: Path) -> None:
    """Raise where a folder holds something else than a model of this kind."""
    if folder.exists() and not folder.is_dir():
        raise AnyformerError(f"{folder} is a file, a folder was expected; choose another name")
    if folder.exists() and {p.name for p in folder.iterdir()} - {"config.json", "generation_config.json", "model.safetensors"}:
        raise AnyformerError(f"{folder} already holds something that is not a model of transformers alone; choose another folder")
    if folder.is_dir() and holds_ours(folder):
        raise AnyformerError(f"{folder} already holds something else than a model of transformers; choose another folder")


def save(model: Any, folder: Path) -> None:
    """Write beside the folder, then put in place at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with quiet(import_transformers()):
            model.save_pretrained(fresh, max_shard_size="1000GB")
        mask = os.umask(0)
        os.umask(mask)
        for path, mode in ((fresh, 0o777), *((file, 0o666) for file in fresh.iterdir())):
            path.chmod(mode & ~mask)
        old = None
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            os.replace(folder, old)
        os.replace(fresh, folder)
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
