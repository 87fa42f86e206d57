"""Network classes: a network without its tensors. Operators and sizes, which is all that a fixed backbone may know of its targets.

A class is a value: two differently trained targets of one class compare equal, and a machine is made from it. The fields beyond operators and
map kinds say how many numbers describe a network; a path tree does not depend on them (:meth:`NetworkClass.for_tree`), a stored program does.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool
from torch import Tensor

from anyformer.errors import AnyformerError, require_choice, require_size
from anyformer.operators import Attention, Gate, Identity, Normed, Operator
from anyformer.spec import Spec

READS = ("general", "features")
"""What a class knows of probe columns: anything, or the features themselves."""


@dataclass(frozen=True)
class BranchClass(Spec):
    """A bank of branches without its tensors: the operator, and what kind of map ("identity", "constant", "diagonal", "centred",
    "general").

    The other fields say how many numbers describe it, which a stored program needs to know and a path tree does not: the ``rank`` of
    general maps (None: dense), ``kv_heads`` (heads of one group share their keys and values; None: each has its own), whether its
    ``reads`` are anything ("general") or the "features" themselves, and whether it is the ``twin`` of the bank before it: units with the same
    probes that write the same rows (an up-bias beside a gated MLP).
    """

    operator: Operator
    map: str = "general"
    rank: int | None = None
    kv_heads: int | None = None
    reads: str = "general"
    twin: bool = False

    def __post_init__(self) -> None:
        require_choice("BranchClass", "twin", self.twin, (True, False))
        require_choice("BranchClass", "map", self.map, ("identity", "constant", "diagonal", "centred", "general"))
        require_choice("BranchClass", "reads", self.reads, READS)
        for name in ("rank", "kv_heads"):
            if getattr(self, name) is not None:
                require_size("BranchClass", name, getattr(self, name))
        if not isinstance(self.operator, Operator):
            raise AnyformerError(f"BranchClass: operator must be an Operator, got {type(self.operator).__name__}")
        if self.kv_heads is not None and self.operator.count % self.kv_heads:
            raise AnyformerError(f"BranchClass: kv_heads must divide {self.operator.count} heads, got {self.kv_heads}")

    def for_tree(self) -> "BranchClass":
        """What a path tree depends on: the operator, and whether the map is the identity or reads the constant feature alone."""
        return BranchClass(self.operator, self.map if self.map in ("identity", "constant") else "general")

    @property
    def is_residual(self) -> bool:
        """Whether it is the residual branch: the identity on tokens and on features (plus a bias)."""
        return isinstance(self.operator, Identity) and self.map == "identity"

    @property
    def is_gated(self) -> bool:
        """Whether it is a bank of MLP units, bare or behind a norm."""
        return isinstance(inner_operator(self.operator), Gate)


@dataclass(frozen=True)
class StageClass(Spec):
    """A stage without its tensors: its banks of branches, and the width of the columns that they share (a norm's).

    ``width`` (D', the constant feature counted) is that of the stream after it, ``shared_reads`` whether the shared columns are anything
    ("general") or the "features" themselves: like the finer fields of :class:`BranchClass`, for stored programs.
    """

    branches: tuple[BranchClass, ...]
    width: int | None = None
    shared_reads: str = "general"

    def __post_init__(self) -> None:
        if not self.branches:
            raise AnyformerError("StageClass: a stage needs at least one branch")
        if len({b.operator.shared for b in self.branches if b.operator.shared}) > 1:
            raise AnyformerError("StageClass: branches of one stage must share the same norm columns")
        require_choice("StageClass", "shared_reads", self.shared_reads, READS)
        if self.width is not None:
            require_size("StageClass", "width", self.width)

    def for_tree(self) -> "StageClass":
        """What a path tree depends on."""
        return StageClass(tuple(b.for_tree() for b in self.branches))

    @cached_property
    def shared(self) -> int:
        """Number of probe columns that branches share."""
        return max(b.operator.shared for b in self.branches)

    @cached_property
    def probes(self) -> int:
        """Number of all probe columns."""
        return self.shared + sum(b.operator.count * b.operator.reads for b in self.branches)

    @cached_property
    def count(self) -> int:
        """Number of branches, over all banks."""
        return sum(b.operator.count for b in self.branches)

    def constant_reads(self) -> Bool[Tensor, "probes"]:
        """True at probe columns that may read nothing but the constant feature."""
        parts = [torch.zeros(self.shared, dtype=torch.bool)]
        for branch in self.branches:
            own = torch.zeros(branch.operator.count, branch.operator.reads, dtype=torch.bool)
            own[:, list(branch.operator.constant_reads)] = True
            parts.append(own.flatten())
        return torch.cat(parts)

    @cached_property
    def residual(self) -> int | None:
        """The index of the residual branch among the banks, or None."""
        return next((i for i, b in enumerate(self.branches) if b.is_residual), None)

    @cached_property
    def attention(self) -> Attention | None:
        """The stage's (first) attention bank, bare or behind a norm."""
        banks = [inner_operator(b.operator) for b in self.branches]
        return next((op for op in banks if isinstance(op, Attention)), None)


@dataclass(frozen=True)
class NetworkClass(Spec):
    """Operators and sizes, no tensors: what every machine is built from.

    ``outputs`` is the width of a leaf (vocabulary if there is a read-out, else features), ``features`` D, ``max_positions`` the
    length of a position table or None, ``constant`` whether the stream holds the constant feature beside the D. A machine that does not
    depend on features or vocabulary holds None there.
    """

    stages: tuple[StageClass, ...]
    outputs: int
    features: int | None = None
    vocab: int | None = None
    max_positions: int | None = None
    constant: bool = False

    def __post_init__(self) -> None:
        require_size("NetworkClass", "outputs", self.outputs)
        for name, least in (("features", 1 - self.constant), ("vocab", 1), ("max_positions", 1)):
            if getattr(self, name) is not None:
                require_size("NetworkClass", name, getattr(self, name), least)
        if not all(isinstance(s, StageClass) for s in self.stages):
            raise AnyformerError("NetworkClass: stages must be a tuple of StageClass")

    def for_tree(self) -> "NetworkClass":
        """What a path tree depends on: stages and outputs (features, vocabulary and positions are the program's)."""
        return NetworkClass(tuple(s.for_tree() for s in self.stages), self.outputs)

    @property
    def layers(self) -> int:
        """Number of attention stages."""
        return sum(s.attention is not None for s in self.stages)

    @property
    def heads(self) -> int:
        """Largest number of heads of any stage."""
        return max((s.attention.heads for s in self.stages if s.attention), default=0)


def inner_operator(operator: Operator) -> Operator:
    """The operator itself, or what stands behind its norm."""
    return operator.inner if isinstance(operator, Normed) else operator


def key_reads(op: Operator) -> tuple[int, ...]:
    """Which own reads of an attention bank, bare or behind a norm, belong to keys."""
    inner = inner_operator(op)
    assert isinstance(inner, Attention)
    d = inner.head_dim
    keys = [i for i in range(inner.reads) if (i // d) % 2]
    if isinstance(op, Normed) and op.bias:
        keys += [inner.reads + i for i in keys if i < op.scaled_reads]
    return tuple(keys)
