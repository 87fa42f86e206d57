"""How a program is compiled."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from anyformer.errors import AnyformerError, require_choice, require_number, require_size
from anyformer.rasp.sequences import LIFTED
from anyformer.rasp.sets import Reals, finite

Mode = Literal["analytic", "standard"]
DTYPES = {"float64": torch.float64, "float32": torch.float32}


MOST_TOKENS = 2**17
"""The largest ``max_length``: a run forms patterns of its square, and tables hold a row a position."""

LEAST_TOLERANCE = 1e-15
"""The smallest ``tolerance``: below it float64 rounds more than tables err."""


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`anyformer.rasp.compile`, checked."""

    vocab: tuple[Any, ...] | Reals
    max_length: int
    mode: Mode
    tolerance: int | float
    causal: Literal["no", "strict", "dialect"]
    attention: Literal["hard", "softmax"]
    dtype: torch.dtype

    @classmethod
    def of(
        cls, vocab: Iterable[Any] | Reals, max_length: Any, *, mode: Any, tolerance: Any, causal: Any, attention: Any, dtype: Any
    ) -> "Options":
        """Raises :class:`AnyformerError` where one of them cannot be used."""
        require_size("compile", "max_length", max_length)
        if max_length > MOST_TOKENS:
            raise AnyformerError(f"compile: max_length must be at most {MOST_TOKENS:,} tokens, got {max_length:,}")
        require_choice("compile", "mode", mode, ("analytic", "standard"))
        require_choice("compile", "causal", causal, ("no", "strict", "dialect"))
        require_choice("compile", "attention", attention, ("hard", "softmax"))
        require_choice("compile", "dtype", dtype, tuple(DTYPES))
        require_number("compile", "tolerance", tolerance, LEAST_TOLERANCE)
        words = vocab if isinstance(vocab, Reals) else _words(vocab)
        return cls(words, max_length, mode, tolerance, causal, attention, DTYPES[dtype])

    @property
    def softmax(self) -> float | None:
        """What the scores of average-hard heads are multiplied by where they are softmax heads: the sink lies 1/2 below a selected key and the
        others lie 1 or more below, so that all together have at most (n + 1) exp(-(log(n + 1) + 28)) = 7e-13 of its weight."""
        return 2 * (math.log(self.max_length + 1) + 28.0) if self.attention == "softmax" else None

    @property
    def tokens(self) -> int:
        """Rows of the embedding: one where tokens are real numbers."""
        return 1 if isinstance(self.vocab, Reals) else len(self.vocab)


def _words(vocab: Iterable[Any]) -> tuple[Any, ...]:
    words = tuple(vocab)
    if not words:
        raise AnyformerError("compile: the vocabulary is empty; give the tokens, or Reals(low, high)")
    for word in words:
        if not isinstance(word, LIFTED) or (isinstance(word, float) and not math.isfinite(word)):
            raise AnyformerError(f"compile: a token must be a finite number, a Boolean or a string, got {word!r}")
    if len(set(words)) < len(words):
        raise AnyformerError(f"compile: the vocabulary holds a token twice: {sorted(map(repr, words))}")
    return finite(words).values
