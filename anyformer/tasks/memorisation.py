"""Memorisation: n^d facts without any pattern; each key of d symbols has one random value.

    inputs    0:2 1:0
    labels    ·   0:3        n = 4, d = 2: the key (2, 0) has the value 3

Keys are all numbers below n^d, least significant symbol first; place p has its own n tokens, and values use those of place 0.
There is nothing to generalise to: what is measured on is what is trained on. (Zhong & Andreas, arXiv 2410.04368, n = 512, d = 2.)
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

from anyformer.errors import AnyformerError, require_size
from anyformer.philox import integers
from anyformer.tasks.finite import MOST_ROWS, FiniteTask
from anyformer.tasks.task import IGNORED, Ids


@dataclass(frozen=True, kw_only=True)
class Memorisation(FiniteTask):
    """Key number r has at place p the token n p + floor(r / n^p) mod n; values are uniform on 0..n-1, drawn once from
    ``data_seed``. Only the last position is scored. n is ``symbols``, d is ``places``.

    One fact is log2(n) bits: judge a model by the bits it holds for each of its parameters, not by 100 %.
    """

    symbols: int = 512
    places: int = 2
    data_seed: int = 0

    def __post_init__(self) -> None:
        require_size("Memorisation", "symbols", self.symbols, minimum=2)
        require_size("Memorisation", "places", self.places)
        require_size("Memorisation", "data_seed", self.data_seed, minimum=0)
        # before a name is made for every token, and before a power that no memory holds
        if self.places >= MOST_ROWS.bit_length() or self.rows > MOST_ROWS:
            raise AnyformerError(f"Memorisation: at most {MOST_ROWS} keys are possible, got {self.symbols}^{self.places}")
        super().__post_init__()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{place}:{symbol}" for place in range(self.places) for symbol in range(self.symbols))

    @property
    def length(self) -> int:
        return self.places

    @property
    def rows(self) -> int:
        return self.symbols**self.places

    @property
    def trained(self) -> int:
        return self.rows

    def _rows(self, numbers: Int64[np.ndarray, " batch"]) -> tuple[Ids, Ids]:
        places = np.arange(self.places)
        inputs = self.symbols * places + numbers[:, None] // self.symbols**places % self.symbols
        labels = np.full_like(inputs, IGNORED)
        labels[:, -1] = _values(self.data_seed, self.rows, self.symbols)[numbers]
        return inputs, labels


@lru_cache(maxsize=8)
def _values(seed: int, count: int, symbols: int) -> Int64[np.ndarray, " count"]:
    values = integers(seed, 0, (count,), symbols)
    values.setflags(write=False)
    return values
