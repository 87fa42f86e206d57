"""The algebra that all readers share: how affine maps, norms, biases and residuals become probes and maps of a Network.

With x: features, r: the norm's scale, C: the centring matrix of LayerNorm, g, b: its weight and bias:

* pre-norm attention: ``q = r (x C g W_Q) + (b W_Q + b_Q)``: scaled columns, and bias columns that read the constant feature;
* the value's bias ``b W_V + b_V`` needs no branch, since rows of a pattern sum to 1: it moves, through W_O, into the shift of
  the residual branch (or of the branch that carries the constant where there is no residual);
* a gated unit is ``diag(act(z_j))`` with the map ``up_j down_j^T``; behind a norm its up-bias is a second branch, unscaled;
* a plain unit is ``diag(act(z_j))`` on the constant feature, ``e_const w2_j^T``;
* a post-norm is a stage of its own: a norm branch and a branch that carries the constant;
* parts in parallel (attention and MLP of one layer) are one stage: two norms of one x differ in g and b alone, r is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.maps import ConstantMap, DiagonalMap, IdentityMap, LowRankMap
from anyformer.network import Branch, Stage
from anyformer.operators import Attention, Gate, Identity, LayerNorm, Norm, Normed, Operator


@dataclass(frozen=True, eq=False)
class Affine:
    """``x W + b``: weights (D, w) and bias (w,) or None."""

    weights: Float[Tensor, "D *w"]
    bias: Float[Tensor, "*w"] | None = None

    @classmethod
    def of(cls, linear: Any) -> "Affine":
        """A torch linear layer, in float64."""
        return cls(linear.weight.double().T, None if linear.bias is None else linear.bias.double())

    def heads(self, size: int, group: int = 1) -> "Affine":
        """Columns head by head, (D, heads, size); each head ``group`` times."""
        weights, bias = self.weights.unflatten(1, (-1, size)), None if self.bias is None else self.bias.unflatten(0, (-1, size))
        if group == 1:
            return Affine(weights, bias)
        return Affine(weights.repeat_interleave(group, 1), None if bias is None else bias.repeat_interleave(group, 0))


@dataclass(frozen=True, eq=False)
class Gain:
    """What a norm multiplies and adds once it has scaled: g (D,) and b (D,) or None."""

    weight: Float[Tensor, "D"]
    bias: Float[Tensor, "D"] | None = None

    @classmethod
    def of(cls, norm: Any) -> "Gain":
        """A norm module's weight and bias, in float64."""
        bias = getattr(norm, "bias", None)
        return cls(norm.weight.double(), None if bias is None else bias.double())


@dataclass(frozen=True, eq=False)
class Part:
    """Banks of branches that belong together, and what they add to every token (D,), or None."""

    banks: tuple[Branch, ...]
    shift: Tensor | None = None


class Algebra:
    """One network's algebra. ``like``: its embedding (vocab, D); ``constant``: whether the stream holds the feature that is
    always 1; ``norm``: the norm before every part, or None."""

    def __init__(self, like: Tensor, constant: bool, norm: Norm | None, residual: bool = True):
        self.like, self.constant, self.norm, self.residual = like, constant, norm, residual
        self.dim = like.shape[1]
        self.width = self.dim + constant

    def with_constant(self, table: Tensor, value: float) -> Tensor:
        """Append the constant feature's column."""
        return torch.cat((table, table.new_full((table.shape[0], 1), value)), 1) if self.constant else table

    def columns(self, weights: Tensor, last: Tensor | None = None) -> Tensor:
        """Columns (D, w) as columns of the stream: ``last`` (w,) is what the constant feature contributes (default 0)."""
        if not self.constant:
            return weights
        return torch.cat((weights, (weights.new_zeros(weights.shape[1]) if last is None else last)[None]))

    def rows(self, weights: Tensor) -> Tensor:
        """Rows (..., D) as rows of the stream, writing nothing into the constant feature."""
        return torch.cat((weights, weights.new_zeros(*weights.shape[:-1], 1)), -1) if self.constant else weights

    @cached_property
    def features(self) -> Tensor:
        """Probe columns that read the D features: one tensor, shared by all stages."""
        return self.columns(torch.eye(self.dim, dtype=self.like.dtype, device=self.like.device))

    def behind(self, gain: Gain | None, affine: Affine) -> Affine:
        """``C g W`` and ``b W + bias``: what an affine map reads behind the pre-norm, if there is one."""
        if self.norm is None or gain is None:
            return affine
        weights, bias = gain.weight[:, None] * affine.weights, affine.bias
        if isinstance(self.norm, LayerNorm):
            weights = weights - weights.mean(0, keepdim=True)
        if gain.bias is not None:
            extra = gain.bias @ affine.weights
            bias = extra if bias is None else bias + extra
        return Affine(weights, bias)

    def bank(
        self, operator: Operator, parts: list[Affine], fixed: Tensor | None = None, scale_values: bool = True
    ) -> tuple[Operator, Tensor]:
        """The operator behind the pre-norm, and its own probe columns: per branch all ``parts`` (weights (D, count, w)), then the
        ``fixed`` ones (count, f) that read the constant feature, then (behind a norm) the biases."""
        weights = torch.cat([p.weights for p in parts], -1)
        bias = None
        if any(p.bias is not None for p in parts):
            bias = torch.cat([p.weights.new_zeros(p.weights.shape[1:]) if p.bias is None else p.bias for p in parts], -1)
        none = weights.new_zeros(weights.shape[1:])
        constants = [none if bias is None or self.norm is not None else bias]
        if fixed is not None:
            constants.append(fixed)
        if bias is not None and self.norm is not None:
            constants.append(bias)
        constant = torch.cat(constants, -1)
        empty = weights.new_zeros(*weights.shape[:2], constant.shape[1] - weights.shape[2])
        probes = self.columns((torch.cat((weights, empty), -1) if empty.shape[2] else weights).flatten(1), constant.flatten())
        if self.norm is None:
            return operator, probes
        return Normed(operator, self.norm, bias is not None, scale_values), probes

    def heads(self, gain: Gain | None, operator: Attention, projections: Sequence[Affine], fixed: Sequence[Tensor] = ()) -> Part:
        """H heads that read [query, key, fixed ...], with maps W_V W_O; ``projections``: those of query, key, value and output. Grouped
        where there are fewer keys than queries."""
        query, key, value, out = projections
        count, d, e = operator.heads, operator.head_dim, out.weights.shape[0] // operator.heads
        group = count * d // key.weights.shape[1]
        q, k, v = (
            self.behind(gain, a).heads(size, repeat) for a, size, repeat in ((query, d, 1), (key, d, group), (value, e, group))
        )
        rows, shift = out.weights.unflatten(0, (-1, e)), out.bias
        if v.bias is not None:
            moved = torch.einsum("he,hed->d", v.bias, rows)
            shift = moved if shift is None else shift + moved
        left = self.columns(v.weights.flatten(1)).unflatten(1, (-1, e)).permute(1, 0, 2)
        whole, probes = self.bank(operator, [q, k], torch.cat(tuple(fixed)).expand(count, -1) if fixed else None)
        kv_heads = count // group if group > 1 else None
        return Part((Branch(whole, probes, LowRankMap(left, self.rows(rows)), kv_heads=kv_heads),), shift)

    def units(self, gain: Gain | None, function: str, up: Affine, down: Affine, gate: Affine | None = None) -> Part:
        """r hidden units, plain or (with ``gate``) gated."""
        rows, operator = self.rows(down.weights), Gate(down.weights.shape[0], function)
        read = self.behind(gain, up if gate is None else gate)
        reads = [Affine(read.weights[..., None], None if read.bias is None else read.bias[..., None])]
        plain, probes = self.bank(operator, reads, scale_values=False)
        if gate is None:
            return Part((Branch(plain, probes, ConstantMap(self.width, rows)),), down.bias)
        value = self.behind(gain, up)
        left = self.columns(value.weights, None if self.norm else value.bias).T[..., None]
        gated = self.bank(operator, reads)[0]
        banks = [Branch(gated, probes, LowRankMap(left, rows[:, None]))]
        if self.norm is not None and value.bias is not None:
            banks.append(Branch(plain, probes, ConstantMap(self.width, rows, value.bias), twin=True))
        return Part(tuple(banks), down.bias)

    def stage(self, *parts: Part) -> Stage:
        """The residual (or what carries the constant) and the parts, behind the pre-norm if there is one: its columns are the
        features."""
        shifts = [p.shift for p in parts if p.shift is not None]
        branches = (*self.carrier(sum(shifts[1:], shifts[0]) if shifts else None), *(b for p in parts for b in p.banks))
        return Stage(branches) if self.norm is None else Stage(branches, self.features, "features")

    def carrier(self, shift: Tensor | None) -> tuple[Branch, ...]:
        """The residual branch with a bias moved in; without residual, the branch that carries constant and bias, if any."""
        if self.residual:
            return (Branch(Identity(), None, IdentityMap(self.width, None if shift is None else self.rows(shift))),)
        return (self.constant_branch(shift),) if self.constant else ()

    def constant_branch(self, row: Tensor | None) -> Branch:
        """The branch that keeps the constant feature and adds a row (D,)."""
        row = self.like.new_zeros(self.dim) if row is None else row
        return Branch(Identity(), None, ConstantMap(self.width, torch.cat((row, row.new_ones(1)))[None]))

    def norm_stage(self, norm: Norm, gain: Gain, keep_constant: bool) -> Stage:
        """Post-norm or final norm: the norm branch, and the constant branch with the norm's bias."""
        weigh = DiagonalMap(gain.weight, self.width, self.dim + keep_constant, centred=isinstance(norm, LayerNorm))
        branch = Branch(norm, self.features, weigh, reads="features")
        return Stage((self.constant_branch(gain.bias), branch) if keep_constant else (branch,))
