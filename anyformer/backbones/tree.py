"""The path tree: which coordinate of a fixed backbone holds which read of which path.

    node(s) = [ probe columns of stage s+1 ] ++ [ node(s+1) for each branch ],    node(S) = [ output columns ]
    width(s) = probes(s+1) + branches(s+1) * width(s+1),                          width(S) = outputs

(arXiv 2605.31423, Theorem 3.1, for attention only; the same recursion holds for every stage of the language.) A program
holds, at the coordinates of path (b1..bs), the product ``E0 M_b1 .. M_bs`` times the columns that are read there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool
from torch import Tensor

from anyformer.classes import BranchClass, NetworkClass, StageClass, inner_operator
from anyformer.errors import AnyformerError
from anyformer.operators import Gate, Identity, Operator


@dataclass(frozen=True)
class Bank:
    """Where one bank of branches lives inside node(s): own reads at ``read_at``, children at ``child_at`` (offsets)."""

    branch: BranchClass
    read_at: int
    child_at: int


@dataclass(frozen=True)
class Block:
    """Consecutive coordinates: ``what`` they hold (a stage's reads, or "output"), on which ``path``, from ``start`` on, how many."""

    what: str
    path: tuple[str, ...]
    start: int
    count: int


@dataclass(frozen=True)
class Coordinate:
    """What one coordinate of the stream means: ``what`` (a read of the named ``stage``, or an output: None) on a ``path``."""

    stage: str | None
    what: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        path = f"path ({', '.join(self.path)})" if self.path else "the root path"
        return f"{self.what} of {path}" if self.stage is None else f"{self.what}, {self.stage}, of {path}"


@dataclass(frozen=True)
class Tree:
    """The layout for a list of stages and a leaf width. Sizes are Python integers and may be astronomically large."""

    stages: tuple[StageClass, ...]
    outputs: int

    @classmethod
    def of(cls, network: NetworkClass) -> "Tree":
        """The tree of a class."""
        return cls(network.stages, network.outputs)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """width(0), ..., width(S)."""
        widths = [self.outputs]
        for stage in reversed(self.stages):
            widths.append(stage.probes + stage.count * widths[-1])
        return tuple(reversed(widths))

    @property
    def width(self) -> int:
        """m = width(0)."""
        return self.widths[0]

    @cached_property
    def all_banks(self) -> tuple[tuple[Bank, ...], ...]:
        """The banks of every stage with their offsets in node(s)."""

        def banks(s: int, stage: StageClass) -> Iterator[Bank]:
            read_at, child_at = stage.shared, stage.probes
            for branch in stage.branches:
                yield Bank(branch, read_at, child_at)
                read_at += branch.operator.count * branch.operator.reads
                child_at += branch.operator.count * self.widths[s + 1]

        return tuple(tuple(banks(s, stage)) for s, stage in enumerate(self.stages))

    def banks(self, s: int) -> tuple[Bank, ...]:
        """The banks of stage s (0-based) with their offsets in node(s)."""
        return self.all_banks[s]

    @cached_property
    def stage_names(self) -> tuple[str, ...]:
        """``layer 2 attention``, ``layer 2 MLP``, ``norm stage 5 (after layer 2)``; all different."""
        names, layer = [], 0
        for s, stage in enumerate(self.stages):
            operators = [inner_operator(b.operator) for b in stage.branches]
            layer += stage.attention is not None
            if stage.attention is not None:
                names.append(f"layer {layer} attention")
            elif any(isinstance(op, Gate) for op in operators):
                names.append(f"layer {layer} MLP")
            elif s == len(self.stages) - 1:
                names.append(f"final {operators[-1].noun}")
            else:
                names.append(f"{operators[-1].noun} stage {s + 1} (after layer {layer})")
        seen = [names[: s + 1].count(name) for s, name in enumerate(names)]
        return tuple(name if names.count(name) == 1 else f"{name} {k}" for name, k in zip(names, seen, strict=True))

    def stage_name(self, s: int) -> str:
        """What stage s (0-based) is called."""
        return self.stage_names[s]

    @cached_property
    def bank_names(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """For each stage and bank what stands before and after a branch's number: ``("unit", " bias")``; different in a stage."""

        def names(stage: StageClass) -> Iterator[tuple[str, str]]:
            before: list[Operator] = []
            for branch in stage.branches:
                op = inner_operator(branch.operator)
                if isinstance(branch.operator, Identity):
                    yield {"identity": "residual", "constant": "constant"}.get(branch.map, "linear"), ""
                else:
                    yield op.noun, " bias" if branch.map == "constant" and op in before else ""
                before.append(op)

        def numbered(stage: StageClass) -> tuple[tuple[str, str], ...]:
            plain = list(names(stage))
            return tuple(
                (noun, suffix if plain.count((noun, suffix)) == 1 else f"{suffix} (bank {bank + 1})")
                for bank, (noun, suffix) in enumerate(plain)
            )

        return tuple(map(numbered, self.stages))

    def branch_name(self, s: int, bank: int, g: int) -> str:
        """``head 1``, ``unit 7``, ``residual``, ``constant``."""
        noun, suffix = self.bank_names[s][bank]
        return f"{noun} {g + 1}{suffix}" if self.stages[s].branches[bank].operator.count > 1 else f"{noun}{suffix}"

    def coordinate(self, i: int) -> Coordinate:
        """The meaning of coordinate i, 0 <= i < width."""
        if not 0 <= i < self.width:
            raise AnyformerError(f"coordinate must lie in 0..{self.width - 1}, got {i}")
        path: tuple[str, ...] = ()
        for s, stage in enumerate(self.stages):
            if i < stage.probes:
                return Coordinate(self.stage_name(s), self.read_name(s, i), path)
            for index, bank in enumerate(self.banks(s)):
                g, rest = divmod(i - bank.child_at, self.widths[s + 1])
                if i - bank.child_at >= 0 and g < bank.branch.operator.count:
                    path, i = (*path, self.branch_name(s, index, g)), rest
                    break
        return Coordinate(None, f"output {i + 1}", path)

    def read_name(self, s: int, i: int) -> str:
        """What probe column i of stage s is: ``query 3 of head 2``, ``feature 5 (norm)``."""
        if i < self.stages[s].shared:
            return f"feature {i + 1} (norm)"
        for index, bank in enumerate(self.banks(s)):
            op = bank.branch.operator
            g, column = divmod(i - bank.read_at, max(op.reads, 1))
            if op.reads and i >= bank.read_at and g < op.count:
                return f"{op.read_name(column)} of {self.branch_name(s, index, g)}"
        raise AnyformerError(f"stage {s + 1} has {self.stages[s].probes} probe columns, there is no column {i}")

    def blocks(self) -> Iterator[Block]:
        """All blocks, in the order of the coordinates."""

        waiting: list[tuple[int, int, tuple[str, ...]]] = [(0, 0, ())]
        while waiting:
            s, at, path = waiting.pop()
            if s == len(self.stages):
                yield Block("output", path, at, self.outputs)
                continue
            yield Block(self.stage_name(s), path, at, self.stages[s].probes)
            children = [
                (s + 1, at + bank.child_at + g * self.widths[s + 1], (*path, self.branch_name(s, index, g)))
                for index, bank in enumerate(self.banks(s))
                for g in range(bank.branch.operator.count)
            ]
            waiting += reversed(children)

    def constant_columns(self) -> Bool[Tensor, "m"]:
        """True at coordinates that are the same number for every token: below a constant map, and bias columns."""
        flags = torch.zeros(self.outputs, dtype=torch.bool)
        for s in reversed(range(len(self.stages))):
            parts = [self.stages[s].constant_reads()]
            for branch in self.stages[s].branches:
                child = torch.ones_like(flags) if branch.map == "constant" else flags
                parts.append(child.repeat(branch.operator.count))
            flags = torch.cat(parts)
        return flags
