"""Baselines: against counters and loops, and against the published floors of the tasks."""

import math
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

from anyformer.learning.training import evaluate
from anyformer.tasks import (
    HELD_OUT,
    IGNORED,
    Addition,
    Baselines,
    Batch,
    Dyck,
    KHop,
    Memorisation,
    ModularAddition,
    Needle,
    Task,
    baselines,
)
from anyformer.tasks.listing import listing


@pytest.fixture(scope="module")
def figures() -> dict[str, dict]:
    """What ``anyformer tasks`` prints, by name; shares of 20,000 rows."""
    return {task["name"]: task for task in listing()}


def slow(task: Task, fit: Batch, score: Batch, wanted: str) -> list[float]:
    """Constant, position, position and own token: one counter a context, read place by place."""

    def places(batch: Batch) -> list[tuple[int, int, int]]:
        rows = zip(batch.inputs.tolist(), batch.labels.tolist(), task.counted(batch)[wanted].tolist(), strict=True)
        return [(i, token, label) for row in rows for i, (token, label, counts) in enumerate(zip(*row, strict=True)) if counts]

    found, constant = [], None
    for context in (lambda i, token: 0, lambda i, token: i, lambda i, token: (i, token)):
        seen = defaultdict(Counter)
        for i, token, label in places(fit):
            seen[context(i, token)][label] += 1
        best = {key: min(c, key=lambda label: (-c[label], label)) for key, c in seen.items()}
        constant = best[0] if constant is None else constant
        right = [best.get(context(i, token), constant) == label for i, token, label in places(score)]
        found.append(sum(right) / len(right))
    return found


@pytest.mark.parametrize(
    "task", [Dyck(), KHop(hops=2), Needle(pairs=4, values=5), Addition(digits=2), ModularAddition(modulus=11), Memorisation(symbols=9)], ids=str
)  # fmt: skip
def test_baselines_agree_with_counters(task):
    size = 150
    got = baselines(task, size, seed=3)
    whole = 10**4 if isinstance(task, (ModularAddition, Memorisation)) else size
    fit, score = task.training_rows(whole, seed=3), task.held_out(whole)
    assert (got.fitted_rows, got.scored_rows) == (len(fit.inputs), len(score.inputs))
    for name in task.counted(score):
        expected = slow(task, fit, score, name)
        assert [got.constant[name], got.position[name], got.own_token[name]] == pytest.approx(expected, abs=1e-12)
    assert got.best() == max(scores["accuracy"] for scores in got.by_name().values())
    assert set(got.by_name()) == {"constant", "position", "position and own token", *task.rules()}


def within(share: float, published: float, size: int) -> bool:
    """Both are counts: ours of ``size`` rows, the published one of many, rounded to 0.1 %. Four standard deviations."""
    return abs(share - published) <= 4 * math.sqrt(published * (1 - published) / size) + 0.0005


def test_the_floors_of_dyck_and_needle(figures):
    size, dyck, needle = 20_000, figures["dyck"]["baselines"], figures["needle"]["baselines"]
    assert within(dyck["constant"]["accuracy"], 0.526, size)
    assert within(dyck["rules"]["equal counts"]["accuracy"], 0.930, size)
    assert within(dyck["rules"]["equal counts, right ends"]["accuracy"], 0.977, size)
    copied, law = needle["rules"]["copy the first value"]["accuracy"], sum(1 / c + (1 - 1 / c) / 127 for c in range(1, 31)) / 30
    assert within(copied, 0.140, size) and within(copied, law, size)
    assert within(needle["constant"]["accuracy"], 1 / 127, size) and within(needle["position"]["accuracy"], 1 / 127, size)


@pytest.mark.parametrize(("k", "position", "own"), [(1, 28.1, 36.2), (2, 30.0, 52.2), (3, 32.0, 35.8), (4, 34.0, 41.5)])
def test_the_floors_of_khop(k, position, own, figures):
    """The known floors are fitted and scored on the same 20,000 sequences: so fitted, ours are equal; scored on others they are
    lower, by at most the mean excess of the best of 4 counts, sqrt(2 ln 4 p (1 - p) / n), n = 20,000 for a position, 5,000 for a
    position and letter, p (1 - p) at most 3/16 for four equal letters and 1/4 for any."""
    task, size = KHop(hops=k), 20_000
    batch = task.training_rows(size)
    place = torch.arange(99).expand(size, 99)
    counts = torch.bincount(((place * 30 + batch.inputs) * 30 + batch.labels).flatten(), minlength=99 * 900).view(99, 30, 30)
    same = [100 * table.amax(-1).sum().item() / (99 * size) for table in (counts.sum(1), counts)]
    assert same == pytest.approx([position, own], abs=0.2)
    got = Baselines(**figures[f"k-hop, hops={k}"]["baselines"])
    excess = [100 * math.sqrt(2 * math.log(4) * pq / n) for pq, n in ((3 / 16, 20_000), (1 / 4, 5_000))]
    for scores, published, most in ((got.position, position, excess[0]), (got.own_token, own, excess[1])):
        assert published - most - 0.2 <= 100 * scores["accuracy"] <= published + 0.2
    assert set(got.constant) == {"accuracy", "letters"} and within(got.position["letters"], 0.25, size)


def test_letters_leave_out_the_rest():
    task = KHop(hops=4)
    batch = task.batch(0, 0, 20)
    letters = task.counted(batch)["letters"]
    assert torch.equal(letters, (batch.labels >= 17) & (batch.labels <= 20)) and letters.any()
    predicted = torch.where(letters, batch.labels, 0)
    assert task.scores(predicted, batch) == {"accuracy": letters.double().mean().item(), "letters": 1.0}
    nowhere = Batch(batch.inputs, torch.full_like(batch.labels, 21))
    assert task.scores(predicted, nowhere) == {"accuracy": 0.0}


def test_unique_counts_each_string_once():
    task, once = Dyck(), Dyck().batch(0, 0, 8)
    assert len({tuple(row) for row in once.inputs.tolist()}) == 8
    batch = Batch(once.inputs[[0, 1, 1, 1, 2]], once.labels[[0, 1, 1, 1, 2]])
    predicted = batch.labels.clamp(min=0)
    predicted[0] = 0
    assert task.scores(predicted, batch) == {"accuracy": 4 / 5, "unique": 2 / 3}
    assert (task.counted(task.batch(0, 0, 2000))["unique"].sum() < 2000).item()


def test_knowing_one_term_of_a_modular_sum_is_knowing_nothing():
    found = baselines(ModularAddition(modulus=23))
    assert found.own_token["accuracy"] == 0.0 and found.constant["accuracy"] < 0.1


def test_evaluation_is_on_the_held_out_rows():
    """A module that has learnt the training rows by heart knows nothing of the others."""
    task = ModularAddition(modulus=11)
    trained, seen = {tuple(row) for row in task.training_rows(1000).inputs.tolist()}, []

    class ByHeart(nn.Module):
        def forward(self, inputs):
            seen.append(inputs)
            logits = torch.zeros(*inputs.shape, 11)
            for row, (a, b) in enumerate(inputs.tolist()):
                logits[row, 1, (a + b) % 11 if (a, b) in trained else (a + b + 1) % 11] = 1
            return logits

    assert evaluate(ByHeart(), task, 1000) == 0.0 and torch.equal(torch.cat(seen), task.held_out(1000).inputs)
    assert evaluate(ByHeart(), task, 1000, seed=1) == 1.0


def test_streams_hold_out_their_own_seed():
    for task in (Dyck(), KHop(), Needle(), Addition()):
        assert torch.equal(task.held_out(8).inputs, task.batch(HELD_OUT, 0, 8).inputs)
        assert torch.equal(task.training_rows(8, seed=4).labels, task.batch(4, 0, 8).labels)


def test_an_unseen_context_falls_back_on_the_constant():
    class Handmade(Dyck):
        """Training rows and held-out rows by hand."""

        def counted(self, batch):
            return {"accuracy": batch.scored}

        def rules(self):
            return {}

        def training_rows(self, size, seed=0):
            return Batch(torch.tensor([[1, 0], [1, 0], [2, 0]]), torch.tensor([[1, IGNORED], [1, IGNORED], [2, IGNORED]]))

        def held_out(self, size):
            return Batch(torch.tensor([[2, 3], [1, 3]]), torch.tensor([[2, 1], [2, 3]]))

    found = baselines(Handmade(), 3)
    assert found.constant == {"accuracy": 0.25} and found.position == {"accuracy": 0.25} and found.own_token == {"accuracy": 0.5}


def test_the_docs_hold_the_measured_figures(figures):
    page = (Path(__file__).parent.parent / "docs" / "tasks.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines() if line.startswith("| ")]
    shown = {row[0]: row[1:] for row in rows}

    def cell(scores: dict[str, float]) -> list[str]:
        return [f"{name} {100 * share:.1f}".removeprefix("accuracy ") for name, share in scores.items()]

    for task in figures.values():
        sizes, found = shown[task["name"]][:2], task["baselines"]
        assert list(map(int, re.findall(r"\d+", " ".join(sizes)))) == [
            *([task["used"]] if task["used"] != task["vocab"] else []), task["vocab"], task["length"]
        ]  # fmt: skip
        fitted = [cell(found[kind]) for kind in ("constant", "position", "own_token")]
        assert [text.split("; ") for text in shown[task["name"]][2:]] == fitted
        for name, scores in found["rules"].items():
            assert shown[f"{task['name']}, rule: {name}"][2].split("; ") == cell(scores)
