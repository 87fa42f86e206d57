"""What the tests of runs train: a small learner with frozen parts, and runs that end in every way."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from anyformer.learning.models import FullyTrained, Model
from anyformer.learning.run_folder import RunFolder
from anyformer.learning.runs import Progress, RunConfig, run_training
from anyformer.learning.training import TrainingConfig
from anyformer.targets.transformer import TransformerConfig
from anyformer.tasks import Dyck


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
