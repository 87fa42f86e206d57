"""The tables: what is committed is what the commands make; kernel limits; the training pairs and their exact floors."""

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("flint")

from anyformer.approximation.kernel_limits import KERNELS, kernel_limit
from anyformer.cli import main
from anyformer.errors import AnyformerError
from anyformer.experiments.universality import PAPER, Row, graph_families, markdown, proof_times
from anyformer.experiments.universality_training import DIM, PAIRS, TOKENS, Stacked, train

RESULTS = Path(__file__).parent.parent / "results"


def test_the_committed_table():
    data = json.loads((RESULTS / "universality.json").read_text())
    table = [Row(**row) for row in data["rows"]]
    assert (RESULTS / "universality.md").read_text() == markdown(table, data["command"])
    named = {row.name: row for row in table if row.kind == "paper"}
    assert set(named) == {name for name, *_ in PAPER} and all(row.holds for row in named.values())
    packages = {row.name: row for row in table if row.kind == "package"}
    assert len(packages) == 11 and sum(row.strength == "unknown" for row in packages.values()) <= 3
    assert all(proof["proved"] for proof in data["proofs"])


def test_graph_families_are_what_theory_says():
    found = graph_families()
    for name, least in (
        ("longformer", lambda n: n - 1),
        ("ring", lambda n: n // 2),
        ("directed-ring", lambda n: n - 1),
        ("star", lambda n: 2),
    ):
        assert all(line["lower"] == line["upper"] == least(line["n"]) for line in found[name]), name


def test_proofs_with_pair_markings():
    assert all(line["proved"] and line["gap"] > 0 for line in proof_times((5, 8)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_limits_against_numbers(kernel):
    """The ratio at a large t, computed in floats, goes where the symbolic limit says."""
    found = kernel_limit(kernel)
    assert found.holds == (kernel in ("softmax", "gaussian", "positive-random-features")) and "sufficient" in found.status
    a1, a2, t = 0.7, 0.3, 60.0
    numbers = {
        "softmax": lambda t, a: math.exp(t * a),
        "polynomial": lambda t, a: (t * a + 1) ** 3,
        "relu-features": lambda t, a: max(t * a, 0),
        "elu-plus-one": lambda t, a: t * a + 1,
    }
    if kernel in numbers:
        ratio = numbers[kernel](t, a1) / numbers[kernel](t, a2)
        assert (ratio > 1e9) == found.holds
    with pytest.raises(AnyformerError, match="kernel must be one of softmax"):
        kernel_limit("hard")


def test_floors_are_exact():
    """The part of each target that the first stack cannot see: the symmetrised target is the best of them, by its definition."""
    torch.manual_seed(0)
    x = 2 * torch.rand(200_000, TOKENS, DIM, dtype=torch.float64) - 1
    a1, a2, b1, b2 = x.roll(-1, 1), x.roll(-2, 1), x.roll(1, 1), x.roll(2, 1)
    best = {
        "hops": _blind_mean(x),
        "mirror": (a1 + b1) * (a2 + b2) / 2,
        "shift": (x.sum(1, keepdim=True) - x) / (TOKENS - 1),
    }
    for pair in PAIRS:
        target = pair.target(x)
        share = float((target - best[pair.name]).square().mean() / target.var())
        assert abs(share - pair.floor) < 0.01, (pair.name, share)


def _blind_mean(x):
    """The mean of what three layers of a path of five tokens reach: the end slots miss the other end, whose mean is 0."""
    total = x.sum(1, keepdim=True).expand_as(x).clone()
    total[:, 0] -= x[:, 4]
    total[:, 4] -= x[:, 0]
    return total / TOKENS


def test_committed_training():
    data = json.loads((RESULTS / "universality_training.json").read_text())
    for impossible, certified in zip(data["lines"][::2], data["lines"][1::2], strict=True):
        assert (
            "impossible" in impossible["verdict"] and "proved" in certified["verdict"] and impossible["pair"] == certified["pair"]
        )
        assert min(impossible["errors"]) > 0.9 * impossible["floor"] > max(certified["errors"])


def test_a_few_steps_of_training():
    for pair in PAIRS:
        for stack in pair.stacks:
            assert 0 < train(pair.target, stack(), 0, steps=2) < math.inf
    assert Stacked(PAIRS[0].stacks[0](), 12)(torch.zeros(1, TOKENS, DIM)).shape == (1, TOKENS, DIM)


def test_only_is_refused(capsys, as_shipped):
    assert main(["reproduce", "universality", "--only", "softmax"]) == 2
    assert "universality is run whole" in capsys.readouterr().err
