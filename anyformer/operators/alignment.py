"""Batch invariance: what a row of a batch computes must not depend on which rows stand beside it, to the last bit.

Two things in a processor's libraries make it depend. A matrix product may round differently where its operands begin at other offsets from a
multiple of 64 bytes, or where it is one of many; and exp, tanh, .. are other code in the last few numbers of a tensor than in those before,
which fill whole vectors. So the run of a tree multiplies row by row, with operands that begin at multiples of 64 bytes, and transcendental
functions see whole vectors only. (One thread: with more, a tensor is also cut between threads.)
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

WORDS = 16
"""Numbers between two starts: 64 bytes of float32, 128 of float64."""

VECTOR = 64
"""A multiple of how many numbers a vectorised loop takes at once, on every processor."""


def aligned(like: Tensor, *shape: int) -> Float[Tensor, "*shape"]:
    """An empty tensor whose items along the first axis begin at multiples of 64 bytes."""
    size = math.prod(shape[1:])
    rows = like.new_empty(shape[0], -(-size // WORDS) * WORDS)
    return rows[:, :size].unflatten(1, shape[1:]) if len(shape) > 1 else rows[:, 0]


def aligned_copy(x: Tensor) -> Float[Tensor, "items *rest"]:
    """A copy whose items along the first axis begin at multiples of 64 bytes."""
    return aligned(x, *x.shape).copy_(x)


class _Contract(torch.autograd.Function):
    """``sum_g matrix_g values_g (+ onto)``, row by row and head by head: as fast as one batched product."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, values: Tensor, onto: Tensor | None) -> Tensor:
        ctx.save_for_backward(matrix, values)
        ctx.has_onto = onto is not None
        batch, count, queries, keys = matrix.shape
        weights = aligned_copy(matrix.reshape(batch * count, queries, keys))
        total = aligned(values, batch, queries, values.shape[3])
        for i in range(batch):
            for g in range(count):
                each, seen = weights[i * count + g], values[i, :, g]
                if g:
                    total[i].addmm_(each, seen)
                elif onto is None:
                    torch.mm(each, seen, out=total[i])
                else:
                    torch.addmm(onto[i], each, seen, out=total[i])
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        matrix, values = ctx.saved_tensors
        gradient = gradients[0][:, None]
        seen = values.swapaxes(1, 2)
        return gradient @ seen.mT, (matrix.mT @ gradient).swapaxes(1, 2), gradients[0] if ctx.has_onto else None


class _Products(torch.autograd.Function):
    """``q k^T`` over a batch and heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        items = [aligned_copy(x.flatten(0, 1)) for x in (q, k)]
        out = aligned(q, items[0].shape[0], q.shape[2], k.shape[2])
        return torch.bmm(items[0], items[1].mT, out=out).unflatten(0, q.shape[:2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ctx.saved_tensors
        return gradients[0] @ k, gradients[0].mT @ q


def contract(
    matrix: Float[Tensor, "batch count queries keys"],
    values: Float[Tensor, "batch keys count c"],
    onto: Float[Tensor, "batch queries c"] | None,
) -> Float[Tensor, "batch queries c"]:
    """``sum_g matrix_g values_g``, added to ``onto`` where that is given. ``values`` may be strided views of a state."""
    return _Contract.apply(matrix.expand(values.shape[0], values.shape[2], -1, -1), values, onto)  # type: ignore[return-value]


def products(
    q: Float[Tensor, "batch count queries d"], k: Float[Tensor, "batch count keys d"]
) -> Float[Tensor, "batch count queries keys"]:
    """``q k^T``."""
    return _Products.apply(q, k)  # type: ignore[return-value]


def in_whole_vectors(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An element-wise function that gives an element the same bits wherever it stands."""

    def padded(x: Tensor) -> Tensor:
        missing = -x.numel() % VECTOR
        if missing == 0 and x.is_contiguous():
            return function(x)
        return function(F.pad(x.reshape(-1), (0, missing)))[: x.numel()].view(x.shape)

    return padded
