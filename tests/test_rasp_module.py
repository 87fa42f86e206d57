"""Compiled programs as plain modules, in folders, and on the fixed 0/1 stored-program machine."""

import json
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from rasp_examples import EXAMPLES, MAX_LENGTH, compiled, inputs

from anyformer import rasp
from anyformer.errors import AnyformerError
from anyformer.network import Network
from anyformer.rasp.compiled import edge_inputs
from anyformer.rasp.module import RaspModule

NAMES = list(EXAMPLES)


@cache
def module_of(name: str) -> RaspModule:
    return rasp.to_module(compiled(name))


@pytest.mark.parametrize("name", NAMES)
def test_module_equals_the_network(name: str) -> None:
    program = compiled(name)
    module = module_of(name)
    tolerance = 1e-10 if program.network.embedding.dtype == torch.float64 else 1e-5
    for tokens in (*inputs(name), *edge_inputs(program, 6)):
        torch.testing.assert_close(module(program.encode([tokens])), program.run([tokens]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_module_means_what_the_program_means(name: str) -> None:
    program, module = compiled(name), module_of(name)
    for tokens in inputs(name):
        assert program.decode(module(program.encode([tokens]))[0]) == pytest.approx(
            rasp.interpret(EXAMPLES[name][0], tokens), abs=program.error + 1e-9
        )


def test_weights_have_their_usual_names_and_shapes() -> None:
    program = compiled("reverse")
    module = module_of("reverse")
    state = module.state_dict()
    d = program.width - 1
    assert state["embed.W_E"].shape == (4, d) and state["pos_embed.W_pos"].shape == (MAX_LENGTH, d)
    assert state["blocks.0.attn.W_Q"].shape[:2] == state["blocks.1.attn.W_V"].shape[:2] == (1, d)
    assert state["blocks.1.attn.W_O"].shape[::2] == (1, d)
    assert state["blocks.0.mlp.W_in"].shape == (d, program.units[0]) == state["blocks.0.mlp.W_out"].T.shape
    assert "blocks.1.mlp.W_in" not in state and state["unembed.W_U"].shape == (d, 1)
    assert (len(module.blocks), tuple(b.attn.W_Q.shape[0] for b in module.blocks)) == (program.layers, program.heads)


def test_state_dict_carries_the_program() -> None:
    """Heads of another program of the same shape become this one's by its state dict alone."""
    forward, backward = (rasp.compile(rasp.aggregate(rasp.select(rasp.indices, rasp.indices + step, rasp.EQ), rasp.tokens), (1, 2, 3), 4)
                         for step in (1, -1))  # fmt: skip
    module = rasp.to_module(forward)
    before = module(forward.encode([[1, 2, 3]]))
    assert forward.decode(before[0]) == [2, 3, 0]
    module.load_state_dict(rasp.to_module(backward).state_dict())
    assert backward.decode(module(backward.encode([[1, 2, 3]]))[0]) == [0, 1, 2]


def test_module_refuses_other_inputs(as_shipped: None) -> None:
    module = module_of("reverse")
    with pytest.raises(AnyformerError, match=r"shape \(batch, 1\.\.6\) expected, got \(1, 7\)"):
        module(torch.zeros(1, 7, dtype=torch.int64))
    with pytest.raises(AnyformerError, match=r"token ids expected, got torch\.float32"):
        module(torch.zeros(1, 3))
    with pytest.raises(AnyformerError, match="needs a compiled program, got Network"):
        rasp.to_module(compiled("reverse").network)  # type: ignore[arg-type]


# --- folders ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_program_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    program = compiled(name)
    program.save(tmp_path / "program")
    assert not list(tmp_path.rglob("*.pt")) and sorted(p.name for p in (tmp_path / "program").iterdir()) == [
        "README.md", "config.json", "model.safetensors"]  # fmt: skip
    loaded = rasp.load(tmp_path / "program")
    for tokens in inputs(name):
        assert torch.equal(loaded.run([tokens]), program.run([tokens]))
        assert loaded(tokens) == program(tokens) and list(map(type, loaded(tokens))) == list(map(type, program(tokens)))
    kept = ("vocab", "max_length", "outputs", "text", "token_place", "names", "mode", "error", "causal", "seconds", "notes")
    assert [getattr(loaded, k) for k in kept] == [getattr(program, k) for k in kept]
    assert str(loaded) == str(program)


def test_tuples_come_back_as_tuples(tmp_path: Path) -> None:
    program = rasp.compile(rasp.apply(lambda t, i: (t, i), rasp.tokens, rasp.indices), "ab", 3)
    program.save(tmp_path)
    assert rasp.load(tmp_path)(list("ba")) == [("b", 0), ("a", 1)]


def test_values_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    program = rasp.compile(rasp.tokens.map(lambda t: frozenset(t)), "ab", 3)
    with pytest.raises(AnyformerError, match=r"the value frozenset\({'.'}\) cannot be saved"):
        program.save(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    compiled("reverse").save(tmp_path / "program")
    return tmp_path / "program"


def changed(folder: Path, **fields: object) -> None:
    """Change fields of a saved configuration, in both places that hold it."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text()) | fields
    text = json.dumps(config, indent=1, sort_keys=True)
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata={"anyformer": text})
    (folder / "config.json").write_text(text)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"vocab": ["a", "b"]}, "sizes do not fit"),
        ({"max_length": 7}, "sizes do not fit"),
        ({"max_length": "6"}, "max_length is '6'"),
        ({"outputs": {"values": ["a"]}}, "'codes' is missing"),
        ({"outputs": None}, "no compiled program's"),
        ({"vocab": {"low": 1.0}}, "no compiled program's"),
        ({"vocab": {"low": 2.0, "high": 1.0}}, "low <= high"),
        ({"names": [["a"]]}, "sizes do not fit"),
        ({"token_place": 99}, "sizes do not fit"),
        ({"network": None}, "NetworkClass"),
        ({"format": "anyformer-program"}, "holds 'anyformer-program', expected an anyformer-rasp"),
    ],
)
def test_changed_configurations_are_refused(folder: Path, fields: dict, message: str) -> None:
    changed(folder, **fields)
    with pytest.raises(AnyformerError, match=message) as caught:
        rasp.load(folder)
    assert "\n" not in str(caught.value)


def test_damaged_and_foreign_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged, message in (
        (whole[:100], "damaged"),
        (whole[:-8] + b"\x01" * 8, "do not match their checksum|NaN"),
        (b"", "damaged"),
    ):
        weights.write_bytes(damaged)
        with pytest.raises(AnyformerError, match=message):
            rasp.load(folder)
    with pytest.raises(AnyformerError, match="is not a folder"):
        rasp.load(tmp_path / "nothing")
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(AnyformerError, match=r"has no model\.safetensors"):
        rasp.load(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(AnyformerError, match="already holds something that is not"):
        compiled("reverse").save(folder)


def test_a_network_of_another_shape_is_not_saved(tmp_path: Path) -> None:
    from dataclasses import replace

    from anyformer.network import Stage

    program = compiled("histogram")
    network: Network = program.network
    first = replace(network.stages[0], shared=torch.zeros(program.width, 0, dtype=torch.float64))
    odd = replace(program, network=replace(network, stages=(Stage(first.branches, first.shared), *network.stages[1:])))
    with pytest.raises(AnyformerError, match=re.escape("stage 1 holds what no compiled program has")):
        odd.save(tmp_path)
