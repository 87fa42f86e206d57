"""The folded run of a tree: read the probes at the root, apply the operators, add the children into one.

    state <- sum_b Op_b(probes) state[child b]          the live state shrinks from width(s) to width(s+1)

Nothing is multiplied by a 0/1 matrix: routing is slicing, at the offsets of a plan. In a path tree every child is a whole node(s+1),
and the offsets are one integer table, the machine's only tensor. Where the composition of branches is known
(:mod:`anyformer.backbones.composed_tree`) a child holds some columns of node(s+1), and each segment of it is the sum of those that do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.backbones.tree import Tree
from anyformer.memory import require_memory
from anyformer.operators import Context, Mixing, TokenMap
from anyformer.operators.alignment import aligned

COLUMNS = ("stage", "shared", "read_at", "reads", "count", "child_at", "child_width")


@dataclass
class Trace:
    """What a run did: ``patterns`` of every attention stage (batch, heads, n, n), ``reads`` by name, the logits,
    and for average-hard attention the smallest relative score ``gaps``."""

    logits: Tensor | None = None
    patterns: list[Float[Tensor, "batch heads n n"]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    reads: dict[str, Float[Tensor, "batch n reads"]] = field(default_factory=dict)

    def note(
        self, names: Tree, s: int, bank: int, place: Sequence[int], own: Float[Tensor, "batch n count reads"], token_map: TokenMap
    ) -> None:
        """Keep what the branches ``place`` of a bank of stage s read and how they mixed."""
        if token_map.pattern is not None:
            self.patterns.append(token_map.pattern[:, list(place)] if len(place) < own.shape[2] else token_map.pattern)
        if isinstance(token_map, Mixing) and (gap := token_map.gap()) is not None:
            self.gaps.append(gap)
        for g in place if own.shape[3] else ():
            self.reads[f"{names.stage_name(s)}: {names.branch_name(s, bank, g)}"] = own[:, :, g]


def routing_table(tree: Tree) -> Int[Tensor, "banks 7"]:
    """One row a bank: stage, width of the shared columns, where its reads start, reads a branch, branches, where its
    children start, width of a child."""
    rows = [
        [s, tree.stages[s].shared, bank.read_at, bank.branch.operator.reads, bank.branch.operator.count, bank.child_at,
        tree.widths[s + 1]] for s in range(len(tree.stages))
        for bank in tree.banks(s)
    ]  # fmt: skip
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, len(COLUMNS))


Runs = tuple[tuple[int, int], ...]
"""Columns of a state, side by side: (start, length) each; start -1 means zeros."""


@dataclass(frozen=True)
class Move:
    """Branches ``first`` .. ``last - 1`` of a bank whose children stand side by side from ``at`` on, ``width`` columns each; the columns
    from ``offset`` on are added."""

    bank: int
    first: int
    last: int
    at: int
    width: int
    offset: int = 0


@dataclass(frozen=True)
class Segment:
    """Consecutive columns of the next state, and the children that add up to them."""

    length: int
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Step:
    """One stage of a run: where its norm and each of its banks reads, and what the next state consists of."""

    shared: Runs
    own: tuple[Runs, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Plan:
    """A run: stages and names of a ``tree``, the ``width`` of the first state, a step a stage, where the outputs stand at last."""

    tree: Tree
    width: int
    steps: tuple[Step, ...]
    outputs: Runs


def tree_plan(tree: Tree, routing: Int[Tensor, "banks 7"]) -> Plan:
    """The run of a path tree, from its table."""
    shared: dict[int, Runs] = {}
    own: list[list[Runs]] = [[] for _ in tree.stages]
    moves: list[list[Move]] = [[] for _ in tree.stages]
    table = iter(routing.tolist())
    for s, stage in enumerate(tree.stages):
        for bank in range(len(stage.branches)):
            _, norm, read_at, reads, count, child_at, width = next(table)
            shared[s] = ((0, norm),)
            own[s].append(((read_at, count * reads),))
            moves[s].append(Move(bank, 0, count, child_at, width))
    steps = (Step(shared[s], tuple(own[s]), (Segment(tree.widths[s + 1], tuple(moves[s])),)) for s in range(len(tree.stages)))
    return Plan(tree, tree.width, tuple(steps), ((0, tree.outputs),))


BLOCK_BYTES = 8 * 2**20
"""Bytes of state that a block of batch rows may take, so that it stays in the cache."""


def fold_in_blocks(
    plan: Plan,
    state: Callable[[Int[Tensor, "rows n"], Context], Float[Tensor, "rows n m"]],
    tokens: Int[Tensor, "batch n"],
    ctx: Context,
    trace: Trace | None = None,
) -> Float[Tensor, "batch n outputs"]:
    """Fold the batch block by block of rows; ``state(tokens, ctx)`` makes the first stream of a block. One block with a trace or a
    cache."""
    heads = max((stage.attention.heads for stage in plan.tree.stages if stage.attention), default=0)
    whole = trace is not None or ctx.cache is not None
    least = tokens.shape[0] if whole else 1
    keys = ctx.key_positions.shape[1]
    require_memory(16 * least * heads * tokens.shape[1] * keys, f"attention over {keys} tokens")
    rows = max(1, BLOCK_BYTES // (4 * max(plan.width, 1) * tokens.shape[1]))
    if whole or rows >= tokens.shape[0]:
        return fold(plan, state(tokens, ctx), ctx, trace)
    blocks = (slice(i, i + rows) for i in range(0, tokens.shape[0], rows))
    return torch.cat([fold(plan, state(tokens[b], part := ctx.rows(b)), part) for b in blocks])


@torch.no_grad()
def fold_rows(
    plan: Plan, tables: Sequence[tuple[Tensor | None, Tensor | None]], tokens: Int[Tensor, "batch n"], ctx: Context
) -> list[Float[Tensor, "1 n outputs"]]:
    """Fold a batch whose rows have programs of their own: ``tables`` holds each row's token columns (vocab, m) and position columns.
    Every row is what it is alone, bit for bit."""

    def first(rows: Int[Tensor, "rows n"], at: Context) -> Float[Tensor, "rows n m"]:
        numbers = rows[:, 0].tolist()
        like = tables[numbers[0]][0]
        assert like is not None
        state = aligned(like, *rows.shape, plan.width)
        for to, i in zip(state, numbers, strict=True):
            torch.index_select(tables[i][0], 0, tokens[i], out=to)  # type: ignore[arg-type]
        for to, places, i in zip(state, at.positions, numbers, strict=True):
            table = tables[i][1]
            if table is not None:
                to += table[places]
        return state

    numbers = torch.arange(len(tokens))[:, None].expand(tokens.shape)  # the rows' numbers, in the place of tokens
    return list(fold_in_blocks(plan, first, numbers, ctx).split(1))


def fold(
    plan: Plan, state: Float[Tensor, "batch n m"], ctx: Context, trace: Trace | None = None
) -> Float[Tensor, "batch n outputs"]:
    """Run a plan on its first state; returns the leaf, which is the output."""
    tree = plan.tree
    for s, (stage, step) in enumerate(zip(tree.stages, plan.steps, strict=True)):
        shared = _take(state, step.shared) if stage.shared else None
        maps = []
        for index, branch in enumerate(stage.branches):
            op = branch.operator
            own = _take(state, step.own[index]).unflatten(-1, (op.count, op.reads))
            token_map = op(shared, own, ctx)
            maps.append(token_map)
            if trace is not None:
                trace.note(tree, s, index, range(op.count), own, token_map)
        state = _join(state, [_total(maps, segment, state) for segment in step.segments])
    state = _take(state, plan.outputs)
    if trace is not None:
        trace.logits = state
    return state


def _total(maps: list[TokenMap], segment: Segment, state: Tensor) -> Tensor:
    """What the children add to a segment: ``sum_b Op_b state[child b, segment]``."""
    total = None
    for move in segment.moves:
        count = move.last - move.first
        children = state[..., move.at : move.at + count * move.width].unflatten(-1, (count, move.width))
        if segment.length < move.width:
            children = children[..., move.offset : move.offset + segment.length]
        total = maps[move.bank].part(move.first, move.last).contract(children, onto=total)
    assert total is not None
    return total


def _take(state: Tensor, runs: Runs) -> Tensor:
    """Columns of a state."""
    return _join(state, [state[..., a : a + n] if a >= 0 else state.new_zeros(*state.shape[:-1], n) for a, n in runs])


def _join(state: Tensor, parts: list[Tensor]) -> Tensor:
    """Parts of a state side by side; no copy of a single one."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=-1) if parts else state[..., :0]
