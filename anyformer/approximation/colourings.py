"""Coloured structures and the maps between them: vertices with colours, ordered pairs with colours.

A map pi from A to B keeps the structure if ``colour_B(pi v) = colour_A(v)`` and ``colour_B(pi v, pi u) = colour_A(v, u)``. All such maps form a
coset ``tau Aut(A)``; :func:`mapping` finds one (or shows that there is none), :func:`automorphisms` generators of Aut(A). The search is
individualisation and refinement: colours are refined by the colours around them until they are stable, then one vertex is singled out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from anyformer.approximation.groups import Orbits, Permutation, transposition
from anyformer.errors import AnyformerError

SEARCH_LIMIT = 200_000
"""Nodes of a search after which it gives up with an error: regular structures without symmetry can be hard."""


@dataclass(frozen=True, eq=False)
class Coloured:
    """``vertices`` (N,) and ``pairs`` (N, N): integers; equal integers are equal colours."""

    vertices: np.ndarray
    pairs: np.ndarray

    @cached_property
    def hashes(self) -> np.ndarray:
        """(N, N): a hash of the colours of a pair, there and back."""
        there = _mixed(self.pairs.astype(np.uint64))
        return _mixed(there + np.uint64(3) * there.T)

    @cached_property
    def signature(self) -> bytes:
        """Vertices told apart by what is around them, three steps far: equal for structures that one map takes to the other."""
        own = _mixed(self.vertices.astype(np.uint64))
        for _ in range(3):
            own = _mixed(_mixed(self.hashes ^ own[None, :]).sum(1, dtype=np.uint64) ^ _mixed(own))
        return np.sort(own).tobytes()

    def keeps(self, other: "Coloured", pi: Sequence[int]) -> bool:
        """Whether ``pi`` maps this structure onto ``other``."""
        where = np.asarray(pi)
        same = np.array_equal(other.vertices[where], self.vertices)
        return bool(same and np.array_equal(other.pairs[np.ix_(where, where)], self.pairs))


class _Search:
    """One search from A to B."""

    def __init__(self, a: Coloured, b: Coloured):
        self.a, self.b = a, b
        self.size = len(a.vertices)
        self.pairs = np.stack((a.hashes, b.hashes))
        self.nodes = 0

    def refine(self, colours: np.ndarray) -> np.ndarray | None:
        """Stable colours (2, N) of both structures; None where they show that no map exists. The colours around a vertex are told apart by
        sums of 64-bit hashes: a collision makes the colours coarser, and every map that is found is checked."""
        while True:
            own = _mixed(colours.astype(np.uint64))
            around = _mixed(self.pairs ^ own[:, None, :]).sum(2, dtype=np.uint64)
            _, new = np.unique(_mixed(around ^ _mixed(own)), return_inverse=True)
            new = new.reshape(2, self.size)
            if not np.array_equal(np.sort(new[0]), np.sort(new[1])):
                return None
            if new.max() == colours.max():
                return new
            colours = new

    def start(self) -> np.ndarray | None:
        """Refined colours of the vertices."""
        _, ids = np.unique(np.concatenate((self.a.vertices, self.b.vertices)), return_inverse=True)
        colours = ids.reshape(2, self.size)
        return self.refine(colours) if np.array_equal(np.sort(colours[0]), np.sort(colours[1])) else None

    def single_out(self, colours: np.ndarray, v: int, w: int) -> np.ndarray | None:
        """Refined colours once v of A must go to w of B."""
        colours = colours.copy()
        colours[0, v] = colours[1, w] = colours.max() + 1
        return self.refine(colours)

    def finish(self, colours: np.ndarray | None) -> Permutation | None:
        """A map that keeps colours and structure, or None."""
        if colours is None:
            return None
        self.nodes += 1
        if self.nodes > SEARCH_LIMIT:
            raise AnyformerError(f"the search for symmetries passed {SEARCH_LIMIT:,} nodes; this structure is too regular for it")
        v = choose(colours[0])
        if v is None:
            place = np.argsort(colours[1])
            pi = tuple(int(i) for i in place[np.argsort(np.argsort(colours[0]))])
            return pi if self.a.keeps(self.b, pi) else None
        failed: list[int] = []
        for w in np.flatnonzero(colours[1] == colours[0, v]).tolist():
            if any(are_twins(self.b, u, w) for u in failed):
                continue  # what failed with the one fails with the other
            found = self.finish(self.single_out(colours, v, w))
            if found is not None:
                return found
            failed.append(w)
        return None


def _mixed(x: np.ndarray) -> np.ndarray:
    """A hash of 64-bit words, each by itself (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) + np.uint64(0x9E3779B97F4A7C15)


def are_twins(a: Coloured, v: int, w: int) -> bool:
    """Whether v and w may change places while all others stay."""
    return a.keeps(a, transposition(len(a.vertices), v, w))


def choose(colours: np.ndarray) -> int | None:
    """The first vertex of the smallest cell that has more than one; None where all are alone."""
    _, first, counts = np.unique(colours, return_index=True, return_counts=True)
    open_cells = np.flatnonzero(counts > 1)
    return None if not len(open_cells) else int(first[open_cells[np.argmin(counts[open_cells])]])


def mapping(a: Coloured, b: Coloured) -> Permutation | None:
    """One map of A onto B that keeps the structure, or None where there is none."""
    if a.signature != b.signature:
        return None
    search = _Search(a, b)
    return search.finish(search.start())


def automorphisms(a: Coloured) -> tuple[Permutation, ...]:
    """Generators of the automorphism group of A: a strong generating set along a base of singled out vertices."""
    search = _Search(a, a)
    size = search.size
    colours = search.start()
    assert colours is not None
    path: list[tuple[np.ndarray, int]] = []
    generators: list[Permutation] = []
    while (v := choose(colours[0])) is not None:
        cell = np.flatnonzero(colours[0] == colours[0, v]).tolist()
        if all(are_twins(a, v, w) for w in cell[1:]):  # all of them may change places: no search, and all are singled out at once
            generators += [transposition(size, u, w) for u, w in pairwise(cell)]
            colours = colours.copy()
            colours[:, cell] = colours.max() + 1 + np.arange(len(cell))
            colours = search.refine(colours)
        else:
            path.append((colours, v))
            colours = search.single_out(colours, v, v)
        assert colours is not None
    orbit = Orbits(size)
    for g in generators:
        orbit.join(g)
    for colours, v in reversed(path):  # the deepest stabiliser first, so that its generators join orbits above
        for w in np.flatnonzero(colours[1] == colours[0, v]).tolist():
            if orbit.of(w) == orbit.of(v):
                continue
            found = transposition(size, v, w) if are_twins(a, v, w) else search.finish(search.single_out(colours, v, w))
            if found is not None:
                generators.append(found)
                orbit.join(found)
    return tuple(generators)
