"""Matrices in a sequence, one scalar a token, row by row; and their products, softmax, inverse as RASP programs of constant depth.

    Matrix(values, rows, columns, start)      entry (i, j) is the value at position start + i * columns + j

Two ways to multiply (r x k)(k x c). *Compact*: at position p = (i, j) one pair of heads for each k brings A[i, k] and B[k, j], units multiply
and their sum is a linear form: 1 layer, 2k heads. *Paper* (Dutta et al., 2506.18739, Lemma 5): at position p < k, r + c heads bring a column
of A and a row of B, units form all r c products, and r c heads average them over p: 2 layers, r + c and r c heads.

Positions of the result that hold no entry are 0. (With a constant shape no layer is spent on the length.)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product as pairs
from math import exp
from typing import Any

from anyformer.errors import AnyformerError, require_size
from anyformer.rasp.operations import Operation
from anyformer.rasp.sequences import EQ, Selector, Sequence, aggregate, apply, assume, indices, maximum, select, where

Kept = Callable[[int, int], bool]
"""Which entries (i, j) of a matrix take part."""

OUTSIDE = -1000
"""A group that no position belongs to."""

NOWHERE = -1
"""The position that no key has: a head that looks for it selects nothing and gives 0. Also the group of the positions after a matrix."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """``rows`` x ``columns`` numbers in ``values``, from position ``start`` on."""

    values: Sequence
    rows: int
    columns: int
    start: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("columns", 1), ("start", 0)):
            require_size("Matrix", name, getattr(self, name), least)

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.rows * self.columns

    def position(self, i: int, j: int) -> int:
        """Where entry (i, j) is; :data:`NOWHERE` outside of the matrix."""
        inside = 0 <= i < self.rows and 0 <= j < self.columns
        return self.start + i * self.columns + j if inside else NOWHERE

    def at(self, places: tuple[int, ...]) -> Sequence:
        """At position p the value of position ``places[p]``, 0 where that is :data:`NOWHERE` and after the last: one head."""
        return aggregate(_from(places), self.values)

    def map(self, function: Callable[[Sequence], Sequence]) -> "Matrix":
        """A function of every entry."""
        return replace(self, values=function(self.values))


@cache
def by_position(table: tuple[int | float, ...], beyond: int | float = NOWHERE) -> Sequence:
    """``table[p]`` at position p, ``beyond`` after the table. Equal tables are one sequence, so that equal heads are one head."""
    return apply(Operation("position", lambda p: table[p] if p < len(table) else beyond), indices)


@cache
def _from(places: tuple[int, ...]) -> Selector:
    return select(indices, by_position(places), EQ)


def _grid(rows: int, columns: int, function: Callable[[int, int], int]) -> tuple[int, ...]:
    """``function(i, j)`` at position p = i * columns + j."""
    return tuple(function(i, j) for i in range(rows) for j in range(columns))


def transpose(a: Matrix) -> Matrix:
    """``A^T``: one head (Lemma 3)."""
    return Matrix(a.at(_grid(a.columns, a.rows, lambda i, j: a.position(j, i))), a.columns, a.rows)


def moved(a: Matrix) -> Matrix:
    """The same matrix from position 0 on: one head, or none where it is there already."""
    return a if a.start == 0 else Matrix(a.at(_grid(a.rows, a.columns, a.position)), a.rows, a.columns)


def product(a: Matrix, b: Matrix, *, transposed: bool = False) -> Matrix:
    """``A B`` (or ``A B^T``), compact: 1 layer, 2k heads."""
    inner, columns = (b.columns, b.rows) if transposed else (b.rows, b.columns)
    _require_inner("product", a.columns, inner)
    total: Any = None
    for k in range(a.columns):
        left = a.at(_grid(a.rows, columns, lambda i, j, k=k: a.position(i, k)))
        right = b.at(_grid(a.rows, columns, lambda i, j, k=k: b.position(j, k) if transposed else b.position(k, j)))
        total = left * right if total is None else total + left * right
    return Matrix(total, a.rows, columns)


def product_of_columns_and_rows(a: Matrix, b: Matrix) -> Matrix:
    """``A B`` in the paper's way (Lemma 5): 2 layers, r + c and r c heads."""
    _require_inner("product", a.columns, b.rows)
    k = a.columns
    left = [a.at(tuple(a.position(i, p) for p in range(k))) for i in range(a.rows)]
    right = [b.at(tuple(b.position(p, j) for p in range(k))) for j in range(b.columns)]
    inside = by_position((0,) * k)
    total: Any = None
    for i, j in pairs(range(a.rows), range(b.columns)):
        here = by_position((OUTSIDE,) * (i * b.columns + j) + (0,), OUTSIDE)
        mean = aggregate(select(inside, here, EQ), left[i] * right[j])
        total = mean if total is None else total + mean
    return Matrix(total * k, a.rows, b.columns)


def _require_inner(owner: str, a: int, b: int) -> None:
    if a != b:
        raise AnyformerError(f"{owner}: the left matrix has {a} columns, the right one {b} rows; they must be the same")


def row_groups(rows: int, columns: int, kept: Kept) -> tuple[int, ...]:
    """The row of each position of a grid; of the entries that are not kept, a group of their own a row (-2, -3, ..)."""
    return _grid(rows, columns, lambda i, j: i if kept(i, j) else -i - 2)


@dataclass(frozen=True)
class Gap:
    """How far an entry lies below the maximum of its row: at most ``widest``. ``above`` is how far it may seem to lie above, since average-hard
    attention averages all entries within its tie width of the maximum."""

    widest: float = 1e6
    above: float = 1.0

    @property
    def most(self) -> float:
        """Of ``exp(entry - maximum)``, with room for rounding."""
        return max(4.0, 2.0 * exp(self.above))


def softmax_rows(
    a: Matrix,
    *,
    kept: Kept = lambda i, j: True,
    head_per_row: bool = False,
    subtract_maximum: bool = True,
    gap: Gap = Gap(),
) -> Matrix:
    """``exp(a_ij) / sum_j exp(a_ij)`` over the kept entries of each row (Lemma 4): 2 layers with the row maximum subtracted, 1 after
    the exponential without.

        e_ij = exp(a_ij - max_i)  or  exp(a_ij)  without, with mean_i over the group of the row,   out_ij = e_ij (1/c_i) / mean_i,

    c_i the number of kept entries: the sum of a row is c_i times its mean, and 1/c_i is 0 at entries that are not kept. The maximum is
    average-hard attention by value (right at any logits); without it logits must lie in [-300, 300]. The paper has one head a row
    (``head_per_row``): then mean_i is the sum of those heads, each 0 outside of its row; one head for all rows is enough.
    """
    a = moved(a)
    groups = row_groups(a.rows, a.columns, kept)
    group = by_position(groups, NOWHERE)
    alike = [select(group, group, EQ)]
    if head_per_row:
        rows = [by_position(tuple(g if g == r else OUTSIDE for g in groups), OUTSIDE) for r in sorted(set(groups))]
        alike = [select(group, row, EQ) for row in rows] + [select(group, by_position((OUTSIDE,) * a.size, NOWHERE), EQ)]
    weights = exponentials(a, alike, gap) if subtract_maximum else apply("exp", assume(a.values, -300.0, 300.0))
    mean: Any = sum((aggregate(rows, weights) for rows in alike[1:]), aggregate(alike[0], weights))
    mean = mean + by_position((0,) * a.size, 1)  # positions after the matrix: any number
    counts = _grid(a.rows, a.columns, lambda i, j: sum(kept(i, k) for k in range(a.columns)) if kept(i, j) else 0)
    part = by_position(tuple(1 / count if count else 0 for count in counts), 0)
    low, high = (0.5 / a.columns, gap.most) if subtract_maximum else (1e-135, 1e135)
    return Matrix(weights * part / assume(mean, low, high), a.rows, a.columns)


def exponentials(a: Matrix, alike: list[Selector], gap: Gap) -> Sequence:
    """``exp(a_ij - max)`` with the maximum over the entries that one of the selectors ``alike`` selects."""
    best: Any = sum((maximum(rows, a.values) for rows in alike[1:]), maximum(alike[0], a.values))
    return apply("exp", assume(a.values - apply("shift", best), -gap.widest, gap.above))


def layer_norm(a: Matrix, weight: Matrix, bias: Matrix, eps: float) -> Matrix:
    """``(a_ij - mean_i) / sqrt(var_i + eps) * weight_j + bias_j``: 2 layers."""
    a = moved(a)
    group = by_position(_grid(a.rows, a.columns, lambda i, _: i), NOWHERE)
    row = select(group, group, EQ)
    centred = a.values - aggregate(row, a.values)
    weights, biases = (m.at(_grid(a.rows, a.columns, lambda _, j, m=m: m.position(0, j))) for m in (weight, bias))
    scale = apply("rsqrt", assume(aggregate(row, centred * centred), 0.0, 1e300) + eps)
    return Matrix(scale * (centred * weights) + biases, a.rows, a.columns)


def relu(a: Matrix) -> Matrix:
    """``max(a_ij, 0)``: units only."""
    return a.map(lambda values: apply("relu", values))


def determinant(a: Matrix) -> Sequence:
    """det of a 3 x 3 matrix, at every position of the grid: 2 layers (cofactors, then the row sum)."""
    return _determinant(a, cofactors(a))


def cofactors(a: Matrix) -> Matrix:
    """``C_ij = t[i+1, j+1] t[i+2, j+2] - t[i+1, j+2] t[i+2, j+1]``, indices modulo 3: 1 layer, 4 heads."""
    if (a.rows, a.columns) != (3, 3):
        raise AnyformerError(f"cofactors are made for 3 x 3 matrices, got {a.rows} x {a.columns}")
    t = {(u, v): a.at(_grid(3, 3, lambda i, j, u=u, v=v: a.position((i + u) % 3, (j + v) % 3))) for u in (1, 2) for v in (1, 2)}
    return Matrix(t[1, 1] * t[2, 2] - t[1, 2] * t[2, 1], 3, 3)


def _determinant(a: Matrix, c: Matrix) -> Sequence:
    return aggregate(select(by_position((0, 0, 0)), 0, EQ), moved(a).values * c.values) * 3


def inverse(a: Matrix, singular: int | float = 1e-9) -> Matrix:
    """``A^-1 = C^T / det`` of a 3 x 3 matrix; all entries 0 where ``|det| < singular``: 3 layers."""
    c = cofactors(a)
    det = _determinant(a, c)
    return Matrix(transpose(c).values * apply("reciprocal_or_zero", det, singular), 3, 3)


def sort_pairs(values: Sequence) -> Sequence:
    """MaxMin (GroupSort of pairs): each pair (2i, 2i + 1) becomes (max, min); an odd last value passes through. 1 layer, 1 head."""
    return exchanged(values, indices + where(indices % 2 == 0, 1, -1))


def exchanged(values: Sequence, partner: Sequence) -> Sequence:
    """Each value v and the value u at its partner's position in falling order; where there is no such position, or it is the own one, v stays.

    With f = 1 at the first of a pair, s = 1 at the second, else 0: ``max(u, v) f + min(u, v) s + v (1 - f - s)``, which rounds nothing. One
    head brings u and f: a first position is one whose partner exists and is a second one.
    """
    there = select(indices, partner, EQ)
    other = aggregate(there, values)
    second = apply("indicator", partner < indices)
    first = aggregate(there, second)
    return apply("max", other, values) * first + apply("min", other, values) * second + values * (1 - first - second)
