"""Norm-constrained MaxMin networks approximate 1-Lipschitz functions: the construction as a RASP program.

Let f: [0, 1]^d -> R be 1-Lipschitz in the maximum norm, known at centres c_1 .. c_K, and r the largest distance of a point of the cube from its
nearest centre. The lower envelope (McShane)

    g(x) = max_k ( f(c_k) - |x - c_k|_inf )          satisfies  f(x) - 2 r <= g(x) <= f(x)

since for the nearest centre ``f(c) - |x - c| >= f(x) - 2 |x - c|``, and every term is at most f(x) because f is 1-Lipschitz. g is a network of
linear maps whose rows have absolute sums of at most 1 (copies, signs, offsets) and GroupSort of pairs, both 1-Lipschitz in the maximum norm:
|t| = max(t, -t), and maxima of many by rounds of pairs. (Anil, Lucas, Grosse 2019; the claim of 2506.18739 in the form of its MaxMin.)
"""

from collections.abc import Sequence as List

from anyformer.errors import AnyformerError
from anyformer.rasp.linear_algebra import NOWHERE, by_position, sort_pairs
from anyformer.rasp.sequences import EQ, Sequence, aggregate, indices, select, tokens

NOTHING = -1e6
"""What stands for a centre that does not exist, so that their number is a power of two."""


def lipschitz_tokens(centres: int, variables: int) -> int:
    """Length of the input: the variables, then spare tokens (zeros)."""
    return max(variables, _power(2 * variables) * _power(centres))


def lipschitz_network(centres: List[List[float]], values: List[float]) -> Sequence:
    """g at position 0, for d variables in the first d tokens: 1 + 2 log2(2d K) dependent steps of heads, K and 2d
    rounded up to powers of two."""
    if not centres or len(centres) != len(values) or len({len(c) for c in centres}) != 1 or not centres[0]:
        raise AnyformerError("a Lipschitz network needs as many values as centres, and centres with one number a variable")
    d, k = len(centres[0]), _power(len(centres))
    entries = _power(2 * d)
    variable = [(e // 2) % d for _ in range(k) for e in range(entries)]
    sign = [(-1.0) ** e for _ in range(k) for e in range(entries)]
    padded = [*centres, *([centres[0]] * (k - len(centres)))]
    offset = [-((-1.0) ** e) * padded[c][(e // 2) % d] for c in range(k) for e in range(entries)]
    copied = aggregate(select(indices, by_position(tuple(variable)), EQ), tokens)
    distances = _maxima(copied * by_position(tuple(sign), 0) + by_position(tuple(offset), 0), entries, k)
    known = [*map(float, values), *([NOTHING] * (k - len(values)))]
    return _maxima(by_position(tuple(known), NOTHING) - distances, k, 1)


def _maxima(values: Sequence, size: int, groups: int) -> Sequence:
    """The maximum of each group of ``size`` neighbours, at the first ``groups`` positions: rounds of GroupSort, then every second value."""
    while size > 1:
        size //= 2
        evens = tuple(2 * p for p in range(size * groups))
        values = aggregate(select(indices, by_position(evens, NOWHERE), EQ), sort_pairs(values))
    return values


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
