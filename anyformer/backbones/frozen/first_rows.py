"""Layer 1 of a dense frozen machine: what it routes are few rows, whatever the batch, so its m x m products are of these alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.backbones.frozen.products import product
from anyformer.backbones.frozen.recipe import FrozenRecipe
from anyformer.backbones.frozen.tables import StreamTables
from anyformer.operators import Context


@dataclass(frozen=True, eq=False)
class FirstRows:
    """What layer 1 routes, as few rows: each of its inputs is ``s (token row + position row) - t gain + bias``, for two numbers s, t a place.

        sum_h A_h Y R_h = sum_h [A_h diag(s) O, A_h diag(s), -A_h t, A_h 1] ([token rows; position rows; gain; bias] R_h)       O: one-hot tokens

    so the m x m products are of vocab + n + 2 rows instead of batch n.
    """

    rows: Float[Tensor, "rows m"]
    routes: Sequence[Float[Tensor, "m m"]]
    tokens: Float[Tensor, "batch n vocab"]
    scale: Float[Tensor, "batch n"]
    shift: Float[Tensor, "batch n"]
    placed: bool

    @staticmethod
    def of(
        recipe: FrozenRecipe,
        routes: Sequence[Float[Tensor, "m m"]],
        tables: StreamTables,
        tokens: Int[Tensor, "batch n"],
        x: Float[Tensor, "batch n m"],
        ctx: Context,
    ) -> "FirstRows | None":
        """None where these are no fewer rows, and where sequences of the batch stand at different positions: their rows are not shared."""
        rows, places, norms = tables.tokens, tables.positions, tables.norms
        width = rows.shape[1]
        few = len(rows) + tokens.shape[1] + 2 < tokens.numel()
        if not few or (places is not None and bool((ctx.positions != ctx.positions[:1]).any())):
            return None
        gain, bias = (rows.new_ones(width), rows.new_zeros(width)) if norms is None else norms[0]
        listed = [rows] if places is None else [rows, places[ctx.positions[0]]]
        scale, shift = rows.new_ones(tokens.shape), rows.new_zeros(tokens.shape)
        if recipe.norm == "pre":
            mean = x.mean(-1)
            scale = torch.rsqrt(x.var(-1, correction=0) + recipe.norm_eps)
            shift = mean * scale
        else:
            gain, bias = torch.ones_like(gain), torch.zeros_like(bias)
        table = torch.cat([torch.cat(listed) * gain, gain[None], bias[None]])
        return FirstRows(table, routes, F.one_hot(tokens, len(rows)).to(rows.dtype), scale, shift, places is not None)

    def route(self, patterns: Tensor, onto: Tensor | None) -> Float[Tensor, "batch queries m"]:
        """``[onto +] sum_h A_h Y R_h``."""
        scaled = patterns * self.scale[:, None, None]
        parts = [scaled @ self.tokens[:, None], *([scaled] if self.placed else [])]
        parts += [-(patterns @ self.shift[:, None, :, None]), patterns.sum(-1, keepdim=True)]
        shares = torch.cat(parts, -1).transpose(1, 2).flatten(2)
        table = torch.cat([product(self.rows, route) for route in self.routes])
        return shares @ table if onto is None else torch.baddbmm(onto, shares, table.expand(len(shares), -1, -1))
