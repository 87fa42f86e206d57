"""A task of your own is one file: what a row looks like, and how rows are drawn from random integers. Here: reverse a word.

inputs    c a a b
labels    b a a c

python examples/own_task.py
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

import anyformer as af
from anyformer.learning.training import TrainingConfig, train
from anyformer.tasks import Task, baselines
from anyformer.tasks.task import Ids, Words, below


@dataclass(frozen=True, kw_only=True)
class Reversal(Task):
    """Letters independent and uniform; every position is scored."""

    length: int = 8

    names: ClassVar[tuple[str, ...]] = tuple("abcde")

    @property
    def words(self) -> int:
        return self.length  # one random word a letter

    def _draw(self, words: Words) -> tuple[Ids, Ids]:
        inputs = below(words, len(self.names))
        return inputs, inputs[:, ::-1].copy()


if __name__ == "__main__":
    task = Reversal()
    print(task.show(task.batch(seed=0, index=0, size=1)))
    print("without understanding:", {name: f"{100 * s['accuracy']:.0f} %" for name, s in baselines(task).by_name().items()})

    torch.manual_seed(0)
    sizes = dict(vocab=task.vocab, heads=1, layers=1, head_dim=8, features=16, residual=True, causal=False)
    target = af.Transformer(**sizes, positions="learned", max_length=task.length, token_names=task.token_names)
    history = train(target, task, TrainingConfig(steps=300, learning_rate=1e-2, stop_at=1.0))
    print(f"a transformer after {history.steps[-1]} steps: {100 * history.accuracies[-1]:.1f} %")

    program = af.compile(target, af.PathTree.for_class(target))
    batch = task.held_out(256)
    print(f"as a program of {program.machine()}: {100 * task.accuracy(af.run(program, batch.inputs), batch):.1f} %")
