"""The stored program: exact for every class, its literal form, its size, smaller targets, the way back."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anyformer as af
from anyformer import operators as ops
from anyformer.backbones.stored.layout import Layout
from anyformer.conformance import close
from anyformer.network import Branch, Network, Stage

LLAMA = dict(residual=True, norm="rms", mlp=6, gated=True, activation="silu", positions="rope", kv_heads=2, heads=4)
GPT2 = dict(residual=True, norm="layer", mlp=5, bias=True, positions="learned", max_length=12, activation="gelu_tanh")


def make(seed: int = 0, **sizes) -> af.Transformer:
    torch.manual_seed(seed)
    target = af.Transformer(**(dict(vocab=9, heads=2, layers=2, head_dim=4, features=7) | sizes)).double()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return target


def tokens(batch: int = 3, n: int = 7, vocab: int = 9) -> torch.Tensor:
    return torch.randint(vocab, (batch, n), generator=torch.Generator().manual_seed(5))


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


CLASSES = st.fixed_dictionaries(
    {
        "residual": st.booleans(),
        "norm": st.sampled_from([None, "rms", "layer"]),
        "norm_position": st.sampled_from(["pre", "post"]),
        "mlp": st.sampled_from([0, 3]),
        "gated": st.booleans(),
        "bias": st.booleans(),
        "positions": st.sampled_from([None, "rope", "alibi"]),
        "kv_heads": st.sampled_from([None, 1, 2]),
        "causal": st.booleans(),
        "attention": st.sampled_from(["softmax", "hard"]),
    }
)


@given(sizes=CLASSES, seed=st.integers(0, 99))
def test_exact_for_every_class_and_equal_to_the_literal_machine(sizes: dict, seed: int) -> None:
    target = make(seed, **(sizes | {"gated": sizes["gated"] and sizes["mlp"] > 0}), heads=4, features=5, head_dim=2)
    machine = af.StoredProgram.for_class(target)
    program = af.compile(target, machine)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[0, :2], mask[1, 5:] = False, False
    with torch.no_grad():
        expected, run = target(tokens(), mask=mask), machine(tokens(), program, mask=mask)
        close(run[mask], expected[mask])
        close(machine.literal()(tokens(), program, mask=mask)[mask], run[mask])
    cost, literal = machine.cost(5), machine.literal()
    matrices = literal.matrices().values()
    assert all(bool(((m == 0) | (m == 1)).all()) for m in matrices)
    assert cost.nonzero_weights == sum(int(m.count_nonzero()) for m in matrices)
    assert cost.depth == len(literal.order) == 3 * len(machine.network_class.stages) + 1
    assert cost.state == 5 * machine.width and machine.width == next(iter(matrices)).shape[0]


@pytest.mark.parametrize("sizes", [LLAMA, GPT2, {"attention": "hard", "bias": True}], ids=["llama", "gpt2", "hard"])
def test_verified_with_patterns_and_read_back(sizes: dict) -> None:
    target = make(**sizes)
    program = af.compile(target, af.StoredProgram.for_class(target))
    assert af.verify(program, target).raise_if_not().patterns > 0
    network = program.machine().network(program)
    assert network.network_class == af.network_class(target)
    assert torch.equal(program.machine()(tokens(), program), af.compile(network, program.machine()).machine()(tokens(), program))
    close(network.run(tokens()), target(tokens()))
    special = af.specialize(program)
    assert isinstance(special, af.Transformer) and special.report.ordinary
    close(special(tokens()), target(tokens()), 1e-9)


def hand_written() -> Network:
    """A network with whatever the language allows: an average-hard head with a sink and dense maps, exp gates on the constant feature, a mixing
    with an identity map, two residuals, general norm columns, no read-out."""
    width, integers = 4, torch.Generator().manual_seed(3)
    table = torch.cat((torch.randint(-2, 3, (6, width - 1), generator=integers).double(), torch.ones(6, 1).double()), 1)
    keep = torch.zeros(width, width).double()
    keep[-1, -1] = 1
    hard = ops.Attention(2, 2, mask=ops.Causal(), kernel=ops.AverageHard(), sink=True)
    dense = draw(1, 2, width, width) * (1 - torch.eye(width)[-1])
    shift = torch.tensor([0.5, -1.0, 2.0, 0.0]).double()
    stages = (
        Stage(
            (
                Branch(ops.Identity(), None, af.IdentityMap(width, shift)),
                Branch(hard, torch.randint(-2, 3, (width, 8), generator=integers).double(), af.DenseMap(dense)),
            )
        ),
        Stage(
            (
                Branch(ops.Gate(3, "exp"), 0.3 * draw(2, width, 3), af.ConstantMap(width, draw(3, 3, width) * (1 - keep[-1]))),
                Branch(ops.Identity(), None, af.IdentityMap(width)),
                Branch(
                    ops.Convolution((0.5, 0.25)), None, af.LowRankMap(draw(4, 1, width, 2), draw(5, 1, 2, width) * (1 - keep[-1]))
                ),
            )
        ),
        Stage(
            (
                Branch(ops.Convolution((1.0, -0.5)), None, af.IdentityMap(width, shift)),
                Branch(ops.Identity(), None, af.IdentityMap(width, 2 * shift)),
                Branch(ops.Identity(), None, af.IdentityMap(width)),
                Branch(
                    ops.Normed(ops.Gate(2, "tanh"), ops.RMSNorm(3), bias=True),
                    torch.cat((draw(6, width, 2) * (1 - keep[-1])[:, None], keep[:, -1:].expand(-1, 2)), 1)[:, [0, 2, 1, 3]],
                    af.LowRankMap(draw(7, 2, width, 1), draw(8, 2, 1, width)),
                ),
            ),
            shared=draw(9, width, 3),
        ),
    )
    return Network(table, stages, constant=True)


def test_a_hand_written_network_with_an_average_hard_head_and_exp_gates() -> None:
    network = hand_written()
    machine = af.StoredProgram.for_class(network.network_class)
    program = af.compile(network, machine)
    ids = tokens(vocab=6)
    close(machine(ids, program), network.run(ids))
    close(machine.literal()(ids, program), network.run(ids))
    back = machine.network(program)
    assert back.network_class.stages == network.network_class.stages
    close(back.run(ids), network.run(ids), 0.0)
    trace = machine.trace(ids, program)
    patterns: list[torch.Tensor] = []
    network.run(ids, patterns=patterns)
    assert len(trace.patterns) == len(patterns) == 3 and len(trace.gaps) == 1
    for got, expected in zip(trace.patterns, patterns, strict=True):
        close(got, expected)


def test_a_machine_knows_its_class_and_runs_every_target_of_it() -> None:
    machines = [af.StoredProgram.for_class(make(seed, **LLAMA)) for seed in range(3)]
    assert machines[0] == machines[1] == machines[2] and machines[0].fingerprint == machines[2].fingerprint
    before = {k: v.clone() for k, v in machines[0].state_dict().items()}
    for seed in range(3):
        target = make(seed, **LLAMA)
        af.verify(af.compile(target, machines[0]), target).raise_if_not()
    assert all(torch.equal(v, before[k]) for k, v in machines[0].state_dict().items())


@pytest.mark.parametrize(
    "sizes",
    [
        LLAMA | dict(features=32, head_dim=8, mlp=48, layers=4, vocab=50),
        LLAMA | dict(features=64, head_dim=16, mlp=128, layers=2, vocab=100, kv_heads=None),
        dict(residual=True, norm="layer", mlp=128, bias=True, positions="learned", max_length=64, heads=4, features=32, head_dim=8, vocab=50),
        dict(heads=4, head_dim=8, features=32, vocab=40, layers=3),
    ],
)  # fmt: skip
def test_the_width_is_at_most_the_number_of_parameters_and_scratch_at_most_5_percent(sizes: dict) -> None:
    config = af.TransformerConfig(**(dict(layers=2) | sizes))
    parameters = sum(p.numel() for p in af.Transformer(config).parameters())
    machine = af.StoredProgram.for_class(config)
    assert machine.width <= parameters and machine.scratch <= 0.05 * machine.width


def test_depth_is_linear_and_width_is_where_the_path_tree_has_3e11() -> None:
    config = af.TransformerConfig(**(LLAMA | dict(features=32, head_dim=8, mlp=48, layers=4, vocab=50)))
    costs = af.cost(config)["backbones"]
    assert costs["path-tree"]["width"] > 1e11 and costs["stored-program"]["width"] < 34_208
    one, two = (af.cost(dataclasses.replace(config, layers=n))["backbones"]["stored-program"] for n in (4, 8))
    assert two["depth"] - one["depth"] == 4 * 6 and two["width"] < 2 * one["width"]


def test_every_coordinate_has_a_meaning() -> None:
    machine = af.StoredProgram.for_class(make(**GPT2))
    blocks = list(machine.blocks())
    assert blocks[0].start == 0 and blocks[-1].start + blocks[-1].count == machine.width
    assert all(a.start + a.count == b.start for a, b in itertools.pairwise(blocks))
    assert "stage 1 read constants[1, 1]" in str(machine.coordinate(0))
    assert str(machine.coordinate(machine.width - 1)).startswith("outputs[9]")
    names = {str(machine.coordinate(i)) for i in range(machine.width)}
    assert len(names) == machine.width
    with pytest.raises(af.AnyformerError, match=f"coordinate must lie in 0..{machine.width - 1}"):
        machine.coordinate(machine.width)


def test_constants_are_stored_once_in_memory_and_on_disk(tmp_path) -> None:
    target = make(**LLAMA, features=32)
    program = af.compile(target, af.StoredProgram.for_class(target))
    assert program.constants is not None and program.constants.ndim == 1 and program.constant_at is None
    assert program.parameters == program.machine().layout.constants + 9 * 32
    program.save(tmp_path / "p")
    assert (tmp_path / "p" / "model.safetensors").stat().st_size < 8 * program.parameters + 60_000
    again = af.load(tmp_path / "p")
    assert torch.equal(af.run(again, tokens()), af.run(program, tokens()))
    dense = program.embedding
    assert dense.shape == (9, program.width) and torch.equal(dense[0, : len(program.constants)], program.constants)


def test_compile_is_differentiable() -> None:
    target = make(**LLAMA)
    program = af.compile(target, af.StoredProgram.for_class(target))
    program.machine()(tokens(), program).square().sum().backward()
    got = {n: p.grad.clone() for n, p in target.named_parameters()}
    target.zero_grad()
    target(tokens()).square().sum().backward()
    for name, parameter in target.named_parameters():
        close(got[name], parameter.grad, 1e-8)


# --- smaller targets ------------------------------------------------------------------------------------------------------------

SMALLER = {
    "fewer layers": dict(layers=1),
    "fewer heads": dict(heads=2, kv_heads=None),
    "one group": dict(heads=2, kv_heads=1),
    "duplicated keys": dict(kv_heads=1),
    "fewer units": dict(mlp=2),
    "smaller vocabulary": dict(vocab=4),
    "all of it": dict(layers=2, heads=2, kv_heads=2, mlp=1, vocab=3),
}


@pytest.mark.parametrize("name", SMALLER)
def test_smaller_targets_run_on_a_larger_machine(name: str, tmp_path) -> None:
    machine = af.StoredProgram.for_class(make(**(LLAMA | dict(layers=3))))
    target = make(7, **(LLAMA | dict(layers=3) | SMALLER[name]))
    program = af.compile(target, machine)
    assert (program.placement is None) == (name == "duplicated keys")
    program.save(tmp_path / "p")
    program = af.load(tmp_path / "p")
    vocab = target.config.vocab
    verdict = af.verify(program, target).raise_if_not()
    assert verdict.patterns and machine(tokens(vocab=vocab), program).shape[-1] == vocab
    back = machine.network(program)
    assert len(back.stages) == len(af.read(target).stages) and back.network_class.outputs == vocab
    close(back.run(tokens(vocab=vocab)), target(tokens(vocab=vocab)))
    close(machine.literal()(tokens(vocab=vocab), program)[..., :vocab], target(tokens(vocab=vocab)))
    assert sorted(machine.trace(tokens(vocab=vocab), program).reads)


def test_a_whole_target_needs_no_placement() -> None:
    target = make(**LLAMA)
    assert af.compile(target, af.StoredProgram.for_class(target)).placement is None


REFUSED = {
    r"6 features, the machine has 7": dict(features=6),
    r"stage 1, 3: operator.inner.head_dim is 2, the machine has 4": dict(head_dim=2),
    r"eps is 0.001, the machine has 1e-05": dict(norm_eps=1e-3),
    r"frequencies\[1\] is 0.1, the machine has 0.01": dict(rope_base=100.0),
    r"mask is Bidirectional\(\), the machine has Causal\(\)": dict(causal=False),
    r"5 heads, the machine has 4": dict(heads=5, kv_heads=None),
    r"7 units, the machine has 6": dict(mlp=7),
    r"4 key/value heads for 4 heads do not fit into 2 for 4": dict(kv_heads=None),
    r"10 outputs, the machine has 9": dict(vocab=10),
    r"7 stages, the machine has 5": dict(layers=3),
    r"the target has one, the machine has no feature that is always 1": dict(bias=True),
    r"function is 'relu', the machine has 'silu'": dict(activation="relu"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_neutral_is_refused_with_the_value_that_differs(message: str) -> None:
    machine = af.StoredProgram.for_class(make(**LLAMA))
    with pytest.raises(af.OutsideClass, match=message):
        af.compile(make(**(LLAMA | REFUSED[message])), machine)


def test_layers_without_residual_cannot_be_left_out_and_operators_must_be_finite_at_zero() -> None:
    machine = af.StoredProgram.for_class(make(layers=3))
    with pytest.raises(af.OutsideClass, match="stage 1 cannot be left out: it has no residual branch"):
        af.compile(make(layers=2), machine)

    def gates(units: int) -> Network:
        stage = Stage(
            (
                Branch(ops.Identity(), None, af.IdentityMap(2)),
                Branch(
                    ops.Gate(units, "reciprocal"), draw(1, 2, units), af.LowRankMap(draw(2, units, 2, 1), draw(3, units, 1, 2))
                ),
            )
        )
        return Network(draw(4, 3, 2), (stage,))

    with pytest.raises(af.OutsideClass, match=r"1 of 2 units: Gate is not finite where it reads zeros"):
        af.compile(gates(1), af.StoredProgram.for_class(gates(2)))


def test_position_biases_of_their_own_go_with_the_first_heads() -> None:
    def biased(slopes: tuple[float, ...]) -> Network:
        heads = len(slopes)
        op = ops.Attention(heads, 2, bias=ops.ALiBi(slopes))
        maps = af.LowRankMap(draw(2, heads, 3, 2), draw(3, heads, 2, 3))
        return Network(
            draw(4, 5, 3), (Stage((Branch(ops.Identity(), None, af.IdentityMap(3)), Branch(op, draw(1, 3, 4 * heads), maps))),)
        )

    machine = af.StoredProgram.for_class(biased((0.5, 0.25, 0.125)))
    small = biased((0.5, 0.25))
    close(machine(tokens(vocab=5), af.compile(small, machine)), small.run(tokens(vocab=5)))
    with pytest.raises(af.OutsideClass, match=r"slopes\[0\] is 0.25, the machine has 0.5"):
        af.compile(biased((0.25,)), machine)


# --- bad input ------------------------------------------------------------------------------------------------------------------


def test_bad_programs_and_classes() -> None:
    target = make(**LLAMA)
    machine = af.StoredProgram.for_class(target)
    program = af.compile(target, machine).detach()
    with pytest.raises(af.OutsideClass, match="does not say how wide its stream is"):
        af.StoredProgram.for_class(af.network_class(target).for_tree())
    assert program.constants is not None
    for broken in (
        dataclasses.replace(program, constants=program.constants[:-1]),
        dataclasses.replace(program, token_at=program.token_at.flip(0)),
    ):
        with pytest.raises(af.AnyformerError, match=r"does not have its .* constants first"):
            machine(tokens(), broken)
    for placement in (
        af.Placement((0, 9), ((1, 4), (1, 6)), 9),
        af.Placement((0, 1), ((1, 4), (1, 60)), 9),
        af.Placement((0,), ((1,),), 9),
        af.Placement((), (), 10),
    ):
        with pytest.raises(af.AnyformerError, match="placement points outside of its machine"):
            machine(tokens(), dataclasses.replace(program, placement=placement))
    with pytest.raises(af.AnyformerError, match="stages must increase"):
        af.Placement((1, 0), ((), ()), 9)
    with pytest.raises(af.AnyformerError, match=r"the literal machine of width .* needs"):
        af.StoredProgram.for_class(
            af.TransformerConfig(**(LLAMA | dict(vocab=5000, features=512, head_dim=64, layers=2)))
        ).literal()


def test_a_layout_is_a_function_of_the_class_alone() -> None:
    layout = Layout(af.StoredProgram.recipe_for(af.network_class(make(**GPT2))).network_class)
    assert layout.width == layout.constants + layout.width_in + layout.scratch
    assert layout.blocks[-1].what == "outputs" and layout.where(layout.constants) == (layout.block("stream"), 0)


# --- what cannot be left out ------------------------------------------------------------------------------------------------------


def stages_of(count: int, *branches: Branch, shared: torch.Tensor | None = None) -> Network:
    """``count`` equal stages with a residual and the given branches, on 3 features."""
    stage = Stage((Branch(ops.Identity(), None, af.IdentityMap(3)), *branches), shared)
    return Network(draw(4, 5, 3), (stage,) * count)


def test_identity_maps_beside_the_residual_cannot_be_left_out() -> None:
    for branch in (
        Branch(ops.Convolution((1.0, -0.5)), None, af.IdentityMap(3)),
        Branch(ops.Identity(), None, af.IdentityMap(3)),
    ):
        machine = af.StoredProgram.for_class(stages_of(2, branch))
        with pytest.raises(af.OutsideClass, match=rf"its {type(branch.operator).__name__} adds the stream itself"):
            af.compile(stages_of(1, branch), machine)
    heads = Branch(ops.Attention(2, 2), draw(1, 3, 8), af.LowRankMap(draw(2, 2, 3, 2), draw(3, 2, 2, 3)))
    small, machine = stages_of(1, heads), af.StoredProgram.for_class(stages_of(2, heads))
    close(machine(tokens(vocab=5), af.compile(small, machine)), small.run(tokens(vocab=5)))


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_norms_whose_columns_are_constants_must_be_finite_where_they_are_zero(eps: float) -> None:
    gate = Branch(
        ops.Normed(ops.Gate(2, "tanh"), ops.RMSNorm(2, eps)), draw(1, 3, 2), af.LowRankMap(draw(2, 2, 3, 1), draw(3, 2, 1, 3))
    )
    small, machine = (
        stages_of(1, gate, shared=draw(5, 3, 2)),
        af.StoredProgram.for_class(stages_of(2, gate, shared=draw(5, 3, 2))),
    )
    if eps == 0:
        with pytest.raises(af.OutsideClass, match="Normed is not finite where it reads zeros"):
            af.compile(small, machine)
        return
    close(machine(tokens(vocab=5), af.compile(small, machine)), small.run(tokens(vocab=5)))


def test_fixed_matrices_have_a_length_and_placements_are_checked(as_shipped) -> None:
    matrix = Branch(ops.FixedMatrix(((1.0, 0.0), (0.5, 0.5))), None, af.DenseMap(draw(1, 1, 3, 3)))
    with pytest.raises(af.OutsideClass, match="FixedMatrix holds no more than 2 tokens"):
        af.compile(stages_of(1, matrix), af.StoredProgram.for_class(stages_of(2, matrix)))
    target = make(**LLAMA)
    machine = af.StoredProgram.for_class(target)
    program = af.compile(target, machine)
    for branches in (((1, 4), (1, 6), (1, (0, 0, 1, 2)), (1, 6), (1,)), ((1, 4), (1, 6), (1, ()), (1, 6), (1,))):
        with pytest.raises(af.AnyformerError, match="placement points outside"):
            machine(tokens(), dataclasses.replace(program, placement=af.Placement((0, 1, 2, 3, 4), branches, 9)))
    with pytest.raises(af.AnyformerError, match="placement points outside"):  # the final norm cannot be left out
        machine(tokens(), dataclasses.replace(program, placement=af.Placement((0, 1, 2, 3), ((1, 4), (1, 6)) * 2, 9)))
    tree = af.compile(target, af.PathTree.for_class(target))
    with pytest.raises(af.AnyformerError, match="a path-tree machine does not know"):
        tree.machine()(tokens(), dataclasses.replace(tree, placement=af.Placement((), (), 9)))
    with pytest.raises(af.AnyformerError, match="coordinate must lie in"):
        machine.coordinate(1.5)  # type: ignore[arg-type]


def test_networks_whose_maps_do_not_fit_their_stream() -> None:
    with pytest.raises(af.OutsideClass, match="a shift needs the constant feature"):
        Network(draw(1, 4, 3), (Stage((Branch(ops.Identity(), None, af.IdentityMap(3, draw(2, 3))),)),))
    norm = Branch(ops.RMSNorm(4), torch.eye(4).double(), af.DiagonalMap(draw(1, 2), 4, 4))
    with pytest.raises(af.OutsideClass, match="2 weights for 4 features"):
        Network(draw(1, 5, 4), (Stage((norm,)),))


def test_norms_after_the_constant_feature_was_dropped() -> None:
    table = torch.cat((draw(1, 5, 2), torch.ones(5, 1).double()), 1)
    first = Branch(ops.RMSNorm(2), torch.eye(3, 2).double(), af.DiagonalMap(draw(2, 2), 3, 2), reads="features")
    second = Branch(ops.LayerNorm(2), torch.eye(2).double(), af.DiagonalMap(draw(3, 2), 2, 2, centred=True))
    network = Network(table, (Stage((first,)), Stage((second,))), draw(4, 2, 3), constant=True)
    machine = af.StoredProgram.for_class(network)
    program = af.compile(network, machine)
    for run in (machine, machine.literal(), lambda ids, p: machine.network(p).run(ids)):
        close(run(tokens(vocab=5), program), network.run(tokens(vocab=5)))


def test_two_norms_in_one_stage_have_weights_of_their_own() -> None:
    eye = torch.eye(3).double()
    norms = (
        Branch(ops.RMSNorm(3), eye, af.DiagonalMap(draw(1, 3), 3, 3), reads="features"),
        Branch(ops.LayerNorm(3), eye, af.DiagonalMap(draw(2, 3), 3, 3, centred=True), reads="features"),
        Branch(ops.LayerNorm(3, 1e-2), eye, af.DiagonalMap(draw(3, 3), 3, 3, centred=True)),
    )
    network = stages_of(2, *norms)
    machine = af.StoredProgram.for_class(network)
    program = af.compile(network, machine)
    for run in (machine, machine.literal(), lambda ids, p: machine.network(p).run(ids)):
        close(run(tokens(vocab=5), program), network.run(tokens(vocab=5)))


def test_twins_share_what_the_bank_before_them_stores() -> None:
    target = make(residual=True, norm="rms", mlp=4, gated=True, bias=True)
    network = af.read(target)
    assert [b.twin for b in network.stages[1].branches] == [False, False, True]
    machine = af.StoredProgram.for_class(target)
    smaller = make(5, residual=True, norm="rms", mlp=2, gated=True, bias=True, layers=1)
    for module in (target, smaller):
        program = af.compile(module, machine)
        af.verify(program, module).raise_if_not()
        close(machine.literal()(tokens(), program), module(tokens()))
        assert machine.network(program).stages[1].network_class() == af.read(module).stages[1].network_class()
    stage = network.stages[1]
    wrong = dataclasses.replace(stage.branches[2], probes=stage.branches[2].probes + 1.0)
    with pytest.raises(
        af.OutsideClass, match="declared to be a twin, but its probes and rows are not those of the bank before it"
    ):
        dataclasses.replace(
            network, stages=(network.stages[0], dataclasses.replace(stage, branches=(*stage.branches[:2], wrong)))
        )
