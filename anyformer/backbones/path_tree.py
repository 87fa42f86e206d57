"""The path tree (arXiv 2605.31423, Theorem 3.1, and beyond it): every weight is 0 or 1, the program holds the path products."""

from dataclasses import dataclass
from typing import Any

from anyformer.backbones.layouts import folded_literal, masked_literal
from anyformer.backbones.literal import LiteralTransformer
from anyformer.backbones.machine import Cost
from anyformer.backbones.tree import Tree
from anyformer.backbones.tree_machine import InTreeOrder, tree_cost
from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError
from anyformer.recipe import Recipe


@dataclass(frozen=True)
class PathTreeRecipe(Recipe):
    """A path tree for a class."""

    network_class: NetworkClass


class PathTree(InTreeOrder):
    """The path tree. Runs folded; :meth:`literal` gives the dense form, folded in place or masked as in the paper."""

    name = "path-tree"
    recipe_type = PathTreeRecipe

    @classmethod
    def recipe_for(cls, network_class: NetworkClass) -> PathTreeRecipe:
        return PathTreeRecipe(network_class.for_tree())

    @classmethod
    def cost_of(cls, recipe: Any, length: int) -> Cost:
        return tree_cost(Tree.of(recipe.network_class), cls.width_of(recipe), length)

    def literal(self, layout: str = "folded") -> LiteralTransformer:
        """``layout="folded"``: shifts into the place of one child, true skip connections. ``"masked"``: the paper's diagonal
        masks, every prefix keeps its own copy (no gates; the residual is one more head)."""
        if layout == "folded":
            return folded_literal(self.network_class)
        if layout == "masked":
            return masked_literal(self.network_class)
        raise AnyformerError(f'layout must be "folded" or "masked", got {layout!r}')
