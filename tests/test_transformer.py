"""Our own targets: configurations, one forward and its two ways (fused, with patterns), padding, saving."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from anyformer.conformance import close
from anyformer.errors import AnyformerError
from anyformer.spec import Spec
from anyformer.targets.transformer import Transformer, TransformerConfig

SIZES = dict(vocab=6, heads=2, layers=2, head_dim=4, features=5)
KINDS = {
    "attention only": {},
    "hard": dict(attention="hard", residual=True),
    "bidirectional": dict(causal=False),
    "rope": dict(positions="rope", residual=True, kv_heads=1),
    "alibi": dict(positions="alibi", norm="rms", residual=True),
    "alibi hard": dict(positions="alibi", attention="hard", causal=False),
    "learned": dict(positions="learned", max_length=9, norm="layer", norm_position="post", bias=True, mlp=3),
    "llama": dict(positions="rope", norm="rms", residual=True, mlp=4, gated=True, activation="silu", kv_heads=1, value_dim=3),
    "gpt": dict(positions="learned", max_length=9, norm="layer", residual=True, mlp=4, bias=True),
}


def target(seed: int = 0, **options) -> Transformer:
    torch.manual_seed(seed)
    module = Transformer(TransformerConfig(**SIZES | options)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return module


def draw_tokens(batch: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, (batch, n), generator=torch.Generator().manual_seed(seed))


# --- configurations -----------------------------------------------------------------------------------------------------------

CONFIGS = {
    r"heads must be an integer >= 1, got 0": dict(heads=0),
    r"features must be an integer >= 1, got 2.0": dict(features=2.0),
    r"mlp must be an integer >= 0, got -1": dict(mlp=-1),
    r"attention must be one of 'softmax', 'hard', got 'soft'": dict(attention="soft"),
    r"norm must be one of None, 'rms', 'layer', got 'batch'": dict(norm="batch"),
    r"norm_position must be one of 'pre', 'post', got 'mid'": dict(norm_position="mid"),
    r"positions must be one of None, 'learned', 'rope', 'alibi', got 'sine'": dict(positions="sine"),
    r"activation must be one of 'relu', .*, got 'swish'": dict(activation="swish"),
    r"causal must be one of True, False, got 'yes'": dict(causal="yes"),
    r"norm_eps must be a positive number, got -1": dict(norm_eps=-1),
    r"norm_eps must be a positive number, got nan": dict(norm_eps=math.nan),
    r"rope_base must be a positive number, got inf": dict(rope_base=math.inf),
    r"kv_heads must be an integer >= 1, got 0": dict(kv_heads=0),
    r"kv_heads must divide heads, got 3 and 4": dict(heads=4, kv_heads=3),
    r'max_length goes with positions="learned"': dict(max_length=3),
    r'max_length goes with positions="learned" \(give both or neither\)': dict(positions="learned"),
    r"RoPE needs an even head_dim, got 3": dict(head_dim=3, positions="rope"),
    r"gated=True needs mlp >= 1 hidden units, got mlp=0": dict(gated=True),
}


@pytest.mark.parametrize("message", CONFIGS)
def test_configurations_that_make_no_sense(message, as_shipped):
    with pytest.raises(AnyformerError, match=f"Transformer: {message}"):
        TransformerConfig(**SIZES | CONFIGS[message])
    with pytest.raises(AnyformerError, match=f"Transformer: {message}"):
        Transformer(**SIZES | CONFIGS[message])


def test_constructor_errors(as_shipped):
    with pytest.raises(AnyformerError, match="give a config or sizes, not both"):
        Transformer(TransformerConfig(**SIZES), vocab=3)
    with pytest.raises(AnyformerError, match=r"unexpected keyword argument 'width'; it takes vocab, heads, .*rope_base"):
        Transformer(**SIZES, width=3)
    with pytest.raises(AnyformerError, match=r"missing .* 'features'; it takes"):
        Transformer(vocab=2, heads=1, layers=1, head_dim=2)
    for names in (("a", "b"), ("a",) * 6):
        with pytest.raises(AnyformerError, match="6 different token names expected"):
            Transformer(**SIZES, token_names=names)


def test_a_configuration_is_a_value():
    config = TransformerConfig(**SIZES | KINDS["llama"])
    assert Spec.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert Transformer(config).config is config
    assert Transformer(**SIZES | KINDS["llama"]).config == config


# --- the forward --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(batch=st.integers(1, 3), n=st.integers(1, 7), seed=st.integers(0, 99), padded=st.booleans())
def test_fused_attention_is_the_path_with_patterns(kind, batch, n, seed, padded):
    module, tokens = target(seed, **KINDS[kind]), draw_tokens(batch, n, seed)
    mask = None
    if padded:  # anything but the first token, and perhaps a row of padding alone
        mask = torch.rand(batch, n, generator=torch.Generator().manual_seed(seed)) < 0.6
        mask[1:, 0] = True
    logits, patterns = module.with_patterns(tokens, mask=mask)
    close(module(tokens, mask=mask), logits)
    assert len(patterns) == 2 and all(p.shape == (batch, 2, n, n) for p in patterns)
    for pattern in patterns:
        seen = torch.ones(batch, n, dtype=torch.bool) if mask is None else mask
        assert not pattern[~seen[:, None, None].expand_as(pattern)].any()
        close(pattern.sum(-1)[:, 0][seen], torch.ones(int(seen.sum())).double())


@pytest.mark.parametrize("kind", KINDS)
@given(left=st.integers(0, 2), right=st.integers(0, 2), n=st.integers(1, 4), seed=st.integers(0, 99))
def test_padding_is_neutral(kind, left, right, n, seed):
    module, tokens = target(seed, **KINDS[kind]), draw_tokens(2, left + n + right, seed)
    real = slice(left, left + n)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, real] = True
    close(module(tokens, mask=mask)[:, real], module(tokens[:, real]))


@pytest.mark.parametrize("kind", KINDS)
def test_explicit_positions_are_the_default_ones(kind):
    module, tokens = target(**KINDS[kind]), draw_tokens(2, 5)
    places = torch.arange(5).expand(2, 5)
    close(module(tokens, positions=places), module(tokens))


def test_one_layer_is_the_formula():
    """logits = sum_h softmax(x W_Q^h (x W_K^h)^T / sqrt(d)) x W_V^h W_O^h U, head by head."""
    module, tokens = target(layers=1), draw_tokens(2, 5)
    attention = module.blocks[0].attention
    x, y = module.embedding.weight[tokens], 0
    for h in range(2):
        q, k, v = (x @ w.weight.T[:, 4 * h : 4 * h + 4] for w in (attention.W_Q, attention.W_K, attention.W_V))
        scores = (q @ k.mT / 2).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        y = y + torch.softmax(scores, -1) @ v @ attention.W_O.weight.T[4 * h : 4 * h + 4]
    close(module(tokens), y @ module.readout.weight.T)


def test_grouped_queries_share_keys_and_values():
    grouped, full = target(heads=4, kv_heads=2), target(heads=4)
    state = dict(grouped.state_dict())
    for name in list(state):
        if "W_K" in name or "W_V" in name:
            state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    close(grouped(draw_tokens(2, 5)), full(draw_tokens(2, 5)))


def test_the_gated_mlp_is_swiglu():
    module = target(**KINDS["llama"])
    mlp, x = module.blocks[0].mlp, torch.randn(2, 3, 5).double()
    close(mlp(x), F.linear(F.silu(F.linear(x, mlp.gate.weight)) * F.linear(x, mlp.up.weight), mlp.down.weight))


# --- inputs that cannot be used -----------------------------------------------------------------------------------------------

TOKENS = torch.zeros(2, 3, dtype=torch.long)
INPUTS = {
    r"token ids must lie in 0\.\.5, got 6": dict(tokens=TOKENS + 6),
    r"token ids must lie in 0\.\.5, got -1": dict(tokens=TOKENS - 1),
    r"tokens must be integers of shape \(batch, n\), n >= 1; got \(2, 0\)": dict(tokens=TOKENS[:, :0]),
    r"tokens must be integers of shape \(batch, n\), n >= 1; got \(3,\)": dict(tokens=TOKENS[0]),
    r"tokens must be integers of shape": dict(tokens=TOKENS.float()),
    r"tokens must be integers of shape \(batch, n\)": dict(tokens=TOKENS.bool()),
    r"mask must have the shape of tokens \(2, 3\), got \(1, 3\)": dict(tokens=TOKENS, mask=TOKENS[:1].bool()),
    r"mask must be Boolean \(True at real tokens\), got torch.int64": dict(tokens=TOKENS, mask=TOKENS),
    r"positions must have the shape of tokens \(2, 3\), got \(2, 2\)": dict(tokens=TOKENS, positions=TOKENS[:, 1:]),
    r"position 9 is past max_length 9": dict(tokens=TOKENS, positions=TOKENS + 9),
    r"positions must be integers >= 0": dict(tokens=TOKENS, positions=TOKENS - 1),
    r"position 9 is past max_length": dict(tokens=torch.zeros(1, 10, dtype=torch.long)),
}


@pytest.mark.parametrize("message", INPUTS)
def test_inputs_that_cannot_be_used(message, as_shipped):
    module = target(**KINDS["gpt"])
    with pytest.raises(AnyformerError, match=message):
        module(**INPUTS[message])
    with pytest.raises(AnyformerError, match=message):
        module.with_patterns(**INPUTS[message])


# --- saving -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saving_keeps_every_bit(kind, dtype, tmp_path):
    names = ("(", ")", "a", "é", "中", "pad")
    torch.manual_seed(0)
    module = Transformer(TransformerConfig(**SIZES | KINDS[kind]), token_names=names).to(dtype)
    module.save(tmp_path / "target")
    again = Transformer.load(tmp_path / "target")
    assert (again.config, again.token_names) == (module.config, names)
    assert module.state_dict().keys() == again.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor) and again.state_dict()[name].dtype == dtype
    assert torch.equal(again(draw_tokens(2, 5)), module(draw_tokens(2, 5)))
    assert all(p.requires_grad for p in again.parameters())


def test_saving_again_replaces(tmp_path):
    first, second = target(1), target(2, residual=True)
    for module in (first, second):
        module.save(tmp_path)
        assert torch.equal(Transformer.load(tmp_path)(draw_tokens(2, 5)), module(draw_tokens(2, 5)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_loading_what_is_not_a_target(tmp_path):
    with pytest.raises(AnyformerError, match="is not a folder"):
        Transformer.load(tmp_path / "nothing")
    with pytest.raises(AnyformerError, match=r"has no model\.safetensors"):
        Transformer.load(tmp_path)
    target(1).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer"]["heads"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AnyformerError, match="one of them was changed or damaged"):
        Transformer.load(tmp_path)
