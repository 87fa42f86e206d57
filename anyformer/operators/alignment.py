"""Batch invariance: what a row of a batch computes must not depend on which rows stand beside it, to the last bit.

Two things in a processor's libraries make it depend. A matrix product may round differently where its operands begin at other offsets from a
multiple of 64 bytes, or where it is one of many; and exp, tanh, .. are other code in the last few numbers of a tensor than in those before,
which fill whole vectors. So the run of a tree multiplies row by row, with operands that begin at multiples of 64 bytes, and transcendental
functions see whole vectors only. (One thread: with more, a tensor is also cut between threads.)
"""

import math
from collections.abc import Callable

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


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd watches: then plain operations are used."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def in_whole_vectors(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An element-wise function that gives an element the same bits wherever it stands."""

    def padded(x: Tensor) -> Tensor:
        missing = -x.numel() % VECTOR
        if missing == 0 and x.is_contiguous():
            return function(x)
        return function(F.pad(x.reshape(-1), (0, missing)))[: x.numel()].view(x.shape)

    return padded
