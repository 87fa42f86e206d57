"""Data-parallel training: two processes under torchrun take the steps of one."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anyformer.cli import main
from anyformer.errors import AnyformerError
from anyformer.learning.checkpoints import checkpoints
from anyformer.learning.models import FullyTrained
from anyformer.learning.ranks import ALONE, Ranks, by_torchrun
from anyformer.learning.runs import RunConfig, read_run, run_training
from anyformer.learning.training import Training, TrainingConfig
from anyformer.targets.transformer import Transformer, TransformerConfig
from anyformer.tasks import Dyck

TOLERANCE = 1e-10  # float64, 120 steps: what the order of a sum can do
SMALL = TransformerConfig(vocab=4, heads=1, layers=1, head_dim=4, features=8, residual=True, norm="rms")
BRIEF = TrainingConfig(steps=120, batch_size=5, warm_up=20, evaluate_every=20, evaluation_size=16, learning_rate=0.01)
CONFIG = RunConfig(task=Dyck(), model=FullyTrained(config=SMALL), training=BRIEF)
SCRIPT = """
import faulthandler, json, os, sys, torch
faulthandler.dump_traceback_later(60, exit=True)
from anyformer.learning.runs import RunConfig, run_training
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
for text in sys.argv[2:]:
    try:
        result = run_training(RunConfig.from_json(json.loads(text)), sys.argv[1])
    except (ValueError, KeyboardInterrupt) as error:
        os.write(1, f"{type(error).__name__} {error}\\n".encode())
"""


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def torchrun(script: Path, folder: Path, *configs: RunConfig) -> subprocess.Popen:
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(folder)]
    command += [json.dumps(config.to_json()) for config in configs]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_processes_take_the_steps_of_one(tmp_path: Path, float64):
    """Interrupted once, resumed; beside it a run that stops early and one that diverges, for which both must stop together."""
    early = replace(CONFIG, training=replace(BRIEF, stop_at=0.01))
    diverges = replace(CONFIG, training=replace(BRIEF, learning_rate=1e30, clip=None, warm_up=0, steps=30))
    folder = tmp_path / "two"
    with torchrun(tmp_path / "script.py", folder, CONFIG) as process:
        while process.poll() is None and not checkpoints(folder / CONFIG.name / "checkpoints"):
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    interrupted = read_run(folder / CONFIG.name)
    assert not interrupted.finished and "stopped after step" in said, said
    with torchrun(tmp_path / "script.py", folder, CONFIG, early, diverges) as process:
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert said.count("Diverged") == said.count("train: the loss is") == 2, said

    one, two = run_training(CONFIG, tmp_path / "one"), read_run(folder / CONFIG.name)
    assert two.finished and two.history.steps == one.history.steps
    assert two.history.losses == pytest.approx(one.history.losses, rel=TOLERANCE)
    assert two.history.accuracies == one.history.accuracies
    weights = [Transformer.load(run.result).state_dict() for run in (one, two)]
    for name, tensor in weights[0].items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(weights[1][name], tensor, rtol=TOLERANCE, atol=TOLERANCE)
    assert read_run(folder / early.name).history.steps == (20, 40)


def test_the_shares_of_ranks_make_up_the_gradient(float64):
    """Without processes: what each rank computes for its rows, summed, is the gradient of the whole batch."""
    batch = CONFIG.task.batch(0, 0, BRIEF.batch_size)

    def share(ranks: Ranks) -> tuple[float, list[torch.Tensor]]:
        training = Training(CONFIG.model.build(CONFIG.task, 0), CONFIG.task, BRIEF, ranks)
        loss = training._gradients(batch)
        return loss, [p.grad for p in training.parameters if p.grad is not None]

    loss, grads = share(ALONE)
    for size in (2, 3, 5):
        shares = [share(Ranks(rank, size)) for rank in range(size)]
        assert sum(s[0] for s in shares) == pytest.approx(loss, rel=1e-12)
        for i, grad in enumerate(grads):
            torch.testing.assert_close(sum(s[1][i] for s in shares), grad, rtol=1e-10, atol=1e-12)
    rows = torch.arange(7)
    assert torch.equal(torch.cat([Ranks(rank, 3).rows(rows) for rank in range(3)]), rows)


def test_more_processes_than_rows():
    with pytest.raises(AnyformerError, match="8 processes need at least as many rows a batch, got 5"):
        Training(CONFIG.model.build(CONFIG.task, 0), CONFIG.task, BRIEF, Ranks(0, 8))


@pytest.mark.parametrize(
    ("rank", "size", "wanted"),
    [("1", "2", (1, 2)), ("0", "4", (0, 4)), ("1", "", (0, 1)), ("", "2", (0, 1)), ("1", "1", (0, 1)), ("x", "y", (0, 1))],
)
def test_what_torchrun_says(rank, size, wanted, monkeypatch):
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert by_torchrun() == wanted


@pytest.mark.parametrize(("ranks", "speaks"), [((1, 2), False), ((0, 2), True)])
def test_the_first_process_speaks_for_all(ranks, speaks, monkeypatch, capsys):
    monkeypatch.setattr("anyformer.learning.ranks.by_torchrun", lambda: ranks)
    monkeypatch.setattr("anyformer.train_command.train", lambda options: {"accuracy": 1.0})
    monkeypatch.setattr("sys.stdout", sys.stdout)  # put back afterwards
    assert main(["train", "dyck", "--json"]) == 0
    assert bool(capsys.readouterr().out) == speaks
