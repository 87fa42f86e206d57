"""The path tree (arXiv 2605.31423, Theorem 3.1, and beyond it): every weight is 0 or 1, the program holds the path products."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyformer.backbones.layouts import folded_literal, masked_literal
from anyformer.backbones.literal import LiteralTransformer
from anyformer.backbones.machine import Cost
from anyformer.backbones.tree import Block, Coordinate, Tree
from anyformer.backbones.tree_machine import TreeMachine, columns_program, tree_cost
from anyformer.errors import AnyformerError
from anyformer.network import Network, NetworkClass
from anyformer.program import Program
from anyformer.recipe import Recipe


@dataclass(frozen=True)
class PathTreeRecipe(Recipe):
    """A path tree for a class."""

    network_class: NetworkClass


class PathTree(TreeMachine):
    """The path tree. Runs folded; :meth:`literal` gives the dense form, folded in place or masked as in the paper."""

    name = "path-tree"
    recipe_type = PathTreeRecipe

    @classmethod
    def recipe_for(cls, network_class: NetworkClass) -> PathTreeRecipe:
        return PathTreeRecipe(network_class.for_tree())

    @classmethod
    def width_of(cls, recipe: Any) -> int:
        return Tree.of(recipe.network_class).width

    @classmethod
    def cost_of(cls, recipe: Any, length: int) -> Cost:
        return tree_cost(Tree.of(recipe.network_class), cls.width_of(recipe), length)

    def to_tree(self, columns: Tensor) -> Tensor:
        return columns

    def coordinate(self, i: int) -> Coordinate:
        return self.tree.coordinate(i)

    def blocks(self) -> Iterator[Block]:
        return self.tree.blocks()

    def write(self, network: Network, dtype: torch.dtype) -> Program:
        return columns_program(self, network, dtype)

    def literal(self, layout: str = "folded") -> LiteralTransformer:
        """``layout="folded"``: shifts into the place of one child, true skip connections. ``"masked"``: the paper's diagonal
        masks, every prefix keeps its own copy (no gates; the residual is one more head)."""
        if layout == "folded":
            return folded_literal(self.network_class)
        if layout == "masked":
            return masked_literal(self.network_class)
        raise AnyformerError(f'layout must be "folded" or "masked", got {layout!r}')
