"""Dyck-1: is a string of brackets balanced? (Of Zhong & Andreas, arXiv 2410.04368; M = 30 pairs at most.)

    inputs    ( ( ) ) ? _ _ _ ...     string, ``?``, padding up to length 2M + 3 = 63
    labels    . . . . ) . . . ...     ``)`` if balanced, ``(`` if not; every other position is IGNORED

Many strings are balanced ones with brackets swapped or flipped here and there, so counting is not enough
("equal counts" scores 93.1 %). 52.6 % are balanced, the mean length is 30.8. Unlike the public script, we do
not reject the test set's strings in training (that starves it of short strings).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from anyformer.tasks.task import IGNORED, Batch, Ids, Rule, Task, Words, below, geometric

PAIRS = 30
_LONGEST = 2 * PAIRS
_EDITS = 32  # the geometric number of edits is cut here: P = 2^-32
PAD, OPEN, CLOSE, QUERY = range(4)


@dataclass(frozen=True, kw_only=True)
class Dyck(Task):
    """Dyck-1 strings. With mu uniform on 0..3, one string is made in four steps:

    1. with probability 1/3: length uniform on 1..2M, fair brackets. Otherwise bal(t), t uniform on 1..M, and
       then mu = 0 with probability 1/2. bal(1) = ``()``; for t > 1, with probability 1/2 each, bal(t) =
       ``(`` bal(t-1) ``)`` or bal(u) bal(t-u), u uniform on 1..t-1.
    2. mu odd: r times (P(r) = 2^-r) draw positions p, q and swap their brackets if p < q.
    3. mu >= 2: r times (the same law, doubled with probability 2/3) flip the bracket at a position.
    4. balanced iff no prefix has more ``)`` than ``(`` and the totals agree.

    Short strings come often; the accuracy ``unique`` counts each different string of a batch once.
    """

    vocab: int = 4

    names: ClassVar[tuple[str, ...]] = ("_", "(", ")", "?")
    length: ClassVar[int] = _LONGEST + 3
    words: ClassVar[int] = 9 + PAIRS - 1 + 2 * _EDITS + 2 * _EDITS

    def _draw(self, words: Words) -> tuple[Ids, Ids]:
        few, tree, swaps, flips = np.split(words, np.cumsum((9, PAIRS - 1, 2 * _EDITS)), axis=1)
        random = below(few[:, 0], 3) == 0
        pairs = 1 + below(few[:, 1], PAIRS)
        sizes = np.where(random, 1 + below(few[:, 2], _LONGEST), 2 * pairs)
        mutation = np.where(~random & (below(few[:, 3], 2) == 0), 0, below(few[:, 4], 4))
        coins = (few[:, 5:6] >> np.arange(_LONGEST, dtype=np.uint64) & np.uint64(1)).astype(bool)
        opens = np.where(random[:, None], coins, _balanced(tree, pairs))

        times = np.where(mutation % 2 == 1, geometric(few[:, 6], _EDITS), 0)
        p, q = below(swaps[:, 0::2], sizes[:, None]), below(swaps[:, 1::2], sizes[:, None])
        for k in range(times.max()):
            row = np.flatnonzero((times > k) & (p[:, k] < q[:, k]))
            a, b = p[row, k], q[row, k]
            opens[row, a], opens[row, b] = opens[row, b], opens[row, a]
        times = geometric(few[:, 7], _EDITS) << (below(few[:, 8], 3) < 2)
        times = np.where(mutation >= 2, times, 0)
        p = below(flips, sizes[:, None])
        for k in range(times.max()):
            row = np.flatnonzero(times > k)
            opens[row, p[row, k]] ^= True

        inside = np.arange(_LONGEST) < sizes[:, None]
        depth = np.cumsum(np.where(inside, np.where(opens, 1, -1), 0), axis=1)
        balanced = (depth.min(axis=1) >= 0) & (depth[:, -1] == 0)
        inputs = np.zeros((len(words), self.length), dtype=np.int64)
        inputs[:, :_LONGEST] = np.where(inside, np.where(opens, OPEN, CLOSE), PAD)
        labels = np.full_like(inputs, IGNORED)
        rows = np.arange(len(words))
        inputs[rows, sizes] = QUERY
        labels[rows, sizes] = np.where(balanced, CLOSE, OPEN)
        return inputs, labels

    def counted(self, batch: Batch) -> dict[str, Bool[Tensor, "batch n"]]:
        _, first = np.unique(batch.inputs.cpu().numpy(), axis=0, return_index=True)
        unique = torch.zeros_like(batch.scored)
        unique[torch.from_numpy(first)] = True
        return super().counted(batch) | {"unique": unique & batch.scored}

    def rules(self) -> Mapping[str, Rule]:
        return {"equal counts": _equal_counts, "equal counts, right ends": _right_ends}


def _equal_counts(inputs: Int64[Tensor, "batch n"]) -> Int64[Tensor, "batch n"]:
    """Balanced iff there are as many ``(`` as ``)``."""
    equal = (inputs == OPEN).sum(1) == (inputs == CLOSE).sum(1)
    return torch.where(equal, CLOSE, OPEN)[:, None].expand(inputs.shape)


def _right_ends(inputs: Int64[Tensor, "batch n"]) -> Int64[Tensor, "batch n"]:
    """The same, and the first is ``(`` and the last ``)``."""
    last = inputs.gather(1, (inputs == QUERY).int().argmax(1, keepdim=True) - 1)
    right = (inputs[:, :1] == OPEN) & (last == CLOSE)
    return torch.where(right, _equal_counts(inputs), OPEN)


def _balanced(tree: Words, pairs: Int64[np.ndarray, " batch"]) -> Bool[np.ndarray, "batch longest"]:
    """bal(pairs), True where a bracket opens: all open intervals of all rows at once, one level a round.

    An interval of t pairs at ``start`` owns t - 1 random words from ``node`` on, one for each interval of
    more than one pair inside it, itself first; the others belong to bal(t-1), or to bal(u), then bal(t-u).
    """
    opens = np.zeros((len(pairs), _LONGEST), dtype=bool)
    row, t = np.arange(len(pairs)), pairs
    start = node = np.zeros_like(pairs)
    while row.size:
        opens[row, start] = True
        inner = t > 1
        row, t, start, node = row[inner], t[inner], start[inner], node[inner]
        choice = below(tree[row, node], 2 * (t - 1))  # 0..t-2: wrap; t-1..2t-3: split at u = 1..t-1
        wrap = choice < t - 1
        u = np.where(wrap, t - 1, choice - t + 2)
        children = (row, start + wrap, node + 1, u), (row, start + 2 * u, node + u, t - u)
        row, start, node, t = (np.concatenate((a, b[~wrap])) for a, b in zip(*children, strict=True))
    return opens
