"""Named families: architectures of the literature, written with our operators. Every one is ``name -> Architecture`` for n tokens, d
features, m layers."""

from collections.abc import Callable
from fractions import Fraction
from math import cos, pi, sin

from anyformer import philox
from anyformer.approximation.architecture import Architecture, ColourBias, Layer
from anyformer.errors import AnyformerError
from anyformer.operators import (
    RBF,
    ALiBi,
    Attention,
    AverageHard,
    Causal,
    FeatureMap,
    FixedMatrix,
    Fourier,
    Landmarks,
    Linformer,
    Neighbours,
    Operator,
    Performer,
    Polynomial,
    Rotary,
    Window,
)

Maker = Callable[[int, int], Operator]
"""(tokens, dim) -> one bank."""


def _attention(**parts: object) -> Maker:
    return lambda n, d: Attention(1, max(d, 1), **parts)  # type: ignore[arg-type]


def circulant(n: int, mirrored: bool) -> ColourBias:
    """One learned number for every ``(j - i) mod n``; ``mirrored``: for every cyclic distance."""
    return ColourBias.of([[min((j - i) % n, (i - j) % n) if mirrored else (j - i) % n for j in range(n)] for i in range(n)])


def big_bird(n: int, window: int = 1, links: int = 1, seed: int = 0) -> Neighbours:
    """BigBird's kind of graph: a window on a line, token 0 global, and ``links`` random keys a query, drawn once from ``seed``."""
    words = philox.gaussian(seed, 0, (n, n), 1.0)
    rows = []
    for i in range(n):
        near = {j for j in range(n) if abs(i - j) <= window} | {0}
        rest = sorted((j for j in range(n) if j not in near), key=lambda j, i=i: float(words[i, j]))
        rows.append(tuple(range(n)) if i == 0 else tuple(sorted(near | set(rest[:links]))))
    return Neighbours(tuple(rows))


def _linformer(n: int, d: int) -> Linformer:
    k = max(1, min(4, n))
    rows = tuple(tuple(((7 * r + 3 * u) % (2 * n + 1) + 1 + u / n) / (2 * n) for u in range(n)) for r in range(k))
    return Linformer(1, d, rows, _distinct(rows))


def _distinct(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    """Positive rows whose columns have distinct sums: column u sums to about u + 1."""
    k, n = len(rows), len(rows[0])
    return tuple(tuple((u + 1) / k for u in range(n)) for _ in range(k))


def _fnet(n: int, d: int, m: int, name: str) -> Architecture:
    """``Re(F_n X F_d) = C_n X C_d - S_n X S_d``. For d <= 2 the sines along the features are all 0: then there is no second bank."""
    turns = [[Fraction(i * j % d, d) for j in range(d)] for i in range(d)]
    real = tuple(tuple(0.0 if t in (Fraction(1, 4), Fraction(3, 4)) else cos(2 * pi * t) for t in row) for row in turns)
    imaginary = tuple(tuple(0.0 if 2 * t in (0, 1) else -sin(2 * pi * t) for t in row) for row in turns)
    layer = Layer((Fourier("cos"),), (real,)) if d <= 2 else Layer((Fourier("cos"), Fourier("sin")), (real, imaginary))
    return Architecture((layer,) * m, d, name=name)


MAKERS: dict[str, Maker] = {
    "softmax": _attention(),
    "causal-softmax": _attention(mask=Causal()),
    "causal-alibi": _attention(mask=Causal(), bias=ALiBi((0.5,))),
    "causal-rope": lambda n, d: Attention(1, max(2, d), mask=Causal(), rotary=Rotary((1.0,))),
    "rope": lambda n, d: Attention(1, max(2, d), rotary=Rotary((1.0,))),
    "alibi": _attention(bias=ALiBi((0.5,))),
    "rbf": _attention(kernel=RBF(), scale=1.0),
    "rbf-unnormalised": _attention(kernel=RBF(normalised=False), scale=1.0),
    "performer": _attention(kernel=Performer()),
    "linear": _attention(kernel=Polynomial()),
    "polynomial": _attention(kernel=Polynomial(2)),
    "linear-relu": _attention(kernel=FeatureMap("relu")),
    "linear-elu": _attention(kernel=FeatureMap("elu_plus_one")),
    "average-hard": _attention(kernel=AverageHard()),
    "linformer": _linformer,
    "skyformer": _attention(kernel=Landmarks(), scale=1.0),
    "longformer": _attention(mask=Window(1, 1)),
    "bigbird": lambda n, d: Attention(1, d, mask=big_bird(n)),
    "mean-pooling": lambda n, d: FixedMatrix(((1 / n,) * n,) * n),
    "ring": lambda n, d: Attention(1, d, mask=Neighbours(tuple(tuple(sorted({(i - 1) % n, i, (i + 1) % n})) for i in range(n)))),
    "directed-ring": lambda n, d: Attention(1, d, mask=Neighbours(tuple(tuple(sorted({i, (i + 1) % n})) for i in range(n)))),
    "star": lambda n, d: Attention(1, d, mask=Neighbours((tuple(range(n)), *((0, i) for i in range(1, n))))),
    "cyclic": lambda n, d: Attention(1, d, bias=circulant(n, False)),
    "dihedral": lambda n, d: Attention(1, d, bias=circulant(n, True)),
}

FAMILIES = (*MAKERS, "fnet", "identity")

REMARKS = {
    "skyformer": "landmarks are fixed parameters here; the published code draws them at every forward and is not S_n-equivariant",
    "performer": "one fixed draw of the random projection; the claim holds for every draw",
    "longformer": "a sliding window of radius 1 and no global tokens: those have projections of their own in Longformer's code",
    "bigbird": "window 1, token 0 global, one random key a query from seed 0: ONE fixed graph, never a pool of graphs",
    "linformer": "projections E and F at generic values; trained ones contain them",
    "fnet": "parameter-free mixing: the identity is not reachable, Theorem 3 is used",
}


def family(name: str, tokens: int, dim: int, layers: int) -> Architecture:
    """A family by name; raises with the known names."""
    if name == "fnet":
        return _fnet(tokens, dim, layers, name)
    if name == "identity":
        return Architecture((), dim, name=name)
    if name not in MAKERS:
        raise AnyformerError(f"there is no family {name!r}; known: {', '.join(FAMILIES)} (or give module:Class)")
    return Architecture((Layer((MAKERS[name](tokens, dim),)),) * layers, dim, name=name)
