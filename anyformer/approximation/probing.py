"""Certificates by probing: Corollary 1 (with a residual path) and Theorem 3 (without) from finitely many evaluations of one member.

Fix parameters and tokens c, a, b. A marking (), (u) or (u, v) is the input with a at u, b at v and c elsewhere (Proposition 5). If
``F_{sigma(s)} o sigma = F_s`` then ``F_{sigma(s)}(X_{sigma mu}) = F_s(X_mu)`` for every marking, so

    R_s = { sigma : F_{sigma(s)}(X_{sigma mu}) = F_s(X_mu) for all mu }

holds every bad sigma at s, and n^2 + 1 evaluations are enough instead of n!. Values are compared by *inequalities only*: balls, or float64
values with a margin, are merged by one global union-find over all slots, markings and draws; what is merged counts as equal. Then R_s is a
coset of maps between coloured structures. Single markings come first, pairs where those are not enough. Exact symmetries of the member,
proved from its structure, spare evaluations: one marking of each orbit is evaluated. An inconclusive probe says nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyformer.approximation.balls import Undecided, precision
from anyformer.approximation.colourings import Coloured, automorphisms, mapping
from anyformer.approximation.groups import Group, Permutation, compose, inverse, orbits
from anyformer.approximation.models import GRID, Draw
from anyformer.approximation.patterns import merged

MARGIN = 1000
"""A float64 inequality counts where its gap is that many times the noise."""

Evaluate = Callable[[Tensor], Any]
"""(batch, n, d) float64 -> (batch, n, d) balls, or float64."""

Marking = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Certificate:
    """What the probes of one architecture showed. ``dependent`` (n, n): certified ``dF_s/dx_u`` not 0. ``remaining`` generates every sigma
    that was not excluded at some slot (a group that contains it is proved, or certified). ``stray`` names a map from s to t whose sigma(s)
    is not t, or which exchanges slots of one sample, that was not excluded (Theorem 3 asks for none)."""

    dependent: np.ndarray
    remaining: Group
    stray: tuple[int, int, Permutation] | None
    bits: int | None
    noise: float
    gap: float
    draws: int
    evaluations: int
    depth: int
    witness: dict[str, Any] = field(default_factory=dict)

    @property
    def independent(self) -> tuple[int, int] | None:
        """A pair (s, u), s != u, without a certified dependence."""
        missing = np.argwhere(~(self.dependent | np.eye(len(self.dependent), dtype=bool)))
        return None if not len(missing) else (int(missing[0, 0]), int(missing[0, 1]))

    def proves(self, group: Group, residual: bool) -> bool:
        """Whether everything that Corollary 1 (with a residual path; else Theorem 3) asks for ``group`` is witnessed. For the symmetric group
        dependences are enough (Corollary 2)."""
        if not _all_dependent(self.dependent, residual) or self.stray is not None:
            return False
        return (residual and _separates_all(group)) or self.remaining.issubset(group)

    def missing(self, residual: bool) -> str:
        """What is not witnessed, in a sentence."""
        if self.independent is not None:
            return f"no witness that token {self.independent[0]} depends on token {self.independent[1]}"
        if not _all_dependent(self.dependent, residual):
            return f"no witness that token {int(np.argmin(np.diag(self.dependent)))} depends on itself, as Theorem 3 asks"
        if self.stray is not None:
            return f"slots {self.stray[0]} and {self.stray[1]} were not told apart"
        return f"not excluded: {self.remaining.name}; that is no proof that it is a symmetry"

    def sentence(self, where: str, family: str = "") -> str:
        """What is witnessed, ``where``, with its numbers."""
        n = len(self.dependent)
        return (
            f"{n * (n - 1)}/{n * (n - 1)} dependences and all separations outside G witnessed {where} ({self.bits}-bit balls, smallest gap "
            f"{self.gap:.3g}, {self.evaluations} evaluations{'; ' + family if family else ''})"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "arithmetic": "float64 with margins" if self.bits is None else f"{self.bits}-bit balls",
            "dependences": int((self.dependent & ~np.eye(len(self.dependent), dtype=bool)).sum()),
            "remaining": self.remaining.to_json(),
            "smallest_gap": self.gap,
            "noise": self.noise,
            "draws": self.draws,
            "evaluations": self.evaluations,
            "marks": self.depth,
            "witness": self.witness,
        }


class Probe:
    """Colours of all (slot, marking) values over some draws, on n tokens of d features."""

    def __init__(self, n: int, d: int, known: Group):
        self.n, self.d, self.known = n, d, known
        self.singles = np.zeros((n, n), dtype=int)
        self.bases = np.zeros(n, dtype=int)
        self.pairs = np.zeros((n, n, n), dtype=int)
        self.dependent = np.zeros((n, n), dtype=bool)
        self.gap, self.noise, self.evaluations, self.draws, self.depth = np.inf, 0.0, 0, 0, 0
        self.witness: dict[str, Any] = {}

    def draw(self, evaluate: Evaluate, seed: int, depth: int, noise: float = 0.0, scale: float = 1.0) -> None:
        """Evaluate one member at markings of up to ``depth`` tokens and refine the colours. ``noise`` is that of float64 values."""
        drawn = Draw(seed)
        c, a, b = (drawn(self.d, scale=scale) for _ in range(3))
        weights = drawn(self.d, scale=1.0)
        markings: list[Marking] = [(), *((u,) for u in range(self.n))]
        if depth > 1:
            markings += [(u, v) for u in range(self.n) for v in range(self.n) if u != v]
        transversal = _transversal(markings, self.known)
        firsts = sorted({first for first, _ in transversal.values()})
        values = _evaluate(evaluate, firsts, self.n, c, a, b, weights)
        self.evaluations += len(firsts)
        rows = {mu: i for i, mu in enumerate(firsts)}
        flat = values.reshape(-1)
        ids, gap = _classes(flat, MARGIN * noise)
        ids = ids.reshape(values.shape)
        table = {}
        for mu, (first, gamma) in transversal.items():
            table[mu] = ids[rows[first]][list(inverse(gamma))]  # the value of slot gamma(s) at gamma(mu) is that of s at mu
        self.noise, self.gap = max(self.noise, noise), min(self.gap, gap)
        self.draws, self.depth = self.draws + 1, max(self.depth, depth)
        self.bases = _refined(self.bases, table[()])
        singles = np.stack([table[(u,)] for u in range(self.n)], 1)
        self.singles = _refined(self.singles, singles)
        self.dependent |= singles != table[()][:, None]
        if depth > 1:
            pairs = np.zeros((self.n, self.n, self.n), dtype=int)
            for (u, v), row in ((mu, r) for mu, r in table.items() if len(mu) == 2):
                pairs[:, u, v] = row
            self.pairs = _refined(self.pairs, pairs)
        self.witness = {
            "parameters": {"seed": seed, "grid": GRID},
            "tokens": {name: [round(float(x) * GRID) for x in token] for name, token in (("c", c), ("a", a), ("b", b))},
            "tokens_are": f"integers over {GRID}",
        }

    def structure(self, s: int, rooted: bool = True) -> Coloured:
        """What the probes saw of slot s."""
        root = (np.arange(self.n) == s).astype(int) if rooted else 0
        return Coloured((self.singles[s] * (self.n + 1) + self.bases[s]) * 2 + root, self.pairs[s])

    def remaining(self, stop: Group | None = None) -> Group:
        """The group generated by all sigma that are not excluded at some slot; with ``stop`` the search ends at the first outside it."""
        firsts = [o[0] for o in orbits(self.n, self.known.generators)]
        found = list(self.known.generators)
        for s in firsts:
            own = self.structure(s)
            inner = automorphisms(own)
            for t in firsts:
                tau = mapping(own, self.structure(t))
                found += [] if tau is None else [tau, *(compose(tau, g) for g in inner)]
                if stop is not None and any(g not in stop for g in found):
                    return Group(self.n, tuple(found))
        return Group(self.n, tuple(found))

    def stray(self) -> tuple[int, int, Permutation] | None:
        """(s, t, sigma) not excluded with sigma(s) != t (Theorem 3, B'); None where all are."""
        for s in range(self.n):
            own = self.structure(s, rooted=False)
            for t in range(self.n):
                tau = mapping(own, self.structure(t, rooted=False))
                if tau is None:
                    continue
                for sigma in (tau, *(compose(tau, g) for g in automorphisms(own))):
                    if sigma[s] != t:
                        return s, t, sigma
        return None

    def certificate(self, bits: int | None, remaining: Group, stray: tuple[int, int, Permutation] | None = None) -> Certificate:
        """The state of the probe as a value."""
        return Certificate(
            self.dependent.copy(),
            remaining,
            stray,
            bits,
            self.noise,
            float(self.gap),
            self.draws,
            self.evaluations,
            self.depth,
            self.witness,
        )


def certify_by_probing(
    evaluators: list[Evaluate], n: int, d: int, target: Group, known: Group, bits: int, residual: bool
) -> Certificate | str:
    """Probe members in balls, single markings first, until everything that Corollary 1 (Theorem 3 where there is no residual path) asks
    for ``target`` is proved or the draws are used up; a sentence where a kink is met."""
    probe = Probe(n, d, known)
    remaining, stray = target, None
    try:
        with precision(bits):
            for depth in (1, 2):
                for r, evaluate in enumerate(evaluators):
                    probe.draw(evaluate, 1 + r, depth)
                    if not _all_dependent(probe.dependent, residual):
                        continue
                    remaining = target if residual and _separates_all(target) else probe.remaining(target)
                    stray = None if residual else probe.stray()
                    if remaining.issubset(target) and stray is None:
                        return probe.certificate(bits, remaining, stray)
    except Undecided as problem:
        return str(problem)
    return probe.certificate(bits, probe.remaining(), stray)


def _all_dependent(dependent: np.ndarray, residual: bool) -> bool:
    return bool((dependent | (np.eye(len(dependent), dtype=bool) & residual)).all())


def _separates_all(group: Group) -> bool:
    """Whether the group is the symmetric one: there is nothing outside it."""
    return len(group.orbits) == 1 and group.is_product_of_symmetric


def _evaluate(evaluate: Evaluate, markings: list[Marking], n: int, c: Tensor, a: Tensor, b: Tensor, weights: Tensor) -> Any:
    """One number a slot, ``weights . F_s(X_mu)``: (markings, n). A projection can only merge, never tell apart what is equal."""
    inputs = c.expand(len(markings), n, -1).clone()
    for row, mu in zip(inputs, markings, strict=True):
        for place, token in zip(mu, (a, b), strict=False):
            row[place] = token
    parts = []
    for block in torch.split(inputs, 64):
        out = evaluate(block)
        exact = not isinstance(out, Tensor)
        parts.append((out * np.array(weights.tolist(), dtype=object)).sum(-1) if exact else (out @ weights).numpy())
    values = np.concatenate(parts)
    if not (all(x.is_finite() for x in values.ravel()) if values.dtype == object else np.isfinite(values).all()):
        raise Undecided("an output is not finite")
    return values


def _classes(values: Any, margin: float) -> tuple[np.ndarray, float]:
    """Global classes of balls, or of floats that are different only beyond ``margin``; and the smallest gap between two of them."""
    if values.dtype == object:
        ids = merged(values)
        order = np.argsort(ids, kind="stable")
        gap = np.inf
        for i, j in pairwise(order):
            if ids[i] != ids[j]:
                gap = min(gap, float((values[j] - values[i]).abs_lower()))
        return ids, gap
    order = np.argsort(values, kind="stable")
    steps = np.diff(values[order])
    apart = steps > margin
    ids = np.empty(len(values), dtype=int)
    ids[order] = np.concatenate(([0], np.cumsum(apart)))
    return ids, float(steps[apart].min()) if apart.any() else np.inf


def _refined(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Colours that are equal only where both are."""
    pairs = np.stack((old.reshape(-1), new.reshape(-1)), 1)
    _, ids = np.unique(pairs, axis=0, return_inverse=True)
    return ids.reshape(old.shape)


def _transversal(markings: list[Marking], known: Group) -> dict[Marking, tuple[Marking, Permutation]]:
    """marking -> (the first of its orbit, gamma that takes the first to it)."""
    identity = tuple(range(known.degree))
    out: dict[Marking, tuple[Marking, Permutation]] = {}
    for first in markings:
        if first in out:
            continue
        out[first] = (first, identity)
        frontier = [first]
        while frontier:
            mu = frontier.pop()
            for g in known.generators:
                moved = tuple(g[u] for u in mu)
                if moved not in out:
                    out[moved] = (first, compose(g, out[mu][1]))
                    frontier.append(moved)
    return out
