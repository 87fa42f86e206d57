"""The common language: a transformer is a list of stages, a stage is a sum of branches.

    X  <-  sum_b  Op_b(X P_b) X M_b        X: (n, D),  P_b: (D, reads) probes,  M_b: (D, D') map,  Op_b: acts on tokens

Targets are read into this form, fixed backbones are written from it, and :meth:`Network.run` evaluates it stage by stage: the
reference of everything else. A :class:`NetworkClass` is the same list without tensors (:mod:`anyformer.classes`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.classes import BranchClass, NetworkClass, StageClass, inner_operator, key_reads
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.maps import ConstantMap, DiagonalMap, IdentityMap, LinearMap, LowRankMap
from anyformer.operators import Attention, Context, Operator, TokenMap
from anyformer.operators import primitives as P
from anyformer.operators.operator import INTEGERS


@dataclass(frozen=True, eq=False)
class Branch:
    """A bank of branches: an operator, its own probe columns (D, count * reads; branch by branch), and a bank of maps.

    ``kv_heads`` declares that the heads of each group have the same key columns and the same left factor of their map; ``reads`` =
    "features" that the probe columns are the features themselves; ``twin`` that its probes, and the rows of its (scaled constant) map, are
    those of the bank before it. Declared facts are checked and make stored programs smaller.
    """

    operator: Operator
    probes: Float[Tensor, "D reads"] | None
    map: LinearMap
    kv_heads: int | None = None
    reads: str = "general"
    twin: bool = False

    def branch_class(self) -> BranchClass:
        """This bank without its tensors."""
        return BranchClass(self.operator, self.map.kind, self.map.rank, self.kv_heads, self.reads, self.twin)


@dataclass(frozen=True, eq=False)
class Stage:
    """A sum of branches; ``shared`` (D, shared) are the probe columns that they read in common (``shared_reads`` = "features": the
    features themselves)."""

    branches: tuple[Branch, ...]
    shared: Float[Tensor, "D shared"] | None = None
    shared_reads: str = "general"

    @property
    def width(self) -> int:
        """D': the width of the stream after this stage."""
        return self.branches[0].map.shape[1]

    def network_class(self) -> StageClass:
        """This stage without its tensors."""
        return StageClass(tuple(b.branch_class() for b in self.branches), self.width, self.shared_reads)

    def probes(self) -> list[Tensor]:
        """All probe columns in the order of the layout: shared first, then each bank's own."""
        own = [b.probes for b in self.branches if b.probes is not None]
        return own if self.shared is None else [self.shared, *own]


class LazyStages(Sequence[Stage]):
    """Stages that are made each time they are looked at: a large target is then never held twice. ``makers`` give one or more stages each,
    as many whenever they are called."""

    def __init__(self, makers: Sequence[Callable[[], tuple[Stage, ...]]]):
        self._makers = tuple(makers)
        self._places = [(maker, i) for maker in makers for i in range(len(maker()))]

    def __iter__(self) -> Iterator[Stage]:
        for maker in self._makers:
            yield from maker()

    def __getitem__(self, s: Any) -> Any:
        if isinstance(s, slice):
            return tuple(self[i] for i in range(*s.indices(len(self))))
        maker, i = self._places[s]
        return maker()[i]

    def __len__(self) -> int:
        return len(self._places)


@dataclass(frozen=True, eq=False)
class Network:
    """A list of stages between an embedding (vocab, D), optionally positions (n_max, D), and a read-out (D, outputs) or None.

    With ``constant`` the last feature is 1 for every token (and 0 in the positions). ``source`` is the module or folder that
    the network was read from: verification runs *it*, never this reading.
    """

    embedding: Float[Tensor, "vocab D"]
    stages: Sequence[Stage]
    readout: Float[Tensor, "D_out outputs"] | None = None
    positions: Float[Tensor, "n_max D"] | None = None
    constant: bool = False
    source: Any = None
    token_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        problems = list(_shape_problems(self))
        if problems:
            raise OutsideClass("this network is not well formed", problems)

    @cached_property
    def network_class(self) -> NetworkClass:
        """The class of the network: everything but its tensors."""
        return NetworkClass(
            stages=tuple(s.network_class() for s in self.stages),
            outputs=self.final_readout().shape[1],
            features=self.embedding.shape[1] - self.constant,
            vocab=self.embedding.shape[0],
            max_positions=None if self.positions is None else self.positions.shape[0],
            constant=self.constant,
        )

    def final_readout(self) -> Float[Tensor, "D_out outputs"]:
        """The read-out, or the identity on the features where there is none (the constant feature is no output)."""
        if self.readout is not None:
            return self.readout
        width = self.stages[-1].width if self.stages else self.embedding.shape[1]
        identity = torch.eye(width, dtype=self.embedding.dtype, device=self.embedding.device)
        return identity[:, :-1] if self.constant else identity

    def to(self, dtype: torch.dtype) -> "Network":
        """The same network with tensors of another dtype."""

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) else value

        def cast_map(m: LinearMap) -> LinearMap:
            return replace(m, **{k: cast(v) for k, v in vars(m).items()})  # type: ignore[type-var]

        def cast_branch(b: Branch) -> Branch:
            return replace(b, probes=cast(b.probes), map=cast_map(b.map))

        stages = tuple(replace(s, branches=tuple(map(cast_branch, s.branches)), shared=cast(s.shared)) for s in self.stages)
        return replace(
            self, embedding=cast(self.embedding), stages=stages, readout=cast(self.readout), positions=cast(self.positions)
        )

    def run(
        self,
        tokens: Int[Tensor, "batch n"],
        *,
        mask: Bool[Tensor, "batch n"] | None = None,
        positions: Int[Tensor, "batch n"] | None = None,
        patterns: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n outputs"]:
        """Evaluate stage by stage. ``patterns``, a list, receives each attention bank's (batch, heads, n, n)."""
        check_tokens(tokens, self.embedding.shape[0])
        ctx = Context.of(tokens, mask, positions)
        return self.run_stream(self.first_stream(tokens, ctx), ctx, patterns=patterns)

    def first_stream(self, tokens: Int[Tensor, "batch n"], ctx: Context) -> Float[Tensor, "batch n D"]:
        """Embedding rows, plus position rows."""
        x = F.embedding(tokens.long(), self.embedding)
        if self.positions is not None:
            check_positions(ctx.positions, self.positions.shape[0])
            x = x + F.embedding(ctx.positions, self.positions)
        return x

    def run_stream(
        self,
        x: Float[Tensor, "batch n D"],
        ctx: Context,
        *,
        patterns: list[Tensor] | None = None,
        streams: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n outputs"]:
        """The outputs from a first stream: inputs may be numbers written into it."""
        return self.stream(x, ctx, patterns, streams) @ self.final_readout()

    def stream(self, x: Any, ctx: Context, patterns: list[Any] | None = None, streams: list[Any] | None = None) -> Any:
        """The stream (batch, n, D_out) after all stages, from the stream (batch, n, D) before the first: tensors, or arrays of any other
        arithmetic that the primitives know, in which the weights are then said. ``streams``, a list, receives the stream after each."""
        for stage in self.stages:
            shared = None if stage.shared is None else x @ P.weight(x, stage.shared)
            total = None
            for branch in stage.branches:
                token_map = apply_operator(branch.operator, shared, x, branch.probes, ctx)
                if patterns is not None and token_map.pattern is not None:
                    patterns.append(token_map.pattern)
                part = branch.map.leave(token_map.apply(branch.map.enter(x)))
                total = part if total is None else total + part
            assert total is not None
            x = total
            if streams is not None:
                streams.append(x)
        return x

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the network, one after the other."""
        yield from (t for t in (self.embedding, self.positions, self.readout) if t is not None)
        for stage in self.stages:
            own = [stage.shared, *(b.probes for b in stage.branches), *(t for b in stage.branches for t in b.map.tensors())]
            yield from (t for t in own if t is not None)


def apply_operator(op: Operator, shared: Any, x: Any, probes: Tensor | None, ctx: Context) -> TokenMap:
    """Read the probes from a stream and form the operator's maps on tokens."""
    own = x[..., :0] if probes is None else x @ P.weight(x, probes)
    return op(shared, own.reshape(*x.shape[:-1], op.count, op.reads), ctx)


def check_tokens(tokens: Any, vocab: int) -> None:
    """Raise unless ``tokens`` is an integer tensor (batch, n), n >= 1, with ids in 0..vocab-1."""
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype not in INTEGERS:
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise AnyformerError(f"tokens must be an integer tensor of shape (batch, n), got {got}")
    if tokens.numel() == 0:
        raise AnyformerError(f"tokens are empty, shape {tuple(tokens.shape)}; at least one sequence of one token is needed")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab:
        raise AnyformerError(f"token ids must lie in 0..{vocab - 1}, got {low if low < 0 else high}")


def check_positions(positions: Tensor, max_positions: int) -> None:
    """Raise where a position has no row in the position table."""
    if int(positions.max()) >= max_positions:
        raise AnyformerError(f"position {int(positions.max())} has no row: the position table holds 0..{max_positions - 1}")


def _shape_problems(network: Network):
    """Everything that does not fit together, one line each."""
    dtypes = {t.dtype for t in network.tensors()}
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        yield f"tensors must have one real floating dtype, got {', '.join(sorted(map(str, dtypes)))}"
    width, constant = network.embedding.shape[1], network.constant
    if network.positions is not None and network.positions.shape[1] != width:
        yield f"positions have {network.positions.shape[1]} features, the embedding {width}"
    if network.constant and not network.embedding.is_meta:
        for name, table, number in (("embedding", network.embedding, 1), ("positions", network.positions, 0)):
            if table is not None and bool(table.detach()[:, -1].ne(number).any()):
                yield f"the constant (last) feature must be {number} in every row of the {name}"
    for s, stage in enumerate(network.stages):
        shapes = set()
        wanted = max(b.operator.shared for b in stage.branches)
        got = 0 if stage.shared is None else stage.shared.shape[1]
        if got != wanted or (stage.shared is not None and stage.shared.shape[0] != width):
            yield f"stage {s + 1}: shared probes must have shape ({width}, {wanted})"
        elif stage.shared_reads == "features" and not _are_features(stage.shared, network.constant):
            yield f"stage {s + 1}: its shared reads are declared to be the features, but are not the identity on them"
        for b, branch in enumerate(stage.branches):
            where, op = f"stage {s + 1}, bank {b + 1}", branch.operator
            got = (width, 0) if branch.probes is None else tuple(branch.probes.shape)
            if got != (width, op.count * op.reads):
                yield f"{where}: probes have shape {got}, {type(op).__name__} needs ({width}, {op.count} x {op.reads})"
            elif branch.probes is not None and op.constant_reads and not branch.probes.is_meta:
                columns = branch.probes.detach().reshape(width, op.count, op.reads)[:, :, list(op.constant_reads)]
                if bool(columns[:-1].ne(0).any()):
                    yield f"{where}: bias probes may read the constant (last) feature only"
            if branch.map.count != op.count:
                yield f"{where}: {branch.map.count} maps for {op.count} branches"
            else:
                yield from (f"{where}: {problem}" for problem in _declared_problems(branch, network.constant))
                if branch.twin and not _is_twin(branch, stage.branches[b - 1] if b else None):
                    yield f"{where}: it is declared to be a twin, but its probes and rows are not those of the bank before it"
            if branch.map.kind != "general" and branch.map.shape[0] != width:
                yield f"{where}: the map is made for {branch.map.shape[0]} features, the stream has {width}"
            if isinstance(branch.map, IdentityMap) and branch.map.shift is not None and not constant:
                yield f"{where}: a shift needs the constant feature"
            if isinstance(branch.map, DiagonalMap) and len(branch.map.weights) != width - constant:
                yield f"{where}: {len(branch.map.weights)} weights for {width - constant} features"
            if branch.map.kind == "constant" and not network.constant:
                yield f"{where}: a constant map needs constant=True"
            shapes.add(branch.map.shape)
        if len(shapes) > 1 or next(iter(shapes))[0] != width:
            yield f"stage {s + 1}: maps have shapes {sorted(shapes)}; all need ({width}, D') for one D'"
        out = next(iter(shapes))[1]
        constant = constant and not (out == width - 1 and any(isinstance(b.map, DiagonalMap) for b in stage.branches))
        width = out
    if network.readout is not None and network.readout.shape[0] != width:
        yield f"the read-out has {network.readout.shape[0]} rows, the last stream {width} features"


def _are_features(columns: Tensor | None, constant: bool) -> bool:
    """Whether probe columns are the features themselves (all but the constant one)."""
    if columns is None or columns.is_meta:
        return columns is not None
    identity = torch.eye(columns.shape[0], dtype=columns.dtype, device=columns.device)
    return torch.equal(columns.detach(), identity[:, :-1] if constant else identity)


def _is_twin(branch: Branch, before: Branch | None) -> bool:
    """Whether a bank of units reads what the bank before it reads, and writes its rows, each times a scale."""
    m = branch.map
    if (
        before is None
        or before.twin
        or not isinstance(m, ConstantMap)
        or m.scales is None
        or not isinstance(before.map, LowRankMap)
    ):
        return False
    if before.map.rank != 1 or branch.probes is None or before.probes is None or before.map.count != m.count:
        return False
    pairs = ((branch.probes, before.probes), (m.rows, before.map.right[:, 0]))
    return all(a.shape == b.shape and (a.is_meta or torch.equal(a.detach(), b.detach())) for a, b in pairs)


def _declared_problems(branch: Branch, constant: bool) -> Iterator[str]:
    """Declared facts that are not so."""
    op = branch.operator
    if branch.reads == "features" and not _are_features(branch.probes, constant):
        yield "its reads are declared to be the features, but its probes are not the identity on them"
    if branch.kv_heads is None:
        return
    inner = inner_operator(op)
    if not isinstance(inner, Attention) or not isinstance(branch.map, LowRankMap) or op.count % branch.kv_heads:
        yield f"kv_heads = {branch.kv_heads} needs attention whose heads it divides, with low-rank maps"
    elif branch.probes is not None and not branch.probes.is_meta:
        heads = branch.probes.detach().unflatten(1, (branch.kv_heads, -1, op.reads))
        keys, left = heads[..., list(key_reads(op))], branch.map.left.detach().unflatten(0, (branch.kv_heads, -1))
        for what, shared in (("key columns", keys.permute(1, 2, 0, 3)), ("left factors", left)):
            if bool(shared.ne(shared[:, :1]).any()):
                yield f"heads of one group must share their {what} (kv_heads = {branch.kv_heads})"
