"""The linear algebra of sequences and the universal simulator of attention, against NumPy and torch's own attention in float64."""

import json
import re

import numpy as np
import pytest
import torch
from torch import nn

from anyformer import rasp
from anyformer.cli import main
from anyformer.errors import AnyformerError
from anyformer.experiments import random_programs
from anyformer.experiments import simulator as experiment
from anyformer.rasp import Reals, interpret
from anyformer.rasp.encoding import Layer, described, reference
from anyformer.rasp.linear_algebra import (
    Matrix,
    cofactors,
    determinant,
    inverse,
    layer_norm,
    product,
    product_of_columns_and_rows,
    relu,
    softmax_rows,
    sort_pairs,
    transpose,
)
from anyformer.rasp.simulator import AttentionSimulator

T = rasp.tokens


def both(sequence, numbers, count, low=-60.0, high=60.0, **options):
    """The first ``count`` outputs of the network, after the interpreter is seen to agree."""
    compiled = rasp.compile(sequence, Reals(low, high), len(numbers), check=False, **options)
    numbers = [float(x) for x in numbers]
    found, meant = np.array(compiled(numbers)), np.array(interpret(sequence, numbers))
    np.testing.assert_allclose(found, meant, rtol=1e-10, atol=1e-10 + compiled.error)
    return found[:count], compiled


def rows_softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_vectors_of_transpose_product_and_inverse():
    assert both(transpose(Matrix(T, 3, 3)).values, range(1, 10), 9)[0].tolist() == [1, 4, 7, 2, 5, 8, 3, 6, 9]
    assert both(transpose(Matrix(T, 3, 2)).values, range(1, 7), 6)[0].tolist() == [1, 3, 5, 2, 4, 6]
    entries = [*range(1, 7), *range(1, 9)]
    for multiply in (product, product_of_columns_and_rows):
        found, _ = both(multiply(Matrix(T, 3, 2), Matrix(T, 2, 4, 6)).values, entries, 12)
        np.testing.assert_allclose(found, [11, 14, 17, 20, 23, 30, 37, 44, 35, 46, 57, 68], rtol=1e-13)
    entries = [*range(1, 7), *range(1, 7)]
    found, _ = both(product(Matrix(T, 3, 2), Matrix(T, 2, 3, 6)).values, entries, 9)
    np.testing.assert_allclose(found, [9, 12, 15, 19, 26, 33, 29, 40, 51], rtol=1e-13)
    m = [7, 8, 12, 10, 11, 9, 2, 4, 21]
    np.testing.assert_allclose(both(cofactors(Matrix(T, 3, 3)).values, m, 9)[0], [195, -192, 18, -120, 123, -12, -60, 57, -3])
    np.testing.assert_allclose(both(determinant(Matrix(T, 3, 3)), m, 9)[0], [45] * 9)
    found, compiled = both(inverse(Matrix(T, 3, 3)).values, m, 9)
    np.testing.assert_allclose(found.reshape(3, 3), np.linalg.inv(np.reshape(m, (3, 3))), rtol=1e-12)
    assert compiled.layers <= 5  # the published program has 5


def test_a_singular_matrix_has_the_inverse_zero():
    assert both(inverse(Matrix(T, 3, 3)).values, range(9), 9)[0].tolist() == [0] * 9


def test_group_sort_of_any_length():
    numbers = [14, 18, 3, 12, 6, 20, 7, 17, 13, 9]
    found, compiled = both(sort_pairs(T), numbers, 10)
    assert found.tolist() == [18, 14, 12, 3, 20, 6, 17, 7, 13, 9]
    assert (compiled.layers, compiled.heads) == (1, (1,))
    for n in (1, 2, 3, 7):
        wanted = [y for i in range(0, n, 2) for y in sorted(numbers[i : min(i + 2, n)], reverse=True)]
        assert compiled([float(x) for x in numbers[:n]]) == wanted


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 2), (2, 1, 4), (3, 2, 4)])
@pytest.mark.parametrize("multiply", [product, product_of_columns_and_rows])
def test_products_of_any_shape(shape, multiply):
    r, k, c = shape
    rng = np.random.default_rng(r + 10 * k + 100 * c)
    a, b = rng.normal(size=(r, k)), rng.normal(size=(k, c))
    numbers = [*a.flat, *b.flat] + [0.0] * max(0, r * c - r * k - k * c)
    found, compiled = both(multiply(Matrix(T, r, k), Matrix(T, k, c, r * k)).values, numbers, r * c)
    np.testing.assert_allclose(found.reshape(r, c), a @ b, rtol=1e-12, atol=1e-13)
    if multiply is product:
        assert compiled.layers == 1
        transposed, _ = both(
            product(Matrix(T, r, k), Matrix(T, c, k, r * k), transposed=True).values,
            [*a.flat, *b.T.flat, *numbers[r * k + k * c :]],
            r * c,
        )
        np.testing.assert_allclose(transposed.reshape(r, c), a @ b, rtol=1e-12, atol=1e-13)
    else:
        assert compiled.heads == (r + c, r * c) or 1 in shape


@pytest.mark.parametrize("options", [{}, {"head_per_row": True}, {"subtract_maximum": False}])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_of_rows(options, causal):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4, 4)) * 8

    def kept(i, j):
        return j <= i or not causal

    mask = np.array([[kept(i, j) for j in range(4)] for i in range(4)])
    found, _ = both(softmax_rows(Matrix(T, 4, 4), kept=kept, **options).values, [*x.flat, 5.0, -7.0], 18)
    np.testing.assert_allclose(found[:16].reshape(4, 4), rows_softmax(np.where(mask, x, -np.inf)), rtol=1e-12, atol=1e-14)
    assert found[16:].tolist() == [0, 0]


def test_softmax_of_logits_of_a_thousand():
    x = np.array([[1000.0, 999.0, -1000.0], [-1000.0, -1000.5, -999.0], [0.0, 1000.0, 1000.0]])
    found, _ = both(softmax_rows(Matrix(T, 3, 3)).values, [*x.flat], 9, -1001, 1001)
    np.testing.assert_allclose(found.reshape(3, 3), rows_softmax(x), rtol=1e-12, atol=1e-300)


def test_softmax_of_rows_in_standard_mode_keeps_its_bound():
    x = np.random.default_rng(0).uniform(-1, 1, size=(2, 2))
    program = softmax_rows(Matrix(T, 2, 2)).values
    compiled = rasp.compile(program, Reals(-1, 1), 4, mode="standard", tolerance=1e-4, check=False)
    error = np.abs(np.array(compiled(list(x.flat))) - rows_softmax(x).ravel()).max()
    assert 0 < error <= compiled.error < 0.05
    finer = rasp.compile(program, Reals(-1, 1), 4, mode="standard", tolerance=1e-6, check=False)
    assert finer.error < compiled.error / 50


def test_relu_and_layer_norm():
    rng = np.random.default_rng(5)
    x, g, b = rng.normal(size=(3, 4)), rng.normal(size=4), rng.normal(size=4)
    assert np.array_equal(both(relu(Matrix(T, 3, 4)).values, x.flat, 12)[0], np.maximum(x, 0).ravel())
    program = layer_norm(Matrix(T, 3, 4), Matrix(T, 1, 4, 12), Matrix(T, 1, 4, 16), 1e-5).values
    wanted = torch.nn.functional.layer_norm(torch.tensor(x), (4,), torch.tensor(g), torch.tensor(b), 1e-5)
    np.testing.assert_allclose(both(program, [*x.flat, *g, *b], 12)[0].reshape(3, 4), wanted, rtol=1e-10, atol=1e-12)


def test_matrices_that_do_not_fit():
    with pytest.raises(AnyformerError, match="left matrix has 3 columns, the right one 2 rows"):
        product(Matrix(T, 2, 3), Matrix(T, 2, 2))
    with pytest.raises(AnyformerError, match="3 x 3 matrices, got 2 x 2"):
        cofactors(Matrix(T, 2, 2))


def draw(layer, seed=0, scale=0.6):
    """Random matrices of a class."""
    g = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(*shape, generator=g, dtype=torch.float64)
        for name, shape in layer.matrices.items()
        if name != "valid"
    }


LAYERS = [
    Layer(1, 1, 1),
    Layer(3, 3, 3),
    Layer(3, 2, 1, 2),
    Layer(5, 2, 1),  # n > 2d: spare tokens
    Layer(2, 3, 4, scaled=True),
    Layer(3, 2, 1, 2, causal=True, scaled=True),
    Layer(2, 2, 2, 1, 3, "separate"),
    Layer(2, 3, 2, 2, 1, "separate", biases=True, output=True, causal=True),
    Layer(2, 2, 2, residual=True, feed_forward=3),
    Layer(2, 3, 2, 2, 1, "separate", output=True, residual=True),
]


@pytest.mark.parametrize("version", ["compact", "soft", "paper"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.n}-{layer.d}-{layer.d_v}-{layer.heads}-{layer.projections}")
def test_simulates_torch_attention(layer, version):
    simulator = AttentionSimulator.for_layer(layer, version)
    inputs = [draw(layer, seed, scale) for seed, scale in ((0, 0.6), (1, 2.0))]
    found = simulator.batch(inputs)
    for out, matrices in zip(found, inputs, strict=True):
        torch.testing.assert_close(out, reference(layer, matrices), rtol=1e-10, atol=1e-10)
    if version == "compact" and not layer.output and not layer.feed_forward:
        assert simulator.compiled.layers == 4
    if version == "soft" and not layer.output and not layer.feed_forward:
        assert simulator.compiled.layers == 3


def test_depth_does_not_grow_with_n():
    sizes = [AttentionSimulator.for_layer(Layer(n, 2, 1), "compact").compiled for n in (2, 3, 6)]
    assert {c.layers for c in sizes} == {4}
    assert len({c.heads for c in sizes[1:]}) == 1


def test_heads_of_the_papers_version():
    """Columns of X, A and V, and X^T; entries of X A (X V shares its heads) beside columns of X^T; columns of X A and of X V; entries of the
    scores; the maximum of every row of each head, means of rows; columns of the softmax; entries of the output."""
    n, d, v, heads = 4, 3, 2, 2
    compiled = AttentionSimulator.for_layer(Layer(n, d, v, heads), "paper").compiled
    assert compiled.heads == (n + heads * (d + v) + 1, n * d + n, n + v, n * n, heads * (n + 1), n + 1, n, n * v)


@pytest.mark.parametrize("version", ["compact", "soft", "paper"])
@pytest.mark.parametrize("logit", [1000.0, -1000.0])
def test_logits_of_a_thousand(version, logit):
    layer = Layer(3, 2, 2)
    x = torch.tensor([[1.0, 0.5], [0.9, -0.2], [0.2, 0.8]], dtype=torch.float64)
    a = torch.tensor([[logit, 3.0], [-2.0, 0.3 * logit]], dtype=torch.float64)
    matrices = {"X": x, "A0": a, "V0": torch.eye(2, dtype=torch.float64)}
    simulator = AttentionSimulator.for_layer(layer, version, bound=1000.0)
    torch.testing.assert_close(simulator(matrices), reference(layer, matrices), rtol=1e-9, atol=1e-10)


def test_a_logit_beyond_its_bound_is_an_error_not_an_answer():
    layer = Layer(2, 1, 1)
    simulator = AttentionSimulator.for_layer(layer, logits=5.0)
    matrices = {"X": torch.tensor([[3.0], [1.0]]), "A0": torch.tensor([[1.0]]), "V0": torch.tensor([[1.0]])}
    with pytest.raises(AnyformerError, match="beyond this simulator's logits of 5; make one with larger logits"):
        simulator(matrices)


@pytest.mark.parametrize("version", ["compact", "soft", "paper"])
def test_a_smaller_layer_runs_on_a_larger_simulator(version):
    large, small = Layer(4, 3, 3, 2, padding=True), Layer(3, 2, 2, 2)
    matrices = draw(small)
    found = AttentionSimulator.for_layer(large, version)(matrices)
    torch.testing.assert_close(found[:3, :2], reference(small, matrices), rtol=1e-10, atol=1e-10)
    assert found[:3, 2].abs().max() < 1e-10


SMALLER = [
    (Layer(3, 3, 3, scaled=True, padding=True), Layer(2, 2, 2, scaled=True)),
    (
        Layer(3, 3, 3, 2, 3, "separate", biases=True, output=True, residual=True, feed_forward=3, scaled=True, padding=True),
        Layer(2, 2, 1, 2, 2, "separate", biases=True, output=True, residual=True, feed_forward=1, scaled=True),
    ),
]


@pytest.mark.parametrize(("large", "small"), SMALLER)
def test_a_smaller_layer_keeps_its_scale_and_its_heads_in_the_output_projection(large, small):
    matrices = draw(small)
    found = AttentionSimulator.for_layer(large)(matrices)
    torch.testing.assert_close(found[: small.n, : small.outputs], reference(small, matrices), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(reference(large, matrices), reference(small, matrices), rtol=0, atol=0)


ENCODER = Layer(3, 2, 2, 1, 2, "separate", output=True, residual=True, feed_forward=1, norm="post", padding=True)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("layer", "change", "message"),
    [
        (ENCODER, {"X": torch.ones(3, 1)}, r"X must have 2 columns, got 1: a LayerNorm averages over all of them"),
        (Layer(2, 3, 1), {"A0": torch.ones(2, 2)}, r"A0 must have shape \(3, 3\) in a layer of n = 2, d = 3, d_v = 1, got \(2, 2\)"),
        (Layer(2, 1, 1), {"X": torch.ones(2, 1, dtype=torch.complex128)}, "real numbers .* got a cpu tensor of torch.complex"),
        (Layer(2, 1, 1), {"X": [[1.0], [2.0]]}, r"X must be a tensor of real numbers of shape \(2, 1\), got a list"),
        (Layer(2, 1, 1, padding=True), {"X": torch.ones(0, 1)}, r"at most shape \(2, 1\) and not be empty, got \(0, 1\)"),
        *(
            (Layer(3, 1, 1, padding=True), {"valid": torch.tensor([valid])}, "valid must hold 1 for real tokens and 0 for padding")
            for valid in ([1.0, 7.0, 1.0], [1.0, 1.001, 1.0], [1.0, 0.5, 1.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0])
        ),
    ],
)  # fmt: skip
def test_matrices_that_describe_no_layer_of_the_class(layer, change, message):
    with pytest.raises(AnyformerError, match=message):
        layer.encode({name: torch.ones(shape) for name, shape in layer.matrices.items()} | change)


@pytest.mark.parametrize(("causal", "valid"), [(False, [0, 1, 1]), (True, [0, 1, 1]), (True, [1, 0, 1])])
def test_padding_is_masked_wherever_it_is(causal, valid):
    layer = Layer(3, 2, 2, causal=causal, padding=True)
    matrices = draw(layer) | {"valid": torch.tensor([valid])}
    found, keys = AttentionSimulator.for_layer(layer)(matrices), torch.tensor(valid).bool()
    real = {name: matrices[name] for name in ("A0", "V0")} | {"X": matrices["X"][keys]}
    torch.testing.assert_close(found, reference(layer, matrices), rtol=1e-10, atol=1e-10, equal_nan=True)
    without = reference(Layer(2, 2, 2, causal=causal), real)
    torch.testing.assert_close(found[keys], without, rtol=1e-10, atol=1e-10)
    assert bool(found[0].isnan().all()) == (causal and not valid[0])  # a row that sees no key has no value


@pytest.mark.parametrize("version", ["compact", "soft", "paper"])
def test_padding_of_the_largest_score_is_masked_before_the_smallest(version):
    layer = Layer(2, 1, 1, padding=True)
    matrices = {
        "X": torch.tensor([[1.0], [-1.0]]),
        "A0": torch.tensor([[5.0]]),
        "V0": torch.ones(1, 1),
        "valid": torch.tensor([[0, 1]]),
    }
    found = AttentionSimulator.for_layer(layer, version, logits=5.0)(matrices)
    torch.testing.assert_close(found, torch.tensor([[-1.0], [-1.0]], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("version", "error"), [("compact", 1e-6), ("soft", 1e-4)])
def test_a_mask_takes_no_digits_from_float32(version, error):
    layer = Layer(3, 2, 2, padding=True)
    matrices = draw(layer)
    single = AttentionSimulator.for_layer(layer, version, dtype="float32")
    assert float((single(matrices) - reference(layer, matrices)).abs().max()) < error


@pytest.mark.parametrize("version", ["compact", "paper"])
def test_logits_and_bound_are_what_was_asked_for(version):
    layer = Layer(3, 2, 2)
    matrices = draw(layer) | {"X": torch.tensor([[1e3, 0.0], [-1e3, 0.3], [0.2, 0.8]]), "A0": torch.eye(2)}
    simulator = AttentionSimulator.for_layer(layer, version, bound=2e6, logits=3e6)
    torch.testing.assert_close(simulator(matrices), reference(layer, matrices), rtol=1e-9, atol=1e-9)
    single = AttentionSimulator.for_layer(layer, version, logits=1e4, dtype="float32")
    matrices["X"] = matrices["X"].clamp(-100, 100)
    torch.testing.assert_close(single(matrices), reference(layer, matrices), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s({"X": [[0.0]], "A0": torch.ones(1, 1), "V0": torch.ones(1, 1)}), "X must be a tensor of real numbers"),
        (lambda s: s(None), "a layer is described by a dict of matrices, X, A0, V0; got a NoneType"),
        (lambda s: s([1]), "got a list"),
        (lambda s: s.batch(3), "a list of layers is needed"),
        (
            lambda s: s({"X": torch.ones(2, 1), "A0": torch.tensor([[float("nan")]]), "V0": torch.ones(1, 1)}),
            r"A0\[0, 0\] must be a number in \[-100, 100\], got nan; make a simulator with a larger bound",
        ),
    ],
)
def test_what_a_simulator_refuses_to_run(call, message):
    simulator = AttentionSimulator.for_layer(Layer(2, 1, 1))
    assert simulator.batch([]).shape == (0, 2, 1)
    with pytest.raises(AnyformerError, match=message):
        call(simulator)


@pytest.mark.parametrize("version", ["compact", "soft"])
@pytest.mark.parametrize("causal", [False, True])
def test_simulates_multi_head_attention(version, causal):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    nn.init.normal_(module.in_proj_bias)
    nn.init.normal_(module.out_proj.bias)
    x = torch.randn(3, 4, dtype=torch.float64)
    layer, matrices = described(module, x, causal=causal)
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64) if causal else None
    wanted = module(x[None], x[None], x[None], attn_mask=mask)[0][0]
    torch.testing.assert_close(AttentionSimulator.for_layer(layer, version)(matrices), wanted.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_simulates_a_whole_encoder_layer(norm):
    torch.manual_seed(1)
    module = encoder(norm_first=norm == "pre", layer_norm_eps=0.1)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 4, dtype=torch.float64)
    layer, matrices = described(module, x)
    found = AttentionSimulator.for_layer(layer)(matrices)
    with torch.no_grad():
        torch.testing.assert_close(found, module(x[None])[0], rtol=1e-10, atol=1e-10)


def encoder(**options):
    made = nn.TransformerEncoderLayer(4, 2, 2, **({"dropout": 0.0, "batch_first": True, "dtype": torch.float64} | options))
    return made.eval()


def norms(module, one, other):
    module.norm1, module.norm2 = one, other
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.MultiheadAttention(4, 2, add_zero_attn=True), "its add_zero_attn is True"),
        (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), "bias_k: a parameter that the configuration does not have"),
        (lambda: nn.MultiheadAttention(4, 2, kdim=3), "kdim is 3"),
        (lambda: norms(encoder(), nn.LayerNorm(4), nn.LayerNorm(4, eps=1e-3)), "norm2: its eps is 0.001"),
        (lambda: norms(encoder(), nn.RMSNorm(4), nn.RMSNorm(4)), "norm1: a RMSNorm stands in place of LayerNorm"),
        (lambda: norms(encoder(), nn.Identity(), nn.LayerNorm(4)), "norm1: a Identity stands in place of LayerNorm"),
        (lambda: encoder(dropout=0.5).train(), r"dropout1: it drops 50% at random while it trains; call .eval\(\) first"),
        (lambda: encoder(activation="gelu"), "its activation is gelu"),
        (lambda: type("Own", (nn.MultiheadAttention,), {})(4, 2), "a Own stands in place of MultiheadAttention"),
    ],
)
def test_modules_that_compute_something_else_are_not_described(make, message):
    with pytest.raises(AnyformerError, match=message):
        described(make(), torch.zeros(2, 4))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("x", [torch.zeros(3, 3), torch.zeros(1, 3, 4), torch.zeros(0, 4), [[0.0] * 4], torch.zeros(2, 4) * 1j])
def test_the_input_of_a_described_module(x):
    with pytest.raises(AnyformerError, match=r"x must be a tensor of real numbers of shape \(n, 4\), n >= 1, got a "):
        described(encoder(), x)


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(4, elementwise_affine=False), nn.Identity], ids=["plain", "none"])
@pytest.mark.parametrize("activation", [nn.ReLU(), torch.relu, nn.functional.relu], ids=["module", "torch", "functional"])
def test_every_relu_and_norms_without_weights_are_described(activation, norm):
    module = norms(encoder(activation=activation, batch_first=False), norm(), norm())
    x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer, matrices = described(module, x)
    wanted = module(x[:, None])[:, 0].detach()  # torch's fast path, with the batch first, needs the norm's weights
    torch.testing.assert_close(reference(layer, matrices), wanted, rtol=1e-10, atol=1e-10)


def test_float32_and_standard_mode():
    layer = Layer(3, 2, 2)
    matrices = draw(layer)
    wanted = reference(layer, matrices)
    torch.testing.assert_close(
        AttentionSimulator.for_layer(layer, dtype="float32")(matrices).float(), wanted.float(), rtol=1.3e-6, atol=1e-5
    )
    standard = AttentionSimulator.for_layer(layer, mode="standard", tolerance=1e-4, bound=3.0, logits=6.0)
    error = float((standard(matrices) - wanted).abs().max())
    assert 0 < error <= standard.compiled.error


def test_vectors_of_the_published_demo():
    a = torch.arange(1, 10, dtype=torch.float64).reshape(3, 3) / 10
    v = torch.tensor([[0.1, 0.7, 0.4], [1, 0.3, 0.9], [0.5, 0.2, 0.6]], dtype=torch.float64)
    x = torch.tensor([[0.8, 0.2, 0.5], [0.1, 0.9, 0.4], [0.6, 0.3, 0.7]], dtype=torch.float64)
    wanted = [[0.78272783, 0.59757544, 0.94072841], [0.78048787, 0.59883303, 0.93977981], [0.78101948, 0.59860077, 0.94011956]]
    for version in ("compact", "soft", "paper"):
        found = AttentionSimulator.for_layer(Layer(3, 3, 3), version)({"X": x, "A0": a, "V0": v})
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=6e-9)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layer(0, 1, 1), "n must be an integer >= 1"),
        (lambda: Layer(2, 2, 2, projections="separate"), "d_k must be an integer >= 1"),
        (lambda: Layer(2, 2, 2, biases=True), "biases belong to separate projections"),
        (lambda: Layer(2, 2, 3, residual=True), "a residual needs outputs as wide as the input, got 3 and d = 2"),
        (lambda: Layer(2, 2, 2, eps=0.0), "eps must be positive, got 0.0"),
        (lambda: Layer(2, 2, 2, norm="pre"), "a norm belongs to the whole encoder layer"),
        (lambda: Layer(2, 2, 2).encode({"X": torch.zeros(2, 2)}), "missing: A0, V0"),
        (
            lambda: Layer(2, 1, 1).encode({"X": torch.zeros(2, 2), "A0": torch.zeros(1, 1), "V0": torch.zeros(1, 1)}),
            "at most shape",
        ),
        (
            lambda: Layer(2, 1, 1).encode({"X": torch.zeros(1, 1), "A0": torch.zeros(1, 1), "V0": torch.zeros(1, 1)}),
            "must have 2 rows",
        ),
        (lambda: AttentionSimulator.for_layer(Layer(2, 2, 2), bound=float("inf")), "bound must be a finite number"),
        (lambda: AttentionSimulator.for_layer(Layer(2, 2, 2), bound=-1), "bound must be positive, got -1"),
        (lambda: AttentionSimulator.for_layer(Layer(2, 2, 2), logits=0), "logits must be positive, got 0"),
        (lambda: AttentionSimulator.for_layer(3), "a Layer is needed, got 3"),
        (
            lambda: AttentionSimulator.for_layer(Layer(2, 2, 2), causal="dialect"),
            r"no option causal.* a causal layer is Layer\(\.\.\., causal=True\)",
        ),
        (
            lambda: AttentionSimulator.for_layer(Layer(2, 2, 2), max_length=9),
            "takes no option max_length; it takes bound, logits, mode",
        ),
        (lambda: AttentionSimulator.for_layer(Layer(2, 2, 2), logits=1e7, dtype="float32"), "or dtype='float64'"),
        (
            lambda: AttentionSimulator.for_layer(Layer(40, 40, 40)),
            "heads, each with a pattern of 4,800 x 4,800 tokens, are more than",
        ),
        (lambda: AttentionSimulator.for_layer(Layer(5, 4, 3), mode="standard", tolerance=1e-9), "choose one of at least 4e-08"),
        (
            lambda: AttentionSimulator.for_layer(Layer(5, 4, 3), mode="standard", tolerance=1e-300),
            "tolerance must be a finite number >= 1e-15",
        ),
        (lambda: described(nn.Linear(2, 2), torch.zeros(1, 2)), "nn.MultiheadAttention"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(AnyformerError, match=message):
        make()


@pytest.mark.parametrize(
    "options", [["--scale", "20"], ["--scale", "99", "--seed", "-1"], ["--scale", "10", "--dtype", "float32"]]
)
def test_the_command_simulates_layers_of_any_scale(options, capsys):
    assert main(["simulate", "--n", "2", "--d", "1", "--dv", "1", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["max_abs_error"] < 1e-2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scale", "100"], "--scale must be above 0 and below 100, got 100"),
        (["--scale", "99", "--dtype", "float32"], "choose smaller ones or dtype='float64'"),
        (["--seed", "9" * 23], "--seed must be an integer of at most 64 bits"),
        (["--mode", "standard", "--tolerance", "1e-300"], "tolerance must be a finite number >= 1e-15"),
        (["--n", "40", "--d", "40", "--dv", "40"], "heads, each with a pattern of 8,000 x 8,000 tokens"),
        (["--n", "100000", "--d", "100000"], "tokens that describe such a layer needs"),
    ],
)
def test_what_the_command_refuses_before_it_starts(options, message, capsys):
    assert main(["simulate", *options]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_table_of_the_simulator(tmp_path, monkeypatch):
    monkeypatch.setattr(
        experiment, "cases", lambda *_: [("transpose", 2, 1), ("softmax", 2, 1), ("layer, compact", 2, 1), ("layer, paper", 2, 1)]
    )
    said = []
    result = experiment.run(tmp_path, full=False, command="the command", report=lambda *what: said.append(what))
    assert result["passed"] and len(result["points"]) == len(said) == 8
    text = (tmp_path / "simulator.md").read_text()
    assert "| layer, compact | 2 | 1 |" in text and "Made by `the command`" in text
    assert {p["program"]: p["layers"] for p in result["points"]}["layer, compact"] == 4
    assert all(p["error"] < 1e-5 for p in result["points"])
    assert (tmp_path / "simulator.png").stat().st_size > 5000


def test_random_programs_by_command(tmp_path):
    result = random_programs.run(tmp_path, 4, 3, "the command")
    assert [f["mismatches"] for f in result["fragments"]] == [[], []]
    assert sum(f["programs"] for f in result["fragments"]) == 4
    assert "| categorical | 2 |" in (tmp_path / "rasp-programs.md").read_text()
