"""The looped machine (arXiv 2605.31423, weight tying): one weight set for all layers.

After each layer every child is shifted to the root, so that all layers read the same coordinates. Width and columns are the path
tree's; the literal form has one layer, applied L times.
"""

from dataclasses import dataclass
from typing import Any

from anyformer.backbones.layouts import looped_literal
from anyformer.backbones.literal import LiteralTransformer
from anyformer.backbones.machine import Cost
from anyformer.backbones.tree import Tree
from anyformer.backbones.tree_machine import InTreeOrder, tree_cost
from anyformer.classes import NetworkClass, StageClass
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.recipe import Recipe


@dataclass(frozen=True)
class LoopedRecipe(Recipe):
    """``period`` stages, one weight set for them, run ``layers`` times; then the remaining stages once."""

    network_class: NetworkClass
    period: int
    layers: int

    def __post_init__(self) -> None:
        if (self.period, self.layers) != find_loop(self.network_class.stages):
            raise AnyformerError(f"LoopedRecipe: the class does not repeat {self.period} stages {self.layers} times")


class Looped(InTreeOrder):
    """One weight set for all layers."""

    name = "looped"
    recipe_type = LoopedRecipe

    @classmethod
    def recipe_for(cls, network_class: NetworkClass) -> LoopedRecipe:
        known = network_class.for_tree()
        period, layers = find_loop(known.stages)
        if layers == 1 and known.layers > 1:
            raise OutsideClass("a looped machine needs layers of one kind", ["the layers of this class differ"])
        return LoopedRecipe(known, period, layers)

    @classmethod
    def cost_of(cls, recipe: Any, length: int) -> Cost:
        return tree_cost(Tree.of(recipe.network_class), cls.width_of(recipe), length, loop=(recipe.period, recipe.layers))

    def literal(self) -> LiteralTransformer:
        """The dense form: one layer's 0/1 matrices, used again and again."""
        return looped_literal(self.network_class, self.recipe.period, self.recipe.layers)


def find_loop(stages: tuple[StageClass, ...]) -> tuple[int, int]:
    """(period, layers): the shortest period whose repetition from the start covers the most stages; the rest runs once."""
    best, covered = (len(stages), 1), 0
    for period in range(1, len(stages) // 2 + 1):
        layers = 1
        while stages[layers * period : (layers + 1) * period] == stages[:period]:
            layers += 1
        if layers > 1 and layers * period > covered:
            best, covered = (period, layers), layers * period
        if period >= len(stages) - covered:
            break  # a longer period could cover no more
    return best
