"""The random numbers are pinned to the bit, and follow the laws that they are named after."""

import hashlib
import json
import math
import os
import subprocess
import sys

import mpmath
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anyformer import philox

MILLION = 10**6
WORDS = st.integers(0, 2**64 - 1)
SAMPLERS = {
    "raw": lambda seed, stream, n: philox.raw(seed, stream, n),
    "uniform": lambda seed, stream, n: philox.uniform(seed, stream, (n,), 0.3),
    "gaussian": lambda seed, stream, n: philox.gaussian(seed, stream, (n,), 0.3),
    "integers": lambda seed, stream, n: philox.integers(seed, stream, (n,), 1000),
}
PINNED = {
    "raw": "7e5d71be9f36a13bd57a73146b1c093b54b4e5638df7ce77c52959f651dd84d4",
    "uniform": "4953af15c5ad0335bd9bed214c6e193033a2401f6c1c60f0668a908e78ff556e",
    "gaussian": "9f772a69eb5e0f74cadc4b217c8841987fe174dae639468bb02c61d17cc5cfc5",
    "integers": "38300b90724523252ea01e5bdf117e66b2b885ed7a537e5f7f11795b3b2ab29a",
}


def digests() -> dict[str, str]:
    """sha256 of the first million values of each sampler, as little-endian 64-bit words."""
    return {
        name: hashlib.sha256(np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("<")).tobytes()).hexdigest()
        for name, x in ((name, sample(2026, 7, MILLION)) for name, sample in SAMPLERS.items())
    }


def cpu_features() -> tuple[dict[str, bool], list[str]]:
    """What NumPy found on this CPU (less what is disabled), and what it has dispatched kernels for."""
    try:
        from numpy._core import _multiarray_umath as umath
    except ImportError:  # NumPy 1
        from numpy.core import _multiarray_umath as umath  # type: ignore[no-redef]
    return dict(umath.__cpu_features__), list(umath.__cpu_dispatch__)


def test_every_bit_is_pinned():
    assert digests() == PINNED


def test_bits_do_not_depend_on_the_cpu():
    found, dispatched = cpu_features()
    disabled = [name for name in dispatched if found[name]]
    if not disabled:
        pytest.skip("NumPy dispatches nothing on this CPU: the pinned digests already ran on the baseline")
    child = "import json, test_philox as t; print(json.dumps([t.cpu_features()[0], t.digests()]))"
    path = os.pathsep.join([os.path.dirname(__file__), os.path.dirname(os.path.dirname(philox.__file__))])
    env = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(disabled), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", child], env=env, capture_output=True, text=True, check=True)
    features, result = json.loads(done.stdout)
    assert [name for name in disabled if features[name]] == []
    assert result == PINNED


def philox_block(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox 4x64 with ten rounds, from its definition."""
    mask = 2**64 - 1
    c0, c1, c2, c3 = ((counter >> shift) & mask for shift in (0, 64, 128, 192))
    k0, k1 = key
    for _ in range(10):
        p, q = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (q >> 64) ^ c1 ^ k0, q & mask, (p >> 64) ^ c3 ^ k1, p & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


def test_oracle_gives_the_published_answer():
    expected = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox_block(0, (0, 0)) == expected  # Random123, kat_vectors


@given(seed=WORDS, stream=WORDS, count=st.integers(0, 40))
def test_raw_is_philox(seed, stream, count):
    expected = [word for counter in range(1, 11) for word in philox_block(counter, (seed, stream))]
    assert philox.raw(seed, stream, count).tolist() == expected[:count]


def ulps(x: float, y: float) -> float:
    """|y - ln x| in units in the last place of ln x, by mpmath."""
    with mpmath.workprec(300):
        exact = mpmath.log(mpmath.mpf(x))
        return float(abs(mpmath.mpf(y) - exact) / math.ulp(float(exact)))


@given(st.floats(min_value=0.0, exclude_min=True, allow_infinity=False))
@example(1.0)
@example(math.nextafter(1.0, 0.0))
@example(math.nextafter(1.0, 2.0))
@example(math.sqrt(0.5))
@example(math.nextafter(math.sqrt(0.5), 0.0))
@example(5e-324)
@example(sys.float_info.max)
def test_log_is_within_two_ulps(x):
    y = float(philox.natural_log(np.array([x]))[0])
    assert ulps(x, y) < 2.0
    assert abs(y - math.log(x)) <= 2.0 * math.ulp(math.log(x))


def test_log_is_within_one_ulp_on_a_sample():
    x = np.concatenate([(philox.uniform(1, 0, (3000,), 1.0) + 1.0), philox.uniform(1, 1, (3000,), 2.0**-20) + 1.0])
    assert max(map(ulps, x.tolist(), philox.natural_log(x).tolist())) < 1.0


def ks(x: np.ndarray, cdf: np.ndarray) -> float:
    """sqrt(n) sup |F_n - F| for sorted x: below 1.95 with probability 0.999 (Kolmogorov)."""
    n = len(x)
    steps = np.arange(n + 1) / n
    return math.sqrt(n) * max(np.abs(steps[1:] - cdf).max(), np.abs(cdf - steps[:-1]).max())


def test_uniform_is_uniform():
    x = np.sort(philox.uniform(11, 0, (MILLION,), 0.3))
    assert np.abs(x).max() < 0.3
    assert abs(x.mean()) < 4 * 0.3 / math.sqrt(3 * MILLION)
    assert x.var() == pytest.approx(0.03, rel=5e-3)
    assert ks(x, (x + 0.3) / 0.6) < 1.95


def test_uniform_is_the_formula():
    words = philox.raw(4, 9, 1000).tolist()
    expected = [math.ldexp(2 * (w >> 11) + 1 - 2**53, -53) * 0.7 for w in words]
    assert philox.uniform(4, 9, (10, 100), 0.7).ravel().tolist() == expected


def test_gaussian_is_gaussian():
    x = np.sort(philox.gaussian(11, 0, (MILLION,), 2.0)) / 2.0
    for power, moment in enumerate([0.0, 1.0, 0.0, 3.0, 0.0, 15.0], start=1):
        variance = math.prod(range(1, 2 * power, 2)) - moment**2
        assert abs((x**power).mean() - moment) < 4 * math.sqrt(variance / MILLION), power
    assert ks(x, np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])) < 1.95


def test_gaussians_are_uncorrelated():
    x = philox.gaussian(12, 0, (MILLION,), 1.0)
    for y in (x, x**2 - 1.0):  # the second catches a shared radius that is not exponential
        y = y / y.std()
        assert abs((y[:-1] * y[1:]).mean()) < 4 / math.sqrt(MILLION)


def test_gaussian_is_the_formula():
    words = iter(philox.raw(4, 9, 1000).tolist())
    expected = []
    for a, b in zip(words, words, strict=True):
        u, v = (math.ldexp(2 * (w >> 11) + 1 - 2**53, -53) for w in (a, b))
        if (s := u * u + v * v) < 1:
            f = math.sqrt(-2 * math.log(s) / s)
            expected += [u * f * 0.7, v * f * 0.7]
    got = philox.gaussian(4, 9, (len(expected),), 0.7)
    np.testing.assert_allclose(got, expected, rtol=2e-15)


@pytest.mark.parametrize("high", [1, 2, 7, 1000, 2**31 - 1])
def test_integers_are_uniform(high):
    x = philox.integers(13, high, (MILLION,), high)
    assert x.min() >= 0 and x.max() < high
    bins = min(high, 1000)
    counts = np.bincount(x * bins // high, minlength=bins)
    if bins == high or high > 2**20:  # equal bins (to 1e-6)
        chi2 = ((counts - MILLION / bins) ** 2).sum() / (MILLION / bins)
        assert abs(chi2 - (bins - 1)) <= 4 * math.sqrt(2 * (bins - 1))
    assert x[:1000].tolist() == [(w >> 32) * high >> 32 for w in philox.raw(13, high, 1000).tolist()]


@pytest.mark.parametrize("name", SAMPLERS)
@given(seed=WORDS, stream=WORDS, short=st.integers(0, 300), long=st.sampled_from([301, 1000, 40_000, 100_001]))
def test_prefixes_agree(name, seed, stream, short, long):
    sample = SAMPLERS[name]
    assert np.array_equal(sample(seed, stream, short), sample(seed, stream, long)[:short])


@pytest.mark.parametrize("name", SAMPLERS)
@given(one=st.tuples(WORDS, WORDS), other=st.tuples(WORDS, WORDS))
@example((0, 1), (1, 0))
@example((0, 0), (2**64 - 1, 0))
@example((0, 0), (0, 2**64 - 1))
def test_distinct_keys_differ(name, one, other):
    same = np.array_equal(SAMPLERS[name](*one, 100), SAMPLERS[name](*other, 100))
    assert same == (one == other)


def test_shapes_are_row_major():
    for sample, scale in ((philox.uniform, 0.5), (philox.gaussian, 0.5), (philox.integers, 9)):
        assert np.array_equal(sample(1, 2, (3, 4, 5), scale).ravel(), sample(1, 2, (60,), scale))
        assert sample(1, 2, (), scale).shape == ()
        assert sample(1, 2, (3, 0), scale).shape == (3, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: philox.raw(-1, 0, 1), r"seed: expected an integer in \[0, 18446744073709551616\), got -1"),
        (lambda: philox.raw(2**64, 0, 1), r"seed: .* got 18446744073709551616"),
        (lambda: philox.uniform(0, 2**64, (1,), 1.0), r"stream: .* got 18446744073709551616"),
        (lambda: philox.gaussian(0, -1, (1,), 1.0), r"stream: .* got -1"),
        (lambda: philox.raw(0, 0, -1), r"count: .* got -1"),
        (lambda: philox.uniform(0, 0, (2, -3), 1.0), r"shape \(2, -3\): .* got -3"),
        (
            lambda: philox.uniform(0, 0, (1,), 0.0),
            r"bound: expected a number in \[1e-250, 1e\+250\], got 0.0",
        ),
        (lambda: philox.uniform(0, 0, (1,), math.inf), r"bound: .* got inf"),
        (lambda: philox.gaussian(0, 0, (1,), math.nan), r"std: .* got nan"),
        (lambda: philox.gaussian(0, 0, (1,), -1.0), r"std: .* got -1.0"),
        (lambda: philox.integers(0, 0, (1,), 0), r"high: expected an integer in \[1, 2147483648\), got 0"),
        (lambda: philox.integers(0, 0, (1,), 2**31), r"high: .* got 2147483648"),
        (
            lambda: philox.natural_log(np.array([1.0, 0.0, -2.0])),
            r"expected positive finite .* got 0.0 \(2 such\)",
        ),
        (lambda: philox.natural_log(np.array([math.nan])), r"got nan"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
