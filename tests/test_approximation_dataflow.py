"""What the graph of a module says must not depend on how its formula is written: scores that are no masks, infinities, rounding."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("flint")

from anyformer.approximation import certify

N = 3
UPPER = torch.ones(N, N, dtype=torch.float64).triu(1)


class Of(nn.Module):
    """``f(self, x)`` with maps q, k, v."""

    def __init__(self, f, d=2):
        super().__init__()
        self.f = f
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.gate = nn.Parameter(torch.zeros(()))
        self.double()

    def forward(self, x):
        return self.f(self, x)


def attention(m, x, scores):
    return (m.q(x) @ m.k(x).mT + scores).softmax(-1) @ m.v(x)


def mean(y):
    return y.mean(1, keepdim=True).expand_as(y)


def left(m, x):
    return 1 - (m.q(x) @ m.k(x).mT).softmax(-1).sum(-1, keepdim=True)


BEYOND = torch.zeros(N, N, dtype=torch.float64)
BEYOND[0, 1] = 1e5
MASKED = (-1e9 * UPPER).double()

NO_MASKS = {
    "soft token mask": lambda m, x: attention(m, x, (1 - m.v(x)[..., :1].mT.sigmoid()) * (1 - torch.eye(N).double()) * -1e4),
    "learned gate": lambda m, x: attention(m, x, (1 - m.gate) * MASKED),
    "decay": lambda m, x: attention(m, x, -2e4 * (1 - torch.eye(N).double()) * (1 - m.v(x)[..., :1].mT.tanh() ** 2)),
    "cancelling": lambda m, x: attention(m, x, (m.k(x)[..., :1].cos() ** 2 + m.k(x)[..., :1].sin() ** 2 - 1) * 1e5 * UPPER),
}


@pytest.mark.parametrize("name", NO_MASKS)
def test_scores_that_depend_on_data_or_parameters_are_no_masks(name):
    assert certify(Of(NO_MASKS[name]), tokens=N, dim=2, group="symmetric").strength != "proved-impossible"


@pytest.mark.parametrize("sign", [1, -1])
def test_what_cancels_breaks_no_symmetry(sign):
    """1 - sum of a softmax is 0: it is full attention, with the group S_3."""
    module = Of(lambda m, x: attention(m, x, -sign * left(m, x) * BEYOND))
    assert certify(module, tokens=N, dim=2, layers=2, group="trivial").holds is not True


@pytest.mark.parametrize(
    "f",
    [
        lambda m, x: mean(torch.tanh(m.v(x) * math.inf)),
        lambda m, x: mean(torch.tanh(m.v(x) / torch.zeros(1, dtype=torch.float64))),
        lambda m, x: mean(torch.sigmoid((m.v(x) + 1) * -math.inf)),
    ],
)
def test_infinite_factors_are_steps(f):
    verdict = certify(Of(f, d=1), tokens=2, dim=1)
    assert verdict.strength == "unknown" and "infinity" in verdict.reason


def test_rounding_is_no_broken_symmetry():
    """Linear attention without a norm, of large numbers in a deep stack."""
    module = Of(lambda m, x: (m.q(x) @ m.k(x).mT) @ m.v(x), d=8)
    assert certify(module, tokens=4, dim=8, layers=3, group="trivial").holds is not True
    found = certify(module, tokens=4, dim=8, layers=2)
    assert found.holds is not True or found.group_name == "S_4"


def test_kinks_in_deep_stacks_measure_the_noise_of_the_stack():
    module = Of(lambda m, x: (m.q(x).relu() @ m.k(x).relu().mT) @ m.v(x), d=8)
    assert certify(module, tokens=4, dim=8, layers=3, group="trivial").holds is not True


@pytest.mark.parametrize("phase, bits, group", [(0.5, 256, "trivial"), (0.0, 128, "reflection")])
def test_the_rounding_of_a_table_is_no_broken_symmetry(phase, bits, group):
    places = torch.arange(5, dtype=torch.float64)
    table = torch.cos(2 * math.pi * (places[:, None] - places) / 5 + phase)
    module = Of(lambda m, x: attention(m, x, table))
    assert certify(module, tokens=5, dim=2, layers=2, group=group, bits=bits).holds is not True


@pytest.mark.parametrize("size", [100.0, 40.0])
def test_a_mask_that_leaks_is_no_proof(size):
    verdict = certify(Of(lambda m, x: attention(m, x, -size * UPPER)), tokens=N, dim=2, layers=2, group="symmetric")
    assert verdict.strength == "unknown" and "mask" in verdict.reason


def test_a_mask_read_as_forbidden_still_is():
    for scale in (1.0, 0.5):
        module = Of(lambda m, x, s=scale: ((m.q(x) @ m.k(x).mT + MASKED) * s).softmax(-1) @ m.v(x))
        assert certify(module, tokens=N, dim=2, group="symmetric").strength == "proved-impossible"


def test_the_identity_is_not_reached_through_nothing_over_nothing():
    module = Of(lambda m, x: m.gate * (x.mean(1, keepdim=True) - x) / m.gate)
    assert certify(module, tokens=N, dim=2, group="symmetric").holds is not True


def test_parameters_of_a_closure_cannot_be_varied():
    module = Of(lambda m, x: mean(m.v(x)))
    nn.init.zeros_(module.v.weight)
    inner = module.forward
    module.forward = lambda x: inner(x)
    verdict = certify(module, tokens=N, dim=2, group="symmetric")
    assert verdict.strength == "unknown"


@pytest.mark.parametrize(
    "f, d",
    [
        (lambda m, x: mean(F.normalize(m.v(x), dim=-1)), 1),
        (lambda m, x: mean(m.v(x) / m.v(x).abs()), 1),
        (lambda m, x: mean(m.v(x) / m.v(x).square().sqrt()), 1),
        (lambda m, x: mean(F.layer_norm(m.v(x), (2,), eps=0.0)), 2),
    ],
)
def test_steps_written_without_a_choice_are_steps(f, d):
    verdict = certify(Of(f, d=d), tokens=2, dim=d, group="symmetric")
    assert verdict.strength == "unknown" and "a step" in verdict.reason


def test_a_direction_is_no_step():
    module = Of(lambda m, x: mean(F.normalize(m.v(x), dim=-1)), d=2)
    assert certify(module, tokens=2, dim=2, group="symmetric").strength == "certified-at-samples"
