"""Fixed token mixing: operators that read nothing. Convolution and cyclic shift, real Fourier mixing (FNet), a fixed matrix."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from anyformer.errors import AnyformerError, require_choice, require_numbers
from anyformer.operators import primitives as P
from anyformer.operators.operator import Context, Mixing, Operator


class FixedMixing(Operator):
    """Base: a matrix over tokens that depends on positions alone; masked keys weigh 0."""

    noun = "mixer"

    @property
    def count(self) -> int:
        return 1

    @property
    def reads(self) -> int:
        return 0

    @abstractmethod
    def weights(self, like: Any, query: Any, key: Any, length: Any) -> Any:
        """(batch, n, n) weights for positions ``query`` (batch, n, 1), ``key`` (batch, 1, n), ``length`` (batch, 1, 1)."""

    def __call__(self, shared: Any, own: Any, ctx: Context) -> Mixing:
        query, key = ctx.positions[:, :, None], ctx.positions[:, None, :]
        seen = key == key if ctx.mask is None else ctx.mask[:, None, :]
        length = (seen * 1).sum(-1)[:, :, None].clip(1)  # a row of padding alone has length 0
        weights = P.select(self.weights(own, query, key, length), seen, 0.0)[:, None]
        return Mixing(weights, weights)


@dataclass(frozen=True)
class Convolution(FixedMixing):
    """``y_i = sum_t taps[t] x_{i - t}``: a causal convolution over positions, shared by all features."""

    taps: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.taps:
            raise AnyformerError("Convolution: at least one tap is needed")
        require_numbers("Convolution", "taps", self.taps)

    def weights(self, like: Any, query: Any, key: Any, length: Any) -> Any:
        distance = query - key
        inside = (distance >= 0) & (distance < len(self.taps))
        return P.select(P.constant(like, self.taps)[distance.clip(0, len(self.taps) - 1)], inside, 0.0)


@dataclass(frozen=True)
class CyclicShift(FixedMixing):
    """``y_i = x_{(i - offset) mod n}``, n the number of real tokens."""

    offset: int

    def weights(self, like: Any, query: Any, key: Any, length: Any) -> Any:
        return P.constant(like, (query - key - self.offset) % length == 0)


@dataclass(frozen=True)
class Fourier(FixedMixing):
    """One real half of a Fourier transform along tokens: ``y_i = sum_j cos(2 pi i j / n) x_j``, or sin.

    FNet (Lee-Thorp et al. 2021) is two of them: ``Re(F_n X F_D) = C_n X C_D - S_n X S_D``, with the maps C_D and -S_D of features.
    """

    part: str = "cos"

    def __post_init__(self) -> None:
        require_choice("Fourier", "part", self.part, ("cos", "sin"))

    def weights(self, like: Any, query: Any, key: Any, length: Any) -> Any:
        share = P.constant(like, (query * key) % length) / P.constant(like, length)
        return P.turns(like, share)[0 if self.part == "cos" else 1]


@dataclass(frozen=True)
class FixedMatrix(FixedMixing):
    """``y = W x`` for a fixed square matrix over positions."""

    rows: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.rows or any(len(row) != len(self.rows) for row in self.rows):
            raise AnyformerError("FixedMatrix: a non-empty square matrix is needed")
        for row in self.rows:
            require_numbers("FixedMatrix", "a row", row)

    def weights(self, like: Any, query: Any, key: Any, length: Any) -> Any:
        highest = int(max(query.max(), key.max()))
        if highest >= len(self.rows):
            raise AnyformerError(f"FixedMatrix: position {highest} is past its size {len(self.rows)}")
        return P.constant(like, self.rows)[query, key]
