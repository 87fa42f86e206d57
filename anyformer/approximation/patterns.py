"""The fixed pattern of an attention bank: what it does to tokens when its data term is 0, in exact colours.

    alpha = softmax_u(kappa(z_v, z_u) + B_vu)   or   e^{B_vu} k(z_v, z_u),         P = alpha at kappa = 0 (k = 1)

Row v of P is seen up to what attention cannot see: for normalised rows a shift of B is invisible, so the row's maximum is taken off, which
commutes with permutations. Entries become colours. B is evaluated from the operator's own formula in ball arithmetic: exact rationals are
compared as such, balls with a radius are *certified different* or not known. ``sure`` colours differ only where that is certified (a yes reads
these), ``maybe`` colours agree only where equality is certified (a no reads those).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from anyformer.approximation.architecture import ColourBias, Layer
from anyformer.approximation.aten import MASKED
from anyformer.approximation.balls import Undecided, balls, exact_fraction, precision
from anyformer.operators import (
    RBF,
    Attention,
    AverageHard,
    FeatureMap,
    FixedMatrix,
    Fourier,
    Landmarks,
    Linformer,
    Neighbours,
    Operator,
    Performer,
    Polynomial,
    Softmax,
    TableBias,
)
from anyformer.operators.functions import scalar_function
from anyformer.operators.mixing import FixedMixing

PATTERN_BITS = 256
KERNELS = (Softmax, AverageHard, RBF, FeatureMap, Performer, Polynomial, Landmarks)
"""Kernels of which every row is known to depend on its own scores alone, so that permuted scores give permuted rows."""

OUTSIDE = -1
"""The colour of pairs that a mask forbids, or whose weight is exactly 0."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """``sure`` and ``maybe`` (heads, n, n): colours, ``OUTSIDE`` off the support. ``averaging``: whether P itself is reachable and none of its
    entries is negative, as the positive half of Theorem 4 asks; ``complete``: whether equal rows give identities whatever the parameters, as the
    negative half asks."""

    sure: np.ndarray
    maybe: np.ndarray
    averaging: bool
    complete: bool = True

    @property
    def support(self) -> np.ndarray:
        """(n, n): whether any head lets v see u."""
        return (self.maybe != OUTSIDE).any(0)

    @property
    def tokens(self) -> int:
        """n."""
        return self.sure.shape[-1]


def layer_pattern(layer: Layer, n: int) -> Pattern | str:
    """All heads of a layer; a sentence where some bank has no fixed pattern."""
    parts = []
    for op in layer.operators:
        part = pattern_of(op, n)
        if isinstance(part, str):
            return part
        parts.append(part)
    averaging = all(p.averaging for p in parts) and layer.maps is None
    complete = all(p.complete for p in parts)
    return Pattern(np.concatenate([p.sure for p in parts]), np.concatenate([p.maybe for p in parts]), averaging, complete)


def support_of(layer: Layer, n: int) -> np.ndarray | None:
    """(n, n): False where no head of the layer lets v depend on u, whatever its parameters (v itself aside); None where that is not known."""
    total = np.zeros((n, n), dtype=bool)
    for op in layer.operators:
        if type(op) is Attention and type(op.kernel) in KERNELS:
            total |= _allowed(op, n)
            continue
        part = pattern_of(op, n)
        if isinstance(part, str):
            return None
        total |= part.support
    return total


def pattern_of(op: Operator, n: int) -> Pattern | str:
    """The pattern of a bank on n tokens, or the reason why it has none."""
    if type(op) is Attention:
        return _attention_pattern(op, n)
    if isinstance(op, Fourier):
        return _fourier_pattern(op, n)
    if isinstance(op, Linformer):
        return _linformer_pattern(op, n)
    if isinstance(op, FixedMixing):
        with precision(PATTERN_BITS):
            places = np.arange(n)
            matrix = op.weights(balls(np.zeros(1)), places[None, :, None], places[None, None, :], np.full((1, 1, 1), n))
            signed = any(bool(x < 0) or not (x >= 0) for x in np.ravel(matrix))
            sure, maybe = classes(matrix)
            nothing = np.array([exact_fraction(x) == 0 for x in np.ravel(matrix)]).reshape(sure.shape)
        sure, maybe = (np.where(nothing, OUTSIDE, c) for c in (sure, maybe))
        return Pattern(sure.reshape(1, n, n), maybe.reshape(1, n, n), not signed)
    return f"{type(op).__name__} is no attention or fixed mixing that Theorem 4 speaks of"


def refusal(op: Operator, n: int) -> str:
    """Why nothing at all is said of a bank on n tokens: its tables are for another number of tokens, or it holds a finite mask. Empty: nothing
    forbids it."""
    tables = {FixedMatrix: lambda: len(op.rows), Linformer: lambda: len(op.F[0])}  # type: ignore[attr-defined]
    sizes = [(type(op).__name__, tables[type(op)]())] if type(op) in tables else []
    if isinstance(op, Attention):
        sizes += [(type(op.bias).__name__, len(op.bias.rows[0]))] if isinstance(op.bias, TableBias) else []
        sizes += [("Neighbours", len(op.mask.rows))] if isinstance(op.mask, Neighbours) else []
    for what, size in sizes:
        if size != n:
            return f"{what} is made for {size} tokens, there are {n}; give one for {n}"
    if isinstance(op, Attention) and op.bias is not None and _finite_mask(op, n):
        return (
            f"a bias {MASKED:g} or more below the rest of its row is a finite mask: neither read as forbidden nor as a number; give a mask "
            "(Causal, Window, Neighbours)"
        )
    return ""


def _finite_mask(op: Attention, n: int) -> bool:
    assert op.bias is not None
    places = torch.arange(n)
    bias = op.bias(torch.zeros(1, dtype=torch.float64), places[None, None, :, None], places[None, None, None, :])
    allowed = torch.from_numpy(_allowed(op, n))
    bias = torch.where(allowed, bias.expand(1, -1, n, n)[0], -torch.inf)
    top = bias.amax(-1, keepdim=True) if op.kernel.normalised else torch.zeros(1)
    top = top.clamp(min=0.0) if op.sink else top
    return bool((allowed & (bias - top <= -MASKED)).any())


def sees_something(op: Attention, n: int) -> bool:
    """Whether the mask leaves every query a key."""
    return bool(_allowed(op, n).any(1).all())


def _allowed(op: Attention, n: int) -> np.ndarray:
    places = np.arange(n)
    return np.asarray(op.mask.allows(places[:, None], places[None, :]), dtype=bool)


def _attention_pattern(op: Attention, n: int) -> Pattern | str:
    if op.rotary is not None:
        return "rotary positions turn the data term itself: no fixed pattern"
    problem = _zero_data_problem(op)
    if problem:
        return problem
    allowed = np.broadcast_to(_allowed(op, n), (op.heads, n, n))
    shifts = op.kernel.normalised and not op.sink
    if op.bias is None:
        colours = np.where(allowed, 0, OUTSIDE)
        return Pattern(colours, colours, True)
    if isinstance(op.bias, ColourBias):
        colours = np.where(allowed, np.asarray(op.bias.colours)[:n, :n] + 1, OUTSIDE)
        if shifts:  # a row of one colour: its number cancels
            one = np.array([[len(set(row[row != OUTSIDE])) == 1 for row in head] for head in colours])
            colours = np.where(one[:, :, None] & allowed, 0, colours)
        return Pattern(colours, colours, True)
    with precision(PATTERN_BITS):
        places = np.arange(n)
        bias = op.bias(balls(np.zeros(1)), places[None, None, :, None], places[None, None, None, :])
        bias = np.broadcast_to(bias, (1, op.heads, n, n))[0]
        rows = np.empty((op.heads, n, n), dtype=object)
        for h, v in np.ndindex(op.heads, n):
            seen = bias[h, v][allowed[h, v]]
            exact = all(exact_fraction(x) is not None for x in seen)
            top: Any = seen[0] if shifts and len(seen) else 0
            for x in seen[1:] if shifts else ():  # the largest rational, or a ball that holds the maximum of the row
                larger = exact and exact_fraction(x) > exact_fraction(top)  # type: ignore[operator]
                top = (x if larger else top) if exact else top.max(x)
            rows[h, v] = [x - top for x in bias[h, v]]
        sure, maybe = classes(rows[allowed])
    out = [np.full((op.heads, n, n), OUTSIDE) for _ in range(2)]
    for array, ids in zip(out, (sure, maybe), strict=True):
        array[allowed] = ids
    return Pattern(out[0], out[1], True)


def _zero_data_problem(op: Attention) -> str:
    """Why the data term cannot be made constant by parameters, or an empty string."""
    kernel = op.kernel
    if type(kernel) not in KERNELS:
        return f"nothing is known of the kernel {type(kernel).__name__}"
    if op.qk_norm == 0:
        return "an inner norm with epsilon 0 is not defined at 0"
    if isinstance(kernel, (Softmax, RBF, Performer)):
        return ""
    if isinstance(kernel, AverageHard):  # all scores tie at a data term of 0
        return (
            "" if op.bias is None and not op.sink else "average-hard attention with a bias: its pattern at 0 is not its support"
        )
    if isinstance(kernel, FeatureMap):
        with precision(PATTERN_BITS):
            value = scalar_function(kernel.function)(balls(np.zeros(1)))[0]
            positive = bool(value > 0)
        return "" if positive else f"the features {kernel.function} are 0 at 0: attention has no constant data term"
    if isinstance(kernel, Polynomial):
        return "" if kernel.offset else "the kernel (q.k)^p is 0 at 0: attention has no constant data term"
    if isinstance(kernel, Landmarks):
        with precision(PATTERN_BITS):
            zero = balls(np.zeros((1, 1, 1, op.head_dim)))
            try:
                value = kernel(zero, zero, None, np.ones((1, 1, 1, 1), dtype=bool), False).ravel()[0]
            except Undecided as problem:
                return str(problem)
            nonzero = not value.contains(0)
        return "" if nonzero else "the landmark kernel may vanish at 0: attention has no constant data term"
    raise AssertionError(kernel)


def classes(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Colours of balls: (``sure``: unequal only if certified different, ``maybe``: equal only if certified equal), each an integer array."""
    flat: Sequence[Any] = list(np.ravel(values))
    exact = [exact_fraction(x) for x in flat]
    sure = merged(flat)
    known: dict[Fraction, int] = {}
    maybe = np.array([len(flat) + i if x is None else known.setdefault(x, len(known)) for i, x in enumerate(exact)], dtype=int)
    shape = np.shape(values)
    return sure.reshape(shape), maybe.reshape(shape)


def merged(values: Any) -> np.ndarray:
    """One global union-find: balls that overlap are one class, and so is all that they chain together. Never merges row by row."""
    if not all(x.is_finite() for x in values):
        return np.zeros(len(values), dtype=int)
    intervals = sorted(((x.lower(), x.upper(), i) for i, x in enumerate(values)), key=lambda t: t[0])  # exact comparisons
    ids, current, top = np.zeros(len(values), dtype=int), -1, None
    for low, high, i in intervals:
        if top is None or low > top:
            current, top = current + 1, high
        elif high > top:
            top = high
        ids[i] = current
    return ids


def _linformer_pattern(op: Linformer, n: int) -> Pattern | str:
    """W_Q = 0: every row is the mean of the rows of F."""
    with precision(PATTERN_BITS):
        means = balls(np.array(op.F)).sum(0)
        positive = all(bool(x > 0) for x in means)
        sure, maybe = (np.broadcast_to(c, (op.heads, n, n)) for c in classes(means))
    return Pattern(sure, maybe, positive, complete=False)


def _fourier_pattern(op: Fourier, n: int) -> Pattern:
    """cos and sin of ``i j / n`` turns, by their exact symmetries: cos t = cos -t, sin t = sin (pi - t), zeros at quarter and half turns."""
    names: dict[Any, int] = {}
    colours = np.full((1, n, n), OUTSIDE)
    for i, j in np.ndindex(n, n):
        turn = Fraction(i * j % n, n)
        if op.part == "cos":
            turn = min(turn, 1 - turn)
            symbol: Any = None if turn == Fraction(1, 4) else turn
        else:
            sign, turn = (1, turn) if turn < Fraction(1, 2) else (-1, turn - Fraction(1, 2))
            turn = min(turn, Fraction(1, 2) - turn)
            symbol = None if turn == 0 else (sign, turn)
        if symbol is not None:
            colours[0, i, j] = names.setdefault(symbol, len(names))
    return Pattern(colours, colours, False)
