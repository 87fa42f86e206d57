"""Decimal addition: two numbers and their sum, all written with the least significant digit first.

    inputs    7 4 + 5 8 = s2 s3 s1 .
    labels    · · · · · s2 s3 s1 . ·        47 + 85 = 132

Digits of the answer are tokens of their own (``s0`` to ``s9``); the stop is ``.``, then padding ``_`` where the sum has no
more digits than its terms. The label at position i is the token at i + 1 (each answer digit sees the ones before it), scored
from ``=`` on up to the stop: every digit of the answer, and that it ends there.

The public script of Zhong & Andreas (arXiv 2410.04368) scores the positions whose *input* is an answer token instead: never the
first answer digit, and, where there is room, the padding after the stop. Its accuracy is not this one.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from anyformer.errors import require_size
from anyformer.tasks.task import IGNORED, Batch, Ids, Task, Words, below

PLUS, EQUALS, PAD = 10, 11, 12
ANSWER, STOP = 20, 30


@dataclass(frozen=True, kw_only=True)
class Addition(Task):
    """Terms uniform on 10^(M-1) .. 10^M - 1, M = ``digits``. Ids: digits 0..9, ``+`` 10, ``=`` 11, padding 12, answer digits
    20..29, stop 30; 13..19 are not used. Length 3M + 4.

    Beside ``accuracy`` (a share of scored positions) there is ``answers``: the share of rows with no mistake at all.
    """

    digits: int = 10

    def __post_init__(self) -> None:
        require_size("Addition", "digits", self.digits)
        super().__post_init__()

    @property
    def names(self) -> tuple[str, ...]:
        unused = (f"_{i}" for i in range(PAD + 1, ANSWER))
        return (*"0123456789", "+", "=", "_", *unused, *(f"s{i}" for i in range(10)), ".")

    @property
    def length(self) -> int:
        return 3 * self.digits + 4

    @property
    def words(self) -> int:
        return 2 * self.digits

    def _draw(self, words: Words) -> tuple[Ids, Ids]:
        m = self.digits
        terms = below(words, 10).reshape(len(words), 2, m)
        terms[:, :, -1] = 1 + below(words.reshape(terms.shape)[:, :, -1], 9)
        a, b = terms[:, 0], terms[:, 1]
        answer, carry = np.empty_like(a), np.zeros_like(a[:, 0])
        for place in range(m):
            total = a[:, place] + b[:, place] + carry
            carry = total // 10
            answer[:, place] = ANSWER + total - 10 * carry
        longer = carry[:, None] == 1
        ends = np.where(longer, (ANSWER + 1, STOP), (STOP, PAD))
        signs = np.broadcast_to(np.array((PLUS, EQUALS)), (len(words), 2))
        inputs = np.concatenate((a, signs[:, :1], b, signs[:, 1:], answer, ends), axis=1)
        labels = np.full_like(inputs, IGNORED)
        labels[:, 2 * m + 1 : -1] = inputs[:, 2 * m + 2 :]
        labels[labels == PAD] = IGNORED
        return inputs, labels

    def scores(self, predicted: Int64[Tensor, "batch n"], batch: Batch) -> dict[str, float]:
        right = ((predicted == batch.labels) | ~batch.scored).all(dim=1)
        return super().scores(predicted, batch) | {"answers": right.double().mean().item()}
