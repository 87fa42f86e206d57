"""Products whose rows do not depend on their neighbours: values, derivatives of every kind, and the bits."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from anyformer.operators import primitives as P
from anyformer.operators.alignment import aligned, contract, products


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


M, V, O = draw(1, 2, 3, 2, 4), draw(2, 2, 4, 3, 3), draw(3, 2, 2, 3)
Q, K = draw(4, 2, 3, 2, 3), draw(5, 2, 3, 4, 3)


def test_values() -> None:
    expected = torch.einsum("bgqk,bkgc->bqc", M, V)
    torch.testing.assert_close(contract(M, V, None), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(contract(M, V, O), expected + O, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(products(Q, K), Q @ K.mT, rtol=1e-13, atol=1e-13)


def test_every_derivative() -> None:
    m, v, o, q, k = (x.clone().requires_grad_() for x in (M, V, O, Q, K))
    for function, inputs in ((contract, (m, v, o)), (lambda a, b: contract(a, b, None), (m, v)), (products, (q, k))):
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_transforms() -> None:
    many, onto = torch.stack((M, 2 * M, -M), 1), torch.stack((O, O, 3 * O))
    got = torch.func.vmap(contract, in_dims=(1, None, 0))(many, V, onto)
    assert torch.equal(got, torch.stack([contract(many[:, i], V, onto[i]) for i in range(3)]))
    assert torch.equal(torch.func.vmap(products)(torch.stack((Q, -Q)), torch.stack((K, K)))[1], products(-Q, K))

    def both_ways(v: torch.Tensor) -> torch.Tensor:
        return contract(M, v, v[:, : M.shape[2]].sum(2))

    torch.testing.assert_close(torch.func.jacfwd(both_ways)(V), torch.func.jacrev(both_ways)(V))


SCORES = draw(6, 2, 3, 4, 5)
SEEN = torch.rand(2, 1, 4, 5, generator=torch.Generator().manual_seed(7)) < 0.6
SEEN[:, :, 1] = False  # a query that sees nothing


def softmax(sink: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda scores: P.normalised_exp(scores, SEEN, sink)


@pytest.mark.parametrize("sink", [False, True])
def test_masked_softmax(sink: bool) -> None:
    weights = torch.where(SEEN, SCORES.exp(), 0.0)
    total = weights.sum(-1, keepdim=True) + (1.0 if sink else 0.0)
    expected = weights / torch.where(total > 0, total, 1.0)
    torch.testing.assert_close(softmax(sink)(SCORES), expected, rtol=1e-13, atol=1e-13)
    scores = SCORES.clone().requires_grad_()
    assert torch.autograd.gradcheck(softmax(sink), scores, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(softmax(sink), scores)
    got = torch.func.vmap(softmax(sink))(torch.stack((SCORES, -SCORES)))
    assert torch.equal(got, torch.stack((softmax(sink)(SCORES), softmax(sink)(-SCORES))))
    torch.testing.assert_close(torch.func.jacfwd(softmax(sink))(SCORES), torch.func.jacrev(softmax(sink))(SCORES))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sink", [False, True])
def test_what_is_masked_does_not_count_whatever_it_is(dtype: torch.dtype, sink: bool) -> None:
    largest = torch.finfo(dtype).max
    allowed = torch.tensor([True, False, True, False])
    for masked in (largest, -largest, math.inf, -math.inf, math.nan):
        for least in (0.0, -largest / 2):
            scores = torch.tensor([[least, masked, least, masked]], dtype=dtype)
            got = P.normalised_exp(scores, allowed, sink)
            assert torch.equal(got, P.normalised_exp(torch.where(allowed, scores, 0.0), allowed, sink))
            assert got[0, 0] == got[0, 2] and (sink or got[0, 0] == 0.5)
    assert not P.normalised_exp(torch.full((1, 4), math.nan, dtype=dtype), allowed & False, sink).any()


def test_items_begin_at_multiples_of_64_bytes() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    for (shape, lead), dtype in itertools.product((((3, 5, 7), 1), ((2, 3, 5, 7), 2), ((4,), 1), ((3, 16), 1)), dtypes):
        x = aligned(torch.empty(0, dtype=dtype), *shape, lead=lead)
        items = x.flatten(0, lead - 1)
        assert x.shape == shape and x[..., 0].numel() > 0
        assert all((item.data_ptr() - x.data_ptr()) % 64 == 0 for item in items)


@pytest.mark.parametrize("n", [1, 5, 8, 9, 16, 33, 101])
@pytest.mark.parametrize("batch", [2, 7])
def test_rows_have_the_bits_that_they_have_alone(n: int, batch: int) -> None:
    q, k, v = draw(6, batch, 2, n, 7).float(), draw(7, batch, 2, n, 7).float(), draw(8, batch, n, 2, 37).float()
    m = products(q, k)
    state = aligned(v, *v.shape).copy_(v)
    for i in range(batch):
        row = slice(i, i + 1)
        assert torch.equal(m[row], products(q[row].clone(), k[row].clone()))
        assert torch.equal(contract(m, state, None)[row], contract(m[row].clone(), v[row].clone(), None))


@pytest.mark.parametrize("function", [P.exp, P.log, P.tanh, P.sigmoid, P.erf], ids=lambda f: f.__name__)
def test_functions_have_the_same_bits_everywhere(function) -> None:
    x = draw(9, 333).float().abs()
    whole = function(x)
    for count in (1, 3, 8, 31, 64, 100):
        assert torch.equal(function(x[:count].clone()), whole[:count]) and torch.equal(
            function(x[-count:].clone()), whole[-count:]
        )
    torch.testing.assert_close(whole, getattr(torch, function.__name__)(x))
    assert torch.equal(function(x[::3]), whole[::3]) and function(x[:0]).shape == (0,)
