"""Hugging Face models: transformers' own code is the oracle, for every family, both ways; folders are read and never run."""

import copy
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file

import anyformer as af
from anyformer.cli import main
from anyformer.conformance import close
from anyformer.maps import DenseMap
from anyformer.targets.huggingface import own_forward, to_huggingface
from anyformer.targets.huggingface.folders import load_huggingface

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = dict(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=40,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED = SIZES | dict(num_key_value_heads=2)
GPT2 = dict(vocab_size=11, n_embd=8, n_head=4, n_layer=2, n_inner=6, n_positions=40, bos_token_id=1, eos_token_id=2)
WIDE = GROUPED | dict(head_dim=8)


def rope(kind: str, **options: object) -> dict:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0) | options)


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
SAME = [1.0, 1.5, 2.0, 3.0]
LONGROPE = rope("longrope", short_factor=SAME, long_factor=SAME, factor=4.0, original_max_position_embeddings=16)

MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", GROUPED),
    "llama, biases, tied, one key": (
        "Llama",
        SIZES | dict(num_key_value_heads=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "llama, wide heads, gelu": ("Llama", WIDE | dict(hidden_act="gelu")),
    "llama, linear": ("Llama", WIDE | rope("linear", factor=3.0)),
    "llama, llama3": ("Llama", WIDE | LLAMA3),
    "llama, yarn": ("Llama", WIDE | YARN),
    "llama, longrope of one length": ("Llama", WIDE | LONGROPE),
    "llama, proportional": ("Llama", WIDE | rope("proportional", partial_rotary_factor=0.5)),
    "mistral": ("Mistral", GROUPED | dict(head_dim=6, sliding_window=None)),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED | dict(head_dim=6)),
    "qwen3, biases": ("Qwen3", GROUPED | dict(head_dim=6, attention_bias=True)),
    "gpt2": ("GPT2", GPT2),
    "gpt2, relu, scaled by layer": ("GPT2", GPT2 | dict(activation_function="relu", scale_attn_by_inverse_layer_idx=True)),
    "gpt2, gelu, unscaled, untied": (
        "GPT2",
        GPT2 | dict(activation_function="gelu", scale_attn_weights=False, tie_word_embeddings=False),
    ),
    "gpt_neox": ("GPTNeoX", SIZES | rope("default", partial_rotary_factor=0.5)),
    "gpt_neox, sequential, whole rotary": (
        "GPTNeoX",
        SIZES | dict(use_parallel_residual=False, hidden_act="gelu_new") | rope("default", partial_rotary_factor=1.0),
    ),
    "gpt_neox, nothing turns": ("GPTNeoX", SIZES | rope("default", partial_rotary_factor=0.1)),
    "gpt_neox, no attention biases, linear": (
        "GPTNeoX",
        SIZES | dict(attention_bias=False) | rope("linear", factor=2.0, partial_rotary_factor=0.5),
    ),
}
LLAMA_LIKE = [name for name, (kind, _) in MODELS.items() if kind in ("Llama", "Mistral", "Qwen2", "Qwen3")]


def make(name: str, seed: int = 0, **options: object):
    """A model with weights large enough that every part matters, norms and biases included."""
    kind, sizes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(sizes) | options)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).eval()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def batch(vocab: int = 11) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """tokens, mask, positions: whole, padded on either side, and at later positions."""
    tokens = torch.randint(vocab, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    places = torch.arange(9).expand(3, 9)
    yield tokens, mask, places
    padded = mask.clone()
    padded[0, :3], padded[1, -4:] = False, False
    yield tokens, padded, (padded.long().cumsum(1) - 1).clamp(min=0)
    yield tokens, mask, places + torch.tensor([[0], [13], [31]])


@pytest.fixture
def float64_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers always rounds to float32, written out in float64: norms, softmax, rotary angles."""
    import transformers.models as m

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def angles(self, x, position_ids):
        half = position_ids[..., None].double() * self.inv_freq.double()
        both = torch.cat((half, half), -1)
        return both.cos() * self.attention_scaling, both.sin() * self.attention_scaling

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        pattern = torch.softmax(query @ key.mT * scaling + attention_mask, -1)
        return (pattern @ value).transpose(1, 2).contiguous(), pattern

    for name in ("llama", "mistral", "qwen2", "qwen3", "gpt_neox"):
        modeling = __import__(f"{m.__name__}.{name}.modeling_{name}", fromlist=["x"])
        monkeypatch.setattr(modeling, "eager_attention_forward", attention)
        for part, forward in (("RMSNorm", norm), ("RotaryEmbedding", angles)):
            for kind in [v for k, v in vars(modeling).items() if k.endswith(part)]:
                monkeypatch.setattr(kind, "forward", forward)


def oracle(model, tokens, mask, places):
    """transformers' own forward, called as its users call it."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(tokens, attention_mask=mask.long(), position_ids=places, output_attentions=True)
    return out.logits, out.attentions


# --- reading ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_read_exactly(name: str, float64_islands: None) -> None:
    model = make(name).double()
    network = af.read(model)
    assert network.source is model and af.read_huggingface(model).network_class == network.network_class
    for tokens, mask, places in batch():
        logits, attentions = oracle(model, tokens, mask, places)
        patterns: list[torch.Tensor] = []
        got = network.run(tokens, mask=mask, positions=places, patterns=patterns)
        assert logits.abs().max() > 1 and len(patterns) == len(attentions) == 2
        close(got[mask], logits[mask])
        for mine, theirs in zip(patterns, attentions, strict=True):
            close(mine.transpose(1, 2)[mask], theirs.transpose(1, 2)[mask])


@pytest.mark.parametrize("name", MODELS)
def test_float32_as_shipped(name: str) -> None:
    """The float32 islands left as they are: within 1e-5 of the largest logit."""
    model = make(name)
    for tokens, mask, places in batch():
        logits, _ = oracle(model, tokens, mask, places)
        with torch.no_grad():
            got = af.read(model).to(torch.float32).run(tokens, mask=mask, positions=places)
        assert float((got - logits)[mask].abs().max()) <= 1e-5 * float(logits.abs().max())


@pytest.mark.parametrize("name", ["llama, yarn", "qwen3", "gpt2", "gpt_neox"])
def test_verification_runs_transformers_own_code(name: str, request: pytest.FixtureRequest) -> None:
    single, double = make(name), make(name).double()
    for tokens, mask, places in batch():
        logits, attentions = oracle(single, tokens, mask, places)
        with torch.no_grad():
            got, patterns = own_forward(single, tokens, mask, places)
            assert torch.equal(own_forward(single, tokens, mask, None)[0], got) or bool((places[:, 0] > 0).any())
        assert torch.equal(got, logits) and all(torch.equal(a, b) for a, b in zip(patterns, attentions, strict=True))
    with torch.no_grad():
        lifted = own_forward(double, tokens, mask, places)[0]
    request.getfixturevalue("float64_islands")
    close(lifted, oracle(double, tokens, mask, places)[0])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "gpt_neox, sequential, whole rotary"])
def test_compiled_and_verified(name: str) -> None:
    short = dict(n_layer=1, n_head=2, n_inner=3) if name == "gpt2" else dict(num_hidden_layers=1, intermediate_size=3)
    model = make(name, **short)
    machine = af.PathTree.for_class(model)
    assert af.network_class(model).for_tree() == machine.network_class.for_tree()
    assert af.verify(af.compile(model, machine), model, sequences=2, length=8).raise_if_not().dtype == "float32"
    program = af.compile(model, machine, dtype=torch.float64)
    verdict = af.verify(program, model, sequences=2, length=8).raise_if_not()
    assert verdict.max_abs_error < 1e-10 and verdict.max_pattern_error < 1e-10 and verdict.patterns > 0
    assert model.config._attn_implementation != "eager"  # the target itself is left alone
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 1] += 1e-3
    assert not af.verify(program, model, sequences=2, length=8).passed


def test_gradients_reach_the_model() -> None:
    model = make("qwen3, biases")
    tokens = next(batch())[0]
    af.read(model).run(tokens).square().mean().backward()
    mine = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(tokens).logits.square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(mine[name], p.grad, rtol=1e-3, atol=1e-3 * float(p.grad.abs().max()) + 1e-6)


def test_what_many_branches_share_is_held_once() -> None:
    network = af.read(make("llama"))
    assert len({s.shared.data_ptr() for s in network.stages[:-1]}) == 1
    assert all(b.map.kind != "general" or b.map.rank is not None for s in network.stages for b in s.branches)
    assert network.stages[0].branches[1].kv_heads == 2
    tied = af.read(make("gpt2"))
    assert tied.stages[0].shared is tied.stages[1].shared


def test_a_model_that_has_run_is_read_as_before() -> None:
    """transformers' recording hooks stay on a model; they are no reason against it."""
    model = make("llama")
    oracle(model, *next(batch()))
    assert any(part._forward_hooks for part in model.modules())
    af.read(model.train())


# --- refusals ---------------------------------------------------------------------------------------------------------------------


def changed(change: Callable, name: str = "llama") -> Callable:
    def build():
        model = make(name)
        change(model)
        return model

    return build


def half(model) -> None:
    model.model.layers[1].mlp.half()


def with_nan(model) -> None:
    model.model.layers[0].self_attn.q_proj.weight.data[0, 0] = float("nan")


def set_to(path: str, value: object) -> Callable:
    def change(model) -> None:
        owner, _, leaf = path.rpartition(".")
        part = model
        for step in owner.split(".") if owner else []:
            part = getattr(part, step) if not step.isdigit() else part[int(step)]
        setattr(part, leaf, value)

    return change


REFUSALS: dict[str, Callable] = {
    r"a sliding window of 4096 is in force: set config\.sliding_window = None": lambda: make("mistral", sliding_window=4096),
    r"a sliding window of 40 is in force": lambda: make("mistral", sliding_window=40, layer_types=["full_attention"] * 2),
    r"embed_tokens.weight is a torch.sparse_coo tensor: make it dense": changed(
        lambda m: setattr(m.model.embed_tokens, "weight", torch.nn.Parameter(m.model.embed_tokens.weight.detach().to_sparse()))
    ),
    r"layers of type sliding_attention \(sliding_window=4\)": lambda: make(
        "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    r"frequencies of dynamic RoPE depend on the length": lambda: make("llama", head_dim=8, **rope("dynamic", factor=2.0)),
    r"frequencies of longrope RoPE depend on the length": lambda: make(
        "llama, longrope of one length",
        **rope("longrope", short_factor=SAME, long_factor=SAME[::-1], factor=2.0, original_max_position_embeddings=16),
    ),
    r"RoPE multiplies the 4 coordinates that it turns by 1\.1\d*, but not the other 4 of a head": lambda: make(
        "gpt_neox",
        num_attention_heads=1,
        **rope("yarn", factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.5),
    ),
    r"the activation 'quick_gelu' is not known; these are: silu": lambda: make("llama", hidden_act="quick_gelu"),
    r"cross attention": lambda: make("gpt2", add_cross_attention=True),
    r"scores rounded to float32 \(reorder_and_upcast_attn=True\): set it to False": lambda: make(
        "gpt2", reorder_and_upcast_attn=True
    ),
    r"parameters must all be float32 or all float64, got torch\.float16, torch\.float32; model\.float\(\)": changed(half),
    r"got torch\.bfloat16; model\.float\(\) makes them float32": lambda: make("llama").bfloat16(),
    r"model\.layers\.0\.self_attn\.q_proj\.weight holds NaN": changed(with_nan),
    r"model\.layers\.1\.self_attn: its scaling is 3\.0, the configured one": changed(
        set_to("model.layers.1.self_attn.scaling", 3.0)
    ),
    r"model\.norm: its variance_epsilon is 0\.1": changed(set_to("model.norm.variance_epsilon", 0.1)),
    r"model\.layers\.0\.mlp: its forward was replaced": changed(set_to("model.layers.0.mlp.forward", lambda x: x)),
    r"lm_head: forward hooks may change": changed(lambda m: m.lm_head.register_forward_hook(lambda *a: None)),
    r"model\.layers\.0\.mlp\.up_proj: a Identity stands in place of Linear": changed(
        set_to("model.layers.0.mlp.up_proj", torch.nn.Identity())
    ),
    r"model\.layers\.0\.mlp\.act_fn: a ReLU stands in place of SiLU": changed(
        set_to("model.layers.0.mlp.act_fn", torch.nn.ReLU())
    ),
    r"model\.layers\.2 .*not a part of the configured": changed(
        lambda m: m.model.layers.append(copy.deepcopy(m.model.layers[0]))
    ),
    r"model\.layers\.1: missing, a LlamaDecoderLayer was configured": changed(lambda m: m.model.layers.__delitem__(1)),
    r"lm_head\.bias: a parameter that the configuration does not have": changed(
        set_to("lm_head.bias", torch.nn.Parameter(torch.ones(11)))
    ),
    r"model: its config is not the model's": changed(lambda m: setattr(m.model, "config", copy.deepcopy(m.config))),
    r"attention that is not causal": changed(set_to("config.is_causal", False)),
    r"its weights are quantised": changed(set_to("config.quantization_config", {"bits": 4})),
    r"adapters are loaded: merge them": changed(set_to("_hf_peft_config_loaded", True)),
    r"soft-capping of logits or scores \(final_logit_softcapping=30": changed(set_to("config.final_logit_softcapping", 30.0)),
    r"4 heads cannot share 3 keys": lambda: make("llama", num_key_value_heads=3),
    r"its weights are on the meta device": lambda: make("llama").to("meta"),
    r"RoPE turns 4 coordinates of heads of 3": lambda: make("llama", head_dim=3),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message: str) -> None:
    model = REFUSALS[message]()
    with pytest.raises(af.OutsideClass, match=f"this {type(model).__name__} cannot be simulated exactly: .*{message}"):
        af.read(model)


def test_all_reasons_at_once() -> None:
    model = make("mistral", sliding_window=8, hidden_act="mish", head_dim=8, **rope("dynamic", factor=2.0)).bfloat16()
    with pytest.raises(af.OutsideClass) as caught:
        af.read(model)
    assert len(caught.value.reasons) == 4
    sizes = dict(vocab_size=5, hidden_size=8, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2, head_dim=4)
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, num_key_value_heads=1, pad_token_id=0))
    with pytest.raises(af.OutsideClass, match=r"class Gemma2ForCausalLM \(model_type 'gemma2'\) has no reader.*soft-capping"):
        af.read(gemma)
    sizes.pop("head_dim")
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=2))
    with pytest.raises(af.OutsideClass, match=r"has no reader.*mixture of experts \(num_local_experts=2\)"):
        af.read(mixtral)


def test_other_classes_are_refused() -> None:
    class Mine(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    config = make("llama").config
    with pytest.raises(af.OutsideClass, match=r"the class Mine .* has no reader; these have: LlamaForCausalLM"):
        af.read(Mine(config))
    with pytest.raises(af.OutsideClass, match="the class LlamaModel"):
        af.read(transformers.LlamaModel(config))
    with pytest.raises(af.AnyformerError, match="a transformers model or the folder of one is needed, got Linear"):
        af.read_huggingface(torch.nn.Linear(2, 2))


def test_without_transformers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(af.AnyformerError, match=r"pip install 'anyformer\[hf\]'"):
        af.read_huggingface(tmp_path)


# --- folders ----------------------------------------------------------------------------------------------------------------------


def configured(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "REMOVED"}))


def restored(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["llama", "llama, biases, tied, one key", "qwen3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_folders_keep_every_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(name).to(dtype)
    shards = dict(max_shard_size="2KB") if dtype == torch.float32 else {}
    model.save_pretrained(tmp_path, **shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(shards)
    again = load_huggingface(tmp_path)
    assert type(again) is type(model) and not again.training
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor) and again.state_dict()[key].dtype == dtype
    tokens = next(batch())[0]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    close(af.read_huggingface(tmp_path).run(tokens), af.read(model).run(tokens))


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    make("gpt2").save_pretrained(tmp_path)
    model = load_huggingface(tmp_path)
    assert model.lm_head.weight is model.transformer.wte.weight and model.lm_head.weight.requires_grad


def test_gpt2_as_it_was_first_saved(tmp_path: Path) -> None:
    """Without the prefix of the base model, and with masks among the weights."""
    model = make("gpt2")
    model.save_pretrained(tmp_path)

    def old(tensors: dict) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("transformer.")] = tensors.pop(key)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 40, 40).tril()

    restored(tmp_path, old)
    tokens = next(batch())[0]
    assert torch.equal(load_huggingface(tmp_path)(tokens).logits, model(tokens).logits)


def test_no_code_from_a_folder_is_run(tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    folder = tmp_path / "model"
    make("llama").save_pretrained(folder)
    evil = f"open({str(sentinel)!r}, 'w').close()\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    for name in ("modeling_evil.py", "configuration_evil.py"):
        (folder / name).write_text(evil)
    configured(folder, auto_map={"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"})
    model = load_huggingface(folder)
    assert type(model) is transformers.LlamaForCausalLM and not sentinel.exists()
    import pickle

    class Evil:
        def __reduce__(self):
            return (open, (str(sentinel), "w"))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(af.AnyformerError, match=r"pytorch_model\.bin, which is never unpickled: save them as safetensors"):
        load_huggingface(folder)
    assert not sentinel.exists()


def header(folder: Path, change: Callable[[dict], object]) -> None:
    """Rewrite the header of a safetensors file, lies included."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + size])
    change(about)
    text = json.dumps(about).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def shard(folder: Path, change: Callable[[dict], object]) -> None:
    make("llama").save_pretrained(folder, max_shard_size="2KB")
    (folder / "model.safetensors").unlink()
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


Q = "model.layers.0.self_attn.q_proj.weight"
HUGE = 2**40
FOLDERS: dict[str, Callable[[Path], object]] = {
    r"has no config\.json; expected an anyformer-target or a Hugging Face model": lambda f: (f / "config.json").unlink(),
    r"config\.json is not JSON": lambda f: (f / "config.json").write_text("{"),
    r"config\.json holds a list": lambda f: (f / "config.json").write_text("[]"),
    r"model_type 'gemma2' has no reader; these have: llama, mistral": lambda f: configured(f, model_type="gemma2"),
    r"model_type None has no reader": lambda f: configured(f, model_type="REMOVED"),
    r"quantised weights \(quantization_config\)": lambda f: configured(f, quantization_config={"quant_method": "bitsandbytes"}),
    r"architectures \['LlamaForSequenceClassification'\], expected": lambda f: configured(
        f, architectures=["LlamaForSequenceClassification"]
    ),
    r"hidden_size is missing; rms_norm_eps is missing": lambda f: configured(f, hidden_size="REMOVED", rms_norm_eps="REMOVED"),
    r"hidden_size must be an integer >= 1, got '8'": lambda f: configured(f, hidden_size="8"),
    r"vocab_size must be an integer >= 1, got -1": lambda f: configured(f, vocab_size=-1),
    r"hidden_size overflows 64-bit integers": lambda f: configured(f, hidden_size=2**70),
    r"no LlamaForCausalLM has these sizes|has shape .* expected": lambda f: configured(f, hidden_size=HUGE, vocab_size=HUGE),
    r"1099511627776 layers are configured, there are only 21 tensors": lambda f: configured(f, num_hidden_layers=HUGE),
    r"transformers refuses it": lambda f: configured(f, rms_norm_eps="tiny"),
    r"a sliding window|RoPE of type 'spiral' is not known|transformers refuses it": lambda f: configured(
        f, rope_parameters={"rope_type": "spiral", "rope_theta": 1.0}
    ),
    r"holds adapters \(adapter_config\.json\)": lambda f: (f / "adapter_config.json").write_text("{}"),
    r"tensor model\.norm\.weight is missing": lambda f: restored(f, lambda t: t.pop("model.norm.weight")),
    r"tensor lm_head\.weight is missing": lambda f: restored(f, lambda t: t.pop("lm_head.weight")),
    r"tensor model\.extra is not expected": lambda f: restored(f, lambda t: t.update({"model.extra": torch.ones(2)})),
    r"q_proj\.weight has shape \(4, 16\), expected \(8, 8\)": lambda f: restored(f, lambda t: t.update({Q: t[Q].view(4, 16)})),
    r"dtype F16, F32, all F32 or all F64 is needed: .*model\.float\(\)": lambda f: restored(
        f, lambda t: t.update({Q: t[Q].half()})
    ),
    r"hold NaN or infinite numbers": lambda f: restored(f, lambda t: t.update({Q: t[Q] / 0})),
    r"config\.json says 'float16', its tensors are F32": lambda f: configured(f, dtype="float16"),
    r"is damaged or no safetensors file": lambda f: header(f, lambda h: h[Q].update(shape=[800, 8])),
    r"is damaged or no safetensors file \(": lambda f: header(f, lambda h: h[Q].update(data_offsets=[0, 10**12])),
    r"lm_head\.weight is tied .* but holds other numbers": lambda f: configured(f, tie_word_embeddings=True),
    r"names '\.\./evil\.safetensors', which is no safetensors file in the folder": lambda f: shard(
        f, lambda w: w.update({Q: "../evil.safetensors"})
    ),
    r"has no other\.safetensors, which model\.safetensors\.index\.json names": lambda f: shard(
        f, lambda w: w.update({Q: "other.safetensors"})
    ),
    r"does not hold the tensors that model\.safetensors\.index\.json says": lambda f: shard(f, lambda w: w.pop(Q)),
}


@pytest.mark.parametrize("message", FOLDERS)
def test_folders_that_cannot_be_read(message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    make("llama").save_pretrained(folder)
    FOLDERS[message](folder)
    capsys.readouterr()
    assert main(["compile", str(folder), "-o", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("anyformer: "), err
    assert re.search(message, err), err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_memory_is_asked_for_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("anyformer.memory.available_bytes", lambda: 1000)
    monkeypatch.setattr("anyformer.targets.huggingface.folders._read", lambda *a: pytest.fail("read"))
    with pytest.raises(af.AnyformerError, match=r"reading .* needs \d\.\d KiB of memory, 1000 B are free"):
        load_huggingface(tmp_path)


@pytest.mark.parametrize("target, message", [("missing", "is not a folder"), ("file", "is not a folder"), ("empty", "has no")])
def test_what_is_no_folder_of_a_model(target: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(af.AnyformerError, match=message):
        af.read_huggingface(tmp_path / target)
    assert main(["compile", str(tmp_path / target), "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out").exists()


# --- the way back -----------------------------------------------------------------------------------------------------------------


def errors(network: af.Network, model) -> float:
    """Relative difference of logits in float64, its float32 islands run in float64."""
    worst, model = 0.0, copy.deepcopy(model).double()
    for tokens, mask, places in list(batch(network.embedding.shape[0]))[1:]:
        with torch.no_grad():
            got = own_forward(model, tokens, mask, places)[0]
            expected = network.run(tokens, mask=mask, positions=places)
        worst = max(worst, float(((got - expected)[mask]).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("name, known", [(n, k) for n in LLAMA_LIKE for k in (True, False) if k or "proportional" not in n])
def test_written_models_are_the_networks(name: str, known: bool, tmp_path: Path) -> None:
    """Folder -> Network -> folder; ``known``: the Network still has its source, whose configuration says more."""
    model = make(name).double()
    network = af.read(model)
    written = af.write_huggingface(network if known else replace(network, source=None), tmp_path / "out")
    again = load_huggingface(tmp_path / "out")
    assert written.dtype == again.dtype == torch.float64
    assert errors(network, again) < (1e-10 if name != "llama, yarn" or known else 1e-6)
    for entry in ("vocab_size", "rms_norm_eps", "num_key_value_heads", "head_dim", "tie_word_embeddings"):
        if hasattr(model.config, entry):
            assert getattr(again.config, entry) == getattr(model.config, entry), entry
    if known:
        assert again.config.rope_parameters == model.config.rope_parameters
        assert (again.config.eos_token_id, again.config.max_position_embeddings) == (2, 40)
        single = af.write_huggingface(network, tmp_path / "single", dtype=torch.float32)
        assert single.dtype == torch.float32 and errors(network, load_huggingface(tmp_path / "single")) < 1e-5


def test_frequencies_are_the_buffer_not_the_configuration() -> None:
    model = make("llama, wide heads, gelu").double()
    model.model.rotary_emb.inv_freq *= 0.5
    written = to_huggingface(af.read(model))
    assert written.config.rope_parameters["rope_type"] == "linear" and errors(af.read(model), written) < 1e-10


def test_ours_become_theirs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    llama = dict(vocab=9, heads=4, layers=2, head_dim=4, norm="rms", residual=True, mlp=5, gated=True, activation="silu")
    for options in (
        dict(features=8, kv_heads=2, positions="rope", rope_base=700.0),
        dict(features=7, kv_heads=2, value_dim=3),  # no positions at all, features that heads do not divide
        dict(features=8, bias=True, positions="rope", activation="gelu_tanh"),
    ):
        target = af.Transformer(**llama | options).double()
        if options.get("bias"):
            with pytest.raises(af.OutsideClass, match=r"it does not end in an RMSNorm"):
                af.write_huggingface(target, tmp_path / "out")
            continue
        written = af.write_huggingface(target, tmp_path / "out")
        assert errors(af.read(target), written) < (1e-6 if "rope_base" in options else 1e-10)
    assert type(written).__name__ == "MistralForCausalLM"


WRITTEN_REFUSALS = {
    r"a table of positions; .*LayerNorm in place of RMSNorm|it has a table of positions": lambda: af.read(make("gpt2")),
    r"not attention and MLP in turn": lambda: af.Transformer(vocab=5, heads=2, layers=2, head_dim=2, features=4),
    r"stage 1 has no residual; .*stage 2 has no residual": lambda: af.Transformer(
        vocab=5, heads=2, layers=1, head_dim=2, features=4, mlp=3, gated=True, norm="rms"
    ),
    r"its units are not gated": lambda: af.Transformer(
        vocab=5, heads=2, layers=1, head_dim=2, features=4, mlp=3, norm="rms", residual=True
    ),
    r"attention of another kind than causal softmax with RoPE": lambda: af.Transformer(
        vocab=5, heads=2, layers=1, head_dim=2, features=4, mlp=3, gated=True, norm="rms", residual=True, attention="hard"
    ),
}


@pytest.mark.parametrize("message", WRITTEN_REFUSALS)
def test_networks_that_no_llama_computes(message: str, tmp_path: Path) -> None:
    with pytest.raises(af.OutsideClass, match=f"no Llama-like model computes this network: .*{message}"):
        af.write_huggingface(WRITTEN_REFUSALS[message](), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_the_network_is_never_written(tmp_path: Path) -> None:
    """A head whose map has a rank above the head's width is found by running what would be written."""
    network = af.read(make("llama").double())
    stage = network.stages[0]
    torch.manual_seed(0)
    dense = replace(stage.branches[1], map=DenseMap(torch.randn(4, 8, 8).double()), kv_heads=None)
    stages = (replace(stage, branches=(stage.branches[0], dense)), *network.stages[1:])
    with pytest.raises(af.AnyformerError, match=r"the nearest one is off by .* of the largest logit"):
        af.write_huggingface(replace(network, stages=stages), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_writing_is_careful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = af.read(make("llama"))
    af.write_huggingface(network, tmp_path / "a")
    first = (tmp_path / "a" / "model.safetensors").read_bytes()
    af.write_huggingface(af.read(make("llama", seed=1)), tmp_path / "a")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != first
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        af.write_huggingface(network, tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    af.Transformer(vocab=5, heads=2, layers=1, head_dim=2, features=4).save(tmp_path / "ours")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("x")
    for name, message in (("a", "holds something"), ("ours", "already holds something"), ("file", "is a file")):
        with pytest.raises(af.AnyformerError, match=message):
            af.write_huggingface(network, tmp_path / name)
    with pytest.raises(af.AnyformerError, match=r"torch\.float32 or torch\.float64"):
        af.write_huggingface(network, tmp_path / "c", dtype=torch.float16)


def test_folder_to_program_to_folder_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path tree's program has forgotten the factors of the target's maps; specialising finds them again."""
    short = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=12)
    model = make("llama", **short)
    model.save_pretrained(tmp_path / "target")

    def call(*arguments: object, code: int = 0) -> dict:
        assert main([*map(str, arguments), "--json"]) == code
        out, err = capsys.readouterr()
        assert err == "" or code == 2, err
        return json.loads(out) if code != 2 else {"error": err}

    capsys.readouterr()
    made = call("compile", tmp_path / "target", "--dtype", "float64", "-o", tmp_path / "program")
    assert made["report"]["passed"] and made["report"]["max_abs_error"] < 1e-10
    assert call("verify", tmp_path / "program", tmp_path / "target")["passed"]
    again = call("specialize", tmp_path / "program", "-o", tmp_path / "again", "--to", "huggingface")
    assert again["model"] == "LlamaForCausalLM" and again["error"] < 1e-10
    assert call("verify", tmp_path / "program", tmp_path / "again")["passed"]
    read_again = load_huggingface(tmp_path / "again")
    assert read_again.num_parameters() == model.num_parameters() and read_again.config.num_key_value_heads == 1
    assert errors(af.read(model), read_again) < 1e-9
    refused = call("specialize", tmp_path / "program", "-o", tmp_path / "ours", code=2)
    assert "try --to huggingface" in refused["error"] and refused["error"].count("\n") == 1 and not (tmp_path / "ours").exists()
    make("llama", num_hidden_layers=9).save_pretrained(tmp_path / "deep")
    deep = call("compile", tmp_path / "deep", "-o", tmp_path / "out", code=2)
    assert deep["error"].count("\n") == 1 and "memory" in deep["error"] and not (tmp_path / "out").exists()


def test_specialised_targets_of_ours_are_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    target = af.Transformer(vocab=3, heads=2, layers=1, head_dim=2, features=3, token_names=("a", "b", "c")).double()
    af.compile(target, af.PathTree.for_class(target)).save(tmp_path / "p")
    assert main(["specialize", str(tmp_path / "p"), "-o", str(tmp_path / "t")]) == 0
    assert "wrote" in capsys.readouterr().out
    again, tokens = af.Transformer.load(tmp_path / "t"), torch.tensor([[0, 1, 2]])
    close(again(tokens), target(tokens))
    assert again.token_names == ("a", "b", "c")


def test_rotaries_that_have_no_name_are_refused() -> None:
    for frequencies, message in (((1.0, 0.0), "some frequencies that are not positive"), ((1.0,), "RoPE on 2 of 4 coordinates")):
        target = af.Transformer(
            vocab=5, heads=2, layers=1, head_dim=4, features=8, mlp=3, gated=True, norm="rms", residual=True, positions="rope"
        )
        network = af.read(target)
        stage = network.stages[0]
        normed = stage.branches[1].operator
        turned = replace(normed, inner=replace(normed.inner, rotary=af.operators.Rotary(frequencies)))
        heads = replace(stage.branches[1], operator=turned)
        with pytest.raises(af.OutsideClass, match=message):
            to_huggingface(replace(network, stages=(replace(stage, branches=(stage.branches[0], heads)), *network.stages[1:])))


def test_to_huggingface_keeps_grouped_keys() -> None:
    model = to_huggingface(replace(af.read(make("llama, biases, tied, one key")), source=None))
    assert model.config.num_key_value_heads == 1 and model.config.tie_word_embeddings
