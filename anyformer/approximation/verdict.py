"""A verdict: what is claimed, how strongly, by which theorem, and what every hypothesis of it rests on.

    G-UAP(m): every continuous G-equivariant f on (R^d)^n is approximated on every compact set in L^p, p < inf, by stacks of
    at most m attention layers and any number of token-wise feed-forward layers.

| strength | says |
|---|---|
| proved-family | yes (or no), for all n in the stated range, by a lemma whose hypotheses match symbolically |
| proved | yes, for this n, d, m, G: exact arithmetic on declared structure, or ball arithmetic on a model |
| proved-impossible | no, for a structural reason N1 .. N7; never from samples |
| certified-at-samples | the inequalities hold in float64 on the module itself, with margins: strong evidence, no proof |
| evidence | a hint: sampled equivariance, vanishing derivatives |
| unknown | nothing is claimed; says what blocks |

The theorems are in docs/theory/universality.md. They were proved in this project and not independently reviewed; every verdict says so.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from anyformer.approximation.groups import Group
from anyformer.errors import AnyformerError, require_choice

STRENGTHS = ("proved-family", "proved", "proved-impossible", "certified-at-samples", "evidence", "unknown")
RANKS = {"certified": ("proved-family", "proved", "certified-at-samples"), "proved": ("proved-family", "proved")}
"""What :meth:`Verdict.raise_if_not` asks for -> strengths that are enough."""


@dataclass(frozen=True)
class Claim:
    """What is to be approximated: ``target`` in words, by at most ``layers`` attention layers, on ``tokens`` tokens of ``dim`` features
    (None: every d). ``group`` acts on the tokens; None where it is not known yet, or the target are all ``causal`` maps."""

    tokens: int
    dim: int | None
    layers: int
    group: Group | None
    target: str
    causal: bool = False
    norm: str = "Lp"


@dataclass(frozen=True)
class Hypothesis:
    """One hypothesis of the theorem: ``status`` is checked, assumed or failed; ``how`` it was looked at."""

    name: str
    status: str
    how: str

    def __post_init__(self) -> None:
        require_choice("Hypothesis", "status", self.status, ("checked", "assumed", "failed"))

    def __str__(self) -> str:
        return f"{self.name}: {self.status} ({self.how})"


@dataclass(frozen=True)
class LayerBounds:
    """How many attention layers the claim needs: ``lower`` <= least number <= ``upper`` (None: not known); ``impossible``: no number is
    enough."""

    lower: int = 0
    upper: int | None = None
    impossible: bool = False

    def __str__(self) -> str:
        if self.impossible:
            return "no number of layers is enough"
        if self.upper is None:
            return f"at least {self.lower}"
        return f"exactly {self.lower}" if self.lower == self.upper else f"at least {self.lower}, at most {self.upper}"

    def to_json(self) -> dict[str, Any]:
        return {"lower": None if self.impossible else self.lower, "upper": self.upper, "impossible": self.impossible}


@dataclass(frozen=True)
class Verdict:
    """The answer of :func:`anyformer.approximation.certify`.

    ``holds`` is true, false, or None for "not known"; ``reason`` is the smallest part that decides: the witness of a yes, the pair of tokens or
    the permutation of a no, what blocks where nothing is known. ``symmetry`` is the group that the architecture is equivariant under as
    far as it is known, ``exact`` whether that is proved to be all of it. ``details`` is for machines: witnesses, bits, gaps, module state.
    """

    subject: str
    claim: Claim
    strength: str
    holds: bool | None
    theorem: str
    reason: str
    hypotheses: tuple[Hypothesis, ...] = ()
    layers: LayerBounds = LayerBounds()
    symmetry: Group | None = None
    exact: bool = False
    covered: str | None = None
    notes: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        require_choice("Verdict", "strength", self.strength, STRENGTHS)
        decided = {"proved-impossible": False, "certified-at-samples": True, "evidence": None, "unknown": None}
        if self.strength in decided and self.holds is not decided[self.strength]:
            raise AnyformerError(f"Verdict: {self.strength} cannot have holds={self.holds}")
        if self.holds is False and self.strength != "proved-impossible":
            raise AnyformerError("Verdict: only a structural reason says no, as proved-impossible")

    @property
    def group_name(self) -> str:
        """The group of the claim, in words; ``causal`` and ``auto`` where none is named."""
        if self.claim.group is not None:
            return self.claim.group.name
        return "causal" if self.claim.causal else "auto"

    def raise_if_not(self, wanted: str = "proved") -> "Verdict":
        """Return the verdict if it is a yes of this strength (``certified`` or ``proved``), raise with its report if not."""
        require_choice("raise_if_not", "wanted", wanted, tuple(RANKS))
        if self.holds is not True or self.strength not in RANKS[wanted]:
            raise NotCertified(self, wanted)
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain data: strength, holds, group, layers, norm, and all the rest. A number that is not finite is null."""
        return _plain(self._data())

    def _data(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "strength": self.strength,
            "holds": self.holds,
            "group": self.group_name,
            "layers": self.layers.to_json(),
            "norm": self.claim.norm,
            "tokens": self.claim.tokens,
            "dim": self.claim.dim,
            "attention_layers": self.claim.layers,
            "target": self.claim.target,
            "group_generators": None if self.claim.group is None else [list(g) for g in self.claim.group.generators],
            "symmetry": None if self.symmetry is None else self.symmetry.to_json() | {"exact": self.exact},
            "theorem": self.theorem,
            "reason": self.reason,
            "covered": self.covered,
            "hypotheses": [{"name": h.name, "status": h.status, "how": h.how} for h in self.hypotheses],
            "notes": list(self.notes),
            "details": self.details,
        }

    def __str__(self) -> str:
        claim, m = self.claim, self.claim.layers
        where = f"n={claim.tokens}, {'every d' if claim.dim is None else f'd={claim.dim}'}, m={m}"
        kinds = {True: "approximates every", False: "does not approximate every", None: "may or may not approximate every"}
        lines = [
            f"{self.strength.upper()} for {where}: {self.subject} {kinds[self.holds]} {claim.target}"
            + ("" if claim.group is None else f" (G = {self.group_name})")
            + ", on compact sets, in L^p (p < inf, not sup); n fixed, feed-forward depth free",
            f"  by {self.theorem}: {self.reason}",
        ]
        lines += [f"  {h}" for h in self.hypotheses]
        lines.append(f"  attention layers: {self.layers}")
        if self.symmetry is not None:
            lines.append(f"  symmetry: {self.symmetry.name}{' (exact)' if self.exact else ' (at least)'}")
        if self.covered is not None:
            lines.append(f"  what it does approximate: {self.covered}")
        lines += [f"  note: {note}" for note in self.notes]
        lines.append("  the theorems were proved in this project and not independently reviewed (docs/theory/universality.md)")
        return "\n".join(lines)


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


class NotCertified(AnyformerError):
    """Raised by :meth:`Verdict.raise_if_not`; carries the verdict."""

    def __init__(self, verdict: Verdict, wanted: str):
        self.verdict = verdict
        super().__init__(f"expected a verdict that is {wanted}, got:\n{verdict}")
