"""The common language: maps against their dense matrices, networks and their errors, and the reader against the module itself."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anyformer.classes import BranchClass, NetworkClass, StageClass
from anyformer.conformance import close
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.maps import ConstantMap, DenseMap, IdentityMap, LowRankMap
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Attention, Causal, Gate, Identity, LayerNorm, Normed, RMSNorm
from anyformer.spec import Spec
from anyformer.targets.reading import READERS, network_class, read
from anyformer.targets.transformer import ACTIVATIONS, Transformer, TransformerConfig


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- maps ---------------------------------------------------------------------------------------------------------------------


@st.composite
def maps(draw_from):
    count, D, out, rank = (draw_from(st.integers(1, 4)) for _ in range(4))
    match draw_from(st.sampled_from(["dense", "low rank", "identity", "shifted", "constant"])):
        case "dense":
            return DenseMap(draw(1, count, D, out)), D
        case "low rank":
            return LowRankMap(draw(2, count, D, rank), draw(3, count, rank, out)), D
        case "identity":
            return IdentityMap(D), D
        case "shifted":
            return IdentityMap(D, draw(4, D)), D
    return ConstantMap(D, draw(5, count, out)), D


@given(maps())
def test_to_dense_is_what_a_map_does(drawn):
    linear_map, D = drawn
    matrices = linear_map.to_dense().double()
    count, _, out = matrices.shape
    x, reads = draw(6, 2, 3, D), draw(7, out, 5)
    x[..., -1] = 1  # the constant feature
    assert linear_map.count == count
    entered = linear_map.enter(x)
    close(linear_map.leave(entered), torch.einsum("bnd,gde->bne", x, matrices))
    mixing = draw(8, count, 3, 3)  # an operator between the halves: another matrix over tokens for each of the bank
    mixed = torch.einsum("gnk,bkgr->bngr", mixing, entered)
    close(linear_map.leave(mixed), torch.einsum("gnk,bkd,gde->bne", mixing, x, matrices))
    close(linear_map.pull(reads), matrices @ reads)
    assert all(t.dtype == torch.float64 for t in linear_map.tensors())


@given(maps())
def test_pull_accumulates_in_the_precision_of_the_reads(drawn):
    linear_map, _ = drawn
    single = Network(draw(1, 2, 3), ()).to(torch.float32)
    assert single.embedding.dtype == torch.float32
    half = replace(linear_map, **{k: v.float() if isinstance(v, torch.Tensor) else v for k, v in vars(linear_map).items()})
    reads = draw(9, linear_map.to_dense().shape[2], 2)
    assert half.pull(reads).dtype == torch.float64
    close(half.pull(reads), half.to_dense().double() @ reads, 1e-6)


def test_kinds_of_maps():
    kinds = [m.kind for m in (DenseMap(draw(1, 1, 2, 2)), LowRankMap(draw(1, 1, 2, 1), draw(1, 1, 1, 2)))]
    assert kinds == ["general", "general"]
    assert (IdentityMap(2).kind, ConstantMap(2, draw(1, 1, 2)).kind) == ("identity", "constant")


# --- networks -----------------------------------------------------------------------------------------------------------------

D = 3
HEADS = Attention(2, 2)


def stage(*banks: Branch, shared: torch.Tensor | None = None) -> Stage:
    return Stage((Branch(Identity(), None, IdentityMap(D)), *banks), shared)


def bank(op=HEADS, rows: int = D, columns: int | None = None, out: int = D, count: int | None = None) -> Branch:
    columns = op.count * op.reads if columns is None else columns
    return Branch(op, draw(1, rows, columns), DenseMap(draw(2, op.count if count is None else count, rows, out)))


def network(*stages: Stage, **others) -> Network:
    return Network(**{"embedding": draw(3, 5, D), "stages": stages} | others)


NORMED = Normed(HEADS, RMSNorm(D))
PROBLEMS = {
    r"positions have 4 features, the embedding 3": lambda: network(positions=draw(4, 7, 4)),
    r"stage 1: shared probes must have shape \(3, 3\)": lambda: network(stage(bank(NORMED))),
    r"stage 1: shared probes must have shape \(3, 0\)": lambda: network(stage(bank(), shared=draw(4, D, 2))),
    r"stage 1, bank 2: probes have shape \(3, 7\), Attention needs \(3, 2 x 4\)": lambda: network(stage(bank(columns=7))),
    r"stage 1, bank 2: probes have shape \(3, 0\), Attention": lambda: network(stage(replace(bank(), probes=None))),
    r"stage 1, bank 2: bias probes may read the constant \(last\) feature only": lambda: network(
        stage(bank(Normed(HEADS, RMSNorm(D), bias=True)), shared=draw(4, D, D)), constant=True
    ),
    r"stage 1, bank 2: 3 maps for 2 branches": lambda: network(stage(bank(count=3))),
    r"stage 1, bank 1: the map is made for 4 features, the stream has 3": lambda: network(
        Stage((Branch(Identity(), None, IdentityMap(4)),))
    ),
    r"stage 1, bank 1: a constant map needs constant=True": lambda: network(
        Stage((Branch(Identity(), None, ConstantMap(D, draw(4, 1, D))),))
    ),
    r"stage 1: maps have shapes \[\(3, 3\), \(3, 4\)\]; all need \(3, D'\)": lambda: network(stage(bank(out=4))),
    r"stage 2: maps have shapes": lambda: network(stage(bank()), stage(bank(out=2))),
    r"the read-out has 4 rows, the last stream 3 features": lambda: network(readout=draw(4, 4, 2)),
    r"the constant \(last\) feature must be 1 in every row of the embedding": lambda: network(constant=True),
    r"the constant \(last\) feature must be 0 in every row of the positions": lambda: network(
        embedding=torch.ones(5, D).double(), constant=True, positions=torch.ones(4, D).double()
    ),
}


@pytest.mark.parametrize("message", PROBLEMS)
def test_networks_that_are_not_well_formed(message, as_shipped):
    with pytest.raises(OutsideClass, match=f"this network is not well formed: .*{message}"):
        PROBLEMS[message]()


def test_all_problems_at_once(as_shipped):
    with pytest.raises(OutsideClass) as caught:
        network(stage(bank(columns=7)), stage(bank(count=3)), positions=draw(4, 7, 4), readout=draw(4, 9, 2))
    assert len(caught.value.reasons) == 4
    for part in ("positions have", "stage 1, bank 2: probes", "stage 2, bank 2: 3 maps", "the read-out has 9 rows"):
        assert part in str(caught.value)


CLASS_PROBLEMS = {
    r"BranchClass: map must be one of 'identity', 'constant', 'diagonal', 'centred', 'general', got 'other'": lambda: BranchClass(
        HEADS, "other"
    ),
    r"BranchClass: operator must be an Operator, got Causal": lambda: BranchClass(Causal()),  # type: ignore[arg-type]
    r"StageClass: a stage needs at least one branch": lambda: StageClass(()),
    r"StageClass: branches of one stage must share the same norm columns": lambda: StageClass(
        (BranchClass(Normed(HEADS, RMSNorm(2))), BranchClass(Normed(HEADS, RMSNorm(3))))
    ),
    r"NetworkClass: outputs must be an integer >= 1, got 0": lambda: NetworkClass((), 0),
    r"NetworkClass: vocab must be an integer >= 1, got -1": lambda: NetworkClass((), 2, vocab=-1),
    r"NetworkClass: stages must be a tuple of StageClass": lambda: NetworkClass((HEADS,), 2),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", CLASS_PROBLEMS)
def test_classes_that_are_not_well_formed(message, as_shipped):
    with pytest.raises(AnyformerError, match=message):
        CLASS_PROBLEMS[message]()


TOKENS = torch.zeros(2, 3, dtype=torch.long)
INPUTS = {
    r"tokens must be an integer tensor of shape \(batch, n\), got torch.float32": dict(tokens=TOKENS.float()),
    r"got torch.bool of shape \(2, 3\)": dict(tokens=TOKENS.bool()),
    r"got torch.int64 of shape \(3,\)": dict(tokens=TOKENS[0]),
    r"got list": dict(tokens=[[0]]),
    r"tokens are empty, shape \(2, 0\)": dict(tokens=TOKENS[:, :0]),
    r"token ids must lie in 0\.\.4, got 5": dict(tokens=TOKENS + 5),
    r"token ids must lie in 0\.\.4, got -1": dict(tokens=TOKENS - 1),
    r"mask must have the shape of tokens": dict(tokens=TOKENS, mask=TOKENS[:1].bool()),
    r"position 4 has no row: the position table holds 0\.\.3": dict(tokens=TOKENS, positions=TOKENS + 4),
}


@pytest.mark.parametrize("message", INPUTS)
def test_inputs_that_cannot_be_used(message, as_shipped):
    net = network(stage(bank()), positions=draw(4, 4, D))
    with pytest.raises(AnyformerError, match=message):
        net.run(**INPUTS[message])


def test_run_is_the_formula():
    """X <- X + sum_h A_h X M_h, written with einsum; the read-out is the identity where there is none."""
    net = network(stage(bank()), positions=draw(5, 4, D))
    tokens = torch.tensor([[0, 4, 2], [1, 1, 3]])
    x = net.embedding[tokens] + net.positions[:3]
    probes, matrices = net.stages[0].branches[1].probes.unflatten(1, (2, 4)), net.stages[0].branches[1].map.to_dense()
    q, k = torch.einsum("bnd,dhc->bhnc", x, probes).split(2, -1)
    pattern = torch.softmax(q @ k.mT / 2**0.5, -1)
    patterns: list[torch.Tensor] = []
    close(net.run(tokens, patterns=patterns), x + torch.einsum("bhnk,bkd,hde->bne", pattern, x, matrices))
    close(patterns, [pattern])


def test_networks_without_stages():
    tokens = torch.tensor([[0, 4]])
    close(network().run(tokens), network().embedding[tokens])
    constant = network(embedding=torch.cat((draw(6, 5, 2), torch.ones(5, 1).double()), 1), constant=True)
    close(constant.run(tokens), constant.embedding[tokens][..., :-1])
    assert constant.network_class == NetworkClass((), outputs=2, features=2, vocab=5, constant=True)


def test_a_class_is_a_value():
    target = Transformer(config(norm="layer", bias=True, mlp=2, positions="rope"))
    mine = network_class(target)
    again = NetworkClass.from_json(json.loads(json.dumps(mine.to_json())))
    assert again == mine and hash(again) == hash(mine) and again.digest() == mine.digest()
    assert Spec.from_json(mine.to_json()) == mine
    assert (mine.layers, mine.heads) == (2, 2)


# --- the reader ---------------------------------------------------------------------------------------------------------------

SIZES = dict(vocab=5, heads=2, layers=2, head_dim=4, features=3)


def config(**options) -> TransformerConfig:
    return TransformerConfig(**SIZES | options)


@st.composite
def configs(draw_from):
    """All options of a configuration."""
    pick = lambda *choices: draw_from(st.sampled_from(choices))  # noqa: E731
    heads, mlp, positions = pick(1, 2, 4), pick(0, 1, 3), pick(None, "learned", "rope", "alibi")
    return TransformerConfig(
        vocab=pick(2, 5),
        heads=heads,
        layers=pick(1, 2, 3),
        head_dim=pick(2, 4),
        features=pick(1, 3, 6),
        causal=pick(True, False),
        attention=pick("softmax", "softmax", "hard"),
        kv_heads=pick(None, *(k for k in (1, 2) if heads % k == 0)),
        value_dim=pick(None, 1, 5),
        residual=pick(True, False),
        norm=pick(None, "rms", "layer"),
        norm_position=pick("pre", "post"),
        norm_eps=pick(1e-5, 0.1),
        mlp=mlp,
        gated=mlp > 0 and pick(True, False),
        activation=pick(*ACTIVATIONS),
        bias=pick(True, False),
        positions=positions,
        max_length=6 if positions == "learned" else None,
        rope_base=pick(10000.0, 10.0),
    )


def randomised(config: TransformerConfig, seed: int = 0) -> Transformer:
    """A target in float64 none of whose weights is still at its initial value (norms at 1, biases at 0)."""
    module = Transformer(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scale = 1.0 if parameter.ndim == 1 or "embedding" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def inputs(vocab: int, seed: int = 0):
    """Tokens: alone; with padding on both sides; with positions of their own."""
    tokens = torch.randint(vocab, (3, 5), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1, :2] = mask[2, 3:] = False
    yield dict(tokens=tokens)
    yield dict(tokens=tokens, mask=mask)
    yield dict(tokens=tokens, mask=mask, positions=torch.tensor([[0, 2, 3, 4, 5], [0, 0, 1, 1, 4], [3, 2, 1, 0, 0]]))


@given(configs(), st.integers(0, 1000))
def test_the_network_read_is_the_module(config, seed):
    module = randomised(config, seed)
    net = read(module)
    for given_inputs in inputs(config.vocab, seed):
        patterns: list[torch.Tensor] = []
        logits, expected = module.with_patterns(**given_inputs)
        real = given_inputs.get("mask", torch.ones(3, 5, dtype=torch.bool))  # padding may see nothing: no law there
        close(net.run(**given_inputs, patterns=patterns)[real], logits[real])
        close([p.transpose(1, 2)[real] for p in patterns], [p.transpose(1, 2)[real] for p in expected])


@given(configs())
def test_gradients_flow_to_the_module(config):
    module = randomised(config, 1)
    tokens = next(inputs(config.vocab))["tokens"]
    weights = torch.linspace(-1, 1, config.vocab, dtype=torch.float64)

    def gradients(logits: torch.Tensor):
        return torch.autograd.grad((logits * weights).sum(), list(module.parameters()), materialize_grads=True, allow_unused=True)

    close(gradients(read(module).run(tokens)), gradients(module(tokens)), 1e-8)


@given(configs())
def test_targets_of_one_configuration_have_one_class(config):
    first, second = read(randomised(config, 1)), read(randomised(config, 2))
    assert first.network_class == second.network_class == network_class(config)
    assert first.network_class.digest() == second.network_class.digest()
    assert first.source.config == config


@given(configs())
def test_reading_is_in_float64_whatever_the_module(config):
    """Of a float32 module too: its numbers are float64 numbers, and so are the products that the reader forms."""
    names = tuple("abcde"[: config.vocab])
    module = Transformer(config, token_names=names)
    net = read(module)
    assert net.token_names == names and net.source is module
    assert {t.dtype for t in net.tensors()} == {torch.float64}
    tokens = next(inputs(config.vocab))["tokens"]
    torch.testing.assert_close(net.run(tokens), module.double()(tokens), rtol=1e-10, atol=1e-10)


def test_the_class_of_a_huge_configuration_needs_no_memory():
    huge = TransformerConfig(
        vocab=10**6, heads=128, layers=3, head_dim=128, features=2**17, norm="rms", residual=True, mlp=10**6, gated=True
    )
    assert network_class(huge).features == 2**17
    assert network_class(network_class(huge)) == network_class(huge)


def test_reading_a_network_is_reading_nothing():
    net = network(stage(bank()))
    assert read(net) is net and network_class(net) == net.network_class


# --- refusals -----------------------------------------------------------------------------------------------------------------


class Doubled(Transformer):
    def forward(self, tokens, **others):
        return 2 * super().forward(tokens, **others)


class MyLinear(nn.Linear):
    pass


def full() -> Transformer:
    return Transformer(config(norm="rms", residual=True, mlp=3, bias=True))


def broken(change) -> Transformer:
    module = full()
    with torch.no_grad():
        change(module)
    return module


def replace_part(module: Transformer) -> None:
    module.blocks[1].attention.W_Q = MyLinear(3, 8)


def poison(module: Transformer) -> None:
    module.blocks[0].mlp.up.weight[0, 0] = torch.nan
    module.readout.bias[1] = torch.inf


def patch_forward(module: Transformer) -> None:
    module.blocks[0].mlp.forward = lambda x: 2 * x


REFUSALS = {
    r"the module itself: a Doubled stands in place of Transformer": lambda: Doubled(config()),
    r"blocks.1.attention.W_Q: a MyLinear stands in place of Linear": lambda: broken(replace_part),
    r"readout: forward hooks may change": lambda: broken(lambda m: m.readout.register_forward_hook(lambda *_: None) and None),
    r"blocks.0: forward hooks may change": lambda: broken(
        lambda m: m.blocks[0].register_forward_pre_hook(lambda *_: None) and None
    ),
    r"blocks.0.mlp: its activation is not the configured gelu": lambda: broken(
        lambda m: setattr(m.blocks[0].mlp, "activation", F.relu)
    ),
    r"blocks.0.mlp.up.weight holds NaN or infinite.*readout.bias holds NaN or infinite": lambda: broken(poison),
    r"parameters must all be float32 or all float64, got torch.float32, torch.float64": lambda: broken(
        lambda m: m.readout.double() and None
    ),
    r"parameters must all be float32 or all float64, got torch.bfloat16": lambda: broken(lambda m: m.bfloat16() and None),
    r"extra \(Linear\): not a part of the configured transformer": lambda: broken(
        lambda m: m.add_module("extra", nn.Linear(2, 2))
    ),
    r"blocks.0.attention_norm: missing": lambda: broken(lambda m: setattr(m.blocks[0], "attention_norm", None)),
    r"blocks.1.mlp: missing": lambda: broken(lambda m: setattr(m.blocks[1], "mlp", None)),
    r"blocks.2 \(Block\): not a part": lambda: broken(lambda m: m.blocks.append(m.blocks[0]) and None),
    r"blocks.0.mlp: its forward was replaced": lambda: broken(patch_forward),
    r"blocks.1.mlp_norm: its eps is 0.5, the configured one is 1e-05": lambda: broken(
        lambda m: setattr(m.blocks[1].mlp_norm, "eps", 0.5)
    ),
    r"blocks.0.attention: its config is not the transformer's": lambda: broken(
        lambda m: setattr(m.blocks[0].attention, "config", config(causal=False))
    ),
    r"blocks.0.mlp.down.bias: missing": lambda: broken(lambda m: setattr(m.blocks[0].mlp.down, "bias", None)),
    r"blocks.0.attention.W_K.weight has shape \(4, 3\), the configured one \(8, 3\)": lambda: broken(
        lambda m: setattr(m.blocks[0].attention.W_K, "weight", nn.Parameter(torch.zeros(4, 3)))
    ),
    r"embedding: its max_norm is 1.0, the configured one is None": lambda: broken(
        lambda m: setattr(m.embedding, "max_norm", 1.0)
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals_name_the_part(message):
    with pytest.raises(OutsideClass, match=f"this Transformer cannot be simulated exactly: (.*; )?{message}"):
        read(REFUSALS[message]())


def test_a_plain_module_is_not_refused():
    read(full())


def test_parametrised_weights_are_refused():
    module = full()
    torch.nn.utils.parametrizations.weight_norm(module.readout)
    with pytest.raises(OutsideClass, match="readout: a ParametrizedLinear stands in place of Linear"):
        read(module)


def test_all_reasons_at_once():
    def several(module: Transformer) -> None:
        replace_part(module)
        poison(module)
        module.blocks[1].mlp.activation = torch.sin

    with pytest.raises(OutsideClass) as caught:
        read(broken(several))
    assert len(caught.value.reasons) == 4


def test_modules_without_a_reader_list_every_part():
    with pytest.raises(OutsideClass) as caught:
        read(nn.TransformerEncoderLayer(4, 2))
    assert "cannot read a TransformerEncoderLayer (readers: Transformer" in str(caught.value)
    parts = {reason.split(" ")[0] for reason in caught.value.reasons}
    assert parts >= {"self_attn.out_proj", "linear1", "dropout", "linear2", "norm1", "norm2"}
    with pytest.raises(OutsideClass, match=r"the module itself \(Linear\): no reader"):
        read(nn.Linear(2, 2))


def test_a_reader_of_your_own_is_one_entry(monkeypatch):
    class Table(nn.Embedding):
        pass

    monkeypatch.setitem(READERS, Table, lambda module: Network(module.weight, (), source=module))
    module = Table(4, 2)
    tokens = torch.tensor([[0, 3]])
    assert torch.equal(read(module).run(tokens), module(tokens))


def test_shared_columns_read_the_features_behind_a_layer_norm():
    """The reader's LayerNorm: probes through the identity, centring in the weights."""
    net = read(randomised(config(norm="layer", residual=True)))
    assert net.network_class.stages[0].shared == 3
    assert net.network_class.stages[-1].branches[0].operator == LayerNorm(3, 1e-5)
    gate = read(randomised(config(norm="layer", bias=True, mlp=2))).network_class.stages[1].branches[1].operator
    assert gate == Normed(Gate(2, "gelu"), LayerNorm(3, 1e-5), bias=True, scale_values=False)


def test_parameters_and_methods_that_the_configuration_lacks_are_refused(as_shipped):
    def fresh(**options):
        return Transformer(vocab=5, heads=2, layers=1, head_dim=2, features=3, **options)

    extra = fresh()
    extra.readout = torch.nn.Linear(3, 5, bias=True)
    with pytest.raises(OutsideClass, match=r"readout.bias: a parameter that the configuration does not have"):
        read(extra)
    patched = fresh()
    patched.blocks[0].attention._pattern = lambda q, k, bias: q
    with pytest.raises(OutsideClass, match=r"blocks.0.attention: its _pattern was replaced"):
        read(patched)
    with pytest.raises(AnyformerError, match="a target must be a module or a Network, got int"):
        read(5)  # type: ignore[arg-type]


def test_networks_of_complex_or_mixed_dtypes_are_refused(as_shipped):
    with pytest.raises(OutsideClass, match=r"one real floating dtype, got torch.complex128"):
        Network(torch.randn(5, 3, dtype=torch.complex128), (), torch.randn(3, 5, dtype=torch.complex128))
    with pytest.raises(OutsideClass, match=r"got torch.float32, torch.float64"):
        Network(torch.randn(5, 3), (), torch.randn(3, 5).double())


def test_positions_of_small_integers_do_not_wrap(as_shipped):
    target = Transformer(vocab=5, heads=2, layers=1, head_dim=2, features=3, positions="alibi", causal=False).double()
    tokens, places = torch.randint(5, (2, 7)), torch.arange(7).expand(2, 7)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        for run in (target, read(target).run):
            assert torch.equal(run(tokens.to(dtype), positions=places.to(dtype)), run(tokens, positions=places))
    for run in (target, read(target).run):
        with pytest.raises(AnyformerError, match="positions must be integers"):
            run(tokens, positions=places.bool())
