"""Machines for learning: the fast runs against the dense literal form, gradients included; programs; compiling and its refusals."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

import anyformer as af
from anyformer.backbones import FrozenMasked, FrozenRandom
from anyformer.backbones.frozen import Frozen, FrozenRecipe, attention_class, products
from anyformer.classes import BranchClass, NetworkClass, StageClass
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.learning.learner import LearnedProgram
from anyformer.operators import Attention, Bidirectional, Causal, Window
from anyformer.operators.functions import FUNCTIONS
from anyformer.recipe import Recipe
from anyformer.targets.transformer import TransformerConfig
from anyformer.tasks import IGNORED

KINDS = (FrozenMasked, FrozenRandom)
VOCAB, LENGTH = 5, 6


def config(heads: int, layers: int, **more) -> TransformerConfig:
    return TransformerConfig(vocab=VOCAB, heads=heads, layers=layers, head_dim=3, features=VOCAB, causal=True, **more)


def learner(machine: Frozen, seed: int = 0, length: int | None = LENGTH, **options) -> LearnedProgram:
    made = LearnedProgram(machine, VOCAB, length, rows=2, **options).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.7)
    return made


def literal_run(made: LearnedProgram, tokens: torch.Tensor, patterns: list | None = None):
    """Logits of the dense machine, and the parameters that they depend on."""
    held = {name: p.detach().clone().requires_grad_() for name, p in made.named_parameters()}
    program = SimpleNamespace(
        embedding=held["tokens"],
        position_embedding=held.get("positions"),
        readout=held["readout"],
        norms=held.get("norms"),
    )
    return made.machine.literal()(tokens, program, patterns=patterns), held


VARIANTS = [
    ({"residual": residual, "norm": norm, "mlp": mlp}, (residual + (norm is not None) + bool(mlp)) % 2 == 0)
    for residual, norm, mlp in itertools.product((False, True), (None, "pre", "post"), (0, 4))
]
CASES = [(kind, options) for options, even in VARIANTS for kind in (KINDS if even else KINDS[:1])]
"""Every variant with 0/1 maps, and with random ones half of them, in which any two options meet."""


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
@settings(max_examples=3 if settings.default.max_examples < 200 else 30)
@given(heads=st.integers(1, 3), layers=st.integers(1, 3), seed=st.integers(0, 99), few=st.booleans())
def test_every_run_and_every_gradient_is_the_literal_machines(kind, options, heads, layers, seed, few):
    machine = kind.for_class(config(heads, min(layers, 4 - heads)), seed=seed, **options)
    made = learner(machine, seed, norms=True)
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(VOCAB, (2, 3, LENGTH), generator=generator)
    labels[0, :2] = IGNORED
    if few:  # one or two places a row, none in the last row
        labels[:, 1:4], labels[2] = IGNORED, IGNORED
        labels[1, 4:] = IGNORED
    patterns: list[torch.Tensor] = []
    wanted, held = literal_run(made, tokens, patterns)
    loss = F.cross_entropy(wanted.flatten(0, 1), labels.flatten())
    loss.backward()
    assert made.gradients(tokens, labels) == pytest.approx(loss.item(), abs=1e-10)
    for name, p in made.named_parameters():
        torch.testing.assert_close(p.grad, held[name].grad, rtol=1e-10, atol=1e-10)
    program = made.program()
    trace = machine.trace(tokens, program)
    for logits in (made(tokens), machine(tokens, program), trace.logits):
        torch.testing.assert_close(logits, wanted, rtol=1e-10, atol=1e-10)
    assert len(trace.patterns) == len(patterns)
    for got, want in zip(trace.patterns, patterns, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residual", [False, True])
@settings(max_examples=4 if settings.default.max_examples < 200 else 40)
@example(heads=2, layers=2, length=50, positions=True, few=False, mask=Causal())
@example(heads=2, layers=1, length=40, positions=True, few=True, mask=Causal())
@given(
    heads=st.integers(1, 3),
    layers=st.integers(1, 3),
    length=st.sampled_from([2 * VOCAB, 31, 32, 33]),
    positions=st.booleans(),
    few=st.booleans(),
    mask=st.sampled_from([Causal(), Bidirectional(), Window(3, 2)]),
)
def test_long_rows_step_first_from_the_tables(kind, residual, heads, layers, length, positions, few, mask):
    """Rows at least twice as long as the vocabulary are never gathered, and long causal ones are cut in blocks of queries."""
    stage = StageClass((BranchClass(Attention(heads, 2, mask=mask)),))
    machine = kind.for_class(NetworkClass((stage,) * min(layers, 4 - heads), VOCAB), residual=residual)
    made = learner(machine, length, length=length if positions else None)
    generator = torch.Generator().manual_seed(length)
    tokens, labels = torch.randint(VOCAB, (2, 3, length), generator=generator)
    if few:
        labels[:, : length - 3] = IGNORED
    wanted, held = literal_run(made, tokens)
    F.cross_entropy(wanted.flatten(0, 1), labels.flatten()).backward()
    made.gradients(tokens, labels)
    for name, p in made.named_parameters():
        torch.testing.assert_close(p.grad, held[name].grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(made(tokens), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["padded", "own order", "apart"])
def test_long_rows_with_their_own_positions(kind, case):
    machine = kind.for_class(config(2, 2), residual=True)
    program = learner(machine, length=2 * 40).program()
    generator = torch.Generator().manual_seed(3)
    tokens, positions, mask = torch.randint(VOCAB, (2, 40), generator=generator), None, None
    if case == "padded":
        mask = torch.ones(2, 40, dtype=torch.bool)
        mask[0, :9] = mask[1, 33:] = False
    else:
        positions = torch.randperm(80, generator=generator)[:40].expand(2, 40)
        positions = positions if case == "own order" else torch.stack((positions[0], positions[0].flip(0)))
    wanted = machine.literal()(tokens, program, mask=mask, positions=positions)
    torch.testing.assert_close(machine(tokens, program, mask=mask, positions=positions), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", ["pre", "post", None])
@pytest.mark.parametrize("padding", [(2, 2), (2, 1)], ids=["shared positions", "other positions"])
def test_padding_is_neutral(kind, norm, padding):
    machine = kind.for_class(config(2, 2), residual=True, norm=norm)
    made = learner(machine, norms=norm is not None)
    program = made.program()
    tokens = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[place >= first for place in range(5)] for first in padding])
    padded = machine(tokens, program, mask=mask)
    for row, first in enumerate(padding):
        torch.testing.assert_close(
            padded[row, first:], machine(tokens[row : row + 1, first:], program)[0], rtol=1e-10, atol=1e-10
        )


def test_the_papers_widths():
    sizes = {(4, 2, 24, 4): 1024, (2, 2, 28, 30): 456, (2, 3, 28, 30): 1024, (2, 4, 30, 30): 2280}
    for (heads, layers, d, vocab), m in sizes.items():
        c = TransformerConfig(vocab=vocab, heads=heads, layers=layers, head_dim=d, features=vocab, causal=True)
        network = af.read(af.Transformer(c)).network_class
        assert [kind.recipe_for(network).m for kind in KINDS] == [m, m]


def test_the_class_of_a_machine_is_that_of_an_attention_only_target():
    assert attention_class(2, 3, 3, VOCAB) == af.read(af.Transformer(config(2, 3))).network_class.for_tree()


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_compiles_and_comes_back(kind):
    target = af.Transformer(config(2, 2, positions="learned", max_length=LENGTH)).double()
    machine = kind.for_class(target)
    program = af.compile(target, machine)
    tokens = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(2))
    tolerance = 1e-10 if kind is FrozenMasked else 1e-7  # m = N: the condition number of R_all is 1e3 to 1e5
    torch.testing.assert_close(machine(tokens, program), target(tokens), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(machine.literal()(tokens, program), target(tokens), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(af.specialize(program)(tokens), target(tokens), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"norm": "pre"}, "LayerNorm runs over all m"),
        ({"norm": "post", "residual": True}, "LayerNorm runs over all m"),
        ({"mlp": 3}, "MLP is random"),
        ({"residual": True}, "true skip"),
    ],
)
def test_compile_and_specialize_say_why_not(kind, options, reason):
    machine = kind.for_class(config(2, 2), **options)
    with pytest.raises(OutsideClass, match=reason):
        af.compile(af.Transformer(config(2, 2)), machine)
    with pytest.raises(OutsideClass, match=reason):
        af.specialize(learner(machine).program())


@pytest.mark.parametrize("kind", KINDS)
def test_a_learned_program_is_saved_banked_and_run(kind, tmp_path):
    machine = kind.for_class(config(2, 2), residual=True, norm="pre")
    programs = {name: learner(machine, seed, norms=seed == 0).program() for seed, name in enumerate(("a", "b"))}
    tokens = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    programs["a"].save(tmp_path / "a")
    again = af.load(tmp_path / "a")
    assert torch.equal(again.norms, programs["a"].norms) and torch.equal(af.run(again, tokens), machine(tokens, programs["a"]))
    bank = af.ProgramBank(machine, {"a": tmp_path / "a", "b": programs["b"]})
    mixed = bank(tokens, programs=["a", "b", "b", "a"])
    for i, name in enumerate("abba"):
        assert torch.equal(mixed[i : i + 1], machine(tokens[i : i + 1], programs[name]))


@pytest.mark.parametrize("kind", KINDS)
def test_recipes_are_values(kind):
    machine = kind.for_class(config(2, 2), residual=True, norm="post", mlp=3, seed=5)
    assert Recipe.from_json(machine.recipe.to_json()) == machine.recipe
    assert machine.recipe.machine() == machine and isinstance(machine.recipe, FrozenRecipe)
    assert machine.cost(7).state == 7 * machine.width
    assert str(machine.coordinate(0)) and sum(block.count for block in machine.blocks()) == machine.width


def test_literal_weights_are_counted():
    for kind, options in CASES:
        machine = kind.for_class(config(2, 2), **options)
        literal = machine.literal()
        matrices = [b for bank in literal.banks for b in bank.buffers()] + [w for pair in literal.mlps for w in pair]
        assert machine.cost().nonzero_weights == sum(int((w != 0).sum()) for w in matrices)


def test_bad_recipes_and_programs():
    network = af.read(af.Transformer(config(2, 2))).network_class
    for options, message in (
        ({"norm": "layer"}, "norm must be one of"),
        ({"mlp": -1}, "mlp must be"),
        ({"seed": 2**64}, "below 2\\^64"),
        ({"activation": "sine"}, "activation must be one of"),
    ):
        with pytest.raises(AnyformerError, match=message):
            FrozenMasked.recipe_for(network, **options)
    with pytest.raises(AnyformerError, match="attention alone"):
        FrozenMasked.for_class(af.Transformer(config(2, 2, residual=True)))
    machine = FrozenMasked.for_class(config(2, 2), residual=True, norm="pre")
    program = learner(machine, norms=True).program()
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    for change, message in (
        ({"readout": None}, "needs a read-out"),
        ({"readout": program.readout[:, 1:]}, rf"needs a read-out \(\d+, {VOCAB}\), got shape \(\d+, {VOCAB - 1}\)"),
        ({"norms": program.norms[:1]}, "3 norms, the program brings 1"),
    ):
        with pytest.raises(AnyformerError, match=message):
            machine(tokens, replace(program, **change))
    with pytest.raises(AnyformerError, match="position 9 has no row"):
        machine(tokens, program, positions=torch.tensor([[0, 9]]))
    with pytest.raises(AnyformerError, match="leaves"):
        LearnedProgram(FrozenRandom.for_class(config(2, 2)), VOCAB, None, readout="shared")


def test_frozen_mlps_are_their_seeds_draws_within_the_fan_in():
    """Golden: a recipe means these numbers for ever."""
    machine = FrozenMasked.for_class(config(2, 2), mlp=4, seed=7)
    first = {f"mlp_{layer}_{i}": 0.0 for layer in range(2) for i in range(2)}
    for name, weight in machine.named_buffers():
        bound = len(weight) ** -0.5
        assert 0.95 * bound < float(weight.abs().max()) < bound
        first[name] = float(weight[0, 0])
    assert list(first.values()) == pytest.approx([-0.12638729704, -0.01322378037, -0.02863751698, -0.49252791280], abs=1e-10)
    assert not torch.equal(machine.mlp_0_0, FrozenMasked.for_class(config(2, 2), mlp=4, seed=8).mlp_0_0)


def test_a_shared_readout_is_a_restriction_of_u():
    machine = FrozenMasked.for_class(config(2, 2))
    made = learner(machine, readout="shared")
    full = made.full_readout()
    leaves = [b.start for b in machine.blocks() if b.what == "output"]
    assert all(torch.equal(full[at : at + VOCAB], made.readout) for at in leaves)
    assert int((full != 0).sum()) == len(leaves) * VOCAB * VOCAB


@pytest.mark.parametrize(
    "options", [{}, {"residual": True, "norm": "pre"}, {"residual": True, "norm": "post", "mlp": 4}], ids=str
)
def test_bfloat16_products_are_a_small_change(options):
    machine = FrozenRandom.for_class(config(2, 2), **options)
    made = learner(machine).float()
    tokens = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(4))
    exact = made(tokens)
    exact.sum().backward()
    wanted = {name: p.grad.clone() for name, p in made.named_parameters()}
    made.zero_grad()
    made.products = torch.bfloat16
    rounded = made(tokens)
    rounded.sum().backward()
    assert rounded.dtype == torch.float32
    scale = float(exact.detach().abs().max())
    error = float((rounded - exact).detach().abs().max()) / scale
    assert 1e-5 < error < 0.1  # 8 bits, a few layers
    for name, p in made.named_parameters():
        assert float((p.grad - wanted[name]).abs().max()) < 0.2 * float(wanted[name].abs().max())


@pytest.mark.parametrize("units", [True, False], ids=["with units", "without"])
def test_a_bfloat16_product_is_that_of_rounded_factors(units, monkeypatch):
    """Both ways: x and the map are rounded to 8 bits, summed in float32 or better, and the sum is rounded once."""
    monkeypatch.setattr(products, "has_bfloat16", lambda: units)
    generator = torch.Generator().manual_seed(5)
    x, matrix = torch.randn(7, 40, 30, generator=generator), torch.randn(30, 20, generator=generator)
    held = matrix.bfloat16()
    got = products.product(x, held)
    wanted = (x.bfloat16().double() @ held.double()).bfloat16()
    assert got.dtype == torch.float32 and torch.equal(got, got.bfloat16().float())
    close = (got - wanted.float()).abs() <= wanted.float().abs() * 2**-7  # a sum between two values may fall either way
    assert close.all() and (got == wanted.float()).double().mean() > 0.98
    assert torch.equal(products.product(x, matrix), x @ matrix)


@pytest.mark.parametrize("trained", ["tokens", "positions", "readout"])
def test_bfloat16_does_not_round_what_is_trained(trained):
    """A change far below what bfloat16 tells apart is seen: a residual stream and U are float32."""
    made = learner(FrozenRandom.for_class(config(1, 1), residual=True, norm="pre")).float()
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(6))
    made.products = torch.bfloat16
    before = made(tokens).detach()
    with torch.no_grad():
        getattr(made, trained).mul_(1 + 2**-12)
    assert not torch.equal(made(tokens), before)


def test_learners_of_one_recipe_do_not_move_each_others_machine():
    shared = FrozenRandom.for_class(config(2, 2), residual=True, norm="pre")
    here, away = learner(shared), learner(shared)
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    wanted = here(tokens).detach()
    away.to("meta")
    assert away.machine.cost() == shared.cost() and {b.device.type for b in away.machine.buffers()} == {"meta"}
    assert here.machine is shared and torch.equal(here(tokens), wanted)


@pytest.mark.parametrize("activation", sorted(FUNCTIONS.keys() - {"log", "sqrt", "rsqrt"}))  # hidden values are negative, too
@pytest.mark.parametrize("kind", KINDS)
def test_every_activation_of_a_frozen_mlp(kind, activation):
    machine = kind.for_class(config(1, 1), residual=True, norm="pre", mlp=3, activation=activation)
    made = learner(machine)
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(8))
    torch.testing.assert_close(made(tokens), literal_run(made, tokens)[0], rtol=1e-10, atol=1e-10)
