"""Compiled programs for TransformerLens: a configuration and a state dict for ``TransformerBridge.boot_native``.

    export = to_transformer_bridge(compiled)
    bridge = TransformerBridge.boot_native(export.config)
    bridge.load_state_dict(export.state_dict)
    export.decode(bridge(export.encode(tokens)))

That model is a standard one: softmax heads without a sink, one mask for all heads, ReLU units, no norm, a read-out without bias. So

    sink           one more token, BOS, before the input. Its stream is one coordinate of its own and 0 else, and stays so: its keys and values
                   are 0 (the sink), its own query sees itself alone (score 40), and its ReLU units are at 0.
    biases         weights of a coordinate that is 1 at every token but BOS
    masks          by position: where heads differ, one coordinate a position, and a score of -1e6 for keys that a query may not see
    erasing        -x = relu(-x) - relu(x)
    read-out       one logit a value v: 2 v x - v^2, largest for the value nearest to the output x (v: the code of values that are no numbers)

Programs must be compiled with ``attention="softmax"`` and ``mode="standard"``; everything that has no place there is named.
"""

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.errors import AnyformerError, OutsideClass
from anyformer.rasp.compiled import CompiledProgram, Outputs
from anyformer.rasp.module import RaspAttention, RaspMLP, RaspModule, to_module
from anyformer.rasp.sets import Reals

ALONE, NEVER = 40.0, -1e6
"""The scores of BOS with itself, and of keys that a query may not see."""


@dataclass(frozen=True, eq=False)
class BridgeExport:
    """``config`` (a dict for ``boot_native``), ``state_dict``, the vocabulary (BOS is the id after it), and what the logits mean."""

    config: dict[str, Any]
    state_dict: dict[str, Tensor]
    vocab: tuple[Any, ...]
    outputs: Outputs

    def encode(self, tokens: List[Any]) -> Int[Tensor, "1 n"]:
        """BOS and the tokens, as ids."""
        ids = {token: i for i, token in enumerate(self.vocab)}
        unknown = [token for token in tokens if token not in ids]
        if unknown or not 1 <= len(tokens) < self.config["n_ctx"]:
            known = ", ".join(map(repr, self.vocab[:20]))
            raise AnyformerError(f"1 to {self.config['n_ctx'] - 1} tokens of {known} expected, got {list(tokens)!r:.80}")
        return torch.tensor([[len(self.vocab), *(ids[token] for token in tokens)]])

    def decode(self, logits: Float[Tensor, "1 n out"]) -> list[Any]:
        """The values at the tokens; BOS has none. Real outputs are the only logit."""
        after = logits[0, 1:]
        if not self.outputs.values:
            return after[:, 0].tolist()
        return [self.outputs.values[i] for i in after.argmax(-1).tolist()]


def to_transformer_bridge(compiled: CompiledProgram) -> BridgeExport:
    """The export of a program compiled with ``attention="softmax"`` and ``mode="standard"``, in its dtype. A value that is undefined on an
    input is not reported there. Raises :class:`OutsideClass` with everything that such a model does not have."""
    if not isinstance(compiled, CompiledProgram):
        raise AnyformerError(f"to_transformer_bridge needs a compiled program, got {type(compiled).__name__}")
    module = to_module(compiled)
    problems = list(_problems(compiled, module))
    if problems:
        raise OutsideClass("this program has no form as a standard softmax-ReLU transformer", problems)
    assert not isinstance(compiled.vocab, Reals)
    attentions = [block.attn for block in module.blocks if block.attn is not None]
    n, d = module.pos_embed.W_pos.shape
    whole = _whole_mask(attentions, n)
    masks = whole is None
    width = d + 2 + (n if masks else 0)
    mlps = [None if block.mlp is None else _relu_units(block.mlp) for block in module.blocks]
    config = {
        "n_layers": max(1, len(module.blocks)),
        "d_model": width,
        "n_heads": max((len(a.W_Q) for a in attentions), default=1),
        "d_head": max((max(a.W_Q.shape[2] + 1 + (n if masks else 0), a.W_V.shape[2]) for a in attentions), default=1),
        "d_mlp": max((units[0].shape[1] for units in mlps if units is not None), default=1),
        "d_vocab": len(compiled.vocab) + 1,
        "d_vocab_out": max(1, len(compiled.outputs.values)),
        "n_ctx": n + 1,
        "act_fn": "relu",
        "attention_dir": "causal" if whole == "causal" else "bidirectional",
        "normalization_type": None,
        "init_weights": False,
    }
    readout = _readout(compiled, module, width).T
    state = _embeddings(module, width, masks) | {"unembed.weight": readout, "unembed.bias": readout.new_zeros(len(readout))}
    for layer in range(config["n_layers"]):
        block = module.blocks[layer] if len(module.blocks) else None
        state |= _attention(None if block is None else block.attn, f"blocks.{layer}.attn.", config, readout, n, masks)
        state |= _mlp(mlps[layer] if mlps else None, f"blocks.{layer}.mlp.", config, readout)
    return BridgeExport(config, {name: t.detach().clone() for name, t in state.items()}, compiled.vocab, compiled.outputs)


def _problems(compiled: CompiledProgram, module: RaspModule) -> Iterator[str]:
    if isinstance(compiled.vocab, Reals):
        yield "real tokens are no rows of an embedding"
    hard = any(block.attn is not None and bool(block.attn.hard.any()) for block in module.blocks)
    if hard:
        yield "average-hard heads: compile with attention='softmax'"
    names = {name for block in module.blocks if block.mlp is not None for name in _other_units(block.mlp)}
    yield from (
        f"{name} units: {'compile with mode=' + repr('standard') if name == 'step' else 'no ReLU units'}"
        for name in sorted(names)
    )


def _forms(mlp: RaspMLP, j: int) -> tuple[Tensor, Tensor]:
    """The gate and the value of unit j as columns (d + 1,) over the stream and the constant."""
    gate = torch.cat((mlp.W_in[:, j], mlp.b_in[j : j + 1]))
    value = torch.cat((mlp.W_value[:, j], mlp.b_value[j : j + 1])) if mlp.gated else torch.eye(len(gate), dtype=gate.dtype)[-1]
    return gate, value


def _units(mlp: RaspMLP) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(function, gate, value, row) of each unit; a constant is moved from the gate of a product into its value."""
    names = [name for name, count in mlp.functions for _ in range(count)]
    for j, name in enumerate(names):
        gate, value = _forms(mlp, j)
        if name == "identity" and not bool(gate[:-1].any()):
            gate, value = value, gate
        yield name, gate, value, mlp.W_out[j]


def _other_units(mlp: RaspMLP) -> set[str]:
    return {
        "multiplying" if name in ("relu", "identity") else name
        for name, _, value, _ in _units(mlp)
        if name not in ("relu", "identity") or bool(value[:-1].any())
    }


def _relu_units(mlp: RaspMLP) -> tuple[Tensor, Tensor]:
    """(d + 1, units) gates and (units, d) rows of ReLU units alone: ``z = relu(z) - relu(-z)``."""
    gates, rows = [], []
    for name, gate, value, row in _units(mlp):
        signs = (1.0, -1.0) if name == "identity" else (1.0,)
        gates += [sign * gate for sign in signs]
        rows += [sign * value[-1] * row for sign in signs]
    return torch.stack(gates, 1), torch.stack(rows)


def _whole_mask(attentions: list[RaspAttention], n: int) -> str | None:
    """The mask rule that all heads have in common, or None where one coordinate a position is needed."""
    allowed = torch.cat([a.allowed for a in attentions]) if attentions else torch.ones(1, 2 * n - 1, dtype=torch.bool)
    if bool(allowed.all()):
        return "bidirectional"
    causal = torch.arange(1 - n, n) <= 0
    return "causal" if bool((allowed == causal).all()) else None


def _embeddings(module: RaspModule, width: int, masks: bool) -> dict[str, Tensor]:
    """Coordinates: the stream (d), 1 at tokens, 1 at BOS, and one a position where masks need them."""
    W_E, W_pos = module.embed.W_E, module.pos_embed.W_pos
    n, d = W_pos.shape
    tokens, positions = W_E.new_zeros(len(W_E) + 1, width), W_E.new_zeros(n + 1, width)
    tokens[:-1, :d], tokens[:-1, d], tokens[-1, d + 1] = W_E, 1.0, 1.0
    positions[1:, :d] = W_pos
    if masks:
        positions[1:, d + 2 :] = torch.eye(n, dtype=W_E.dtype)
    return {"embed.weight": tokens, "pos_embed.weight": positions}


def _readout(compiled: CompiledProgram, module: RaspModule, width: int) -> Tensor:
    """(width, out): ``2 v x - v^2`` for each code v, x the output; or x itself where outputs are real."""
    out = module.unembed.W_U.new_zeros(width)
    d = len(module.unembed.W_U)
    out[:d], out[d] = module.unembed.W_U[:, 0], module.unembed.b_U[0]
    if not compiled.outputs.values:
        return out[:, None]
    codes = torch.tensor(compiled.outputs.codes, dtype=out.dtype)
    logits = 2.0 * out[:, None] * codes
    logits[d] -= codes**2
    return logits


def _attention(
    attn: RaspAttention | None, at: str, config: dict[str, Any], like: Tensor, n: int, masks: bool
) -> dict[str, Tensor]:
    """q, k, v, o of one layer; their scores are divided by sqrt(d_head) there."""
    heads, dim, width = config["n_heads"], config["d_head"], config["d_model"]
    q, k, v, o = (like.new_zeros(heads, width, dim) for _ in range(4))
    if attn is not None:
        h, d, e = attn.W_Q.shape
        for out, W, b in ((q, attn.W_Q, attn.b_Q), (k, attn.W_K, attn.b_K), (v, attn.W_V, attn.b_V)):
            out[:h, :d, : W.shape[2]], out[:h, d, : W.shape[2]] = W, b
        o[:h, :d, : attn.W_O.shape[1]] = attn.W_O.transpose(1, 2)
        q[:h, d + 1, e], k[:h, d + 1, e] = ALONE, 1.0
        if masks:
            place = torch.arange(n)
            seen = attn.allowed[:, place[None] - place[:, None] + n - 1]
            q[:h, d + 2 :, e + 1 : e + 1 + n] = torch.where(seen, 0.0, NEVER).to(q.dtype)
            k[:h, d + 2 :, e + 1 : e + 1 + n] = torch.eye(n, dtype=q.dtype)
    q *= dim**0.5
    out = {f"{at}{name}.weight": W.transpose(1, 2).reshape(heads * dim, width) for name, W in (("q", q), ("k", k), ("v", v))}
    out |= {f"{at}{name}.bias": like.new_zeros(heads * dim) for name in "qkv"}
    return out | {f"{at}o.weight": o.transpose(0, 1).reshape(width, heads * dim), f"{at}o.bias": like.new_zeros(width)}


def _mlp(units: tuple[Tensor, Tensor] | None, at: str, config: dict[str, Any], like: Tensor) -> dict[str, Tensor]:
    count, width = config["d_mlp"], config["d_model"]
    entering, leaving = like.new_zeros(count, width), like.new_zeros(width, count)
    if units is not None:
        gates, rows = units
        entering[: gates.shape[1], : len(gates)] = gates.T
        leaving[: rows.shape[1], : len(rows)] = rows.T
    biases = {f"{at}in.bias": like.new_zeros(count), f"{at}out.bias": like.new_zeros(width)}
    return {f"{at}in.weight": entering, f"{at}out.weight": leaving} | biases
