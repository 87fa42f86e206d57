"""A task of one's own that is wrong is told so: rows, names, values, in one line."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from anyformer.errors import AnyformerError
from anyformer.learning.training import TrainingConfig, train
from anyformer.targets.transformer import Transformer, TransformerConfig
from anyformer.tasks import IGNORED, Curriculum, KHop, ModularAddition, Needle, Task, baselines, below


@dataclass(frozen=True, kw_only=True)
class Own(Task):
    length: int = 4
    names = ("0", "1")
    words = 4
    what: str = ""

    def _draw(self, words):
        x = below(words, 2)
        y = x.copy()
        if self.what == "ignored":
            y[:] = IGNORED
        wrong = {
            "label": lambda: (x, y + 2),
            "negative": lambda: (x, y - 7),
            "input": lambda: (x + IGNORED, y),
            "rows": lambda: (x[1:], y[1:]),
            "short": lambda: (x[:, 1:], y[:, 1:]),
            "bytes": lambda: (x.astype(np.int8), y),
            "tensors": lambda: (torch.from_numpy(x), y),
            "nothing": lambda: None,
        }
        return wrong[self.what]() if self.what in wrong else (x, x[:, ::-1] if self.what == "backwards" else y)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("label", r"Own: labels must be ids below vocab = 2, or IGNORED; got [23] at row \d, position \d"),
        ("negative", r"labels must be ids below vocab = 2, or IGNORED; got -[67] at"),
        ("input", r"inputs must be ids below vocab = 2; got -100 at|inputs must be ids below vocab = 2; got -99 at"),
        ("rows", r"inputs must be int64 \(3, 4\), got int64 \(2, 4\)"),
        ("short", r"inputs must be int64 \(3, 4\), got int64 \(3, 3\)"),
        ("bytes", r"inputs must be int64 \(3, 4\), got int8 \(3, 4\)"),
        ("tensors", "its rows must be two numpy arrays, inputs and labels, got tuple"),
        ("nothing", "its rows must be two numpy arrays, inputs and labels, got NoneType"),
    ],
)
def test_rows_that_a_task_may_not_draw(what, message):
    with pytest.raises(AnyformerError, match=message):
        Own(what=what).batch(0, 0, 3)


def test_rows_may_be_views():
    batch = Own(what="backwards").batch(0, 0, 3)
    assert torch.equal(batch.labels, batch.inputs.flip(1))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["0", "1"], "names must be a tuple of words without spaces"),
        (("0", ""), "names must be a tuple of words without spaces"),
        (("a b", "c"), "names must be a tuple of words without spaces"),
        (("a", "a"), "names must be different"),
    ],
)
def test_names_that_a_task_may_not_have(names, message):
    with pytest.raises(AnyformerError, match=message):
        type("Named", (Own,), {"names": names})()


def test_a_task_that_scores_nothing():
    task = Own(what="ignored")
    with pytest.raises(AnyformerError, match="none of its rows has a scored position"):
        baselines(task, size=10)
    target = Transformer(TransformerConfig(vocab=2, heads=1, layers=1, head_dim=2, features=2))
    with pytest.raises(AnyformerError, match="no position of the batch of step 0 is scored"):
        train(target, task, TrainingConfig(steps=2, warm_up=0, batch_size=2, evaluation_size=2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModularAddition(modulus=10**13), "this many tokens needs .* of memory"),
        (lambda: Needle(pairs=10**13), "this many tokens needs .* of memory"),
        (lambda: Curriculum(tasks=[KHop(), KHop()], until=(3,)), "tasks must be a tuple"),
        (lambda: Curriculum(tasks=(KHop(), KHop()), until=[3]), "until must be a tuple"),
        (lambda: Curriculum(tasks=(KHop(), KHop())), "2 tasks need 1 steps in until, got 0"),
        (lambda: TrainingConfig(steps=200, betas=[0.9, 0.99]), "betas must be a tuple of two numbers"),
        (lambda: TrainingConfig(steps=200, betas=None), "betas must be a tuple of two numbers"),
        (lambda: TrainingConfig(steps=200, learning_rate="a"), "learning_rate must be a number"),
        (lambda: TrainingConfig(steps=200, learning_rate=True), "learning_rate must be a number"),
    ],
)
def test_values_that_cannot_be(make, message, as_shipped):
    with pytest.raises(AnyformerError, match=message):
        make()
