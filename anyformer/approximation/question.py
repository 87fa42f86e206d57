"""A question: an architecture, a number of tokens, a target; and what can be read off them before any theorem is used."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from anyformer.approximation.architecture import Architecture
from anyformer.approximation.balls import BITS
from anyformer.approximation.criterion import Stack
from anyformer.approximation.feedforward import Condition, feed_forward_condition
from anyformer.approximation.groups import Group, group_of, symmetric, trivial
from anyformer.approximation.lemmas import Lemma, match
from anyformer.approximation.patterns import KERNELS, Pattern, layer_pattern, refusal
from anyformer.approximation.verdict import Claim, Hypothesis
from anyformer.operators import Attention, Bidirectional

EQUIVARIANT, CAUSAL = "continuous equivariant map", "continuous causal map (f_s depends on tokens 0 .. s)"
MOST_COMPUTED = 64
"""Tokens beyond which groups of patterns are not computed, and nothing is probed; a lemma needs neither."""
TOO_MANY = f"more than {MOST_COMPUTED} tokens, and no lemma settles it: groups are not computed and nothing is probed there; ask for fewer"
ONE_TOKEN = "one token: feed-forward layers alone are dense in L^p(K)"
DRAWS = 3


def feed_forward_hypotheses(condition: Condition) -> tuple[Hypothesis, ...]:
    """(H3), part by part."""
    return tuple(replace(h, name=f"H3 {h.name}") for h in condition.hypotheses)


@dataclass(frozen=True, eq=False)
class Question:
    """An architecture, a number of tokens, and a target; what can be read off them."""

    architecture: Architecture
    tokens: int
    target: str | Group
    bits: int = BITS

    @property
    def causal(self) -> bool:
        """Whether all causal maps are asked for."""
        return self.target == "causal"

    @cached_property
    def condition(self) -> Condition:
        """The feed-forward condition."""
        return feed_forward_condition(self.architecture.feed_forward, self.architecture.feed_forward_norm)

    @cached_property
    def refusal(self) -> str:
        """Why nothing at all is said, in a sentence; empty where nothing forbids it."""
        banks = dict.fromkeys(op for layer in self.architecture.layers for op in layer.operators)
        return next((problem for op in banks if (problem := refusal(op, self.tokens))), "")

    @cached_property
    def patterns(self) -> tuple[Pattern, ...] | str:
        """One pattern a layer, or why there is none."""
        known: dict[Any, Pattern | str] = {}
        out = []
        for layer in self.architecture.layers:
            if layer not in known:
                known[layer] = layer_pattern(layer, self.tokens)
            pattern = known[layer]
            if isinstance(pattern, str):
                return pattern
            out.append(pattern)
        return tuple(out)

    @cached_property
    def stack(self) -> Stack | None:
        """The patterns as a stack."""
        return None if isinstance(self.patterns, str) else Stack(self.patterns, self.tokens)

    @cached_property
    def symmetry(self) -> Group:
        """Permutations that every layer is proved to be equivariant under, position vectors aside."""
        n = self.tokens
        if self.whole is not None or self.large:
            return self.whole or trivial(n)
        stack = self.stack
        if stack is None or not all(p.complete for p in stack.patterns):
            plain = all(_knows_no_positions(op) for layer in self.architecture.layers for op in layer.operators)
            return symmetric(n) if plain else trivial(n)
        return stack.symmetries(certain=False)

    @property
    def equivariance(self) -> Group:
        """Permutations that members of the architecture are proved to be equivariant under."""
        return self.symmetry if self.architecture.positions is None else trivial(self.tokens)

    @cached_property
    def lemma(self) -> Lemma | None:
        """The lemma for all n, where one matches."""
        return match(self.architecture, self.tokens)

    @property
    def large(self) -> bool:
        """Whether there are too many tokens for anything but a lemma, and for reach."""
        return self.tokens > MOST_COMPUTED and self.whole is None

    @property
    def whole(self) -> Group | None:
        """The whole symmetry, where a lemma says it for all n."""
        return self.lemma.group if self.lemma is not None and self.lemma.exact else None

    @property
    def identity_reachable(self) -> bool:
        """(H2): a residual path, and trained output maps."""
        return self.architecture.skip == "residual" and all(layer.maps is None for layer in self.architecture.layers)

    @cached_property
    def theorem_4(self) -> bool:
        """Whether the hypotheses of the positive half of Theorem 4 hold (the feed-forward condition aside)."""
        averaging = self.stack is not None and all(p.averaging for p in self.stack.patterns)
        plain = self.architecture.positions is None and self.architecture.output_norm is None
        return averaging and self.identity_reachable and self.architecture.good_norm and plain

    @cached_property
    def group(self) -> Group | None:
        """The group that is asked for; with ``auto`` the smallest for which the claim can hold as far as structure tells (None: causal maps)."""
        if self.causal:
            return None
        if self.target != "auto":
            return group_of(self.target, self.tokens)
        if self.refusal:
            return None
        if self.whole is not None and self.lemma is not None and len(self.architecture.layers) >= self.lemma.layers:
            return self.whole
        if self.large:
            return None
        if self.stack is not None and self.theorem_4 and self.stack.unreachable is None:
            return self.stack.generated()
        return self.equivariance

    @property
    def claim(self) -> Claim:
        """What the verdict is about."""
        turned = any(getattr(op, "rotary", None) is not None for layer in self.architecture.layers for op in layer.operators)
        every_d = not self.refusal and not turned and (self.lemma is not None or self.theorem_4)
        dim = None if every_d and self.architecture.attention_norm is None else self.architecture.dim
        return Claim(
            self.tokens, dim, len(self.architecture.layers), self.group, CAUSAL if self.causal else EQUIVARIANT, self.causal
        )


def _knows_no_positions(op: Any) -> bool:
    known = type(op) is Attention and type(op.kernel) in KERNELS and type(op.mask) is Bidirectional
    return known and op.bias is None and op.rotary is None
