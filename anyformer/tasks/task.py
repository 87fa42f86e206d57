"""A task: an endless, reproducible stream of batches, and the accuracy that goes with it.

    batch(seed, index, size): row r depends on (seed, index, r) alone

and so not on ``size``, the platform or the version of any library: every random choice is made with the
integers of :mod:`anyformer.philox`, key (seed, index), a fixed number of 64-bit words a row. Labels are
aligned with inputs: the logits at position i are scored against ``labels[:, i]``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt64
from torch import Tensor

from anyformer.errors import AnyformerError, require_size
from anyformer.philox import raw
from anyformer.spec import Spec

Words = UInt64[np.ndarray, "batch words"]
Ids = Int64[np.ndarray, "batch n"]

IGNORED = -100
"""The label of a position that is not scored (PyTorch's default ``ignore_index``)."""


@dataclass(frozen=True)
class Batch:
    """``inputs`` and ``labels``, int64 (batch, n); labels are ``IGNORED`` where a position is not scored."""

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        for name, value in (("inputs", self.inputs), ("labels", self.labels)):
            if value.dtype != torch.int64 or value.ndim != 2 or value.shape != self.inputs.shape:
                got = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
                raise AnyformerError(f"Batch: {name} must be int64 (batch, n), both of one shape; got {got}")

    @property
    def scored(self) -> Bool[Tensor, "batch n"]:
        """Where the labels count."""
        return self.labels != IGNORED


@dataclass(frozen=True, kw_only=True)
class Task(Spec, ABC):
    """Base of every task. ``vocab`` may be larger than the task needs, so that several tasks share one class
    of targets; ``length`` is the number of input positions, ``words`` how many random words one row takes."""

    vocab: int

    names: ClassVar[tuple[str, ...]]
    length: ClassVar[int]
    words: ClassVar[int]

    def __post_init__(self) -> None:
        require_size(type(self).__name__, "vocab", self.vocab, minimum=len(self.names))

    @property
    def token_names(self) -> tuple[str, ...]:
        """``vocab`` different names; ids that the task never uses are called ``_<id>``."""
        return self.names + tuple(f"_{i}" for i in range(len(self.names), self.vocab))

    def batch(self, seed: int, index: int, size: int) -> Batch:
        """Batch number ``index`` of the stream ``seed``.

        Raises AnyformerError unless 0 <= seed, index < 2**64 and size >= 1.
        """
        owner = type(self).__name__
        require_size(owner, "size", size)
        for name, value in (("seed", seed), ("index", index)):
            require_size(owner, name, value, minimum=0)
            if value >= 2**64:
                raise AnyformerError(f"{owner}: {name} must be below 2**64, got {value}")
        inputs, labels = self._draw(raw(seed, index, size * self.words).reshape(size, self.words))
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels))

    @abstractmethod
    def _draw(self, words: Words) -> tuple[Ids, Ids]:
        """Inputs and labels, one row for each row of random words."""

    def accuracy(self, logits: Float[Tensor, "batch n vocab"], batch: Batch) -> float:
        """The share of scored positions whose largest logit is the label's."""
        owner, want, scored = type(self).__name__, (*batch.labels.shape, self.vocab), batch.scored
        if logits.shape != want:
            raise AnyformerError(f"{owner}: logits of shape {want} expected, got {tuple(logits.shape)}")
        if not scored.any():
            raise AnyformerError(f"{owner}: the batch has no scored position")
        return (logits.argmax(-1) == batch.labels)[scored].double().mean().item()


def below(words: UInt64[np.ndarray, "*shape"], high: int | Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "*shape"]:
    """Uniform on {0, ..., high - 1}, high < 2**31: floor(w * high / 2**32), w the upper 32 bits of each word.

    The rule of :func:`anyformer.philox.integers`, for words in hand and a ``high`` that may vary.
    """
    return ((words >> np.uint64(32)) * np.asarray(high).astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def geometric(words: UInt64[np.ndarray, "*shape"], limit: int) -> Int64[np.ndarray, "*shape"]:
    """r >= 1 with P(r) = 2^-r, cut at ``limit`` <= 64: one more than each word's leading zero bits."""
    thresholds = np.uint64(1) << np.arange(64 - limit + 1, 64, dtype=np.uint64)
    return limit - np.searchsorted(thresholds, words, side="right")
