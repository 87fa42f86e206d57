"""What the machines of the path tree share: the columns of a program, the folded run, the cost of the literal form.

Why they are exact, by induction on stages. At path (b1..bs) the state holds ``X0 M_b1 .. M_bs`` times the columns read there.
The root therefore holds the probes ``X0 P_1``, which give the operators of stage 1. Adding ``Op_b state[child b]`` over b gives, at
the path (b2..bs) below, ``sum_b Op_b X0 M_b M_b2 .. M_bs = X1 M_b2 .. M_bs``: the same statement for the network that starts at
stage 2 with the stream X1. The leaf holds ``X_S U0``, the output. (arXiv 2605.31423, Theorem 3.1, for attention only.)
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.backbones.folding import Trace, fold_in_blocks, fold_rows, routing_table, tree_plan
from anyformer.backbones.machine import Cost, Machine, Prepared
from anyformer.backbones.tree import Block, Coordinate, Tree
from anyformer.classes import StageClass
from anyformer.errors import OutsideClass
from anyformer.memory import require_memory
from anyformer.network import Network
from anyformer.operators import Context
from anyformer.program import Program
from anyformer.unrolling import unroll


class TreeMachine(Machine):
    """Base of the machines whose coordinates are those of the path tree, in some order. ``routing`` is all that the run reads."""

    routing: Tensor

    def __init__(self, recipe: Any):
        super().__init__(recipe)
        self.tree = Tree.of(recipe.network_class)
        self.register_buffer("routing", routing_table(self.tree))

    @abstractmethod
    def to_tree(self, columns: Float[Tensor, "... m"]) -> Float[Tensor, "... N"]:
        """The machine's coordinates in the order of the tree."""

    def tree_columns(self, program: Program) -> tuple[Tensor, Tensor | None]:
        positions = program.position_embedding
        return self.to_tree(program.embedding), None if positions is None else self.to_tree(positions)

    def run(self, tokens: Tensor, program: Program, ctx: Context, trace: Trace | None) -> Tensor:
        return fold_in_blocks(
            tree_plan(self.tree, self.routing), lambda t, c: self.to_tree(program.state(t, c)), tokens, ctx, trace
        )

    def prepare(self, program: Program) -> Prepared:
        columns, places = self.tree_columns(program)
        return Prepared(program, columns, places)

    def run_rows(self, tokens: Tensor, programs: Sequence[Prepared], ctx: Context) -> list[Tensor]:
        return fold_rows(tree_plan(self.tree, self.routing), [(p.tokens, p.positions) for p in programs], tokens, ctx)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_class(self)}; width {self.width}: {describe_tree(self.tree)})"


class InTreeOrder(TreeMachine):
    """Base of the machines whose coordinates are the tree's, in its order: the program's columns are the tree's."""

    @classmethod
    def width_of(cls, recipe: Any) -> int:
        return Tree.of(recipe.network_class).width

    def to_tree(self, columns: Tensor) -> Tensor:
        return columns

    def coordinate(self, i: int) -> Coordinate:
        return self.tree.coordinate(i)

    def blocks(self) -> Iterator[Block]:
        return self.tree.blocks()

    def write(self, network: Network, dtype: torch.dtype) -> Program:
        return columns_program(self, network, dtype)


def describe_class(machine: Machine) -> str:
    """``heads=2, layers=2, outputs=30``."""
    c = machine.network_class
    return f"heads={c.heads}, layers={c.layers}, outputs={c.outputs}"


def describe_tree(tree: Tree) -> str:
    """``3 levels, 4 leaves``."""
    leaves = 1
    for stage in tree.stages:
        leaves *= stage.count
    return f"{len(tree.widths)} levels, {leaves} leaves"


def columns_program(machine: Machine, network: Network, dtype: torch.dtype, at: Tensor | None = None) -> Program:
    """``E0 T_0`` as a program: constant columns apart, tree column i at coordinate ``at[i]`` (default: i)."""
    tree = Tree.of(machine.network_class)
    rows = network.embedding.shape[0] + (0 if network.positions is None else network.positions.shape[0])
    require_memory(8 * tree.width * (rows + 2 * network.embedding.shape[1]), "compiling this program")
    at = torch.arange(tree.width) if at is None else at
    return program_of_columns(machine, network, dtype, unroll(network), tree.constant_columns(), at)


def program_of_columns(
    machine: Machine,
    network: Network,
    dtype: torch.dtype,
    reads: Float[Tensor, "D N"],
    constant: Bool[Tensor, "N"],
    at: Int[Tensor, "N"],
) -> Program:
    """``E0 reads`` as a program: column i at coordinate ``at[i]``, those that are ``constant`` for every token apart."""
    general, fixed = (~constant).nonzero()[:, 0], constant.nonzero()[:, 0]
    if bool(reads[:-1, fixed].any()):
        raise OutsideClass(
            "the network is not well formed",
            ["its stages write into the constant (last) feature, which biases and constant maps read"],
        )
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


def tree_cost(tree: Tree, m: int, length: int, loop: tuple[int, int] | None = None) -> Cost:
    """Cost of the literal form. Ones: a read column each, a moved coordinate each; a gated unit of width w is w hidden
    units with three ones each. A skip connection holds no weight. A loop counts one layer's reads, and its moves once."""
    depth = len(tree.stages)
    weights = tree.outputs
    period, layers = loop or (0, 0)
    for s, stage in enumerate(tree.stages):
        if period <= s < period * layers:
            continue  # the same weights again
        skipped = s >= period and stage.residual is not None
        weights += stage.shared + _bank_weights(stage, tree.widths[s + 1], skipped)
    heads = max((s.attention.heads for s in tree.stages if s.attention), default=0)
    return Cost(m, length, m * length, depth, heads, weights, 4 * m)


def _bank_weights(stage: StageClass, w: int, skipped: bool) -> int:
    total = 0
    for branch in stage.branches:
        op = branch.operator
        if branch.is_gated:
            total += op.count * w * (op.reads + 2)
        elif not (skipped and branch.is_residual):
            total += op.count * (op.reads + w)
    return total
