"""Random backbones: every weight drawn at random, fixed by a seed (arXiv 2605.31423, section on random backbones).

A program solves one linear system, ``E R_all = W_all``. R_all (m x N) is the backbone alone, unrolled from the right:

    R_S = U,    R_s = [ reads of stage s+1 , Route_b R_(s+1) for each branch b ],    W_all = E0 T_0   (:mod:`anyformer.unrolling`)

The residual is a true skip (Route = identity), a head routes by R_V (m x m). With as many hidden units as the target has, R_all would
have rank far below N. So a unit becomes width(s+1) hidden units of an ordinary gated MLP, ``Route_j = up_j down_j``, whose gates all
read the target's z_j.

Full column rank holds almost surely for m >= N: the determinant of the first N rows is a polynomial in the weights, and it is +-1 at
one point: for attention only, the masks of Theorem 3.1; with a residual, the folded form (each head shifts its child into the residual
child's place); with gates, the folded form in which each hidden unit has a gate coordinate of its own. E is the minimum-norm solution,
through a QR of R_all. Weights come from Philox integers (:mod:`anyformer.philox`): a seed means the same bits everywhere.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anyformer import philox
from anyformer.backbones.folding import Trace, fold_in_blocks, routing_table, tree_plan
from anyformer.backbones.literal import LiteralBank, LiteralLayer, LiteralTransformer
from anyformer.backbones.machine import Cost, Machine
from anyformer.backbones.tree import Block, Tree
from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError, require_choice, require_size
from anyformer.memory import approximate, require_memory
from anyformer.network import Network, check_positions, check_tokens
from anyformer.operators import Context
from anyformer.program import Program
from anyformer.recipe import Recipe
from anyformer.unrolling import unroll

OVERSAMPLE = 1.25
"""Recommended m / N: conditions R_all at 20 to 100 instead of 3e2 to 2e5."""
WORST_FORECAST = 0.1
"""A program whose forecast error (condition number times the dtype's epsilon) is above this is refused."""


@dataclass(frozen=True)
class RandomRecipe(Recipe):
    """A random backbone: class, width m, law ("uniform" as in PyTorch's linear layers, or "gaussian") and seed."""

    network_class: NetworkClass
    width: int
    law: str = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        require_size("RandomRecipe", "width", self.width)
        require_choice("RandomRecipe", "law", self.law, ("uniform", "gaussian"))
        require_size("RandomRecipe", "seed", self.seed, 0)
        if self.seed >= 2**64:
            raise AnyformerError(f"RandomRecipe: seed must be below 2^64, got {self.seed}")


def required_reads(network_class: NetworkClass) -> int:
    """N, the columns of R_all: the path tree's width, but a unit's gate counts once for each of its hidden units."""
    tree = Tree.of(network_class)
    count = network_class.outputs
    for s in reversed(range(len(tree.stages))):
        stage, width = tree.stages[s], count
        own = sum(b.operator.count * b.operator.reads * (width if b.is_gated else 1) for b in stage.branches)
        count = stage.shared + own + stage.count * width
    return count


@dataclass(frozen=True)
class Weights:
    """The random matrices of a recipe by name. Each is drawn from its own Philox stream, so any can be made alone.

    Stream number, from the low bits: kind (3 bits: 0 shared reads, 1 own reads, 2 route, 3 up, 4 down, 5 read-out), branch (32), bank
    (8), stage (20). It is part of what a fingerprint promises.
    """

    recipe: RandomRecipe

    def _draw(
        self, fan_in: int, shape: tuple[int, ...], *, stage: int, bank: int = 0, g: int = 0, kind: int
    ) -> Float[Tensor, "..."]:
        if bank >= 2**8 or g >= 2**32 or stage >= 2**20:
            raise AnyformerError("a random backbone has at most 2^20 stages of 256 banks of 2^32 branches")
        stream = ((stage << 8 | bank) << 32 | g) << 3 | kind
        scale = 1.0 / math.sqrt(fan_in)
        draw = philox.uniform if self.recipe.law == "uniform" else philox.gaussian
        return torch.from_numpy(draw(self.recipe.seed, stream, shape, scale))

    def shared(self, s: int, columns: int) -> Float[Tensor, "m shared"]:
        """The columns that a norm reads."""
        return self._draw(self.recipe.width, (self.recipe.width, columns), stage=s, kind=0)

    def own(self, s: int, bank: int, g: int, columns: int) -> Float[Tensor, "m columns"]:
        """All columns that branch g of a bank reads."""
        return self._draw(self.recipe.width, (self.recipe.width, columns), stage=s, bank=bank, g=g, kind=1)

    def route(self, s: int, bank: int, g: int) -> Float[Tensor, "m m"]:
        """R_V of a head (or of a norm, a mixing, a constant carrier)."""
        m = self.recipe.width
        return self._draw(m, (m, m), stage=s, bank=bank, g=g, kind=2)

    def up(self, s: int, bank: int, g: int, copies: int) -> Float[Tensor, "m copies"]:
        """Up-projection of the hidden units that stand for unit g."""
        return self._draw(self.recipe.width, (self.recipe.width, copies), stage=s, bank=bank, g=g, kind=3)

    def down(self, s: int, bank: int, g: int, copies: int, units: int) -> Float[Tensor, "copies m"]:
        """Down-projection of the hidden units that stand for unit g."""
        return self._draw(units * copies, (copies, self.recipe.width), stage=s, bank=bank, g=g, kind=4)

    def readout(self, outputs: int) -> Float[Tensor, "m outputs"]:
        """U."""
        return self._draw(self.recipe.width, (self.recipe.width, outputs), stage=0, kind=5)


def build_reads(recipe: RandomRecipe) -> tuple[Float[Tensor, "m N"], Int[Tensor, "N"]]:
    """R_all right to left in O(L m^2 N), and for each of its columns the tree coordinate that it must equal."""
    tree, weights = Tree.of(recipe.network_class), Weights(recipe)
    reads = weights.readout(tree.outputs)
    meaning = torch.arange(tree.outputs)
    for s in reversed(range(len(tree.stages))):
        stage, width = tree.stages[s], reads.shape[1]
        columns = [weights.shared(s, stage.shared)] if stage.shared else []
        names = [torch.arange(stage.shared)]
        children, child_names = [], []
        for b, bank in enumerate(tree.banks(s)):
            op, gated = bank.branch.operator, bank.branch.is_gated
            for g in range(op.count):
                if op.reads:
                    columns.append(weights.own(s, b, g, op.reads * (width if gated else 1)))
                    at = bank.read_at + g * op.reads + torch.arange(op.reads)
                    names.append(at.repeat(width) if gated else at)
                if bank.branch.is_residual:
                    child = reads
                elif gated:
                    child = weights.up(s, b, g, width) @ (weights.down(s, b, g, width, op.count) @ reads)
                else:
                    child = weights.route(s, b, g) @ reads
                children.append(child)
                child_names.append(bank.child_at + g * tree.widths[s + 1] + meaning)
        reads = torch.cat((*columns, *children), dim=1)
        meaning = torch.cat((*names, *child_names))
    return reads, meaning


def triangular_condition(r: Float[Tensor, "N N"], steps: int = 80) -> float:
    """Condition number of an upper triangular matrix: both extreme singular values by Lanczos on ``R^T R`` and on its inverse.

    A lower bound that is within about one per cent after 80 steps (fully reorthogonalised). inf for an exactly singular R.
    """
    if bool((r.diagonal() == 0).any()):
        return math.inf
    largest = _lanczos(lambda v: r.T @ (r @ v), r.shape[0], steps)

    def inverse(v: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(r.T, v[:, None], upper=False)
        return torch.linalg.solve_triangular(r, half, upper=True)[:, 0]

    return math.sqrt(largest * _lanczos(inverse, r.shape[0], steps))


def _lanczos(apply: Any, n: int, steps: int) -> float:
    """Largest eigenvalue of a symmetric positive operator on R^n."""
    v = torch.from_numpy(philox.gaussian(0, 0, (n,), 1.0))
    basis, diagonal, off = [v / v.norm()], [], []
    for _ in range(min(steps, n)):
        w = apply(basis[-1])
        diagonal.append(float(w @ basis[-1]))
        q = torch.stack(basis)
        for _ in range(2):
            w = w - q.T @ (q @ w)
        norm = float(w.norm())
        if not norm > 1e-14 * abs(diagonal[0]):
            break
        off.append(norm)
        basis.append(w / norm)
    k = len(diagonal)
    t = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i, b in enumerate(off[: k - 1]):
        t[i, i + 1] = t[i + 1, i] = b
    return float(torch.linalg.eigvalsh(t)[-1])


class Random(Machine):
    """A random backbone. Its operators see exactly the target's reads, so it runs as the folded tree on ``E R_all``; :meth:`literal` is
    the dense random transformer."""

    name = "random"
    recipe_type = RandomRecipe
    reads: Tensor
    routing: Tensor

    def __init__(self, recipe: Any):
        super().__init__(recipe)
        needed = required_reads(recipe.network_class)
        if recipe.width < needed:
            raise AnyformerError(
                f"a random backbone of width {recipe.width} is too narrow: this class requires {needed} reads; use width >= "
                f"{needed}, recommended {recommended_width(needed)} (oversampling {OVERSAMPLE})"
            )
        require_memory(_bytes(recipe), f"building a random backbone of width {approximate(recipe.width)}")
        self.tree = Tree.of(recipe.network_class)
        reads, self.meaning = build_reads(recipe)
        self._full: Tensor | None = reads
        first = torch.full((self.tree.width,), -1)  # the first column of R_all that equals each tree coordinate
        order = torch.arange(self.meaning.numel() - 1, -1, -1)
        first[self.meaning[order]] = order
        self.register_buffer("reads", reads if reads.shape[1] == self.tree.width else reads[:, first])
        self.register_buffer("routing", routing_table(self.tree))
        self._factor: tuple[Tensor, Tensor, float] | None = None

    @classmethod
    def recipe_for(
        cls,
        network_class: NetworkClass,
        *,
        seed: int = 0,
        law: str = "uniform",
        width: int | None = None,
        oversample: float | None = None,
    ) -> RandomRecipe:
        """``width`` m, or ``oversample`` m / N (default 1.25)."""
        if width is not None and oversample is not None:
            raise AnyformerError("a random machine takes width or oversample, not both")
        if width is None:
            oversample = OVERSAMPLE if oversample is None else oversample
            if isinstance(oversample, bool) or not isinstance(oversample, (int, float)) or not 1 <= oversample < 1e6:
                raise AnyformerError(f"oversample is m / N and must be a number of at least 1, got {oversample!r}")
            width = recommended_width(required_reads(network_class), oversample)
        return RandomRecipe(network_class.for_tree(), width, law, seed)

    @classmethod
    def least(cls, network_class: NetworkClass) -> tuple[RandomRecipe, dict[str, Any]]:
        needed = required_reads(network_class)
        return cls.recipe_for(network_class, width=needed), {"recommended": recommended_width(needed)}

    @classmethod
    def width_of(cls, recipe: Any) -> int:
        return recipe.width

    @classmethod
    def cost_of(cls, recipe: Any, length: int) -> Cost:
        tree, m = Tree.of(recipe.network_class), recipe.width
        weights, needed = m * tree.outputs, [tree.outputs]
        for s in reversed(range(len(tree.stages))):
            stage, w, count = tree.stages[s], needed[-1], tree.stages[s].shared
            for branch in stage.branches:
                op = branch.operator
                copies = w if branch.is_gated else 1
                count += op.count * (op.reads * copies + w)
                if branch.is_gated:
                    weights += op.count * w * m * (op.reads + 2)
                elif not branch.is_residual:
                    weights += op.count * (m * op.reads + m * m)
            weights += m * stage.shared
            needed.append(count)
        heads = max((s.attention.heads for s in tree.stages if s.attention), default=0)
        return Cost(m, length, m * length, len(tree.stages), heads, weights, 4 * m)

    @property
    def needed(self) -> int:
        """N: columns of R_all."""
        return required_reads(self.network_class)

    def coordinate(self, i: int) -> str:
        if not 0 <= i < self.width:
            raise AnyformerError(f"coordinate must lie in 0..{self.width - 1}, got {i}")
        return f"random coordinate {i} (every coordinate of a random backbone holds a mixture of all {self.needed} reads)"

    def blocks(self) -> Iterator[Block]:
        yield Block(f"random mixtures of all {self.needed} reads", (), 0, self.width)

    def factor(self) -> tuple[Tensor, Tensor, float]:
        """Q, R and condition number of R_all, computed once."""
        if self._factor is None:
            reads = build_reads(self.recipe)[0] if self._full is None else self._full
            self._full = None
            require_memory(16 * reads.numel() + 8 * reads.shape[1] ** 2, "solving this random backbone")
            q, r = torch.linalg.qr(reads)
            self._factor = (q, r, triangular_condition(r))
        return self._factor

    @property
    def condition(self) -> float:
        """Condition number of R_all (Lanczos, about one per cent)."""
        return self.factor()[2]

    def forecast(self, dtype: torch.dtype) -> float:
        """Expected relative error of the outputs: the condition number times the epsilon of the program's dtype."""
        return self.condition * torch.finfo(dtype).eps

    def write(self, network: Network, dtype: torch.dtype) -> Program:
        q, r, condition = self.factor()
        if not self.forecast(dtype) <= WORST_FORECAST:
            raise AnyformerError(
                f"R_all of this random backbone (m = {self.width}, N = {self.needed}) has condition number {condition:.1e}, too large "
                f"for {dtype}: forecast error {self.forecast(dtype):.0e} > {WORST_FORECAST}; use width {recommended_width(self.needed)} "
                "or another seed"
            )
        required = unroll(network)[:, self.meaning]
        tokens = self._solve(network.embedding.double() @ required).to(dtype)
        positions = None if network.positions is None else self._solve(network.positions.double() @ required).to(dtype)
        with torch.no_grad():
            wanted = network.embedding.double() @ required
            residual = float(((tokens.double() @ q) @ r - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))
        return Program(
            recipe=self.recipe,
            width=self.width,
            tokens=tokens,
            token_at=torch.arange(self.width),
            positions=positions,
            position_at=None if positions is None else torch.arange(self.width),
            token_names=network.token_names,
            provenance={
                "condition": condition,
                "required_reads": self.needed,
                "oversampling": self.width / self.needed,
                "forecast_relative_error": self.forecast(dtype),
                "residual": residual,
                "largest_embedding_entry": float(tokens.detach().abs().max()),
            },
        )

    def _solve(self, wanted: Float[Tensor, "rows R"]) -> Float[Tensor, "rows m"]:
        """The smallest rows with ``rows R_all = wanted``, in R_all's order."""
        q, r, _ = self.factor()
        return (q @ torch.linalg.solve_triangular(r.T, wanted.T, upper=False)).T

    def solve(self, columns: Float[Tensor, "rows N"]) -> Float[Tensor, "rows m"]:
        """The smallest rows of an embedding (float64) whose reads are ``columns``, in the coordinates of the path tree."""
        return self._solve(columns[:, self.meaning])

    def tree_columns(self, program: Program) -> tuple[Tensor, Tensor | None]:
        reads = self.reads.to(program.dtype)
        positions = program.position_embedding
        return program.embedding @ reads, None if positions is None else positions @ reads

    def run(self, tokens: Tensor, program: Program, ctx: Context, trace: Trace | None) -> Tensor:
        columns, position_columns = self.tree_columns(program)
        check_tokens(tokens, program.vocab)

        def reads(part: Tensor, at: Context) -> Tensor:
            first = F.embedding(part.long(), columns)
            if position_columns is None:
                return first
            check_positions(at.positions, position_columns.shape[0])
            return first + F.embedding(at.positions, position_columns)

        return fold_in_blocks(tree_plan(self.tree, self.routing), reads, tokens, ctx, trace)

    def literal(self) -> LiteralTransformer:
        """The dense random transformer: its own matrices, an ordinary gated MLP, true skips."""
        m, tree, weights = self.width, self.tree, Weights(self.recipe)
        require_memory(8 * self.cost().nonzero_weights, f"the literal random machine of width {m}")
        needed = [tree.outputs]
        for s in reversed(range(len(tree.stages))):
            sub = NetworkClass(tree.stages[s:], tree.outputs)
            needed.insert(0, required_reads(sub))
        layers = []
        for s, stage in enumerate(tree.stages):
            banks = []
            for b, branch in enumerate(stage.branches):
                op, width = branch.operator, needed[s + 1]
                copies = width if branch.is_gated else 1
                if branch.is_residual:
                    continue
                columns = [
                    weights.own(s, b, g, op.reads * copies) if op.reads else torch.zeros(m, 0).double() for g in range(op.count)
                ]
                own = torch.stack([c.reshape(m, copies, op.reads) for c in columns], dim=1)
                if branch.is_gated:
                    up = torch.cat([weights.up(s, b, g, copies) for g in range(op.count)], dim=1)
                    down = torch.cat([weights.down(s, b, g, copies, op.count) for g in range(op.count)])
                    banks.append(LiteralBank(op, own, up=up, down=down))
                else:
                    banks.append(LiteralBank(op, own, R_V=torch.stack([weights.route(s, b, g) for g in range(op.count)])))
            shared = weights.shared(s, stage.shared) if stage.shared else None
            layers.append(LiteralLayer(banks, shared, skip=stage.residual is not None))
        return LiteralTransformer(layers, weights.readout(tree.outputs))

    def __repr__(self) -> str:
        return f"Random(width {self.width} for {self.needed} reads, law={self.recipe.law!r}, seed={self.recipe.seed})"


def recommended_width(needed: int, oversample: float = OVERSAMPLE) -> int:
    """ceil(oversample * N), exact for integers of any size."""
    numerator, denominator = float(oversample).as_integer_ratio()
    return -(-needed * numerator // denominator)


def _bytes(recipe: RandomRecipe) -> int:
    """Memory while building: R_all twice, and one route."""
    return 8 * (2 * recipe.width * required_reads(recipe.network_class) + recipe.width**2)
