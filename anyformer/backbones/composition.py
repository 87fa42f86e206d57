"""Known composition structure: which branches feed which reads and values of later branches.

    b feeds a probe column p  iff  M_b p != 0,      b feeds the value of c  iff  M_b M_c != 0,      M_b = E0 for the embedding

Where a branch feeds nothing of a subtree of the path tree, its program is 0 there, and the subtree is not needed
(:mod:`anyformer.backbones.composed_tree`). A residual branch passes on what was written before it, so only the last branch that is
no residual counts; its bias is a writer, which reads the constant feature. A structure is declared
(:meth:`Composition.where`, :meth:`Composition.chains`) or read off a target (:meth:`Composition.of`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.backbones.tree import Tree
from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.memory import require_memory
from anyformer.network import Branch, Network
from anyformer.operators import Attention, Identity
from anyformer.spec import Spec
from anyformer.targets.reading import network_class as class_of
from anyformer.targets.reading import read

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of ports, in order, none touching the next."""


@dataclass(frozen=True)
class Part:
    """Something that writes or reads, by number, all from 0: stage (-1: the embedding), bank, branch in the bank.

    ``what`` of writers: "embedding", "branch", or "bias" (of a residual branch, which otherwise passes on what others wrote); of
    readers: "norm" (its shared columns), "reads" (query, key or gate columns), "value", "bias" (again the residual's), "outputs".
    """

    stage: int
    bank: int
    branch: int
    what: Literal["embedding", "branch", "norm", "reads", "value", "bias", "outputs"]


@dataclass(frozen=True)
class Ports:
    """All that can be fed in a class, numbered: of every stage its probe columns in the order of the layout, then the value of
    each branch; at last the outputs. A writer's ports are counted from the stage after it, up to the first without residual."""

    network_class: NetworkClass

    @cached_property
    def tree(self) -> Tree:
        """Names, and the number of stages."""
        return Tree.of(self.network_class)

    def size(self, s: int) -> int:
        """Number of ports of stage s; of the outputs for s = S."""
        stages = self.network_class.stages
        return self.network_class.outputs if s == len(stages) else stages[s].probes + stages[s].count

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Entry s: how many ports stand in stage s and in those that it passes the stream on to, through residuals."""
        reach = [self.network_class.outputs]
        for s in reversed(range(len(self.network_class.stages))):
            passed = self.network_class.stages[s].residual is not None
            reach.append(self.size(s) + (reach[-1] if passed else 0))
        return tuple(reversed(reach))

    @cached_property
    def writers(self) -> int:
        """Number of writers: the embedding and all branches."""
        return 1 + sum(stage.count for stage in self.network_class.stages)

    def all_writers(self) -> Iterator[Part]:
        """The embedding, then every branch in the order of the layout."""
        yield Part(-1, 0, 0, "embedding")
        for s, stage in enumerate(self.network_class.stages):
            for bank, branch in enumerate(stage.branches):
                for g in range(branch.operator.count):
                    yield Part(s, bank, g, "bias" if branch.is_residual else "branch")

    def readers(self, stage: int) -> Iterator[tuple[Part, int, int]]:
        """Every reader within reach of a writer of ``stage``, and its ports: first, last + 1."""
        stages, at, s = self.network_class.stages, 0, stage + 1
        while s < len(stages):
            if stages[s].shared:
                yield Part(s, 0, 0, "norm"), at, (at := at + stages[s].shared)
            for bank, branch in enumerate(stages[s].branches):
                for g in range(branch.operator.count if branch.operator.reads else 0):
                    yield Part(s, bank, g, "reads"), at, (at := at + branch.operator.reads)
            for bank, branch in enumerate(stages[s].branches):
                for g in range(branch.operator.count):
                    yield Part(s, bank, g, "bias" if branch.is_residual else "value"), at, (at := at + 1)
            if stages[s].residual is None:
                return
            s += 1
        yield Part(s, 0, 0, "outputs"), at, at + self.network_class.outputs

    def name(self, part: Part) -> str:
        """``head 1 of layer 2 attention``, ``the reads of head 1 of ...``, ``the embedding``, ``the outputs``."""
        if part.what in ("embedding", "outputs"):
            return f"the {part.what}"
        stage = self.tree.stage_name(part.stage)
        if part.what == "norm":
            return f"the norm of {stage}"
        branch = f"{self.tree.branch_name(part.stage, part.bank, part.branch)} of {stage}"
        return branch if part.what == "branch" else f"the {part.what} of {branch}"


@dataclass(frozen=True)
class Composition(Spec):
    """Which writers feed which ports of a class: for every writer (the embedding, then all branches) the :class:`Ports` that it
    feeds, as ranges; None: everything feeds everything. A product of relative size up to ``tolerance`` counts as zero.

    The relative size is ``|M_b p| / (|M_b| |p|)``, Frobenius norms in float64. With ``tolerance=0`` only exact zeros count, and
    programs are exact; above, the error is whatever :func:`anyformer.verify` measures.
    """

    feeds: tuple[Ranges, ...] | None = None
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        tolerance = self.tolerance
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
            raise AnyformerError(f"Composition: tolerance must be a number in [0, 1), got {tolerance!r}")
        if self.feeds is not None:
            if not isinstance(self.feeds, tuple):
                raise AnyformerError(
                    f"Composition: feeds must be a tuple of ranges for every writer, or None, got {self.feeds!r:.60}"
                )
            for writer, ranges in enumerate(self.feeds):
                if not _are_ranges(ranges):
                    raise AnyformerError(
                        f"Composition: writer {writer} needs ranges (first, last + 1) in order, apart from each other, got {ranges!r:.60}"
                    )

    @classmethod
    def of(cls, target: Any, tolerance: float = 0.0) -> "Composition":
        """The structure of a target (a module or a Network): a product counts as zero where its relative size is at most ``tolerance``."""
        cls(None, tolerance)  # a bad tolerance is refused before any work
        network = read(target)
        ports = Ports(network.network_class)
        return cls._packed(ports, [_ranges(~(sizes <= tolerance)) for _, sizes in product_sizes(network)], tolerance)

    @classmethod
    def where(cls, target: Any, feeds: Callable[[Part, Part], bool], tolerance: float = 0.0) -> "Composition":
        """A declared structure: ``feeds(writer, reader)`` for every pair that a residual, or none at all, stands between."""
        ports = Ports(class_of(target))
        readers = [list(ports.readers(s)) for s in range(-1, len(ports.network_class.stages))]
        found = [
            _merged([(first, last) for reader, first, last in readers[writer.stage + 1] if feeds(writer, reader)])
            for writer in ports.all_writers()
        ]
        return cls._packed(ports, found, tolerance)

    @classmethod
    def chains(cls, target: Any, tolerance: float = 0.0) -> "Composition":
        """Parallel chains: head h of a layer feeds head h of the next one, reads and value, and the outputs; nothing else."""
        known = class_of(target)
        problems = [
            f"stage {s + 1} is more than one bank of bare heads (and a residual)"
            for s, stage in enumerate(known.stages)
            if [b for b in stage.branches if not b.is_residual and not isinstance(b.operator, Attention)]
            or sum(isinstance(b.operator, Attention) for b in stage.branches) != 1
        ]
        if problems:
            raise OutsideClass("parallel chains need attention-only stages", problems)

        def feeds(writer: Part, reader: Part) -> bool:
            if writer.what != "branch" or reader.what == "outputs":
                return True
            return reader.what != "bias" and reader.stage == writer.stage + 1 and reader.branch == writer.branch

        return cls.where(known, feeds, tolerance)

    @classmethod
    def _packed(cls, ports: Ports, feeds: list[Ranges], tolerance: float) -> "Composition":
        """None where everything feeds everything, so that equal structures compare equal."""
        everything = all(
            ranges == ((0, ports.reach[writer.stage + 1]),) for writer, ranges in zip(ports.all_writers(), feeds, strict=True)
        )
        return cls(None if everything else tuple(feeds), tolerance)

    def check(self, network_class: NetworkClass) -> None:
        """Raise in one line where the structure is not one of this class."""
        if self.feeds is None:
            return
        ports = Ports(network_class)
        if len(self.feeds) != ports.writers:
            raise AnyformerError(
                f"this composition is for another class: it has {len(self.feeds)} writers, the class has {ports.writers} (the embedding "
                "and every branch)"
            )
        require_memory(sum(ports.reach[writer.stage + 1] for writer in ports.all_writers()) // 8, "this composition")
        for writer, ranges in zip(ports.all_writers(), self.feeds, strict=True):
            reach = ports.reach[writer.stage + 1]
            if ranges and ranges[-1][1] > reach:
                raise AnyformerError(
                    f"this composition is for another class: {ports.name(writer)} feeds port {ranges[-1][1]}, it reaches {reach} ports"
                )

    def undeclared(self, network: Network) -> Iterator[tuple[str, str, float]]:
        """Every (writer, reader, relative size) of a network whose product is not zero although the structure says so."""
        if self.feeds is None:
            return
        ports = Ports(network.network_class)
        for (writer, sizes), ranges in zip(product_sizes(network), self.feeds, strict=True):
            outside = sizes.clone()
            for first, last in ranges:
                outside[first:last] = 0
            if not bool(outside.any()):
                continue
            for reader, first, last in ports.readers(writer.stage):
                size = float(outside[first:last].max())
                if size != 0:
                    yield ports.name(writer), ports.name(reader), size


def product_sizes(network: Network) -> Iterator[tuple[Part, Float[Tensor, "ports"]]]:
    """For every writer the relative sizes of its products with all ports within reach; 0 exactly where the product is 0."""
    with torch.no_grad():
        ports = Ports(network.network_class)
        final = network.final_readout().double()
        stages = []
        for stage in network.stages:
            probes = [p.double() for p in stage.probes()]
            columns = torch.cat(probes, 1) if probes else None
            stages.append((columns, torch.cat([_written(b) for b in stage.branches])))
        tables = [network.embedding] if network.positions is None else [network.embedding, network.positions]
        rows = chain([torch.cat(tables).double()], (matrix for _, maps in stages for matrix in maps))
        for writer, matrix in zip(ports.all_writers(), rows, strict=True):
            sizes, s = [], writer.stage + 1
            while s < len(stages):
                columns, maps = stages[s]
                if columns is not None:
                    sizes.append(_relative(matrix, columns.T[:, :, None]))
                sizes.append(_relative(matrix, maps))
                if ports.network_class.stages[s].residual is None:
                    break
                s += 1
            else:
                sizes.append(_relative(matrix, final.T[:, :, None]))
            yield writer, torch.cat(sizes)


def _written(branch: Branch) -> Float[Tensor, "count D out"]:
    """What a bank writes, densely; of a residual branch its bias alone: ``e_const shift^T``."""
    if isinstance(branch.operator, Identity) and branch.map.kind == "identity":
        shift = branch.map.tensors()
        size = branch.map.shape[0]
        matrix = torch.zeros(1, size, size, dtype=torch.float64)
        if shift:
            matrix[0, -1] = shift[0].double()
        return matrix
    return branch.map.to_dense().double()


def _relative(matrix: Float[Tensor, "rows D"], maps: Float[Tensor, "count D out"]) -> Float[Tensor, "count"]:
    """``|matrix M| / (|matrix| |M|)`` for each M of a stack; a product that is not zero never counts as 0 by underflow."""
    chunk = max(1, 2**22 // max(1, matrix.shape[0] * maps.shape[2]))
    sizes = []
    for some in maps.split(chunk):
        product = matrix @ some
        size = torch.linalg.matrix_norm(product) / (torch.linalg.matrix_norm(matrix) * torch.linalg.matrix_norm(some))
        there = product.ne(0).flatten(1).any(1)
        sizes.append(torch.where(there, size.clamp(min=1e-300), torch.zeros_like(size)))
    return torch.cat(sizes)


def _are_ranges(ranges: Any) -> bool:
    """Whether these are :data:`Ranges`."""
    if not isinstance(ranges, tuple):
        return False
    end = -1
    for pair in ranges:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(type(i) is int for i in pair)):
            return False
        if not end < pair[0] < pair[1]:
            return False
        end = pair[1]
    return True


def _merged(ranges: list[tuple[int, int]]) -> Ranges:
    """Ranges in order, touching ones joined."""
    merged: list[tuple[int, int]] = []
    for first, last in ranges:
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def _ranges(flags: Tensor) -> Ranges:
    """Where flags are True."""
    return _merged([(i, i + 1) for i in flags.nonzero()[:, 0].tolist()])
