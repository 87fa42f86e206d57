"""The run of a stream of width m: where a norm (or an MLP) looks at all coordinates, nothing folds.

    X <- [X +] sum_h A_h Y R_V[l,h]:   0/1 maps move blocks of columns, ``X[block] += A_h Y[block]``; random ones multiply, ``(A_h Y) R_V``

The same operators as everywhere form the patterns. Each kind of map is one differentiable step that copies no block.

What this computes is a Network, and a stated exception to running it as one: maps that gather and add columns, as a network's would, copy
what these do not, and a training step on 0/1 maps would fall below the speed that ``benchmarks/learning_step_is_fast.py`` claims.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.backbones.frozen.first_rows import FirstRows
from anyformer.backbones.frozen.folded import Observer, at_queries, attention_pattern
from anyformer.backbones.frozen.products import product
from anyformer.backbones.frozen.recipe import FrozenRecipe
from anyformer.backbones.frozen.tables import StreamTables
from anyformer.backbones.tree import Tree
from anyformer.operators import Context
from anyformer.operators.functions import scalar_function


class LayerMaps(ABC):
    """What a layer reads and how its heads route."""

    @abstractmethod
    def read(self, y: Float[Tensor, "batch n m"]) -> tuple[Float[Tensor, "batch n reads"], Float[Tensor, "batch n m"]]:
        """``Y [R_Q R_K]`` of all heads, and Y itself, to be routed."""

    @abstractmethod
    def route(self, patterns: Tensor, y: Tensor, onto: Tensor | None) -> Float[Tensor, "batch n m"]:
        """``[onto +] sum_h A_h Y R_V[h]``."""


@dataclass(frozen=True)
class BlockMaps(LayerMaps):
    """0/1 maps: reads are sums of the blocks at ``read_at``, head h carries the blocks at ``child_at[h]`` (``width`` columns each) in place."""

    probes: int
    read_at: tuple[int, ...]
    child_at: tuple[tuple[int, ...], ...]
    width: int

    def read(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return _Sum.apply(y, self.read_at, self.probes)  # type: ignore[return-value]

    def route(self, patterns: Tensor, y: Tensor, onto: Tensor | None) -> Tensor:
        return _MoveBlocks.apply(patterns, y, onto, self.child_at, self.width)  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class DenseMaps(LayerMaps):
    """Dense random maps: ``reads`` (m, H 2d) and ``routes`` (H, m, m), perhaps in a shorter dtype than the stream's."""

    reads: Float[Tensor, "m reads"]
    routes: Sequence[Float[Tensor, "m m"]]

    def read(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return product(y, self.reads), y

    def route(self, patterns: Tensor, y: Tensor, onto: Tensor | None) -> Tensor:
        return _Multiply.apply(patterns, y, onto, *self.routes)  # type: ignore[return-value]


def block_maps(recipe: FrozenRecipe) -> list[BlockMaps]:
    """Where the masked machine's blocks stand, layer by layer: the nodes at depth l - 1 hold what layer l reads."""
    tree, heads = Tree.of(recipe.network_class), recipe.attention.heads
    nodes, maps = [0], []
    for s in range(recipe.layers):
        child_at, width = tree.banks(s)[0].child_at, tree.widths[s + 1]
        children = tuple(tuple(at + child_at + h * width for at in nodes) for h in range(heads))
        maps.append(BlockMaps(tree.stages[s].probes, tuple(nodes), children, width))
        nodes = [at for head in children for at in head]
    return maps


class _Sum(torch.autograd.Function):
    """The sum of equally wide blocks of columns of y, and y itself: what comes back for it is the route's own, so the reads' gradient is
    added in place."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, starts: tuple[int, ...], width: int) -> tuple[Tensor, Tensor]:
        ctx.starts = starts
        total = y[..., starts[0] : starts[0] + width].clone()
        for at in starts[1:]:
            total += y[..., at : at + width]
        return total, y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        to_reads, to_y = gradients
        for at in ctx.starts:
            to_y[..., at : at + to_reads.shape[-1]] += to_reads
        return to_y, None, None


class _MoveBlocks(torch.autograd.Function):
    """``[onto +] sum_h A_h Y diag(mask_h)``: a mask is some blocks of columns."""

    @staticmethod
    def forward(
        ctx: Any, patterns: Tensor, y: Tensor, onto: Tensor | None, starts: tuple[tuple[int, ...], ...], width: int
    ) -> Tensor:
        out = y.new_zeros(*patterns.shape[::2], y.shape[2]) if onto is None else onto.clone()
        for h, blocks in enumerate(starts):
            for at in blocks:
                block = slice(at, at + width)
                out[..., block].baddbmm_(patterns[:, h], y[..., block])
        ctx.save_for_backward(patterns, y)
        ctx.starts, ctx.width, ctx.onto = starts, width, onto is not None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        patterns, y = ctx.saved_tensors
        gradient = gradients[0]
        to_y, to_patterns = torch.empty_like(y), torch.empty_like(patterns)
        end = 0
        for at in sorted(at for blocks in ctx.starts for at in blocks):  # columns that no head carries
            to_y[..., end:at] = 0
            end = at + ctx.width
        to_y[..., end:] = 0
        for h, blocks in enumerate(ctx.starts):
            for i, at in enumerate(blocks):
                block = slice(at, at + ctx.width)
                torch.bmm(patterns[:, h].mT, gradient[..., block], out=to_y[..., block])
                to_patterns[:, h].baddbmm_(gradient[..., block], y[..., block].mT, beta=int(i > 0))
        return to_patterns, to_y, gradient if ctx.onto else None, None, None


class _Multiply(torch.autograd.Function):
    """``[onto +] sum_h (A_h Y) R_h`` for fixed R_h (m, m)."""

    @staticmethod
    def forward(ctx: Any, patterns: Tensor, y: Tensor, onto: Tensor | None, *routes: Tensor) -> Tensor:
        out = y.new_zeros(*patterns.shape[::2], y.shape[2]) if onto is None else onto.clone()
        for h, route in enumerate(routes):
            _add_product(out, patterns[:, h] @ y, route)
        ctx.save_for_backward(patterns, y, *routes)
        ctx.onto = onto is not None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        patterns, y, *routes = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        to_y, to_patterns = torch.zeros_like(y), torch.empty_like(patterns)
        for h, route in enumerate(routes):
            mixed = product(gradient, route.mT)
            torch.bmm(mixed, y.mT, out=to_patterns[:, h])
            to_y.baddbmm_(patterns[:, h].mT, mixed)
        return to_patterns, to_y, gradient if ctx.onto else None, *(None for _ in routes)


def _add_product(onto: Tensor, x: Tensor, matrix: Tensor) -> None:
    """``onto += x matrix``."""
    if matrix.dtype == onto.dtype:
        onto.flatten(0, 1).addmm_(x.flatten(0, 1), matrix)
    else:
        onto += product(x, matrix)


def unfolded_logits(
    recipe: FrozenRecipe,
    maps: Sequence[LayerMaps],
    mlps: Sequence[tuple[Tensor, Tensor]],
    tables: StreamTables,
    tokens: Int[Tensor, "batch n"],
    ctx: Context,
    observe: Observer | None = None,
    queries: Int[Tensor, "batch q"] | None = None,
) -> Float[Tensor, "batch places out"]:
    """Logits, layer by layer. With ``queries`` the last layer is computed at these places alone."""
    x = F.embedding(tokens, tables.tokens)
    if tables.positions is not None:
        x = x + F.embedding(ctx.positions, tables.positions)
    weights = iter([(None, None)] * recipe.norms if tables.norms is None else [(gain, bias) for gain, bias in tables.norms])

    def normed(x: Tensor) -> Tensor:
        gain, bias = next(weights)
        return F.layer_norm(x, x.shape[-1:], gain, bias, recipe.norm_eps)

    pre, post = recipe.norm == "pre", recipe.norm == "post"
    for layer, layer_maps in enumerate(maps):
        y = normed(x) if pre else x
        own, y = layer_maps.read(y)
        own = own.unflatten(-1, (recipe.attention.heads, -1))
        pattern = attention_pattern(recipe.attention, own, ctx)
        if observe is not None:
            observe(layer, own, pattern)
        first, last = None, layer == recipe.layers - 1
        if layer == 0 and isinstance(layer_maps, DenseMaps):
            chosen = queries.shape[1] if last and queries is not None else None
            first = FirstRows.of(recipe, layer_maps.routes, tables, tokens, x, ctx, chosen)
        if last:
            pattern, x = at_queries(pattern, queries), at_queries(x, queries)
        onto = x if recipe.residual else None
        x = layer_maps.route(pattern, y, onto) if first is None else first.route(pattern, onto)
        x = normed(x) if post else x
        if mlps:
            into, out = mlps[layer]
            y = normed(x) if pre else x
            hidden = scalar_function(recipe.activation)(product(y, into))
            written = product(hidden, out)
            x = x + written if recipe.residual else written
            x = normed(x) if post else x
    return (normed(x) if pre else x) @ tables.readout
