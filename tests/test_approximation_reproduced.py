"""The tables: what is committed is what the commands make; kernel limits; the training pairs and their exact floors."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytest.importorskip("flint")

from anyformer.approximation.kernel_limits import KERNELS, kernel_limit
from anyformer.cli import main
from anyformer.errors import AnyformerError
from anyformer.experiments import universality, universality_training
from anyformer.experiments.universality import DESIGNS, PAPER, Row, certified, graph_families, markdown, proof_times
from anyformer.experiments.universality_training import DIM, PAIRS, TOKENS, Stacked, train

RESULTS = Path(__file__).parent.parent / "results"


def test_the_committed_table():
    data = json.loads((RESULTS / "universality.json").read_text())
    table = [Row(**row) for row in data["rows"]]
    assert (RESULTS / "universality.md").read_text() == markdown(table, data["command"])
    assert {row.name for row in table if row.kind == "paper"} == {name for name, *_ in PAPER}
    assert sum(row.kind == "package" for row in table) == 11
    assert all(universality.laws(data).values())


@pytest.mark.parametrize("kind, listed", [("paper", PAPER), ("design", DESIGNS)])
def test_certifying_again_gives_the_committed_rows(kind, listed):
    rows = [row for row in json.loads((RESULTS / "universality.json").read_text())["rows"] if row["kind"] == kind]
    for row, (name, claimed, layers, group) in zip(rows, listed, strict=True):
        assert asdict(certified(kind, name, claimed, layers, group)) | {"seconds": row["seconds"]} == row


@pytest.mark.parametrize(
    "law, change",
    [
        ("every row of the paper holds", lambda data: data["rows"][0].update(holds=None)),
        ("a causal mask is not S_n", lambda data: [r.update(strength="unknown") for r in data["rows"] if "causal" in r["name"]]),
        ("packages are proved", lambda data: [r.update(strength="evidence") for r in data["rows"] if r["name"] == "linformer"]),
        ("at most three packages are unknown", lambda data: [r.update(strength="unknown") for r in data["rows"][-4:]]),
        ("the proofs in balls are proofs", lambda data: data["proofs"][2].update(proved=False)),
    ],
)
def test_every_law_of_the_table_can_fail(law, change):
    data = json.loads((RESULTS / "universality.json").read_text())
    change(data)
    assert [name for name, holds in universality.laws(data).items() if not holds] == [law]


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
    t = 60.0
    logarithms = {  # of k(x, t y), for x . y = a and |y|^2 = b
        "softmax": lambda a, b: t * a,
        "gaussian": lambda a, b: t * a - t**2 * b / 2,
        "positive-random-features": lambda a, b: t * a - t**2 * b / 2,
        "polynomial": lambda a, b: 3 * math.log(t * a + 1),
        "relu-features": lambda a, b: math.log(t * a),
        "elu-plus-one": lambda a, b: math.log(t * a + 1),
    }
    ratio = logarithms[kernel](0.7, 0.5) - logarithms[kernel](0.3, 0.4)
    assert (abs(ratio) > 20) == found.holds
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
    data = json.loads((RESULTS / "universality-training.json").read_text())
    for impossible, proved in zip(data["lines"][::2], data["lines"][1::2], strict=True):
        assert "impossible" in impossible["verdict"] and "proved" in proved["verdict"] and impossible["pair"] == proved["pair"]
        assert impossible["floor"] > 0 == proved["floor"]
    assert all(universality_training.laws(data).values())
    for line, error in ((0, 0.01), (1, 0.2)):
        broken = json.loads(json.dumps(data))
        broken["lines"][line]["errors"][0] = error
        assert sum(universality_training.laws(broken).values()) == 1


def test_a_few_steps_of_training():
    for pair in PAIRS:
        for stack in pair.stacks:
            assert 0 < train(pair.target, stack(), 0, steps=2) < math.inf
    assert Stacked(PAIRS[0].stacks[0](), 12)(torch.zeros(1, TOKENS, DIM)).shape == (1, TOKENS, DIM)


def test_only_is_refused(capsys, as_shipped):
    assert main(["reproduce", "universality", "--only", "softmax"]) == 2
    assert "universality has no --only" in capsys.readouterr().err
