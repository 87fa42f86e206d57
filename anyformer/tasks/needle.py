"""Needle in a haystack: among keys and their values, find the value of the key that is asked for.

    inputs    k2 5 k0 7 k1 7 q0 _ _
    labels    ·  · ·  · ·  · 7  · ·

c pairs of a key and its value, the query, padding up to length 2M + 3; only the query's position is scored. (The
haystack of Zhong & Andreas, arXiv 2410.04368, M = 30. There the value follows the query; here it is the label
alone, so that a model which looks both ways does not see it.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from anyformer.errors import require_size
from anyformer.memory import require_memory
from anyformer.tasks.task import IGNORED, Ids, Rule, Task, Words, below

PAD = 0


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """c uniform on 1..M; c different keys of 0..M-1 in random order; values independent and uniform on 1..``values``;
    the query uniform over the c keys. M is ``pairs``. Ids: padding, values, keys ``k``, queries ``q``.

    Copying any value of the context is right in 14.0 % of rows: E[1/c + (1 - 1/c) / values].
    """

    vocab: int = 256
    pairs: int = 30
    values: int = 127

    def __post_init__(self) -> None:
        require_size("Needle", "pairs", self.pairs)
        require_size("Needle", "values", self.values)
        require_memory(200 * (2 * self.pairs + self.values), "this many tokens")
        super().__post_init__()

    @property
    def names(self) -> tuple[str, ...]:
        kinds = (("", range(1, self.values + 1)), ("k", range(self.pairs)), ("q", range(self.pairs)))
        return ("_", *(f"{kind}{i}" for kind, numbers in kinds for i in numbers))

    @property
    def length(self) -> int:
        return 2 * self.pairs + 3

    @property
    def words(self) -> int:
        return 2 + 2 * self.pairs

    def _draw(self, words: Words) -> tuple[Ids, Ids]:
        m, first_key = self.pairs, self.values + 1
        count = 1 + below(words[:, 0], m)
        asked = below(words[:, 1], count)
        keys = np.argsort(words[:, 2 : 2 + m], axis=1, kind="stable")
        values = 1 + below(words[:, 2 + m :], self.values)
        inputs = np.full((len(words), self.length), PAD, dtype=np.int64)
        inputs[:, 0 : 2 * m : 2] = first_key + keys
        inputs[:, 1 : 2 * m : 2] = values
        inputs[np.arange(self.length) >= 2 * count[:, None]] = PAD
        labels = np.full_like(inputs, IGNORED)
        rows = np.arange(len(words))
        inputs[rows, 2 * count] = first_key + m + keys[rows, asked]
        labels[rows, 2 * count] = values[rows, asked]
        return inputs, labels

    def rules(self) -> Mapping[str, Rule]:
        return {"copy the first value": _first_value}


def _first_value(inputs: Int64[Tensor, "batch n"]) -> Int64[Tensor, "batch n"]:
    return torch.broadcast_to(inputs[:, 1:2], inputs.shape)
