"""Ball arithmetic: arrays of real balls ``[mid +- rad]`` (Arb, by python-flint) as a second arithmetic of the primitives.

A formula evaluated on balls encloses its value in exact real arithmetic, so ``a`` and ``b`` with disjoint balls are *proved* different.
Comparisons are three-valued: one that the balls do not decide (a kink that is met) raises :class:`Undecided` and is never guessed. Numbers of an
operator (slopes, tables) are the floats that were given, taken exactly; an angle given in turns uses the true pi.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from anyformer.errors import AnyformerError
from anyformer.operators import primitives as P


def _load() -> Any:
    """python-flint, or None without the extra ``exact``."""
    try:
        import flint
    except ImportError:
        return None
    return flint


flint = _load()

BITS = 128
"""Working precision where none is asked for."""


class Undecided(AnyformerError):
    """A comparison that the balls do not decide: a kink may be met."""


def require_flint() -> None:
    """Raise where python-flint is not installed."""
    if flint is None:
        raise AnyformerError("ball arithmetic needs python-flint; install the extra: pip install 'anyformer[exact]'")


@contextmanager
def precision(bits: int) -> Iterator[None]:
    """Work with so many bits."""
    require_flint()
    before = flint.ctx.prec
    flint.ctx.prec = bits
    try:
        yield
    finally:
        flint.ctx.prec = before


class Balls(np.ndarray):
    """An object array of balls. ``+ - * / @``, indexing and reshaping are numpy's; comparisons raise where they are not decided."""

    def __matmul__(self, other: Any) -> "Balls":
        return _matmul(self, other)

    def __gt__(self, other: Any) -> Any:
        return _compare(self, other, lambda a, b: a > b, lambda a, b: a <= b)

    def __ge__(self, other: Any) -> Any:
        return _compare(self, other, lambda a, b: a >= b, lambda a, b: a < b)

    def __lt__(self, other: Any) -> Any:
        return _compare(self, other, lambda a, b: a < b, lambda a, b: a >= b)

    def __le__(self, other: Any) -> Any:
        return _compare(self, other, lambda a, b: a <= b, lambda a, b: a > b)

    def clip(self, *_: Any, **__: Any) -> Any:
        raise Undecided("a clamp was met in ball arithmetic; choose parameters where it does not act")


def _compare(a: Any, b: Any, holds: Any, fails: Any) -> np.ndarray:
    a, b = np.asarray(a, dtype=object), np.asarray(b, dtype=object)
    yes = np.frompyfunc(holds, 2, 1)(a, b).astype(bool)
    no = np.frompyfunc(fails, 2, 1)(a, b).astype(bool)
    if not np.all(yes | no):
        raise Undecided("a comparison is not decided by the balls: a kink may be met; choose a cell that avoids it, or more bits")
    return yes


def _matmul(a: Any, b: Any) -> Balls:
    """Products over the last two axes by Arb's own matrix product, leading axes broadcast."""
    a, b = np.asarray(a, dtype=object), np.asarray(b, dtype=object)
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = np.broadcast_to(a, lead + a.shape[-2:]), np.broadcast_to(b, lead + b.shape[-2:])
    out = np.empty((*lead, a.shape[-2], b.shape[-1]), dtype=object)
    if a.shape[-1] == 0:
        out.fill(flint.arb(0))
        return out.view(Balls)
    common = flint.arb_mat(b.tolist()) if b.ndim == 2 else None
    for index in np.ndindex(*lead):
        entries = (
            flint.arb_mat(left[index].tolist()) * (flint.arb_mat(right[index].tolist()) if common is None else common)
        ).entries()
        block = np.empty(len(entries), dtype=object)
        block[:] = entries
        out[index] = block.reshape(out.shape[-2:])
    return out.view(Balls)


def _ball(x: Any) -> Any:
    if isinstance(x, Fraction):
        return flint.arb(flint.fmpq(x.numerator, x.denominator))
    if isinstance(x, flint.arb):
        return x
    return flint.arb(x if isinstance(x, (int, float)) and not isinstance(x, bool) else float(x))


def balls(values: Any) -> Balls:
    """An array of balls from tensors, floats (taken exactly), integers, or fractions."""
    require_flint()
    if isinstance(values, Balls):
        return values
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    out = np.empty(array.shape, dtype=object)
    out.ravel()[:] = [_ball(x) for x in array.ravel().tolist()]
    return out.view(Balls)


def box(low: Any, high: Any) -> Balls:
    """Balls that hold every number between ``low`` and ``high``: a cell."""
    return np.frompyfunc(lambda a, b: a.union(b), 2, 1)(balls(low), balls(high)).view(Balls)


def exact_fraction(x: Any) -> Fraction | None:
    """The rational that an exact ball is, or None for one with a radius."""
    if not (x.is_exact() and x.is_finite()):
        return None
    mantissa, exponent = x.man_exp()
    return Fraction(int(mantissa)) * Fraction(2) ** int(exponent)


def _elementwise(name: str) -> Any:
    def apply(x: Balls) -> Balls:
        return np.frompyfunc(lambda z: getattr(z, name)(), 1, 1)(x).view(Balls)

    return apply


for _name in ("exp", "log", "sqrt", "tanh", "erf"):
    getattr(P, _name).register(Balls, _elementwise(_name))
P.sigmoid.register(Balls, lambda x: 1.0 / (1.0 + P.exp(0.0 - x)))
P.row_max.register(Balls, lambda x: np.frompyfunc(lambda a, b: a.max(b), 2, 1).reduce(x, axis=-1, keepdims=True).view(Balls))
P.row_sum.register(Balls, lambda x: x.sum(-1, keepdims=True))
P.join.register(Balls, lambda x, *others: np.concatenate((x, *others), -1).view(Balls))
P.constant.register(Balls, lambda like, values: balls(values))
P.einsum.register(Balls, lambda x, equation, values: np.einsum(equation, x, balls(values)).view(Balls))
P.spread.register(Balls, lambda x, count: np.repeat(x, count, axis=-2))


@P.select.register
def _(x: Balls, condition: Any, otherwise: float) -> Balls:
    return np.where(condition, x, _ball(otherwise)).view(Balls)


def _angles(x: Balls, scale: Any, cos: str, sin: str) -> tuple[Balls, Balls]:
    turned = x * scale
    return _elementwise(cos)(turned), _elementwise(sin)(turned)


@P.turns.register
def _(like: Balls, share: Any) -> tuple[Balls, Balls]:
    return _angles(balls(share), 2, "cos_pi", "sin_pi")


@P.cos_sin.register
def _(like: Balls, places: Any, frequencies: tuple[float, ...]) -> tuple[Balls, Balls]:
    return _angles(balls(balls(places)[..., None] * balls(frequencies)), 1, "cos", "sin")
