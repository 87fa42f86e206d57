"""The dense form of the machines for learning, from the definitions: every map a matrix, norms written out. The oracle of the fast runs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.backbones.frozen.recipe import FrozenRecipe
from anyformer.backbones.literal import LiteralBank, first_state, gate


class LiteralFrozen(nn.Module):
    """``banks`` hold R_Q, R_K, R_V of each layer, ``mlps`` W_1 and W_2; the read-out and the norms' weights are the program's.

    >>> machine.literal()(tokens, program)      # logits (batch, n, out)
    """

    def __init__(self, recipe: FrozenRecipe, banks: Sequence[LiteralBank], mlps: Sequence[tuple[Tensor, Tensor]]):
        super().__init__()
        self.recipe, self.mlps = recipe, tuple(mlps)
        self.banks = nn.ModuleList(banks)

    def forward(
        self,
        tokens: Tensor,
        program: Any,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        patterns: list[Tensor] | None = None,
    ) -> Tensor:
        """Logits of a program; ``patterns``, a list, receives each layer's patterns."""
        recipe = self.recipe
        z, ctx = first_state(tokens, program, mask, positions)
        used = 0

        def norm(x: Tensor) -> Tensor:
            nonlocal used
            centred = x - x.mean(-1, keepdim=True)
            out = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + recipe.norm_eps)
            if program.norms is not None:
                out = out * program.norms[used, 0] + program.norms[used, 1]
            used += 1
            return out

        for i, bank in enumerate(self.banks):
            attended = bank(norm(z) if recipe.norm == "pre" else z, None, ctx, patterns)
            z = z + attended if recipe.residual else attended
            z = norm(z) if recipe.norm == "post" else z
            if self.mlps:
                up, down = (w.to(z.dtype) for w in self.mlps[i])
                written = gate(recipe.activation, (norm(z) if recipe.norm == "pre" else z) @ up) @ down
                z = z + written if recipe.residual else written
                z = norm(z) if recipe.norm == "post" else z
        return (norm(z) if recipe.norm == "pre" else z) @ program.readout
