"""k-hop induction: walk k times from a letter to the letter after its last earlier occurrence.

    text      a c b a b c a b         100 letters, neighbours differ; the last two are never shown
    hop_1     ~ ~ ~ c a b b c         ``~``: does not exist
    hop_2     ~ ~ ~ ~ c ~ a b

    inputs    1 a c b a b c a b ...   the hop token k, then text[0..97]: length 99
    labels    . ~ ~ ~ c a b b c ...   BLANK ``.``, then hop_k at 0..97: aligned with the inputs, NOT shifted

The task of Sanford, Hsu and Telgarsky (arXiv 2402.09268), with letters drawn in a fixed order.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Int64
from torch import Tensor

from anyformer.errors import AnyformerError, require_size
from anyformer.tasks.task import Batch, Ids, Task, Words, below

LETTERS, LENGTH, MOST_HOPS = 4, 100, 16
FIRST_LETTER = MOST_HOPS + 1
DNE = FIRST_LETTER + LETTERS
BLANK = DNE + 1


@dataclass(frozen=True, kw_only=True)
class KHop(Task):
    """``KHop(hops=1)``: one k in 0..16; ``hops=None``: k uniform on 0..16 for each row. The hop token is k.

    The first letter is uniform, each next one uniform over the other three. Every position is scored. The accuracy ``letters``
    leaves out BLANK and "does not exist": it is what Sanford et al. publish, ``accuracy`` what is trained.
    """

    vocab: int = 30
    hops: int | None = None

    names: ClassVar[tuple[str, ...]] = (*map(str, range(MOST_HOPS + 1)), *"abcd", "~", ".")
    length: ClassVar[int] = LENGTH - 1
    words: ClassVar[int] = LENGTH + 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hops is not None:
            require_size("KHop", "hops", self.hops, minimum=0)
            if self.hops > MOST_HOPS:
                raise AnyformerError(f"KHop: hops must be None or at most {MOST_HOPS}, got {self.hops}")

    def _draw(self, words: Words) -> tuple[Ids, Ids]:
        hops = below(words[:, :1], MOST_HOPS + 1)
        if self.hops is not None:
            hops = np.full_like(hops, self.hops)
        steps = np.concatenate((below(words[:, 1:2], LETTERS), 1 + below(words[:, 2:], LETTERS - 1)), axis=1)
        text = (np.cumsum(steps, axis=1) % LETTERS)[:, : LENGTH - 2]
        inputs = np.concatenate((hops, FIRST_LETTER + text), axis=1)
        labels = np.concatenate((np.full_like(hops, BLANK), answers(text, hops)), axis=1)
        return inputs, labels

    def counted(self, batch: Batch) -> dict[str, Bool[Tensor, "batch n"]]:
        letters = (batch.labels >= FIRST_LETTER) & (batch.labels < DNE)
        return super().counted(batch) | {"letters": letters}


def answers(text: Ids, hops: Int64[np.ndarray, "batch 1"]) -> Ids:
    """Label ids of hop_k at every position of ``text`` (letters 0..3).

    One hop leads from i to j + 1, j the last index below i with text[j] = text[i]. As j + 1 >= 1, no hop ever
    leads to position 0, which itself has none: so 0 stands for "does not exist", and it is absorbing.
    """
    places = np.arange(text.shape[1])
    seen = np.where(text[:, None, :] == np.arange(LETTERS)[:, None], places + 1, 0)  # (batch, letter, i)
    last = np.maximum.accumulate(seen, axis=2)
    before = np.concatenate((np.zeros_like(last[:, :, :1]), last[:, :, :-1]), axis=2)
    after = np.take_along_axis(before, text[:, None, :], axis=1)[:, 0]  # j + 1, or 0
    reached = np.broadcast_to(places, text.shape)
    for k in range(hops.max(initial=0)):
        reached = np.where(hops > k, np.take_along_axis(after, reached, axis=1), reached)
    letters = FIRST_LETTER + np.take_along_axis(text, reached, axis=1)
    return np.where((hops > 0) & (reached == 0), DNE, letters)
