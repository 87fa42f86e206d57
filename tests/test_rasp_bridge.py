"""Compiled programs for TransformerLens: checked in a standard transformer written down here, and in the package where it is installed."""

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rasp_examples import EXAMPLES, compiled

from anyformer import rasp
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.rasp.bridge import BridgeExport, to_transformer_bridge
from anyformer.rasp.compiled import edge_inputs

NAMES = ("reverse", "histogram", "sort unique", "running count", "fraction", "others", "booleans", "previous", "constant")


@cache
def standard(name: str, **options: Any) -> rasp.CompiledProgram:
    program, vocab, _, own = EXAMPLES[name]
    chosen: dict[str, Any] = {"attention": "softmax", "mode": "standard"} | own | options
    return rasp.compile(program, vocab, 5, **chosen)


def logits(export: BridgeExport, ids: torch.Tensor) -> torch.Tensor:
    """The forward pass of a standard pre-norm-free transformer, from the definition: softmax heads, ReLU, no norm, no sink."""
    c, w = export.config, export.state_dict
    n, heads = ids.shape[1], c["n_heads"]
    x = w["embed.weight"][ids] + w["pos_embed.weight"][:n]
    for layer in range(c["n_layers"]):
        part = {name: w[f"blocks.{layer}.attn.{name}.weight"] for name in "qkvo"}
        bias = {name: w[f"blocks.{layer}.attn.{name}.bias"] for name in "qkvo"}
        q, k, v = ((x @ part[s].T + bias[s]).unflatten(-1, (heads, c["d_head"])).transpose(1, 2) for s in "qkv")
        scores = q @ k.mT / math.sqrt(c["d_head"])
        if c["attention_dir"] == "causal":
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + mixed @ part["o"].T + bias["o"]
        hidden = F.relu(x @ w[f"blocks.{layer}.mlp.in.weight"].T + w[f"blocks.{layer}.mlp.in.bias"])
        x = x + hidden @ w[f"blocks.{layer}.mlp.out.weight"].T + w[f"blocks.{layer}.mlp.out.bias"]
    return x @ w["unembed.weight"].T + w["unembed.bias"]


@pytest.mark.parametrize("name", NAMES)
def test_a_standard_transformer_computes_the_program(name: str) -> None:
    program = standard(name)
    export = to_transformer_bridge(program)
    for tokens in edge_inputs(program, 4):
        assert export.decode(logits(export, export.encode(tokens))) == program(tokens)


def test_the_readout_prefers_the_nearest_value() -> None:
    """Logits 2 v x - v^2 of words (codes) and of numbers; real outputs are themselves."""
    export = to_transformer_bridge(standard("reverse"))
    out = logits(export, export.encode(list("dab")))[0, 1:]
    codes = torch.arange(4.0).double()
    torch.testing.assert_close(out, 2 * codes * torch.tensor([[1.0], [0.0], [3.0]]).double() - codes**2)
    mean = rasp.compile(
        rasp.aggregate(rasp.full, rasp.tokens) * 0.3, range(40), 200, attention="softmax", mode="standard", check=False
    )
    assert not mean.outputs.values
    export = to_transformer_bridge(mean)
    assert export.decode(logits(export, export.encode([1, 2, 39]))) == pytest.approx([4.2] * 3)


def test_the_state_of_bos_stays_as_it_is() -> None:
    """Its logits are those of a stream of 0: nothing was written there in any layer."""
    export = to_transformer_bridge(standard("sort unique"))
    torch.testing.assert_close(logits(export, export.encode([3, 1, 4]))[0, 0], torch.zeros(len(export.outputs.values)).double())


def test_one_mask_for_all_heads_needs_no_positions() -> None:
    causal, mixed = to_transformer_bridge(standard("fraction")), to_transformer_bridge(standard("previous"))
    assert causal.config["attention_dir"] == "causal" and causal.config["d_model"] == standard("fraction").width + 1
    assert mixed.config["attention_dir"] == "bidirectional" and mixed.config["d_model"] == standard("previous").width + 1 + 5


def test_what_has_no_place_there_is_named(as_shipped: None) -> None:
    with pytest.raises(
        OutsideClass, match="average-hard heads: compile with attention='softmax'; step units: compile with mode='standard'"
    ):
        to_transformer_bridge(compiled("reverse"))
    products = rasp.compile(rasp.tokens * rasp.tokens.map("exp"), rasp.Reals(-1.0, 1.0), 3)
    with pytest.raises(OutsideClass, match=r"real tokens are no rows of an embedding; .*exp units: no ReLU units"):
        to_transformer_bridge(products)
    with pytest.raises(AnyformerError, match="needs a compiled program, got str"):
        to_transformer_bridge("reverse")  # type: ignore[arg-type]
    export = to_transformer_bridge(standard("reverse"))
    for tokens in (list("abz"), [], list("aaaaaa")):
        with pytest.raises(AnyformerError, match="1 to 5 tokens of 'a', 'b', 'c', 'd' expected, got"):
            export.encode(tokens)


@pytest.mark.parametrize("name", ["soft reverse", *NAMES])
def test_transformer_lens_runs_it(name: str) -> None:
    """The report of TransformerLens issue 481: a really compiled ``reverse`` on 1, 2, 3 gives 3, 2, 1."""
    pytest.importorskip("transformer_lens")
    from transformer_lens.model_bridge import TransformerBridge  # type: ignore[import-not-found]

    program = standard(name, dtype="float32")
    export = to_transformer_bridge(program)
    bridge = TransformerBridge.boot_native(export.config)
    bridge.load_state_dict(export.state_dict, strict=True)
    cases = [[1, 2, 3]] if name == "soft reverse" else edge_inputs(program, 3)
    with torch.no_grad():
        for tokens in cases:
            ids = export.encode(tokens)
            assert export.decode(bridge(ids)) == program(tokens)
            torch.testing.assert_close(bridge(ids), logits(export, ids), rtol=1e-4, atol=1e-3)
    if name == "soft reverse":
        assert export.decode(bridge(export.encode([1, 2, 3]))) == [3, 2, 1]
