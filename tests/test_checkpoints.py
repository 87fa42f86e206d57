"""Checkpoints: what is read back has every bit, damage of any kind is noticed, and a run goes on from the last whole one."""

import errno
import logging
import math
import os
import resource
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from run_cases import BRIEF, CONFIG, PiecesModel, bits, child, unfinished

from anyformer.errors import AnyformerError
from anyformer.learning import checkpoints as checkpoints_module
from anyformer.learning.checkpoints import checkpoints, read_checkpoint, write_checkpoint
from anyformer.learning.runs import read_run, run_training
from anyformer.learning.training import Diverged, Training
from anyformer.tasks import Dyck


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
    tensors = 8 + int.from_bytes(whole[:8], "little")  # of which one sum is taken; before them stands text
    for at in (*range(0, tensors, 5), *range(tensors, len(whole), 67)):
        broken.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(AnyformerError):
            read_checkpoint(broken, CONFIG.name)
    for length in range(0, len(whole), 509):
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


@pytest.mark.parametrize("left", ["nothing", "empty files", "a file", "a stranger's file"])
def test_a_damaged_result_is_made_anew(reference: Path, tmp_path: Path, left: str):
    """What the message says to do helps, whatever stands in the place of the result."""
    subprocess.run(["cp", "-r", reference, tmp_path / CONFIG.name], check=True)
    result = tmp_path / CONFIG.name / "result"
    whole = {file.name: file.read_bytes() for file in result.iterdir()}
    for file in result.iterdir():
        file.write_bytes(b"") if left == "empty files" else file.unlink()
    if left != "empty files":
        result.rmdir()
    if left == "a file":
        result.write_text("here")
    if left == "a stranger's file":
        result.mkdir()
        (result / "notes.txt").write_text("here")
    with pytest.raises(AnyformerError, match=r"remove .*finished.json and resume the run"):
        run_training(CONFIG, tmp_path)
    (tmp_path / CONFIG.name / "finished.json").unlink()
    assert run_training(CONFIG, tmp_path).finished
    assert {file.name: file.read_bytes() for file in result.iterdir()} == whole


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


@pytest.mark.parametrize(("optimizer", "stop"), [("adamw", 1), ("adamw", 13), ("muon", 20)])
def test_a_restored_training_goes_on_with_the_same_bits(optimizer: str, stop: int):
    config = replace(BRIEF, optimizer=optimizer, steps=24)
    whole, second = (Training(CONFIG.model.build(CONFIG.task, 0), CONFIG.task, config) for _ in range(2))
    while whole.step < stop:
        whole.advance()
    for p in second.parameters:
        p.data.zero_()
    second.restore(whole.state())
    while not whole.finished:  # what was restored is a copy
        whole.advance()
    while not second.finished:
        second.advance()
    assert whole.history == second.history and whole.records == second.records
    ends = whole.state(), second.state()
    for kind in ("parameters", "memory"):
        one, other = (getattr(end, kind) for end in ends)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert ends[0].memory and ends[0].running == ends[1].running


def test_metrics_are_cut_back_to_the_checkpoint(reference: Path, tmp_path: Path):
    home = unfinished(tmp_path, steps=14, every=math.inf)  # killed after the checkpoint of step 14
    with open(home.path / "metrics.jsonl", "a") as handle:
        handle.write('{"step": 21, "loss": 9, "accu')  # what a killed write leaves
    assert read_run(home.path).history.steps == (7, 14) and not read_run(home.path).finished
    assert bits(run_training(CONFIG, tmp_path).folder) == bits(reference)
