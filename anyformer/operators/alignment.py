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
from torch.autograd import forward_ad

WORDS = 16
"""Numbers between two starts: 64 bytes of float32, 128 of float64. Of shorter ones there are as many as fill 64 bytes."""

VECTOR = 64
"""A multiple of how many numbers a vectorised loop takes at once, on every processor."""


def _words(like: Tensor) -> int:
    return max(WORDS, 64 // like.element_size())


def aligned(like: Tensor, *shape: int, lead: int = 1) -> Float[Tensor, "*shape"]:
    """An empty tensor whose items, indexed by the first ``lead`` axes, begin at multiples of 64 bytes."""
    item, words = math.prod(shape[lead:]), _words(like)
    if item % words == 0:  # then contiguous memory is aligned
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    strides, step = [], 1
    for axis in range(len(shape) - 1, -1, -1):
        if axis == lead - 1:
            step = -(-step // words) * words
        strides.insert(0, step)
        step *= shape[axis]
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)


def aligned_items(x: Float[Tensor, "*shape"], lead: int = 1) -> Float[Tensor, "*shape"]:
    """The same numbers, in memory where items, indexed by the first ``lead`` axes, begin at multiples of 64 bytes: copied only where they do
    not."""
    if x.is_contiguous() and math.prod(x.shape[lead:]) % _words(x) == 0 and x.data_ptr() % 64 == 0:
        return x
    return aligned(x, *x.shape, lead=lead).copy_(x)


class _Contract(torch.autograd.Function):
    """``sum_g matrix_g values_g (+ onto)``, row by row and head by head: as fast as one batched product."""

    @staticmethod
    def forward(matrix: Tensor, values: Tensor, onto: Tensor | None) -> Tensor:
        batch, count, queries, keys = matrix.shape
        weights = aligned_items(matrix.reshape(batch * count, queries, keys))
        total = aligned(values, batch, queries, values.shape[3])
        heads = iter(weights.unbind())
        for i, row in enumerate(total.unbind()):
            for g, seen in enumerate(values[i].unbind(1)):
                if g:
                    row.addmm_(next(heads), seen)
                elif onto is None:
                    torch.mm(next(heads), seen, out=row)
                else:
                    torch.addmm(onto[i], next(heads), seen, out=row)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        matrix, values, onto = inputs
        ctx.save_for_backward(matrix, values)
        ctx.save_for_forward(matrix, values)
        ctx.has_onto = onto is not None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        matrix, values = ctx.saved_tensors
        gradient = gradients[0][:, None]
        seen = values.swapaxes(1, 2)
        return gradient @ seen.mT, (matrix.mT @ gradient).swapaxes(1, 2), gradients[0] if ctx.has_onto else None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        matrix, values = ctx.saved_tensors
        d_matrix, d_values, d_onto = tangents
        parts = [] if d_onto is None else [d_onto]
        parts += [] if d_matrix is None else [(d_matrix @ values.swapaxes(1, 2)).sum(1)]
        parts += [] if d_values is None else [(matrix @ d_values.swapaxes(1, 2)).sum(1)]
        return sum(parts[1:], parts[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor | None) -> tuple[Tensor, int]:
        return _one_batch(_Contract.apply, info.batch_size, in_dims, inputs)


class _Products(torch.autograd.Function):
    """``q k^T`` over a batch and heads."""

    @staticmethod
    def forward(q: Tensor, k: Tensor) -> Tensor:
        items = [aligned_items(x, 2).flatten(0, 1) for x in (q, k)]
        out = aligned(q, *q.shape[:3], k.shape[2], lead=2)
        torch.bmm(items[0], items[1].mT, out=out.flatten(0, 1))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ctx.saved_tensors
        return gradients[0] @ k, gradients[0].mT @ q

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        q, k = ctx.saved_tensors
        parts = [a @ b.mT for a, b in ((tangents[0], k), (q, tangents[1])) if a is not None and b is not None]
        return sum(parts[1:], parts[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor | None) -> tuple[Tensor, int]:
        return _one_batch(_Products.apply, info.batch_size, in_dims, inputs)


def _one_batch(apply: Any, size: int, in_dims: tuple[int | None, ...], inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, int]:
    """A batch of batches is a batch: rows do not see each other."""
    wide = [
        x if x is None else (x.expand(size, *x.shape) if d is None else x.movedim(d, 0)).flatten(0, 1)
        for x, d in zip(inputs, in_dims, strict=True)
    ]
    return apply(*wide).unflatten(0, (size, -1)), 0


_transformed = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def _watched(*tensors: Tensor | None) -> bool:
    """Whether a derivative is being taken or a transformation applied. Where not, the forward alone saves what autograd's call costs."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    return _transformed() or getattr(forward_ad, "_current_level", 0) >= 0


def contract(
    matrix: Float[Tensor, "batch count queries keys"],
    values: Float[Tensor, "batch keys count c"],
    onto: Float[Tensor, "batch queries c"] | None,
) -> Float[Tensor, "batch queries c"]:
    """``sum_g matrix_g values_g``, added to ``onto`` where that is given. ``values`` may be strided views of a state."""
    run = _Contract.apply if _watched(matrix, values, onto) else _Contract.forward
    return run(matrix, values, onto)  # type: ignore[return-value]


def products(q: Float[Tensor, "#batch #count queries d"], k: Float[Tensor, "#batch #count keys d"]) -> Float[Tensor, "..."]:
    """``q k^T``; axes of size 1 in batch and count are as many as the other's."""
    if q.shape[:2] != k.shape[:2]:
        lead = torch.broadcast_shapes(q.shape[:2], k.shape[:2])
        q, k = (x.expand(*lead, *x.shape[2:]) for x in (q, k))
    run = _Products.apply if _watched(q, k) else _Products.forward
    return run(q, k)  # type: ignore[return-value]


def in_whole_vectors(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An element-wise function that gives an element the same bits wherever it stands."""

    def padded(x: Tensor) -> Tensor:
        missing = -x.numel() % VECTOR
        if missing == 0 and x.is_contiguous():
            return function(x)
        return function(F.pad(x.reshape(-1), (0, missing)))[: x.numel()].view(x.shape)

    return padded
