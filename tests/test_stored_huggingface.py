"""Hugging Face models as stored programs: exact for every family, no wider than they have parameters, generating what transformers does."""

from pathlib import Path

import pytest
import torch
from test_huggingface import MODELS, make

import anyformer as af
from anyformer.cli import main

transformers = pytest.importorskip("transformers")
FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "gpt_neox",
    "llama, biases, tied, one key",
    "gpt_neox, sequential, whole rotary",
]


def hidden(name: str, size: int, **options: object):
    """A model of that hidden size."""
    if name.startswith("gpt2"):
        return make(name, n_embd=size, n_inner=4 * size, n_positions=128, vocab_size=96, **options)
    heads = {"head_dim": size // 4} if "head_dim" in MODELS[name][1] else {}
    return make(name, hidden_size=size, intermediate_size=2 * size, vocab_size=96, **heads, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_exact_in_float64_and_read_back(name: str) -> None:
    model = make(name).double()
    machine = af.StoredProgram.for_class(model)
    program = af.compile(model, machine)
    verdict = af.verify(program, model, sequences=2, length=9).raise_if_not()
    assert verdict.dtype == "float64" and verdict.patterns > 0
    assert machine.network(program).network_class.stages == af.network_class(model).stages


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("name", [n for n in FAMILIES if "tied" not in n])
def test_the_width_is_at_most_the_number_of_parameters(name: str, size: int) -> None:
    model = hidden(name, size)
    machine = af.StoredProgram.for_class(model)
    assert machine.width <= sum(p.numel() for p in model.parameters()) and machine.scratch <= 0.05 * machine.width
    assert machine.cost().depth <= 3 * (2 * 2 + 1) + 1


def test_tied_weights_and_biases_of_gated_units_cost_what_the_docs_say() -> None:
    """Tied weights count once among the parameters and are token rows and read-out here: the width is a little above the count."""
    for size, share in ((32, 1.08), (64, 1.04)):
        for name in ("llama", "llama, biases, tied, one key"):
            model = hidden(name, size, tie_word_embeddings=True)
            parameters = sum(p.numel() for p in model.parameters())
            assert parameters < af.StoredProgram.for_class(model).width <= share * parameters
    tied, untied = (hidden("llama", 64, tie_word_embeddings=t) for t in (True, False))
    machine = af.StoredProgram.for_class(tied)
    assert machine == af.StoredProgram.for_class(untied)
    parameters = sum(p.numel() for p in tied.parameters())
    assert parameters < machine.width <= parameters + machine.scratch + machine.layout.width_in
    plain, biased = (
        af.StoredProgram.for_class(hidden("llama", 32, mlp_bias=b, attention_bias=True)).layout.constants for b in (False, True)
    )
    assert biased - plain == 2 * 2 * 64  # a gate's bias and an up-bias for each unit of two layers


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt_neox"])
def test_generates_what_transformers_generates(name: str) -> None:
    model = make(name).double()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    program = af.compile(model, af.StoredProgram.for_class(model)).detach()
    prompt = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[0, :3], mask[2, :1] = False, False
    for seen in (torch.ones_like(mask), mask):
        ours = af.generate(program, prompt, 12, mask=seen)
        theirs = model.generate(prompt, attention_mask=seen.long(), max_new_tokens=12, do_sample=False)
        assert torch.equal(ours, theirs)


def test_one_machine_runs_different_and_smaller_llamas() -> None:
    machine = af.StoredProgram.for_class(make("llama", num_hidden_layers=3))
    for seed, smaller in enumerate(
        (
            dict(num_hidden_layers=3),
            dict(num_hidden_layers=1),
            dict(num_attention_heads=2, head_dim=2, num_key_value_heads=1, vocab_size=7),
        )
    ):
        model = make("llama", seed, **smaller).double()
        af.verify(af.compile(model, machine), model, sequences=2, length=9).raise_if_not()
    with pytest.raises(af.OutsideClass, match=r"eps is 0\.1, the machine has 1e-06"):
        af.compile(make("llama", rms_norm_eps=0.1), machine)
    with pytest.raises(af.OutsideClass, match=r"frequencies\[0\] is .*, the machine has 1.0"):
        af.compile(make("llama", rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)), machine)


def test_folder_to_embedding_to_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make("llama").double()
    model.save_pretrained(tmp_path / "llama")
    assert main(["compile", str(tmp_path / "llama"), "--backbone", "stored-program", "-o", str(tmp_path / "program")]) == 0
    assert main(["verify", str(tmp_path / "program"), str(tmp_path / "llama")]) == 0
    assert main(["specialize", str(tmp_path / "program"), "--to", "huggingface", "-o", str(tmp_path / "back")]) == 0
    back = af.load_target(tmp_path / "back")
    tokens = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)  # float32 islands, both
    assert type(back) is type(model) and back.config.num_key_value_heads == 2
    again = af.compile(back, af.load(tmp_path / "program").machine())
    af.verify(again, back).raise_if_not()
    assert again.recipe == af.load(tmp_path / "program").recipe
