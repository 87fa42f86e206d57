"""The folded run of a path tree: read the probes at the root, apply the operators, add the children into one.

    state <- sum_b Op_b(probes) state[child b]          the live state shrinks from width(s) to width(s+1)

Nothing is multiplied by a 0/1 matrix: routing is slicing, at the offsets of one integer table, the machine's only tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.backbones.tree import Tree
from anyformer.memory import require_memory
from anyformer.operators import Context, Mixing

COLUMNS = ("stage", "shared", "read_at", "reads", "count", "child_at", "child_width")


@dataclass
class Trace:
    """What a run did: ``patterns`` of every attention stage (batch, heads, n, n), ``reads`` by name, the logits,
    and for average-hard attention the smallest relative score ``gaps``."""

    logits: Tensor | None = None
    patterns: list[Float[Tensor, "batch heads n n"]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    reads: dict[str, Float[Tensor, "batch n reads"]] = field(default_factory=dict)


def routing_table(tree: Tree) -> Int[Tensor, "banks 7"]:
    """One row a bank: stage, width of the shared columns, where its reads start, reads a branch, branches, where its
    children start, width of a child."""
    rows = [
        [s, tree.stages[s].shared, bank.read_at, bank.branch.operator.reads, bank.branch.operator.count, bank.child_at,
        tree.widths[s + 1]] for s in range(len(tree.stages))
        for bank in tree.banks(s)
    ]  # fmt: skip
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, len(COLUMNS))


BLOCK_BYTES = 8 * 2**20
"""Bytes of state that a block of batch rows may take, so that it stays in the cache."""


def fold_in_blocks(
    tree: Tree,
    routing: Int[Tensor, "banks 7"],
    state: Callable[[Int[Tensor, "rows n"], Context], Float[Tensor, "rows n m"]],
    tokens: Int[Tensor, "batch n"],
    ctx: Context,
    trace: Trace | None = None,
) -> Float[Tensor, "batch n outputs"]:
    """Fold the batch block by block of rows; ``state(tokens, ctx)`` makes the first stream of a block. One block with a trace or a
    cache."""
    heads = max((stage.attention.heads for stage in tree.stages if stage.attention), default=0)
    whole = trace is not None or ctx.cache is not None
    least = tokens.shape[0] if whole else 1
    keys = ctx.key_positions.shape[1]
    require_memory(16 * least * heads * tokens.shape[1] * keys, f"attention over {keys} tokens")
    rows = max(1, BLOCK_BYTES // (4 * tree.width * tokens.shape[1]))
    if whole or rows >= tokens.shape[0]:
        return fold(tree, routing, state(tokens, ctx), ctx, trace)
    blocks = (slice(i, i + rows) for i in range(0, tokens.shape[0], rows))
    return torch.cat([fold(tree, routing, state(tokens[b], part := ctx.rows(b)), part) for b in blocks])


def fold(
    tree: Tree, routing: Int[Tensor, "banks 7"], state: Float[Tensor, "batch n m"], ctx: Context, trace: Trace | None = None
) -> Float[Tensor, "batch n outputs"]:
    """Run the tree on a state of width(0); returns the leaf, which is the output."""
    table = iter(routing.tolist())
    for s, stage in enumerate(tree.stages):
        total = None
        for index, branch in enumerate(stage.branches):
            _, shared, read_at, reads, count, child_at, width = next(table)
            own = state[..., read_at : read_at + count * reads].unflatten(-1, (count, reads))
            token_map = branch.operator(state[..., :shared] if shared else None, own, ctx)
            children = state[..., child_at : child_at + count * width].unflatten(-1, (count, width))
            total = token_map.contract(children, onto=total)
            if trace is not None:
                if token_map.pattern is not None:
                    trace.patterns.append(token_map.pattern)
                if isinstance(token_map, Mixing) and (gap := token_map.gap()) is not None:
                    trace.gaps.append(gap)
                if reads:
                    for g in range(count):
                        trace.reads[f"{tree.stage_name(s)}: {tree.branch_name(s, index, g)}"] = own[:, :, g]
        assert total is not None
        state = total
    if trace is not None:
        trace.logits = state
    return state
