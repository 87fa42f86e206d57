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
from dataclasses import dataclass, replace
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
from anyformer.errors import AnyformerError, OutsideClass, require_number, require_size
from anyformer.maps import ConstantMap, DenseMap, IdentityMap, LinearMap
from anyformer.memory import require_memory
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Attention, Bidirectional, Causal, Context, Identity, Softmax
from anyformer.program import Program
from anyformer.rasp.compiled import CompiledProgram
from anyformer.rasp.compiling import compile
from anyformer.rasp.encoding import Layer
from anyformer.rasp.linear_algebra import Matrix, product
from anyformer.rasp.module import to_module
from anyformer.rasp.plan import FAULT
from anyformer.rasp.sequences import assume, tokens
from anyformer.rasp.sets import Reals
from anyformer.rasp.simulator import layer_output, require_patterns, with_bias
from anyformer.recipe import Recipe

WEIGHTS_OF_A_HEAD, WEIGHTS_OF_A_UNIT = 11, 5
"""At most so many numbers of a compiled head (three products of a score: queries, keys, constants; values) and of a unit are not 0."""

NOISE = 1e-6
"""Singular values of A_h below this share of the largest are the rounding of a float32 program."""


@dataclass(frozen=True)
class SimulatorRecipe(Recipe):
    """A sequence simulator for a class and sequences of up to ``length`` tokens. ``bound``: the largest absolute value of a number of the
    description or the stream; ``logits``: of a score. More is an error of the run, never a wrong answer."""

    network_class: NetworkClass
    length: int = 8
    bound: float = 1000.0
    logits: float = 2000.0

    def __post_init__(self) -> None:
        require_size("SimulatorRecipe", "length", self.length)
        for name in ("bound", "logits"):
            require_number("SimulatorRecipe", name, getattr(self, name))
            if getattr(self, name) <= 0:
                raise AnyformerError(f"SimulatorRecipe: {name} must be positive, got {getattr(self, name)!r}")
        _require_simulable(self.network_class)

    @property
    def features(self) -> int:
        """D, the constant feature counted."""
        assert self.network_class.features is not None
        return self.network_class.features + self.network_class.constant

    def layer(self, s: int, length: int | None = None) -> Layer:
        """What stage s is to the simulator."""
        stage = self.network_class.stages[s]
        attention = stage.attention
        assert attention is not None
        return Layer(
            length or self.length,
            self.features,
            self.features,
            sum(b.operator.count for b in stage.branches if isinstance(b.operator, Attention)),
            residual=stage.residual is not None,
            causal=isinstance(attention.mask, Causal),
            padding=True,
        )

    def matrices(self, length: int | None = None) -> dict[str, tuple[int, int]]:
        """Every matrix of the sequence, in order."""
        n, d = length or self.length, self.features
        found = {"X": (n, d)}
        for s in range(len(self.network_class.stages)):
            for h in range(self.layer(s).heads):
                found |= {f"A{h} of layer {s + 1}": (d, d), f"V{h} of layer {s + 1}": (d, d)}
            if self.network_class.constant:
                found[f"b of layer {s + 1}"] = (1, d)
        return found | {"U": (d, self.network_class.outputs), "valid": (1, n)}

    def tokens(self, length: int | None = None) -> int:
        """Scalars of the sequence."""
        n = length or self.length
        described = sum(rows * columns for rows, columns in self.matrices(length).values())
        return max(described, n * max(n, self.features, self.network_class.outputs))


def _require_simulable(network_class: NetworkClass) -> None:
    reasons = list(_reasons(network_class))
    if reasons:
        raise OutsideClass("a sequence simulator runs attention-only targets (with a residual or without)", reasons)


def _reasons(network_class: NetworkClass) -> Iterator[str]:
    """Why a class cannot be simulated."""
    width = None if network_class.features is None else network_class.features + network_class.constant
    if width is None:
        yield "the class does not say how many features there are"
    for s, stage in enumerate(network_class.stages, 1):
        if stage.attention is None:
            yield f"stage {s} is no attention"
        if stage.width not in (None, width):
            yield f"stage {s} changes the number of features to {stage.width}"
        masks = {b.operator.mask for b in stage.branches if isinstance(b.operator, Attention)}
        if len(masks) > 1:
            yield f"stage {s} has heads with different masks, and one mask a stage is described"
        carriers = [b.map for b in stage.branches if isinstance(b.operator, Identity) and b.map in ("identity", "constant")]
        for kind, what in (("identity", "residual"), ("constant", "constant")):
            if carriers.count(kind) > 1:
                yield f"stage {s} has {carriers.count(kind)} {what} branches, and one is described"
        for branch in stage.branches:
            op = branch.operator
            if isinstance(op, Identity) and branch.map in ("identity", "constant"):
                continue
            plain = isinstance(op, Attention) and isinstance(op.kernel, Softmax) and isinstance(op.mask, (Bidirectional, Causal))
            if not plain or op.bias or op.rotary or op.qk_norm is not None or op.sink:  # type: ignore[union-attr]
                yield f"stage {s} has {op}, and only softmax attention (all keys or causal) is described"


class SequenceSimulator(Machine):
    """The machine of polynomial size: the target is extra tokens."""

    name = "sequence-simulator"
    recipe_type = SimulatorRecipe

    @classmethod
    def recipe_for(
        cls, network_class: NetworkClass, length: int | None = None, bound: int | float = 1000.0, logits: int | float = 2000.0
    ) -> SimulatorRecipe:
        _require_simulable(network_class)
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
        recipe, d = self.recipe, self.recipe.features
        parts = []
        for stage in network.stages:
            for branch in stage.branches:
                op = branch.operator
                if isinstance(op, Attention):
                    assert branch.probes is not None
                    parts += _described(op, branch.probes, branch.map)
            if network.constant:
                parts.append(_bias(stage, network.embedding))
        parts.append(network.final_readout())
        constants = torch.cat([p.reshape(-1) for p in parts]).to(dtype)
        at = torch.arange(d)
        return Program(
            recipe=recipe,
            width=self.width,
            tokens=network.embedding.to(dtype),
            token_at=at,
            positions=None if network.positions is None else network.positions.to(dtype),
            position_at=None if network.positions is None else at,
            constants=constants,
            constant_at=torch.arange(len(constants)) + recipe.length * d,
            token_names=network.token_names,
        )

    def network(self, program: Program) -> Network:
        """The network that the constants describe: ``A_h = W_Q W_K^T`` is factored, at the rank of the class where that is enough."""
        recipe, d = self.recipe, self.recipe.features
        shapes = {name: shape for name, shape in recipe.matrices().items() if name not in ("X", "valid")}
        parts = self._constants(program).split([rows * columns for rows, columns in shapes.values()])
        given = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        stages = []
        for s, stage in enumerate(recipe.network_class.stages, 1):
            branches: list[Branch] = []
            bias, h = given.get(f"b of layer {s}"), 0
            whole = any(b.is_residual for b in stage.branches)
            for b in stage.branches:
                if isinstance(b.operator, Attention):
                    heads = [f"{i} of layer {s}" for i in range(h, h + b.operator.count)]
                    h += len(heads)
                    op, probes = _factored(b.operator, torch.stack([given[f"A{name}"] for name in heads]))
                    branches.append(Branch(op, probes, DenseMap(torch.stack([given[f"V{name}"] for name in heads]))))
                elif b.is_residual:
                    branches.append(Branch(b.operator, None, IdentityMap(d, None if bias is None else bias[0])))
                else:
                    assert bias is not None
                    branches.append(Branch(b.operator, None, ConstantMap(d, torch.zeros_like(bias) if whole else bias)))
            stages.append(Stage(tuple(branches)))
        return Network(
            program.tokens,
            tuple(stages),
            given["U"],
            program.positions,
            recipe.network_class.constant,
            token_names=program.token_names,
        )

    def _constants(self, program: Program) -> Tensor:
        """The description of a target, of the size that the machine reads."""
        described = sum(rows * columns for name, (rows, columns) in self.recipe.matrices().items() if name not in ("X", "valid"))
        got = 0 if program.constants is None else len(program.constants)
        if program.constants is None or got != described:
            raise AnyformerError(f"a program of this simulator holds {described} constants, got {got}; compile it again")
        return program.constants

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
            self._constants(program).double().expand(batch, -1),
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
    units = (
        2 * h * d + h * d + 3 * h + h * d + 4 * h + 4
    )  # products; exp and its bounds; weights times values; quotients; bounds of the output
    return heads, written, units


def _weights_of(s: int) -> str:
    """What the weights of layer s are called in the stream, before the number of the head."""
    return f"weights of layer {s + 1}, head "


def _described(op: Attention, probes: Tensor, maps: LinearMap) -> list[Tensor]:
    """A_h and V_h of every head of a bank."""
    d = op.head_dim
    scale = d**-0.5 if op.scale is None else op.scale
    own, dense = probes.reshape(probes.shape[0], op.heads, 2 * d), maps.to_dense()
    found = []
    for h in range(op.heads):
        found += [scale * own[:, h, :d] @ own[:, h, d:].T, dense[h]]
    return found


def _bias(stage: Stage, like: Tensor) -> Float[Tensor, "D"]:
    """The row that a stage adds to every token: the shift of its residual branch, and what is read from the constant feature alone."""
    total = like.new_zeros(like.shape[1])
    for branch in stage.branches:
        if not isinstance(branch.operator, Identity):
            continue
        if isinstance(branch.map, IdentityMap) and branch.map.shift is not None:
            total = total + branch.map.shift
        if isinstance(branch.map, ConstantMap):
            total = total + branch.map.scaled_rows()[0]
    return total


def _factored(op: Attention, a: Float[Tensor, "heads D D"]) -> tuple[Attention, Float[Tensor, "D reads"]]:
    """A bank of attention whose scores are ``x A_h x^T``, and its probes."""
    u, s, vh = torch.linalg.svd(a.double())
    if a.shape[1] > op.head_dim and bool((s[:, op.head_dim] > NOISE * s[:, 0]).any()):  # a learned program may use all of A
        op = replace(op, head_dim=a.shape[1], scale=None)
    scale = op.head_dim**-0.5 if op.scale is None else op.scale
    own, kept = a.new_zeros(a.shape[1], op.heads, 2, op.head_dim), min(op.head_dim, a.shape[1])
    root = s[:, None, :kept].sqrt()
    own[:, :, 0, :kept] = (u[:, :, :kept] * root / scale).transpose(0, 1).to(a.dtype)
    own[:, :, 1, :kept] = (vh.mT[:, :, :kept] * root).transpose(0, 1).to(a.dtype)
    return op, own.flatten(1)


register_machine(SequenceSimulator)
