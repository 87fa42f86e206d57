"""The dozen or so primitives that every operator's formula is written in.

An operator uses ``+ - * / @``, comparisons, indexing, ``reshape``, ``swapaxes``, ``sum`` and the functions below; on positions
(integers) also ``%``, ``abs``, ``clip``, ``max``. Each function dispatches on the type of its first argument; tensors are registered
here. Another arithmetic (exact rationals, balls, many digits) registers its own array type and evaluates the same formulas:

    @primitives.exp.register
    def _(x: MyArray) -> MyArray: ...
"""

import math
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from anyformer.operators import alignment
from anyformer.operators.alignment import in_whole_vectors


def _unregistered(name: str, x: Any) -> TypeError:
    return TypeError(f"primitive {name} is not registered for {type(x).__name__}; register it in anyformer.operators.primitives")


@singledispatch
def exp(x: Any) -> Any:
    """e^x."""
    raise _unregistered("exp", x)


@singledispatch
def log(x: Any) -> Any:
    """Natural logarithm."""
    raise _unregistered("log", x)


@singledispatch
def sqrt(x: Any) -> Any:
    """Square root."""
    raise _unregistered("sqrt", x)


@singledispatch
def tanh(x: Any) -> Any:
    """Hyperbolic tangent."""
    raise _unregistered("tanh", x)


@singledispatch
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    raise _unregistered("sigmoid", x)


@singledispatch
def erf(x: Any) -> Any:
    """The error function."""
    raise _unregistered("erf", x)


@singledispatch
def products(q: Any, k: Any) -> Any:
    """``q k^T``: the products of rows (batch, count, queries, d) and (batch, count, keys, d)."""
    return q @ k.swapaxes(-1, -2)


@singledispatch
def rows_apart(x: Any) -> Any:
    """``x`` itself; tensors in memory where every row of the batch begins alike (:mod:`anyformer.operators.alignment`)."""
    return x


@singledispatch
def row_max(x: Any) -> Any:
    """Maximum over the last axis, kept as an axis of size 1."""
    raise _unregistered("row_max", x)


@singledispatch
def row_sum(x: Any) -> Any:
    """Sum over the last axis, kept as an axis of size 1."""
    raise _unregistered("row_sum", x)


@singledispatch
def select(x: Any, condition: Any, otherwise: float) -> Any:
    """``x`` where the Boolean ``condition`` holds, the number ``otherwise`` elsewhere (broadcasting)."""
    raise _unregistered("select", x)


@singledispatch
def join(x: Any, *others: Any) -> Any:
    """Concatenate along the last axis."""
    raise _unregistered("join", x)


@singledispatch
def constant(like: Any, values: Any) -> Any:
    """Numbers of the operator (slopes, angles, a fixed matrix) as an array of the arithmetic of ``like``."""
    raise _unregistered("constant", like)


@singledispatch
def weight(like: Any, values: Any) -> Any:
    """A tensor of a network (probes, maps) in the arithmetic of ``like``: the tensor itself where that is a tensor."""
    return constant(like, values)


@singledispatch
def einsum(x: Any, equation: str, values: Any) -> Any:
    """``einsum(equation, x, values)`` for a tensor ``values`` of a network."""
    raise _unregistered("einsum", x)


@singledispatch
def spread(x: Any, count: int) -> Any:
    """``x`` (..., 1, c) said ``count`` times along its last but one axis."""
    raise _unregistered("spread", x)


@singledispatch
def turns(like: Any, share: Any) -> tuple[Any, Any]:
    """cos and sin of ``share`` of a full turn; floating arithmetics know 2 pi as a float only."""
    cos, sin = cos_sin(like, share, (2 * math.pi,))
    return cos[..., 0], sin[..., 0]


@singledispatch
def cos_sin(like: Any, places: Any, frequencies: tuple[float, ...]) -> tuple[Any, Any]:
    """cos and sin of ``places[..., None] * frequencies``; for tensors the angle is formed in float64."""
    raise _unregistered("cos_sin", like)


@singledispatch
def normalised_exp(scores: Any, allowed: Any, sink: bool) -> Any:
    """``exp(s_ij) / sum_k exp(s_ik)`` over the allowed keys of each row; 0 in a row without any. With ``sink`` the sum has one
    more term exp(0). This composition serves every arithmetic; tensors use the fused softmax."""
    top = row_max(select(scores, allowed, -math.inf))
    top = select(top, top > (0.0 if sink else -math.inf), 0.0)
    weights = select(exp(select(scores - top, allowed, 0.0)), allowed, 0.0)
    total = row_sum(weights)
    if sink:
        total = total + exp(0.0 - top)
    return weights / select(total, total > 0, 1.0)


@singledispatch
def roundoff(like: Any, float64: float, float32: float) -> float:
    """A threshold that depends on the precision of ``like``: one number for 64-bit floats, one for shorter ones."""
    return float64


exp.register(Tensor, in_whole_vectors(torch.exp))
log.register(Tensor, in_whole_vectors(torch.log))
sqrt.register(Tensor, torch.sqrt)  # rounded correctly, hence the same everywhere
tanh.register(Tensor, in_whole_vectors(torch.tanh))
sigmoid.register(Tensor, in_whole_vectors(torch.sigmoid))
erf.register(Tensor, in_whole_vectors(torch.erf))


rows_apart.register(Tensor, alignment.aligned_items)
products.register(Tensor, alignment.products)


@row_max.register
def _(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True)


@row_sum.register
def _(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


@select.register
def _(x: Tensor, condition: Tensor, otherwise: float) -> Tensor:
    return torch.where(condition, x, otherwise)


@join.register
def _(x: Tensor, *others: Tensor) -> Tensor:
    return torch.cat((x, *others), dim=-1)


class _MaskedSoftmax(torch.autograd.Function):
    """Softmax over the allowed scores alone, whatever the others are; a row with none is 0. Its derivative is the softmax's at that."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, allowed: Tensor) -> Tensor:
        # a row with nothing allowed gets numbers, for the last factor to drop
        masked = torch.where(allowed.any(-1, keepdim=True), -math.inf, 0.0).to(scores.dtype)
        return torch.softmax(torch.where(allowed, scores, masked), dim=-1) * allowed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradients[0], weights, -1, weights.dtype), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        (weights,) = ctx.saved_tensors
        moved = weights * tangents[0]
        return moved - weights * moved.sum(-1, keepdim=True)


@normalised_exp.register
def _(scores: Tensor, allowed: Tensor, sink: bool) -> Tensor:
    if not sink:
        return _MaskedSoftmax.apply(scores, allowed)  # type: ignore[return-value]
    scores = torch.cat((scores, torch.zeros_like(scores[..., :1])), dim=-1)
    allowed = torch.cat((allowed, torch.ones_like(allowed[..., :1])), dim=-1)
    return _MaskedSoftmax.apply(scores, allowed)[..., :-1]  # type: ignore[index]


@weight.register
def _(like: Tensor, values: Tensor) -> Tensor:
    return values


@einsum.register
def _(x: Tensor, equation: str, values: Tensor) -> Tensor:
    return torch.einsum(equation, x, values)


@spread.register
def _(x: Tensor, count: int) -> Tensor:
    return x.expand(*x.shape[:-2], count, x.shape[-1])


@constant.register
def _(like: Tensor, values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=like.dtype, device=like.device)  # never by way of float32


@cos_sin.register
def _(like: Tensor, places: Tensor, frequencies: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    angle = places[..., None].double() * torch.tensor(frequencies, dtype=torch.float64, device=like.device)
    return torch.cos(angle).to(like.dtype), torch.sin(angle).to(like.dtype)


@roundoff.register
def _(like: Tensor, float64: float, float32: float) -> float:
    return float64 if like.dtype == torch.float64 else float32
