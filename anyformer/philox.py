"""Random numbers that are the same bits on every machine, for ever.

The integers are Philox 4x64-10, a keyed bijection of counters (Salmon et al. 2011):

    raw(seed, stream, n) = the first n words of P(1), P(2), P(3), ...,   P = Philox with key (seed, stream),

four words a counter, and NumPy promises that its `random_raw` never changes. Everything after the integers is
made of operations that IEEE 754 rounds correctly (+, -, *, /, sqrt, casts) or that are exact (shifts, frexp),
one NumPy call each, so that nothing can be contracted into a fused multiply-add. No `log`, `cos`, `exp`,
`pow` or matrix product of a library is called: their last bits differ between CPUs. The Gaussians' logarithm
is our own, `natural_log`.

Every sampler has the prefix property: the first k values, in row-major order, do not depend on the shape.
"""

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64, Int64, UInt64

from anyformer.errors import AnyformerError

_CHUNK = 1 << 15  # values at a time: a handful of temporaries stay in the cache
_SMALLEST, _LARGEST = 1e-250, 1e250  # scales for which no intermediate is subnormal or infinite

_SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # the leading 32 bits of ln 2: e * _LN2_HIGH is exact for |e| < 2**20
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")  # ln 2 - _LN2_HIGH, rounded
_ATANH = tuple(2.0 / (2 * k + 1) for k in range(10, 0, -1))  # 2/21, ..., 2/5, 2/3


def raw(seed: int, stream: int, count: int) -> UInt64[np.ndarray, " count"]:
    """The first `count` words of the Philox stream with key (seed, stream).

    Raises AnyformerError unless 0 <= seed, stream < 2**64 and count >= 0.
    """
    _check_integer("count", count, 0, 2**63)
    return _philox(seed, stream).random_raw(count)


def uniform(seed: int, stream: int, shape: tuple[int, ...], bound: float) -> Float64[np.ndarray, "..."]:
    """Uniform on (-bound, bound): x = ((2k + 1) - 2**53) / 2**53 * bound, k the top 53 bits of a word.

    One word a value, in row-major order. The integer (2k + 1) - 2**53 is odd and below 2**53 in size, so it
    and its quotient by 2**53 are exact; the product with `bound` is the only rounding. The law is symmetric
    about zero, zero itself never occurs, and |x| < bound holds after rounding too.

    Raises AnyformerError for a bad seed, stream (see `raw`) or shape, and unless 1e-250 <= bound <= 1e250.
    """
    out = np.empty(_check_shape(shape))
    _check_scale("bound", bound)
    step = math.ldexp(bound, -53)  # exact, so that odd * step rounds once, as odd / 2**53 * bound does
    for values, words in _chunks(seed, stream, out):
        values[:] = _odd(words)
        values *= step
    return out.reshape(shape)


def gaussian(seed: int, stream: int, shape: tuple[int, ...], std: float) -> Float64[np.ndarray, "..."]:
    """Gaussian of mean 0 and standard deviation `std`, by Marsaglia's polar method.

    Consecutive words give pairs (u, v), uniform on (-1, 1)^2 (exactly, as in `uniform`). Pairs with
    s = u^2 + v^2 >= 1 are thrown away (a fraction 1 - pi/4); each other one gives two values, u f std and
    v f std, with f = sqrt(-2 ln(s) / s). Values fill `shape` in row-major order.

    Raises AnyformerError for a bad seed, stream (see `raw`) or shape, and unless 1e-250 <= std <= 1e250.
    """
    out = np.empty(_check_shape(shape))
    _check_scale("std", std)
    philox = _philox(seed, stream)
    filled = 0
    while filled < out.size:
        wanted = out.size - filled
        words = philox.random_raw(min(_CHUNK, 2 * wanted))
        pairs = np.multiply(_odd(words), math.ldexp(1.0, -53)).reshape(-1, 2)
        squares = np.multiply(pairs, pairs)
        s = np.add(squares[:, 0], squares[:, 1])
        inside = s < 1.0  # s > 0 always: u and v are odd multiples of 2**-53
        pairs, s = pairs[inside], s[inside]
        factor = np.sqrt(np.divide(np.multiply(natural_log(s), -2.0), s))
        values = np.multiply(np.multiply(pairs, factor[:, None]), std).reshape(-1)[:wanted]
        out[filled : filled + values.size] = values
        filled += values.size
    return out.reshape(shape)


def integers(seed: int, stream: int, shape: tuple[int, ...], high: int) -> Int64[np.ndarray, "..."]:
    """Uniform on {0, ..., high - 1}: floor(w * high / 2**32), w the upper 32 bits of a word.

    One word a value, in row-major order, integer arithmetic throughout. Each value has probability floor or
    ceil of 2**32 / high, over 2**32: it differs from 1 / high by less than 2**-32, and by nothing where
    `high` is a power of two.

    Raises AnyformerError for a bad seed, stream (see `raw`) or shape, and unless 1 <= high < 2**31.
    """
    out = np.empty(_check_shape(shape), dtype=np.int64)
    _check_integer("high", high, 1, 2**31)
    for values, words in _chunks(seed, stream, out):
        words >>= np.uint64(32)
        words *= np.uint64(high)
        words >>= np.uint64(32)
        values[:] = words
    return out.reshape(shape)


def natural_log(x: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """ln x to less than 2 units in the last place (0.9 at worst where measured), the same bits on every CPU.

    x = 2^e f with sqrt(1/2) <= f < sqrt(2), and d = f - 1 (exact), s = d / (2 + d), |s| < 0.1716. Then

        ln f = 2 atanh(s) = d - (d^2/2 - s (d^2/2 + R)),   R = sum_{k=1..10} 2 s^{2k} / (2k + 1)   (Horner),

    as in fdlibm: the leading term d carries no rounding error. The series is cut where its tail is below
    2^-60 of the result. e ln 2 is added in two parts, the larger of them exact.

    Raises AnyformerError unless every x is positive and finite.
    """
    if not np.all((x > 0.0) & (x < np.inf)):
        wrong = x[~((x > 0.0) & (x < np.inf))]
        raise AnyformerError(f"natural_log: expected positive finite numbers, got {wrong.flat[0]} ({wrong.size} such)")
    f, e = np.frexp(x)
    low = f < _SQRT_HALF
    f = np.where(low, np.add(f, f), f)
    e = np.subtract(e, low).astype(np.float64)
    d = np.subtract(f, 1.0)
    s = np.divide(d, np.add(d, 2.0))
    z = np.multiply(s, s)
    series = np.full_like(z, _ATANH[0])
    for coefficient in _ATANH[1:]:
        series = np.add(np.multiply(series, z), coefficient)
    half = np.multiply(np.multiply(d, d), 0.5)
    correction = np.multiply(s, np.add(half, np.multiply(series, z)))
    correction = np.add(correction, np.multiply(e, _LN2_LOW))
    return np.asarray(np.subtract(np.multiply(e, _LN2_HIGH), np.subtract(np.subtract(half, correction), d)))


def _philox(seed: int, stream: int) -> np.random.Philox:
    _check_integer("seed", seed, 0, 2**64)
    _check_integer("stream", stream, 0, 2**64)
    return np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))


def _chunks(seed: int, stream: int, out: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Slices of the flat array `out`, each with as many new words."""
    philox = _philox(seed, stream)
    for start in range(0, out.size, _CHUNK):
        values = out[start : start + _CHUNK]
        yield values, philox.random_raw(values.size)


def _odd(words: np.ndarray) -> np.ndarray:
    """(2k + 1) - 2**53 with k the top 53 bits of each word, in place; an int64 view."""
    words >>= np.uint64(10)
    words |= np.uint64(1)
    signed = words.view(np.int64)
    signed -= np.int64(2**53)
    return signed


def _check_integer(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
        raise AnyformerError(f"{name}: expected an integer in [{low}, {high}), got {value!r}")


def _check_scale(name: str, value: float) -> None:
    if not _SMALLEST <= value <= _LARGEST:
        raise AnyformerError(f"{name}: expected a number in [{_SMALLEST:g}, {_LARGEST:g}], got {value!r}")


def _check_shape(shape: tuple[int, ...]) -> int:
    """The number of elements of `shape`."""
    for size in shape:
        _check_integer(f"shape {tuple(shape)}", size, 0, 2**63)
    return math.prod(shape)
