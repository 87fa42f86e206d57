"""The stored-program machine: a fixed 0/1 transformer whose width is about the target's number of parameters, its depth O(L).

The target's parameters are coordinates of the stream in which every token has the same number; gated units with identity activation
multiply them (:mod:`anyformer.backbones.stored.layout`). Multiplication in the backbone leaves the class of attention-only machines, which is
why the bound m >= H^(L/2) of arXiv 2605.31423 (Theorem 4.1) does not hold here. Ours; not in that paper.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.backbones.folding import Trace
from anyformer.backbones.machine import Cost, Machine
from anyformer.backbones.stored.engine import Engine
from anyformer.backbones.stored.layout import Layout
from anyformer.backbones.stored.literal import literal_costs, stored_literal
from anyformer.backbones.stored.placing import is_neutral, is_whole, place
from anyformer.backbones.stored.writing import read_network, write_constants
from anyformer.backbones.tree import Block, Coordinate
from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError
from anyformer.memory import approximate, require_memory
from anyformer.network import Network
from anyformer.operators import Context
from anyformer.program import Program
from anyformer.recipe import Recipe


@dataclass(frozen=True)
class StoredRecipe(Recipe):
    """A stored-program machine for a class; vocabulary and positions are the program's."""

    network_class: NetworkClass

    def __post_init__(self) -> None:
        Layout(self.network_class)


class StoredProgram(Machine):
    """The machine of linear width. Holds every target of its class, and through padding smaller ones: fewer layers, heads, units, outputs."""

    name = "stored-program"
    places = True
    recipe_type = StoredRecipe

    def __init__(self, recipe: Any):
        super().__init__(recipe)
        self.layout = Layout(recipe.network_class)
        self.engine = Engine(self.layout)

    @classmethod
    def recipe_for(cls, network_class: NetworkClass) -> StoredRecipe:
        c = network_class
        return StoredRecipe(NetworkClass(c.stages, c.outputs, c.features, constant=c.constant))

    @classmethod
    def width_of(cls, recipe: Any) -> int:
        return Layout(recipe.network_class).width

    @classmethod
    def cost_of(cls, recipe: Any, length: int) -> Cost:
        layout = Layout(recipe.network_class)
        stored = layout.constants + layout.width_in
        depth, weights = literal_costs(layout)
        heads = max(recipe.network_class.heads, 1)
        return Cost(layout.width, length, layout.width * length, depth, heads, weights, 4 * stored)

    @property
    def scratch(self) -> int:
        """Coordinates that hold neither constants nor the embedding."""
        return self.layout.scratch

    def admit(self, network_class: NetworkClass) -> None:
        place(self.network_class, network_class)

    def write(self, network: Network, dtype: torch.dtype) -> Program:
        layout, target = self.layout, network.network_class
        rows = network.embedding.shape[0] + (0 if network.positions is None else network.positions.shape[0])
        itemsize = torch.finfo(dtype).bits // 8
        require_memory(itemsize * (layout.constants + rows * layout.width_in), "compiling this program")
        placement = place(self.network_class, target)
        at = layout.block("stream").coordinates
        positions = None if network.positions is None else network.positions.to(dtype)
        return Program(
            recipe=self.recipe,
            width=layout.width,
            tokens=network.embedding.to(dtype),
            token_at=at,
            positions=positions,
            position_at=None if positions is None else at,
            constants=write_constants(layout, network, placement, dtype),
            token_names=network.token_names,
            placement=None if is_whole(placement, self.network_class, target) else placement,
        )

    def network(self, program: Program) -> Network:
        """The network that a program stores, read back: the program specialised."""
        self.check(program)
        return read_network(self.layout, program)

    def tree_columns(self, program: Program) -> tuple[Tensor, Tensor | None]:
        raise AnyformerError("a stored program has no path products: its constants are the target's own numbers")

    def run(self, tokens: Tensor, program: Program, ctx: Context, trace: Trace | None) -> Tensor:
        return self.engine.run(tokens, program, ctx, trace)

    def check_own_tensors(self, program: Program) -> None:
        super().check_own_tensors(program)
        layout = self.layout
        at = layout.block("stream").coordinates
        good = program.constants is not None and len(program.constants) == layout.constants and program.constant_at is None
        for columns in (program.token_at, program.position_at):
            good = good and (columns is None or torch.equal(columns.cpu(), at))
        if not good:
            raise AnyformerError(
                f"this program does not have its {layout.constants} constants first and its token columns at the {len(at)} coordinates "
                "of the stream; compile it again"
            )
        if program.placement is not None:
            _check_placement(layout, program)

    def coordinate(self, i: int) -> Coordinate:
        block, offset = self.layout.where(i)
        return Coordinate(None, f"{block.what}{_index(block.shape, offset)}", ())

    def blocks(self) -> Iterator[Block]:
        return (Block(b.what, (), b.start, b.count) for b in self.layout.blocks)

    def literal(self) -> nn.Module:
        """The dense form: 0/1 matrices over all m coordinates. Refused where memory would not hold it."""
        return stored_literal(self.layout)

    @cached_property
    def _described(self) -> str:
        c = self.network_class
        return f"heads={c.heads}, layers={c.layers}, features={c.features}, outputs={c.outputs}"

    def __repr__(self) -> str:
        share = 100 * self.scratch / self.width
        return f"StoredProgram({self._described}; width {approximate(self.width)}, scratch {share:.1f} %)"


def _index(shape: tuple[int, ...], offset: int) -> str:
    index = []
    for size in reversed(shape):
        offset, i = divmod(offset, size)
        index.append(str(i + 1))
    return f"[{', '.join(reversed(index))}]"


def _check_placement(layout: Layout, program: Program) -> None:
    placement = program.placement
    assert placement is not None
    good = placement.outputs <= layout.network.outputs and all(s < len(layout.stages) for s in placement.stages)
    for s, banks in zip(placement.stages, placement.branches, strict=True) if good else ():
        stage = layout.stages[s]
        good = good and len(banks) == len(stage.banks)
        for bank, place_ in zip(stage.banks, banks, strict=False):
            indices = range(place_) if isinstance(place_, int) else place_
            good = good and 0 < len(indices) == len(set(indices)) and max(indices) < bank.count
    good = good and all(is_neutral(st.stage) for s, st in enumerate(layout.stages) if s not in placement.stages)
    if not good:
        raise AnyformerError("this program's placement points outside of its machine; the file is damaged, compile it again")
