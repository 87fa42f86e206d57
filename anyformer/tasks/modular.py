"""Modular addition: a, b, and what (a + b) mod P is.

    inputs    5 4
    labels    · 2        P = 7

A finite task of P^2 rows. floor(0.95 P^2) of them, in a fixed random order, are for training, the others are held out. (The
setting of Zhong & Andreas, arXiv 2410.04368, P = 199: 37,620 to train on, 1,981 held out.)
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int64

from anyformer.errors import AnyformerError, require_number, require_size
from anyformer.memory import require_memory
from anyformer.tasks.finite import FiniteTask
from anyformer.tasks.task import IGNORED, Ids


@dataclass(frozen=True, kw_only=True)
class ModularAddition(FiniteTask):
    """Row number r is a = floor(r / P), b = r mod P; only the position of b is scored. P is ``modulus``.

    For each b, every answer belongs to exactly one a: what the training rows say about b's own token is never right on a held-out row.
    """

    modulus: int = 199
    train_share: float = 0.95

    length: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require_size("ModularAddition", "modulus", self.modulus, minimum=2)
        require_memory(200 * self.modulus, "this many tokens")
        require_number("ModularAddition", "train_share", self.train_share)
        if not 1 <= self.trained < self.rows:
            counts = f"{self.trained} and {self.rows - self.trained} of {self.rows}"
            raise AnyformerError(f"ModularAddition: train_share must leave rows to train on and to hold out, got {counts}")
        super().__post_init__()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.modulus)))

    @property
    def rows(self) -> int:
        return self.modulus**2

    @property
    def trained(self) -> int:
        return int(self.train_share * self.rows)

    def _rows(self, numbers: Int64[np.ndarray, " batch"]) -> tuple[Ids, Ids]:
        inputs = np.stack(np.divmod(numbers, self.modulus), axis=1)
        labels = np.full_like(inputs, IGNORED)
        labels[:, 1] = inputs.sum(axis=1) % self.modulus
        return inputs, labels
