"""The run of a stored program: its constants are matrices, so a run costs what the target costs.

The fixed 0/1 layers of :mod:`anyformer.backbones.stored.layout` multiply coordinates of the stream; here the same products are matrix
products with views of the constants, which are the same for every token. Routing is slicing and indexing.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.backbones.folding import Trace
from anyformer.backbones.stored.layout import BankLayout, Layout, StageLayout, Stored
from anyformer.backbones.tree import Tree
from anyformer.memory import require_memory
from anyformer.network import check_positions
from anyformer.operators import Context
from anyformer.program import Placement, Program


class Engine(nn.Module):
    """Runs programs of one layout. Its only tensors are the routes: which stored column each read of each branch takes."""

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout = layout
        self.names = Tree.of(layout.network)
        for s, stage in enumerate(layout.stages):
            for b, bank in enumerate(stage.banks):
                if bank.reads + bank.biases:
                    route = bank.route().flatten()
                    if not torch.equal(route, torch.arange(len(route))):
                        self.register_buffer(f"route_{s}_{b}", route)
                if bank.enters and bank.groups < bank.count:
                    self.register_buffer(f"values_{s}_{b}", bank.value_route())

    def run(self, tokens: Int[Tensor, "batch n"], program: Program, ctx: Context, trace: Trace | None) -> Tensor:
        """Logits (batch, n, outputs)."""
        assert program.constants is not None
        layout = self.layout
        attention = max((s.attention.heads for s in layout.network.stages if s.attention), default=0)
        keys = ctx.key_positions.shape[1]
        words = 3 * tokens.shape[0] * attention * tokens.shape[1] * keys + tokens.numel() * layout.network.outputs
        require_memory(words * program.tokens.element_size(), f"running {tuple(tokens.shape)} tokens")
        x = F.embedding(tokens.long(), program.tokens)
        if program.positions is not None:
            check_positions(ctx.positions, program.positions.shape[0])
            x = x + F.embedding(ctx.positions, program.positions)
        views = layout.views(program.constants)
        for s, stage in enumerate(layout.stages):
            x = self.stage(s, stage, views[s], x, ctx, trace, program.placement)
        readout = views[-1]["readout"]
        logits = x @ (readout if program.placement is None else readout[:, : program.placement.outputs])
        if trace is not None:
            trace.logits = logits
        return logits

    def stage(
        self,
        s: int,
        stage: StageLayout,
        stored: Stored,
        x: Float[Tensor, "batch n D"],
        ctx: Context,
        trace: Trace | None,
        placement: Placement | None,
    ) -> Float[Tensor, "batch n out"]:
        """read, operate, write."""
        read = x @ stored["read"] if "read" in stored else x[..., :0]
        shared = None
        if stage.stage.shared:
            shared = read[..., : stage.shared] if stage.shared else x[..., : stage.features]
        total, mixed = None, []
        for b, bank in enumerate(stage.banks):
            if bank is stage.residual:
                part = self.shifted(bank, stored, x)
                total = part if total is None else total + part
                continue
            own = self.own(s, b, bank, stored, x, read)
            token_map = bank.branch.operator(shared, own, ctx)
            out = token_map.apply(self.values(s, b, bank, stage, stored, x, read))
            if trace is not None and (place := _place_of(placement, s, b, bank)) is not None:
                trace.note(self.names, s, b, place, own, token_map)
            if bank.twin:
                mixed[-1] = mixed[-1] + out.flatten(2)
                continue
            if bank.writes:
                mixed.append(out.flatten(2))
                continue
            part = out.sum(2)
            if bank.diagonal:
                part = F.pad(part * stored["diagonal"][bank.diagonal_at], (0, stage.out - stage.features))
            total = part if total is None else total + part
        if not mixed:
            assert total is not None
            return total
        rows, write = mixed[0] if len(mixed) == 1 else torch.cat(mixed, -1), stored["write"]
        if total is None:
            return rows @ write
        return torch.addmm(total.flatten(0, 1), rows.flatten(0, 1), write).view_as(total)

    def own(self, s: int, b: int, bank: BankLayout, stored: Stored, x: Tensor, read: Tensor) -> Tensor:
        """Own reads (batch, n, count, reads)."""
        op = bank.branch.operator
        if bank.branch.reads == "features" or op.reads == 0:
            return x[..., None, : op.reads].expand(*x.shape[:-1], op.count, op.reads)
        columns = read[..., bank.read_at : bank.read_at + bank.reads]
        if bank.biases:
            columns = torch.cat((columns, x[..., -1:] * stored["bias"][bank.bias_at : bank.bias_at + bank.biases]), -1)
        route = getattr(self, f"route_{s}_{b}", None)
        return (columns if route is None else columns[..., route]).unflatten(-1, (op.count, op.reads))

    def shifted(self, bank: BankLayout, stored: Stored, x: Tensor) -> Tensor:
        """The stream behind an identity map, with the bias that moved into it."""
        return x + x[..., -1:] * stored["shift"][bank.shift_at] if "shift" in stored else x

    def values(self, s: int, b: int, bank: BankLayout, stage: StageLayout, stored: Stored, x: Tensor, read: Tensor) -> Tensor:
        """What the operator mixes (batch, n, count, c)."""
        if bank.twin:
            return (x[..., -1:] * stored["scales"][stage.scales_of(bank)])[..., None]
        if bank.branch.map == "constant":
            return x[..., None, -1:].expand(*x.shape[:-1], bank.count, 1)
        if bank.branch.map == "identity":
            return self.shifted(bank, stored, x)[:, :, None]
        if bank.diagonal:
            features = x[..., : stage.features]
            return (features - features.mean(-1, keepdim=True) if bank.branch.map == "centred" else features)[:, :, None]
        start = bank.read_at + bank.reads
        values = read[..., start : start + bank.enters].unflatten(-1, (-1, bank.branch.rank or bank.out))
        route = getattr(self, f"values_{s}_{b}", None)
        return values if route is None else values[:, :, route]


def _place_of(placement: Placement | None, s: int, b: int, bank: BankLayout) -> list[int] | None:
    """The branches of a bank that the program uses; None where it does not use the stage."""
    if placement is None:
        return list(range(bank.count))
    if s not in placement.stages:
        return None
    place = placement.branches[placement.stages.index(s)][b]
    return list(range(place)) if isinstance(place, int) else list(place)
