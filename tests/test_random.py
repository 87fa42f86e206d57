"""Random backbones: exact programs, the dense oracle, conditioning, refusals."""

import math
import re

import pytest
import torch

import anyformer as af
from anyformer import philox
from anyformer.backbones.random_backbone import (
    RandomRecipe,
    build_reads,
    recommended_width,
    required_reads,
    triangular_condition,
)

L2 = dict(rtol=1e-10, atol=1e-10)


def make(seed: int = 0, **sizes) -> af.Transformer:
    torch.manual_seed(seed)
    return af.Transformer(**(dict(vocab=6, heads=2, layers=2, head_dim=3, features=5) | sizes)).double()


def compare(target: af.Transformer, machine: af.Machine, tolerance: float, literal: bool = True) -> None:
    tokens = torch.randint(target.config.vocab, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[0, :2], mask[1, -1:] = False, False
    expected, patterns = target.with_patterns(tokens, mask=mask)
    program = af.compile(target, machine)
    trace = machine.trace(tokens, program, mask=mask)
    runs = [(trace.logits, trace.patterns)]
    if literal:
        dense: list[torch.Tensor] = []
        runs.append((machine.literal()(tokens, program, mask=mask, patterns=dense), dense))
    for logits, found in runs:
        torch.testing.assert_close(logits[mask], expected[mask], rtol=tolerance, atol=tolerance)
        assert len(found) == len(patterns) == target.config.layers
        for mine, theirs in zip(found, patterns, strict=True):
            real = mask[:, None, :].expand(mine.shape[:3])
            torch.testing.assert_close(mine[real], theirs[real], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("law", ["uniform", "gaussian"])
@pytest.mark.parametrize(
    "options", [{}, {"residual": True}, {"residual": True, "norm": "rms"}, {"residual": True, "norm": "layer", "bias": True}]
)
def test_programs_are_exact_at_ten_per_cent_oversampling(law: str, options: dict) -> None:
    target = make(**options)
    compare(target, af.Random.for_class(target, law=law, oversample=1.1, seed=3), 1e-10)


@pytest.mark.parametrize(
    "options", [{}, {"residual": True, "positions": "learned", "max_length": 9}, {"positions": "rope", "head_dim": 4}]
)
def test_programs_are_exact_at_the_least_width(options: dict) -> None:
    target = make(**options)
    machine = af.Random.for_class(target, oversample=1.0, seed=1)
    assert machine.width == machine.needed
    compare(target, machine, 1e-9)


def drawn_until_conditioned(target: af.Transformer, oversample: float, limit: float) -> af.Random:
    """The first seed whose condition number lets the tolerance mean something (condition * eps below it)."""
    for seed in range(40):
        machine = af.Random.for_class(target, oversample=oversample, seed=seed)
        if machine.condition <= limit:
            return machine
    raise AssertionError(f"no seed below 40 has a condition number under {limit}")


@pytest.mark.parametrize(
    "stack",
    [
        {"norm": "rms", "gated": True},
        {"norm": "layer", "norm_position": "post", "gated": True, "features": 3},
        {"norm": "layer", "features": 4, "head_dim": 1},
        {"norm": "rms", "gated": True, "bias": True, "layers": 1},
    ],
)
@pytest.mark.parametrize("oversample, tolerance, limit", [(1.0, 1e-9, 5e6), (1.1, 1e-10, 5e5)])
def test_residual_mlp_stacks_of_two_layers(stack: dict, oversample: float, tolerance: float, limit: float) -> None:
    """H = r = 1, at most 600 reads; through the folded run and, oversampled, the dense random transformer."""
    target = make(**(dict(vocab=3, heads=1, head_dim=2, features=2, residual=True, mlp=1, activation="silu") | stack))
    machine = drawn_until_conditioned(target, oversample, limit)
    assert machine.needed <= 600
    compare(target, machine, tolerance, literal=oversample > 1)


def test_weights_are_the_pinned_bits_and_the_live_reads_are_products_of_the_literal_matrices() -> None:
    target = make(residual=True)
    machine = af.Random.for_class(target, seed=5)
    literal = machine.literal()
    again = af.Random.for_class(make(seed=9, residual=True), seed=5)
    assert machine == again and torch.equal(machine.reads, again.reads)
    for name, matrix in literal.matrices().items():
        assert torch.equal(matrix, again.literal().matrices()[name])
    reads, _ = build_reads(machine.recipe)
    U, route = literal.U, literal.layers[1].banks[0].R_V[1]
    last = reads.shape[1] - U.shape[1]  # the path (head 2, head 2)
    torch.testing.assert_close(reads[:, last:], literal.layers[0].banks[0].R_V[1] @ route @ U, **L2)
    expected = philox.uniform(5, 5, (machine.width, 6), 1 / math.sqrt(machine.width))
    assert torch.equal(U, torch.from_numpy(expected))
    assert af.Random.for_class(target, seed=6) != machine


def test_the_count_of_reads_is_the_trees_width_without_mlp_and_larger_with_one() -> None:
    plain = af.network_class(make(residual=True, norm="rms"))
    assert required_reads(plain) == af.PathTree.for_class(plain).width
    gated = af.network_class(make(layers=1, heads=1, residual=True, mlp=2, gated=True))
    # leaf 6; MLP: 2 units of 6 gates and 3 children; attention: 2d reads and 2 children
    assert required_reads(gated) == 2 * 3 + 2 * (2 * 6 + 3 * 6)
    assert recommended_width(2280) == 2850 and recommended_width(10**50) == 125 * 10**48


def test_nonzero_weights_count_the_literal_matrices() -> None:
    for options in (
        {"residual": True, "norm": "rms"},
        {"layers": 1, "heads": 1, "residual": True, "mlp": 1, "gated": True, "bias": True},
    ):
        machine = af.Random.for_class(make(**options))
        assert machine.cost().nonzero_weights == sum(m.count_nonzero() for m in machine.literal().matrices().values())


def test_condition_number_is_within_a_few_per_cent() -> None:
    for n in (1, 2, 7, 150):
        matrix = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))).R
        exact = float(torch.linalg.cond(matrix))
        assert triangular_condition(matrix) == pytest.approx(exact, rel=0.03)
    assert triangular_condition(torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float64)) == float("inf")


def test_the_report_says_condition_oversampling_and_forecast() -> None:
    target = make()
    machine = af.Random.for_class(target)
    program = af.compile(target, machine, dtype=torch.float32)
    about = program.provenance
    assert about["oversampling"] == pytest.approx(1.25, rel=0.02) and about["required_reads"] == machine.needed
    assert about["condition"] == machine.condition > 1
    assert 0 < about["residual"] < 1e-5 and about["largest_embedding_entry"] == float(program.tokens.detach().abs().max())
    error = af.verify(program, target, dtype=torch.float64, tolerance=(1e-3, 1e-3)).max_rel_error
    assert 0 < error < 10 * about["forecast_relative_error"] < 1e-3


def test_too_narrow_says_which_width_would_do() -> None:
    target = make()
    needed = required_reads(af.network_class(target))
    with pytest.raises(af.AnyformerError, match=f"width >= {needed}, recommended {recommended_width(needed)}"):
        af.Random.for_class(target, width=needed - 1)


def test_bad_conditioning_is_refused() -> None:
    target = make()
    machine = af.Random.for_class(target, oversample=1.0)
    q, r, _ = machine.factor()
    machine._factor = (q, r, 1e7)
    with pytest.raises(af.AnyformerError, match=re.escape("condition number 1.0e+07")):
        af.compile(target, machine, dtype=torch.float32)
    machine._factor = (q, r, float("nan"))
    with pytest.raises(af.AnyformerError, match="condition number nan"):
        af.compile(target, machine)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"oversample": 0.9}, "number of at least 1"),
        ({"oversample": float("nan")}, "number of at least 1"),
        ({"law": "cauchy"}, "law must be one of"),
        ({"seed": -1}, "seed must be an integer >= 0"),
        ({"seed": 2**64}, "below 2"),
        ({"width": 200, "oversample": 1.5}, "not both"),
        ({"colour": 1}, "takes no option colour"),
        ({"width": 10**8}, "of memory"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(af.AnyformerError, match=message):
        af.Random.for_class(make(), **options)


def test_gradients_reach_the_target() -> None:
    target = make(layers=1)
    machine = af.Random.for_class(target)
    tokens = torch.tensor([[0, 3, 2]])
    machine(tokens, af.compile(target, machine)).square().sum().backward()
    mine = {k: p.grad.clone() for k, p in target.named_parameters()}
    target.zero_grad()
    target(tokens).square().sum().backward()
    for name, parameter in target.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-9, atol=1e-9)


def test_recipes_survive_json() -> None:
    recipe = af.Random.for_class(make(), seed=4, law="gaussian").recipe
    assert RandomRecipe.from_json(recipe.to_json()) == recipe
