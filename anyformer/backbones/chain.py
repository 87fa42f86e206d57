"""The chain (arXiv 2605.31423, H = 1): L + 1 slots of width max(2d, d_in), weight-tied, R_V shifts every slot by one.

The path tree needs only 2Ld + d_in for the same class; this is the paper's own layout, at its width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anyformer.backbones.layouts import chain_literal
from anyformer.backbones.literal import LiteralTransformer
from anyformer.backbones.machine import Cost
from anyformer.backbones.tree import Block, Coordinate
from anyformer.backbones.tree_machine import TreeMachine, columns_program
from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.network import Network
from anyformer.operators import Attention
from anyformer.program import Program
from anyformer.recipe import Recipe


@dataclass(frozen=True)
class ChainRecipe(Recipe):
    """A single-head chain for an attention-only class with one head."""

    network_class: NetworkClass

    def __post_init__(self) -> None:
        problems = _chain_problems(self.network_class)
        if problems:
            raise OutsideClass("a chain holds attention-only classes with one head", problems)


class Chain(TreeMachine):
    """The paper's machine for one head. ``at`` (N,) is the coordinate of each tree column; the others are padding."""

    name = "chain"
    recipe_type = ChainRecipe
    at: Tensor

    def __init__(self, recipe: Any):
        super().__init__(recipe)
        self.slot = chain_slot(recipe.network_class)
        at = [len(block.path) * self.slot + i for block in self.tree.blocks() for i in range(block.count)]
        self.register_buffer("at", torch.tensor(at))

    @classmethod
    def recipe_for(cls, network_class: NetworkClass) -> ChainRecipe:
        return ChainRecipe(network_class.for_tree())

    @classmethod
    def width_of(cls, recipe: Any) -> int:
        return (len(recipe.network_class.stages) + 1) * chain_slot(recipe.network_class)

    @classmethod
    def cost_of(cls, recipe: Any, length: int) -> Cost:
        network_class, m = recipe.network_class, cls.width_of(recipe)
        reads = network_class.stages[0].probes
        weights = reads + (m - chain_slot(network_class)) + network_class.outputs
        return Cost(m, length, m * length, len(network_class.stages), 1, weights, 4 * m)

    def to_tree(self, columns: Tensor) -> Tensor:
        return columns[..., self.at]

    def coordinate(self, i: int) -> Coordinate:
        if not 0 <= i < self.width:
            raise AnyformerError(f"coordinate must lie in 0..{self.width - 1}, got {i}")
        found = (self.at == i).nonzero()
        if found.numel():
            return self.tree.coordinate(int(found[0]))
        return Coordinate(None, f"padding of slot {i // self.slot + 1}", ())

    def blocks(self) -> Iterator[Block]:
        for block in self.tree.blocks():
            start = len(block.path) * self.slot
            yield replace(block, start=start)
            if block.count < self.slot:
                yield Block("padding", block.path, start + block.count, self.slot - block.count)

    def write(self, network: Network, dtype: torch.dtype) -> Program:
        return columns_program(self, network, dtype, self.at)

    def literal(self) -> LiteralTransformer:
        """The dense form: one weight-tied layer, whose R_V is the shift by one slot."""
        return chain_literal(self.network_class, self.slot)


def chain_slot(network_class: NetworkClass) -> int:
    """max(2d, d_in)."""
    return max(network_class.stages[0].probes, network_class.outputs)


def _chain_problems(network_class: NetworkClass) -> list[str]:
    stages = network_class.stages
    if not stages:
        return ["there is no layer"]
    bare = [len(stage.branches) == 1 and isinstance(stage.branches[0].operator, Attention) for stage in stages]
    problems = []
    if not all(bare):
        problems.append("a stage is not one bank of bare attention heads (there is a residual, a norm or an MLP)")
    if any(stage.attention is not None and stage.attention.heads != 1 for stage in stages):
        problems.append(f"there are {network_class.heads} heads")
    if any(stage != stages[0] for stage in stages):
        problems.append("layers differ, and the weights are tied")
    return problems
