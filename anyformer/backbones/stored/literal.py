"""The dense form of a stored-program machine: three standard layers with skip connections a stage, every weight 0 or 1.

Written from the layout's coordinates alone; the forward is :class:`LiteralTransformer`'s. One gated unit a stored number: its gate reads
``x_i``, its up reads ``theta_ij``, its down writes ``y_j``.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from anyformer.backbones.literal import LiteralBank, LiteralLayer, LiteralTransformer
from anyformer.backbones.stored.layout import BankLayout, Layout, StageLayout
from anyformer.memory import require_memory
from anyformer.operators import Gate, Identity


@dataclass
class _Products:
    """The products and copies of one layer: gates, ups and downs of its units, and (from, to) pairs."""

    x: list[Tensor] = field(default_factory=list)
    theta: list[Tensor] = field(default_factory=list)
    y: list[Tensor] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def matrix(self, x: Tensor, theta: Tensor, y: Tensor) -> None:
        """``y_j += x_i theta_ij``."""
        self.product(x[:, None].expand_as(theta), theta, y.expand_as(theta))

    def product(self, x: Tensor, theta: Tensor, y: Tensor) -> None:
        """``y_k += x_k theta_k``, broadcasting."""
        for out, values in zip((self.x, self.theta, self.y), torch.broadcast_tensors(x, theta, y), strict=True):
            out.append(values.flatten())

    def copy(self, source: Tensor, to: Tensor) -> None:
        """``to_k += source_k``."""
        self.copies.append((source, to))

    def layer(self, m: int) -> LiteralLayer:
        banks = []
        if self.x:
            gate, up, down = (torch.cat(part) for part in (self.x, self.theta, self.y))
            own = one_hot(gate, m).T[:, :, None, None]
            banks.append(LiteralBank(Gate(len(gate), "identity"), own, up=one_hot(up, m).T.contiguous(), down=one_hot(down, m)))
        if self.copies:
            banks.append(LiteralBank(Identity(), torch.zeros(m, 1, 1, 0), R_V=routing(self.copies, m)[None]))
        return LiteralLayer(banks, None, skip=True)


def one_hot(at: Tensor, m: int) -> Tensor:
    """Rows (k, m) with a single 1."""
    return torch.nn.functional.one_hot(at, m).float()


def routing(pairs: list[tuple[Tensor, Tensor]], m: int) -> Tensor:
    """R (m, m) with a 1 at every (from, to)."""
    matrix = torch.zeros(m, m)
    for source, to in pairs:
        matrix[source, to] = 1.0
    return matrix


def stored_literal(layout: Layout) -> LiteralTransformer:
    """All layers, and U."""
    m, weights = layout.width, literal_numbers(layout)
    require_memory(4 * weights, f"the literal machine of width {m}")
    layers: list[LiteralLayer] = []
    x = layout.block("stream").coordinates
    for s in range(len(layout.stages)):
        new, x = _stage(layout, s, x)
        layers += new
    out = _Products()
    outputs = layout.block("outputs").coordinates
    out.matrix(x, layout.block("readout constants").coordinates, outputs)
    layers.append(out.layer(m))
    return LiteralTransformer(layers, one_hot(outputs, m).T.contiguous())


def _stage(layout: Layout, s: int, x: Tensor) -> tuple[list[LiteralLayer], Tensor]:
    """The three layers of a stage whose stream stands at ``x``, and where the stream stands after it."""
    stage, m = layout.stages[s], layout.width
    at = {name: layout.block(f"stage {s + 1} {name} constants").coordinates for name in stage.sizes}
    to = {name: layout.block(f"stage {s + 1} {name}").coordinates for name in stage.scratch}
    read, write = _Products(), _Products()
    if "read" in at:
        read.matrix(x, at["read"], to["read"])
    if "bias" in at:
        read.product(x[-1], at["bias"], to["bias"])
    if "scales" in at:
        read.product(x[-1], at["scales"], to["scales"])
    features = x[: stage.features]
    if "centred" in to:
        read.copy(features, to["centred"])
        minus = layout.block(f"-1/{stage.features}").coordinates
        read.product(features[:, None], minus, to["centred"][None])
    moved = to["moved"].view(-1, stage.width) if "moved" in to else None
    for i, bank in enumerate(stage.moved):
        assert moved is not None
        read.copy(x, moved[i])
        read.product(x[-1], at["shift"][bank.shift_at], moved[i])
    after = x if stage.in_place else to["stream"]
    banks = [_operate(stage, bank, x, to, after, m) for bank in stage.banks if bank is not stage.residual]
    shared = None
    if stage.stage.shared:
        shared = one_hot(to["read"][: stage.shared] if stage.shared else features, m).T.contiguous()
    if "write" in at:
        write.matrix(to["mixed"], at["write"], after)
    if "diagonal" in at:
        for i, weights in enumerate(at["diagonal"]):
            write.product(to["normed"].view(-1, stage.features)[i], weights, after[: stage.features])
    if stage.residual is not None:
        if not stage.in_place:
            write.copy(x, after)
        if "shift" in at:
            write.product(x[-1], at["shift"][stage.residual.shift_at], after)
    return [read.layer(m), LiteralLayer(banks, shared, skip=True), write.layer(m)], after


def _operate(stage: StageLayout, bank: BankLayout, x: Tensor, to: dict[str, Tensor], after: Tensor, m: int) -> LiteralBank:
    """One bank of operators between scratch coordinates."""
    op = bank.branch.operator
    if bank.branch.reads == "features":
        columns = x[: stage.features].expand(op.count, -1)
    elif op.reads:
        stored = [to["read"][bank.read_at : bank.read_at + bank.reads]] if bank.reads else []
        stored += [to["bias"][bank.bias_at : bank.bias_at + bank.biases]] if bank.biases else []
        columns = torch.cat(stored)[bank.route()]
    else:
        columns = torch.zeros(op.count, 0, dtype=torch.int64)
    own = torch.nn.functional.one_hot(columns, m).float().permute(2, 0, 1)[:, :, None]
    source, target = values_of(stage, bank, x, to), targets_of(stage, bank, to, after)
    if bank.branch.is_gated:
        width = source.shape[1]
        up, down = one_hot(source.flatten(), m).T.contiguous(), one_hot(target.flatten(), m)
        return LiteralBank(op, own.expand(-1, -1, width, -1), up=up, down=down)
    routes = torch.stack([routing([(source[g], target[g])], m) for g in range(op.count)])
    return LiteralBank(op, own, R_V=routes)


def values_of(stage: StageLayout, bank: BankLayout, x: Tensor, to: dict[str, Tensor]) -> Tensor:
    """Where each branch's values stand (count, c)."""
    match bank.branch.map:
        case "constant" if bank.twin:
            return to["scales"][stage.scales_of(bank)][:, None]
        case "constant":
            return x[-1:].expand(bank.count, 1)
        case "identity":
            return (to["moved"].view(-1, stage.width)[stage.moved.index(bank)] if bank in stage.moved else x)[None]
        case "diagonal":
            return x[None, : stage.features]
        case "centred":
            return to["centred"][None]
        case _:
            start = bank.read_at + bank.reads
            values = to["read"][start : start + bank.enters].view(-1, bank.branch.rank or bank.out)
            return values[bank.value_route()] if bank.branch.rank is not None else values


def targets_of(stage: StageLayout, bank: BankLayout, to: dict[str, Tensor], after: Tensor) -> Tensor:
    """Where each branch writes (count, c)."""
    if bank.writes:
        return to["mixed"][bank.write_at : bank.write_at + bank.writes].view(bank.count, -1)
    if bank.diagonal:
        return to["normed"].view(-1, stage.features)[bank.diagonal_at][None]
    return after.expand(bank.count, -1)


def literal_numbers(layout: Layout) -> int:
    """How many numbers the dense matrices hold."""
    m, total = layout.width, 0
    for stage in layout.stages:
        products, copies = _stage_units(stage)
        total += 3 * m * products + m * m * (2 if copies else 1)
        for bank in stage.banks:
            total += m * bank.count * bank.branch.operator.reads + (0 if bank is stage.residual else bank.count * m * m)
    return total + m * layout.width_out * layout.network.outputs * 3


def _stage_units(stage: StageLayout) -> tuple[int, int]:
    """Units and copies of the read and the write layer of a stage."""
    products = sum(torch.Size(shape).numel() for shape in stage.sizes.values())
    copies = 0
    if "centred" in stage.scratch:
        products, copies = products + stage.features**2, copies + stage.features
    if stage.moved:
        copies += len(stage.moved) * stage.width
    if stage.residual is not None and not stage.in_place:
        copies += stage.width
    return products, copies


def literal_costs(layout: Layout) -> tuple[int, int]:
    """Depth, and how many weights of the literal form are 1: three a product, one a copy, one a read and one (for units two) a moved value."""
    total = sum(_stage_weights(stage) for stage in layout.stages)
    total += 3 * layout.width_out * layout.network.outputs + layout.network.outputs
    return 3 * len(layout.stages) + 1, total


@lru_cache(maxsize=256)
def _stage_weights(stage: StageLayout) -> int:
    """The ones in the three layers of a stage."""
    products, copies = _stage_units(stage)
    total = 3 * products + copies + stage.stage.shared
    for bank in stage.banks:
        if bank is stage.residual:
            continue
        width = _value_width(stage, bank)
        if bank.branch.is_gated:
            total += bank.count * width * (bank.branch.operator.reads + 2)
        else:
            total += bank.count * (bank.branch.operator.reads + width)
    return total


def _value_width(stage: StageLayout, bank: BankLayout) -> int:
    """How many coordinates each branch of a bank moves."""
    if bank.branch.map == "constant":
        return 1
    if bank.branch.map == "identity":
        return stage.width
    return stage.features if bank.diagonal else bank.branch.rank or bank.out
