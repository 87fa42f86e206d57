"""A task: an endless, reproducible stream of batches, and the accuracies that go with it.

    batch(seed, index, size): row r depends on (seed, index, r) alone
    held_out(size):           what is measured on; no training batch may use its seed, HELD_OUT

and so not on ``size``, the platform or the version of any library: every random choice is made with the
integers of :mod:`anyformer.philox`, key (seed, index), a fixed number of 64-bit words a row. Labels are
aligned with inputs: the logits at position i are scored against ``labels[:, i]``. In a next-token task the
label at position i is the token at i + 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt64
from torch import Tensor

from anyformer.errors import AnyformerError, require_size
from anyformer.philox import raw
from anyformer.spec import Spec

T = TypeVar("T")
Words = UInt64[np.ndarray, "batch words"]
Ids = Int64[np.ndarray, "batch n"]
Rule = Callable[[Int64[Tensor, "batch n"]], Int64[Tensor, "batch n"]]
"""A predictor without parameters: inputs to one predicted label a position."""

IGNORED = -100
"""The label of a position that is not scored (PyTorch's default ``ignore_index``)."""
HELD_OUT = 12345
"""The seed of what is measured on, which no training may use."""


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


class _Said(Generic[T]):
    """What every task has to say: a class attribute, a property, or a field with a default. Abstract until then."""

    __isabstractmethod__ = True

    def __get__(self, task: Any, owner: Any) -> T:
        return self  # type: ignore[return-value]  # only the class is ever asked: no task exists while this is missing


@dataclass(frozen=True, kw_only=True)
class Task(Spec, ABC):
    """Base of every task. ``vocab`` may be larger than the task needs, so that several tasks share one class of
    targets; 0 becomes as many as there are ``names``. A task says its ``names``, ``length`` and ``words`` and
    how rows are drawn; all the rest has a default.

    Where a field may be wrong, ``__post_init__`` checks it and then calls this one's.
    """

    vocab: int = 0

    def __post_init__(self) -> None:
        owner, names = type(self).__name__, self.names
        if not isinstance(names, tuple) or not all(
            isinstance(name, str) and name and not any(map(str.isspace, name)) for name in names
        ):
            raise AnyformerError(f"{owner}: names must be a tuple of words without spaces, got {names!r:.80}")
        if len(set(names)) < len(names):
            raise AnyformerError(f"{owner}: names must be different, got {names!r:.80}")
        if self.vocab == 0:
            object.__setattr__(self, "vocab", len(self.names))
        require_size(type(self).__name__, "vocab", self.vocab, minimum=len(self.names))

    names = _Said[tuple[str, ...]]()
    """The token of each id that the task uses: different names without spaces."""
    length = _Said[int]()
    """The number of input positions."""
    words = _Said[int]()
    """How many random words one row takes."""

    @abstractmethod
    def _draw(self, words: Words) -> tuple[Ids, Ids]:
        """Inputs and labels, one row for each row of random words."""

    # --- rows ---------------------------------------------------------------------------------------------

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
        drawn = self._draw(raw(seed, index, size * self.words).reshape(size, self.words))
        return self._checked(drawn, size)

    def _checked(self, drawn: Any, size: int) -> Batch:
        """What a task drew, as a batch: ``size`` rows of ``length`` ids below ``vocab`` (labels also IGNORED), or AnyformerError."""
        owner, shape = type(self).__name__, (size, self.length)
        if not (isinstance(drawn, tuple) and len(drawn) == 2 and all(isinstance(ids, np.ndarray) for ids in drawn)):
            raise AnyformerError(f"{owner}: its rows must be two numpy arrays, inputs and labels, got {type(drawn).__name__}")
        for name, ids, least in zip(("inputs", "labels"), drawn, (0, IGNORED), strict=True):
            if ids.dtype != np.int64 or ids.shape != shape:
                raise AnyformerError(f"{owner}: {name} must be int64 {shape}, got {ids.dtype} {ids.shape}")
            wrong = (ids >= self.vocab) | (ids < 0) & (ids != least)
            if wrong.any():
                row, place = map(int, np.argwhere(wrong)[0])
                got = f"{ids[row, place]} at row {row}, position {place}"
                raise AnyformerError(
                    f"{owner}: {name} must be ids below vocab = {self.vocab}{', or IGNORED' * (least < 0)}; got {got}"
                )
        return Batch(*(torch.from_numpy(np.ascontiguousarray(ids)) for ids in drawn))

    def held_out(self, size: int) -> Batch:
        """The first ``size`` rows to measure on: those of the seed that no training uses. A finite task gives rows
        that no training batch holds, and fewer where it has fewer."""
        return self.batch(HELD_OUT, 0, size)

    def training_rows(self, size: int, seed: int = 0) -> Batch:
        """``size`` rows to fit something simple on. A finite task gives each of its rows once at most."""
        self._require_training(seed)
        return self.batch(seed, 0, size)

    def _require_training(self, seed: int) -> None:
        if seed == HELD_OUT:
            raise AnyformerError(f"{type(self).__name__}: seed {HELD_OUT} is the held-out set's, choose another")

    def show(self, batch: Batch, row: int = 0) -> str:
        """Two lines, names of inputs over names of labels; ``·`` where a position is not scored."""
        names = {IGNORED: "·"} | dict(enumerate(self.token_names))
        spelled = [[names[i] for i in ids[row].tolist()] for ids in (batch.inputs, batch.labels)]
        widths = [max(map(len, column)) for column in zip(*spelled, strict=True)]
        lines = (" ".join(word.ljust(w) for word, w in zip(words, widths, strict=True)) for words in spelled)
        return "\n".join(f"{what}    {line}".rstrip() for what, line in zip(("inputs", "labels"), lines, strict=True))

    # --- scores -------------------------------------------------------------------------------------------

    def counted(self, batch: Batch) -> dict[str, Bool[Tensor, "batch n"]]:
        """Where each accuracy looks, by its name. ``accuracy``, the first, looks at every scored position."""
        return {"accuracy": batch.scored}

    def scores(self, predicted: Int64[Tensor, "batch n"], batch: Batch) -> dict[str, float]:
        """Every accuracy of these predictions, in [0, 1]; one that looks nowhere in this batch is left out."""
        right = predicted == batch.labels
        counted = self.counted(batch).items()
        return {name: right[where].double().mean().item() for name, where in counted if where.any()}

    def accuracies(self, logits: Float[Tensor, "batch n vocab"], batch: Batch) -> dict[str, float]:
        """Every accuracy of the largest logits."""
        owner, want = type(self).__name__, (*batch.labels.shape, self.vocab)
        if logits.shape != want:
            raise AnyformerError(f"{owner}: logits of shape {want} expected, got {tuple(logits.shape)}")
        if not batch.scored.any():
            raise AnyformerError(f"{owner}: the batch has no scored position")
        return self.scores(logits.argmax(-1), batch)

    def accuracy(self, logits: Float[Tensor, "batch n vocab"], batch: Batch) -> float:
        """The share of scored positions whose largest logit is the label's."""
        return self.accuracies(logits, batch)["accuracy"]

    def rules(self) -> Mapping[str, Rule]:
        """Rules of thumb that a good model has to beat, by name; :func:`anyformer.tasks.baselines` scores them."""
        return {}


def below(words: UInt64[np.ndarray, "*shape"], high: int | Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "*shape"]:
    """Uniform on {0, ..., high - 1}, high < 2**31: floor(w * high / 2**32), w the upper 32 bits of each word.

    The rule of :func:`anyformer.philox.integers`, for words in hand and a ``high`` that may vary.
    """
    return ((words >> np.uint64(32)) * np.asarray(high).astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def geometric(words: UInt64[np.ndarray, "*shape"], limit: int) -> Int64[np.ndarray, "*shape"]:
    """r >= 1 with P(r) = 2^-r, cut at ``limit`` <= 64: one more than each word's leading zero bits."""
    thresholds = np.uint64(1) << np.arange(64 - limit + 1, 64, dtype=np.uint64)
    return limit - np.searchsorted(thresholds, words, side="right")
