"""Runs: names, folders, and that whatever ends a run, what follows has the bits of a run that nothing ended."""

import json
import logging
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from run_cases import BRIEF, CONFIG, PLAIN, SMALL, PiecesModel, bits, child, unfinished
from safetensors.torch import load_file

from anyformer.cli import main
from anyformer.errors import AnyformerError
from anyformer.learning.checkpoints import checkpoints
from anyformer.learning.models import FullyTrained
from anyformer.learning.run_folder import checksum_of, checksum_of_files
from anyformer.learning.runs import Progress, RunConfig, RunResult, read_run, run_training
from anyformer.learning.sinks import TrackioSink
from anyformer.learning.training import History, TrainingConfig, train
from anyformer.spec import Spec
from anyformer.targets.transformer import Transformer
from anyformer.tasks import Dyck, KHop

# --- names -------------------------------------------------------------------------------------------------------------


def test_the_name_is_the_digest_of_what_was_chosen():
    """Golden: these names may never change, and no new option with a default may change them."""
    assert PLAIN.name == "ef5e2d035de338fb"
    hop = RunConfig(task=KHop(hops=1), model=FullyTrained(config=SMALL), training=TrainingConfig(steps=1000))
    assert hop.name == "9c36c8a04d875dda"
    assert replace(hop, task=KHop(hops=1, vocab=30), training=TrainingConfig(steps=1000, seed=0, clip=1.0)).name == hop.name


@pytest.mark.parametrize("field", [f.name for f in fields(TrainingConfig) if f.name != "steps"])
def test_every_option_that_is_not_its_default_counts(field: str):
    other = {"clip": None, "schedule": "one-cycle", "stop_at": 0.5, "betas": (0.9, 0.99), "optimizer": "muon"}
    plain = RunConfig(task=Dyck(), model=PiecesModel(), training=TrainingConfig(steps=900))
    default = getattr(plain.training, field)
    value = other[field] if field in other else default + 1
    changed = replace(plain, training=replace(plain.training, **{field: value}))
    assert changed.name != plain.name and changed != plain
    assert replace(changed, training=replace(changed.training, **{field: default})).name == plain.name


def test_a_configuration_survives_json(as_shipped):
    assert Spec.from_json(json.loads(json.dumps(CONFIG.to_json()))) == CONFIG
    with pytest.raises(AnyformerError, match="RunConfig: model must be a Model, got TransformerConfig"):
        RunConfig(task=Dyck(), model=SMALL, training=BRIEF)


# --- a folder -----------------------------------------------------------------------------------------------------------


def test_a_run_trains_what_train_trains(tmp_path: Path):
    state, seen = torch.get_rng_state(), []
    result = run_training(PLAIN, tmp_path, report=seen.append)
    assert torch.equal(torch.get_rng_state(), state)
    target = PLAIN.model.build(PLAIN.task, PLAIN.training.seed)
    history = train(target, PLAIN.task, PLAIN.training)
    assert result == RunResult(tmp_path / PLAIN.name, history, True) == read_run(result.folder)
    saved = Transformer.load(result.result)
    assert saved.token_names == PLAIN.task.token_names
    assert all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in target.state_dict().items())
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line["accuracy"]) for line in lines] == list(
        zip(history.steps, history.losses, history.accuracies, strict=True)
    )
    assert [line["rate"] for line in lines] == [PLAIN.training.rate(step - 1) for step in history.steps]
    assert [path.stem for path in checkpoints(result.folder / "checkpoints")] == ["step-000000014", "step-000000007"]
    assert [(news.step, news.loss, news.accuracy) for news in seen if news.step in history.steps] == list(
        zip(history.steps, history.losses, history.accuracies, strict=True)
    )
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run_training(PLAIN, tmp_path) == result and {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_the_environment_names_versions_and_no_user(tmp_path: Path):
    folder = run_training(PLAIN, tmp_path).folder
    text = (folder / "environment.json").read_text()
    (entry,) = json.loads(text)
    assert entry["torch"] == torch.__version__ and entry["threads"] == 1 and entry["from_step"] == 0
    assert not any(secret in text for secret in (str(Path.home()), os.uname().nodename, str(tmp_path), sys.prefix))


@pytest.mark.parametrize("text", ["", "[1]", "{}", "[null, []]"])
def test_a_damaged_environment_is_written_anew(text: str, tmp_path: Path):
    unfinished(tmp_path)
    path = tmp_path / CONFIG.name / "environment.json"
    path.write_text(text)
    assert run_training(CONFIG, tmp_path).finished
    assert [entry["torch"] for entry in json.loads(path.read_text())] == [torch.__version__]


# --- going on -------------------------------------------------------------------------------------------------------------


def test_kill_9_at_any_moment_costs_nothing(reference: Path, tmp_path: Path, as_shipped):
    """Killed at random moments, again and again, with a checkpoint at every step; the last session finishes."""
    moments, kills = random.Random(5), 0
    for _ in range(25):
        process = child(lambda: run_training(CONFIG, tmp_path, checkpoint_every=0.0))
        process.join(moments.uniform(0.0, 0.04))
        if not process.is_alive():
            break
        process.kill()
        process.join()
        kills += 1
    assert kills >= 4
    result = run_training(CONFIG, tmp_path)
    assert result.finished and bits(result.folder) == bits(reference)
    assert result.history == read_run(reference).history
    ends = [load_file(checkpoints(folder / "checkpoints")[0]) for folder in (result.folder, reference)]
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_makes_a_checkpoint_and_ends_cleanly(reference: Path, tmp_path: Path, number: int, caplog):
    def report(news: Progress) -> None:
        if news.step == 14:
            os.kill(os.getpid(), number)

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        run_training(CONFIG, tmp_path, report=report, checkpoint_every=math.inf)
    assert "stopped after step 15 of 40; resume continues" in caplog.text
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert checkpoints(tmp_path / CONFIG.name / "checkpoints")[0].stem == "step-000000015"
    with pytest.raises(AnyformerError, match=r"holds an unfinished run \(step-000000015\); continue it with --resume"):
        run_training(CONFIG, tmp_path, resume=False)
    assert bits(run_training(CONFIG, tmp_path).folder) == bits(reference)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path):
    def report(news: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        raise AssertionError("still running")

    with pytest.raises(KeyboardInterrupt):
        run_training(CONFIG, tmp_path, report=report)


def test_a_signal_that_the_process_ignores_stays_ignored(reference: Path, tmp_path: Path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job
    try:
        result = run_training(CONFIG, tmp_path, report=lambda _: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert bits(result.folder) == bits(reference)


def test_ctrl_c_on_the_command_line(tmp_path: Path, as_shipped):
    """In a process of its own: exit code 130, two lines, no traceback; --resume finishes the run."""
    words = ["train", "dyck", "--heads", "1", "--layers", "1", "--head-dim", "4", "--features", "8", "--batch-size", "4"]
    words += ["--evaluate-every", "10", "--evaluation-size", "8", "--steps", "240", "--runs", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "anyformer", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while process.poll() is None and not list(tmp_path.glob("*/checkpoints/step-*")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped after step" in err and err.endswith("anyformer: interrupted\n") and "Traceback" not in out + err
    assert main(words) == 2  # an unfinished run, and no --resume
    assert main([*words, "--resume"]) == 0
    (folder,) = tmp_path.iterdir()
    assert read_run(folder).finished and Transformer.load(folder / "result").config.features == 8


# --- folders that are refused -------------------------------------------------------------------------------------------------------


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new))


def without_evaluations(folder: Path) -> None:
    none = History((), (), (), False, 1.0)
    sums = {"sha256": checksum_of(none), "result": checksum_of_files(folder / "result")}
    (folder / "finished.json").write_text(json.dumps(asdict(none) | sums))


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (
            edit("config.json", '"steps": 40', '"steps": 41'),
            r"training.steps is 41 there, 40 here; it was changed, move the folder",
        ),
        (
            edit("config.json", '"Dyck"', '"Rubik"'),
            r"config.json: unknown specification type 'Rubik'; import the module that defines it first$",
        ),
        (edit("config.json", "{", "["), r"config.json is damaged .*; move the folder away and start anew"),
        (
            edit("finished.json", '"steps"', '"stops"'),
            r"finished.json is damaged \(KeyError: 'steps'\); remove .*json and resume the run",
        ),
        (edit("finished.json", "false", "true"), r"finished.json is damaged \(ValueError: its sha256 is another\); remove"),
        (without_evaluations, r"finished.json is damaged \(ValueError: it has no evaluation\); remove"),
        (lambda f: (f / "finished.json").write_text("[]"), r"finished.json is damaged \(TypeError"),
        (lambda f: (f / "config.json").unlink(), r"config.json is missing; move the folder away"),
        (
            lambda f: shutil.rmtree(f / "result"),
            r"result is missing; remove .*finished.json and resume the run: it is written from",
        ),
        (
            lambda f: [file.write_bytes(b"") for file in (f / "result").iterdir()],
            r"result is damaged or was changed; remove .*json",
        ),
        (edit("finished.json", '"result"', '"results"'), r"finished.json is damaged \(KeyError: 'result'\); remove"),
        (lambda f: f.rename(f.with_name("x")) and f.write_text(""), r"cannot be used as the folder of a run|Not a directory"),
    ],
)
def test_a_folder_that_is_not_this_runs(reference: Path, tmp_path: Path, breakage, message: str):
    folder = tmp_path / CONFIG.name
    subprocess.run(["cp", "-r", reference, folder], check=True)
    breakage(folder)
    with pytest.raises(AnyformerError, match=message):
        run_training(CONFIG, tmp_path)


def test_a_result_that_was_lost_is_written_again(reference: Path, tmp_path: Path):
    folder = tmp_path / CONFIG.name
    subprocess.run(["cp", "-r", reference, folder], check=True)
    shutil.rmtree(folder / "result")
    (folder / "finished.json").unlink()
    assert run_training(CONFIG, tmp_path).finished and bits(folder) == bits(reference)


def test_reading_what_is_no_run(reference: Path, tmp_path: Path):
    with pytest.raises(AnyformerError, match=r"is not the folder of a run; expected one with config.json"):
        read_run(tmp_path)
    subprocess.run(["cp", "-r", reference, tmp_path / "renamed"], check=True)
    with pytest.raises(AnyformerError, match=f"that of the run {CONFIG.name}; rename the folder"):
        read_run(tmp_path / "renamed")


def test_one_process_a_folder(tmp_path: Path):
    home = unfinished(tmp_path, steps=8)
    with home.held(), pytest.raises(AnyformerError, match=rf"another process \(id {os.getpid()}\) is training here"):
        run_training(CONFIG, tmp_path)
    assert run_training(CONFIG, tmp_path).finished


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(PLAIN, task=KHop()), "the task has 30 tokens, the transformer 4"),
        (
            replace(PLAIN, model=FullyTrained(config=replace(SMALL, positions="learned", max_length=5))),
            "at least the task's length 63",
        ),
        (
            replace(PLAIN, model=FullyTrained(config=replace(SMALL, features=10**12))),
            "training this transformer needs .* of memory",
        ),
        (
            replace(PLAIN, model=FullyTrained(config=replace(SMALL, layers=10**12))),
            "training this transformer needs .* of memory",
        ),
    ],
)
def test_an_impossible_model_leaves_nothing_behind(tmp_path: Path, config: RunConfig, message: str):
    with pytest.raises(AnyformerError, match=message):
        run_training(config, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(AnyformerError, match="device 'abacus' cannot be used"):
        run_training(PLAIN, tmp_path, device="abacus")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a task must come first, one of dyck, k-hop.*; got nothing"),
        (["chess"], "got 'chess'"),
        (["dyck", "--hops", "1"], "Unrecognized options: --hops"),
        (["k-hop", "--hops", "99"], "hops must be None or at most 16, got 99"),
        (["dyck", "--steps", "0"], "steps must be an integer >= 1"),
        (["dyck", "--features", "1000000000"], "needs .* of memory"),
        (["dyck", "--backbone", "quantum"], "backbone"),
    ],
)
def test_unusable_options_are_one_line(tmp_path: Path, monkeypatch, capsys, words: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words, *(["--json"] if words else [])]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and not list(tmp_path.iterdir())
    assert re.search(message, err), err


# --- sinks ----------------------------------------------------------------------------------------


class Notes:
    def __init__(self, breaks_at: int | None = None):
        self.heard, self.breaks_at = [], breaks_at

    def begin(self, name, config):
        self.heard.append(("begin", name, config))

    def log(self, step, figures):
        if step == self.breaks_at:
            raise ConnectionError("the tracker is gone")
        self.heard.append((step, dict(figures)))

    def end(self):
        self.heard.append("end")


def test_sinks_hear_every_evaluation_and_may_fail(tmp_path: Path, caplog):
    good, bad = Notes(), Notes(breaks_at=14)
    with caplog.at_level(logging.WARNING):
        history = run_training(CONFIG, tmp_path, sinks=(bad, good)).history
    assert good.heard[0] == ("begin", CONFIG.name, CONFIG.to_json()) and good.heard[-1] == "end"
    assert [(step, f["loss"], f["accuracy"]) for step, f in good.heard[1:-1]] == list(
        zip(history.steps, history.losses, history.accuracies, strict=True)
    )
    assert len(bad.heard) == 2 and caplog.text.count("Notes failed (the tracker is gone)") == 1


def test_trackio(tmp_path: Path, monkeypatch):
    class Fake:
        def __init__(self):
            self.calls = []

        def __getattr__(self, verb):
            return lambda *a, **k: self.calls.append((verb, a, k))

    fake = Fake()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    run_training(PLAIN, tmp_path, sinks=(TrackioSink("hops"),))
    (first, _, about), *logs, last = fake.calls
    assert first == "init" and about["project"] == "hops" and about["name"] == PLAIN.name and about["config"] == PLAIN.to_json()
    assert [(verb, k["step"]) for verb, _, k in logs] == [("log", 7), ("log", 14)] and last[0] == "finish"
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(AnyformerError, match=r"needs the package trackio; install it with pip install 'anyformer\[track\]'"):
        TrackioSink()
