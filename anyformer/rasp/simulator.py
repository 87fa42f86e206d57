"""The universal simulator of attention: one network with fixed weights whose input *describes* an attention layer and the layer's input,
and whose output is that layer's output (Dutta et al., 2506.18739, Theorems 6 and 9).

    U(<T, X>) = T(X)        <T, X>: one scalar a token (:mod:`anyformer.rasp.encoding`)

Three versions, all compiled from RASP (:mod:`anyformer.rasp.linear_algebra`); depth does not grow with n:

    paper      X^T, products by columns and rows, one softmax head a row:  H(r + c) and H r c heads, average-hard
    compact    4 layers: products of pairs of gathered entries, then exp(score) V averaged over a row, divided by the mean of exp(score)
    soft       3 layers: the last one is an ordinary softmax head for every simulated head: no exp, no division

The first two have average-hard heads only: hard attention reproduces soft attention. All subtract the row maximum, which costs a head but no
layer, and are right at logits of +-1000.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.errors import require_choice, require_number
from anyformer.memory import require_memory
from anyformer.rasp.compiled import CompiledProgram
from anyformer.rasp.compiling import compile
from anyformer.rasp.encoding import Layer
from anyformer.rasp.linear_algebra import (
    NOWHERE,
    OUTSIDE,
    Kept,
    Matrix,
    by_position,
    exponentials,
    layer_norm,
    moved,
    product,
    product_of_columns_and_rows,
    relu,
    row_groups,
    softmax_rows,
    transpose,
)
from anyformer.rasp.sequences import EQ, Sequence, aggregate, assume, select, soft_aggregate, tokens
from anyformer.rasp.sets import Reals

Version = Literal["compact", "paper", "soft"]
MASKED = 800.0
"""How far scores of padding lie below all others: exp(-800) is 0 in float64."""

Product = Callable[[Matrix, Matrix], Matrix]


@dataclass(frozen=True, eq=False)
class AttentionSimulator:
    """The simulator of all layers of a class, compiled.

    ``bound``: the largest absolute value of a token (and of an entry of later layers); ``logits``: of a score. A larger score is an error of
    the run, never a wrong answer. ``simulator(matrices)`` encodes, runs and reads the (n, outputs) result.
    """

    layer: Layer
    compiled: CompiledProgram
    version: Version

    @classmethod
    def for_layer(
        cls,
        layer: Layer,
        version: Version = "compact",
        *,
        bound: int | float = 100.0,
        logits: int | float = 2000.0,
        **options: Any,
    ) -> "AttentionSimulator":
        """Compile the simulator of a class of layers; ``options`` are those of :func:`anyformer.rasp.compile` (mode, dtype, ...)."""
        require_choice("AttentionSimulator", "version", version, ("compact", "paper", "soft"))
        for name, value in (("bound", bound), ("logits", logits)):
            require_number("AttentionSimulator", name, value)
        require_memory(8 * layer.tokens**2, f"one attention pattern of the {layer.tokens:,} tokens that describe such a layer")
        program = simulated(layer, version, logits=logits)
        compiled = compile(program, Reals(-bound, bound), layer.tokens, check=False, **options)
        return cls(layer, compiled, version)

    def __call__(self, matrices: Mapping[str, Tensor]) -> Float[Tensor, "n outputs"]:
        """T(X), from the description of T and X (tensors by name, :attr:`Layer.matrices`)."""
        return self.batch([matrices])[0]

    def batch(self, layers: Iterable[Mapping[str, Tensor]]) -> Float[Tensor, "batch n outputs"]:
        """The outputs of several layers, each with its own parameters and input, in one pass."""
        out = self.compiled.run([self.layer.encode(m) for m in layers])
        values = torch.tensor([self.compiled.decode(row) for row in out], dtype=torch.float64)
        n, c = self.layer.n, self.layer.outputs
        return values[:, : n * c].reshape(-1, n, c)


def simulated(layer: Layer, version: Version, *, logits: int | float = 2000.0) -> Sequence:
    """The RASP program of a simulator: at position p = i * outputs + j entry (i, j) of the layer's output."""
    given = {name: Matrix(tokens, *shape, layer.starts[name]) for name, shape in layer.matrices.items()}
    return layer_output(layer, version, given, logits).values


def layer_output(layer: Layer, version: Version, given: Mapping[str, Matrix], logits: int | float, label: str = "") -> Matrix:
    """The output of one layer whose input and parameters are these matrices (wherever they are). With a ``label`` the unnormalised weights of
    head h in a compact version are called ``label`` and h."""
    multiply: Product = product_of_columns_and_rows if version == "paper" else product
    x = given["X"]
    entering = layer_norm(x, given["gamma_1"], given["beta_1"], layer.eps) if layer.norm == "pre" else x
    heads = [_head(layer, h, entering, given, multiply, version, logits, label) for h in range(layer.heads)]
    out = _sum(heads)
    if layer.output:
        out = _sum([multiply(head, _rows(given["W_O"], h * layer.d_v, layer.d_v)) for h, head in enumerate(heads)])
        out = _with_bias(out, given["b_O"]) if layer.biases else out
    if layer.residual:
        out = _sum([out, moved(x)])
    if layer.norm == "post":
        out = layer_norm(out, given["gamma_1"], given["beta_1"], layer.eps)
    if layer.feed_forward:
        entering = layer_norm(out, given["gamma_2"], given["beta_2"], layer.eps) if layer.norm == "pre" else out
        hidden = relu(_with_bias(multiply(entering, given["W_1"]), given["b_1"]))
        part = _with_bias(multiply(hidden, given["W_2"]), given["b_2"])
        out = _sum([out, part]) if layer.residual else part
    return layer_norm(out, given["gamma_2"], given["beta_2"], layer.eps) if layer.norm == "post" else out


def _head(
    layer: Layer,
    h: int,
    x: Matrix,
    given: Mapping[str, Matrix],
    multiply: Product,
    version: Version,
    logits: int | float,
    label: str,
) -> Matrix:
    if layer.projections == "folded":
        query, key, value = multiply(x, given[f"A{h}"]), x, multiply(x, given[f"V{h}"])
    else:
        query, key, value = (multiply(x, given[f"W_{c}{h}"]) for c in "QKV")
        if layer.biases:
            query, key, value = (_with_bias(m, given[f"b_{c}{h}"]) for m, c in zip((query, key, value), "QKV", strict=True))
    scores = multiply(query, transpose(key)) if version == "paper" else product(query, key, transposed=True)
    scores = scores.map(lambda values: assume(layer.scale * values, -logits, logits))
    if layer.padding:
        column = given["valid"].at(tuple(given["valid"].position(0, p % layer.n) for p in range(layer.n**2)))
        scores = scores.map(lambda values: values + (column - 1) * (2.0 * logits + MASKED))

    def kept(i: int, j: int) -> bool:
        return j <= i or not layer.causal

    if version == "paper":
        return multiply(softmax_rows(scores, kept=kept, head_per_row=True), value)
    if version == "soft":
        return _soft_head(scores, value, kept)
    return _averaged_head(scores, value, kept, f"{label}{h}" if label else None)


def _averaged_head(scores: Matrix, value: Matrix, kept: Kept, label: str | None) -> Matrix:
    """``mean_k e_ik v_kj / mean_k e_ik`` with ``e_ik = exp(score_ik - max_i)``: key (i, k) carries all e_ik v_kj, and for each column j a head
    averages them over row i at the positions of that column only, so that the sum of the heads is the numerator: 2 layers."""
    n, c = scores.rows, value.columns
    group = by_position(row_groups(n, n, kept), NOWHERE)
    weights = exponentials(scores, [select(group, group, EQ)])
    weights.label = label
    rows = tuple(p // c for p in range(n * c))
    mean = aggregate(select(group, by_position(rows, OUTSIDE), EQ), weights) + by_position((0,) * (n * c), 1)
    total: Any = None
    for j, carried in enumerate(_carried(value, n)):
        mine = tuple(row if p % c == j else OUTSIDE for p, row in enumerate(rows))
        part = aggregate(select(group, by_position(mine, OUTSIDE), EQ), weights * carried)
        total = part if total is None else total + part
    return Matrix(total / assume(mean, 0.5 / n, 4.0), n, c)


def _soft_head(scores: Matrix, value: Matrix, kept: Kept) -> Matrix:
    """``softmax(scores) value`` with one softmax head; the query's position picks the column."""
    n, c = scores.rows, value.columns
    group = by_position(row_groups(n, n, kept), NOWHERE)
    selected = select(group, by_position(tuple(p // c for p in range(n * c)), OUTSIDE), EQ)
    total: Any = None
    for j, carried in enumerate(_carried(value, n)):
        picked = by_position(tuple(int(p % c == j) for p in range(n * c)), 0)
        part = soft_aggregate(selected, scores.values, carried) * picked
        total = part if total is None else total + part
    return Matrix(total, n, c)


def _carried(value: Matrix, n: int) -> list[Sequence]:
    """For each column j the sequence with ``value[k, j]`` at key (i, k) of an n x n grid."""
    return [value.at(tuple(value.position(p % n, j) for p in range(n * n))) for j in range(value.columns)]


def _sum(parts: list[Matrix]) -> Matrix:
    total = parts[0].values
    for part in parts[1:]:
        total = total + part.values
    return Matrix(total, parts[0].rows, parts[0].columns)


def _with_bias(a: Matrix, bias: Matrix) -> Matrix:
    """``a_ij + bias_j``: one head."""
    rows = bias.at(tuple(bias.position(0, p % a.columns) for p in range(a.size)))
    return Matrix(a.values + rows, a.rows, a.columns)


def _rows(a: Matrix, first: int, count: int) -> Matrix:
    """Some rows of a matrix, in place."""
    return Matrix(a.values, count, a.columns, a.start + first * a.columns)
