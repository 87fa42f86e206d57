"""The first step of the folded run, from the tables: a leaf's end of the tree depends on a row of the batch by its tokens alone.

    state(1)_i = sum_h sum_j A_h[i, j] (T_h[t_j] + P_h[j]) = sum_h C_h[i] T_h + A_h[i] P_h,      C_h[i, v] = sum of A_h[i, j] over j with t_j = v

So ``[C_1 .. C_H A_1 .. A_H]`` (batch n, H (V + n)) times the stacked tables is one large product, shared by all rows of the batch, and no
row of width m is ever gathered. It has (V + n) / n times the work of ``A_h`` times gathered rows and runs at the speed of large
products: taken where ``2 V <= n``. Under a causal mask the queries are cut in blocks of about 16, and a block does without the rows of P that
it cannot see.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.operators import Attention, Context

CUT = 16
"""About so many queries a cut: fewer would make small products, more would multiply by rows that no query sees."""

Cut = tuple[int, int, int]
"""Queries from .. to, and how many keys, from the first on, they may see."""


def shared_places(ctx: Context) -> Int[Tensor, "n"] | None:
    """The positions of the tokens, where all rows of the batch have the same."""
    positions = ctx.positions
    alike = len(positions) > 0 and (positions.stride(0) == 0 or bool((positions == positions[:1]).all()))
    return positions[0] if alike else None


def cuts(attention: Attention, places: Int[Tensor, "n"], queries: int | None) -> tuple[Cut, ...]:
    """The queries in blocks where none can see past itself, else whole; ``queries``: how many were chosen (None: all)."""
    n = len(places)
    if queries is not None:
        return ((0, queries, n),)
    if not attention.mask.causal or not bool((places.diff() > 0).all()):
        return ((0, n, n),)
    edges = [n * i // max(1, n // CUT) for i in range(max(1, n // CUT) + 1)]
    return tuple((start, end, end) for start, end in pairwise(edges))


def first_step(
    pattern: Float[Tensor, "batch heads q n"],
    tokens: Int[Tensor, "batch n"],
    table: Float[Tensor, "vocab children"],
    places: Float[Tensor, "n children"] | None,
    cut: tuple[Cut, ...],
    first: int,
) -> tuple[Float[Tensor, "batch q first"], Float[Tensor, "batch q rest"]]:
    """``sum_h A_h (T_h[tokens] + P_h)``, split after its first columns; ``table`` and ``places`` hold the heads' columns side by side."""
    chosen = F.one_hot(tokens, len(table)).to(pattern.dtype)
    return _FirstStep.apply(pattern, chosen, table, places, cut, first)  # type: ignore[return-value]


class _FirstStep(torch.autograd.Function):
    """States are kept query by query, not row by row of the batch: those of a cut lie side by side, and its product is written there."""

    @staticmethod
    def forward(
        ctx: Any, pattern: Tensor, chosen: Tensor, table: Tensor, places: Tensor | None, cut: tuple[Cut, ...], first: int
    ) -> tuple[Tensor, Tensor]:
        batch, heads, queries, _ = pattern.shape
        counts = (pattern.flatten(1, 2) @ chosen).unflatten(1, (heads, queries))
        width = table.shape[1] // heads
        state = table.new_empty(queries, batch, width)
        kept = []
        for start, end, keys in cut:
            weights = [counts[:, h, start:end].transpose(0, 1) for h in range(heads)]
            stacked = [*table.tensor_split(heads, 1)]
            if places is not None:
                weights += [pattern[:, h, start:end, :keys].transpose(0, 1) for h in range(heads)]
                stacked += places[:keys].tensor_split(heads, 1)
            left, right = torch.cat(weights, -1).flatten(0, 1), torch.cat(stacked)
            torch.mm(left, right, out=state[start:end].flatten(0, 1))
            kept += [left, right]
        ctx.save_for_backward(chosen, *kept)
        ctx.cut, ctx.shape, ctx.placed = cut, pattern.shape, places is not None
        state = state.transpose(0, 1)
        return state[..., :first], state[..., first:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        chosen, *kept = ctx.saved_tensors
        batch, heads, queries, n = ctx.shape
        vocab, width = chosen.shape[2], kept[1].shape[1]
        to_pattern, to_counts = chosen.new_zeros(ctx.shape), chosen.new_empty(batch, heads, queries, vocab)
        to_table, to_places = chosen.new_zeros(heads, vocab, width), chosen.new_zeros(heads, n, width)
        for (start, end, keys), left, right in zip(ctx.cut, kept[::2], kept[1::2], strict=True):
            gradient = torch.cat([g[:, start:end].transpose(0, 1) for g in gradients], -1).flatten(0, 1)
            to_left, to_right = gradient @ right.mT, left.mT @ gradient
            by_token, by_place = to_left.unflatten(0, (-1, batch)).tensor_split((heads * vocab,), 2)
            to_counts[:, :, start:end] = by_token.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
            to_table += to_right[: heads * vocab].unflatten(0, (heads, -1))
            if ctx.placed:
                to_pattern[:, :, start:end, :keys] = by_place.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
                to_places[:, :keys] += to_right[heads * vocab :].unflatten(0, (heads, -1))
        to_pattern.flatten(1, 2).baddbmm_(to_counts.flatten(1, 2), chosen.mT)
        side_by_side = [x.transpose(0, 1).flatten(1) for x in (to_table, to_places)]
        return to_pattern, None, side_by_side[0], side_by_side[1] if ctx.placed else None, None, None
