"""The third universal machine: the sequence simulator. A target is written in extra tokens, one scalar each, beside its input.

    tokens of the sequence:  X (n x D),  A and V of every head of every layer, its bias b (1 x D) where the class has a constant feature,
                             the read-out U (D x out),  valid (n)

A bias is what a target adds to every token: the row that its residual branch, or the branch that carries the constant, reads from there.

One network of 4L + 1 layers, average-hard attention and units compiled from RASP, runs every attention-only target (with a residual or
without) of L layers, H heads and D features on up to n tokens: L chained simulators and a product with U. Its size is polynomial in n, D, H, L
where a path tree's is exponential in L. (Dutta et al., 2506.18739, Theorems 6 and 9; as one network and chained: ours.)

A program's coordinates are the scalars of that sequence: its token columns are a row of X, its constants the description.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.backbones import Cost, Machine
from anyformer.backbones.folding import Trace
from anyformer.backbones.registry import register_machine
from anyformer.backbones.tree import Block, Coordinate
from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.memory import require_memory
from anyformer.network import Network
from anyformer.operators import Attention, Bidirectional, Causal, Context
from anyformer.program import Program
from anyformer.rasp.compiled import CompiledProgram
from anyformer.rasp.compiling import compile
from anyformer.rasp.description import SimulatorRecipe, constants_in, constants_of, network_of, require_simulable
from anyformer.rasp.linear_algebra import Matrix, product
from anyformer.rasp.module import to_module
from anyformer.rasp.plan import FAULT
from anyformer.rasp.sequences import assume, tokens
from anyformer.rasp.sets import Reals
from anyformer.rasp.simulator import layer_output, require_patterns, with_bias

WEIGHTS_OF_A_HEAD, WEIGHTS_OF_A_UNIT = 11, 5
"""At most so many numbers of a compiled head (three products of a score: queries, keys, constants; values) and of a unit are not 0."""


class SequenceSimulator(Machine):
    """The machine of polynomial size: the target is extra tokens."""

    name = "sequence-simulator"
    recipe_type = SimulatorRecipe

    @classmethod
    def recipe_for(
        cls, network_class: NetworkClass, length: int | None = None, bound: int | float = 1000.0, logits: int | float = 2000.0
    ) -> SimulatorRecipe:
        require_simulable(network_class)
        c = network_class.for_tree()
        kept = NetworkClass(c.stages, c.outputs, network_class.features, constant=network_class.constant)
        longest = network_class.max_positions or SimulatorRecipe.length if length is None else length
        return SimulatorRecipe(kept, longest, float(bound), float(logits))

    def admit(self, network_class: NetworkClass) -> None:
        super().admit(network_class)
        mine, theirs = self.network_class, network_class
        if (mine.features, mine.constant) != (theirs.features, theirs.constant):
            had = [f"{c.features} features{' and the constant one' if c.constant else ''}" for c in (theirs, mine)]
            raise OutsideClass(
                f"the target is outside of the class of this {self.name} machine", [f"{had[0]}, the machine has {had[1]}"]
            )

    @classmethod
    def width_of(cls, recipe: Any) -> int:
        return recipe.tokens()

    @classmethod
    def cost_of(cls, recipe: Any, length: int) -> Cost:
        """Upper bounds, counted without building anything: coordinates before places are shared, and non-zero weights of heads and units."""
        d, count = recipe.features, recipe.tokens(length)
        heads = [recipe.layer(s, length).heads for s in range(len(recipe.network_class.stages))]
        each = [_counts(d, h) for h in heads]
        attending, written, units = (sum(column) for column in zip(*each, strict=True)) if each else (0, 0, 0)
        biases = len(heads) * recipe.network_class.constant
        attending, written, units = attending + 2 * d + biases, written + 2 * d + biases, units + d  # the product with U
        gathers = 6 * d + 2 * sum(heads) * d + 2 * d + biases  # different positions that heads look for
        positions = 2 * gathers + 2 * (d + 4) + 4  # each with its square; rows and groups of the grid
        width = positions + written + 8 * sum(heads) + 8
        depth = 2 * (4 * len(heads) + 1)
        table = positions * (count + 1)  # the position table is the machine's own
        weights = WEIGHTS_OF_A_HEAD * attending + written + WEIGHTS_OF_A_UNIT * units + table
        return Cost(width, count, width * count, depth, max(heads, default=0), weights, 4 * count)

    @cached_property
    def compiled(self) -> CompiledProgram:
        """The one network: L chained simulators and the product with U."""
        recipe = self.recipe
        each = (_counts(recipe.features, recipe.layer(s).heads)[0] for s in range(len(recipe.network_class.stages)))
        require_patterns(f"a {self.name} machine", sum(each) + 2 * recipe.features, recipe.tokens())
        starts, at = {}, 0
        for name, (rows, columns) in recipe.matrices().items():
            starts[name] = at
            at += rows * columns
        given = {name: Matrix(tokens, rows, columns, starts[name]) for name, (rows, columns) in recipe.matrices().items()}
        x = given["X"]
        for s in range(len(recipe.network_class.stages)):
            layer = recipe.layer(s)
            named = {f"{c}{h}": given[f"{c}{h} of layer {s + 1}"] for c in "AV" for h in range(layer.heads)}
            x = layer_output(layer, "compact", {"X": x, "valid": given["valid"]} | named, recipe.logits, _weights_of(s))
            bias = given.get(f"b of layer {s + 1}")
            x = x if bias is None else with_bias(x, bias)
            x = Matrix(assume(x.values, -4 * recipe.bound, 4 * recipe.bound), x.rows, x.columns)
        return compile(product(x, given["U"]).values, Reals(-recipe.bound, recipe.bound), recipe.tokens(), check=False)

    def write(self, network: Network, dtype: torch.dtype) -> Program:
        recipe, at = self.recipe, torch.arange(self.recipe.features)
        constants = constants_of(network).to(dtype)
        return Program(
            recipe=recipe,
            width=self.width,
            tokens=network.embedding.to(dtype),
            token_at=at,
            positions=None if network.positions is None else network.positions.to(dtype),
            position_at=None if network.positions is None else at,
            constants=constants,
            constant_at=torch.arange(len(constants)) + recipe.length * recipe.features,
            token_names=network.token_names,
        )

    def network(self, program: Program) -> Network:
        return network_of(self.recipe, program)

    def tree_columns(self, program: Program) -> tuple[Tensor, Tensor | None]:
        raise AnyformerError("a sequence simulator's program has no path products: its constants are the target's own matrices")

    def run(self, tokens: Tensor, program: Program, ctx: Context, trace: Trace | None) -> Tensor:
        streams: list[Tensor] | None = None if trace is None else []
        out = self.compiled.run_numbers(self.sequence(tokens, program, ctx), streams)
        if out.shape[2] > 1 and not float(out[..., 1].detach().abs().max()) < FAULT:
            recipe = self.recipe
            raise AnyformerError(
                f"a score or feature of the target is beyond the bounds of this simulator (logits {recipe.logits:g}, numbers "
                f"{4 * recipe.bound:g}); make one with larger ones"
            )
        logits = self.logits(out, program)[:, : tokens.shape[1]]
        if trace is not None:
            trace.logits = logits
            for s in range(len(self.network_class.stages)):
                trace.patterns += self.patterns(s, streams or [], ctx)
        return logits

    def patterns(self, s: int, streams: list[Tensor], ctx: Context) -> list[Float[Tensor, "batch heads n n"]]:
        """The attention patterns of layer s, bank by bank: its unnormalised weights over the sum of those that the mask allows."""
        length, n = self.recipe.length, ctx.positions.shape[1]
        layer, found = self.recipe.layer(s), []
        for h in range(layer.heads):
            place, stages = self.compiled.written[f"{_weights_of(s)}{h}"]
            found.append(streams[stages - 1][:, : length * length, place].unflatten(1, (length, length))[:, :n, :n])
        rule = Causal() if layer.causal else Bidirectional()
        order = Context.of(torch.zeros_like(ctx.positions), ctx.mask, torch.arange(n).expand(ctx.positions.shape))
        weights = torch.stack(found, 1).where(order.allowed(rule), 0.0)
        total = weights.sum(-1, keepdim=True)
        banks = [b.operator.count for b in self.network_class.stages[s].branches if isinstance(b.operator, Attention)]
        return list((weights / total.where(total > 0, 1.0)).split(banks, 1))

    def sequence(self, tokens: Tensor, program: Program, ctx: Context) -> Float[Tensor, "batch scalars"]:
        """``<T, X>``: the scalars of the program and of its input, the tokens of the one network."""
        recipe = self.recipe
        batch, n = tokens.shape
        if ctx.cache is not None:
            raise AnyformerError("a sequence simulator runs whole sequences: run it without a cache")
        if n > recipe.length:
            raise AnyformerError(
                f"this simulator holds sequences of up to {recipe.length} tokens, got {n}; make one with length={n}"
            )
        require_memory(8 * batch * recipe.tokens() ** 2 * 8 * 4, f"the patterns of {recipe.tokens()} scalars")
        x = F.embedding(tokens.long(), program.tokens)
        if program.positions is not None:
            x = x + F.embedding(ctx.positions, program.positions)
        valid = torch.ones(batch, n) if ctx.mask is None else ctx.mask
        parts = [
            F.pad(x.double(), (0, 0, 0, recipe.length - n)).flatten(1),
            constants_in(self.recipe, program).double().expand(batch, -1),
            F.pad(valid.double(), (0, recipe.length - n)),
        ]
        found = torch.cat(parts, 1)
        if float(found.detach().abs().max()) > recipe.bound:
            raise AnyformerError(
                f"a number of the program is beyond this simulator's bound of {recipe.bound:g}; make one with a larger bound"
            )
        return F.pad(found, (0, recipe.tokens() - found.shape[1]))

    def logits(self, out: Float[Tensor, "batch scalars outputs"], program: Program) -> Float[Tensor, "batch n out"]:
        """The rows of logits in the network's outputs."""
        outputs = self.recipe.network_class.outputs
        rows = out[:, : self.recipe.length * outputs, 0].reshape(len(out), self.recipe.length, outputs)
        return rows.to(program.dtype)

    @property
    def longest(self) -> int:  # type: ignore[override]
        """The longest sequence that it runs."""
        return self.recipe.length

    @property
    def cacheable(self) -> bool:
        return False

    def _places(self) -> list[Block]:
        blocks, at = [], 0
        for name, (rows, columns) in self.recipe.matrices().items():
            blocks.append(Block(name, (), at, rows * columns))
            at += rows * columns
        return [*blocks, Block("spare", (), at, self.width - at)] if at < self.width else blocks

    def coordinate(self, i: int) -> Coordinate:
        if not 0 <= i < self.width:
            raise AnyformerError(f"coordinates are 0..{self.width - 1}, got {i}")
        block = next(b for b in self._places() if b.start <= i < b.start + b.count)
        if block.what == "spare":
            return Coordinate(None, "spare", ())
        row, column = divmod(i - block.start, self.recipe.matrices()[block.what][1])
        return Coordinate(None, f"{block.what}[{row + 1}, {column + 1}]", ())

    def blocks(self) -> Iterator[Block]:
        return iter(self._places())

    def literal(self) -> nn.Module:
        """The same computation by a plain module with standard weights (:mod:`anyformer.rasp.module`), called with (tokens, program)."""
        return LiteralSimulator(self)


class LiteralSimulator(nn.Module):
    """The dense transformer of a sequence simulator."""

    def __init__(self, machine: SequenceSimulator):
        super().__init__()
        self.machine = machine
        self.module = to_module(machine.compiled)

    def forward(
        self,
        tokens: Tensor,
        program: Program,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        patterns: list[Tensor] | None = None,
    ) -> Tensor:
        """Logits; the patterns of the target's layers are added to ``patterns``."""
        ctx, machine, streams = Context.of(tokens, mask, positions), self.machine, []
        logits = machine.logits(self.module(machine.sequence(tokens, program, ctx), streams), program)[:, : tokens.shape[1]]
        if patterns is not None:
            for s in range(len(machine.network_class.stages)):
                patterns += machine.patterns(s, streams, ctx)
        return logits


def _counts(d: int, h: int) -> tuple[int, int, int]:
    """Heads, coordinates that they and units write, and units of one simulated layer with h heads on d features, term by term:
    what is gathered for X A and X V; the entries of scores and of X; the carried values; maximum and validity; the averages over rows."""
    heads = (d + 2 * h * d) + (h + 1) * d + h * d + 2 + (d + 1)
    written = (d + 2 * h * d) + (h + 1) * d + h * d + 1 + h + h * (d + 1)
    # products; exp and its bounds; weights times values; quotients; bounds of the output
    units = 2 * h * d + h * d + 3 * h + h * d + 4 * h + 4
    return heads, written, units


def _weights_of(s: int) -> str:
    """What the weights of layer s are called in the stream, before the number of the head."""
    return f"weights of layer {s + 1}, head "


register_machine(SequenceSimulator)
