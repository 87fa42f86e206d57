"""Theorem 4: the exact combinatorial criterion for aggregation families, and the smallest number of layers (Corollary 4.1).

    R_m(s) = {s},   R_{k-1}(s) = R_k(s) + { u : P^k_vu > 0 for some v in R_k(s) }              the tokens that slot s can depend on after layer k
    (s, t, pi) is *bad*  iff  pi: R_0(s) -> R_0(t) is bijective, pi(s) = t, and P^k_{pi v, pi u} = P^k_vu for all k, v in R_k(s), u in R_0(s)

A stack of m layers approximates every continuous G-equivariant map iff R_0(s) is everything for all s, and every bad pi lies in G. Bad
maps from s to t are the maps between two coloured structures, a coset ``tau A_s`` (:mod:`anyformer.approximation.colourings`): testing tau
and generators of A_s for membership in G is enough. Proof: docs/theory/universality.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from anyformer.approximation.colourings import Coloured, automorphisms, mapping
from anyformer.approximation.groups import Group, Permutation, compose, orbits
from anyformer.approximation.patterns import Pattern
from anyformer.approximation.verdict import LayerBounds


@dataclass(frozen=True)
class Bad:
    """A coset of bad maps: ``tau`` followed after any product of ``generators``, all written on positions. ``domain`` is R_0(s); where it
    is not everything, tau maps it to R_0(t) and is -1 elsewhere."""

    source: int
    target: int
    domain: tuple[int, ...]
    tau: Permutation
    generators: tuple[Permutation, ...]

    def outside(self, group: Group) -> Permutation | None:
        """A bad permutation that is not in the group, or None. For bad maps of all tokens."""
        for sigma in (self.tau, *(compose(self.tau, g) for g in self.generators)):
            if sigma not in group:
                return sigma
        return None


@dataclass(frozen=True, eq=False)
class Stack:
    """Patterns of m layers, the first layer first."""

    patterns: tuple[Pattern, ...]
    tokens: int

    @property
    def layers(self) -> int:
        """m."""
        return len(self.patterns)

    @cached_property
    def all_levels(self) -> np.ndarray:
        """(n, n): row s holds the largest k with v in R_k(s); -1 where s never depends on v."""
        reached = np.eye(self.tokens, dtype=bool)
        level = np.where(reached, self.layers, -1)
        for k in range(self.layers, 0, -1):
            wider = _onward(reached, self.patterns[k - 1].support)
            level[wider & ~reached] = k - 1
            reached = wider
        return level

    @property
    def unreachable(self) -> tuple[int, int] | None:
        """A pair (s, u) such that s does not depend on u; None where everything depends on everything."""
        pairs = np.argwhere(self.all_levels < 0)
        return None if not len(pairs) else (int(pairs[0, 0]), int(pairs[0, 1]))

    def _colours(self, certain: bool) -> list[np.ndarray]:
        """For k = 0 .. m: one number for the colours of a pair in all heads of layers 1 .. k."""
        n = self.tokens
        columns = np.zeros((n * n, 1), dtype=int)
        out = [np.zeros((n, n), dtype=int)]
        used: set[int] = set()
        ids = np.zeros(n * n, dtype=int)
        for k, pattern in enumerate(self.patterns, 1):
            if id(pattern) not in used:  # a pattern that occurs again tells nothing new apart
                used.add(id(pattern))
                heads = (pattern.sure if certain else pattern.maybe).reshape(len(pattern.sure), -1).T
                columns = np.concatenate((columns, heads), 1)
                _, ids = np.unique(columns, axis=0, return_inverse=True)
            out.append(ids.reshape(n, n) + n * n * k)
        return out

    def rooted(self, s: int, colours: list[np.ndarray]) -> tuple[Coloured, tuple[int, ...]]:
        """The structure on R_0(s), and its vertices as positions."""
        level = self.all_levels[s]
        domain = np.flatnonzero(level >= 0)
        pairs = np.empty((len(domain), len(domain)), dtype=int)
        for i, v in enumerate(domain):
            pairs[i] = colours[level[v]][v, domain]
        return Coloured(level[domain] * 2 + (domain == s), pairs), tuple(int(v) for v in domain)

    def symmetries(self, certain: bool) -> Group:
        """All permutations that keep every row of every layer: the stack is exactly equivariant under those of ``certain=False``."""
        certain = certain and not self._settled
        if certain not in self._symmetries:
            whole = self._colours(certain)[-1]
            self._symmetries[certain] = Group(self.tokens, automorphisms(Coloured(np.diag(whole), whole)))
        return self._symmetries[certain]

    @cached_property
    def _settled(self) -> bool:
        """Whether every equality of colours is decided: both colourings are one."""
        return all(p.sure is p.maybe or np.array_equal(p.sure, p.maybe) for p in self.patterns)

    @cached_property
    def _symmetries(self) -> dict[bool, Group]:
        return {}

    @cached_property
    def _bad(self) -> dict[bool, list["Bad"]]:
        return {}

    def bad(self, certain: bool) -> list[Bad]:
        """Every coset of bad maps, up to the symmetries of the stack (one s of each orbit, one t of each orbit). ``certain=True`` treats colours
        that are not known to differ as equal: all bad maps, and perhaps more."""
        certain = certain and not self._settled
        if certain not in self._bad:
            self._bad[certain] = self._cosets(certain)
        return self._bad[certain]

    def _cosets(self, certain: bool) -> list[Bad]:
        colours = self._colours(certain)
        known = self.symmetries(certain=False)  # these are symmetries of either colouring
        firsts = [o[0] for o in orbits(self.tokens, known.generators)]
        structures = {s: self.rooted(s, colours) for s in firsts}
        found = []
        for s in firsts:
            own, domain = structures[s]
            inner = automorphisms(own)
            for t in firsts:
                other, image = structures[t]
                tau = mapping(own, other)
                if tau is not None:
                    generators = tuple(_lift(g, domain, domain, self.tokens) for g in inner)
                    found.append(Bad(s, t, domain, _lift(tau, domain, image, self.tokens), generators))
        return found

    def generated(self) -> Group:
        """The smallest group that holds every bad permutation. For stacks in which everything depends on everything."""
        found = list(self.symmetries(certain=True).generators)
        for bad in self.bad(certain=True):
            found += [bad.tau, *(compose(bad.tau, g) for g in bad.generators)]
        return Group(self.tokens, tuple(found))

    def violation(self, group: Group, certain: bool) -> tuple[Permutation, int] | None:
        """(sigma, s): a bad permutation outside the group; None where all lie in it. For stacks in which everything depends on everything."""
        for sigma in self.symmetries(certain).generators:
            if sigma not in group:
                return sigma, 0
        for bad in self.bad(certain):
            sigma = bad.outside(group)
            if sigma is not None:
                return sigma, bad.source
        return None


def _lift(pi: Permutation, domain: Sequence[int], image: Sequence[int], n: int) -> Permutation:
    """A map between vertices as a map between positions; positions outside stay (equal domains) or go to -1."""
    sigma = list(range(n)) if tuple(domain) == tuple(image) else [-1] * n
    for i, v in enumerate(domain):
        sigma[v] = image[pi[i]]
    return tuple(sigma)


def is_causal(stack: Stack) -> bool:
    """Whether the closure is all causal maps: s depends on tokens 0 .. s exactly, and the identity is the only bad map."""
    n = stack.tokens
    if not np.array_equal(stack.all_levels >= 0, np.tril(np.ones((n, n), dtype=bool))):
        return False
    return all(b.source == b.target and b.tau == tuple(range(n)) and not b.generators for b in stack.bad(certain=True))


def _onward(reached: np.ndarray, support: np.ndarray) -> np.ndarray:
    """What is reached, and what that sees."""
    return reached | (reached.astype(np.float32) @ support.astype(np.float32) > 0)


def unreached(supports: Sequence[np.ndarray], graph: np.ndarray) -> tuple[int, int, int] | None:
    """(s, u, far): the first pair such that slot s does not depend on token u through layers of these supports, the first layer first, and the
    directed distance in ``graph``, -1 where there is no path; None where everything depends on everything."""
    reached = np.eye(len(graph), dtype=bool)
    for support in reversed(supports):
        reached = _onward(reached, support)
    if reached.all():
        return None
    s, u = (int(i) for i in np.argwhere(~reached)[0])
    return s, u, int(distances(graph)[s, u])


def distances(support: np.ndarray) -> np.ndarray:
    """(n, n) directed distances along a graph, -1 where there is no path; v reaches u in one step where support[v, u]."""
    n = len(support)
    out = np.where(np.eye(n, dtype=bool), 0, -1)
    reached, step = np.eye(n, dtype=bool), 0
    while True:
        step += 1
        wider = _onward(reached, support)
        if np.array_equal(wider, reached):
            return out
        out[wider & ~reached] = step
        reached = wider


def layer_bounds(pattern: Pattern, group: Group) -> LayerBounds:
    """Corollary 4.1, one pattern in all layers: not strongly connected, or a symmetry outside G: no number of layers. Otherwise the directed
    diameter D, or D + 1 where D layers leave a bad permutation outside G. Exact where all colours are certain."""
    far = distances(pattern.support)
    if (far < 0).any():
        return LayerBounds(impossible=True)
    diameter = int(far.max())
    deep = Stack((pattern,) * max(diameter, 1), pattern.tokens)  # as many symmetries as one layer has
    if not deep.symmetries(certain=False).issubset(group):
        return LayerBounds(impossible=True)
    if diameter == 0 or deep.violation(group, certain=True) is None:
        return LayerBounds(diameter, diameter)
    upper = diameter + 1 if deep.symmetries(certain=True).issubset(group) else None
    no = deep.violation(group, certain=False) is not None
    return LayerBounds(diameter + 1 if no else diameter, upper)
