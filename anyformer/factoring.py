"""Factoring a program: the smallest Network whose unrolled form it is, level by level from the root.

All nodes of one level of the tree are ``node(s) = X T_s`` with one common matrix

    T_s = [ P_(s+1) , M_b T_(s+1) for each branch b ]

so the children of the rows found so far, stacked over the branches, are ``[M_b] T_(s+1)`` with a common right factor. A
factorisation fixes the stream only up to a change of basis; the basis is chosen so that the result is a plain module:

* where a norm reads its D columns (at the node, or below residual branches), these columns *are* the features;
* after a norm, the features are what it puts out;
* under a residual branch, the residual child is the basis itself (the stream grows where a branch adds new directions);
* else the leading singular vectors.

The constant feature, where the class has one, is a row of its own throughout. Ranks are decided at the precision of the stored dtype.
"""

import math

import torch
from torch import Tensor

from anyformer.backbones.tree import Bank, Tree
from anyformer.classes import NetworkClass, StageClass
from anyformer.maps import ConstantMap, DenseMap, IdentityMap, LinearMap
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Identity, LayerNorm, Norm, Normed
from anyformer.program import Program


def rank_threshold(program: Program) -> float:
    """``64 eps max(1, condition / 8)`` of the stored dtype: singular values below this share of the largest are noise."""
    noise = 64 * torch.finfo(program.dtype).eps
    return noise * max(1.0, _number(program.provenance.get("condition"), 1.0) / 8)


def factor(program: Program, cutoff: float | None = None) -> Network:
    """The smallest Network (float64) whose unrolled form is the program, up to singular values below ``cutoff``.

    In an affine class (a residual without norm) a bias cannot be told from one more feature; the variant that has the number
    of features that compilation recorded is taken, the linear one where nothing is recorded.
    """
    program = program.detach()
    network_class: NetworkClass = program.recipe.network_class  # type: ignore[attr-defined]
    structural = any(_has_constant(stage) for stage in network_class.stages)
    linear = _Factoring(program, network_class, structural, False, cutoff).network()
    recorded = _number(program.provenance.get("features"), math.inf)
    carried = bool(network_class.stages) and all(_carrier(stage) is not None for stage in network_class.stages)
    if not carried or max(feature_widths(linear)) <= recorded:
        return linear
    affine = _Factoring(program, network_class, True, True, cutoff).network()
    return affine if max(feature_widths(affine)) < max(feature_widths(linear)) else linear


def feature_widths(network: Network) -> tuple[int, ...]:
    """Features of the stream before the first stage and after each one (the constant feature not counted)."""
    widths = [network.embedding.shape[1]] + [s.width for s in network.stages]
    return tuple(w - network.constant for w in widths)


def _has_constant(stage: StageClass) -> bool:
    return any(b.map == "constant" or b.operator.constant_reads for b in stage.branches)


def _norm_bank(stage: StageClass) -> int | None:
    """The bank that is a bare norm: the stage is a post-norm or a final norm."""
    return next((i for i, b in enumerate(stage.branches) if isinstance(b.operator, Norm)), None)


class _Factoring:
    """One pass from the root to the leaf. Rows are features, then (with ``constant``) one row for the constant feature."""

    def __init__(self, program: Program, network_class: NetworkClass, constant: bool, affine: bool, cutoff: float | None):
        self.tree = Tree.of(network_class)
        self.constant, self.affine = constant, affine
        self.program = program
        self.cutoff = cutoff or rank_threshold(program)

    # --- small linear algebra ---------------------------------------------------------------------------------------------

    def lead(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """``matrix ~ left @ right`` with the fewest columns: singular values above the cut-off."""
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        rank = max(1, int((s > self.cutoff * math.sqrt(max(matrix.shape)) * s[0]).sum())) if s.numel() and s[0] > 0 else 1
        return u[:, :rank] * s[:rank], v[:rank]

    def solve(self, left: Tensor, right: Tensor) -> Tensor:
        """Minimum-norm least squares ``left @ x = right`` with columns of ``left`` brought to one scale."""
        if left.shape[1] == 0 or right.shape[1] == 0:
            return left.new_zeros(left.shape[1], right.shape[1])
        size = left.norm(dim=0).clamp(min=1e-300)
        rcond = min(self.cutoff * math.sqrt(max(left.shape)), 1e-2)
        return torch.linalg.pinv(left / size, rtol=rcond) @ right / size[:, None]

    # --- columns of a node -------------------------------------------------------------------------------------------------

    def child(self, s: int, bank: Bank, g: int, rows: Tensor) -> Tensor:
        """The block of rows that belongs to one child of node(s)."""
        width = self.tree.widths[s + 1]
        at = bank.child_at + g * width
        return rows[:, at : at + width]

    def pinned(self, s: int) -> slice | None:
        """Columns of node(s) that are the features themselves: a norm's, here or below residual branches."""
        at = 0
        while s < len(self.tree.stages):
            stage = self.tree.stages[s]
            norm = _norm_bank(stage)
            if stage.shared:
                return slice(at, at + stage.shared)
            if norm is not None:
                start = at + self.tree.banks(s)[norm].read_at
                return slice(start, start + stage.branches[norm].operator.reads)
            residual = stage.residual
            if residual is None:
                return None
            at += self.tree.banks(s)[residual].child_at
            s += 1
        return None

    def groups(self, s: int) -> tuple[Tensor, Tensor, bool]:
        """Masks (width(s),) of the columns behind a norm and of those that read the constant alone; whether the norm centres."""
        width = self.tree.widths[s]
        behind, fixed = torch.zeros(width, dtype=torch.bool), torch.zeros(width, dtype=torch.bool)
        if s == len(self.tree.stages):
            return behind, fixed, False
        centred = False
        for bank in self.tree.banks(s):
            op, end = bank.branch.operator, bank.child_at + bank.branch.operator.count * self.tree.widths[s + 1]
            if isinstance(op, Normed):
                own = torch.zeros(op.count, op.reads, dtype=torch.bool)
                own[:, op.scaled_reads :] = True
                reads = slice(bank.read_at, bank.read_at + op.count * op.reads)
                fixed[reads], behind[reads] = own.flatten(), ~own.flatten()
                behind[bank.child_at : end] = op.scale_values
                centred = centred or isinstance(op.norm, LayerNorm)
            if isinstance(op, Norm):
                behind[bank.child_at : end] = True
                centred = isinstance(op, LayerNorm)
            if bank.branch.map == "constant":
                fixed[bank.child_at : end], behind[bank.child_at : end] = True, False
        return behind, fixed, centred

    def fit(self, s: int, features: Tensor, ones: Tensor, values: Tensor) -> Tensor:
        """T_s with ``[features, ones] @ T_s = values``, each group of columns by what it may depend on."""
        behind, fixed, centred = self.groups(s)
        dim, width = features.shape[1], values.shape[1]
        t = values.new_zeros(dim + self.constant, width)
        free = ~behind & ~fixed
        if bool(behind.any()):
            seen = features - features.mean(1, keepdim=True) if centred else features
            x = self.solve(seen, values[:, behind])
            t[:dim, behind] = x - x.mean(0, keepdim=True) if centred else x
        if self.constant:
            # the constant's row first, so that it stays exact where the rows do not span all features
            there = ones[:, 0] > 0.5
            middle, height = features[there].mean(0, keepdim=True), values[there].mean(0, keepdim=True)
            t[:dim, free] = self.solve(features - ones @ middle, (values - ones @ height)[:, free])
            t[dim:, free] = height[:, free] - middle @ t[:dim, free]
            t[dim:, fixed] = height[:, fixed]
        else:
            t[:, free] = self.solve(features, values[:, free])
        return t

    # --- the descent ---------------------------------------------------------------------------------------------------------

    def root(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the stream (features, then the constant's column), T_0, and the number of token rows."""
        tokens, positions = self.program.machine().tree_columns(self.program.to(torch.float64))
        rows = tokens if positions is None else torch.cat((tokens, positions))
        ones = rows.new_zeros(rows.shape[0], 1)
        ones[: tokens.shape[0]] = 1.0
        columns = self.pinned(0)
        if columns is not None:
            features = rows[:, columns]
            return features, ones, self.fit(0, features, ones, rows)
        mean = tokens.mean(0, keepdim=True)
        if not self.affine:
            mean = mean * self.tree.constant_columns()  # no bias is needed: only what reads the constant alone
        features, t = self.lead(rows - ones @ mean)
        return features, ones, torch.cat((t, mean)) if self.constant else t

    def network(self) -> Network:
        features, ones, t = self.root()
        reach, steps = (features, ones), []
        for s in range(len(self.tree.stages)):
            dense, following, next_reach = self.descend(s, t)
            steps.append((t, dense, reach))
            t, reach = following, next_reach
        widest = max([t.shape[0] - self.constant] + [step[0].shape[0] - self.constant for step in steps])
        stages = tuple(self.stage(s, *self._padded(step, widest)) for s, step in enumerate(steps))
        features, t = _pad(features, 1, widest), self._pad_rows(t, widest)
        stream = torch.cat((features, ones), 1) if self.constant else features
        cut = self.program.vocab
        return Network(stream[:cut], stages, t, stream[cut:] if self.program.positions is not None else None, self.constant)

    def _pad_rows(self, rows: Tensor, width: int) -> Tensor:
        """Feature rows up to ``width``, the constant's row kept last."""
        dim = rows.shape[-2] - self.constant
        return torch.cat((_pad(rows[..., :dim, :], -2, width), rows[..., dim:, :]), -2)

    def _padded(self, step: tuple, width: int) -> tuple[Tensor, list[Tensor], tuple[Tensor, Tensor]]:
        t, dense, (features, ones) = step
        return (
            self._pad_rows(t, width),
            [_pad(self._pad_rows(m, width), -1, width) for m in dense],
            (_pad(features, 1, width), ones),
        )

    def stage(self, s: int, t: Tensor, dense: list[Tensor], reach: tuple[Tensor, Tensor]) -> Stage:
        stage, branches = self.tree.stages[s], []
        carrier = _carrier(stage)
        for i, (bank, matrices) in enumerate(zip(self.tree.banks(s), dense, strict=True)):
            op = bank.branch.operator
            own = t[:, bank.read_at : bank.read_at + op.count * op.reads].clone() if op.reads else None
            branches.append(Branch(op, own, self._map(bank.branch.map, matrices, i == carrier, reach)))
        return Stage(tuple(branches), t[:, : stage.shared] if stage.shared else None)

    def descend(self, s: int, t: Tensor) -> tuple[list[Tensor], Tensor, tuple[Tensor, Tensor]]:
        """Maps (count, rows, D') of every bank, T_(s+1), and rows (features, constant) that span every stream after stage s."""
        stage, banks = self.tree.stages[s], self.tree.banks(s)
        blocks = [torch.stack([self.child(s, bank, g, t) for g in range(bank.branch.operator.count)]) for bank in banks]
        dim, columns, norm = t.shape[0] - self.constant, self.pinned(s + 1), _norm_bank(stage)
        if columns is not None:
            dense = [block[:, :, columns] for block in blocks]
            ones = [torch.zeros(block.shape[:2], dtype=t.dtype) for block in blocks]
            if self.constant:
                ones[_carrier(stage) or 0][:, dim:] = 1.0
            features = torch.cat([d.flatten(0, 1) for d in dense])
            there = torch.cat([o.flatten() for o in ones])[:, None]
            if norm is not None and self.constant:
                # features without the bias that a later residual adds to them: it belongs to that residual, not to this norm
                moved = features[there[:, 0] > 0.5].sum(0, keepdim=True)
                features = features - there @ moved
                dense = [d - o[..., None] * moved for d, o in zip(dense, ones, strict=True)]
            return dense, self.fit(s + 1, features, there, torch.cat([b.flatten(0, 1) for b in blocks])), (features, there)
        if norm is not None:
            carrier = _carrier(stage)
            following = blocks[norm][0, :dim]
            if self.constant:
                following = torch.cat(
                    (following, torch.zeros_like(following[:1]) if carrier is None else blocks[carrier][0, dim:])
                )
            dense = [torch.zeros(b.shape[0], t.shape[0], dim, dtype=t.dtype) for b in blocks]
            dense[norm][0, :dim] = torch.eye(dim, dtype=t.dtype)
            if isinstance(stage.branches[norm].operator, LayerNorm):
                dense[norm][0, :dim] -= 1.0 / dim
        else:
            dense, following = self._factor_children(stage, blocks, dim)
        free = torch.eye(following.shape[0] - self.constant, dtype=t.dtype)
        if not self.constant:
            return dense, following, (free, free.new_zeros(free.shape[0], 1))
        return (
            dense,
            following,
            (torch.cat((free, torch.zeros_like(free[:1]))), torch.cat((torch.zeros_like(free[:, :1]), free.new_ones(1, 1)))),
        )

    def _factor_children(self, stage: StageClass, blocks: list[Tensor], dim: int) -> tuple[list[Tensor], Tensor]:
        """No norm: the residual child is the basis, extended by what the others add. What branches with rows summing to 1 do to the constant
        moves into its row of T_(s+1)."""
        residual = stage.residual
        through = [self.constant and b.operator.stochastic for b in stage.branches]
        parts = [block[:, :dim] if through[i] else block for i, block in enumerate(blocks)]
        stack = torch.cat([p.flatten(0, 1) for i, p in enumerate(parts) if i != residual] or [blocks[0][0, :0]])
        if residual is None:
            basis = self.lead(stack)[1]
        else:
            basis = blocks[residual][0, :dim]
            if stack.shape[0]:
                rest = stack - self.solve(basis.T, stack.T).T @ basis
                left, extra = self.lead(rest)
                extra = extra[left.norm(dim=0) > self.cutoff * math.sqrt(max(stack.shape)) * torch.linalg.matrix_norm(stack, 2)]
                basis = torch.cat((basis, extra * basis.norm() / math.sqrt(basis.shape[0])))
        dense = []
        for i, part in enumerate(parts):
            m = part.new_zeros(part.shape[0], dim + self.constant, basis.shape[0])
            if i == residual:
                m[0, :dim, :dim] = torch.eye(dim, dtype=m.dtype)
            else:
                m[:, : part.shape[1]] = self.solve(basis.T, part.flatten(0, 1).T).T.unflatten(0, part.shape[:2])
            dense.append(m)
        if not self.constant:
            return dense, basis
        moved = sum((block[:, dim:].sum(0) for i, block in enumerate(blocks) if through[i]), torch.zeros_like(basis[:1]))
        return dense, torch.cat((basis, moved))

    def _map(self, kind: str, matrices: Tensor, carries: bool, reach: tuple[Tensor, Tensor]) -> LinearMap:
        """Dense maps as the kind that the class states; ``carries``: this branch keeps the constant feature. A residual map
        is the identity plus a shift if it is so on every stream that can occur."""
        features, ones = reach
        size = features.shape[1]
        change = features @ matrices[0, :size] - features if matrices.shape[2] == size else features
        if self.constant:
            change = change + ones * matrices[0, -1]
            matrices = torch.cat((matrices, torch.zeros_like(matrices[..., :1])), -1)
            if carries:
                matrices[:, -1, -1] = 1.0
        if kind == "constant":
            return ConstantMap(matrices.shape[1], matrices[:, -1])
        there = ones[:, 0] > 0.5
        shift = change[there].mean(0) if self.constant and bool(there.any()) else torch.zeros_like(change[0])
        off = float((change - ones * shift).abs().max())
        if kind == "identity" and off <= 1e3 * self.cutoff * max(float(features.abs().max()), 1e-300):
            return IdentityMap(matrices.shape[1], torch.cat((shift, shift.new_zeros(1))) if self.constant else None)
        return DenseMap(matrices)


def _carrier(stage: StageClass) -> int | None:
    """The bank that keeps the constant feature: the residual, or the constant branch."""
    return next((i for i, b in enumerate(stage.branches) if isinstance(b.operator, Identity)), None)


def _pad(rows: Tensor, axis: int, width: int) -> Tensor:
    """Zeros at the end of an axis up to ``width``."""
    missing = width - rows.shape[axis]
    if missing <= 0:
        return rows
    shape = list(rows.shape)
    shape[axis] = missing
    return torch.cat((rows, rows.new_zeros(shape)), axis)


def _number(value: object, otherwise: float) -> float:
    """A finite number from a file's free-form entries, or ``otherwise``."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else otherwise
