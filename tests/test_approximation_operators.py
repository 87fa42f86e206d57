"""Operators that the certifier's families need: the laws of the conformance case, and an independent formula each; balls enclose floats."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from anyformer.approximation.balls import Undecided, balls, box, exact_fraction, precision
from anyformer.conformance import OperatorConformance, close
from anyformer.errors import AnyformerError
from anyformer.operators import (
    RBF,
    ALiBi,
    Attention,
    Causal,
    Context,
    Convolution,
    CyclicShift,
    FeatureMap,
    FixedMatrix,
    Fourier,
    Gate,
    Landmarks,
    LayerNorm,
    Linformer,
    Neighbours,
    Normed,
    Performer,
    Polynomial,
    RelativeBias,
    RMSNorm,
    Rotary,
    TableBias,
    Window,
)
from anyformer.philox import gaussian

TABLE = tuple(tuple(float((3 * i - 2 * j) % 7) / 4 for j in range(5)) for i in range(5))
GRAPH = Neighbours(((0, 1), (2,), (0, 2, 4), (), (1, 4)))
E, F = ((0.5, -1.0, 0.25, 2.0, 1.0), (1.0, 0.0, 0.5, -0.75, 0.5)), ((1.0, 0.5, 0.0, -1.0, 2.0), (0.0, 1.0, -0.5, 0.25, 1.0))

OPERATORS_IN_BALLS = [
    Attention(2, 3, mask=Causal(), bias=ALiBi((0.25, 0.1)), rotary=Rotary((1.0,))),
    Attention(2, 3, mask=Window(2, 1), qk_norm=1e-5, sink=True),
    Attention(2, 3, bias=RelativeBias(((0.5, -1.0, 0.25),))),
    Attention(1, 3, mask=GRAPH, bias=TableBias((TABLE,))),
    Attention(2, 3, kernel=RBF(0.7)),
    Attention(2, 3, kernel=RBF(0.7, normalised=False)),
    Attention(2, 3, kernel=FeatureMap()),
    Attention(2, 3, kernel=Performer(5, 1)),
    Attention(2, 3, kernel=Landmarks(3)),
    Attention(2, 3, kernel=Polynomial(3, -0.5)),
    Linformer(2, 3, E, F),
    Gate(3, "gelu"),
    Gate(3, "relu"),
    RMSNorm(4),
    Normed(Attention(2, 2, mask=Causal()), LayerNorm(4), bias=True),
    Convolution((0.1, 0.2)),
    CyclicShift(2),
    Fourier(),
    Fourier("sin"),
    FixedMatrix(TABLE),
]


class TestTableBias(OperatorConformance):
    operator = Attention(2, 3, bias=TableBias((TABLE, TABLE[::-1])))


class TestNeighbours(OperatorConformance):
    operator = Attention(2, 3, mask=Neighbours(((0, 1), (2,), (0, 2, 4), (3,), (1, 4))))


class TestLandmarks(OperatorConformance):
    operator = Attention(2, 3, kernel=Landmarks(3, 0.1, 6, 5))


class TestPolynomial(OperatorConformance):
    operator = Attention(2, 3, kernel=Polynomial(2, 0.5))


class TestLinformer(OperatorConformance):
    operator = Linformer(2, 3, E, F)


def own_and_context(op, n=5):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, n, op.count, op.reads, generator=generator, dtype=torch.float64), Context(torch.arange(n)[None])


def test_linformer_is_attention_to_mixtures_of_the_tokens():
    op = TestLinformer.operator
    own, ctx = own_and_context(op)
    e, f = torch.tensor(E, dtype=torch.float64), torch.tensor(F, dtype=torch.float64)
    for h in range(2):
        q, k = own[0, :, h, :3], own[0, :, h, 3:]
        expected = torch.softmax(q @ (e @ k).T / math.sqrt(3), -1) @ f
        close(op(None, own, ctx).weights[0, h], expected, 1e-12)


def test_polynomial_kernel():
    op = TestPolynomial.operator
    own, ctx = own_and_context(op)
    q, k = own[0, :, 1, :3], own[0, :, 1, 3:]
    close(op(None, own, ctx).weights[0, 1], (q @ k.T / math.sqrt(3) + 0.5) ** 2, 1e-12)


def test_landmarks_approach_the_gaussian_kernel():
    """With the inverse solved exactly the formula is Nystrom's; the iteration comes close to it."""
    op = Attention(1, 3, kernel=Landmarks(3, 0.5, 20, 5))
    own, ctx = own_and_context(op)
    points = torch.from_numpy(gaussian(5, 0, (3, 3), 1.0).T.copy())

    def kernel(x, y):
        return torch.exp(-(torch.cdist(x, y) ** 2) / 2)

    q, k = own[0, :, 0, :3] / math.sqrt(3), own[0, :, 0, 3:]
    inverse = torch.linalg.inv(kernel(points, points) + 0.5 * torch.eye(3, dtype=torch.float64))
    close(op(None, own, ctx).weights[0, 0], kernel(q, points) @ inverse @ kernel(points, k), 1e-9)


def test_table_and_neighbours_say_what_they_hold():
    op = Attention(1, 2, mask=GRAPH, bias=TableBias((TABLE,)))
    _, ctx = own_and_context(op)
    weights = op(None, torch.zeros(1, 5, 1, 4, dtype=torch.float64), ctx).weights[0, 0]
    for i, row in enumerate(GRAPH.rows):
        total = sum(math.exp(TABLE[i][j]) for j in row)
        for j in range(5):
            assert abs(weights[i, j].item() - (math.exp(TABLE[i][j]) / total if j in row else 0.0)) < 1e-15


@pytest.mark.parametrize("op", OPERATORS_IN_BALLS, ids=repr)
def test_balls_enclose_what_tensors_compute(op):
    """The same formula in both arithmetics: every float64 value lies within 1e-12 of its ball, and balls are narrow."""
    generator = torch.Generator().manual_seed(2)
    own = torch.randn(2, 5, op.count, op.reads, generator=generator, dtype=torch.float64)
    shared = torch.randn(2, 5, op.shared, generator=generator, dtype=torch.float64) if op.shared else None
    values = torch.randn(2, 5, op.count, 2, generator=generator, dtype=torch.float64)
    places = torch.arange(5)[None].expand(2, 5)
    expected = op(shared, own, Context(places)).apply(values)
    with precision(128):
        got = op(None if shared is None else balls(shared), balls(own), Context(places.numpy())).apply(balls(values))
        for ball, number in zip(got.ravel(), expected.ravel().tolist(), strict=True):
            assert float(ball.rad()) < 1e-25 and abs(float(ball.mid()) - number) < 1e-12 * (1 + abs(number))


def test_a_kink_that_is_met_is_undecided():
    cell = box([[[[-1.0]]]], [[[[2.0]]]])
    with pytest.raises(Undecided, match="a kink may be met"):
        Gate(1, "relu")(None, cell, Context(np.zeros((1, 1), dtype=int)))
    assert Gate(1, "relu")(None, cell + 2.0, Context(np.zeros((1, 1), dtype=int))).weights.shape == (1, 1, 1)


def test_balls_take_numbers_exactly():
    assert [exact_fraction(x) for x in balls([0.1, 3])] == [Fraction(0.1), 3]
    with precision(64):
        assert exact_fraction((balls([1]) / 3)[0]) is None


def test_positions_past_a_table_are_refused():
    past = Context(torch.tensor([[0, 5]]))
    for op in (TestTableBias.operator, TestLinformer.operator):
        with pytest.raises(AnyformerError, match="position 5 is past its size 5"):
            op(None, torch.zeros(1, 2, op.count, op.reads), past)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TableBias(((1.0,),)), "TableBias: every head needs"),
        (lambda: TableBias((((1.0, 2.0),),)), "TableBias: every head needs a non-empty square table"),
        (lambda: Neighbours(((0, 3),)), r"Neighbours: each row must be a tuple of positions 0\.\.0"),
        (lambda: Linformer(1, 2, ((1.0, 2.0),), ((1.0,),)), r"E and F must have one shape"),
        (lambda: Landmarks(0), "Landmarks: landmarks must be an integer >= 1"),
    ],
)
def test_errors(make, message, as_shipped):
    with pytest.raises(AnyformerError, match=message):
        make()
