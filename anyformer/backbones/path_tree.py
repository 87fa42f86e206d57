"""Path-tree machines: every weight is 0 or 1, the program holds the path products (arXiv 2605.31423, Theorem 3.1 and after).

Why it is exact (induction on stages). Let the state hold, at path (b1..bs), ``X0 M_b1 .. M_bs`` times the columns read
there. Reading
the root gives the probes ``X0 P_1`` of stage 1, hence its operators. Adding ``Op_b state[child b]`` over b gives, at the path
(b2..bs) below, ``sum_b Op_b X0 M_b M_b2 .. M_bs = X1 M_b2 .. M_bs``: the same statement for the network that starts at stage
2 with the
stream X1. At the leaf it reads ``X_S U0``, the output. Only routing happens on the way: no rounding beyond the operators'.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anyformer.backbones.folding import Trace, fold_in_blocks, routing_table
from anyformer.backbones.layouts import chain_literal, folded_literal, looped_literal, masked_literal
from anyformer.backbones.literal import LiteralTransformer
from anyformer.backbones.machine import Cost, Machine
from anyformer.backbones.tree import Block, Coordinate, Tree
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.memory import require_memory
from anyformer.network import Network, NetworkClass, StageClass, inner_operator
from anyformer.operators import Attention, Context, Gate, Identity
from anyformer.program import Program
from anyformer.recipe import Recipe
from anyformer.unrolling import unroll


@dataclass(frozen=True)
class PathTreeRecipe(Recipe):
    """A path tree for a class."""

    network_class: NetworkClass


@dataclass(frozen=True)
class LoopedRecipe(Recipe):
    """A looped machine: ``period`` stages, one weight set for them, run ``layers`` times, then the remaining stages once."""

    network_class: NetworkClass
    period: int
    layers: int

    def __post_init__(self) -> None:
        if (self.period, self.layers) != find_loop(self.network_class.stages):
            raise AnyformerError(f"LoopedRecipe: the class does not repeat {self.period} stages {self.layers} times")


@dataclass(frozen=True)
class ChainRecipe(Recipe):
    """A single-head chain for an attention-only class with one head."""

    network_class: NetworkClass

    def __post_init__(self) -> None:
        problems = _chain_problems(self.network_class)
        if problems:
            raise OutsideClass("a chain holds attention-only classes with one head", problems)


def shrink(network_class: NetworkClass) -> NetworkClass:
    """The part of a class that a path tree depends on: stages and outputs. Features, vocabulary and positions are the
    program's."""
    return NetworkClass(network_class.stages, network_class.outputs)


def columns_program(machine: Machine, network: Network, dtype: torch.dtype, at: Tensor | None = None) -> Program:
    """``E0 T_0`` as a program: constant columns apart, tree column i at coordinate ``at[i]`` (default: i)."""
    tree = Tree.of(machine.network_class)
    rows = network.embedding.shape[0] + (0 if network.positions is None else network.positions.shape[0])
    require_memory(8 * tree.width * (rows + 2 * network.embedding.shape[1]), "compiling this program")
    constant = tree.constant_columns()
    reads = unroll(network)
    at = torch.arange(tree.width) if at is None else at
    general, fixed = (~constant).nonzero()[:, 0], constant.nonzero()[:, 0]
    live = reads if fixed.numel() == 0 else reads[:, general]
    positions = None if network.positions is None else (network.positions.double() @ live).to(dtype)
    return Program(
        recipe=machine.recipe,
        width=machine.width,
        tokens=(network.embedding.double() @ live).to(dtype),
        token_at=at[general],
        positions=positions,
        position_at=None if positions is None else at[general],
        constants=reads[-1, fixed].to(dtype) if fixed.numel() else None,
        constant_at=at[fixed] if fixed.numel() else None,
        token_names=network.token_names,
    )


class PathTree(Machine):
    """The path tree. Runs folded; :meth:`literal` gives the dense form, folded in place or masked as in the paper."""

    name = "path-tree"
    recipe_type = PathTreeRecipe
    routing: Tensor

    def __init__(self, recipe: Any):
        super().__init__(recipe)
        self.tree = Tree.of(recipe.network_class)
        self.register_buffer("routing", routing_table(self.tree))

    @classmethod
    def recipe_for(cls, network_class: NetworkClass, **options: Any) -> Recipe:
        no_options(cls, options)
        return PathTreeRecipe(shrink(network_class))

    @classmethod
    def width_of(cls, recipe: Any) -> int:
        return Tree.of(recipe.network_class).width

    @classmethod
    def cost_of(cls, recipe: Any, length: int) -> Cost:
        return tree_cost(Tree.of(recipe.network_class), cls.width_of(recipe), length)

    def coordinate(self, i: int) -> Coordinate:
        return self.tree.coordinate(i)

    def blocks(self) -> Iterator[Block]:
        return self.tree.blocks()

    def write(self, network: Network, dtype: torch.dtype) -> Program:
        return columns_program(self, network, dtype)

    def run(self, tokens: Tensor, program: Program, mask: Tensor | None, positions: Tensor | None, trace: Trace | None) -> Tensor:
        ctx = Context.of(tokens, mask, positions)
        return fold_in_blocks(self.tree, self.routing, program.state, tokens, ctx, trace)

    def literal(self, layout: str = "folded") -> LiteralTransformer:
        """``layout="folded"``: shifts into the place of one child, true skip connections. ``"masked"``: the paper's diagonal
        masks, every prefix keeps its own copy (no gates; the residual is one more head)."""
        if layout == "folded":
            return folded_literal(self.network_class)
        if layout == "masked":
            return masked_literal(self.network_class)
        raise AnyformerError(f'layout must be "folded" or "masked", got {layout!r}')

    def __repr__(self) -> str:
        widths = self.tree.widths
        leaves = 1
        for stage in self.tree.stages:
            leaves *= stage.count
        h, layers = self.network_class.heads, self.network_class.layers
        levels = f"{len(widths)} levels, {leaves} leaves"
        return f"{type(self).__name__}(heads={h}, layers={layers}, outputs={self.tree.outputs}; width {widths[0]}: {levels})"


class Looped(PathTree):
    """One weight set for all layers: after each layer every child is shifted to the root, so that all layers read the same
    coordinates. Same width and same columns as the path tree; its literal form has one layer that is applied L times."""

    name = "looped"
    recipe_type = LoopedRecipe

    @classmethod
    def recipe_for(cls, network_class: NetworkClass, **options: Any) -> Recipe:
        no_options(cls, options)
        period, layers = find_loop(network_class.stages)
        if layers == 1 and network_class.layers > 1:
            raise OutsideClass("a looped machine needs layers of one kind", ["the layers of this class differ"])
        return LoopedRecipe(shrink(network_class), period, layers)

    def literal(self, layout: str = "looped") -> LiteralTransformer:
        """The dense form: one layer's 0/1 matrices, used again and again."""
        if layout != "looped":
            raise AnyformerError(f'a looped machine has the layout "looped", got {layout!r}')
        return looped_literal(self.network_class, self.recipe.period, self.recipe.layers)

    @classmethod
    def cost_of(cls, recipe: Any, length: int) -> Cost:
        tree = Tree.of(recipe.network_class)
        return tree_cost(tree, tree.width, length, loop=(recipe.period, recipe.layers))


class Chain(PathTree):
    """The paper's machine for one head: L + 1 slots of width max(2d, d_in), weight-tied, R_V shifts every slot by one."""

    name = "chain"
    recipe_type = ChainRecipe

    def __init__(self, recipe: Any):
        super().__init__(recipe)
        self.slot = chain_slot(recipe.network_class)
        at = [s * self.slot + i for s, stage in enumerate(self.tree.stages) for i in range(stage.probes)]
        last = len(self.tree.stages) * self.slot
        self.register_buffer("at", torch.tensor(at + [last + i for i in range(self.tree.outputs)]))

    at: Tensor

    @classmethod
    def recipe_for(cls, network_class: NetworkClass, **options: Any) -> Recipe:
        no_options(cls, options)
        return ChainRecipe(shrink(network_class))

    @classmethod
    def width_of(cls, recipe: Any) -> int:
        return (len(recipe.network_class.stages) + 1) * chain_slot(recipe.network_class)

    @classmethod
    def cost_of(cls, recipe: Any, length: int) -> Cost:
        network_class, m = recipe.network_class, cls.width_of(recipe)
        reads = network_class.stages[0].probes
        weights = reads + (m - chain_slot(network_class)) + network_class.outputs
        return Cost(m, length, m * length, len(network_class.stages), 1, weights, 4 * m)

    def coordinate(self, i: int) -> Coordinate:
        if not 0 <= i < self.width:
            raise AnyformerError(f"coordinate must lie in 0..{self.width - 1}, got {i}")
        found = (self.at == i).nonzero()
        return (
            self.tree.coordinate(int(found[0]))
            if found.numel()
            else Coordinate(None, f"padding of slot {i // self.slot + 1}", ())
        )

    def blocks(self) -> Iterator[Block]:
        for block in self.tree.blocks():
            yield replace(block, start=len(block.path) * self.slot)
            if block.count < self.slot:
                yield Block("padding", block.path, len(block.path) * self.slot + block.count, self.slot - block.count)

    def write(self, network: Network, dtype: torch.dtype) -> Program:
        return columns_program(self, network, dtype, self.at)

    def run(self, tokens: Tensor, program: Program, mask: Tensor | None, positions: Tensor | None, trace: Trace | None) -> Tensor:
        ctx = Context.of(tokens, mask, positions)
        return fold_in_blocks(self.tree, self.routing, lambda t, c: program.state(t, c)[..., self.at], tokens, ctx, trace)

    def literal(self, layout: str = "chain") -> LiteralTransformer:
        """The dense form: one weight-tied layer, whose R_V is the shift by one slot."""
        if layout != "chain":
            raise AnyformerError(f'a chain has the layout "chain", got {layout!r}')
        return chain_literal(self.network_class, self.slot)


def chain_slot(network_class: NetworkClass) -> int:
    """max(2d, d_in)."""
    return max(network_class.stages[0].probes, network_class.outputs)


def _chain_problems(network_class: NetworkClass) -> list[str]:
    problems = [] if network_class.stages else ["there is no layer"]
    for s, stage in enumerate(network_class.stages):
        if len(stage.branches) != 1 or not isinstance(stage.branches[0].operator, Attention):
            problems.append(f"stage {s + 1} is not one bank of bare attention heads (no residual, norm or MLP)")
        elif stage.count != 1:
            problems.append(f"stage {s + 1} has {stage.count} heads")
        elif stage != network_class.stages[0]:
            problems.append(f"stage {s + 1} differs from stage 1; the weights are tied")
    return problems


def no_options(machine: type[Machine], options: dict[str, Any]) -> None:
    """Raise for options that a machine does not take."""
    if options:
        raise AnyformerError(f"a {machine.name} machine takes no option {', '.join(options)}")


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


def tree_cost(tree: Tree, m: int, length: int, loop: tuple[int, int] | None = None) -> Cost:
    """Cost of the literal form. Ones: a read column each, a moved coordinate each; a gated unit of width w is w hidden
    units with three ones each. A skip connection holds no weight. A loop counts one layer's reads, and its moves once."""
    depth = len(tree.stages)
    weights = tree.outputs
    period, layers = loop or (0, 0)
    for s, stage in enumerate(tree.stages):
        if period <= s < period * layers:
            continue  # the same weights again
        skipped = s >= period and any(_is_skip(b.operator, b.map) for b in stage.branches)
        weights += stage.shared + _bank_weights(stage, tree.widths[s + 1], skipped)
    heads = max((s.attention.heads for s in tree.stages if s.attention), default=0)
    return Cost(m, length, m * length, depth, heads, weights, 4 * m)


def _is_skip(operator: Any, kind: str) -> bool:
    return isinstance(operator, Identity) and kind == "identity"


def _bank_weights(stage: StageClass, w: int, skipped: bool) -> int:
    total = 0
    for branch in stage.branches:
        op = branch.operator
        if isinstance(inner_operator(op), Gate):
            total += op.count * w * (op.reads + 2)
        elif not (skipped and _is_skip(op, branch.map)):
            total += op.count * (op.reads + w)
    return total
