"""The sequence simulator as a machine: chains of simulators, their programs, biases, bounds, costs."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import anyformer as af
from anyformer.errors import AnyformerError
from anyformer.maps import ConstantMap, DenseMap, IdentityMap
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Attention, Bidirectional, Causal, Identity

MACHINES = [
    (dict(heads=1, layers=1, head_dim=2, features=2), {}),
    (dict(heads=2, layers=2, head_dim=1, features=2, causal=True), {}),
    (dict(heads=2, layers=1, head_dim=2, features=3, residual=True, positions="learned", max_length=4), {}),
    (dict(heads=1, layers=3, head_dim=3, features=2, residual=True, causal=True), {}),
    (dict(heads=2, layers=1, head_dim=1, features=2, residual=True, bias=True), {}),
    (dict(heads=1, layers=2, head_dim=2, features=2, bias=True), {}),
]


def target_of(config, seed=3):
    torch.manual_seed(seed)
    target = af.Transformer(af.TransformerConfig(vocab=4, **config)).double()
    for name, parameter in target.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return target


@pytest.mark.parametrize("config, options", MACHINES)
def test_a_chain_of_simulators_is_a_machine(config, options):
    target = target_of(config)
    machine = af.SequenceSimulator.for_class(target, length=4, **options)
    program = af.compile(target, machine)
    verdict = af.verify(program, target)
    assert verdict.passed, str(verdict)
    tokens = torch.randint(4, (2, 4))
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    torch.testing.assert_close(machine(tokens, program, mask=mask)[mask], target(tokens, mask=mask)[mask], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(machine(tokens[:, :2], program), target(tokens[:, :2]), rtol=1e-10, atol=1e-10)
    dense: list[torch.Tensor] = []
    found = machine.literal()(tokens, program, mask=mask, patterns=dense)
    torch.testing.assert_close(found[mask], target(tokens, mask=mask)[mask], rtol=1e-10, atol=1e-10)
    for ours, wanted in zip(dense, target.with_patterns(tokens, mask=mask)[1], strict=True):
        torch.testing.assert_close(ours.transpose(1, 2)[mask], wanted.transpose(1, 2)[mask], rtol=1e-10, atol=1e-10)
    assert machine.compiled.layers == 4 * config["layers"] + 1
    cost, network = machine.cost(4), machine.compiled.network
    assert network.embedding.shape[1] <= cost.width <= 3 * network.embedding.shape[1]
    nonzero = sum(int(t.count_nonzero()) for t in network.tensors())
    assert nonzero <= cost.nonzero_weights <= 4 * nonzero
    assert (cost.length, cost.depth) == (machine.width, 2 * machine.compiled.layers)


def test_programs_of_the_sequence_simulator_are_programs(tmp_path):
    target = target_of(MACHINES[1][0])
    machine = af.SequenceSimulator.for_class(target, length=3)
    program = af.compile(target, machine)
    program.save(tmp_path / "p")
    loaded = af.load(tmp_path / "p")
    tokens = torch.randint(4, (2, 3))
    assert torch.equal(loaded.machine()(tokens, loaded), machine(tokens, program))
    other = af.compile(target_of(MACHINES[1][0], seed=4), machine)
    bank = af.ProgramBank(machine, {"a": program, "b": other})
    for row, one in enumerate((program, other)):
        assert torch.allclose(bank(tokens, programs=["a", "b"])[row], machine(tokens, one)[row], atol=1e-12)
    assert str(machine.coordinate(0)) == "X[1, 1] of the root path"
    assert str(machine.coordinate(6)) == "A0 of layer 1[1, 1] of the root path"
    assert [b.what for b in machine.blocks()][-2:] == ["U", "valid"]


@pytest.mark.parametrize(
    ("config", "dtype", "error"),
    [(MACHINES[1][0] | {"features": 3}, torch.float32, 1e-5), (MACHINES[4][0], torch.float64, 1e-9)],
    ids=str,
)
def test_a_program_of_the_sequence_simulator_is_specialised_into_its_target(config, dtype, error):
    target = target_of(config)
    program = af.compile(target, af.SequenceSimulator.for_class(target, length=3), dtype=dtype)
    module = af.specialize(program)
    assert isinstance(module, af.Transformer) and module.config.head_dim == target.config.head_dim
    tokens = torch.randint(4, (2, 9))  # longer than the simulator
    torch.testing.assert_close(module(tokens).double(), target(tokens), rtol=error, atol=error)


def test_a_learned_program_of_the_sequence_simulator_may_use_all_of_a():
    """A_h of a compiled program has the rank of the head, that of a trained one any."""
    target = target_of(MACHINES[1][0])
    machine = af.SequenceSimulator.for_class(target, length=3)
    program = af.compile(target, machine)
    constants = torch.randn(len(program.constants), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    learned = replace(program, constants=constants)
    tokens = torch.tensor([[0, 3, 1]])
    torch.testing.assert_close(af.specialize(learned)(tokens), machine(tokens, learned), rtol=1e-9, atol=1e-9)


def network_of(*banks):
    """One stage on three features: attention with a mask and so many heads, or the identity."""
    g = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=g, dtype=torch.float64)
    branches = [
        Branch(Identity(), None, IdentityMap(3))
        if bank is None
        else Branch(
            Attention(heads=bank[1], head_dim=2, mask=bank[0], scale=0.3), draw(3, 4 * bank[1]), DenseMap(draw(bank[1], 3, 3))
        )
        for bank in banks
    ]
    return Network(draw(4, 3), (Stage(tuple(branches)),))


TOKENS = torch.tensor([[0, 3, 1]])


def test_the_bias_of_a_stage_is_the_sum_of_what_its_branches_add():
    plain = network_of((Causal(), 1))
    row = torch.tensor([[0.5, -1.0, 0.0]], dtype=torch.float64)
    carried = Branch(Identity(), None, ConstantMap(3, row, torch.tensor([3.0], dtype=torch.float64)))
    shifted = Branch(Identity(), None, IdentityMap(3, 2 * row[0]))
    embedding = torch.cat([plain.embedding[:, :2], torch.ones(4, 1, dtype=torch.float64)], 1)
    network = Network(embedding, (Stage((shifted, carried, *plain.stages[0].branches)),), constant=True)
    machine = af.SequenceSimulator.for_class(network, length=3)
    torch.testing.assert_close(machine(TOKENS, af.compile(network, machine)), network.run(TOKENS), rtol=1e-10, atol=1e-10)


def test_scores_and_features_beyond_the_bounds_of_a_sequence_simulator_are_errors():
    ones = torch.ones(2, 1, dtype=torch.float64)
    heads = Branch(
        Attention(heads=5, head_dim=1), torch.ones(1, 10, dtype=torch.float64), DenseMap(ones[:1].expand(5, 1, 1).clone())
    )
    network = Network(ones, (Stage((heads,)),))  # scores of 1, and 5 after the stage
    for options in ({"bound": 1.0}, {"bound": 10.0, "logits": 0.5}):
        machine = af.SequenceSimulator.for_class(network, length=2, **options)
        with pytest.raises(AnyformerError, match="beyond the bounds of this simulator"):
            machine(TOKENS[:, :1], af.compile(network, machine))


def test_several_banks_of_one_stage():
    network, patterns = network_of((Causal(), 1), None, (Causal(), 2)), []
    machine = af.SequenceSimulator.for_class(network, length=3)
    trace = machine.trace(TOKENS, af.compile(network, machine))
    torch.testing.assert_close(trace.logits, network.run(TOKENS, patterns=patterns), rtol=1e-10, atol=1e-10)
    for found, wanted in zip(trace.patterns, patterns, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(af.specialize(af.compile(network, machine))(TOKENS), network.run(TOKENS), rtol=1e-9, atol=1e-9)
    for banks, message in (
        ([(Causal(), 1), (Bidirectional(), 1)], "stage 1 has heads with different masks"),
        ([None, None, (Causal(), 1)], "stage 1 has 2 residual branches"),
    ):
        with pytest.raises(AnyformerError, match=message):
            af.SequenceSimulator.for_class(network_of(*banks), length=3)


def test_what_the_sequence_simulator_refuses():
    large = af.SequenceSimulator.for_class(af.TransformerConfig(vocab=3, heads=4, layers=2, head_dim=8, features=64))
    with pytest.raises(AnyformerError, match=r"sequence-simulator machine: about [0-9,]+ heads, each with a pattern of"):
        _ = large.compiled
    with pytest.raises(AnyformerError, match=r"stage 1 has .* only softmax attention"):
        af.SequenceSimulator.for_class(af.TransformerConfig(vocab=3, heads=1, layers=1, head_dim=2, features=2, attention="hard"))
    with pytest.raises(AnyformerError, match="stage 2 is no attention"):
        af.SequenceSimulator.for_class(
            af.TransformerConfig(vocab=3, heads=1, layers=1, head_dim=2, features=2, residual=True, mlp=3)
        )
    target = target_of(MACHINES[0][0])
    machine = af.SequenceSimulator.for_class(target, length=2)
    program = af.compile(target, machine)
    with pytest.raises(AnyformerError, match="sequences of up to 2 tokens, got 3"):
        machine(torch.zeros(1, 3, dtype=torch.long), program)
    with pytest.raises(AnyformerError, match="3 features, the machine has 2"):
        af.compile(target_of(MACHINES[0][0] | {"features": 3}), machine)
    with pytest.raises(AnyformerError, match="holds 16 constants, got 15; compile it again"):
        machine(
            torch.zeros(1, 2, dtype=torch.long),
            replace(program, constants=program.constants[:-1], constant_at=program.constant_at[:-1]),
        )
    small = af.SequenceSimulator.for_class(target, length=2, bound=1e-3)
    with pytest.raises(AnyformerError, match="beyond this simulator's bound"):
        small(torch.zeros(1, 2, dtype=torch.long), af.compile(target, small))


def test_the_cost_of_simulation_is_polynomial_where_the_path_tree_is_exponential():
    sizes = []
    for layers in (4, 8, 16, 32):
        config = af.TransformerConfig(vocab=8, heads=4, layers=layers, head_dim=4, features=8)
        found = af.cost(config, length=16)["backbones"]
        sizes.append((found["sequence-simulator"]["state"], found["path-tree"]["state"]))
    growth = [(b[0] / a[0], b[1] / a[1]) for a, b in itertools.pairwise(sizes)]
    assert all(simulator < 4.5 for simulator, _ in growth) and growth[-1][1] > 1e9
