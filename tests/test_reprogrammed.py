"""Reprogramming: a transformers model is frozen by hash, only rows and read-out train, and every folder that is no causal decoder is refused."""

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anyformer import philox
from anyformer.cli import main
from anyformer.errors import AnyformerError
from anyformer.learning.recommended import recommended_training
from anyformer.learning.reprogrammed import Reprogrammed, Reprogramming, load_reprogramming
from anyformer.learning.runs import RunConfig, run_training
from anyformer.learning.sizes import sizes
from anyformer.learning.training import Training, TrainingConfig, train
from anyformer.spec import Spec
from anyformer.storage import apart, checksum
from anyformer.targets.huggingface.backbones import load_decoder
from anyformer.tasks import Dyck, KHop

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 100,
}
NEAR = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
GPT2 = {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 100}
FAMILIES = {
    "llama": (transformers.LlamaConfig, SIZES | {"num_key_value_heads": 1}),
    "mistral": (transformers.MistralConfig, SIZES | {"num_key_value_heads": 1}),
    "qwen2": (transformers.Qwen2Config, SIZES | {"num_key_value_heads": 2}),
    "qwen3": (transformers.Qwen3Config, SIZES | {"num_key_value_heads": 1, "head_dim": 8}),
    "gpt2": (transformers.GPT2Config, GPT2),
    "gpt_neox": (transformers.GPTNeoXConfig, SIZES),
    "opt": (transformers.OPTConfig, SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 8}),
}
DECAYING = TrainingConfig(steps=3, warm_up=0, batch_size=4, weight_decay=0.1, learning_rate=0.1, evaluation_size=4)
COPY = KHop(hops=0)


def config_of(family: str, **more):
    kind, options = FAMILIES[family]
    return kind(**options | NEAR | more)


def drawn(folder: Path, family: str = "llama", **more) -> Path:
    """A folder with config.json alone."""
    config_of(family, **more).save_pretrained(folder)
    return folder


def stored(folder: Path, family: str = "llama", seed: int = 0, **more) -> Path:
    """A folder with weights."""
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config_of(family, **more)).save_pretrained(folder)
    return folder


def hash_of_backbone(learner: Reprogramming) -> str:
    """sha256 of every parameter and buffer of the frozen model, those that are not stored too."""
    parts = {**dict(learner.backbone.named_parameters()), **dict(learner.backbone.named_buffers())}
    return checksum(apart(parts))


@pytest.mark.parametrize(("make", "positions"), [(drawn, True), (stored, False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_never_moves_and_the_tables_train(tmp_path: Path, family: str, make: Callable, positions: bool):
    model = Reprogrammed(folder=str(make(tmp_path, family)), positions=positions)
    learner = model.build(Dyck(), 0)
    trained = {"tokens", "readout"} | ({"positions"} if positions else set())
    assert {name for name, p in learner.named_parameters() if p.requires_grad} == trained
    assert all(name.startswith("backbone.") for name, p in learner.named_parameters() if not p.requires_grad)
    before, start = hash_of_backbone(learner), {name: p.detach().clone() for name, p in learner.named_parameters()}
    training = Training(learner, Dyck(), DECAYING)
    while not training.finished:
        training.advance()
    assert hash_of_backbone(learner) == before
    assert {name for name, p in learner.named_parameters() if not torch.equal(p, start[name])} == trained == set(training.named)
    assert all(p.grad is None for p in learner.backbone.parameters()) and not learner.backbone.training
    held = {p.data_ptr() for part in training.optimizer.parts for group in part.param_groups for p in group["params"]}
    assert held == {learner.get_parameter(name).data_ptr() for name in trained}
    found = sizes(learner, Dyck(), 4)
    assert set(found.trained) == trained and found.frozen >= sum(p.numel() for p in learner.backbone.parameters())
    assert type(learner.backbone).__name__ in str(found)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "opt"])
def test_the_run_is_transformers_own_with_our_rows(tmp_path: Path, family: str):
    """The oracle: the same model with our rows written into its own table, called with ids."""
    learner = Reprogrammed(folder=str(stored(tmp_path, family)), positions=False).build(KHop(vocab=30), 3).eval()
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    whole.resize_token_embeddings(30)
    with torch.no_grad():
        whole.get_input_embeddings().weight.copy_(learner.tokens)
        whole.set_output_embeddings(torch.nn.Linear(16, 30, bias=False))
        whole.get_output_embeddings().weight.copy_(learner.readout.T)
    tokens = torch.randint(30, (3, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(learner(tokens), whole.eval()(tokens).logits)


def test_position_rows_are_added(tmp_path: Path):
    folder = str(drawn(tmp_path))
    plain, placed = (Reprogrammed(folder=folder, positions=p).build(Dyck(), 0) for p in (False, True))
    tokens = Dyck().batch(0, 0, 2).inputs
    assert torch.equal(plain.tokens, placed.tokens) and torch.equal(plain.readout, placed.readout)
    assert placed.positions.shape == (63, 16) and not torch.allclose(plain(tokens), placed(tokens))
    with torch.no_grad():
        placed.positions.zero_()
    torch.testing.assert_close(plain(tokens), placed(tokens))


def test_a_small_task_is_learned(tmp_path: Path, as_shipped):
    model = Reprogrammed(folder=str(drawn(tmp_path)))
    config = recommended_training(frozen=True, steps=60, batch_size=16, learning_rate=0.02, evaluate_every=20, evaluation_size=32)
    history = train(model.build(COPY, 0), COPY, config)
    assert history.losses[-1] < history.losses[0] / 3 and history.accuracies[-1] > 0.9


def test_there_is_no_dropout(tmp_path: Path):
    learner = Reprogrammed(folder=str(drawn(tmp_path, "gpt2", resid_pdrop=0.5, embd_pdrop=0.5))).build(Dyck(), 0).train()
    tokens = Dyck().batch(0, 0, 2).inputs
    assert torch.equal(learner(tokens), learner(tokens)) and learner.training


# --- names and hashes ---------------------------------------------------------------------------------------------------------


def test_drawn_weights_are_philoxs_and_the_seeds(tmp_path: Path):
    folder = drawn(tmp_path, initializer_range=0.5)
    state = torch.get_rng_state()
    first, again, other = load_decoder(folder), load_decoder(folder, 0), load_decoder(folder, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.sha256 == again.sha256 != other.sha256 and (first.seed, other.seed) == (0, 1)
    names = [name for name, _ in sorted(first.module.named_modules())]
    stream = names.index("layers.1.mlp.up_proj")
    expected = torch.from_numpy(philox.gaussian(0, stream, (24, 16), 0.5)).float()
    assert torch.equal(first.module.get_submodule("layers.1.mlp.up_proj").weight, expected)
    assert bool((first.module.norm.weight == 1).all())


def run_of(folder: Path, **more) -> RunConfig:
    training = TrainingConfig(steps=2, warm_up=0, batch_size=2, evaluation_size=2)
    return RunConfig(task=Dyck(), model=Reprogrammed(folder=str(folder), **more), training=training)


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_runs_name_depends_on_the_model_and_not_on_its_folder(tmp_path: Path):
    first = run_of(stored(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    edit_config(tmp_path / "b", transformers_version="9.9", architectures=None, use_cache=False)
    assert run_of(tmp_path / "b") == first and run_of(tmp_path / "b").name == first.name
    assert Spec.from_json(json.loads(json.dumps(first.to_json()))) == first
    edit_config(tmp_path / "b", rms_norm_eps=1e-3)
    names = {first.name, run_of(tmp_path / "b").name, run_of(stored(tmp_path / "c", seed=1)).name}
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-7
    shutil.copytree(tmp_path / "a", tmp_path / "d")
    save_file(tensors, tmp_path / "d" / "model.safetensors", metadata={"format": "pt"})
    names |= {run_of(tmp_path / "d").name, run_of(drawn(tmp_path / "e")).name, run_of(tmp_path / "e", seed=1).name}
    names |= {run_of(tmp_path / "a", positions=False).name, run_of(tmp_path / "a", embedding_std=0.1).name}
    assert len(names) == 8


def test_a_run_goes_on_where_the_model_was_moved(tmp_path: Path):
    config = run_of(stored(tmp_path / "a"))
    done = run_training(config, tmp_path / "runs")
    (tmp_path / "a").rename(tmp_path / "b")
    (done.folder / "finished.json").unlink()
    again = run_training(replace(config, model=replace(config.model, folder=str(tmp_path / "b"))), tmp_path / "runs")
    assert again == done
    with pytest.raises(AnyformerError, match=r"a is not a folder"):
        config.model.build(Dyck(), 0)


def test_a_wrong_model_is_refused(tmp_path: Path):
    config = run_of(stored(tmp_path / "a"))
    result = run_training(config, tmp_path / "runs").result
    stored(tmp_path / "b", seed=1)
    message = r"b does not hold the llama that .*result was trained for: its sha256 is [0-9a-f]{12}\.\.\., [0-9a-f]{12}\.\.\. was expected"
    with pytest.raises(AnyformerError, match=message):
        load_reprogramming(result, tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    stored(tmp_path / "a", seed=1)  # the folder holds another one now
    with pytest.raises(AnyformerError, match="a does not hold the model of this run"):
        config.model.build(Dyck(), 0)


@pytest.mark.parametrize(("make", "options"), [(stored, {"positions": False}), (drawn, {"seed": 5})])
def test_tables_come_back_without_the_models_weights(tmp_path: Path, make: Callable, options: dict):
    folder = make(tmp_path / "model")
    model = Reprogrammed(folder=str(folder), **options)
    learner = model.build(Dyck(), 1)
    model.save(learner, tmp_path / "tables")
    assert set(load_file(tmp_path / "tables" / "model.safetensors")) == {
        n for n, p in learner.named_parameters() if p.requires_grad
    }
    assert str(tmp_path) not in (tmp_path / "tables" / "config.json").read_text()
    again, tokens = load_reprogramming(tmp_path / "tables", folder), Dyck().batch(0, 0, 2).inputs
    assert torch.equal(again(tokens), learner(tokens)) and again.token_names == Dyck().token_names
    with pytest.raises(AnyformerError, match=r"token id|vocab"):
        again(tokens + 4)
    with pytest.raises(AnyformerError, match=r"position 63 has no row|takes 100 positions"):
        again(torch.zeros(1, 64 if again.positions is not None else 101, dtype=torch.int64))


def test_damaged_tables(tmp_path: Path):
    folder = drawn(tmp_path / "model")
    model = Reprogrammed(folder=str(folder))
    model.save(model.build(Dyck(), 1), tmp_path / "tables")
    file = tmp_path / "tables" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(AnyformerError, match="damaged"):
        load_reprogramming(tmp_path / "tables", folder)
    with pytest.raises(AnyformerError, match=r"has no model.safetensors|was not written by anyformer"):
        load_reprogramming(folder, folder)


# --- what is refused --------------------------------------------------------------------------------------------------------------


def pickled(folder: Path) -> None:
    (stored(folder) / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")


def without(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        tensors = load_file(stored(folder) / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return make


def with_nan(folder: Path) -> None:
    tensors = load_file(stored(folder) / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edited(**changes) -> Callable[[Path], None]:
    return lambda folder: edit_config(stored(folder), **changes)


def cut(folder: Path) -> None:
    file = stored(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])


def of_class(kind: str, **options) -> Callable[[Path], None]:
    return lambda folder: getattr(transformers, kind)(**SIZES | options).save_pretrained(folder)


def words_in(name: str, text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / name).write_text(text)

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is not a folder; expected one of a transformers model, with config.json"),
        (lambda folder: folder.mkdir(), "has no config.json; expected the folder of a transformers model"),
        (words_in("config.json", "{"), "is not JSON"),
        (words_in("config.json", "{}"), "model_type None is none of transformers"),
        (words_in("config.json", '{"model_type": "oracle"}'), "model_type 'oracle' is none of transformers"),
        (pickled, "holds its weights as pytorch_model.bin, which is never unpickled: save them as safetensors"),
        (cut, "damaged or no safetensors file"),
        (with_nan, "norm.weight hold NaN or infinite numbers"),
        (without("model.layers.1.mlp.up_proj.weight"), "tensor layers.1.mlp.up_proj.weight is missing"),
        (edited(num_hidden_layers=1), "tensor .*layers.1.* is not expected"),
        (edited(num_hidden_layers=3), "is missing; .* and 5 more"),
        (edited(hidden_size=32), "cannot read it|no LlamaModel has these sizes"),
        (edited(hidden_size=-1), "config.json"),
        (edited(quantization_config={"quant_method": "gptq"}), "quantised weights"),
        (of_class("BertConfig"), "later tokens change what earlier ones give: an encoder; a causal decoder is needed"),
        (of_class("ViTConfig"), "a vit is no causal decoder, which is needed"),
        (of_class("T5Config"), "a t5 is no causal decoder"),
        (of_class("BartConfig"), "a bart is an encoder with a decoder; a decoder alone is needed"),
        (of_class("LlamaConfig", vocab_size=10**12), "needs .* of memory"),
    ],
)
def test_what_is_no_causal_decoder_is_refused(tmp_path: Path, make: Callable, message: str):
    make(tmp_path / "model")
    with pytest.raises(AnyformerError, match=message) as refused:
        Reprogrammed(folder=str(tmp_path / "model"))
    assert "\n" not in str(refused.value)


def test_adapters_a_seed_too_many_and_too_few_positions(tmp_path: Path):
    folder = stored(tmp_path, max_position_embeddings=62)
    with pytest.raises(AnyformerError, match="takes 62 positions, the task has 63: choose a shorter task or another model"):
        Reprogrammed(folder=str(folder)).build(Dyck(), 0)
    with pytest.raises(AnyformerError, match=r"holds weights, a seed draws them where there is only config.json"):
        Reprogrammed(folder=str(folder), seed=0)
    for options, message in (
        ({"seed": -1}, "seed must be an integer >= 0"),
        ({"embedding_std": -1.0}, "embedding_std must be a positive"),
    ):
        with pytest.raises(AnyformerError, match=message):
            Reprogrammed(folder=str(folder), **options)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(AnyformerError, match="holds adapters"):
        Reprogrammed(folder=str(folder))


def test_nothing_is_downloaded_unpickled_or_run(tmp_path: Path, monkeypatch):
    """Custom code, a kernel from elsewhere and a pickle lie in the folder; none of them is touched, and no socket is opened."""
    folder = stored(tmp_path / "model")
    plain = load_decoder(folder).sha256
    (folder / "modeling_evil.py").write_text("raise SystemExit('run')")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    edit_config(
        folder,
        auto_map={"AutoModel": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"},
        _attn_implementation="someone/kernel",
        attn_implementation="someone/kernel",
    )

    def refuse(*arguments, **options):
        raise AssertionError("not offline")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert "modeling_evil" not in sys.modules
    decoder = load_decoder(folder)
    assert decoder.module.config._attn_implementation in ("sdpa", "eager") and type(decoder.module) is transformers.LlamaModel
    assert torch.equal(decoder.module.norm.weight, load_file(folder / "model.safetensors")["model.norm.weight"])
    assert decoder.sha256 == plain


def test_without_transformers_one_line_says_what_to_install(tmp_path: Path, monkeypatch):
    folder = drawn(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(AnyformerError, match=r"need the transformers package: pip install 'anyformer\[hf\]'"):
        Reprogrammed(folder=str(folder))


# --- the command line ---------------------------------------------------------------------------------------------------------------


def test_reprogramming_in_one_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    drawn(tmp_path / "model")
    words = ["train", "dyck", "--backbone", "model", "--steps", "4", "--batch-size", "4", "--evaluation-size", "8"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert not err and re.search(r"frozen: [\d,]+ numbers of LlamaModel", out) and "positions 63 x 16" in out
    assert main([*words, "--backbone-seed", "3", "--positions", "none", "--embedding-std", "0.1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["finished"] and set(made["trained"]) == {"tokens", "readout"}
    assert load_reprogramming(made["result"], "model").decoder.seed == 3
    assert main(["run", made["result"], "--tokens", "("]) == 2
    assert "holds 'anyformer-reprogramming', expected an anyformer-program" in capsys.readouterr().err
    for more, message in (
        (["--heads", "2"], "--heads does not apply to --backbone model; it is an option of none, sparse, random"),
        (["--readout", "shared"], "--readout does not apply to --backbone model"),
    ):
        assert main([*words, *more]) == 2
        _, err = capsys.readouterr()
        assert err.count("\n") == 1 and message in err
    stored(tmp_path / "trained")
    assert main([*words[:3], "trained", *words[4:], "--backbone-seed", "1"]) == 2
    assert "holds weights, a seed draws them where there is only config.json" in capsys.readouterr().err
