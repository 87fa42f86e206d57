"""The tree's run for learning: the read-out is multiplied into the leaves, and a step of the fold is differentiated as one thing.

    state(s) = [ reads of layer s+1 | out columns | children ],     state(s+1) = sum_h (A_h [+ I]) child_h,      leaf = E_leaf U_leaf

Without a norm the stream of width m is never needed: ``U`` is linear and reads each leaf after its last layer, so its product
with the leaf's columns may be taken before the run. With a true skip (0/1 maps) a block outlives the layer that read it, and
``U`` reads it at the end: each node then has ``out`` more columns, ``E_reads U_reads``, that are added to the logits. Reads and
children are kept apart, so that no gradient is ever padded with zeros to the width of a state, and the first step is taken from the tables
(:mod:`.first_step`). Equal to the literal machine, gradients included (tested to 1e-10).

It is the folding of :mod:`anyformer.backbones.folding` written for gradients, and a stated exception to "one folded tree": a step through
``folding.fold`` pads gradients and copies children, and would fall below the speed that ``benchmarks/learning_step_is_fast.py`` claims.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.backbones.frozen.first_step import cuts, first_step, shared_places
from anyformer.backbones.frozen.recipe import FrozenRecipe
from anyformer.backbones.frozen.tables import FoldedTables, node_columns
from anyformer.operators import Attention, Context

Observer = Callable[[int, Tensor, Tensor], None]
"""Is told a layer, its heads' reads (batch, n, heads, reads) and its patterns."""


class _Step(torch.autograd.Function):
    """``sum_h A_h child_h``, split after its first columns: patterns (b, H, q, n), children (b, n, H w) -> (b, q, first), (b, q, w - first)."""

    @staticmethod
    def forward(ctx: Any, patterns: Tensor, children: Tensor, first: int) -> tuple[Tensor, Tensor]:
        batch, heads, queries, _ = patterns.shape
        state = children.new_empty(batch, queries, children.shape[2] // heads)
        for h, child in enumerate(children.tensor_split(heads, 2)):
            state.baddbmm_(patterns[:, h], child, beta=1 if h else 0)
        ctx.save_for_backward(patterns, children)
        return state[..., :first], state[..., first:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        patterns, children = ctx.saved_tensors
        heads = patterns.shape[1]
        gradient = torch.cat(gradients, 2)
        to_patterns, to_children = torch.empty_like(patterns), torch.empty_like(children)
        each, to_each = (x.tensor_split(heads, 2) for x in (children, to_children))
        for h in range(heads):
            torch.bmm(gradient, each[h].mT, out=to_patterns[:, h])
            torch.bmm(patterns[:, h].mT, gradient, out=to_each[h])
        return to_patterns, to_children, None


def folded_logits(
    recipe: FrozenRecipe,
    tables: FoldedTables,
    tokens: Int[Tensor, "batch n"],
    ctx: Context,
    observe: Observer | None = None,
    queries: Int[Tensor, "batch q"] | None = None,
) -> Float[Tensor, "batch places out"]:
    """Logits from the tables of reads (a masked machine's or a random one's); with ``queries`` those of these places alone."""
    table, places = tables.reads, tables.places
    heads, out = recipe.attention.heads, recipe.network_class.outputs
    probes, kept = node_columns(recipe)
    own_columns, children = slice(probes + kept), slice(probes + kept, None)
    here = _rows(tokens, table[:, own_columns], None if places is None else places[:, own_columns], ctx)
    order = shared_places(ctx) if 2 * len(table) <= tokens.shape[1] else None
    rest = None if order is not None else _rows(tokens, table[:, children], None if places is None else places[:, children], ctx)
    logits: Any = 0
    for layer in range(recipe.layers):
        own = here[..., :probes].unflatten(-1, (heads, -1))
        pattern = attention_pattern(recipe.attention, own, ctx)
        if observe is not None:
            observe(layer, own, pattern)
        if kept:
            logits = logits + at_queries(here[..., probes:], queries)
            pattern = pattern + torch.eye(tokens.shape[1], dtype=pattern.dtype, device=pattern.device)
        last = layer == recipe.layers - 1
        if last:
            pattern = at_queries(pattern, queries)
        first = out if last else probes + kept
        if rest is None:
            assert order is not None
            cut = cuts(recipe.attention, order, pattern.shape[2] if last and queries is not None else None)
            at = None if places is None else F.embedding(order, places[:, children])
            here, rest = first_step(pattern, tokens, table[:, children], at, cut, first)
        else:
            here, rest = _Step.apply(pattern, rest, first)  # type: ignore[misc]
    return logits + here


def _rows(tokens: Tensor, table: Tensor, places: Tensor | None, ctx: Context) -> Float[Tensor, "batch n columns"]:
    """Each token's row of the table, plus its place's."""
    rows = F.embedding(tokens, table)
    return rows if places is None else rows + F.embedding(ctx.positions, places)


def at_queries(x: Float[Tensor, "batch *rest"], queries: Int[Tensor, "batch q"] | None) -> Float[Tensor, "batch *rows"]:
    """The rows (axis -2) of some places of each sequence; all of them for None."""
    if queries is None:
        return x
    index = queries.reshape(len(queries), *[1] * (x.ndim - 3), -1, 1).expand(*x.shape[:-2], -1, x.shape[-1])
    return x.gather(-2, index)


def attention_pattern(
    attention: Attention, own: Float[Tensor, "batch n heads reads"], ctx: Context
) -> Float[Tensor, "batch heads n n"]:
    """What the heads make of their reads."""
    return attention(None, own, ctx).weights
