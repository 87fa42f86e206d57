"""A target as a list of scalars: what a sequence simulator reads beside its input, and the target that such a list describes.

    A_h = scale W_Q W_K^T and V_h of every head of every layer, the layer's bias b, and the read-out U, row by row

A description is factored back at the rank of the class where that is enough; a learned one may use all of A.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError, OutsideClass, require_number, require_size
from anyformer.maps import ConstantMap, DenseMap, IdentityMap, LinearMap
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Attention, Bidirectional, Causal, Identity, Softmax
from anyformer.program import Program
from anyformer.rasp.encoding import Layer
from anyformer.recipe import Recipe

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
        require_simulable(self.network_class)

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


def require_simulable(network_class: NetworkClass) -> None:
    """Raise :class:`OutsideClass` with every reason why a class cannot be simulated."""
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


def constants_of(network: Network) -> Float[Tensor, "constants"]:
    """The description of a network."""
    parts = []
    for stage in network.stages:
        for branch in stage.branches:
            if isinstance(branch.operator, Attention):
                assert branch.probes is not None
                parts += _described(branch.operator, branch.probes, branch.map)
        if network.constant:
            parts.append(_bias(stage, network.embedding))
    return torch.cat([p.reshape(-1) for p in (*parts, network.final_readout())])


def constants_in(recipe: SimulatorRecipe, program: Program) -> Float[Tensor, "constants"]:
    """The description that a program holds, of the size that the machine reads."""
    wanted = sum(rows * columns for name, (rows, columns) in recipe.matrices().items() if name not in ("X", "valid"))
    got = 0 if program.constants is None else len(program.constants)
    if program.constants is None or got != wanted:
        raise AnyformerError(f"a program of this simulator holds {wanted} constants, got {got}; compile it again")
    return program.constants


def network_of(recipe: SimulatorRecipe, program: Program) -> Network:
    """The network that a program describes: ``A_h = W_Q W_K^T`` is factored, at the rank of the class where that is enough."""
    d = recipe.features
    shapes = {name: shape for name, shape in recipe.matrices().items() if name not in ("X", "valid")}
    parts = constants_in(recipe, program).split([rows * columns for rows, columns in shapes.values()])
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
