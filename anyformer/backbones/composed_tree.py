"""The path tree of a class whose composition is known: one leaf per path of the graph, not one per path.

    node(s, F) = [ the probe columns of stage s+1 in F ] ++ [ node(s+1, F_b) for each branch b that may write something ]
    node(S, F) = [ the output columns in F ]

F is the set of ports (:class:`Ports`) that the writers of a stream may feed. A branch b has the child F_b = what b feeds, if its value is
in F; a residual branch passes F on, and adds what its bias feeds if that is in F. So a node depends on F alone, and branches that
feed alike share one. After stage s of a run the root is node(s, F_s), F_s the union over all that wrote.

Sets are Python integers, bit i for port i from the stage on; -1, all bits, stands for everything, whatever the size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from anyformer.backbones.composition import Composition
from anyformer.backbones.folding import Move, Plan, Runs, Segment, Step
from anyformer.backbones.tree import Block, Coordinate, Tree
from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError

EVERYTHING = -1


@dataclass(frozen=True)
class Child:
    """One child of a node: branch ``g`` of a ``bank``, the ports that it ``feeds``, where it stands in the node, how wide it is."""

    bank: int
    g: int
    feeds: int
    at: int
    width: int


class ComposedTree:
    """The layout for a class and a composition. Sizes are Python integers and may be astronomically large."""

    def __init__(self, network_class: NetworkClass, composition: Composition):
        composition.check(network_class)
        self.names = Tree.of(network_class)
        self.stages = network_class.stages
        self.outputs = network_class.outputs
        self.complete = composition.feeds is None
        self._widths: list[dict[int, int]] = [{} for _ in range(len(self.stages) + 1)]
        if composition.feeds is None:
            return
        masks = (sum((1 << last) - (1 << first) for first, last in ranges) for ranges in composition.feeds)
        self._first = next(masks)
        self._feeds: list[list[list[int]]] = []
        self._alike: list[dict[int, int]] = []
        for stage in self.stages:
            banks = [[next(masks) for _ in range(branch.operator.count)] for branch in stage.branches]
            alike: dict[int, int] = {}  # what branches feed -> those branches, as bits
            for i, (branch, feeds) in enumerate((b, f) for b, bank in zip(stage.branches, banks, strict=True) for f in bank):
                if not branch.is_residual:
                    alike[feeds] = alike.get(feeds, 0) | 1 << i
            self._feeds.append(banks)
            self._alike.append(alike)

    @property
    def first(self) -> int:
        """What the embedding feeds."""
        return EVERYTHING if self.complete else self._first

    def feeds(self, s: int, bank: int, g: int) -> int:
        """What a branch feeds (a residual branch: its bias)."""
        return EVERYTHING if self.complete else self._feeds[s][bank][g]

    def ports(self, s: int) -> int:
        """Number of ports of stage s."""
        return self.stages[s].probes + self.stages[s].count

    def columns(self, s: int, F: int) -> list[tuple[int, int]]:
        """The runs (first, last + 1) of probe columns, at the end of output columns, that node(s, F) holds."""
        size = self.outputs if s == len(self.stages) else self.stages[s].probes
        if F == EVERYTHING:
            return [(0, size)] if size else []
        return list(_runs(F & ((1 << size) - 1)))

    def reads(self, s: int, F: int) -> int:
        """How many of them."""
        return sum(last - first for first, last in self.columns(s, F))

    def passed(self, s: int, F: int) -> Iterator[int]:
        """What the child of each residual branch of node(s, F) feeds."""
        at = self.stages[s].probes
        for bank, branch in enumerate(self.stages[s].branches):
            if branch.is_residual:
                yield F >> self.ports(s) | (self.feeds(s, bank, 0) if F >> at & 1 else 0)
            at += branch.operator.count

    def _below(self, s: int, F: int) -> Iterator[tuple[int, int]]:
        """(how many, F') for the children of node(s, F), those that feed alike together."""
        for child in self.passed(s, F):
            yield 1, child
        values = F >> self.stages[s].probes
        for feeds, branches in self._alike[s].items():
            if many := (values & branches).bit_count():
                yield many, feeds

    def width(self, s: int, F: int) -> int:
        """width(s, F), level by level: memory and time go with the different (s, F), not with the width."""
        if self.complete:
            return self.names.widths[s]
        if F not in self._widths[s]:
            levels: list[set[int]] = [set() for _ in self._widths]
            levels[s].add(F)
            for t in range(s, len(self.stages)):
                for node in levels[t]:
                    levels[t + 1] |= {f for _, f in self._below(t, node)} - self._widths[t + 1].keys()
            for t in range(len(self.stages), s - 1, -1):
                for node in levels[t]:
                    below = () if t == len(self.stages) else self._below(t, node)
                    self._widths[t][node] = self.reads(t, node) + sum(n * self._widths[t + 1][f] for n, f in below)
        return self._widths[s][F]

    @cached_property
    def total(self) -> int:
        """m = width(0, what the embedding feeds)."""
        return self.width(0, self.first)

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """F_0 .. F_S: what the streams of a run feed."""
        roots = [self.first]
        for s in range(len(self.stages)):
            if self.complete:
                roots.append(EVERYTHING)
                continue
            after = 0
            for _, f in self._below(s, roots[-1]):
                after |= f
            roots.append(after)
        return tuple(roots)

    def children(self, s: int, F: int) -> list[Child]:
        """The children of node(s, F) that hold anything, in their order."""
        found, at, port, passed = [], self.reads(s, F), self.stages[s].probes, self.passed(s, F)
        for bank, branch in enumerate(self.stages[s].branches):
            for g in range(branch.operator.count):
                feeds = next(passed) if branch.is_residual else self.feeds(s, bank, g) if F >> port & 1 else 0
                port += 1
                if width := self.width(s + 1, feeds) if feeds else 0:
                    found.append(Child(bank, g, feeds, at, width))
                    at += width
        return found

    def inside(self, other: "ComposedTree", s: int, small: int, large: int) -> list[tuple[int, int, int]]:
        """Where the columns of this tree's node(s, small) stand in ``other``'s node(s, large), which holds all of them:
        runs (from, to, length)."""
        runs: list[tuple[int, int, int]] = []
        waiting = [(s, small, 0, large, 0)]
        while waiting:
            s, small, a, large, b = waiting.pop()
            if self is other and small == large:
                _append(runs, a, b, self.width(s, small))
                continue
            at, theirs = a, other.columns(s, large)
            for first, last in self.columns(s, small):
                before = sum(min(end, first) - start for start, end in theirs if start < first)
                _append(runs, at, b + before, last - first)
                at += last - first
            if s == len(self.stages):
                continue
            places = {(child.bank, child.g): child for child in other.children(s, large)}
            below = [(child, places[child.bank, child.g]) for child in self.children(s, small)]
            waiting += [(s + 1, c.feeds, a + c.at, p.feeds, b + p.at) for c, p in reversed(below)]
        return runs

    def coordinate(self, i: int) -> Coordinate:
        """The meaning of coordinate i, 0 <= i < m."""
        if not 0 <= i < self.total:
            raise AnyformerError(f"coordinate must lie in 0..{self.total - 1}, got {i}")
        path: tuple[str, ...] = ()
        s, F = 0, self.first
        while i >= self.reads(s, F):
            child = next(c for c in self.children(s, F) if i < c.at + c.width)
            path, i = (*path, self.names.branch_name(s, child.bank, child.g)), i - child.at
            s, F = s + 1, child.feeds
        column = [c for first, last in self.columns(s, F) for c in range(first, last)][i]
        if s == len(self.stages):
            return Coordinate(None, f"output {column + 1}", path)
        return Coordinate(self.names.stage_name(s), self.names.read_name(s, column), path)

    def blocks(self) -> Iterator[Block]:
        """All blocks, in the order of the coordinates."""
        waiting: list[tuple[int, int, int, tuple[str, ...]]] = [(0, self.first, 0, ())]
        while waiting:
            s, F, at, path = waiting.pop()
            last = s == len(self.stages)
            if count := self.reads(s, F):
                yield Block("output" if last else self.names.stage_name(s), path, at, count)
            for c in [] if last else reversed(self.children(s, F)):
                waiting.append((s + 1, c.feeds, at + c.at, (*path, self.names.branch_name(s, c.bank, c.g))))

    @cached_property
    def plan(self) -> Plan:
        """The folded run: where each stage reads, and for each segment of the next root the children that add up to it."""
        steps = tuple(self._step(s) for s in range(len(self.stages)))
        S = len(self.stages)
        return Plan(self.names, self.total, steps, self._reads_of(S, 0, self.outputs))

    def _reads_of(self, s: int, start: int, stop: int) -> Runs:
        """Columns start .. stop - 1 of a stage at the root of its stream; zeros where nothing feeds them."""
        runs, at, done = [], 0, start
        for first, last in self.columns(s, self.roots[s]):
            low, high = max(first, start), min(last, stop)
            if low < high:
                if low > done:
                    runs.append((-1, low - done))
                runs.append((at + low - first, high - low))
                done = high
            at += last - first
        if done < stop:
            runs.append((-1, stop - done))
        return tuple(runs)

    def _step(self, s: int) -> Step:
        stage, root = self.stages[s], self.roots[s]
        own, at = [], stage.shared
        for branch in stage.branches:
            end = at + branch.operator.count * branch.operator.reads
            own.append(self._reads_of(s, at, end))
            at = end
        children = self.children(s, root)
        runs = [(run, child) for child in children for run in self.inside(self, s + 1, child.feeds, self.roots[s + 1])]
        cuts = sorted({end for (_, to, n), _ in runs for end in (to, to + n)})
        places = {cut: i for i, cut in enumerate(cuts)}
        parts: list[list[Move]] = [[] for _ in cuts]
        for (start, to, n), child in runs:
            for i in range(places[to], places[to + n]):
                move = Move(child.bank, child.g, child.g + 1, child.at, child.width, start + cuts[i] - to)
                _append_move(parts[i], move)
        segments = (Segment(cuts[i + 1] - cuts[i], tuple(moves)) for i, moves in enumerate(parts[:-1]))
        return Step(self._reads_of(s, 0, stage.shared), tuple(own), tuple(segments))


@lru_cache(maxsize=8)
def composed_tree(network_class: NetworkClass, composition: Composition) -> ComposedTree:
    """The tree of a class and a composition; the last few are kept."""
    return ComposedTree(network_class, composition)


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    """The runs of ones of an integer >= 0: (first, last + 1)."""
    at = 0
    while bits:
        zeros = (bits & -bits).bit_length() - 1
        bits >>= zeros
        ones = (~bits & (bits + 1)).bit_length() - 1
        yield at + zeros, at + zeros + ones
        bits >>= ones
        at += zeros + ones


def _append(runs: list[tuple[int, int, int]], a: int, b: int, n: int) -> None:
    """Add a run (from, to, length), to the last one where it goes on."""
    if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (a, b):
        a, b, before = runs.pop()
        n += before
    if n:
        runs.append((a, b, n))


def _append_move(moves: list[Move], move: Move) -> None:
    """Add a move, to the last one where it is the next branch with a child of the same shape."""
    last = moves[-1] if moves else None
    if (
        last is not None
        and last == replace(move, first=last.first, last=last.last, at=last.at)
        and (last.last, last.at + (last.last - last.first) * last.width) == (move.first, move.at)
    ):
        moves[-1] = replace(last, last=move.last)
    else:
        moves.append(move)
