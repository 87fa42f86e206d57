"""Every operator keeps the laws of the conformance case, and agrees with an independent formula: torch's, or a loop."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anyformer.conformance import OperatorConformance, close
from anyformer.errors import AnyformerError
from anyformer.operators import (
    FUNCTIONS,
    RBF,
    ALiBi,
    Attention,
    AverageHard,
    Bidirectional,
    Causal,
    Context,
    Convolution,
    CyclicShift,
    FeatureMap,
    FixedMatrix,
    Fourier,
    Gate,
    Identity,
    LayerNorm,
    Mixing,
    Normed,
    Offsets,
    Operator,
    Performer,
    RelativeBias,
    RMSNorm,
    Rotary,
    Scaling,
    Softmax,
    Strided,
    Window,
    register_function,
)
from anyformer.operators.functions import NON_NEGATIVE, POSITIVE
from anyformer.operators.kernels import Kernel
from anyformer.philox import gaussian
from anyformer.spec import Spec, _encode

TABLE = ((0.5, -1.0, 0.0, 2.0, 0.25), (1.0, 0.0, -0.5, 0.75, -2.0))


class IntegerProbes(OperatorConformance):
    """Ties are real and gaps are wide: what average-hard attention is exact for."""

    def probes(self, generator, shape):
        return torch.randint(-2, 3, shape, generator=generator).double()


class PositiveProbes(OperatorConformance):
    """For gates that are defined on positive numbers only; one to two keeps every stage of the network positive."""

    def probes(self, generator, shape):
        return 1 + torch.rand(shape, generator=generator, dtype=torch.float64)


# --- conformance: three lines each --------------------------------------------------------------------------------------------


class TestIdentity(OperatorConformance):
    operator = Identity()


class TestSoftmax(OperatorConformance):
    operator = Attention(2, 4)


class TestSoftmaxOneHead(OperatorConformance):
    operator = Attention(1, 3)


class TestSoftmaxCausal(OperatorConformance):
    operator = Attention(2, 4, mask=Causal())


class TestSoftmaxWindow(OperatorConformance):
    operator = Attention(2, 4, mask=Window(1, 2))


class TestSoftmaxOffsets(OperatorConformance):
    operator = Attention(2, 4, mask=Offsets(((None, -2), (0, 1))), sink=True)


class TestSoftmaxStrided(OperatorConformance):
    operator = Attention(2, 4, mask=Strided(3, local=2))


class TestSoftmaxScale(OperatorConformance):
    operator = Attention(2, 4, scale=0.3)


class TestSoftmaxALiBi(OperatorConformance):
    operator = Attention(2, 4, mask=Causal(), bias=ALiBi((0.5, 0.0625)))


class TestSoftmaxALiBiShared(OperatorConformance):
    operator = Attention(2, 4, bias=ALiBi((0.5,)))


class TestSoftmaxRelativeBias(OperatorConformance):
    operator = Attention(2, 4, bias=RelativeBias(TABLE))


class TestSoftmaxRelativeBiasShared(OperatorConformance):
    operator = Attention(2, 4, mask=Causal(), bias=RelativeBias(TABLE[:1]))


class TestSoftmaxRotary(OperatorConformance):
    operator = Attention(2, 4, mask=Causal(), rotary=Rotary.of_base(4))


class TestSoftmaxPartialRotary(OperatorConformance):
    operator = Attention(2, 5, rotary=Rotary((1.0, 0.1)))


class TestSoftmaxQKNorm(OperatorConformance):
    operator = Attention(2, 3, qk_norm=1e-6)


class TestSoftmaxEverything(OperatorConformance):
    operator = Attention(2, 4, Window(3), Softmax(), 0.7, ALiBi((0.1, 1.0)), Rotary.of_base(4, 100.0), 1e-5, sink=True)


class TestSoftmaxSink(OperatorConformance):
    operator = Attention(2, 4, mask=Causal(), sink=True)


class TestAverageHard(IntegerProbes):
    operator = Attention(2, 2, kernel=AverageHard())


class TestAverageHardCausal(IntegerProbes):
    operator = Attention(2, 2, mask=Causal(), kernel=AverageHard())


class TestAverageHardSink(IntegerProbes):
    operator = Attention(2, 2, mask=Causal(), kernel=AverageHard(), sink=True)


class TestAverageHardBias(IntegerProbes):
    operator = Attention(2, 2, kernel=AverageHard(), scale=1.0, bias=RelativeBias(TABLE))


class TestRBF(OperatorConformance):
    operator = Attention(2, 3, kernel=RBF(0.7))


class TestRBFUnnormalised(OperatorConformance):
    operator = Attention(2, 3, mask=Causal(), kernel=RBF(0.5, normalised=False))


class TestRBFBiasSink(OperatorConformance):
    operator = Attention(2, 3, kernel=RBF(0.5), bias=ALiBi((0.5, 1.0)), sink=True)


class TestFeatureMap(OperatorConformance):
    operator = Attention(2, 3, mask=Causal(), kernel=FeatureMap("elu_plus_one"))


class TestFeatureMapExp(OperatorConformance):
    operator = Attention(2, 3, kernel=FeatureMap("exp"), scale=0.5)


class TestFeatureMapReLU(OperatorConformance):
    operator = Attention(2, 3, kernel=FeatureMap("relu"))


class TestPerformer(OperatorConformance):
    operator = Attention(2, 3, mask=Causal(), kernel=Performer(8, seed=3))


class TestRMSNorm(OperatorConformance):
    operator = RMSNorm(4, eps=1e-6)


class TestLayerNorm(OperatorConformance):
    operator = LayerNorm(4)


class TestNormedAttention(OperatorConformance):
    operator = Normed(Attention(2, 2, mask=Causal()), RMSNorm(4))


class TestNormedAttentionBias(OperatorConformance):
    operator = Normed(Attention(2, 2, rotary=Rotary.of_base(2)), LayerNorm(4), bias=True)


class TestNormedSinkBias(OperatorConformance):
    operator = Normed(Attention(2, 2, sink=True), RMSNorm(4), bias=True, scale_values=False)


class TestNormedAverageHard(IntegerProbes):
    operator = Normed(Attention(2, 2, kernel=AverageHard()), RMSNorm(4))


class TestNormedGate(OperatorConformance):
    operator = Normed(Gate(3, "silu"), RMSNorm(4))


class TestNormedGateBias(OperatorConformance):
    operator = Normed(Gate(3, "gelu"), LayerNorm(4), bias=True)


class TestNormedPlainUnits(OperatorConformance):
    operator = Normed(Gate(3, "gelu"), LayerNorm(4), bias=True, scale_values=False)


class TestNormedIdentity(OperatorConformance):
    operator = Normed(Identity(), RMSNorm(4))


class TestNormedMixing(OperatorConformance):
    operator = Normed(Fourier(), LayerNorm(4))


class TestConvolution(OperatorConformance):
    operator = Convolution((0.5, -1.0, 2.0))


class TestCyclicShift(OperatorConformance):
    operator = CyclicShift(2)


class TestCyclicShiftBack(OperatorConformance):
    operator = CyclicShift(-1)


class TestFourier(OperatorConformance):
    operator = Fourier()


class TestFixedMatrix(OperatorConformance):
    operator = FixedMatrix(tuple(tuple(math.sin(3 * i + j) for j in range(6)) for i in range(6)))


for _name in FUNCTIONS:  # every function that is registered, also those to come
    _base = PositiveProbes if _name in ("log", "sqrt", "rsqrt") else OperatorConformance
    _case = f"TestGate_{_name}"
    globals()[_case] = type(_case, (_base,), {"operator": Gate(3, _name), "__module__": __name__})


# --- oracles ------------------------------------------------------------------------------------------------------------------


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def context(batch: int, n: int, mask: torch.Tensor | None = None) -> Context:
    return Context.of(torch.zeros(batch, n, dtype=torch.long), mask)


def heads(op: Attention, seed: int, batch: int = 2, n: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Own reads, and queries and keys (batch, heads, n, d) among them."""
    own = draw(seed, batch, n, op.heads, op.reads)
    q, k = own.transpose(1, 2)[..., : 2 * op.head_dim].split(op.head_dim, -1)
    return own, q, k


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 7), st.sampled_from([None, 0.3, 2.0]), st.booleans())
def test_softmax_is_scaled_dot_product_attention(H, d, n, scale, causal):
    op = Attention(H, d, Causal() if causal else Bidirectional(), scale=scale)
    own, q, k = heads(op, 1, n=n)
    v = draw(2, 2, n, H, 3)
    expected = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=causal, scale=scale)
    close(op(None, own, context(2, n)).apply(v), expected.transpose(1, 2))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_sink_is_add_zero_attn(H, d, n, causal):
    op = Attention(H, d, Causal() if causal else Bidirectional(), sink=True)
    own, q, k = heads(op, 3, n=n)
    module = nn.MultiheadAttention(H * d, H, bias=False, add_zero_attn=True, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(H * d).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(H * d))
    v = draw(4, 2, n, H, d)
    flat = (t.transpose(1, 2).flatten(2) for t in (q, k, v.transpose(1, 2)))
    later = torch.ones(n, n, dtype=torch.bool).triu(1) if causal else None
    out, weights = module(*flat, attn_mask=later, average_attn_weights=False)
    token_map = op(None, own, context(2, n))
    close(token_map.pattern, weights[..., :n])
    close(token_map.apply(v).flatten(2), out)


def brute_force_hard(q, k, visible, sink) -> list[list[Fraction]]:
    """Average-hard attention in rational arithmetic, a loop over the definition."""
    rows = []
    for i, query in enumerate(q):
        scores = {j: sum(Fraction(a) * Fraction(b) for a, b in zip(query, key, strict=True)) for j, key in enumerate(k)}
        scores = {j: s for j, s in scores.items() if visible(i, j)}
        if sink:
            scores[-1] = Fraction(0)
        best = [j for j, s in scores.items() if s == max(scores.values())]
        rows.append([Fraction(int(j in best), max(len(best), 1)) for j in range(len(k))])
    return rows


@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans(), st.booleans(), st.sampled_from([torch.float64, torch.float32]))
def test_average_hard_is_the_brute_force_loop(seed, n, sink, causal, dtype):
    op = Attention(2, 2, Causal() if causal else Bidirectional(), AverageHard(), scale=1.0, sink=sink)
    own = torch.randint(-2, 3, (1, n, 2, 4), generator=torch.Generator().manual_seed(seed))
    pattern = op(None, own.to(dtype), context(1, n)).pattern
    for h in range(2):
        q, k = own[0, :, h, :2].tolist(), own[0, :, h, 2:].tolist()
        rows = brute_force_hard(q, k, lambda i, j: j <= i or not causal, sink)
        assert torch.equal(pattern[0, h], torch.tensor([[float(x) for x in row] for row in rows], dtype=dtype))


def test_average_hard_tie_width():
    """Scores within 1e-9 (1e-4 in float32) of the maximum, relative to 1 + |maximum|, are tied; wider gaps are not."""
    op = Attention(1, 1, kernel=AverageHard(), scale=1.0)
    for dtype, tie in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        for top in (0.0, 5.0, -5.0):
            for gap, tied in ((0.5, True), (2.0, False)):
                keys = torch.tensor([top, top - gap * tie * (1 + abs(top))], dtype=dtype)
                own = torch.stack((torch.ones(2, dtype=dtype), keys), -1)[None, :, None]
                expected = [0.5, 0.5] if tied else [1.0, 0.0]
                assert op(None, own, context(1, 2)).pattern[0, 0, 0].tolist() == expected


def test_rbf_is_the_gaussian_of_distances():
    for normalised in (True, False):
        op = Attention(2, 3, kernel=RBF(0.7, normalised), scale=0.5)
        own, q, k = heads(op, 5)
        weights = torch.exp(-0.7 * torch.cdist(0.5 * q, k) ** 2)
        close(op(None, own, context(2, 6)).pattern, weights / weights.sum(-1, keepdim=True) if normalised else weights)


def test_feature_map_is_linear_attention():
    """Causal linear attention as its recurrence: a running sum of phi(k) v^T (Katharopoulos et al. 2020)."""
    op = Attention(2, 3, mask=Causal(), kernel=FeatureMap(), scale=0.5)
    own, q, k = heads(op, 6)
    v = draw(7, 2, 6, 2, 4)
    a, b = F.elu(0.5 * q) + 1, F.elu(k) + 1
    memory = torch.einsum("bhnf,bnhc->bhnfc", b, v).cumsum(2)
    expected = torch.einsum("bhnf,bhnfc->bhnc", a, memory) / (a * b.cumsum(2)).sum(-1, keepdim=True)
    close(op(None, own, context(2, 6)).apply(v), expected.transpose(1, 2))


def test_performer_features_estimate_the_softmax_kernel():
    """phi(q) . phi(k) / R is exp(q . k) on average over w: exactly the stated features, and near the kernel for many."""
    own, q, k = heads(Attention(1, 3), 8)
    own, q, k = 0.4 * own, 0.4 * q, 0.4 * k
    op = Attention(1, 3, kernel=Performer(20000, seed=1), scale=1.0)
    pattern = op(None, own, context(2, 6)).pattern
    w = torch.from_numpy(gaussian(1, 0, (3, 20000), 1.0))
    a, b = (torch.exp(x @ w - x.square().sum(-1, keepdim=True) / 2) for x in (q, k))
    weights = a @ b.mT
    close(pattern, weights / weights.sum(-1, keepdim=True))
    torch.testing.assert_close(pattern, torch.softmax(q @ k.mT, -1), rtol=0.15, atol=0)


def loop_mask(mask, i: int, j: int) -> bool:
    match mask:
        case Bidirectional():
            return True
        case Causal():
            return j <= i
        case Window():
            return i - mask.before <= j <= i + mask.after
        case Strided():
            return j <= i and ((i - j) in range(0, 100, mask.stride) or (i - j) in range(mask.local))
        case Offsets():
            return any((low is None or low <= j - i) and (high is None or j - i <= high) for low, high in mask.intervals)
    raise AssertionError


MASKS = (Bidirectional(), Causal(), Window(0), Window(2), Window(1, 3), Strided(1), Strided(3), Strided(4, 2))
MASKS += (Offsets(()), Offsets(((None, 0),)), Offsets(((-1, -1), (2, None))), Offsets(((None, None),)))


@given(st.sampled_from(MASKS), st.lists(st.integers(0, 12), min_size=1, max_size=8))
def test_masks_are_their_definitions(mask, positions):
    p = torch.tensor(positions)
    expected = [[loop_mask(mask, i, j) for j in positions] for i in positions]
    assert mask.allows(p[:, None], p[None]).tolist() == expected


def test_position_biases_are_their_definitions():
    positions = [3, 0, 4, 9]
    query = torch.tensor(positions)[None, None, :, None]
    alibi = ALiBi((0.5, 2.0))(torch.zeros(0).double(), query, query.mT)
    relative = RelativeBias(TABLE)(torch.zeros(0).double(), query, query.mT)
    for h in range(2):
        for a, i in enumerate(positions):
            for b, j in enumerate(positions):
                assert alibi[0, h, a, b] == -(0.5, 2.0)[h] * abs(i - j)
                assert relative[0, h, a, b] == TABLE[h][min(max(i - j, -2), 2) + 2]


@pytest.mark.parametrize("op", [Attention(2, 4, bias=ALiBi((0.5, 0.25))), Attention(2, 4, bias=RelativeBias(TABLE))])
def test_a_bias_is_added_to_the_scores(op):
    own, q, k = heads(op, 9)
    places = torch.arange(6)
    bias = op.bias(q, places[None, None, :, None], places[None, None, None])
    v = draw(10, 2, 6, 2, 3)
    expected = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), attn_mask=bias)
    close(op(None, own, context(2, 6)).apply(v).transpose(1, 2), expected)


def test_rotary_is_a_complex_rotation():
    rotary = Rotary((1.0, 0.3))
    x = draw(11, 2, 3, 4, 5)
    positions = torch.tensor([[0, 1, 2, 3], [5, 7, 7, 0]])
    turned = rotary(x, positions)
    angle = positions[:, None, :, None] * torch.tensor([1.0, 0.3], dtype=torch.float64)
    pairs = torch.complex(x[..., :2], x[..., 2:4]) * torch.exp(1j * angle)
    close(turned, torch.cat((pairs.real, pairs.imag, x[..., 4:]), -1))
    assert Rotary.of_base(6).frequencies == (1.0, 10000 ** (-2 / 6), 10000 ** (-4 / 6))


def test_rotary_scores_depend_on_relative_positions_only():
    op = Attention(2, 4, rotary=Rotary.of_base(4))
    own = draw(12, 2, 6, 2, 8)
    places = torch.arange(6).expand(2, 6)
    close(op(None, own, Context(places)).pattern, op(None, own, Context(places + 41)).pattern)


def test_qk_norm_is_rms_norm_with_a_weight():
    op = Attention(2, 4, qk_norm=1e-3)
    own = draw(13, 2, 6, 2, 16)
    weights = torch.tensor([0.5, 2.0, -1.0, 1.5]).double(), torch.tensor([1.0, 0.0, 3.0, -0.5]).double()
    own[..., 8:] = torch.cat(weights)
    q, k = (F.rms_norm(own[..., 4 * i : 4 * i + 4], (4,), weights[i], 1e-3).transpose(1, 2) for i in range(2))
    close(op(None, own, context(2, 6)).pattern, torch.softmax(q @ k.mT / 2, -1))
    assert op.constant_reads == tuple(range(8, 16))


@pytest.mark.parametrize("bias", [False, True])
def test_a_norm_does_not_scale_what_reads_the_constant_feature_alone(bias):
    op, r = Normed(Attention(2, 4, qk_norm=1e-3), RMSNorm(5), bias), RMSNorm(5).scale(x := draw(14, 2, 6, 5))
    own = draw(15, 2, 6, 2, op.reads)
    inner = own[..., :16].clone()
    inner[..., :8] = inner[..., :8] * r[..., None] + (own[..., 16:] if bias else 0)
    assert op.constant_reads == tuple(range(8, 24 if bias else 16))
    close(op(x, own, context(2, 6)).pattern, Attention(2, 4, qk_norm=1e-3)(None, inner, context(2, 6)).pattern)


TORCH_FUNCTIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "elu_plus_one": lambda z: F.elu(z) + 1,
    "rsqrt": torch.rsqrt,
    "reciprocal_or_zero": lambda z: torch.where(z.abs() >= 1, 1 / z, torch.zeros_like(z)),
    "step": lambda z: (z > 0).to(z.dtype),
    "identity": lambda z: z,
} | {name: getattr(torch, name) for name in ("tanh", "sigmoid", "exp", "log", "sqrt", "reciprocal", "square")}


def test_every_function_has_an_oracle():
    assert set(FUNCTIONS) <= {*TORCH_FUNCTIONS, "halved, for the tests"}


def test_signs_of_functions_are_known():
    z = torch.linspace(-8, 8, 400, dtype=torch.float64)
    for name, function in TORCH_FUNCTIONS.items():
        values = function(z[z > 0] if name in ("log", "sqrt", "rsqrt") else z)
        assert bool((values < 0).any()) == (name not in NON_NEGATIVE), name
        assert name not in POSITIVE or bool((values > 0).all())


@pytest.mark.parametrize("name", TORCH_FUNCTIONS)
def test_gates_are_torch_functions(name):
    z = torch.linspace(-20, 20, 81, dtype=torch.float64)[None, :, None, None]
    z = z[z > 0][None, :, None, None] if name in ("log", "sqrt", "rsqrt") else z[z != 0][None, :, None, None]
    gate = Gate(1, name)(None, z, context(1, z.shape[1]))
    close(gate.weights[0, :, 0], TORCH_FUNCTIONS[name](z[0, :, 0, 0]), 1e-13)


def test_gates_at_zero_and_far_out():
    z = torch.tensor([0.0, -1e4, 1e4], dtype=torch.float64, requires_grad=True)
    for name in ("relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "step", "identity", "square"):
        value = FUNCTIONS[name](z)
        close(value, TORCH_FUNCTIONS[name](z), 1e-13)
        if value.requires_grad:
            assert bool(torch.isfinite(torch.autograd.grad(value.sum(), z, allow_unused=True)[0]).all()), name


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_norms_are_torch_norms(eps):
    x = draw(14, 2, 6, 4)
    ctx = context(2, 6)
    close(RMSNorm(4, eps)(None, x[:, :, None], ctx).apply(x[:, :, None])[:, :, 0], nn.RMSNorm(4, eps=eps, dtype=torch.float64)(x))
    centred = (x - x.mean(-1, keepdim=True))[:, :, None]
    expected = nn.LayerNorm(4, eps=eps, dtype=torch.float64)(x)
    close(LayerNorm(4, eps)(None, x[:, :, None], ctx).apply(centred)[:, :, 0], expected)


def test_pre_norm_attention_with_a_bias_is_the_module():
    """Normed(attention) with bias columns against F.layer_norm, linear layers, and softmax, written out."""
    D, d = 5, 3
    x, W_Q, W_K, gamma, beta, b_Q, b_K = (
        draw(20 + i, *shape) for i, shape in enumerate([(2, 6, D), (D, d), (D, d), (D,), (D,), (d,), (d,)])
    )
    y = F.layer_norm(x, (D,), gamma, beta, 1e-3)
    expected = torch.softmax((y @ W_Q + b_Q) @ (y @ W_K + b_K).mT / 3**0.5, -1)
    centre = torch.eye(D).double() - 1 / D
    scaled = torch.cat([x @ centre @ (gamma[:, None] * W) for W in (W_Q, W_K)], -1)
    bias = torch.cat([beta @ W + b for W, b in ((W_Q, b_Q), (W_K, b_K))]).expand(2, 6, -1)
    op = Normed(Attention(1, d), LayerNorm(D, 1e-3), bias=True)
    token_map = op(x, torch.cat((scaled, bias), -1)[:, :, None], context(2, 6))
    close(token_map.pattern[:, 0], expected)
    v = draw(30, 2, 6, 1, 2)
    r = 1 / torch.sqrt(x.var(-1, unbiased=False) + 1e-3)
    close(token_map.apply(v)[:, :, 0], expected @ (r[..., None] * v[:, :, 0]))


def test_fourier_is_the_real_fft():
    x = draw(15, 3, 7, 1, 4)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, :3] = mask[2, 5:] = False
    mixed = Fourier()(None, x.new_zeros(3, 7, 1, 0), context(3, 7, mask)).apply(x)
    for i, real in enumerate((slice(0, 7), slice(3, 7), slice(0, 5))):
        close(mixed[i, real], torch.fft.fft(x[i, real], dim=0).real)


def test_convolution_is_conv1d():
    taps, x = (0.5, -1.0, 2.0), draw(16, 2, 6, 1, 4)
    kernel = torch.tensor(taps).double().flip(0).expand(4, 1, 3)
    expected = F.conv1d(F.pad(x[:, :, 0].mT, (2, 0)), kernel, groups=4).mT
    close(Convolution(taps)(None, x.new_zeros(2, 6, 1, 0), context(2, 6)).apply(x)[:, :, 0], expected)


@pytest.mark.parametrize("offset", [0, 1, -2, 8])
def test_cyclic_shift_is_roll(offset):
    x = draw(17, 2, 6, 1, 4)
    assert torch.equal(CyclicShift(offset)(None, x.new_zeros(2, 6, 1, 0), context(2, 6)).apply(x), x.roll(offset, 1))


def test_fixed_matrix_is_a_product():
    W, x = draw(18, 6, 6), draw(19, 2, 6, 1, 4)
    mixed = FixedMatrix(tuple(map(tuple, W.tolist())))(None, x.new_zeros(2, 6, 1, 0), context(2, 6)).apply(x)
    close(mixed[:, :, 0], W @ x[:, :, 0])


def test_softmax_of_large_scores_is_stable():
    op = Attention(1, 1, scale=1.0, mask=Causal())
    for size in (1e4, -1e4):
        own = torch.tensor([[1.0, size], [1.0, size + 1]]).double()[None, :, None]
        expected = torch.tensor([[1, 0], [1 / (1 + math.e), math.e / (1 + math.e)]], dtype=torch.float64)
        close(op(None, own, context(1, 2)).pattern[0, 0], expected)
    own = torch.tensor([[1.0, -1e4]]).double()[None, :, None]
    assert Attention(1, 1, scale=1.0, sink=True)(None, own, context(1, 1)).pattern.item() == 0


# --- contexts -----------------------------------------------------------------------------------------------------------------


def test_default_positions_count_real_tokens():
    tokens = torch.zeros(2, 4, dtype=torch.long)
    mask = torch.tensor([[False, False, True, True], [True, False, True, False]])
    assert Context.of(tokens).positions.tolist() == [[0, 1, 2, 3]] * 2
    assert Context.of(tokens, mask).positions.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]
    assert Context.of(tokens, mask, tokens + 3).positions.tolist() == [[3] * 4] * 2


def test_contract_adds_onto_whatever_stands_there():
    values, onto = draw(31, 2, 3, 2, 4), draw(32, 2, 3, 4)
    for token_map in (Scaling(), Scaling(draw(33, 2, 3, 2)), Mixing(draw(34, 2, 2, 3, 3)), Mixing(draw(35, 1, 2, 3, 3))):
        close(token_map.contract(values, onto), onto + token_map.apply(values).sum(2), 1e-13)
        close(token_map.contract(values), token_map.apply(values).sum(2), 1e-13)


# --- errors -------------------------------------------------------------------------------------------------------------------

TOKENS = torch.zeros(2, 3, dtype=torch.long)
ERRORS = {
    r"Attention: heads must be an integer >= 1, got 0": lambda: Attention(0, 3),
    r"Attention: head_dim must be an integer >= 1, got True": lambda: Attention(1, True),
    r"FeatureMap kernel has no scores that a bias could be added to": lambda: Attention(
        2, 3, kernel=FeatureMap(), bias=ALiBi((1.0,))
    ),
    r"a sink needs a kernel with scores and normalised rows, not Performer": lambda: Attention(
        2, 3, kernel=Performer(), sink=True
    ),
    r"2 rotary pairs do not fit head_dim 3": lambda: Attention(2, 3, rotary=Rotary((1.0, 2.0))),
    r"Attention: 3 heads need a bias for 3 heads, got one for 2": lambda: Attention(3, 3, bias=ALiBi((1.0, 2.0))),
    r"3 heads need a bias for 3 heads, got one for 2$": lambda: Attention(3, 3, bias=RelativeBias(TABLE)),
    r"every head needs a row of the same odd length": lambda: RelativeBias(((1.0, 2.0),)),
    r"RBF: gamma must be positive, got 0": lambda: RBF(0),
    r"Performer: projections must be an integer >= 1": lambda: Performer(0),
    r"no scalar function 'swish'; known: elu_plus_one, .*, tanh": lambda: Gate(2, "swish"),
    r"no scalar function 'swoosh'": lambda: FeatureMap("swoosh"),
    r"FeatureMap: 'tanh' may take negative values": lambda: FeatureMap("tanh"),
    r"Attention: mask must be a Mask, got 'causal'": lambda: Attention(2, 3, "causal"),  # type: ignore[arg-type]
    r"Attention: kernel must be a Kernel, got 3": lambda: Attention(2, 3, kernel=3),  # type: ignore[arg-type]
    r"Gate: units must be an integer >= 1, got 1.5": lambda: Gate(1.5, "relu"),  # type: ignore[arg-type]
    r"Window: before must be an integer >= 0, got -1": lambda: Window(-1),
    r"Strided: stride must be an integer >= 1, got 0": lambda: Strided(0),
    r"RMSNorm: dim must be an integer >= 1, got 0": lambda: RMSNorm(0),
    r"LayerNorm: eps must be a number >= 0, got -1": lambda: LayerNorm(3, -1),
    r"one norm a stage": lambda: Normed(Normed(Gate(1, "relu"), RMSNorm(2)), RMSNorm(2)),
    r"Convolution: at least one tap": lambda: Convolution(()),
    r"FixedMatrix: a non-empty square matrix": lambda: FixedMatrix(((1.0, 2.0),)),
    r"position 2 is past its size 2": lambda: FixedMatrix(((1.0, 2.0),) * 2)(None, torch.zeros(2, 3, 1, 0), Context.of(TOKENS)),
    r"mask must have the shape of tokens \(2, 3\), got \(3, 2\)": lambda: Context.of(TOKENS, TOKENS.T.bool()),
    r"mask must be Boolean": lambda: Context.of(TOKENS, TOKENS),
    r"positions must have the shape of tokens": lambda: Context.of(TOKENS, None, TOKENS[:1]),
    r"positions must be integers >= 0": lambda: Context.of(TOKENS, None, TOKENS - 1),
    r"unknown specification type 'os.system'; import the module": lambda: Spec.from_json({"type": "os.system"}),
    r"Window has no field width; it has after, before": lambda: Spec.from_json({"type": "Window", "before": 1, "width": 2}),
    r"Window cannot be built from these fields: .*before": lambda: Spec.from_json({"type": "Window"}),
    r"expected a Kernel, got Causal": lambda: Kernel.from_json({"type": "Causal"}),
    r"expected a Operator, got int": lambda: Operator.from_json(3),
    r"ALiBi: slopes must be a finite number, got nan": lambda: ALiBi((math.nan,)),
    r"scale must be a finite number, got 'x'": lambda: Attention(1, 1, scale="x"),
    r"qk_norm must be a finite number >= 0, got -1": lambda: Attention(1, 1, qk_norm=-1),
    r"sink must be one of True, False, got 0": lambda: Attention(1, 1, sink=0),
    r"gamma must be a finite number, got True": lambda: RBF(gamma=True),
    r"frequencies must be a finite number, got 'a'": lambda: Rotary(("a",)),
    r"called 'relu' exists already": lambda: register_function("relu", lambda z: z),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message, as_shipped):
    with pytest.raises(AnyformerError, match=message) as caught:
        ERRORS[message]()
    assert "\n" not in str(caught.value)


def test_what_a_specification_cannot_hold(as_shipped):
    with pytest.raises(AnyformerError, match="ALiBi: slopes must be a finite number, got 1j"):
        ALiBi((1j,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot hold a list"):
        _encode([1])
    with pytest.raises(TypeError, match="two specifications are called Window"):
        type("Window", (Spec,), {"__module__": "elsewhere"})


def test_a_function_of_your_own():
    formula = halve
    register_function("halved, for the tests", formula)
    register_function("halved, for the tests", formula)
    assert Gate(1, "halved, for the tests")(None, torch.ones(1, 1, 1, 1), context(1, 1)).weights.item() == 0.5


def halve(z):
    return z / 2


def test_equal_numbers_have_one_name(as_shipped):
    """Machines compare by value; a program finds its machine by digest: both must agree on 1 and 1.0."""
    for one, other in ((Attention(2, 3, scale=1), Attention(2, 3, scale=1.0)), (ALiBi((1, 0)), ALiBi((1.0, -0.0)))):
        assert one == other and hash(one) == hash(other)
        assert one.digest() == other.digest()
