"""The oracle: dense 0/1 transformers written from the definitions, sharing no code with the folded run.

Right-multiplication throughout: a stream Z (n, m) is read as ``Z R_Q``, moved as ``Z R_V``. Entry ``R[i, j] = 1`` carries
coordinate i to j.
R_Q, R_K (m x d), R_V (m x m) and U (m x out) hold at most one 1 a *row*; in an MLP every *column* of gate and up, and every
*row* of down.

    layer   Z <- [Z if there is a skip] + sum_h A_h Z R_V^h + (f(Z gate) * (Z up)) down + r * (Z R_V)   (the last: a norm)

Every layout works on *names* of coordinates, ("output" or a read, path, index), enumerated here from the class alone.

* folded: child b of the root is moved into the place of the residual child (or of the first), where the next layer reads;
* masked (the paper): R_V is diagonal and keeps the coordinates whose l-th branch is h; reads sum over all prefixes;
* looped: child b is moved to the root itself, so one set of matrices serves every layer;
* chain: one head, slots of equal width, R_V is the shift by one slot.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.errors import OutsideClass
from anyformer.memory import require_memory
from anyformer.network import NetworkClass
from anyformer.operators import (
    RBF,
    ALiBi,
    Attention,
    AverageHard,
    Bidirectional,
    Causal,
    Context,
    FeatureMap,
    Gate,
    Identity,
    LayerNorm,
    Mixing,
    Normed,
    Operator,
    Performer,
    RelativeBias,
    RMSNorm,
    Softmax,
    Strided,
    Window,
)
from anyformer.philox import gaussian

Name = tuple[Any, ...]
"""A coordinate: (kind, path, details). The path is a tuple of (bank, branch) pairs, one a stage."""


# --- names of coordinates -----------------------------------------------------------------------------------------------------


def enumerate_names(network: NetworkClass) -> list[Name]:
    """All coordinates in the order of the layout, by walking every path."""

    def node(s: int, path: tuple) -> list[Name]:
        if s == len(network.stages):
            return [("output", path, i) for i in range(network.outputs)]
        stage = network.stages[s]
        names: list[Name] = [("shared", path, i) for i in range(stage.shared)]
        for b, branch in enumerate(stage.branches):
            names += [("own", path, b, g, i) for g in range(branch.operator.count) for i in range(branch.operator.reads)]
        for b, branch in enumerate(stage.branches):
            for g in range(branch.operator.count):
                names += node(s + 1, (*path, (b, g)))
        return names

    return node(0, ())


def home(network: NetworkClass, s: int) -> tuple[int, int]:
    """The child into whose place stage s folds: the residual child if there is one, else the first."""
    for b, branch in enumerate(network.stages[s].branches):
        if isinstance(branch.operator, Identity) and branch.map == "identity":
            return (b, 0)
    return (0, 0)


def _is_gate(op: Operator) -> bool:
    return isinstance(op.inner if isinstance(op, Normed) else op, Gate)


# --- one dense layer ----------------------------------------------------------------------------------------------------------


class LiteralBank(nn.Module):
    """One bank of branches with dense matrices: ``own`` (m, count, copies, reads), and ``R_V`` (count, m, m), or ``up`` (m,
    K) and
    ``down`` (K, m) for gates, K = count * copies."""

    own: Tensor
    R_V: Tensor
    up: Tensor
    down: Tensor

    def __init__(self, op: Operator, own: Tensor, **matrices: Tensor):
        super().__init__()
        self.op = op
        self.register_buffer("own", own)
        for name, matrix in matrices.items():
            self.register_buffer(name, matrix)

    def forward(self, z: Tensor, shared: Tensor | None, ctx: Context, patterns: list[Tensor] | None) -> Tensor:
        op = self.op
        own = torch.einsum("bnm,mgcr->bngcr", z, self.own)
        scale = None
        scale_values = True
        if isinstance(op, Normed):
            assert shared is not None
            scale, scale_values = _norm_scale(op.norm, shared), op.scale_values
            width = op.inner.reads
            scaled = own[..., :width] * scale[..., None, None, None]
            own = scaled + own[..., width:] if op.bias else scaled
            op = op.inner
        if isinstance(op, Gate):
            hidden = _gate(op.function, own[..., 0].flatten(2)) * (z @ self.up)
            if scale is not None and scale_values:
                hidden = hidden * scale[..., None]
            return hidden @ self.down
        values = z * scale[..., None] if scale is not None and scale_values else z
        total = torch.zeros_like(z)
        heads = _token_matrices(op, own[:, :, :, 0], ctx)
        if patterns is not None and isinstance(op, (Attention,)):
            patterns.append(torch.stack(heads, dim=1))
        for head, route in zip(heads, self.R_V, strict=True):
            total = total + head @ (values @ route)
        return total


class LiteralLayer(nn.Module):
    """``Z <- [Z] + sum over banks``; ``shared`` (m, D) are the columns that a norm reads."""

    shared: Tensor | None

    def __init__(self, banks: list[LiteralBank], shared: Tensor | None, skip: bool):
        super().__init__()
        self.skip = skip
        self.banks = nn.ModuleList(banks)
        self.register_buffer("shared", shared)

    def forward(self, z: Tensor, ctx: Context, patterns: list[Tensor] | None) -> Tensor:
        shared = None if self.shared is None else z @ self.shared
        total = z if self.skip else torch.zeros_like(z)
        for bank in self.banks:
            total = total + bank(z, shared, ctx, patterns)
        return total


class LiteralTransformer(nn.Module):
    """The dense machine: layers in order (the same module several times where weights are tied) and the read-out U (m, out)."""

    U: Tensor

    def __init__(self, layers: list[LiteralLayer], U: Tensor):
        super().__init__()
        self.order = layers
        self.layers = nn.ModuleList(dict.fromkeys(layers))
        self.register_buffer("U", U)

    def matrices(self) -> dict[str, Tensor]:
        """Every matrix by name; tied ones once."""
        return dict(self.named_buffers())

    def forward(
        self,
        tokens: Tensor,
        program: Any,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        patterns: list[Tensor] | None = None,
    ) -> Tensor:
        """Logits of a program; ``patterns``, a list, receives each attention bank's patterns."""
        if positions is None:
            positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
            if mask is not None:
                positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        ctx = Context(positions, mask)
        z = program.embedding[tokens]
        if program.position_embedding is not None:
            z = z + program.position_embedding[positions]
        dense = self.to(z.dtype)
        for layer in dense.order:
            z = layer(z, ctx, patterns)
        return z @ dense.U


# --- the operators, from their definitions --------------------------------------------------------------------------------------

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu_plus_one": lambda z: F.elu(z) + 1,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "step": lambda z: torch.heaviside(z, torch.zeros((), dtype=z.dtype)),
}


def _gate(function: str, z: Tensor) -> Tensor:
    if function in GATES:
        return GATES[function](z)
    from anyformer.operators.functions import scalar_function  # a function of the user's: its routing is still checked

    return scalar_function(function)(z)


def _norm_scale(norm: Operator, p: Tensor) -> Tensor:
    if isinstance(norm, RMSNorm):
        return torch.rsqrt(p.square().mean(-1) + norm.eps)
    if isinstance(norm, LayerNorm):
        return torch.rsqrt(p.var(-1, unbiased=False) + norm.eps)
    return norm.scale(p)[..., 0]  # type: ignore[attr-defined]


def _token_matrices(op: Operator, own: Tensor, ctx: Context) -> list[Tensor]:
    """The (batch, n, n) matrix of every branch for own reads (batch, n, count, reads)."""
    n = own.shape[1]
    if isinstance(op, Identity):
        return [torch.eye(n, dtype=own.dtype).expand(own.shape[0], n, n)]
    if isinstance(op, (RMSNorm, LayerNorm)):
        return [torch.diag_embed(_norm_scale(op, own[:, :, 0]))]
    if isinstance(op, Attention):
        return [_head(op, own[:, :, h], h, ctx) for h in range(op.heads)]
    token_map = op(None, own, ctx)  # fixed mixings and operators of the user's: the routing around them is checked
    if isinstance(token_map, Mixing):
        return [token_map.weights[:, g].expand(own.shape[0], n, n) for g in range(op.count)]
    identity = torch.eye(n, dtype=own.dtype).expand(own.shape[0], n, n)[:, :, None].expand(-1, -1, op.count, -1)
    return list(token_map.apply(identity).unbind(2))


def _head(op: Attention, own: Tensor, h: int, ctx: Context) -> Tensor:
    """The pattern of one head, row by row of its definition."""
    d, places = op.head_dim, ctx.positions
    q, k = own[..., :d], own[..., d : 2 * d]
    if op.qk_norm is not None:
        q = q * torch.rsqrt(own[..., 2 * d : 3 * d].square().mean(-1, keepdim=True) + op.qk_norm)
        k = k * torch.rsqrt(own[..., 3 * d :].square().mean(-1, keepdim=True) + op.qk_norm)
    if op.rotary is not None:
        q, k = (_turn(x, places, op.rotary.frequencies) for x in (q, k))
    q = q * (d**-0.5 if op.scale is None else op.scale)
    i, j = places[:, :, None], places[:, None, :]
    seen = _seen(op, i, j)
    if ctx.mask is not None:
        seen = seen & ctx.mask[:, None, :]
    kernel = op.kernel
    if isinstance(kernel, (FeatureMap, Performer)):
        if isinstance(kernel, FeatureMap):
            a, b = _gate(kernel.function, q), _gate(kernel.function, k)
        else:
            w = torch.from_numpy(gaussian(kernel.seed, 0, (d, kernel.count), 1.0)).to(q.dtype)
            a, b = (torch.exp(x @ w - x.square().sum(-1, keepdim=True) / 2) for x in (q, k))
        weights = torch.einsum("bif,bjf->bij", a, b) * seen
        return torch.nan_to_num(weights / weights.sum(-1, keepdim=True), nan=0.0)
    if isinstance(kernel, RBF):
        scores = -kernel.gamma * (q[:, :, None] - k[:, None]).square().sum(-1)
    else:
        scores = torch.einsum("bid,bjd->bij", q, k)
    scores = scores + _bias(op, h, i - j, scores.dtype)
    scores = scores.masked_fill(~seen, -math.inf)
    if op.sink:
        scores = torch.cat((scores, torch.zeros_like(scores[..., :1])), dim=-1)
    if isinstance(kernel, RBF) and not kernel.normalised:
        pattern = scores.exp()
    elif isinstance(kernel, (Softmax, RBF)):
        pattern = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)
    elif isinstance(kernel, AverageHard):
        top = scores.max(dim=-1, keepdim=True).values
        tie = 1e-9 if scores.dtype == torch.float64 else 1e-4
        winners = ((scores >= top - tie * (1 + top.abs())) & (scores > -math.inf)).to(scores.dtype)
        pattern = torch.nan_to_num(winners / winners.sum(-1, keepdim=True), nan=0.0)
    else:
        return kernel(q[:, None], k[:, None], None, seen[:, None], op.sink)[:, 0]
    return pattern[..., : own.shape[1]]


def _turn(x: Tensor, places: Tensor, frequencies: tuple[float, ...]) -> Tensor:
    r = len(frequencies)
    angle = places[..., None].double() * torch.tensor(frequencies, dtype=torch.float64)
    turned = torch.complex(x[..., :r].double(), x[..., r : 2 * r].double()) * torch.exp(1j * angle)
    return torch.cat((turned.real.to(x.dtype), turned.imag.to(x.dtype), x[..., 2 * r :]), dim=-1)


def _seen(op: Attention, i: Tensor, j: Tensor) -> Tensor:
    mask, distance = op.mask, i - j
    if isinstance(mask, Bidirectional):
        return torch.ones_like(distance, dtype=torch.bool)
    if isinstance(mask, Causal):
        return distance >= 0
    if isinstance(mask, Window):
        return (distance <= mask.before) & (distance >= -mask.after)
    if isinstance(mask, Strided):
        return (distance >= 0) & ((distance.remainder(mask.stride) == 0) | (distance < mask.local))
    return mask.allows(i, j)


def _bias(op: Attention, h: int, distance: Tensor, dtype: torch.dtype) -> Tensor:
    if op.bias is None:
        return torch.zeros((), dtype=dtype)
    if isinstance(op.bias, ALiBi):
        return -(op.bias.slopes * op.heads)[h] * distance.abs().to(dtype)
    if isinstance(op.bias, RelativeBias):
        row = torch.tensor((op.bias.table * op.heads)[h], dtype=dtype)
        radius = len(row) // 2
        return row[distance.clamp(-radius, radius) + radius]
    whole = op.bias(torch.zeros((), dtype=dtype), distance[:, None], torch.zeros_like(distance[:, None]))
    return whole[:, h if whole.shape[1] > 1 else 0]


# --- layouts ------------------------------------------------------------------------------------------------------------------

Move = Callable[[Name, tuple[int, int]], Name | None]
"""(coordinate, branch) -> the coordinate that it is carried to, or None where the branch drops it."""


class _Builder:
    """Dense matrices from rules on names."""

    def __init__(self, network: NetworkClass, names: list[Name | None] | None = None):
        self.network = network
        self.names = enumerate_names(network) if names is None else names
        self.index = {name: i for i, name in enumerate(self.names) if name is not None}
        m = len(self.names)
        matrices = sum(
            branch.operator.count if not _is_gate(branch.operator) else 4 for stage in network.stages for branch in stage.branches
        )
        require_memory(8 * m * m * matrices, f"the literal machine of width {m}")

    def matrix(self, entries: list[tuple[int, int]], columns: int) -> Tensor:
        out = torch.zeros(len(self.names), columns)
        for i, j in entries:
            out[i, j] = 1.0
        return out

    def read(self, prefixes: list[tuple], kind: tuple, columns: int) -> Tensor:
        """Columns that read (kind, prefix, ..., i) for i < columns, summed over the prefixes."""
        entries = [(self.index[(kind[0], p, *kind[1:], i)], i) for p in prefixes for i in range(columns)]
        return self.matrix(entries, columns)

    def layer(self, s: int, prefixes: list[tuple], move: Move, skip: bool) -> LiteralLayer:
        """Stage s, reading at ``prefixes``, each branch carrying coordinates by ``move``; with ``skip`` the home branch is a
        skip."""
        stage, banks = self.network.stages[s], []
        for b, branch in enumerate(stage.branches):
            op = branch.operator
            if skip and home(self.network, s) == (b, 0):
                continue
            moves = [
                [(i, self.index[t]) for i, n in enumerate(self.names) if n and (t := move(n, (b, g)))] for g in range(op.count)
            ]
            reads = [self.read(prefixes, ("own", b, g), op.reads) for g in range(op.count)]
            if _is_gate(op):
                # target unit g becomes one hidden unit a moved coordinate; they share its gate
                copies = len(moves[0])
                units = [(g * copies + c, i, j) for g in range(op.count) for c, (i, j) in enumerate(moves[g])]
                up = self.matrix([(i, unit) for unit, i, _ in units], op.count * copies)
                down = self.matrix([(j, unit) for unit, _, j in units], op.count * copies).T.contiguous()
                own = torch.stack([r[:, None].expand(-1, copies, -1) for r in reads], dim=1)
                banks.append(LiteralBank(op, own, up=up, down=down))
            else:
                routes = torch.stack([self.matrix(pairs, len(self.names)) for pairs in moves])
                banks.append(LiteralBank(op, torch.stack(reads, dim=1)[:, :, None], R_V=routes))
        shared = self.read(prefixes, ("shared",), stage.shared) if stage.shared else None
        return LiteralLayer(banks, shared, skip)

    def readout(self, paths: list[tuple]) -> Tensor:
        return self.read(paths, ("output",), self.network.outputs)


def _has_skip(network: NetworkClass, s: int) -> bool:
    b, _ = home(network, s)
    branch = network.stages[s].branches[b]
    return isinstance(branch.operator, Identity) and branch.map == "identity"


def _fold_move(s: int, trunk: tuple, to: tuple[int, int]) -> Move:
    """Child b of the node at ``trunk`` goes into the place of child ``to``."""

    def move(name: Name, branch: tuple[int, int]) -> Name | None:
        path = name[1]
        if len(path) <= s or path[:s] != trunk or path[s] != branch:
            return None
        return (name[0], (*trunk, to, *path[s + 1 :]), *name[2:])

    return move


def folded_literal(network: NetworkClass) -> LiteralTransformer:
    """Shifts into the place of the home child; a residual stage is a true skip connection."""
    build, layers, trunk = _Builder(network), [], ()
    for s in range(len(network.stages)):
        to = home(network, s)
        layers.append(build.layer(s, [trunk], _fold_move(s, trunk, to), _has_skip(network, s)))
        trunk = (*trunk, to)
    return LiteralTransformer(layers, build.readout([trunk]))


def masked_literal(network: NetworkClass) -> LiteralTransformer:
    """The paper's masks: R_V of layer l and head h keeps every coordinate whose l-th branch is h, reads sum over prefixes."""
    gates = [f"stage {s + 1} has gates" for s, st in enumerate(network.stages) if any(_is_gate(b.operator) for b in st.branches)]
    if gates:
        raise OutsideClass("the masked layout holds attention-only and residual classes", gates)
    build, layers = _Builder(network), []
    prefixes: list[tuple] = [()]
    for s, stage in enumerate(network.stages):

        def keep(name: Name, branch: tuple[int, int], s: int = s) -> Name | None:
            return name if len(name[1]) > s and name[1][s] == branch else None

        layers.append(build.layer(s, prefixes, keep, skip=False))
        prefixes = [(*p, (b, g)) for p in prefixes for b, br in enumerate(stage.branches) for g in range(br.operator.count)]
    return LiteralTransformer(layers, build.readout(prefixes))


def looped_literal(network: NetworkClass, period: int, layers: int) -> LiteralTransformer:
    """One layer of ``period`` stages with matrices that do not know which layer it is: inside the layer children fold in
    place, its last stage carries each child to the root. Leaves of path (h, rest) go to (rest, home)."""
    build = _Builder(network)
    homes = tuple(home(network, s) for s in range(period))
    stages = []
    for j in range(period):
        if j < period - 1:
            stages.append(build.layer(j, [homes[:j]], _fold_move(j, homes[:j], homes[j]), skip=False))
            continue

        def to_root(name: Name, branch: tuple[int, int]) -> Name | None:
            path = name[1]
            if path[:period] != (*homes[:-1], branch):
                return None
            last = layers * period
            if len(path) < last:
                return (name[0], path[period:], *name[2:])
            return (name[0], (*path[period:last], *homes, *path[last:]), *name[2:])

        stages.append(build.layer(j, [homes[:j]], to_root, skip=False))
    order, trunk = stages * layers, homes * layers
    for s in range(period * layers, len(network.stages)):
        to = home(network, s)
        order.append(build.layer(s, [trunk], _fold_move(s, trunk, to), _has_skip(network, s)))
        trunk = (*trunk, to)
    return LiteralTransformer(order, build.readout([trunk]))


def chain_literal(network: NetworkClass, slot: int) -> LiteralTransformer:
    """One head, L + 1 slots: the layer reads slot 1 and its R_V is the shift of every slot by one."""
    depth = len(network.stages)
    names: list[Any] = [None] * ((depth + 1) * slot)
    at = {}
    for name in enumerate_names(network):
        place = len(name[1]) * slot + name[-1]
        names[place], at[name] = name, place
    build = _Builder(network, names)
    layer = build.layer(0, [()], lambda name, branch: None, skip=False)
    shift = torch.zeros(1, len(names), len(names))
    for i in range(slot, len(names)):
        shift[0, i, i - slot] = 1.0
    bank = layer.banks[0]
    assert isinstance(bank, LiteralBank)
    bank.R_V = shift
    U = torch.zeros(len(names), network.outputs)
    for i in range(network.outputs):
        U[i, i] = 1.0
    return LiteralTransformer([layer] * depth, U)
