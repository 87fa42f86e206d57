"""Runs: names, folders, and that whatever ends a run, what follows has the bits of a run that nothing ended."""

import errno
import json
import logging
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from anyformer.cli import main
from anyformer.errors import AnyformerError
from anyformer.learning import checkpoints as checkpoints_module
from anyformer.learning.checkpoints import checkpoints, read_checkpoint, write_checkpoint
from anyformer.learning.models import FullyTrained, Model
from anyformer.learning.optimisation import Optimizer
from anyformer.learning.run_folder import RunFolder
from anyformer.learning.runs import Progress, RunConfig, RunResult, read_run, run_training
from anyformer.learning.sinks import TrackioSink
from anyformer.learning.training import Diverged, Training, TrainingConfig, train
from anyformer.spec import Spec
from anyformer.targets.transformer import Transformer, TransformerConfig
from anyformer.tasks import IGNORED, Dyck, KHop


class Pieces(nn.Module):
    """Trained tables and a vector around a frozen matrix, a buffer and dropout."""

    def __init__(self, vocab: int, dropout: float):
        super().__init__()
        self.table, self.frozen, self.out = nn.Embedding(vocab, 6), nn.Linear(6, 6), nn.Linear(6, vocab)
        self.register_buffer("shift", torch.ones(6))
        self.dropout = nn.Dropout(dropout)
        self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.table(inputs)
        x = x.cumsum(1) / torch.arange(1, inputs.shape[1] + 1)[:, None] + self.shift
        return self.out(self.dropout(torch.tanh(self.frozen(x))))


@dataclass(frozen=True, kw_only=True)
class PiecesModel(Model):
    dropout: float = 0.1

    def build(self, task, seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Pieces(task.vocab, self.dropout)

    def save(self, learner, folder):
        Path(folder).mkdir(exist_ok=True)
        save_file(learner.state_dict(), Path(folder) / "pieces.safetensors")


SMALL = TransformerConfig(vocab=4, heads=1, layers=1, head_dim=4, features=8, residual=True, norm="rms")
BRIEF = TrainingConfig(steps=40, batch_size=2, warm_up=5, evaluate_every=7, evaluation_size=8, learning_rate=0.01)
CONFIG = RunConfig(task=Dyck(), model=PiecesModel(), training=BRIEF)
PLAIN = RunConfig(task=Dyck(), model=FullyTrained(config=SMALL), training=replace(BRIEF, steps=14))


def bits(folder: Path) -> tuple[dict[str, bytes], list[dict]]:
    """The result's files, and the lines of metrics without their wall time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = {path.name: path.read_bytes() for path in (folder / "result").iterdir()}
    assert files and lines
    return files, [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of CONFIG, trained without a break."""
    return run_training(CONFIG, tmp_path_factory.mktemp("reference")).folder


def child(work: Callable[[], object]) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def unfinished(folder: Path, config: RunConfig = CONFIG, steps: int = 30, every: float = 0.0) -> RunFolder:
    """A run that was killed (kill -9) by its own report once ``steps`` were done."""

    def report(news: Progress) -> None:
        if news.step >= steps:
            os.kill(os.getpid(), signal.SIGKILL)

    process = child(lambda: run_training(config, folder, report=report, checkpoint_every=every))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return RunFolder(folder / config.name, config)


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


def test_nothing_moves_but_what_requires_a_gradient():
    learner = CONFIG.model.build(CONFIG.task, 0)
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    train(learner, CONFIG.task, replace(BRIEF, steps=6, weight_decay=0.5))
    moved = {name for name, tensor in learner.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {"table.weight", "out.weight", "out.bias"}


# --- going on -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "stop"), [("adamw", 1), ("adamw", 13), ("adamw", 39), ("muon", 20)])
def test_a_restored_training_goes_on_with_the_same_bits(optimizer: str, stop: int):
    config = replace(BRIEF, optimizer=optimizer)
    whole, first, second = (Training(CONFIG.model.build(CONFIG.task, 0), CONFIG.task, config) for _ in range(3))
    for p in second.parameters:
        p.data.zero_()
    while not whole.finished:
        whole.advance()
    while first.step < stop:
        first.advance()
    second.restore(first.state())
    first.parameters[0].data.zero_()  # what was restored is a copy
    while not second.finished:
        second.advance()
    assert whole.history == second.history and whole.records == second.records
    ends = whole.state(), second.state()
    for kind in ("parameters", "memory"):
        one, other = (getattr(end, kind) for end in ends)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert ends[0].memory and ends[0].running == ends[1].running


def test_kill_9_at_any_moment_costs_nothing(reference: Path, tmp_path: Path):
    """Killed at random moments, again and again, with a checkpoint at every step; the last session finishes."""
    moments, kills = random.Random(5), 0
    for _ in range(25):
        process = child(lambda: run_training(CONFIG, tmp_path, checkpoint_every=0.0))
        process.join(moments.uniform(0.0, 0.12))
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


def test_metrics_are_cut_back_to_the_checkpoint(reference: Path, tmp_path: Path):
    home = unfinished(tmp_path, steps=14, every=math.inf)  # killed after the checkpoint of step 14
    with open(home.path / "metrics.jsonl", "a") as handle:
        handle.write('{"step": 21, "loss": 9, "accu')  # what a killed write leaves
    assert read_run(home.path).history.steps == (7, 14) and not read_run(home.path).finished
    assert bits(run_training(CONFIG, tmp_path).folder) == bits(reference)


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


def test_ctrl_c_on_the_command_line(tmp_path: Path):
    """In a process of its own: exit code 130, two lines, no traceback; --resume finishes the run."""
    words = ["train", "dyck", "--heads", "1", "--layers", "1", "--head-dim", "4", "--features", "8", "--batch-size", "4"]
    words += ["--evaluate-every", "50", "--evaluation-size", "8", "--steps", "400", "--runs", str(tmp_path)]
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


# --- what can break -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(reference: Path) -> Path:
    return checkpoints(reference / "checkpoints")[0]


def test_a_checkpoint_comes_back(checkpoint: Path, tmp_path: Path):
    state = read_checkpoint(checkpoint, CONFIG.name)
    again = read_checkpoint(write_checkpoint(tmp_path, state, CONFIG.name), CONFIG.name)
    for name in ("step", "running", "records", "stopped_early", "seconds"):
        assert getattr(again, name) == getattr(state, name)
    for name in ("parameters", "memory"):
        one, other = getattr(state, name), getattr(again, name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    with pytest.raises(AnyformerError, match="is not a checkpoint of the run 0123"):
        read_checkpoint(checkpoint, "0123")


def test_flipped_bits_and_cuts_are_noticed(checkpoint: Path, tmp_path: Path):
    whole, broken = checkpoint.read_bytes(), tmp_path / "step-000000040.safetensors"
    for at in range(0, len(whole), 3):
        broken.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(AnyformerError):
            read_checkpoint(broken, CONFIG.name)
    for length in range(0, len(whole), 211):
        broken.write_bytes(whole[:length])
        with pytest.raises(AnyformerError, match="damaged or no checkpoint"):
            read_checkpoint(broken, CONFIG.name)


@pytest.mark.parametrize("broken", [1, 2])
def test_a_broken_checkpoint_falls_back(reference: Path, tmp_path: Path, broken: int, caplog):
    home = unfinished(tmp_path, steps=30)
    for path in checkpoints(home.path / "checkpoints")[:broken]:
        path.write_bytes(path.read_bytes()[:-5])
    steps = []
    with caplog.at_level(logging.WARNING):
        result = run_training(CONFIG, tmp_path, report=lambda news: steps.append(news.step))
    assert caplog.text.count("going back to the one before") == broken
    assert ("no whole checkpoint; starting anew" in caplog.text) == (broken == 2)
    assert bits(result.folder) == bits(reference)
    assert (steps[0] > 28) == (broken == 1)


def test_a_full_disk_stops_nothing_but_the_result(reference: Path, tmp_path: Path):
    """A real limit on the size of files: no checkpoint fits any more, the old one stays whole, one line says so at the end."""
    home = unfinished(tmp_path, steps=10)
    before = {path: path.read_bytes() for path in checkpoints(home.path / "checkpoints")}

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
        with pytest.raises(AnyformerError, match=r"the result could not be written .*; make room and resume the run"):
            run_training(CONFIG, tmp_path)

    process = child(limited)
    process.join()
    assert process.exitcode == 0
    assert {path: path.read_bytes() for path in checkpoints(home.path / "checkpoints")} == before
    assert not list((home.path / "checkpoints").glob(".*"))
    assert bits(run_training(CONFIG, tmp_path).folder) == bits(reference)


def test_a_disk_that_is_full_for_a_while(reference: Path, tmp_path: Path, monkeypatch, caplog):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    real_open, real_save, calls = open, checkpoints_module.save_file, []

    def guarded(path, mode="r", **more):
        if str(path).endswith("metrics.jsonl") and mode == "a" and len(calls) in (2, 3):
            raise full
        return real_open(path, mode, **more)

    def save(tensors, path, **more):
        calls.append(path)
        if len(calls) in (2, 3):
            Path(path).write_bytes(b"the beginning")
            raise full
        real_save(tensors, path, **more)

    monkeypatch.setattr("builtins.open", guarded)
    monkeypatch.setattr(checkpoints_module, "save_file", save)
    with caplog.at_level(logging.WARNING):
        folder = run_training(CONFIG, tmp_path).folder
    assert caplog.text.count("No space left on device") >= 3 and "step-000000007 stands, training goes on" in caplog.text
    assert bits(folder) == bits(reference)


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(tmp_path: Path):
    @dataclass(frozen=True, kw_only=True)
    class Explodes(PiecesModel):
        def build(self, task, seed):
            learner = super().build(task, seed)
            seen = []
            learner.register_forward_hook(lambda *a: seen.append(1) or (a[2] * math.nan if len(seen) == 19 else None))
            return learner

    config = replace(CONFIG, model=Explodes())
    with pytest.raises(Diverged, match=r"the loss is nan at step 16; .*last good checkpoint, step-000000014, is kept in"):
        run_training(config, tmp_path)
    state = read_checkpoint(checkpoints(tmp_path / config.name / "checkpoints")[0], config.name)
    assert state.step == 14 and all(bool(t.isfinite().all()) for t in state.parameters.values())
    assert not read_run(tmp_path / config.name).finished


def test_weights_that_are_not_finite_are_never_kept(tmp_path: Path):
    config = replace(CONFIG, training=replace(BRIEF, steps=7, clip=None, learning_rate=1e30, warm_up=0))
    with pytest.raises(Diverged, match=r"not finite after the last step|the loss is"):
        run_training(config, tmp_path, checkpoint_every=0.0)
    for path in checkpoints(tmp_path / config.name / "checkpoints"):
        assert all(bool(t.isfinite().all()) for t in read_checkpoint(path, config.name).parameters.values())
    assert not (tmp_path / config.name / "result").exists()


def test_a_gradient_that_is_not_finite_stops_before_the_step():
    learner = CONFIG.model.build(CONFIG.task, 0)
    learner.out.weight.register_hook(lambda grad: grad * math.inf)
    before = learner.table.weight.detach().clone()
    with pytest.raises(Diverged, match=r"the gradient's norm is (inf|nan) at step 0"):
        train(learner, CONFIG.task, BRIEF)
    assert torch.equal(learner.table.weight, before)


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new))


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (
            edit("config.json", '"steps": 40', '"steps": 41'),
            r"training.steps is 41 there, 40 here; it was changed, move the folder",
        ),
        (edit("config.json", '"Dyck"', '"Rubik"'), r"config.json is damaged \(unknown specification type 'Rubik'"),
        (edit("config.json", "{", "["), r"config.json is damaged .*; move the folder away and start anew"),
        (edit("finished.json", "steps", "stops"), r"finished.json is damaged \(KeyError: 'steps'\); remove it and resume"),
        (lambda f: f.rename(f.with_name("x")) and f.write_text(""), r"cannot be used as the folder of a run|Not a directory"),
    ],
)
def test_a_folder_that_is_not_this_runs(reference: Path, tmp_path: Path, breakage, message: str):
    folder = tmp_path / CONFIG.name
    subprocess.run(["cp", "-r", reference, folder], check=True)
    breakage(folder)
    with pytest.raises(AnyformerError, match=message):
        run_training(CONFIG, tmp_path)


def test_without_finished_json_the_last_checkpoint_finishes_the_run(reference: Path, tmp_path: Path):
    subprocess.run(["cp", "-r", reference, tmp_path / CONFIG.name], check=True)
    (tmp_path / CONFIG.name / "finished.json").unlink()
    result = run_training(CONFIG, tmp_path)
    assert bits(result.folder) == bits(reference) and result == replace(read_run(reference), folder=result.folder)


def test_a_checkpoint_of_another_model(reference: Path, tmp_path: Path):
    config = replace(CONFIG, task=Dyck(vocab=5))
    state = read_checkpoint(checkpoints(reference / "checkpoints")[0], CONFIG.name)
    write_checkpoint(tmp_path / config.name / "checkpoints", state, config.name)
    with pytest.raises(AnyformerError, match="of other parameters: names or shapes differ; it was made by another version"):
        run_training(config, tmp_path)


def test_frozen_numbers_must_be_the_same(tmp_path: Path):
    first, second = (Training(CONFIG.model.build(CONFIG.task, 0), CONFIG.task, BRIEF) for _ in range(2))
    second.module.shift.add_(1)
    with pytest.raises(AnyformerError, match="what is not trained has other numbers than when the state was made"):
        second.restore(first.state())


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


# --- optimizers, own gradients, sinks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9)])
def test_betas(betas, as_shipped):
    with pytest.raises(AnyformerError, match=r"betas must be two numbers in \[0, 1\)"):
        TrainingConfig(steps=200, betas=betas)


def test_betas_and_decay_reach_adamw():
    ours, oracle = (CONFIG.model.build(CONFIG.task, 0) for _ in range(2))
    config = TrainingConfig(
        steps=1, warm_up=0, batch_size=4, betas=(0.5, 0.6), weight_decay=0.3, learning_rate=0.1, evaluation_size=4
    )
    start = oracle.out.weight.detach().clone()
    train(ours, CONFIG.task, config)
    # first step of AdamW: m / (1 - b1) = g, v / (1 - b2) = g^2, whatever the betas: w (1 - rate decay) - rate sign(g)
    step = (ours.out.weight.detach() - start * (1 - 0.1 * 0.3)).abs()
    torch.testing.assert_close(step[step > 1e-3], torch.full_like(step[step > 1e-3], 0.1), rtol=1e-3, atol=1e-3)
    training = Training(oracle, CONFIG.task, config)
    training.advance()
    assert training.optimizer.parts[0].param_groups[0]["betas"] == (0.5, 0.6)


def test_muon_moves_matrices_by_orthogonal_factors():
    torch.manual_seed(0)
    named = {"matrix": nn.Parameter(torch.randn(6, 4)), "vector": nn.Parameter(torch.randn(4))}
    start = named["matrix"].detach().clone()
    for p in named.values():
        p.grad = torch.randn(p.shape)
    optimizer = Optimizer(named, "muon", betas=(0.9, 0.999), weight_decay=0.0)
    optimizer.step(0.1)
    assert set(optimizer.state()) == {"matrix/momentum_buffer", "vector/step", "vector/exp_avg", "vector/exp_avg_sq"}
    u, _, vh = torch.linalg.svd(named["matrix"].grad, full_matrices=False)
    moved = (start - named["matrix"].detach()) / (0.2 * 0.1 * math.sqrt(6))
    values = (u.mT @ moved @ vh.mT).diagonal()  # 1 for the exact orthogonal factor; five steps of the iteration come near
    assert bool(((values > 0.6) & (values < 1.3)).all())
    torch.testing.assert_close(moved, u @ values.diag() @ vh, rtol=0.05, atol=0.05)


def test_a_learner_may_compute_its_own_gradients():
    class Blocks(Pieces):
        """The same loss, row by row."""

        def gradients(self, inputs, labels, total=None):
            total, out = int((labels != IGNORED).sum()) if total is None else total, 0.0
            for x, y in zip(inputs, labels, strict=True):
                loss = nn.functional.cross_entropy(self(x[None])[0], y, ignore_index=IGNORED, reduction="sum") / total
                loss.backward()
                out += loss.item()
            return out

    def learner(kind: type[Pieces]) -> Pieces:
        torch.manual_seed(0)
        return kind(4, 0.0).double()

    ordinary, own = learner(Pieces), learner(Blocks)
    histories = [train(module, Dyck(), replace(BRIEF, batch_size=5)) for module in (ordinary, own)]
    assert histories[0].losses == pytest.approx(histories[1].losses, rel=1e-10)
    for one, other in zip(ordinary.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


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
