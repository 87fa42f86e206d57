"""Machines on which programs are learned: the paper's experiments, with masked 0/1 maps or random ones (:mod:`.recipe` says what they compute).

A program of such a machine brings token rows, position rows, a read-out U (m, d_in) and perhaps the norms' gains and biases. Attention alone
runs as the folded tree; so it can be compiled for and specialised, like any tree. LayerNorm over all m coordinates cannot: it
divides by what every path holds.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anyformer import philox
from anyformer.backbones.folding import Trace, fold_in_blocks, routing_table, tree_plan
from anyformer.backbones.frozen.folded import Observer, folded_logits
from anyformer.backbones.frozen.literal import LiteralFrozen
from anyformer.backbones.frozen.recipe import FrozenMaskedRecipe, FrozenRandomRecipe, FrozenRecipe
from anyformer.backbones.frozen.tables import FoldedTables, StreamTables, Tables, masked_table, random_table
from anyformer.backbones.frozen.unfolded import BlockMaps, DenseMaps, LayerMaps, block_maps, unfolded_logits
from anyformer.backbones.layouts import masked_literal
from anyformer.backbones.literal import LiteralBank
from anyformer.backbones.machine import Cost, Machine
from anyformer.backbones.random_backbone import Random, Weights, build_reads, required_reads
from anyformer.backbones.tree import Block, Tree
from anyformer.backbones.tree_machine import columns_program, describe_class
from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.memory import require_memory
from anyformer.network import Network, check_positions, check_tokens
from anyformer.operators import Context, Mixing
from anyformer.program import Program

MLP_STREAM = 2**62
"""Philox streams from here on draw the frozen MLPs: 2 l + i for W_1 and W_2 of layer l."""


class Frozen(Machine):
    """Base of both machines."""

    tree: Tree

    def __init__(self, recipe: FrozenRecipe):
        super().__init__(recipe)
        require_memory(self._bytes(recipe), f"a frozen machine of width {recipe.m}")
        self.tree = Tree.of(recipe.network_class)
        for layer in range(recipe.layers if recipe.mlp else 0):
            for i, (fan_in, fan_out) in enumerate(((recipe.m, recipe.mlp), (recipe.mlp, recipe.m))):
                weight = philox.uniform(recipe.seed, MLP_STREAM + 2 * layer + i, (fan_in, fan_out), fan_in**-0.5)
                self.register_buffer(f"mlp_{layer}_{i}", torch.from_numpy(weight))
        self._cast: dict[Any, Any] = {}

    @classmethod
    def width_of(cls, recipe: FrozenRecipe) -> int:
        return recipe.m

    @classmethod
    @abstractmethod
    def _maps_weights(cls, recipe: FrozenRecipe) -> int:
        """Entries of R_Q, R_K, R_V that are not 0."""

    @classmethod
    def cost_of(cls, recipe: FrozenRecipe, length: int) -> Cost:
        m, heads = recipe.m, recipe.attention.heads
        weights = cls._maps_weights(recipe) + 2 * m * recipe.mlp * recipe.layers
        return Cost(m, length, m * length, recipe.layers * (2 if recipe.mlp else 1), heads, weights, 4 * m)

    @classmethod
    @abstractmethod
    def _bytes(cls, recipe: FrozenRecipe) -> int:
        """Memory that building takes."""

    # --- what a program is read into, and the run -------------------------------------------------------------------------------

    @abstractmethod
    def maps(self, dtype: torch.dtype) -> Sequence[LayerMaps]:
        """The layers' maps, for a run that does not fold."""

    @abstractmethod
    def table(
        self, rows: Float[Tensor, "rows m"], readout: Float[Tensor, "m out"], products: torch.dtype
    ) -> Float[Tensor, "rows N"]:
        """The reads of a run that folds; ``products`` with dense frozen maps are in that dtype."""

    def tables(
        self,
        tokens: Float[Tensor, "vocab m"],
        positions: Float[Tensor, "n_max m"] | None,
        readout: Float[Tensor, "m out"],
        norms: Float[Tensor, "norms 2 m"] | None,
        products: torch.dtype | None = None,
    ) -> Tables:
        """What :meth:`logits` reads, differentiably; ``products`` as there."""
        if not self.recipe.folds:
            return StreamTables(tokens, positions, readout, norms)
        return self._folded(tokens, positions, readout, products or tokens.dtype)

    def _folded(self, tokens: Tensor, positions: Tensor | None, readout: Tensor, products: torch.dtype) -> FoldedTables:
        if positions is None:
            return FoldedTables(self.table(tokens, readout, products), None)
        both = self.table(torch.cat((tokens, positions)), readout, products)
        return FoldedTables(both[: len(tokens)], both[len(tokens) :])

    def logits(
        self,
        tables: Tables,
        tokens: Int[Tensor, "batch n"],
        ctx: Context,
        observe: Observer | None = None,
        queries: Int[Tensor, "batch q"] | None = None,
        products: torch.dtype | None = None,
    ) -> Float[Tensor, "batch places out"]:
        """Logits from tables: the run of learning. With ``queries`` (batch, q) only those of these places, (batch, q, out). ``products`` is
        the dtype of products with dense frozen maps (None: the program's): bfloat16 is faster on some processors, with 3 digits."""
        if isinstance(tables, FoldedTables):
            return folded_logits(self.recipe, tables, tokens, ctx, observe, queries)
        dtype = products or tables.tokens.dtype
        return unfolded_logits(self.recipe, self.maps(dtype), self.mlps(dtype), tables, tokens, ctx, observe, queries)

    def mlps(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """W_1 and W_2 of every layer."""
        layers = range(self.recipe.layers if self.recipe.mlp else 0)
        return [(self.cast(f"mlp_{s}_0", dtype), self.cast(f"mlp_{s}_1", dtype)) for s in layers]

    def cast(self, name: str, dtype: torch.dtype) -> Tensor:
        """A dense frozen map in the dtype of its products, converted once."""
        held = getattr(self, name)
        if held.dtype == dtype:
            return held
        if (name, dtype, held.device) not in self._cast:
            self._cast[name, dtype, held.device] = held.to(dtype)
        return self._cast[name, dtype, held.device]

    def run(self, tokens: Tensor, program: Program, ctx: Context, trace: Trace | None) -> Tensor:
        check_tokens(tokens, program.vocab)
        if program.positions is not None:
            check_positions(ctx.positions, program.positions.shape[0])
        assert program.readout is not None
        tables = self.tables(program.embedding, program.position_embedding, program.readout, program.norms)
        tokens = tokens.long()
        if self.as_tree and isinstance(tables, FoldedTables):
            return fold_in_blocks(tree_plan(self.tree, self.routing), lambda t, c: _first(tables, t, c), tokens, ctx, trace)

        def observe(layer: int, own: Tensor, pattern: Tensor) -> None:
            assert trace is not None
            trace.note(self.tree, layer, 0, range(own.shape[2]), own, Mixing(pattern, pattern))

        logits = self.logits(tables, tokens, ctx, None if trace is None else observe)
        if trace is not None:
            trace.logits = logits
        return logits

    @property
    def as_tree(self) -> bool:
        """Whether programs run as the folded tree: attention alone."""
        return self.recipe.folds and not self.recipe.residual

    @cached_property
    def routing(self) -> Int[Tensor, "banks 7"]:
        """The tree's table."""
        return routing_table(self.tree)

    @property
    def cacheable(self) -> bool:
        return self.as_tree and super().cacheable

    def tree_columns(self, program: Program) -> tuple[Tensor, Tensor | None]:
        self._require_tree("specialised")
        assert program.readout is not None
        tables = self._folded(program.embedding, program.position_embedding, program.readout, program.tokens.dtype)
        return tables.reads, tables.places

    def check_own_tensors(self, program: Program) -> None:
        out, norms = self.network_class.outputs, program.norms
        if program.readout is None or program.readout.shape[1] != out:
            got = "none" if program.readout is None else f"shape {tuple(program.readout.shape)}"
            raise AnyformerError(f"a program of a {self.name} machine needs a read-out ({self.width}, {out}), got {got}")
        if norms is not None and len(norms) != self.recipe.norms:
            raise AnyformerError(f"this {self.name} machine has {self.recipe.norms} norms, the program brings {len(norms)}")

    # --- compiling ------------------------------------------------------------------------------------------------------------------

    def _require_tree(self, verb: str) -> None:
        """Raise unless attention is all there is, with every reason."""
        recipe, reasons = self.recipe, []
        if recipe.norm is not None:
            reasons.append("its LayerNorm runs over all m coordinates, and so over what every path holds; a norm over the D columns that a "
                           "target reads is a path-tree machine's")  # fmt: skip
        if recipe.mlp:
            reasons.append("its MLP is random and shared by all paths")
        if recipe.residual:
            reasons.append(
                "its masks keep what a true skip should have moved; path-tree and random machines have residual classes"
            )
        if reasons:
            raise OutsideClass(f"nothing can be {verb} for this {self.name} machine", reasons)

    def admit(self, network_class: NetworkClass) -> None:
        self._require_tree("compiled")
        super().admit(network_class)

    def __repr__(self) -> str:
        recipe = self.recipe
        parts = ["residual"] * recipe.residual + [f"{recipe.norm}-norm over m"] * (recipe.norm is not None)
        parts += [f"frozen MLP of {recipe.mlp} units"] * (recipe.mlp > 0)
        return f"{type(self).__name__}({describe_class(self)}; width {self.width}; {', '.join(parts) or 'attention only'})"


def _tree_class(network_class: NetworkClass) -> NetworkClass:
    if not isinstance(network_class, NetworkClass):
        raise AnyformerError(
            f"recipe_for needs a NetworkClass, got {type(network_class).__name__}; af.network_class(config) gives that of a configuration"
        )
    return network_class.for_tree()


class FrozenMasked(Frozen):
    """0/1 maps: R_V is a diagonal mask, reads sum over prefixes (Theorem 3.1)."""

    name = "frozen-masked"
    recipe_type = FrozenMaskedRecipe

    @classmethod
    def recipe_for(
        cls,
        network_class: NetworkClass,
        *,
        residual: bool = False,
        norm: str | None = None,
        mlp: int = 0,
        activation: str = "gelu",
        seed: int = 0,
    ) -> FrozenMaskedRecipe:
        return FrozenMaskedRecipe(
            network_class=_tree_class(network_class), residual=residual, norm=norm, mlp=mlp, activation=activation, seed=seed
        )

    @classmethod
    def _maps_weights(cls, recipe: FrozenRecipe) -> int:
        tree, heads = Tree.of(recipe.network_class), recipe.attention.heads
        return sum(heads**s * (tree.stages[s].probes + heads * tree.widths[s + 1]) for s in range(recipe.layers))

    @classmethod
    def _bytes(cls, recipe: FrozenRecipe) -> int:
        return 8 * recipe.m * recipe.mlp * recipe.layers

    @cached_property
    def _blocks(self) -> list[BlockMaps]:
        return block_maps(self.recipe)

    def maps(self, dtype: torch.dtype) -> Sequence[LayerMaps]:
        return self._blocks

    def table(self, rows: Tensor, readout: Tensor, products: torch.dtype) -> Tensor:
        return masked_table(self.recipe, rows, readout)

    def coordinate(self, i: int) -> Any:
        return self.tree.coordinate(i)

    def blocks(self) -> Iterator[Block]:
        return self.tree.blocks()

    def write(self, network: Network, dtype: torch.dtype) -> Program:
        readout, out = torch.zeros(self.width, self.tree.outputs, dtype=dtype), self.tree.outputs
        for block in self.blocks():
            if block.what == "output":
                readout[block.start : block.start + out] = torch.eye(out, dtype=dtype)
        return replace(columns_program(self, network, dtype), readout=readout)

    def literal(self) -> LiteralFrozen:
        banks = [bank for layer in masked_literal(self.network_class).order for bank in layer.banks]
        return LiteralFrozen(self.recipe, [b for b in banks if isinstance(b, LiteralBank)], self.mlps(torch.float64))


class FrozenRandom(Frozen):
    """Dense random maps, PyTorch's uniform law, fixed by a seed."""

    name = "frozen-random"
    recipe_type = FrozenRandomRecipe

    def __init__(self, recipe: FrozenRandomRecipe):
        super().__init__(recipe)
        weights, layers, heads = Weights(recipe.maps()), range(recipe.layers), range(recipe.attention.heads)
        for s in layers:
            own = torch.cat([weights.own(s, 0, h, recipe.attention.reads) for h in heads], dim=1)
            self.register_buffer(f"own_{s}", own)
            for h in heads:
                self.register_buffer(f"route_{s}_{h}", weights.route(s, 0, h))
        if self.as_tree:
            columns, meaning = build_reads(recipe.maps())
            leaves = self._are_leaves(meaning)
            self.register_buffer("reads", columns[:, ~leaves])
            places = torch.cat((meaning[~leaves], meaning[leaves]))
            self.order = torch.argsort(places)

    def _are_leaves(self, meaning: Int[Tensor, "N"]) -> Tensor:
        leaves = torch.zeros(self.tree.width, dtype=torch.bool)
        for block in self.tree.blocks():
            if block.what == "output":
                leaves[block.start : block.start + block.count] = True
        return leaves[meaning]

    @classmethod
    def recipe_for(
        cls,
        network_class: NetworkClass,
        *,
        width: int | None = None,
        residual: bool = False,
        norm: str | None = None,
        mlp: int = 0,
        activation: str = "gelu",
        seed: int = 0,
    ) -> FrozenRandomRecipe:
        """``width`` m defaults to the number of required reads, as in the paper."""
        network_class = _tree_class(network_class)
        return FrozenRandomRecipe(
            network_class=network_class,
            width=required_reads(network_class) if width is None else width,
            residual=residual,
            norm=norm,
            mlp=mlp,
            activation=activation,
            seed=seed,
        )

    @classmethod
    def _maps_weights(cls, recipe: FrozenRecipe) -> int:
        attention = recipe.attention
        return recipe.layers * attention.heads * recipe.m * (attention.reads + recipe.m)

    @classmethod
    def _bytes(cls, recipe: FrozenRecipe) -> int:
        return 8 * cls._maps_weights(recipe) + 8 * recipe.m * recipe.mlp * recipe.layers

    def _routes(self, s: int, dtype: torch.dtype) -> list[Tensor]:
        return [self.cast(f"route_{s}_{h}", dtype) for h in range(self.recipe.attention.heads)]

    def maps(self, dtype: torch.dtype) -> Sequence[LayerMaps]:
        return [DenseMaps(self.cast(f"own_{s}", dtype), self._routes(s, dtype)) for s in range(self.recipe.layers)]

    def table(self, rows: Tensor, readout: Tensor, products: torch.dtype) -> Tensor:
        routes = [self._routes(s, products) for s in range(self.recipe.layers)]
        return random_table(rows, readout, self.cast("reads", products), routes, self.order.to(rows.device))

    def coordinate(self, i: int) -> str:
        if not 0 <= i < self.width:
            raise AnyformerError(f"coordinate must lie in 0..{self.width - 1}, got {i}")
        return f"random coordinate {i} (every coordinate of a random backbone holds a mixture of all reads)"

    def blocks(self) -> Iterator[Block]:
        yield Block("random mixtures of all reads", (), 0, self.width)

    def write(self, network: Network, dtype: torch.dtype) -> Program:
        maps = self.recipe.maps()
        program = Random(maps).write(network, dtype)
        return replace(program, recipe=self.recipe, readout=Weights(maps).readout(self.tree.outputs).to(dtype))

    def literal(self) -> LiteralFrozen:
        banks = []
        for s in range(self.recipe.layers):
            own = getattr(self, f"own_{s}").unflatten(1, (self.recipe.attention.heads, 1, -1))
            routes = torch.stack([getattr(self, f"route_{s}_{h}") for h in range(self.recipe.attention.heads)])
            banks.append(LiteralBank(self.recipe.attention, own, R_V=routes))
        return LiteralFrozen(self.recipe, banks, self.mlps(torch.float64))


def _first(tables: FoldedTables, tokens: Tensor, ctx: Context) -> Tensor:
    """The first state of the tree for some rows."""
    state = F.embedding(tokens, tables.reads)
    return state if tables.places is None else state + F.embedding(ctx.positions, tables.places)
