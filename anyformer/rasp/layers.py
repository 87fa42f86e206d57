"""The layers of a compiled network: which stages belong together, the patterns of their heads, the columns of their units."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.maps import ConstantMap
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Attention, Gate


@dataclass(frozen=True)
class Layer:
    """An attention stage and the feed-forward stage after it; either may be missing."""

    attention: Stage | None
    feed_forward: Stage | None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those that it has, in order."""
        return tuple(stage for stage in (self.attention, self.feed_forward) if stage is not None)

    @property
    def heads(self) -> int:
        """How many heads it has."""
        branches = () if self.attention is None else self.attention.branches
        return sum(b.operator.count for b in branches if isinstance(b.operator, Attention))

    @property
    def units(self) -> int:
        """How many hidden units it has."""
        branches = () if self.feed_forward is None else self.feed_forward.branches
        return sum(b.operator.count for b in branches if isinstance(b.operator, Gate))


def layers(network: Network) -> list[Layer]:
    """The stages of a network by layer."""
    found: list[Layer] = []
    for stage in network.stages:
        if any(isinstance(branch.operator, Attention) for branch in stage.branches):
            found.append(Layer(stage, None))
        elif found and found[-1].feed_forward is None:
            found[-1] = Layer(found[-1].attention, stage)
        else:
            found.append(Layer(None, stage))
    return found


def head_patterns(stage: Stage, patterns: Iterator[Tensor]) -> list[Float[Tensor, "queries keys"]]:
    """Of every head of a stage its pattern on the first input, taken from those of a run (one a bank); what a sink takes is the last column."""
    found: list[Tensor] = []
    for branch in stage.branches:
        if isinstance(branch.operator, Attention):
            pattern = next(patterns)[0].detach()
            share = 1.0 - pattern.sum(-1, keepdim=True)
            found += list(torch.cat((pattern, share), -1) if branch.operator.sink else pattern)
    return found


def unit_columns(branch: Branch) -> tuple[Tensor, Tensor, Tensor]:
    """Of every hidden unit of a bank, as rows (units, width): its gate, its value (the constant of a plain unit), and what it writes."""
    assert branch.probes is not None
    if isinstance(branch.map, ConstantMap):
        rows = branch.map.scaled_rows()
        values = torch.zeros_like(rows)
        values[:, -1] = 1.0
    else:
        values, rows = branch.map.left[:, :, 0], branch.map.right[:, 0]  # type: ignore[attr-defined]
    return branch.probes.T, values, rows
