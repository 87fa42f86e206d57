"""The seam of the primitives: the same formulas on numbers of 50 digits, against float64 tensors."""

import math
from dataclasses import dataclass

import mpmath
import numpy as np
import pytest
import torch

from anyformer.operators import (
    RBF,
    ALiBi,
    Attention,
    AverageHard,
    Causal,
    Context,
    Convolution,
    FeatureMap,
    Fourier,
    Gate,
    LayerNorm,
    Normed,
    Operator,
    Performer,
    RMSNorm,
    Rotary,
    Window,
)
from anyformer.operators import primitives as P


class Digits(np.ndarray):
    """An object array of mpmath numbers: a second arithmetic, registered below."""


def digits(values) -> Digits:
    return np.vectorize(mpmath.mpf, otypes=[object])(np.asarray(values)).view(Digits)


def elementwise(function):
    def apply(x: Digits) -> Digits:
        return np.frompyfunc(function, 1, 1)(x).view(Digits)

    return apply


for _primitive, _function in (
    (P.exp, mpmath.exp),
    (P.log, mpmath.log),
    (P.sqrt, mpmath.sqrt),
    (P.tanh, mpmath.tanh),
    (P.erf, mpmath.erf),
    (P.sigmoid, lambda z: 1 / (1 + mpmath.exp(-z))),
):
    _primitive.register(Digits, elementwise(_function))

P.row_max.register(Digits, lambda x: x.max(-1, keepdims=True))
P.row_sum.register(Digits, lambda x: x.sum(-1, keepdims=True))
P.select.register(Digits, lambda x, condition, otherwise: np.where(condition, x, mpmath.mpf(otherwise)).view(Digits))
P.join.register(Digits, lambda x, *others: np.concatenate((x, *others), -1).view(Digits))
P.constant.register(Digits, lambda like, values: digits(values))


@P.cos_sin.register
def _(like: Digits, places, frequencies):
    angle = digits(places)[..., None] * digits(frequencies)
    return elementwise(mpmath.cos)(angle), elementwise(mpmath.sin)(angle)


@pytest.fixture(autouse=True)
def fifty_digits():
    with mpmath.workdps(50):
        yield


@dataclass(frozen=True)
class EveryPrimitive(Operator):
    """Reads one column and applies the primitives that no operator below uses: sqrt, log, tanh of what is at least 1."""

    @property
    def count(self) -> int:
        return 1

    @property
    def reads(self) -> int:
        return 1

    def __call__(self, shared, own, ctx):
        z = own[..., 0] * own[..., 0] + 1.0
        return type(Gate(1, "identity")(None, own, ctx))(P.log(z) + P.sqrt(z) + P.tanh(z))


OPERATORS = [
    Attention(2, 4, mask=Causal(), bias=ALiBi((0.25, 2.0 ** (-8 / 3))), rotary=Rotary.of_base(4)),
    Attention(2, 3, mask=Window(2, 1), rotary=Rotary((0.3,)), qk_norm=1e-5, sink=True),
    Attention(1, 2, kernel=AverageHard()),
    Attention(2, 3, kernel=RBF(0.7)),
    Attention(2, 3, mask=Causal(), kernel=RBF(0.7, normalised=False)),
    Attention(2, 3, kernel=FeatureMap()),
    Attention(2, 3, kernel=Performer(5, 1)),
    Gate(3, "gelu"),
    Gate(3, "gelu_tanh"),
    Gate(3, "silu"),
    RMSNorm(4),
    LayerNorm(4, 1e-3),
    Normed(Attention(2, 2, mask=Causal(), sink=True), LayerNorm(4), bias=True),
    Normed(Gate(2, "silu"), RMSNorm(4)),
    Convolution((0.1, 0.2)),
    Fourier(),
    EveryPrimitive(),
]


@pytest.mark.parametrize("op", OPERATORS, ids=repr)
def test_formulas_hold_to_many_digits(op):
    """A formula that goes through float32 or a Python float somewhere differs by far more than 1e-13."""
    generator = torch.Generator().manual_seed(1)
    own = torch.randn(2, 5, op.count, op.reads, generator=generator, dtype=torch.float64)
    shared = torch.randn(2, 5, op.shared, generator=generator, dtype=torch.float64) if op.shared else None
    values = torch.randn(2, 5, op.count, 2, generator=generator, dtype=torch.float64)
    onto = torch.randn(2, 5, 2, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, :2] = False
    ctx = Context.of(mask.long(), mask)

    many = op(None if shared is None else digits(shared), digits(own), Context(ctx.positions.numpy(), mask.numpy()))
    got = many.apply(digits(values)), many.contract(digits(values)), many.contract(digits(values), digits(onto)), many.pattern
    token_map = op(shared, own, ctx)
    expected = token_map.apply(values), token_map.contract(values), token_map.contract(values, onto), token_map.pattern

    for x, y in zip(got, expected, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            numbers = [mpmath.mpf(number) for number in np.ravel(x)]
            assert np.shape(x) == tuple(y.shape)
            assert max(abs(a - b) / (1 + abs(a)) for a, b in zip(numbers, y.ravel().tolist(), strict=True)) < 1e-13


def test_many_digits_are_kept():
    """Softmax of two equal scores is one half to 50 digits, and exp(1) is e: nothing fell back to floats."""
    own = digits(np.zeros((1, 2, 1, 4)))
    pattern = Attention(1, 2)(None, own, Context(np.arange(2)[None])).pattern
    assert all(x == mpmath.mpf(1) / 2 for x in pattern.ravel())
    gate = Gate(1, "exp")(None, digits(np.ones((1, 1, 1, 1))), Context(np.arange(1)[None]))
    assert abs(gate.weights.item() - mpmath.e) < mpmath.mpf(10) ** -49


UNREGISTERED = {
    "exp": lambda x: P.exp(x),
    "log": lambda x: P.log(x),
    "sqrt": lambda x: P.sqrt(x),
    "tanh": lambda x: P.tanh(x),
    "sigmoid": lambda x: P.sigmoid(x),
    "erf": lambda x: P.erf(x),
    "row_max": lambda x: P.row_max(x),
    "row_sum": lambda x: P.row_sum(x),
    "select": lambda x: P.select(x, True, 0.0),
    "join": lambda x: P.join(x, x),
    "constant": lambda x: P.constant(x, 1.0),
    "cos_sin": lambda x: P.cos_sin(x, 1, (1.0,)),
}


@pytest.mark.parametrize("name", UNREGISTERED)
def test_unregistered_types_are_named(name):
    message = rf"primitive {name} is not registered for list; register it in anyformer\.operators\.primitives"
    with pytest.raises(TypeError, match=message):
        UNREGISTERED[name]([1.0])


def test_an_operator_on_an_unregistered_type_says_which_primitive():
    with pytest.raises(TypeError, match="primitive erf is not registered for ndarray"):
        Gate(1, "gelu")(None, np.ones((1, 1, 1, 1)), Context(np.arange(1)[None]))


def test_thresholds_follow_the_precision():
    assert P.roundoff(torch.zeros(1, dtype=torch.float64), 1e-9, 1e-4) == 1e-9
    assert P.roundoff(torch.zeros(1), 1e-9, 1e-4) == 1e-4
    assert P.roundoff(digits([0.0]), 1e-9, 1e-4) == 1e-9


def test_constants_do_not_pass_through_float32():
    third = P.constant(torch.zeros(1, dtype=torch.float64), (1 / 3,))
    assert third.item() == 1 / 3 and third.dtype == torch.float64
    cos, _ = P.cos_sin(torch.zeros(1, dtype=torch.float64), torch.tensor([7]), (1 / 3,))
    assert abs(cos.item() - math.cos(7 / 3)) < 1e-15
