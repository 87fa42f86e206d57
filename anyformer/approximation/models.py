"""Members of an architecture at rational parameters, as networks of the common language: what a proof in ball arithmetic is about.

    X -> [ FFN, attention layer 1, FFN, attention layer 2, ..., FFN ]      FFN: x + W2 tanh(W1 x + b), attention: x + sum_b Op_b(phi P) phi M_b

Feed-forward layers are residual tanh layers of any width and size: such witnesses are legal for every class that meets (H3) (Lemma 3). All
parameters are integers over 2^20, so that float64 and balls evaluate the same member. The stream holds the d features, position
features where they act inside attention, and the constant.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyformer import philox
from anyformer.approximation.architecture import Architecture, Layer
from anyformer.approximation.balls import balls
from anyformer.maps import ConstantMap, DenseMap, IdentityMap
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Context, Gate, Identity, Operator

GRID = 2**20
SCALE = 0.4
"""Standard deviation of the weights: larger ones saturate and their witnesses vanish in float64."""

HIDDEN = 8
"""Hidden units of the feed-forward layers between attention layers."""


class Draw:
    """A sequence of Gaussian tensors on the grid, from a seed; the same on every machine."""

    def __init__(self, seed: int):
        self.seed, self.count = seed, 0

    def __call__(self, *shape: int, scale: float = SCALE) -> Tensor:
        self.count += 1
        numbers = philox.gaussian(self.seed, self.count, shape, scale)
        return torch.as_tensor(np.round(np.asarray(numbers, dtype=np.float64) * GRID) / GRID)


@dataclass(frozen=True, eq=False)
class Member:
    """One network of the architecture on n tokens; ``table`` (n, positions) are its position vectors or None."""

    network: Network
    tokens: int
    dim: int
    table: Tensor | None
    at_input: bool

    def __call__(self, inputs: Tensor, exact: bool) -> Any:
        """Outputs (batch, n, d) for tokens (batch, n, d), in float64, or enclosed in balls at the precision in force."""
        batch, n, d = inputs.shape
        if self.table is not None and self.at_input:
            inputs = inputs + self.table
        blocks = [inputs]
        if self.table is not None and not self.at_input:
            blocks.append(self.table.expand(batch, n, -1))
        stream = torch.cat([*blocks, torch.ones(batch, n, 1, dtype=torch.float64)], -1)
        places = torch.arange(n).expand(batch, n)
        if exact:
            return self.network.stream(balls(stream), Context(places.numpy()))[..., :d]  # type: ignore[arg-type]
        return self.network.stream(stream, Context(places))[..., :d]


def member(architecture: Architecture, n: int, seed: int) -> Member | str:
    """Draw a member; a sentence where the architecture has parts that no member is written for."""
    for name in ("attention_norm", "feed_forward_norm", "output_norm"):
        if getattr(architecture, name) is not None:
            return f"no ball model is written for a {name.replace('_', ' ')}"
    draw, d = Draw(seed), architecture.dim
    positions = architecture.positions
    inside = positions is not None and positions.where == "attention"
    table = None if positions is None else draw(n, d, scale=1.0)
    width = d + (d if inside else 0) + 1
    stages = [_feed_forward(draw, d, width)]
    for layer in architecture.layers:
        stages += [_attention(architecture, layer, draw, width, inside), _feed_forward(draw, d, width)]
    embedding = torch.cat((torch.zeros(1, width - 1), torch.ones(1, 1)), 1).double()
    return Member(Network(embedding, tuple(stages), constant=True), n, d, table, not inside)


def _feed_forward(draw: Draw, d: int, width: int) -> Stage:
    reads = torch.zeros(width, HIDDEN, dtype=torch.float64)
    reads[:d], reads[-1] = draw(d, HIDDEN, scale=1.0), draw(HIDDEN, scale=0.5)
    rows = torch.zeros(HIDDEN, width, dtype=torch.float64)
    rows[:, :d] = draw(HIDDEN, d)
    units = Branch(Gate(HIDDEN, "tanh"), reads, ConstantMap(width, rows))
    return Stage((Branch(Identity(), None, IdentityMap(width)), units))


def feed_forward_network(draw: Draw, d: int) -> Network:
    """One residual tanh layer on d features and the constant, alone."""
    embedding = torch.cat((torch.zeros(1, d), torch.ones(1, 1)), 1).double()
    return Network(embedding, (_feed_forward(draw, d, d + 1),), constant=True)


def _attention(architecture: Architecture, layer: Layer, draw: Draw, width: int, inside: bool) -> Stage:
    d = architecture.dim
    keep = torch.eye(width, dtype=torch.float64)
    if architecture.skip == "none":
        keep[:d, :d] = 0
    branches = [Branch(Identity(), None, DenseMap(keep[None]))]
    for b, op in enumerate(layer.operators):
        reads = _probes(draw, op, d, width)
        values = torch.zeros(op.count, width, width, dtype=torch.float64)
        if layer.maps is None:
            values[:, :d, :d] = draw(op.count, d, d)
        else:
            values[:, :d, :d] = torch.tensor(layer.maps[b], dtype=torch.float64)
        if inside:  # what is read and moved is x + its position
            reads[d : 2 * d], values[:, d : 2 * d] = reads[:d], values[:, :d]
        branches.append(Branch(op, reads if op.reads else None, DenseMap(values)))
    return Stage(tuple(branches))


def _probes(draw: Draw, op: Operator, d: int, width: int) -> Tensor:
    reads = torch.zeros(width, op.count, op.reads, dtype=torch.float64)
    plain = [i for i in range(op.reads) if i not in op.constant_reads]
    reads[:d, :, plain] = draw(d, op.count, len(plain))
    reads[-1, :, list(op.constant_reads)] = draw(op.count, len(op.constant_reads))
    return reads.reshape(width, -1)
