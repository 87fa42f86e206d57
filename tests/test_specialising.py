"""Specialisation: from the program alone, the target's own sizes and outputs come back."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anyformer as af
from anyformer.factoring import factor
from anyformer.specialising import NetworkModule


def make(seed: int = 0, **sizes) -> af.Transformer:
    torch.manual_seed(seed)
    target = af.Transformer(**(dict(vocab=9, heads=2, layers=2, head_dim=2, features=5) | sizes)).double()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(0.6 * torch.randn_like(parameter))
    return target


def relative_error(module: torch.nn.Module, target: torch.nn.Module, vocab: int = 9) -> float:
    tokens = torch.randint(vocab, (4, 8), generator=torch.Generator().manual_seed(7))
    mask = torch.ones(4, 8, dtype=torch.bool)
    mask[0, :3] = False
    with torch.no_grad():
        expected, got = target(tokens, mask=mask), module(tokens, mask=mask)
    return float((got - expected)[mask].abs().max() / expected[mask].abs().max())


def sizes_of(config: af.TransformerConfig) -> tuple:
    return (
        config.vocab,
        config.heads,
        config.layers,
        config.head_dim,
        config.kv_heads,
        config.value_dim,
        config.mlp,
        config.residual,
    )


CLASSES = st.fixed_dictionaries(
    {
        "residual": st.just(True),
        "norm": st.sampled_from([None, "rms", "layer"]),
        "norm_position": st.sampled_from(["pre", "post"]),
        "mlp": st.sampled_from([0, 2]),
        "gated": st.booleans(),
        "bias": st.booleans(),
        "positions": st.sampled_from([None, "learned", "rope", "alibi"]),
        "kv_heads": st.sampled_from([None, 1]),
        "causal": st.booleans(),
    }
)


@given(CLASSES, st.integers(0, 5))
def test_every_residual_class_comes_back_at_its_own_size(options: dict, seed: int) -> None:
    if options["gated"] and not options["mlp"]:
        options["gated"] = False
    if options["norm"] is None:
        options["norm_position"] = "pre"
    if options["positions"] == "learned":
        options["max_length"] = 8
    target = make(seed, **options)
    module = af.specialize(af.compile(target, af.PathTree.for_class(target)))
    assert isinstance(module, af.Transformer) and module.report.ordinary
    assert sizes_of(module.config) == sizes_of(target.config) and module.config.features == target.config.features
    assert relative_error(module, target) < 1e-8


@pytest.mark.parametrize(
    "options", [{}, {"heads": 1, "layers": 3}, {"heads": 3, "features": 9}, {"positions": "rope", "bias": True}]
)
def test_attention_only_classes(options: dict) -> None:
    target = make(**options)
    module = af.specialize(af.compile(target, af.PathTree.for_class(target)))
    assert sizes_of(module.config) == sizes_of(target.config) and module.config.features <= target.config.features
    assert relative_error(module, target) < 1e-10


@pytest.mark.parametrize("machine", [af.PathTree, af.Looped, af.Random])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_every_machine_and_dtype(machine: type, dtype: torch.dtype, tolerance: float) -> None:
    target = make(residual=True, norm="rms").to(dtype)
    module = af.specialize(af.compile(target, machine.for_class(target)))
    assert isinstance(module, af.Transformer) and next(module.parameters()).dtype == dtype
    assert sizes_of(module.config) == sizes_of(target.config)
    assert relative_error(module, target) < tolerance


def test_chain() -> None:
    target = make(heads=1, layers=3)
    assert relative_error(af.specialize(af.compile(target, af.Chain.for_class(target))), target) < 1e-10


def test_fewer_tokens_than_features_gives_the_smaller_stream() -> None:
    target = make(vocab=3, features=8, residual=True)
    module = af.specialize(af.compile(target, af.PathTree.for_class(target)))
    # three embedding rows, and what two layers of two heads of rank two can add: still below eight features
    assert module.config.features <= 8 and relative_error(module, target, 3) < 1e-10


def test_the_program_alone_is_enough(tmp_path) -> None:
    target = make(residual=True, norm="rms", mlp=2, gated=True)
    af.compile(target, af.PathTree.for_class(target)).save(tmp_path / "p")
    assert relative_error(af.specialize(af.load(tmp_path / "p")), target) < 1e-9


def test_the_factored_network_unrolls_to_the_program() -> None:
    from anyformer.unrolling import unroll

    target = make(residual=True, mlp=2, gated=True)
    program = af.compile(target, af.PathTree.for_class(target))
    network = factor(program)
    torch.testing.assert_close(network.embedding @ unroll(network), program.embedding, rtol=1e-10, atol=1e-10)


def test_a_learned_program_gets_a_curve_and_the_smallest_module_within_the_error() -> None:
    target = make(residual=True)
    program = af.compile(target, af.PathTree.for_class(target))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(program.tokens.shape, generator=generator, dtype=torch.float64)
    learned = replace(program, tokens=program.tokens + 1e-3 * noise, provenance={})
    module = af.specialize(learned, max_error=0.05)
    curve = module.report.curve
    assert [p.features for p in curve] == sorted(p.features for p in curve)
    assert curve[-1].error < 1e-10 and curve[-1].features > target.config.features
    first = next(p for p in curve if p.error <= 0.05)
    assert max(module.report.features) == first.features < curve[-1].features
    machine = learned.machine()
    tokens = torch.randint(9, (4, 8), generator=generator)
    with torch.no_grad():
        exact, got = machine(tokens, learned), module(tokens)
    assert float((got - exact).abs().max() / exact.abs().max()) < 0.1
    exact_module = af.specialize(learned, max_error=1e-9)
    assert max(exact_module.report.features) == curve[-1].features


def test_unusual_operators_come_back_as_a_network() -> None:
    op = af.operators
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads = af.Branch(op.Attention(2, 3, kernel=op.RBF()), draw(4, 12), af.LowRankMap(draw(2, 4, 2), draw(2, 2, 4)))
    stage = af.Stage((af.Branch(op.Identity(), None, af.IdentityMap(4)), heads))
    network = af.Network(draw(7, 4), (stage, stage), draw(4, 7))
    module = af.specialize(af.compile(network, af.PathTree.for_class(network)))
    assert isinstance(module, NetworkModule) and not module.report.ordinary
    tokens = torch.randint(7, (2, 5), generator=generator)
    torch.testing.assert_close(module(tokens), network.run(tokens), rtol=1e-10, atol=1e-10)


def test_lost_precision_is_said_not_returned() -> None:
    target = make(residual=True, norm="rms", norm_position="post", mlp=2, gated=True, layers=2)
    program = af.compile(target, af.PathTree.for_class(target))
    generator = torch.Generator().manual_seed(0)
    broken = replace(program, tokens=torch.randn(program.tokens.shape, generator=generator, dtype=torch.float64))
    with pytest.raises(af.AnyformerError, match="lost too much precision"):
        af.specialize(broken)
