"""A finite task: all of its rows are known, in one fixed random order pi.

    training    rows pi(0), ..., pi(trained - 1): a batch draws from them with replacement
    held out    rows pi(trained), ..., pi(rows - 1); all rows where none is kept back (memorisation)

pi sorts Philox words, so it is the same on every machine and depends on the number of rows alone.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from jaxtyping import Int64

from anyformer.errors import AnyformerError, require_size
from anyformer.philox import raw
from anyformer.tasks.task import HELD_OUT, Batch, Ids, Task, Words, below

MOST_ROWS = 2**24
"""The order of the rows is kept in memory: 128 MiB at most."""


@dataclass(frozen=True, kw_only=True)
class FiniteTask(Task):
    """Base of finite tasks: how many ``rows``, how many of them are ``trained`` on, and ``_rows`` by number."""

    words: ClassVar[int] = 1

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of different rows."""

    @property
    @abstractmethod
    def trained(self) -> int:
        """How many of them are for training."""

    @abstractmethod
    def _rows(self, numbers: Int64[np.ndarray, " batch"]) -> tuple[Ids, Ids]:
        """Inputs and labels of the rows with these numbers, 0 <= number < ``rows``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows > MOST_ROWS:
            raise AnyformerError(f"{type(self).__name__}: at most {MOST_ROWS} rows are possible, got {self.rows}")
        if not 1 <= self.trained <= self.rows:
            raise AnyformerError(f"{type(self).__name__}: 1 to {self.rows} rows to train on expected, got {self.trained}")

    def _draw(self, words: Words) -> tuple[Ids, Ids]:
        return self._rows(permutation(self.rows)[below(words[:, 0], self.trained)])

    def held_out(self, size: int) -> Batch:
        """The first ``size`` rows that are not trained on, or all of them; with none, of all rows."""
        return self._slice(self.trained if self.trained < self.rows else 0, self.rows, size)

    def training_rows(self, size: int, seed: int = 0) -> Batch:
        """The first ``size`` training rows, or all of them, each once, whatever the ``seed``."""
        self._require_training(seed)
        return self._slice(0, self.trained, size)

    def _slice(self, start: int, stop: int, size: int) -> Batch:
        require_size(type(self).__name__, "size", size)
        numbers = permutation(self.rows)[start : min(stop, start + size)]
        return self._checked(self._rows(numbers), len(numbers))


@lru_cache(maxsize=8)
def permutation(count: int) -> Int64[np.ndarray, " count"]:
    """0, ..., count - 1 in the order of the first ``count`` words of the Philox stream (HELD_OUT, 0)."""
    order = np.argsort(raw(HELD_OUT, 0, count), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order
