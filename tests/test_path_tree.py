"""The theorem: a fixed 0/1 machine with a program is the target, on every layout, output and attention pattern.

The target's own forward, the network read from it, the folded run and the dense literal machines share no code.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyformer.backbones import Chain, Looped, Machine, PathTree, folding
from anyformer.backbones.layouts import enumerate_names
from anyformer.backbones.literal import LiteralTransformer
from anyformer.backbones.looped import LoopedRecipe, find_loop
from anyformer.backbones.tree import Tree
from anyformer.classes import BranchClass, NetworkClass, StageClass, inner_operator
from anyformer.compiling import compile
from anyformer.conformance import close
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.maps import ConstantMap, DenseMap, IdentityMap, LowRankMap
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Attention, AverageHard, Causal, CyclicShift, Gate, Identity
from anyformer.program import Program
from anyformer.targets.reading import network_class, read
from anyformer.targets.transformer import Transformer, TransformerConfig
from anyformer.unrolling import unroll

KINDS = {
    "attention only": {},
    "bidirectional": dict(causal=False, value_dim=3),
    "hard": dict(attention="hard", residual=True),
    "residual": dict(residual=True),
    "residual bias learned": dict(residual=True, bias=True, positions="learned", max_length=6),
    "grouped rope": dict(residual=True, positions="rope", kv_heads=1),
    "alibi bias": dict(positions="alibi", bias=True),
    "pre-norm rms": dict(residual=True, norm="rms"),
    "pre-norm layer bias": dict(residual=True, norm="layer", bias=True, positions="learned", max_length=6),
    "pre-norm layer alone": dict(norm="layer"),
    "post-norm rms": dict(residual=True, norm="rms", norm_position="post"),
    "post-norm layer bias": dict(residual=True, norm="layer", norm_position="post", bias=True, norm_eps=0.1),
    "mlp": dict(mlp=1, residual=True, activation="gelu"),
    "mlp bias alone": dict(mlp=2, bias=True, activation="relu"),
    "gated": dict(mlp=1, gated=True, residual=True, activation="silu"),
    "llama": dict(mlp=1, gated=True, residual=True, activation="silu", norm="rms", positions="rope", kv_heads=1),
    "gated bias": dict(mlp=1, gated=True, residual=True, norm="layer", bias=True, activation="gelu_tanh"),
    "gpt": dict(mlp=1, residual=True, norm="layer", bias=True, activation="gelu", positions="learned", max_length=6),
    "bert": dict(mlp=1, residual=True, norm="layer", norm_position="post", bias=True, causal=False, attention="hard"),
}
ATTENTION_ONLY = ("attention only", "bidirectional")
WIDEST = 1000
"""Dense m x m matrices of the literal machines are what costs time here."""


def randomised(config: TransformerConfig, seed: int = 0) -> Transformer:
    """A target in float64 none of whose weights is still at its initial value (norms at 1, biases at 0)."""
    module = Transformer(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scale = 1.0 if parameter.ndim == 1 or "embedding" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


@cache
def small(kind: str, widest: int = 300, **sizes: int) -> TransformerConfig:
    """A configuration of a kind whose tree is at most ``widest`` wide: as many of the wanted heads and layers as fit."""
    sizes = dict(vocab=3, heads=2, layers=2, head_dim=2, features=3) | sizes
    while True:
        config = TransformerConfig(**sizes | KINDS[kind])
        if Tree.of(network_class(config)).width <= widest:
            return config
        sizes["heads" if sizes["heads"] > 1 else "layers"] -= 1


def machines(target: Transformer | Network | NetworkClass | TransformerConfig) -> list[Machine]:
    """All machines of this module that hold a target."""
    described, found = network_class(target), []
    for kind in (PathTree, Looped, Chain):
        try:
            found.append(kind.for_class(described))
        except OutsideClass:
            continue
    return found


def literals(machine: Machine) -> dict[str, LiteralTransformer]:
    """All dense forms of a machine."""
    if type(machine) is not PathTree:
        return {machine.name: machine.literal()}
    gates = any(isinstance(inner_operator(b.operator), Gate) for s in machine.network_class.stages for b in s.branches)
    return {layout: machine.literal(layout) for layout in (("folded",) if gates else ("folded", "masked"))}


def batches(vocab: int, seed: int):
    """Tokens: alone; and with padding on both sides."""
    tokens = torch.randint(vocab, (3, 5), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1, :2] = mask[2, 3:] = False
    return (
        dict(tokens=tokens),
        dict(tokens=tokens, mask=mask),
        dict(tokens=tokens, positions=torch.tensor([[4, 0, 1, 2, 3]] * 3)),
    )


# --- the theorem --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=max(4, settings.default.max_examples // 6))
@given(
    heads=st.integers(1, 3),
    layers=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4]),
    features=st.integers(2, 4),
    vocab=st.integers(2, 4),
    seed=st.integers(0, 999),
)
def test_every_form_is_the_target(kind, heads, layers, head_dim, features, vocab, seed):
    config = small(kind, WIDEST, heads=heads, layers=layers, head_dim=head_dim, features=features, vocab=vocab)
    target = randomised(config, seed)
    network = read(target)
    for machine in machines(network):
        program = compile(network, machine)
        dense = literals(machine)
        for batch in batches(vocab, seed):
            real = batch.get("mask", torch.ones(3, 5, dtype=torch.bool))
            logits, patterns = target.with_patterns(**batch)
            seen: list[torch.Tensor] = []
            expected = network.run(**batch, patterns=seen)
            trace = machine.trace(**batch, program=program)
            close(trace.logits[real], logits[real])
            close([p.transpose(1, 2)[real] for p in trace.patterns], [p.transpose(1, 2)[real] for p in patterns])
            close(trace.logits, expected)
            close(trace.patterns, seen)
            close(machine(**batch, program=program), expected)
            for literal in dense.values():
                found: list[torch.Tensor] = []
                close(literal(**batch, program=program, patterns=found), expected)
                close(found, seen)


@pytest.mark.parametrize("kind", KINDS)
def test_two_layers_are_in_reach_of_the_test_above(kind):
    """Stacks of two layers fit the limit for every kind, so that composition is what is tested."""
    assert small(kind, WIDEST, heads=1, features=2, vocab=2).layers == 2


@pytest.mark.parametrize("kind", KINDS)
def test_float32_agrees_to_the_defaults(kind):
    torch.manual_seed(0)
    target = Transformer(small(kind))
    machine = PathTree.for_class(target)
    program = compile(target, machine)
    assert program.dtype == torch.float32
    tokens = batches(3, 0)[0]["tokens"]
    torch.testing.assert_close(machine(tokens, program), target(tokens))


# --- sizes --------------------------------------------------------------------------------------------------------------------


@cache
def plain_class(H: int, L: int, d: int, d_in: int, **options) -> NetworkClass:
    return network_class(TransformerConfig(vocab=d_in, heads=H, layers=L, head_dim=d, features=d_in, **options))


def width(machine: type[Machine], *sizes: int, **options) -> int:
    return machine.width_of(machine.recipe_for(plain_class(*sizes, **options)))


@pytest.mark.parametrize(
    ("H", "L", "d", "d_in", "plain", "residual"),
    [(4, 2, 24, 4, 1024, 1252), (2, 2, 28, 30, 456, 718), (2, 3, 28, 30, 1024, 2266), (2, 4, 30, 30, 2280, 7230)],
)
def test_sizes_of_the_paper(H, L, d, d_in, plain, residual):
    for machine in (PathTree, Looped):
        assert width(machine, H, L, d, d_in) == plain
        assert width(machine, H, L, d, d_in, residual=True) == residual


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 8), st.integers(1, 9))
def test_sizes_are_the_formulas(H, L, d, d_in):
    residual = 2 * H * d * ((H + 1) ** L - 1) // H + (H + 1) ** L * d_in
    assert width(PathTree, H, L, d, d_in, residual=True) == width(Looped, H, L, d, d_in, residual=True) == residual
    if H == 1:
        assert width(PathTree, H, L, d, d_in) == 2 * L * d + d_in
        assert width(Chain, H, L, d, d_in) == (L + 1) * max(2 * d, d_in)
    else:
        assert width(PathTree, H, L, d, d_in) == 2 * H * d * (H**L - 1) // (H - 1) + H**L * d_in


def test_size_of_the_llama_of_the_design():
    config = TransformerConfig(
        vocab=20, heads=2, layers=2, head_dim=8, features=16, kv_heads=1, residual=True, norm="rms", mlp=12, gated=True,
        positions="rope",
    )  # fmt: skip
    assert PathTree.width_of(PathTree.recipe_for(network_class(config))) == 60_036


def test_sizes_beyond_any_memory_are_still_numbers():
    assert width(PathTree, 16, 100, 64, 100) == 2 * 16 * 64 * (16**100 - 1) // 15 + 16**100 * 100
    config = TransformerConfig(vocab=100, heads=16, layers=100, head_dim=64, features=100)
    with pytest.raises(AnyformerError, match=r"a path-tree machine for this class has width 6\.\de\+122, past 64-bit integers"):
        PathTree.for_class(config)


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_those_of_the_literal_machine(kind):
    """Among them the number of non-zero weights, counted in the dense matrices."""
    config = small(kind, heads=1 if kind in ATTENTION_ONLY else 2)
    for machine in machines(config):
        cost = machine.cost(length=7)
        assert cost.width == machine.width and cost.length == 7 and cost.state == 7 * machine.width
        literal = literals(machine)["folded"] if type(machine) is PathTree else machine.literal()
        assert cost.nonzero_weights == sum(int(t.count_nonzero()) for t in literal.matrices().values()), machine.name
        assert literal.U.shape == (machine.width, config.vocab)
        assert (cost.depth, cost.heads) == (len(literal.order), config.heads)
        assert cost.bytes == 4 * machine.width


# --- zeros and ones -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_literal_matrices_are_zeros_and_ones(kind):
    """R_Q, R_K, R_V, U and a norm's reads hold at most one 1 a row; in an MLP each column of gate and up, each row of down."""
    config = small(kind, heads=1 if kind == "attention only" else 2)
    for machine in machines(config):
        for layout, literal in literals(machine).items():
            for matrix in literal.matrices().values():
                assert bool(((matrix == 0) | (matrix == 1)).all())
            assert int(literal.U.sum(1).max()) == 1
            for layer in literal.layers:
                assert layer.shared is None or int(layer.shared.sum(1).max()) == 1
                for bank in layer.banks:
                    if isinstance(inner_operator(bank.op), Gate):
                        assert bool((bank.own.sum(0) == 1).all())
                        assert bool((bank.up.sum(0) == 1).all()) and bool((bank.down.sum(1) == 1).all())
                        continue
                    assert int(bank.R_V.sum(2).max()) == 1 and (layout == "chain" or int(bank.R_V.sum(1).max()) == 1)
                    d = getattr(inner_operator(bank.op), "head_dim", None)
                    for reads in () if d is None else bank.own.split(d, -1):  # R_Q, R_K of each head
                        assert reads.shape == (machine.width, config.heads, 1, d) and int(reads.sum(-1).max()) == 1
                    if layout == "masked":  # the paper's R_V is a diagonal mask
                        assert all(torch.equal(R, torch.diag(R.diagonal())) for R in bank.R_V)


# --- one machine, many programs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_machines_do_not_depend_on_what_a_target_learned(kind):
    config = small(kind)
    first, second = randomised(config, 1), randomised(config, 2)
    for mine, other in zip(machines(first), machines(second), strict=True):
        assert mine == other and hash(mine) == hash(other) and mine.fingerprint == other.fingerprint
        assert mine.state_dict().keys() == other.state_dict().keys()
        assert all(torch.equal(a, b) for a, b in zip(mine.buffers(), other.buffers(), strict=True))
        assert not list(mine.parameters())
        for a, b in zip(literals(mine).values(), literals(other).values(), strict=True):
            assert a.matrices().keys() == b.matrices().keys()
            assert all(torch.equal(a.matrices()[k], b.matrices()[k]) for k in a.matrices())


@pytest.mark.parametrize("kind", KINDS)
def test_swapping_the_program_swaps_the_behaviour(kind):
    config = small(kind)
    targets = [randomised(config, seed) for seed in range(3)]
    for machine in machines(targets[0]):
        before = {k: v.clone() for k, v in machine.state_dict().items()}
        programs = [compile(target, machine) for target in targets]
        for batch in batches(config.vocab, 1)[:1]:
            for target, program in list(zip(targets, programs, strict=True)) * 2:
                close(machine(**batch, program=program), target(**batch))
        assert all(torch.equal(before[k], v) for k, v in machine.state_dict().items())
        assert machine == type(machine).for_class(config)
        assert len({p.fingerprint for p in programs}) == 1 and programs[0].fingerprint == machine.fingerprint
        assert programs[0].machine() == machine


def test_features_vocabulary_and_positions_are_the_programs():
    """The machine depends on stages and outputs alone: other features and position tables run on the same one."""
    target = randomised(small("residual"))
    machine = PathTree.for_class(target)
    for options in (dict(features=9), dict(positions="learned", max_length=8), dict(value_dim=5), dict(kv_heads=1)):
        other = randomised(TransformerConfig(**dict(vocab=3, heads=2, layers=2, head_dim=2, features=3, residual=True) | options))
        assert PathTree.for_class(other) == machine
        for batch in batches(3, 2):
            close(machine(**batch, program=compile(other, machine)), other(**batch))


def test_a_program_for_another_machine_is_refused():
    a, b = PathTree.for_class(small("residual")), PathTree.for_class(small("attention only"))
    program = compile(randomised(small("residual")), a)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    message = rf"made for another machine \(fingerprint {a.fingerprint[:8]}\.\.\., this one is {b.fingerprint[:8]}"
    for run in (b, b.trace):
        with pytest.raises(AnyformerError, match=message):
            run(tokens, program)
    with pytest.raises(AnyformerError, match="made for another machine"):
        Looped.for_class(small("residual"))(tokens, program)


MINE = dict(vocab=3, heads=2, layers=2, head_dim=2, features=3, residual=True, norm="rms", mlp=2, gated=True, activation="silu")
OTHERS = {
    r"stage 1: branches\[1\]\.operator\.inner\.mask is Bidirectional\(\), the machine has Causal\(\)": dict(causal=False),
    r"stage 3: branches\[1\]\.operator\.inner\.head_dim is 3, the machine has 2": dict(head_dim=3),
    r"stage 1: branches\[1\]\.operator\.inner\.heads is 1, the machine has 2": dict(heads=1),
    r"operator\.inner\.kernel is AverageHard\(\), the machine has Softmax\(\)": dict(attention="hard"),
    r"stage 1: branches\[1\]\.operator\.norm\.eps is 0\.1, the machine has 1e-05": dict(norm_eps=0.1),
    r"stage 2: branches\[1\]\.operator\.norm is LayerNorm\(dim=3, eps=1e-05\), the machine has RMSNorm": dict(norm="layer"),
    r"stage 2: branches\[1\]\.operator\.inner\.function is 'relu', the machine has 'silu'": dict(activation="relu"),
    r"stage 2: branches\[1\]\.operator\.inner\.units is 5, the machine has 2": dict(mlp=5),
    r"stage 1: branches is \[Normed\(inner=Attention, norm=RMSNorm.*the machine has \[Identity\(\), Normed": dict(residual=False),
    r"rotary is Rotary\(\), the machine has None": dict(positions="rope"),
    r"bias is ALiBi\(\), the machine has None": dict(positions="alibi"),
    r"4 outputs, the machine has 3": dict(vocab=4),
    r"7 stages, the machine has 5": dict(layers=3),
    r"stage 1: branches\[1\]\.operator\.norm\.dim is 4, the machine has 3": dict(features=4),
}


@pytest.mark.parametrize("message", OTHERS)
def test_a_target_outside_the_class_is_refused_by_its_smallest_part(message):
    machine = PathTree.for_class(TransformerConfig(**MINE))
    target = randomised(TransformerConfig(**MINE | OTHERS[message]))
    with pytest.raises(OutsideClass, match=f"the target is outside of the class of this path-tree machine: .*{message}"):
        compile(target, machine)


def test_all_differences_at_once():
    machine = PathTree.for_class(TransformerConfig(**MINE))
    with pytest.raises(OutsideClass) as caught:
        compile(randomised(TransformerConfig(**MINE | dict(causal=False, vocab=4, layers=1))), machine)
    text = str(caught.value)
    assert "3 stages" in text and "Bidirectional" in text and "4 outputs" in text and "\n" not in text


# --- routing alone is bit-exact -----------------------------------------------------------------------------------------------


def integers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


@given(st.integers(0, 10**6), st.sampled_from(["step", "identity", "relu", "square"]), st.integers(1, 3))
def test_routing_is_bit_exact(seed, function, layers):
    """Integer weights and operators that keep integers: every form gives the same bits."""
    D = 3
    table = integers(seed, 4, D)
    table[:, -1] = 1

    def keeping(matrices: torch.Tensor) -> torch.Tensor:
        matrices[..., -1] = 0  # nothing writes into the constant feature
        return matrices

    def banks(s: int) -> Stage:
        low_rank = LowRankMap(integers(s + 4, 2, D, 1), keeping(integers(s + 5, 2, 1, D)))
        return Stage(
            (
                Branch(Identity(), None, IdentityMap(D, keeping(integers(s, D)))),
                Branch(Identity(), None, DenseMap(keeping(integers(s + 1, 1, D, D)))),
                Branch(CyclicShift(1), None, DenseMap(keeping(integers(s + 2, 1, D, D)))),
                Branch(Gate(2, function), integers(s + 3, D, 2), low_rank),
                Branch(Gate(1, "step"), integers(s + 6, D, 1), ConstantMap(D, keeping(integers(s + 7, 1, D)))),
            )
        )  # fmt: skip

    depth = min(layers, 2 if function == "square" else 3)
    network = Network(table, tuple(banks(seed + 10 * s) for s in range(depth)), readout=integers(seed + 5, D, 2), constant=True)
    tokens = torch.randint(4, (2, 4), generator=torch.Generator().manual_seed(seed))
    expected = network.run(tokens)
    assert torch.equal(expected, expected.round()) and float(expected.abs().max()) < 2**53
    for machine in machines(network):
        program = compile(network, machine)
        assert torch.equal(machine(tokens, program), expected)
        if depth < 3:
            for literal in literals(machine).values():
                assert torch.equal(literal(tokens, program), expected)


# --- the meaning of coordinates -----------------------------------------------------------------------------------------------

ODD = NetworkClass(
    (
        StageClass(
            (
                BranchClass(Identity(), "identity"),
                BranchClass(Identity(), "constant"),
                BranchClass(Identity(), "general"),
                BranchClass(Attention(2, 2)),
                BranchClass(Attention(2, 2, kernel=AverageHard(), mask=Causal())),
                BranchClass(Attention(1, 1)),
                BranchClass(Gate(2, "relu")),
                BranchClass(Gate(2, "gelu")),
                BranchClass(Gate(2, "relu"), "constant"),
                BranchClass(Gate(1, "relu")),
                BranchClass(CyclicShift(1)),
                BranchClass(CyclicShift(2)),
            )
        ),
        StageClass((BranchClass(Gate(2, "relu")),)),
        StageClass((BranchClass(Gate(2, "relu")), BranchClass(Identity(), "identity"))),
    ),
    outputs=2,
)
"""Several banks of a sort in one stage, two MLPs after one attention: no reader makes these, but the language has them."""


@pytest.mark.parametrize("kind", [*KINDS, "odd"])
def test_coordinates_have_names(kind):
    described = ODD if kind == "odd" else small(kind, heads=1 if kind == "attention only" else 2)
    for machine in machines(described):
        coordinates = [machine.coordinate(i) for i in range(machine.width)]
        names = [str(c) for c in coordinates]
        assert len(set(names)) == machine.width, next(n for n in names if names.count(n) > 1)
        for outside in (-1, machine.width):
            with pytest.raises(AnyformerError, match=rf"coordinate must lie in 0\.\.{machine.width - 1}, got {outside}"):
                machine.coordinate(outside)


@pytest.mark.parametrize("kind", [*KINDS, "odd"])
def test_names_follow_the_independent_enumeration(kind):
    described = ODD if kind == "odd" else network_class(small(kind))
    tree = Tree.of(described)
    names = enumerate_names(described)
    assert len(names) == tree.width == tree.widths[0]
    for i, (what, path, *details) in enumerate(names):
        coordinate = tree.coordinate(i)
        assert coordinate.path == tuple(tree.branch_name(s, bank, g) for s, (bank, g) in enumerate(path))
        assert coordinate.stage == (None if what == "output" else tree.stage_name(len(path)))
        if what == "output":
            assert coordinate.what == f"output {details[0] + 1}"
        elif what == "shared":
            assert coordinate.what.startswith(f"feature {details[0] + 1} (norm)")
        else:
            bank, g, column = details
            read_name = described.stages[len(path)].branches[bank].operator.read_name(column)
            assert coordinate.what.startswith(f"{read_name} of {tree.branch_name(len(path), bank, g)}")


@pytest.mark.parametrize("kind", [*KINDS, "odd"])
def test_blocks_tile_the_width(kind):
    tree = Tree.of(ODD if kind == "odd" else network_class(small(kind)))
    blocks = list(tree.blocks())
    assert blocks[0].start == 0
    assert all(a.start + a.count == b.start for a, b in pairwise(blocks))
    assert blocks[-1].start + blocks[-1].count == tree.width
    assert len({(block.what, block.path) for block in blocks}) == len(blocks)
    for block in blocks:
        if block.count:
            first = tree.coordinate(block.start)
            assert first.path == block.path
            assert block.what == (first.stage or "output")


def test_names_read_as_the_readme_says():
    machine = PathTree.for_class(TransformerConfig(vocab=30, heads=2, layers=2, head_dim=28, features=30))
    assert repr(machine) == "PathTree(heads=2, layers=2, outputs=30; width 456: 3 levels, 4 leaves)"
    assert str(machine.coordinate(0)) == "query 1 of head 1, layer 1 attention, of the root path"
    assert str(machine.coordinate(455)) == "output 30 of path (head 2, head 2)"


def test_a_trace_holds_the_reads_by_name():
    target = randomised(small("residual"))
    network, machine = read(target), PathTree.for_class(target)
    tokens = batches(3, 0)[0]["tokens"]
    reads = machine.trace(tokens, compile(target, machine)).reads
    assert list(reads) == [f"layer {layer} attention: head {head}" for layer in (1, 2) for head in (1, 2)]
    for layer in (0, 1):
        stream = replace(network, stages=network.stages[:layer], readout=None).run(tokens)
        expected = (stream @ network.stages[layer].branches[1].probes).unflatten(-1, (2, -1))
        for head in (0, 1):
            close(reads[f"layer {layer + 1} attention: head {head + 1}"], expected[:, :, head])


def test_a_trace_loses_no_bank():
    """Every branch that reads has its entry, also in stages with several banks of a sort."""
    network = hand_written(ODD)
    machine = PathTree.for_class(network)
    trace = machine.trace(torch.zeros(1, 2, dtype=torch.long), compile(network, machine))
    branches = [b.operator for s in ODD.stages for b in s.branches]
    assert len(trace.reads) == sum(op.count for op in branches if op.reads)
    assert len(trace.patterns) == sum(isinstance(op, Attention | CyclicShift) for op in branches)


def hand_written(described: NetworkClass) -> Network:
    """Some network of a class, with three features, the last of them constant."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)

    def keeping(matrices: torch.Tensor) -> torch.Tensor:
        matrices[..., -1] = 0
        return matrices

    def branch(b: BranchClass) -> Branch:
        op = b.operator
        match b.map:
            case "identity":
                linear_map = IdentityMap(3)
            case "constant":
                linear_map = ConstantMap(3, keeping(draw(op.count, 3)))
            case _:
                linear_map = DenseMap(keeping(draw(op.count, 3, 3)))
        return Branch(op, draw(3, op.count * op.reads) if op.reads else None, linear_map)

    stages = tuple(Stage(tuple(map(branch, s.branches))) for s in described.stages)
    table = draw(4, 3)
    table[:, -1] = 1
    return Network(table, stages, readout=draw(3, described.outputs), constant=True)


def test_several_banks_of_a_sort_in_one_stage():
    network = hand_written(replace(ODD, stages=ODD.stages[:2]))
    assert network.network_class.for_tree().stages == ODD.stages[:2]
    machine = PathTree.for_class(network)
    tokens = torch.tensor([[0, 3, 1]])
    expected = network.run(tokens)
    program = compile(network, machine)
    close(machine(tokens, program), expected)
    close(machine.literal()(tokens, program), expected)


# --- what a program holds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_embedding_is_the_unrolled_network(kind):
    """E = E0 T_0, with constant columns stored once."""
    target = randomised(small(kind))
    network = read(target)
    for machine in machines(target):
        program = compile(target, machine)
        at = machine.at if isinstance(machine, Chain) else torch.arange(machine.width)
        close(program.embedding[:, at], network.embedding @ unroll(network))
        assert not program.embedding.index_fill(1, at, 0).any()
        if network.positions is None:
            assert program.position_embedding is None
        else:
            close(program.position_embedding[:, at], network.positions @ unroll(network))
        ctx_free = program.embedding[torch.tensor([[0, 2]])]
        assert ctx_free.shape == (1, 2, machine.width)


@pytest.mark.parametrize("kind", [k for k, options in KINDS.items() if not options.keys() & {"norm", "bias"}])
def test_path_products_are_accumulated_in_float64(kind):
    """A float32 program is the float64 one, rounded once (reading multiplies norm weights and biases in, in float32)."""
    target = randomised(small(kind)).float()
    for machine in machines(target):
        single = compile(target, machine)
        double = compile(randomised_as(target), machine).to(torch.float32)
        assert single.dtype == torch.float32
        assert torch.equal(single.embedding, double.embedding)
        assert single.positions is None or torch.equal(single.positions, double.positions)


def randomised_as(target: Transformer) -> Transformer:
    """The same weights, in float64."""
    again = Transformer(target.config).double()
    again.load_state_dict(target.state_dict())
    return again


@pytest.mark.parametrize("kind", ["mlp", "mlp bias alone", "gpt", "pre-norm layer bias", "gated bias", "alibi bias"])
def test_constant_columns_are_stored_once(kind):
    target = randomised(small(kind))
    machine = PathTree.for_class(target)
    program, constant = compile(target, machine), machine.tree.constant_columns()
    assert program.constants is not None and 0 < constant.sum() < machine.width
    assert program.constant_at.tolist() == constant.nonzero()[:, 0].tolist()
    assert program.token_at.tolist() == (~constant).nonzero()[:, 0].tolist()
    assert program.tokens.shape == (3, machine.width - len(program.constants))
    columns = read(target).embedding @ unroll(read(target))
    assert bool((columns[:, constant] == columns[:1, constant]).all())
    assert program.parameters == sum(t.numel() for t in (program.tokens, program.positions, program.constants) if t is not None)


@pytest.mark.parametrize("kind", ["attention only", "residual", "gated", "pre-norm rms"])
def test_without_a_constant_feature_nothing_is_constant(kind):
    program = compile(randomised(small(kind)), PathTree.for_class(small(kind)))
    assert program.constants is None and program.constant_at is None


def test_a_program_of_a_network_says_what_it_was_made_from():
    target = randomised(small("residual"))
    machine = PathTree.for_class(target)
    program = compile(target, machine)
    assert (program.provenance["made_by"], program.provenance["target"]) == ("compile", "Transformer")
    assert program.recipe == machine.recipe and program.vocab == 3 and program.width == machine.width
    double = compile(Transformer(small("residual")), machine, dtype=torch.float64)
    assert double.dtype == torch.float64 and double.to(torch.float32).dtype == torch.float32
    assert torch.equal(double.to(torch.float32).token_at, double.token_at)


# --- gradients ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in KINDS if "hard" not in k and k != "bert"])
def test_compiling_is_differentiable(kind):
    """Gradients through the machine and the compilation are the target's own."""
    target = randomised(small(kind))
    tokens = batches(3, 0)[0]["tokens"]
    weights = torch.linspace(-1, 1, 45, dtype=torch.float64).reshape(3, 5, 3)
    parameters = list(target.parameters())
    for machine in machines(target):
        logits = machine(tokens, compile(target, machine))
        options = dict(allow_unused=True, materialize_grads=True)
        through = torch.autograd.grad((logits * weights).sum(), parameters, **options)
        own = torch.autograd.grad((target(tokens) * weights).sum(), parameters, **options)
        close(through, own, 1e-9)
        assert any(bool(g.any()) for g in own)


def test_gradcheck():
    config = TransformerConfig(
        vocab=2, heads=1, layers=1, head_dim=2, features=2, norm="layer", residual=True, mlp=1, bias=True, positions="rope"
    )
    target = randomised(config)
    machine = PathTree.for_class(config)
    tokens = torch.tensor([[0, 1, 1]])
    parameters = tuple(target.parameters())  # gradcheck changes them in place
    assert torch.autograd.gradcheck(lambda *_: machine(tokens, compile(target, machine)), parameters, fast_mode=True)


def test_detached_programs_keep_no_graph():
    target = randomised(small("gpt"))
    program = compile(target, PathTree.for_class(target))
    assert program.tokens.requires_grad and not program.detach().tokens.requires_grad
    assert torch.equal(program.detach().embedding, program.embedding)


# --- batch and length ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_batch_is_run_in_blocks_of_rows(rows, monkeypatch):
    """A block that fits the cache: the same logits, whatever its size, with masks and positions cut alike."""
    target = randomised(small("gpt"))
    for machine in machines(target):
        program = compile(target, machine)
        monkeypatch.setattr(folding, "BLOCK_BYTES", rows * 4 * machine.tree.width * 5)
        for batch in batches(3, 5):
            close(machine(**batch, program=program), machine.trace(**batch, program=program).logits, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_and_length_do_not_matter(kind):
    target = randomised(small(kind))
    machine = PathTree.for_class(target)
    program = compile(target, machine)
    tokens = torch.randint(3, (4, 6), generator=torch.Generator().manual_seed(3))
    together = machine(tokens, program)
    for i in range(4):
        close(machine(tokens[i : i + 1], program), together[i : i + 1], 1e-12)
    for n in range(1, 6):
        close(machine(tokens[:, :n], program), target(tokens[:, :n]))
        if target.config.causal:
            close(machine(tokens[:, :n], program), together[:, :n])
    long = torch.randint(3, (1, 40), generator=torch.Generator().manual_seed(4))
    if target.config.max_length is None:
        close(machine(long, program), target(long))
    else:
        for run in (target, lambda tokens: machine(tokens, program)):
            with pytest.raises(AnyformerError, match="position 39"):
                run(long)


def test_padding_is_neutral():
    for kind in KINDS:
        target = randomised(small(kind))
        machine = PathTree.for_class(target)
        program = compile(target, machine)
        tokens = torch.randint(3, (2, 6), generator=torch.Generator().manual_seed(3))
        mask = torch.tensor([[False, True, True, True, False, False]] * 2)
        close(machine(tokens, program, mask=mask)[:, 1:4], machine(tokens[:, 1:4], program))


def test_inputs_that_cannot_be_used():
    target = randomised(small("gpt"))
    machine = PathTree.for_class(target)
    program = compile(target, machine)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    jaxtyping.config.update("jaxtyping_disable", True)  # what a user meets
    try:
        for run in (machine, machine.trace):
            with pytest.raises(AnyformerError, match=r"token ids must lie in 0\.\.2, got 3"):
                run(tokens + 3, program)
            with pytest.raises(AnyformerError, match=r"tokens are empty, shape \(2, 0\)"):
                run(tokens[:, :0], program)
            with pytest.raises(AnyformerError, match=r"tokens are empty, shape \(0, 3\)"):
                run(tokens[:0], program)
            with pytest.raises(
                AnyformerError, match=r"must be an integer tensor of shape \(batch, n\), got torch.int64 of shape"
            ):
                run(tokens[0], program)
            with pytest.raises(AnyformerError, match="must be an integer tensor"):
                run(tokens.float(), program)
            with pytest.raises(AnyformerError, match="mask must be Boolean"):
                run(tokens, program, mask=tokens)
            with pytest.raises(AnyformerError, match="positions must be integers >= 0"):
                run(tokens, program, positions=tokens - 1)
            with pytest.raises(AnyformerError, match=r"position 6 has no row: the position table holds 0\.\.5"):
                run(tokens, program, positions=tokens + 6)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


# --- refusals -----------------------------------------------------------------------------------------------------------------

RESIDUAL = TransformerConfig(vocab=3, heads=2, layers=2, head_dim=2, features=3, residual=True)
REFUSALS = {
    r"a chain holds attention-only classes with one head: a stage is not one bank of bare": lambda: Chain.for_class(RESIDUAL),
    r"a chain .*: there are 2 heads": lambda: Chain.for_class(replace(RESIDUAL, residual=False)),
    r"a chain .*: there is no layer": lambda: Chain.for_class(NetworkClass((), 2)),
    r"a chain .*: layers differ, and the weights are tied": lambda: Chain.for_class(
        NetworkClass(tuple(StageClass((BranchClass(Attention(1, d)),)) for d in (2, 3)), 2)
    ),
    r"a looped machine needs layers of one kind: the layers of this class differ": lambda: Looped.for_class(
        NetworkClass(tuple(StageClass((BranchClass(Attention(1, d)),)) for d in (2, 3)), 2)
    ),
    r"LoopedRecipe: the class does not repeat 1 stages 3 times": lambda: LoopedRecipe(network_class(RESIDUAL), 1, 3),
    r"the masked layout holds attention-only and residual classes: stage 2 has gates": lambda: PathTree.for_class(
        small("mlp")
    ).literal("masked"),
    r'layout must be "folded" or "masked", got "?\'looped\'': lambda: PathTree.for_class(RESIDUAL).literal("looped"),
    r"a path-tree machine takes no option depth, width": lambda: PathTree.for_class(RESIDUAL, depth=1, width=2),
    r"a looped machine takes no option width": lambda: Looped.for_class(RESIDUAL, width=2),
    r"the literal machine of width \d+ needs \d+\.\d [GT]iB": lambda: PathTree.for_class(
        replace(RESIDUAL, layers=14, heads=1)
    ).literal(),
    r"attention over 65536 tokens needs \d+\.\d [GT]iB": lambda: run_wide(),
    r"the target holds NaN or infinite numbers: tensor 0 of shape \(2, 1\)": lambda: compile(
        Network(torch.tensor([[1.0], [torch.nan]]), ()), PathTree.for_class(NetworkClass((), 1))
    ),
    r"the program overflows: path products exceed the range of torch.float32; give dtype=torch.float64": lambda: compile(
        huge(), PathTree.for_class(huge())
    ),
}


def huge() -> Transformer:
    target = Transformer(small("residual"))
    for parameter in target.parameters():
        torch.nn.init.constant_(parameter, 1e18)
    return target


def run_wide():
    machine = PathTree.for_class(replace(RESIDUAL, heads=1, layers=18))
    width = machine.width
    program = Program(machine.recipe, width, torch.zeros(2, 1), torch.zeros(1, dtype=torch.long))
    machine(torch.zeros(1, 65536, dtype=torch.long), program)


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message):
    with pytest.raises(AnyformerError, match=message):
        REFUSALS[message]()


def test_overflowing_products_fit_in_float64():
    program = compile(huge(), PathTree.for_class(huge()), dtype=torch.float64)
    assert bool(torch.isfinite(program.tokens).all())


def test_a_loop_is_the_shortest_that_covers_most():
    """All words of two letters up to length 9, against the definition."""
    letters = [StageClass((BranchClass(Attention(1, d)),)) for d in (1, 2)]
    for S in range(1, 10):
        for word in product((0, 1), repeat=S):
            loops = [(p, n) for p in range(1, S) for n in range(2, S // p + 1) if word[: p * n] == word[:p] * n]
            expected = min(loops, key=lambda loop: (-loop[0] * loop[1], loop[0]), default=(S, 1))
            assert find_loop(tuple(letters[x] for x in word)) == expected, word


def test_a_looped_machine_has_one_layer():
    for kind in ("residual", "llama", "post-norm rms"):
        machine = Looped.for_class(small(kind, heads=1, features=2, vocab=2))
        literal = machine.literal()
        period, layers = machine.recipe.period, machine.recipe.layers
        assert layers == 2 and literal.order[:period] == literal.order[period : 2 * period]
        assert len(literal.layers) == len(literal.order) - period


def test_blocks_of_a_chain_tile_its_slots():
    machine = Chain.for_class(TransformerConfig(vocab=4, heads=1, layers=2, head_dim=3, features=4))
    blocks = list(machine.blocks())
    assert [(b.what, b.start, b.count) for b in blocks] == [
        ("layer 1 attention", 0, 6), ("layer 2 attention", 6, 6), ("output", 12, 4), ("padding", 16, 2)
    ]  # fmt: skip
    assert all(a.start + a.count == b.start for a, b in pairwise(blocks)) and blocks[-1].start + blocks[-1].count == machine.width
    assert "padding" in str(machine.coordinate(17)) and str(machine.coordinate(12)).startswith("output 1 of")
