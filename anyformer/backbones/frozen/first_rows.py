"""Layer 1 of a dense frozen machine: what it routes are few rows, whatever the batch, so its m x m products are of these alone.

Each of its inputs is ``s (token row + position row) gain - t gain + bias`` for two numbers s, t a place (a LayerNorm's; 1 and 0 without one):

    sum_h A_h Y R_h = sum_h A_h diag(s) (T_h[tokens] + P_h) - (A_h t) gain R_h + (A_h 1) bias R_h,      T_h, P_h = (rows gain) R_h

The first sum is the first step of the folded run (:mod:`.first_step`), with vocab + n rows times R_h instead of batch n.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.backbones.frozen.first_step import Cut, cuts, first_step, shared_places
from anyformer.backbones.frozen.products import product
from anyformer.backbones.frozen.recipe import FrozenRecipe
from anyformer.backbones.frozen.tables import StreamTables
from anyformer.operators import Context


@dataclass(frozen=True, eq=False)
class FirstRows:
    """What layer 1 routes: ``rows`` are those of tokens, then of ``count`` positions (0: none), then a norm's gain and bias."""

    rows: Float[Tensor, "rows m"]
    routes: Sequence[Float[Tensor, "m m"]]
    count: int
    tokens: Int[Tensor, "batch n"]
    scale: Float[Tensor, "batch n"]
    shift: Float[Tensor, "batch n"]
    cut: tuple[Cut, ...]

    @staticmethod
    def of(
        recipe: FrozenRecipe,
        routes: Sequence[Float[Tensor, "m m"]],
        tables: StreamTables,
        tokens: Int[Tensor, "batch n"],
        x: Float[Tensor, "batch n m"],
        ctx: Context,
        queries: int | None = None,
    ) -> "FirstRows | None":
        """``queries``: how many places are chosen (None: all). None where these are no fewer rows, and where sequences of the batch stand at
        different positions: their rows are not shared."""
        rows, order = tables.tokens, shared_places(ctx)
        if len(rows) + tokens.shape[1] + 2 >= tokens.numel() or order is None:
            return None
        placed = [] if tables.positions is None else [tables.positions[order]]
        gain, bias = rows.new_ones(rows.shape[1]), rows.new_zeros(rows.shape[1])
        scale, shift = rows.new_ones(tokens.shape), rows.new_zeros(tokens.shape)
        if recipe.norm == "pre":
            gain, bias = (gain, bias) if tables.norms is None else tables.norms[0]
            scale = torch.rsqrt(x.var(-1, correction=0) + recipe.norm_eps)
            shift = x.mean(-1) * scale
        listed = torch.cat([torch.cat([rows, *placed]) * gain, gain[None], bias[None]])
        return FirstRows(
            listed, routes, len(order) if placed else 0, tokens, scale, shift, cuts(recipe.attention, order, queries)
        )

    def route(self, patterns: Float[Tensor, "batch heads q n"], onto: Tensor | None) -> Float[Tensor, "batch q m"]:
        """``[onto +] sum_h A_h Y R_h``."""
        moved = torch.cat([product(self.rows, route) for route in self.routes], 1)  # the heads side by side
        table, places, norm = moved.split([len(moved) - self.count - 2, self.count, 2])
        scaled = patterns * self.scale[:, None, None]
        _, out = first_step(scaled, self.tokens, table, places if self.count else None, self.cut, 0)
        shares = torch.stack([-(patterns @ self.shift[:, None, :, None])[..., 0], patterns.sum(-1)], -1)
        out = out + shares.transpose(1, 2).flatten(2) @ norm.unflatten(1, (len(self.routes), -1)).transpose(0, 1).flatten(0, 1)
        return out if onto is None else onto + out
