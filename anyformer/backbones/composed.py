"""The machine of a class whose composition is known: a path tree without the subtrees that hold 0 in every program.

With T(s, F) the columns of node(s, F) and F_s what the writers of the stream after s stages feed, the state after s stages is
``X_s T(s, F_s)``: columns that a child lacks are 0 (the lemma and its proof: docs/maths.md, section 3).

Gradients through a program are the target's within the declared class: an entry that would make an undeclared product differ from 0 has
no part in it. A tolerance above 0 neglects products that are not zero: what that costs, only a measurement tells.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anyformer.backbones.composed_tree import EVERYTHING, ComposedTree, composed_tree
from anyformer.backbones.composition import Composition
from anyformer.backbones.folding import Trace, fold_in_blocks, fold_rows
from anyformer.backbones.layouts import composed_literal
from anyformer.backbones.literal import LiteralTransformer
from anyformer.backbones.machine import Cost, Machine, Prepared
from anyformer.backbones.tree import Block, Coordinate
from anyformer.backbones.tree_machine import describe_class, program_of_columns, tree_cost
from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.memory import approximate, require_memory
from anyformer.network import Network
from anyformer.operators import Context
from anyformer.program import Program
from anyformer.recipe import Recipe

MOST_SHOWN = 5
"""So many pairs of a refused target are named; the others are counted."""


@dataclass(frozen=True)
class ComposedRecipe(Recipe):
    """A class, and which of its branches feed which."""

    network_class: NetworkClass
    composition: Composition

    def __post_init__(self) -> None:
        if not isinstance(self.composition, Composition):
            raise AnyformerError(
                f"composition must be a Composition, got {self.composition!r:.60}; make one with Composition.of(target)"
            )
        self.composition.check(self.network_class)


class Composed(Machine):
    """``Composed.for_class(target, composition=...)``: the path tree of the declared graph. Without one, everything feeds everything,
    and the width is the path tree's. Targets with products that the declaration calls zero are refused."""

    name = "composition"
    recipe_type = ComposedRecipe

    def __init__(self, recipe: Any):
        super().__init__(recipe)
        self.tree = _tree(recipe)

    @classmethod
    def recipe_for(cls, network_class: NetworkClass, composition: Composition | None = None) -> ComposedRecipe:
        return ComposedRecipe(network_class.for_tree(), Composition() if composition is None else composition)

    @classmethod
    def least(cls, network_class: NetworkClass) -> tuple[Recipe, dict[str, Any]]:
        return cls.recipe_for(network_class), {"note": "if everything feeds everything; a known composition makes it narrower"}

    @classmethod
    def width_of(cls, recipe: Any) -> int:
        return _tree(recipe).total

    @classmethod
    def cost_of(cls, recipe: Any, length: int) -> Cost:
        tree = _tree(recipe)
        full = tree_cost(tree.names, tree.total, length)
        return full if tree.complete else replace(full, nonzero_weights=_weights(tree))

    def tree_columns(self, program: Program) -> tuple[Tensor, Tensor | None]:
        full = composed_tree(self.network_class, Composition())
        rows = program.vocab + (0 if program.positions is None else program.positions.shape[0])
        require_memory(8 * full.total * (rows + 1), f"this program in the {approximate(full.total)} columns of the path tree")
        runs = self.tree.inside(full, 0, self.tree.first, EVERYTHING)
        at = torch.cat([torch.arange(to, to + n) for _, to, n in runs]) if runs else torch.zeros(0, dtype=torch.long)

        def place(columns: Tensor) -> Tensor:
            return columns.new_zeros(columns.shape[0], full.total).index_copy(1, at, columns)

        positions = program.position_embedding
        return place(program.embedding), None if positions is None else place(positions)

    def run(self, tokens: Tensor, program: Program, ctx: Context, trace: Trace | None) -> Tensor:
        return fold_in_blocks(self.tree.plan, program.state, tokens, ctx, trace)

    def prepare(self, program: Program) -> Prepared:
        return Prepared(program, program.embedding, program.position_embedding)

    def run_rows(self, tokens: Tensor, programs: Sequence[Prepared], ctx: Context) -> list[Tensor]:
        return fold_rows(self.tree.plan, [(p.tokens, p.positions) for p in programs], tokens, ctx)

    def coordinate(self, i: int) -> Coordinate:
        return self.tree.coordinate(i)

    def blocks(self) -> Iterator[Block]:
        return self.tree.blocks()

    def literal(self) -> LiteralTransformer:
        """The dense form: each child moves to where the next stage reads its columns; a true skip where the residual child is the
        whole of the next root."""
        return composed_literal(self.network_class, self.recipe.composition)

    def write(self, network: Network, dtype: torch.dtype) -> Program:
        neglected = self._judge(network)
        rows = network.embedding.shape[0] + (0 if network.positions is None else network.positions.shape[0])
        require_memory(8 * self.width * (rows + 2 * network.embedding.shape[1]), "compiling this program")
        reads, constant = composed_columns(self.tree, network)
        program = program_of_columns(self, network, dtype, reads, constant, torch.arange(self.width))
        tolerance = self.recipe.composition.tolerance
        return program if not tolerance else replace(program, provenance={"tolerance": tolerance, **neglected})

    def _judge(self, network: Network) -> dict[str, Any]:
        """How many products were neglected and the largest relative size; raises where one is above the tolerance."""
        tolerance = self.recipe.composition.tolerance
        found = list(self.recipe.composition.undeclared(network))
        wrong = sorted((pair for pair in found if not pair[2] <= tolerance), key=lambda pair: -pair[2])
        if wrong:
            reasons = [f"{writer} feeds {reader} (relative size {size:.1e})" for writer, reader, size in wrong[:MOST_SHOWN]]
            more = len(wrong) - MOST_SHOWN
            raise OutsideClass(
                f"the target is outside of the declared composition: {len(wrong)} products should be zero",
                reasons + ([f"and {more} more"] if more > 0 else []),
            )
        return {"neglected_products": len(found), "largest_neglected_product": max((size for _, _, size in found), default=0.0)}

    def __repr__(self) -> str:
        full = approximate(self.tree.names.width)
        return f"Composed({describe_class(self)}; width {self.width}, all paths: {full})"


def _tree(recipe: ComposedRecipe) -> ComposedTree:
    return composed_tree(recipe.network_class, recipe.composition)


def composed_columns(tree: ComposedTree, network: Network) -> tuple[Float[Tensor, "D m"], Bool[Tensor, "m"]]:
    """T(0, F_0) in float64, right to left with one node for each (s, F), and which of its columns are the same for every token."""
    S = len(tree.stages)
    levels: list[set[int]] = [{tree.first}]
    for s in range(S):
        levels.append({child.feeds for node in levels[s] for child in tree.children(s, node)})
    final = network.final_readout().double()
    nodes = {F: (_pick(final, tree.columns(S, F)), torch.zeros(tree.reads(S, F), dtype=torch.bool)) for F in levels[S]}
    for s in reversed(range(S)):
        stage, known = network.stages[s], tree.stages[s]
        probes = torch.cat([p.double() for p in stage.probes()] or [final.new_zeros(_rows(network, s), 0)], dim=1)
        fixed = known.constant_reads()
        above = {}
        for F in levels[s]:
            columns, flags = [_pick(probes, tree.columns(s, F))], [_pick(fixed, tree.columns(s, F))]
            for (bank, feeds), group in groupby(tree.children(s, F), key=lambda child: (child.bank, child.feeds)):
                branches = [child.g for child in group]
                reads, below = nodes[feeds]
                columns.append(stage.branches[bank].map.some(branches).pull(reads).permute(1, 0, 2).flatten(1))
                constant = known.branches[bank].map == "constant"
                flags.append((torch.ones_like(below) if constant else below).repeat(len(branches)))
            above[F] = torch.cat(columns, dim=1), torch.cat(flags)
        nodes = above
    return nodes[tree.first]


def _rows(network: Network, s: int) -> int:
    """Features of the stream that stage s reads."""
    if s == 0:
        return network.embedding.shape[1]
    return network.stages[s - 1].width


def _pick(columns: Tensor, runs: list[tuple[int, int]]) -> Tensor:
    """Runs of the last axis, side by side."""
    return torch.cat([columns[..., a:b] for a, b in runs] or [columns[..., :0]], dim=-1)


def _weights(tree: ComposedTree) -> int:
    """Ones of the literal form: a read column each, a moved coordinate each; a gated unit of width w is w hidden units."""
    S = len(tree.stages)
    weights = tree.reads(S, tree.roots[S])
    for s, stage in enumerate(tree.stages):
        root = tree.roots[s]
        width = tree.width(s + 1, tree.roots[s + 1])
        children = {(c.bank, c.g): c.width for c in tree.children(s, root)}
        skipped = stage.residual if stage.residual is not None and children.get((stage.residual, 0), 0) == width else None
        weights += _overlap(tree.columns(s, root), 0, stage.shared)
        at = stage.shared
        for bank, branch in enumerate(stage.branches):
            for g in range(branch.operator.count):
                reads = _overlap(tree.columns(s, root), at, at + branch.operator.reads)
                at += branch.operator.reads
                w = children.get((bank, g), 0)
                if branch.is_gated:
                    weights += w * (reads + 2)
                elif bank != skipped:
                    weights += reads + w
    return weights


def _overlap(runs: list[tuple[int, int]], start: int, stop: int) -> int:
    """How many of start .. stop - 1 lie in the runs."""
    return sum(max(0, min(last, stop) - max(first, start)) for first, last in runs)
