"""Coloured structures and the maps between them: vertices with colours, ordered pairs with colours.

A map pi from A to B keeps the structure if ``colour_B(pi v) = colour_A(v)`` and ``colour_B(pi v, pi u) = colour_A(v, u)``. All such maps form a
coset ``tau Aut(A)``; :func:`mapping` finds one (or shows that there is none), :func:`automorphisms` generators of Aut(A). The search is
individualisation and refinement: colours are refined by the colours around them until they are stable, then one vertex is singled out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
    def counts(self) -> tuple[bytes, bytes]:
        """How often each colour occurs: equal for structures that one map takes to the other."""
        return np.sort(self.vertices).tobytes(), np.sort(self.pairs, axis=None).tobytes()

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
        _, ids = np.unique(np.stack((a.pairs, b.pairs)), return_inverse=True)
        ids = ids.reshape(2, self.size, self.size).astype(np.uint64)
        self.pairs = _mixed(ids * np.uint64(self.size**2 * 2 + 1) + ids.swapaxes(1, 2))
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
        for w in np.flatnonzero(colours[1] == colours[0, v]):
            found = self.finish(self.single_out(colours, v, int(w)))
            if found is not None:
                return found
        return None


def _mixed(x: np.ndarray) -> np.ndarray:
    """A hash of 64-bit words, each by itself (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) + np.uint64(0x9E3779B97F4A7C15)


def choose(colours: np.ndarray) -> int | None:
    """The first vertex of the smallest cell that has more than one; None where all are alone."""
    _, first, counts = np.unique(colours, return_index=True, return_counts=True)
    open_cells = np.flatnonzero(counts > 1)
    return None if not len(open_cells) else int(first[open_cells[np.argmin(counts[open_cells])]])


def mapping(a: Coloured, b: Coloured) -> Permutation | None:
    """One map of A onto B that keeps the structure, or None where there is none."""
    if a.counts != b.counts:
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
    while (v := choose(colours[0])) is not None:
        path.append((colours, v))
        colours = search.single_out(colours, v, v)
        assert colours is not None
    generators: list[Permutation] = []
    orbit = Orbits(size)
    for colours, v in reversed(path):  # the deepest stabiliser first, so that its generators join orbits above
        for w in np.flatnonzero(colours[1] == colours[0, v]).tolist():
            if orbit.of(w) == orbit.of(v):
                continue
            swap = transposition(size, v, w)
            found = swap if a.keeps(a, swap) else search.finish(search.single_out(colours, v, w))
            if found is not None:
                generators.append(found)
                orbit.join(found)
    return tuple(generators)
