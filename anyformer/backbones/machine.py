"""What every fixed backbone is: a recipe, a width, a meaning for each coordinate, a cost, and a forward for any program.

A machine knows its targets' class and nothing else: two machines made from differently trained targets are equal.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.backbones.folding import Trace
from anyformer.backbones.tree import Block
from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.memory import approximate
from anyformer.network import Network, check_positions, check_tokens
from anyformer.operators import Cache, Context
from anyformer.program import Program
from anyformer.recipe import Recipe
from anyformer.spec import differences
from anyformer.targets.reading import network_class

M = TypeVar("M", bound="Machine")


@dataclass(frozen=True)
class Cost:
    """Sizes of a machine: ``width`` m, sequence ``length``, ``state = width * length``, ``depth`` (stages), ``heads`` of a stage,
    ``nonzero_weights`` of its literal form, and ``bytes`` of a float32 program with one token row."""

    width: int
    length: int
    state: int
    depth: int
    heads: int
    nonzero_weights: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """A program and, where the machine wants them, its dense tables of reads: tokens (vocab, N) and positions (n_max, N)."""

    program: Program
    tokens: Float[Tensor, "vocab N"] | None = None
    positions: Float[Tensor, "n_max N"] | None = None


class Machine(nn.Module, ABC):
    """A fixed backbone. ``machine(tokens, program)`` runs a program; swapping the program swaps the behaviour, nothing else.

    A new machine defines ``name``, ``recipe_type``, :meth:`recipe_for`, :meth:`width_of`, :meth:`cost_of`, :meth:`write`, :meth:`run`,
    :meth:`coordinate`, :meth:`blocks` and :meth:`literal`, and is registered.
    """

    name: ClassVar[str]
    places: ClassVar[bool] = False
    """Whether smaller targets may be placed inside it."""
    recipe_type: ClassVar[type[Recipe]]
    longest: int | None = None
    """The longest sequence that it runs; None: any."""

    def __init__(self, recipe: Any):
        super().__init__()
        if not isinstance(recipe, self.recipe_type):
            name = type(self).__name__
            raise AnyformerError(f"{name} is made from a recipe, got {type(recipe).__name__}; use {name}.for_class(target)")
        self.recipe: Any = recipe

    recipe_for: ClassVar[Callable[..., Recipe]]
    """``recipe_for(network_class, **options)``, a class method: the recipe of the machine for a class. Keyword arguments are the
    machine's options. Raises :class:`OutsideClass` with every reason where there is none."""

    @classmethod
    def least(cls, network_class: NetworkClass) -> tuple[Recipe, dict[str, Any]]:
        """The recipe of least width for a class, and what a table of costs should say beside it."""
        return cls.recipe_for(network_class), {}

    @classmethod
    @abstractmethod
    def width_of(cls, recipe: Any) -> int:
        """m, from the recipe alone: nothing is built, however large it is."""

    @classmethod
    @abstractmethod
    def cost_of(cls, recipe: Any, length: int) -> Cost:
        """The cost at a sequence length, from the recipe alone."""

    @classmethod
    def for_class(cls: type[M], target: Any, **options: Any) -> M:
        """The machine for the class of ``target``: a module, a Network, a NetworkClass, or a TransformerConfig."""
        known = sorted(set(signature(cls.recipe_for).parameters) - {"network_class"})
        if not set(options) <= set(known):
            unknown = ", ".join(sorted(set(options) - set(known)))
            raise AnyformerError(f"a {cls.name} machine takes no option {unknown}; it takes {', '.join(known) or 'none'}")
        recipe = cls.recipe_for(network_class(target), **options)
        width = cls.width_of(recipe)
        if width >= 2**62:
            raise AnyformerError(f"a {cls.name} machine for this class has width {approximate(width)}, past 64-bit integers")
        return cls(recipe)

    @property
    def network_class(self) -> NetworkClass:
        """The class of targets."""
        return self.recipe.network_class

    @property
    def width(self) -> int:
        """m: the width of the stream."""
        return self.width_of(self.recipe)

    @property
    def fingerprint(self) -> str:
        """sha256 of the recipe."""
        return self.recipe.digest()

    def cost(self, length: int = 1) -> Cost:
        """Sizes at a sequence length."""
        return self.cost_of(self.recipe, length)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.recipe == other.recipe  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self.recipe))

    @abstractmethod
    def coordinate(self, i: int) -> Any:
        """The meaning of coordinate i of the stream."""

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """The coordinates of the stream, block by block: what each block holds and on which path."""

    @abstractmethod
    def literal(self) -> nn.Module:
        """The dense transformer of the construction, written independently: the oracle. Called with (tokens, program)."""

    @abstractmethod
    def write(self, network: Network, dtype: torch.dtype) -> Program:
        """The program of a network of this class (checked by :meth:`admit` before)."""

    def network(self, program: Program) -> Network | None:
        """The network that a program holds as it is; None where it holds path products, which have to be factored."""
        return None

    @abstractmethod
    def tree_columns(self, program: Program) -> tuple[Tensor, Tensor | None]:
        """What the backbone reads, in the coordinates of the path tree: token rows (vocab, N) and position rows, or None."""

    @abstractmethod
    def run(self, tokens: Tensor, program: Program, ctx: Context, trace: Trace | None) -> Tensor:
        """Logits for a checked program."""

    def prepare(self, program: Program) -> "Prepared":
        """What :meth:`run_rows` wants to know of a checked program, formed once for many runs."""
        return Prepared(program)

    def run_rows(self, tokens: Tensor, programs: Sequence["Prepared"], ctx: Context) -> list[Tensor]:
        """Logits of each row (1, n, out) with its own program. A machine that can shares the pass; here the rows run one after the other."""
        rows = (slice(i, i + 1) for i in range(len(tokens)))
        return [self.run(tokens[b], p.program, ctx.rows(b), None) for b, p in zip(rows, programs, strict=True)]

    def admit(self, network_class: NetworkClass) -> None:
        """Raise :class:`OutsideClass` with every difference unless targets of this class can be programmed here."""
        mine, theirs = self.network_class, network_class.for_tree()
        reasons = []
        if len(mine.stages) != len(theirs.stages):
            reasons.append(f"{len(theirs.stages)} stages, the machine has {len(mine.stages)}")
        for s, (a, b) in enumerate(zip(mine.stages, theirs.stages, strict=False)):
            if a != b:
                reasons += [f"stage {s + 1}: {d}" for d in misfits(a.to_json(), b.to_json())]
        if mine.outputs != theirs.outputs:
            reasons.append(f"{theirs.outputs} outputs, the machine has {mine.outputs}")
        if reasons:
            raise OutsideClass(f"the target is outside of the class of this {self.name} machine", reasons)

    def forward(
        self,
        tokens: Int[Tensor, "batch n"],
        program: Program,
        *,
        mask: Bool[Tensor, "batch n"] | None = None,
        positions: Int[Tensor, "batch n"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch n out"]:
        """Logits. ``mask`` is True at real tokens; ``positions`` default to the count of real tokens before each one. With a ``cache`` (new
        ones are empty) ``tokens`` go on after those that it has seen, and only they are computed."""
        self.check(program)
        check_tokens(tokens, program.vocab)
        if cache is not None:
            cache.belongs_to(program)
        if cache is not None and not self.cacheable:
            raise AnyformerError(
                "this class lets a token see later ones, or mixes tokens at fixed places: run it without a cache"
            )
        ctx = Context.of(tokens, mask, positions, cache)
        if program.positions is not None:
            check_positions(ctx.positions, program.positions.shape[0])
        ctx.begin()
        return self.run(tokens, program, ctx, None)

    @property
    def cacheable(self) -> bool:
        """Whether runs may go on from a cache: what a token computed does not depend on later ones."""
        return all(b.operator.cacheable for stage in self.network_class.stages for b in stage.branches)

    def trace(
        self,
        tokens: Int[Tensor, "batch n"],
        program: Program,
        *,
        mask: Bool[Tensor, "batch n"] | None = None,
        positions: Int[Tensor, "batch n"] | None = None,
    ) -> Trace:
        """Run and keep the attention patterns of every stage and all reads by name."""
        self.check(program)
        check_tokens(tokens, program.vocab)
        trace = Trace()
        trace.logits = self.run(tokens, program, Context.of(tokens, mask, positions), trace)
        return trace

    def check(self, program: Program) -> None:
        """Raise where the program is for another machine."""
        if not isinstance(program, Program):
            raise AnyformerError(f"a program is needed, got {type(program).__name__}; make one with anyformer.compile")
        if program.recipe != self.recipe:
            raise AnyformerError(
                f"this program was made for another machine (fingerprint {program.fingerprint[:8]}..., this one is "
                f"{self.fingerprint[:8]}...); compile it again for this machine or use program.machine()"
            )
        if program.placement is not None and not self.places:
            raise AnyformerError(f"this program has a placement, which a {self.name} machine does not know; the file is damaged")
        self.check_own_tensors(program)

    def check_own_tensors(self, program: Program) -> None:
        """Raise where a program made for this machine brings tensors that it would ignore, or lacks one that it needs."""
        if program.readout is not None or program.norms is not None:
            raise AnyformerError(
                f"this program has a read-out or norms of its own, which a {self.name} machine would ignore: it reads its own leaves"
            )


def misfits(machine: Any, target: Any) -> list[str]:
    """The smallest parts in which the JSON data of a target's class differ from a machine's, in words."""
    return [f"{where} is {_short(b)}, the machine has {_short(a)}" for where, a, b in differences(machine, target)]


def _short(value: Any) -> str:
    """A specification's JSON in a few words: nested ones by their type."""
    if isinstance(value, list):
        return "[" + ", ".join(_short(v.get("operator", v)) if isinstance(v, dict) else repr(v) for v in value) + "]"
    if not (isinstance(value, dict) and "type" in value):
        return repr(value)
    fields = {
        k: v["type"] if isinstance(v, dict) else repr(v) for k, v in value.items() if k != "type" and not isinstance(v, list)
    }
    return f"{value['type']}({', '.join(f'{k}={v}' for k, v in fields.items())})"
