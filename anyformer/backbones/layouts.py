"""Layouts of the literal machine: which 0/1 matrices carry which coordinate where.

Entry ``R[i, j] = 1`` carries coordinate i to j. R_Q, R_K (m x d), R_V (m x m) and U (m x out) hold at most one 1 a *row*; in an MLP
every *column* of gate and up, and every *row* of down. Layouts are rules on *names* of coordinates, (kind, path, ...), enumerated here
from the class alone by walking every path.

* folded: child b of the root is moved into the place of the residual child (or of the first), where the next layer reads;
* masked (the paper): R_V is diagonal and keeps the coordinates whose l-th branch is h; reads sum over all prefixes;
* looped: child b is moved to the root itself, so one set of matrices serves every layer;
* chain: one head, slots of equal width, R_V is the shift by one slot;
* composed: only paths along which every branch feeds the next; a child moves to the first branch, the residual before all, that has its
  coordinates, so a root may be scattered.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyformer.backbones.composition import Composition, Part, Ports
from anyformer.backbones.literal import LiteralBank, LiteralLayer, LiteralTransformer
from anyformer.backbones.tree import Tree
from anyformer.classes import NetworkClass
from anyformer.errors import OutsideClass
from anyformer.memory import approximate, require_memory

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

Places = Callable[[Name], list[Name]]
"""A coordinate as a node names it, from itself on -> the coordinates of the stream whose sum it is."""


def below(*prefixes: tuple) -> Places:
    """The node at a path, or the sum over the nodes at several."""
    return lambda name: [(name[0], (*prefix, *name[1]), *name[2:]) for prefix in prefixes]


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

    def read(self, places: Places, kind: str, *details: int, columns: int) -> Tensor:
        """Columns that read (kind, (), details, i) for i < columns."""
        entries = [(self.index[place], i) for i in range(columns) for place in places((kind, (), *details, i))]
        return self.matrix(entries, columns)

    def layer(self, s: int, places: Places, move: Move, skip: bool) -> LiteralLayer:
        """Stage s, reading at ``places``, each branch carrying coordinates by ``move``; with ``skip`` the home branch is a skip."""
        stage, banks = self.network.stages[s], []
        for b, branch in enumerate(stage.branches):
            op = branch.operator
            if skip and home(self.network, s) == (b, 0):
                continue
            moves = [
                [(i, self.index[t]) for i, n in enumerate(self.names) if n and (t := move(n, (b, g)))] for g in range(op.count)
            ]
            reads = [self.read(places, "own", b, g, columns=op.reads) for g in range(op.count)]
            if branch.is_gated:
                # a target's unit becomes one hidden unit a moved coordinate; they share its gate
                units = [(g, i, j) for g in range(op.count) for i, j in moves[g]]
                up = self.matrix([(i, unit) for unit, (_, i, _) in enumerate(units)], len(units))
                down = self.matrix([(j, unit) for unit, (_, _, j) in enumerate(units)], len(units)).T.contiguous()
                own = torch.stack(reads, dim=1)[:, [g for g, _, _ in units], None]
                banks.append(LiteralBank(op, own, up=up, down=down))
            else:
                routes = torch.stack([self.matrix(pairs, len(self.names)) for pairs in moves])
                banks.append(LiteralBank(op, torch.stack(reads, dim=1)[:, :, None], R_V=routes))
        shared = self.read(places, "shared", columns=stage.shared) if stage.shared else None
        return LiteralLayer(banks, shared, skip)

    def readout(self, places: Places) -> Tensor:
        return self.read(places, "output", columns=self.network.outputs)


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
        layers.append(build.layer(s, below(trunk), _fold_move(s, trunk, to), network.stages[s].residual is not None))
        trunk = (*trunk, to)
    return LiteralTransformer(layers, build.readout(below(trunk)))


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

        layers.append(build.layer(s, below(*prefixes), keep, skip=False))
        prefixes = [(*p, (b, g)) for p in prefixes for b, br in enumerate(stage.branches) for g in range(br.operator.count)]
    return LiteralTransformer(layers, build.readout(below(*prefixes)))


def looped_literal(network: NetworkClass, period: int, layers: int) -> LiteralTransformer:
    """One layer of ``period`` stages with matrices that do not know which layer it is: inside the layer children fold in
    place, its last stage carries each child to the root. Leaves of path (h, rest) go to (rest, home)."""
    build = _Builder(network)
    homes = tuple(home(network, s) for s in range(period))
    stages = []
    for j in range(period):
        if j < period - 1:
            stages.append(build.layer(j, below(homes[:j]), _fold_move(j, homes[:j], homes[j]), skip=False))
            continue

        def to_root(name: Name, branch: tuple[int, int]) -> Name | None:
            path = name[1]
            if path[:period] != (*homes[:-1], branch):
                return None
            last = layers * period
            if len(path) < last:
                return (name[0], path[period:], *name[2:])
            return (name[0], (*path[period:last], *homes, *path[last:]), *name[2:])

        stages.append(build.layer(j, below(homes[:j]), to_root, skip=False))
    order, trunk = stages * layers, homes * layers
    for s in range(period * layers, len(network.stages)):
        to = home(network, s)
        order.append(build.layer(s, below(trunk), _fold_move(s, trunk, to), network.stages[s].residual is not None))
        trunk = (*trunk, to)
    return LiteralTransformer(order, build.readout(below(trunk)))


def chain_literal(network: NetworkClass, slot: int) -> LiteralTransformer:
    """One head, L + 1 slots: the layer reads slot 1 and its R_V is the shift of every slot by one."""
    depth = len(network.stages)
    names: list[Any] = [None] * ((depth + 1) * slot)
    at = {}
    for name in enumerate_names(network):
        place = len(name[1]) * slot + name[-1]
        names[place], at[name] = name, place
    build = _Builder(network, names)
    layer = build.layer(0, below(()), lambda name, branch: None, skip=False)
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


# --- known composition --------------------------------------------------------------------------------------------------------


def enumerate_composed_names(network: NetworkClass, composition: Composition) -> list[Name]:
    """The coordinates of a composed tree in their order, by walking every path with the writers that stand behind it."""
    ports = Ports(network)
    fed = dict(zip(ports.all_writers(), composition.feeds, strict=True)) if composition.feeds is not None else {}
    within: dict[Part, list[tuple[Part, int, int]]] = {}

    def columns(writers: list[Part], reader: Part) -> list[int]:
        """Which ports of a reader some writer feeds."""
        found = set()
        for writer in writers:
            if writer not in within:
                within[writer] = list(ports.readers(writer.stage))
            for part, first, last in within[writer]:
                if part == reader:
                    found |= {i - first for i in range(first, last) if not fed or any(a <= i < b for a, b in fed[writer])}
        return sorted(found)

    def node(s: int, path: tuple, writers: list[Part]) -> list[Name]:
        if s == len(network.stages):
            return [("output", path, i) for i in columns(writers, Part(s, 0, 0, "outputs"))]
        names: list[Name] = [("shared", path, i) for i in columns(writers, Part(s, 0, 0, "norm"))]
        banks = list(enumerate(network.stages[s].branches))
        for b, branch in banks:
            for g in range(branch.operator.count):
                names += [("own", path, b, g, i) for i in columns(writers, Part(s, b, g, "reads"))]
        for b, branch in banks:
            for g in range(branch.operator.count):
                below = (*path, (b, g))
                if branch.is_residual:
                    bias = Part(s, b, g, "bias")
                    names += node(s + 1, below, [*writers, bias] if columns(writers, bias) else writers)
                elif columns(writers, Part(s, b, g, "value")):
                    names += node(s + 1, below, [Part(s, b, g, "branch")])
        return names

    return node(0, (), [Part(-1, 0, 0, "embedding")])


def composed_literal(network: NetworkClass, composition: Composition) -> LiteralTransformer:
    """Children move to the place of the first branch that has their coordinates, the residual's before all; a true skip where that
    is always the residual's. Reads that nobody feeds have columns of zeros."""
    names = enumerate_composed_names(network, composition)
    build, layers = _Builder(network, list(names)), []
    root = {name: name for name in names}  # the coordinate as the root of this stage names it -> its name in the whole tree
    for s, stage in enumerate(network.stages):
        homes: dict[Name, Name] = {}
        order = sorted((n for n in root if n[1]), key=lambda n: n[1][0] != home(network, s))
        for name in order:
            homes.setdefault((name[0], name[1][1:], *name[2:]), root[name])
        moves = {root[n]: (n[1][0], homes[n[0], n[1][1:], *n[2:]]) for n in order}
        skip = stage.residual is not None and all(moves[place][0] == home(network, s) for place in homes.values())

        def move(name: Name, branch: tuple[int, int], moves: dict = moves) -> Name | None:
            by, to = moves.get(name, (None, None))
            return to if by == branch else None

        layers.append(build.layer(s, _known(root), move, skip))
        root = homes
    return LiteralTransformer(layers, build.readout(_known(root)))


def _known(root: dict[Name, Name]) -> Places:
    """The one place of a coordinate, or none where it is 0."""
    return lambda name: [root[name]] if name in root else []
