"""Layouts of the literal machine: which 0/1 matrices carry which coordinate where.

Entry ``R[i, j] = 1`` carries coordinate i to j. R_Q, R_K (m x d), R_V (m x m) and U (m x out) hold at most one 1 a *row*; in an MLP
every *column* of gate and up, and every *row* of down. Layouts are rules on *names* of coordinates, (kind, path, ...), enumerated here
from the class alone by walking every path.

* folded: child b of the root is moved into the place of the residual child (or of the first), where the next layer reads;
* masked (the paper): R_V is diagonal and keeps the coordinates whose l-th branch is h; reads sum over all prefixes;
* looped: child b is moved to the root itself, so one set of matrices serves every layer;
* chain: one head, slots of equal width, R_V is the shift by one slot.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyformer.backbones.literal import LiteralBank, LiteralLayer, LiteralTransformer
from anyformer.backbones.tree import Tree
from anyformer.errors import OutsideClass
from anyformer.memory import approximate, require_memory
from anyformer.network import NetworkClass

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
    return (network.stages[s].residual or 0, 0)


# --- layouts ------------------------------------------------------------------------------------------------------------------

Move = Callable[[Name, tuple[int, int]], Name | None]
"""(coordinate, branch) -> the coordinate that it is carried to, or None where the branch drops it."""


class _Builder:
    """Dense matrices from rules on names."""

    def __init__(self, network: NetworkClass, names: list[Name | None] | None = None):
        self.network = network
        m = Tree.of(network).width if names is None else len(names)
        banks = [branch for stage in network.stages for branch in stage.branches]
        require_memory(
            8 * m * m * sum(4 if b.is_gated else b.operator.count for b in banks),
            f"the literal machine of width {approximate(m)}",
        )
        self.names = enumerate_names(network) if names is None else names
        self.index = {name: i for i, name in enumerate(self.names) if name is not None}

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
            if branch.is_gated:
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
        layers.append(build.layer(s, [trunk], _fold_move(s, trunk, to), network.stages[s].residual is not None))
        trunk = (*trunk, to)
    return LiteralTransformer(layers, build.readout([trunk]))


def masked_literal(network: NetworkClass) -> LiteralTransformer:
    """The paper's masks: R_V of layer l and head h keeps every coordinate whose l-th branch is h, reads sum over prefixes."""
    gates = [f"stage {s + 1} has gates" for s, st in enumerate(network.stages) if any(b.is_gated for b in st.branches)]
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
        order.append(build.layer(s, [trunk], _fold_move(s, trunk, to), network.stages[s].residual is not None))
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
