"""Where a stored program keeps a network: which coordinate holds which number.

A stage ``X <- sum_b Op_b(X P_b) X M_b`` of the class becomes three fixed 0/1 layers with skip connections, all of whose numbers are in
the stream:

    read      scratch_j  +=  x_i * theta_ij      probes, and the left factors of the maps (gated units with identity activation)
    operate   mixed      +=  Op_b(scratch) values   attention, gates and norms read scratch by 0/1 routing
    write     x_j        +=  mixed_k * theta_kj   the right factors

and one more read at the end gives the outputs. ``theta`` are *constants*: coordinates in which all tokens have the same number, stored
once. Every stage has scratch of its own (it starts at 0 and is added to), and where a stage has no residual, a stream of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.classes import BranchClass, NetworkClass, StageClass, key_reads
from anyformer.errors import AnyformerError, OutsideClass


@dataclass(frozen=True)
class Block:
    """Consecutive coordinates ``start .. start + count - 1``; ``shape`` is how they are read as a matrix (row-major)."""

    what: str
    start: int
    shape: tuple[int, ...]

    @cached_property
    def count(self) -> int:
        """How many coordinates."""
        return prod(self.shape)

    @property
    def coordinates(self) -> Int[Tensor, "..."]:
        """The coordinates, in the block's shape."""
        return torch.arange(self.start, self.start + self.count).reshape(self.shape)


@dataclass(frozen=True)
class BankLayout:
    """Where one bank of a stage lives: from where on its columns stand in the stage's read block, its biases, its rows in the write block,
    its row among the norms' weights and among the shifts (biases that moved into an identity map).

    Own reads that heads of a group share are stored once (``kv_heads``); those that read the constant feature alone are biases.
    """

    branch: BranchClass
    read_at: int
    bias_at: int
    write_at: int
    diagonal_at: int
    shift_at: int
    out: int

    @property
    def count(self) -> int:
        """Branches."""
        return self.branch.operator.count

    @property
    def groups(self) -> int:
        """How many of the branches have keys and values of their own."""
        return self.branch.kv_heads or self.count

    @cached_property
    def _parts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Own reads (free, constant), each split in those of every head and those of a group."""
        op = self.branch.operator
        if self.branch.reads == "features":
            return [[], []], [[], []]
        grouped = set(key_reads(op)) if self.branch.kv_heads else set()
        fixed = set(op.constant_reads)
        free = [i for i in range(op.reads) if i not in fixed]
        return tuple([[i for i in part if i not in grouped], [i for i in part if i in grouped]] for part in (free, sorted(fixed)))  # type: ignore[return-value]

    @property
    def free_parts(self) -> list[list[int]]:
        """Reads of the stream: those that every branch has of its own, those of a group."""
        return self._parts[0]

    @property
    def fixed_parts(self) -> list[list[int]]:
        """The same of reads of the constant feature alone."""
        return self._parts[1]

    def _size(self, parts: list[list[int]]) -> int:
        return self.count * len(parts[0]) + self.groups * len(parts[1])

    @property
    def reads(self) -> int:
        """Stored probe columns."""
        return self._size(self.free_parts)

    @property
    def biases(self) -> int:
        """Stored biases: probe columns of the constant feature alone."""
        return self._size(self.fixed_parts)

    @property
    def enters(self) -> int:
        """Stored columns of the maps' left factors (of dense maps: of the maps)."""
        if self.branch.map != "general" or self.branch.is_residual:
            return 0
        return self.count * self.out if self.branch.rank is None else self.groups * self.branch.rank

    @property
    def writes(self) -> int:
        """Stored rows of the maps' right factors."""
        if self.branch.map == "constant":
            return self.count
        return self.count * self.branch.rank if self.branch.map == "general" and self.branch.rank is not None else 0

    @property
    def diagonal(self) -> bool:
        """Whether it is a norm's weight."""
        return self.branch.map in ("diagonal", "centred")

    @property
    def direct(self) -> bool:
        """Whether the operator writes into the stream itself: there is no right factor."""
        return self.writes == 0 and not self.diagonal

    @property
    def twin(self) -> bool:
        """Whether its probes and its rows are those of the bank before it: only its scales are its own."""
        return self.branch.twin

    def route(self) -> Int[Tensor, "count reads"]:
        """Which stored column (probes, then biases) each own read of each branch takes."""
        op = self.branch.operator
        route = torch.zeros(op.count, op.reads, dtype=torch.int64)
        at, branches = 0, torch.arange(op.count)
        for parts in (self.free_parts, self.fixed_parts):
            for part, owner in zip(parts, (branches, branches // (op.count // self.groups)), strict=True):
                for i, read in enumerate(part):
                    route[:, read] = at + owner * len(part) + i
                at += (int(owner[-1]) + 1) * len(part)
        return route

    def value_route(self) -> Int[Tensor, "count"]:
        """Which group's values each branch takes."""
        return torch.arange(self.count) // (self.count // self.groups)


@dataclass(frozen=True)
class StageLayout:
    """One stage: ``width`` D and ``out`` D' of the stream, the constant feature counted, and its banks."""

    stage: StageClass
    width: int
    out: int
    constant: bool
    banks: tuple[BankLayout, ...]
    totals: tuple[int, int, int, int, int]
    """Columns of the read block, biases, rows of the write block, norms' weights, shifts."""

    @classmethod
    @lru_cache(maxsize=256)  # the layers of a class are alike
    def of(cls, stage: StageClass, width: int, constant: bool) -> "StageLayout":
        assert stage.width is not None
        banks: list[BankLayout] = []
        read = stage.shared if stage.shared_reads == "general" else 0
        bias = write = diagonal = shift = 0
        for branch in stage.branches:
            if branch.twin:
                before = banks[-1]
                banks.append(replace(before, branch=branch))
                continue
            bank = BankLayout(branch, read, bias, write, diagonal, shift, stage.width)
            banks.append(bank)
            read, bias, write = read + bank.reads + bank.enters, bias + bank.biases, write + bank.writes
            diagonal, shift = diagonal + bank.diagonal, shift + (branch.map == "identity")
        return cls(stage, width, stage.width, constant, tuple(banks), (read, bias, write, diagonal, shift))

    @property
    def features(self) -> int:
        """D without the constant feature."""
        return self.width - self.constant

    @property
    def shared(self) -> int:
        """Stored columns that the branches read in common (0 where they are the features)."""
        return self.stage.shared if self.stage.shared_reads == "general" else 0

    @property
    def residual(self) -> BankLayout | None:
        """The (first) residual branch: the skip connection."""
        return None if self.stage.residual is None else self.banks[self.stage.residual]

    @property
    def in_place(self) -> bool:
        """Whether the stream is added to where it is; else it gets new coordinates, since what was there cannot be taken away."""
        return self.residual is not None and not any(bank.direct for bank in self.banks if bank is not self.residual)

    def scales_of(self, bank: BankLayout) -> slice:
        """Where a twin's scales stand among those of the stage."""
        start = sum(b.count for b in self.banks[: self.banks.index(bank)] if b.twin)
        return slice(start, start + bank.count)

    @property
    def moved(self) -> list[BankLayout]:
        """Banks whose values are the stream plus a shift: identity maps behind an operator."""
        return [b for b in self.banks if b.branch.map == "identity" and b is not self.residual and self.constant]

    @cached_property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stage's constants, in their order."""
        read, bias, write, diagonal, shift = self.totals
        shapes: dict[str, tuple[int, ...]] = {
            "read": (self.width, read),
            "bias": (bias,),
            "write": (write, self.out),
            "diagonal": (diagonal, self.features),
            "shift": (shift if self.constant else 0, self.width),
            "scales": (sum(b.count for b in self.banks if b.twin),),
        }
        return {name: shape for name, shape in shapes.items() if 0 not in shape}

    @cached_property
    def scratch(self) -> dict[str, int]:
        """Sizes of the stage's scratch blocks, in their order."""
        centred = self.features if any(b.branch.map == "centred" for b in self.banks) else 0
        sizes = {
            "read": self.sizes.get("read", (0, 0))[1],
            "bias": self.sizes.get("bias", (0,))[0],
            "centred": centred,
            "moved": len(self.moved) * self.width,
            "scales": self.sizes.get("scales", (0,))[0],
            "mixed": self.totals[2],
            "normed": sum(b.diagonal for b in self.banks) * self.features,
            "stream": 0 if self.in_place else self.out,
        }
        return {name: size for name, size in sizes.items() if size}


@dataclass(frozen=True)
class Layout:
    """All coordinates of a stored-program machine: constants, then the stream, then scratch, then the outputs."""

    network: NetworkClass

    def __post_init__(self) -> None:
        problems = list(_problems(self.network))
        if problems:
            raise OutsideClass("a stored program cannot hold this class", problems)

    @property
    def width_in(self) -> int:
        """D of the embedding, the constant feature counted."""
        assert self.network.features is not None
        return self.network.features + self.network.constant

    @cached_property
    def stages(self) -> tuple[StageLayout, ...]:
        """The stages' layouts."""
        width, out = self.width_in, []
        constant = self.network.constant
        for stage in self.network.stages:
            out.append(StageLayout.of(stage, width, constant))
            width = out[-1].out
            constant = constant and _keeps_constant(out[-1])
        return tuple(out)

    @property
    def width_out(self) -> int:
        """D after the last stage."""
        return self.stages[-1].out if self.stages else self.width_in

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Every block of coordinates in order."""
        blocks: list[Block] = []
        at = 0

        def add(what: str, *shape: int) -> None:
            nonlocal at
            blocks.append(Block(what, at, shape))
            at += blocks[-1].count

        for s, stage in enumerate(self.stages):
            for name, shape in stage.sizes.items():
                add(f"stage {s + 1} {name} constants", *shape)
        add("readout constants", self.width_out, self.network.outputs)
        for width in self.centrings:
            add(f"-1/{width}", 1)
        add("stream", self.width_in)
        for s, stage in enumerate(self.stages):
            for name, size in stage.scratch.items():
                add(f"stage {s + 1} {name}", size)
        add("outputs", self.network.outputs)
        return tuple(blocks)

    @cached_property
    def centrings(self) -> tuple[int, ...]:
        """The widths D that are centred: -1/D is a constant."""
        return tuple(sorted({s.features for s in self.stages if "centred" in s.scratch}))

    @cached_property
    def _by_name(self) -> dict[str, Block]:
        return {block.what: block for block in self.blocks}

    def block(self, what: str) -> Block:
        """A block by its name."""
        return self._by_name[what]

    @property
    def constants(self) -> int:
        """How many coordinates are constants: the first ones."""
        return self.block("stream").start

    @property
    def width(self) -> int:
        """m."""
        last = self.blocks[-1]
        return last.start + last.count

    @property
    def scratch(self) -> int:
        """Coordinates that hold neither constants nor the embedding."""
        return self.width - self.constants - self.width_in

    def where(self, i: int) -> tuple[Block, int]:
        """The block of a coordinate and the offset inside."""
        if not isinstance(i, int) or not 0 <= i < self.width:
            raise AnyformerError(f"coordinate must lie in 0..{self.width - 1}, got {i}")
        low, high = 0, len(self.blocks) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks[middle].start <= i else (low, middle - 1)
        return self.blocks[low], i - self.blocks[low].start

    @cached_property
    def fields(self) -> tuple[dict[str, Block], ...]:
        """The blocks of every stage's constants by their short names; the last entry holds the read-out."""
        stages = [{name: self.block(f"stage {s + 1} {name} constants") for name in st.sizes} for s, st in enumerate(self.stages)]
        return (*stages, {"readout": self.block("readout constants")})

    def views(self, constants: Float[Tensor, "c"]) -> list["Stored"]:
        """The constants of a program as the matrices of every stage, then of the read-out. Nothing is copied."""
        return [Stored(constants, fields) for fields in self.fields]


class Stored(Mapping[str, Tensor]):
    """The constants of one stage by name, each a view of all constants as a matrix."""

    def __init__(self, constants: Float[Tensor, "c"], fields: dict[str, Block]):
        self.constants, self.fields = constants, fields

    def __getitem__(self, name: str) -> Tensor:
        block = self.fields[name]
        return self.constants[block.start : block.start + block.count].view(block.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


def _keeps_constant(stage: StageLayout) -> bool:
    """Whether the stream after a stage still holds the constant feature: only a diagonal map may drop it."""
    return not (stage.out == stage.width - 1 and any(b.diagonal for b in stage.banks))


def _problems(network: NetworkClass) -> Iterator[str]:
    if network.features is None or any(stage.width is None for stage in network.stages):
        yield "it does not say how wide its stream is; make the machine from a target or a full NetworkClass"
