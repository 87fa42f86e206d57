"""The command line: JSON shapes, exit codes, one clear line for unusable input and never a traceback."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import anyformer as af
from anyformer import demo
from anyformer.cli import COMMANDS, main
from anyformer.learning import demo_targets
from anyformer.learning.training import TrainingConfig


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    torch.manual_seed(0)
    sizes = dict(vocab=4, heads=2, layers=2, head_dim=3, features=5, residual=True, norm="rms")
    af.Transformer(**sizes, token_names=("_", "(", ")", "?")).save(folder / "named")
    af.Transformer(**sizes).double().save(folder / "plain")
    af.Transformer(vocab=4, heads=1, layers=3, head_dim=3, features=4).save(folder / "one-head")
    return folder


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stop:  # the option parser
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def json_of(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict:
    got, out, err = call(capsys, *arguments, "--json")
    assert got == code and err == ""
    return json.loads(out)


@pytest.mark.parametrize(
    "target, options",
    [
        ("named", ["--backbone", "path-tree"]),
        ("named", ["--backbone", "looped"]),
        ("plain", ["--backbone", "random", "--seed", "3", "--oversample", "1.5", "--law", "gaussian"]),
        ("one-head", ["--backbone", "chain", "--dtype", "float64"]),
        ("named", ["--backbone", "stored-program"]),
    ],
)
def test_compile_verify_inspect_run(capsys, targets: Path, tmp_path: Path, target: str, options: list[str]) -> None:
    made = json_of(capsys, "compile", targets / target, *options, "-o", tmp_path / "p")
    assert made["report"]["passed"] and made["backbone"] == options[1]
    verdict = json_of(capsys, "verify", tmp_path / "p", targets / target)
    assert verdict["passed"] is True and verdict["max_abs_error"] < 1e-5 and verdict["max_rel_error"] < 1e-5
    assert verdict["dtype"] == ("float64" if target == "plain" or "float64" in options else "float32")
    about = json_of(capsys, "inspect", tmp_path / "p")
    assert about["width"] == made["width"] and about["fingerprint"] == made["fingerprint"] and about["report"]["passed"]
    if options[1] in ("path-tree", "looped"):
        assert sum(b["count"] for b in about["blocks"]) == about["width"]
    if "random" in options:
        assert made["provenance"]["oversampling"] == pytest.approx(1.5, rel=0.02) and made["provenance"]["condition"] > 1
    words = "( ( ) ?" if target == "named" else "1 1 2 3"
    ran = json_of(capsys, "run", tmp_path / "p", "--tokens", words)
    assert ran["tokens"] == words.split() and len(ran["predictions"]) == 4
    expected = af.Transformer.load(targets / target)(torch.tensor([[1, 1, 2, 3]]))[0]
    torch.testing.assert_close(torch.tensor(ran["logits"]), expected.float(), rtol=1e-4, atol=1e-4)
    for command in (
        ["inspect", tmp_path / "p"],
        ["run", tmp_path / "p", "--tokens", words],
        ["verify", tmp_path / "p", targets / target],
    ):
        code, out, err = call(capsys, *command)
        assert code == 0 and out and not err


def test_verify_says_no_with_exit_code_1(capsys, targets: Path, tmp_path: Path) -> None:
    json_of(capsys, "compile", targets / "named", "-o", tmp_path / "p")
    assert json_of(capsys, "verify", tmp_path / "p", targets / "plain", code=1)["passed"] is False
    code, out, _ = call(capsys, "verify", tmp_path / "p", targets / "plain")
    assert code == 1 and "FAILED" in out


def test_cost_has_the_documented_shape(capsys) -> None:
    sizes = ["--heads", 2, "--layers", 4, "--head-dim", 30, "--features", 30]
    result = json_of(capsys, "cost", *sizes)
    assert result["backbones"]["path-tree"]["width"] == result["backbones"]["looped"]["width"] == 2280
    assert result["backbones"]["random"] | {"width": 2280, "recommended": 2850} == result["backbones"]["random"]
    assert result["lower_bound"] == 4
    huge = json_of(capsys, "cost", *sizes[:2], "--layers", 100, *sizes[4:], "--residual", "--mlp", 64, "--gated", "--norm", "rms")
    assert huge["backbones"]["path-tree"]["width"] > 10**48
    code, out, _ = call(capsys, "cost", *sizes)
    assert code == 0 and "2280" in out and "2850" in out


def test_tasks_have_the_documented_shape(capsys, tmp_path: Path) -> None:
    (tmp_path / "book").write_bytes(b"to be or not to be, " * 100)
    result = json_of(capsys, "tasks", "--rows", 50, "--file", tmp_path / "book")
    assert result["rows"] == 50 and [t["name"] for t in result["tasks"]][-1] == "text"
    for task in result["tasks"]:
        found = task["baselines"]
        assert all(
            0 <= s["accuracy"] <= 1 for s in (found["constant"], found["position"], found["own_token"], *found["rules"].values())
        )
        assert af.tasks.Task.from_json(task["task"]).vocab == task["vocab"] >= task["used"]
        assert task["row"][0].startswith("inputs") and task["row"][1].startswith("labels")
    code, out, _ = call(capsys, "tasks", "--rows", 50)
    assert code == 0 and "k-hop, hops=4" in out and "23 of 30" in out and "rule 'equal counts'" in out and "text" not in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nonsense"], "there is no command 'nonsense'"),
        (["verify", "missing", "{named}"], "missing is not a folder"),
        (["run", "{named}", "--tokens", "("], "expected an anyformer-program"),
        (["compile", "{program}", "-o", "{new}"], "expected an anyformer-target"),
        (["compile", "{named}", "--backbone", "quantum", "-o", "{new}"], "--backbone must be one of path-tree"),
        (["compile", "{named}", "--backbone", "chain", "-o", "{new}"], "one head"),
        (["compile", "{named}", "--seed", "1", "-o", "{new}"], "takes no option seed"),
        (["compile", "{named}", "--backbone", "random", "--oversample", "0.5", "-o", "{new}"], "at least 1"),
        (["compile", "{named}", "-o", "{named}"], "already holds something that is not an anyformer-program"),
        (["run", "{program}", "--tokens", "( x )"], "unknown token 'x'; this program knows _ ( ) ?"),
        (["run", "{program}", "--tokens", " "], "no tokens given"),
        (["cost", "--heads", "0", "--layers", "1", "--head-dim", "1", "--features", "1"], "heads must be an integer >= 1"),
        (["tasks", "--file", "missing"], "Text: missing cannot be read (No such file or directory)"),
        (["tasks", "--rows", "0"], "size must be an integer >= 1, got 0"),
        (["cost", "--heads", "9", "--layers", "99999", "--head-dim", "1", "--features", "1", "--json"], "more than 4000 digits"),
    ],
)
def test_unusable_input_is_one_line_and_exit_code_2(
    capsys, targets: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    json_of(capsys, "compile", targets / "named", "-o", tmp_path / "p")
    names = {"named": targets / "named", "program": tmp_path / "p", "new": tmp_path / "new"}
    code, out, err = call(capsys, *[a.format(**names) for a in arguments])
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("anyformer: ") and message in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("arguments", [["cost", "--frobnicate"], ["run"], ["cost", "--heads", "two"]])
def test_unknown_or_missing_options_exit_with_2(capsys, arguments: list[str]) -> None:
    code, out, err = call(capsys, *arguments)
    assert code == 2 and out == "" and err


def test_memory_that_torch_cannot_have_is_one_line(capsys, monkeypatch) -> None:
    def full(_options):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        )

    monkeypatch.setitem(COMMANDS, "tasks", replace(COMMANDS["tasks"], action=full))
    assert call(capsys, "tasks") == (2, "", "anyformer: out of memory; choose a smaller batch, machine or task\n")

    def wrong(_options):
        raise RuntimeError("another")

    monkeypatch.setitem(COMMANDS, "tasks", replace(COMMANDS["tasks"], action=wrong))
    with pytest.raises(RuntimeError, match="another"):
        main(["tasks"])


def test_damaged_files_are_refused(capsys, targets: Path, tmp_path: Path) -> None:
    shutil.copytree(targets / "named", tmp_path / "t")
    data = (tmp_path / "t" / "model.safetensors").read_bytes()
    (tmp_path / "t" / "model.safetensors").write_bytes(data[: len(data) // 2])
    code, _, err = call(capsys, "compile", tmp_path / "t", "-o", tmp_path / "new")
    assert code == 2 and "damaged" in err and not (tmp_path / "new").exists()


def test_every_command_has_help_with_an_example(capsys) -> None:
    code, out, _ = call(capsys)
    assert code == 0 and all(re.search(rf"^  {name} ", out, re.M) for name in COMMANDS)
    assert [out.index(f"\n  {name} ") for name in COMMANDS] == sorted(out.index(f"\n  {name} ") for name in COMMANDS)
    for name in COMMANDS:
        code, out, _ = call(capsys, name, "--help")
        assert code == 0 and f"Example: anyformer {name}" in out and "--json" in out


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "anyformer", "--help"], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout


def test_demo_end_to_end_on_barely_trained_targets(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole demo with two training steps a target: everything but the accuracy must hold."""
    short = {
        name: TrainingConfig(steps=2, warm_up=1, evaluate_every=1, evaluation_size=64) for name in demo_targets.DEMO_TRAINING
    }
    monkeypatch.setattr(demo, "train_demo_targets", lambda report: demo_targets.train_demo_targets(report, short))
    monkeypatch.setattr(demo, "EVALUATION_SIZE", 64)
    result = json_of(capsys, "demo", "-o", tmp_path / "demo")
    assert result["backbone_unchanged"] is True and result["passed"] is True
    assert [p["task"] for p in result["programs"]] == ["dyck", "one-hop"]
    for p in result["programs"]:
        assert p["target_accuracy"] == p["program_accuracy"] and 0 <= p["target_accuracy"] <= 100
        assert 0 < p["max_abs_error"] < 1e-4 and p["literal_error"] < 1e-4
        folder = tmp_path / "demo" / "programs" / p["task"]
        program = af.load(folder)
        assert program.report is not None and program.report["passed"] and program.fingerprint == result["fingerprint"]
        target = af.Transformer.load(tmp_path / "demo" / "targets" / p["task"])
        assert af.verify(program, target).passed
    first, second = (af.load(tmp_path / "demo" / "programs" / p["task"]) for p in result["programs"])
    tokens = torch.tensor([[1, 2, 3]])
    assert first.machine() is second.machine() and not torch.equal(af.run(first, tokens), af.run(second, tokens))
    assert (tmp_path / "demo" / "overview.png").stat().st_size > 20_000


def test_the_hash_sees_a_single_changed_number() -> None:
    module = torch.nn.Linear(3, 2)
    before = demo.tensors_sha256(module)
    with torch.no_grad():
        module.weight[0, 0] += 1e-6
    assert demo.tensors_sha256(module) != before


def test_names_are_printed_as_they_are_and_json_is_json(capsys, tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = af.Transformer(vocab=3, heads=1, layers=1, head_dim=2, features=3, token_names=("[/x]", ":smile:", "é"))
    target.save(tmp_path / "t")
    json_of(capsys, "compile", tmp_path / "t", "-o", tmp_path / "p")
    code, out, _ = call(capsys, "run", tmp_path / "p", "--tokens", "[/x] :smile: é")
    assert code == 0 and "[/x]" in out and ":smile:" in out
    huge = af.Transformer(vocab=3, heads=1, layers=1, head_dim=2, features=3)
    with torch.no_grad():
        huge.embedding.weight.fill_(3e38)
        huge.readout.weight.fill_(0.5)
        for name in ("W_V", "W_O"):
            getattr(huge.blocks[0].attention, name).weight.fill_(0.5)
    af.compile(huge, af.PathTree.for_class(huge), dtype=torch.float64).to(torch.float64).save(tmp_path / "h")
    json_of(capsys, "run", tmp_path / "h", "--tokens", "0 1")
    assert call(capsys, "inspect", tmp_path / "h")[0] == 0
    code, _, err = call(capsys, "run", tmp_path / "h", "--tokens", "1" * 5000)
    assert code == 2 and err.count("\n") == 1


def test_option_errors_are_one_line(capsys) -> None:
    code, out, err = call(capsys, "cost", "--frobnicate")
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("anyformer: ") and "frobnicate" in err


def test_deep_programs_are_inspected_and_huge_sizes_are_one_line(capsys, tmp_path: Path, as_shipped) -> None:
    deep = af.Transformer(vocab=2, heads=1, layers=1010, head_dim=1, features=1)
    af.compile(deep, af.PathTree.for_class(deep)).save(tmp_path / "p")
    assert len(json_of(capsys, "inspect", tmp_path / "p")["blocks"]) == 1011
    for sizes in (["16", "3300", "3"], ["2", "2", str(10**26)], ["1", str(10**9), "3"]):
        heads, layers, width = sizes
        arguments = ["cost", "--heads", heads, "--layers", layers, "--head-dim", width, "--features", "3", "--json"]
        code, out, err = call(capsys, *arguments)
        assert code == 2 and out == "" and err.count("\n") == 1, err


def test_compile_exits_with_1_where_the_program_does_not_verify(capsys, targets: Path, tmp_path: Path, monkeypatch) -> None:
    real = af.compile

    def wrong(*arguments, **options):
        program = real(*arguments, **options)
        return replace(program, tokens=program.tokens * 1.01)

    monkeypatch.setattr("anyformer.compiling.compile", wrong)
    made = json_of(capsys, "compile", targets / "named", "-o", tmp_path / "p", code=1)
    assert made["report"]["passed"] is False and af.load(tmp_path / "p").report["passed"] is False


def test_the_demo_sees_a_machine_that_moves(capsys, tmp_path: Path, monkeypatch) -> None:
    """Programs must leave the machine alone: one that writes into its table is found out."""
    names = {name: task.token_names for name, task in demo_targets.demo_tasks().items()}
    fresh = {name: af.Transformer(demo_targets.DEMO_CLASS, token_names=n) for name, n in names.items()}
    real = af.compile

    def meddling(target, machine):
        machine.routing[0, 0] += 1  # the number of the stage, which the run does not need
        return real(target, machine)

    monkeypatch.setattr(demo, "train_demo_targets", lambda report: fresh)
    monkeypatch.setattr(demo, "compile", meddling)
    monkeypatch.setattr(demo, "EVALUATION_SIZE", 64)
    result = json_of(capsys, "demo", "-o", tmp_path / "demo", code=1)
    assert result["backbone_unchanged"] is False and result["passed"] is False


def test_generate(capsys, targets: Path, tmp_path: Path) -> None:
    for backbone in ("path-tree", "stored-program"):
        json_of(capsys, "compile", targets / "named", "--backbone", backbone, "-o", tmp_path / backbone)
    made = json_of(capsys, "generate", tmp_path / "path-tree", "--tokens", "( )", "--new-tokens", "5")
    assert made == json_of(capsys, "generate", tmp_path / "stored-program", "--tokens", "( )", "--new-tokens", "5")
    program = af.load(tmp_path / "path-tree")
    assert (
        made["ids"] == af.generate(program, torch.tensor([program.token_ids("( )")]), 5)[0, 2:].tolist() and len(made["ids"]) == 5
    )
    assert made["generated"] == [program.token_names[i] for i in made["ids"]] and made["tokens"] == ["(", ")"]
    _, out, _ = call(capsys, "generate", tmp_path / "path-tree", "--tokens", "( )", "--new-tokens", "5")
    assert out.split() == made["generated"]
    stopped = json_of(capsys, "generate", tmp_path / "path-tree", "--tokens", "( )", "--end", made["generated"][0])
    assert stopped["generated"] == made["generated"][:1]
    for bad in (["--tokens", "x"], ["--tokens", "("], ["--tokens", "(", "--new-tokens", "-1"], ["--tokens", "(", "--end", "x"]):
        code, _, err = call(capsys, "generate", tmp_path / ("nowhere" if bad == ["--tokens", "("] else "path-tree"), *bad)
        assert code == 2 and err.count("\n") == 1 and err.startswith("anyformer: ")
