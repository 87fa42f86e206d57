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

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.errors import AnyformerError, require_choice, require_number
from anyformer.memory import require_memory
from anyformer.rasp.compiled import CompiledProgram
from anyformer.rasp.compiling import compile
from anyformer.rasp.encoding import Layer
from anyformer.rasp.linear_algebra import (
    NOWHERE,
    OUTSIDE,
    Gap,
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
from anyformer.rasp.options import LEAST_TOLERANCE
from anyformer.rasp.plan import FAULT
from anyformer.rasp.sequences import EQ, Sequence, aggregate, apply, assume, select, soft_aggregate, tokens
from anyformer.rasp.sets import Reals
from anyformer.rasp.smooth import KNOTS

Version = Literal["compact", "paper", "soft"]
MASKED = 800.0
"""How far scores of padding lie below all others: exp(-800) is 0 in float64."""

TIES = {"float64": 1e-9, "float32": 1e-4}
"""Scores closer than this share of the largest are one maximum to average-hard attention."""

LARGEST_EXPONENT = 60.0
"""exp of it, and its products with numbers of the layer, are far from the largest float32."""

PATTERNS = 2**31
"""The most numbers in the attention patterns of one run (heads times tokens squared): minutes, on one core."""

OPTIONS = ("mode", "tolerance", "attention", "dtype")
"""What :func:`anyformer.rasp.compile` is told."""

Product = Callable[[Matrix, Matrix], Matrix]


@dataclass(frozen=True, eq=False, repr=False)
class AttentionSimulator:
    """The simulator of all layers of a class, compiled.

    ``bound``: the largest absolute value of a token (and of an entry of later layers); ``logits``: of a score. A larger score is an error of
    the run, never a wrong answer. ``simulator(matrices)`` encodes, runs and reads the (n, outputs) result.
    """

    layer: Layer
    compiled: CompiledProgram
    version: Version
    bound: int | float
    logits: int | float

    def __repr__(self) -> str:
        return f"AttentionSimulator({self.layer}, {self.version}, bound={self.bound:g}, logits={self.logits:g}: {self.compiled})"

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
        """Compile the simulator of a class of layers; ``options`` are those of :func:`anyformer.rasp.compile` that leave its meaning alone:
        mode, tolerance, attention and dtype."""
        if not isinstance(layer, Layer):
            raise AnyformerError(f"AttentionSimulator: a Layer is needed, got {layer!r:.60}; make one with Layer(n, d, d_v)")
        require_choice("AttentionSimulator", "version", version, ("compact", "paper", "soft"))
        _require_options(options)
        for name, value in (("bound", bound), ("logits", logits)):
            require_number("AttentionSimulator", name, value)
            if value <= 0:
                raise AnyformerError(f"AttentionSimulator: {name} must be positive, got {value!r}")
        _require_gap(logits, options.get("dtype", "float64"))
        require_simulable(layer, version)
        if options.get("mode") == "standard" and version != "soft":
            _require_tables(layer, options.get("tolerance", 1e-3))
        program = simulated(layer, version, logits=logits, gap=_gap(layer, logits, options.get("dtype", "float64")))
        compiled = compile(program, Reals(-bound, bound), layer.tokens, check=False, **options)
        return cls(layer, compiled, version, bound, logits)

    def __call__(self, matrices: Mapping[str, Tensor]) -> Float[Tensor, "n outputs"]:
        """T(X), from the description of T and X (tensors by name, :attr:`Layer.matrices`). A row that sees no key but padding is NaN."""
        return self.batch([matrices])[0]

    def batch(self, layers: Iterable[Mapping[str, Tensor]]) -> Float[Tensor, "batch n outputs"]:
        """The outputs of several layers, each with its own parameters and input, in one pass."""
        if not isinstance(layers, Iterable) or isinstance(layers, Mapping):
            raise AnyformerError(
                f"AttentionSimulator: a list of layers is needed, each a dict of matrices; got a {type(layers).__name__}"
            )
        given = list(layers)
        n, c = self.layer.n, self.layer.outputs
        encoded = [self.layer.encode(m) for m in given]
        if not given:
            return torch.zeros(0, n, c, dtype=torch.float64)
        for numbers in encoded:
            for place, number in enumerate(numbers):
                if not -self.bound <= number <= self.bound:
                    raise AnyformerError(
                        f"{self.layer.entry(place)} must be a number in [{-self.bound:g}, {self.bound:g}], got {number:g}; make a simulator "
                        "with a larger bound"
                    )
        out = self.compiled.run(encoded)
        if out.shape[2] > 1 and not float(out[..., 1].abs().max()) < FAULT:
            raise AnyformerError(
                f"a score of the layer is beyond this simulator's logits of {self.logits:g}; make one with larger logits"
            )
        values = torch.tensor([self.compiled.decode(row) for row in out], dtype=torch.float64)
        found = values[:, : n * c].reshape(-1, n, c)
        return found.where(torch.stack([self.layer.seen(m) for m in given])[..., None], torch.nan)


def _require_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        instead = {"causal": "; a causal layer is Layer(..., causal=True)"}.get(unknown[0], "")
        raise AnyformerError(
            f"AttentionSimulator takes no option {', '.join(unknown)}; it takes bound, logits, {', '.join(OPTIONS)}{instead}"
        )


def _above(logits: int | float, dtype: str) -> float:
    return 1.0 + 4.0 * TIES.get(dtype, 0.0) * logits


def _require_gap(logits: int | float, dtype: str) -> None:
    if _above(logits, dtype) > LARGEST_EXPONENT:
        largest = (LARGEST_EXPONENT - 1.0) / (4.0 * TIES[dtype])
        raise AnyformerError(
            f"AttentionSimulator: {dtype} tells scores of up to {largest:.3g} apart, got logits of {logits:g}; choose smaller ones"
            + (" or dtype='float64'" if dtype == "float32" else "")
        )


def _require_tables(layer: Layer, tolerance: object) -> None:
    """Raise where the tables of exp on (-inf, 1] or of 1/x on [0.5/n, 4], whose knots are ``sqrt(8 tolerance / |f''|)`` apart, are too large."""
    require_number("AttentionSimulator", "tolerance", tolerance, LEAST_TOLERANCE)
    assert isinstance(tolerance, (int, float))
    units = max(math.sqrt(2 * layer.n), math.sqrt(math.e / 2)) / math.sqrt(tolerance)
    if units > KNOTS:
        raise AnyformerError(
            f"AttentionSimulator: tolerance {tolerance:g} needs tables of about {units:,.0f} ReLU units, more than {KNOTS:,}; choose one "
            f"of at least {tolerance * (units / KNOTS) ** 2:.1g}"
        )


def require_simulable(layer: Layer, version: Version) -> None:
    """Raise where a simulator of this class would not run in the memory or the time that there is."""
    require_memory(8 * layer.tokens**2, f"one attention pattern of the {layer.tokens:,} tokens that describe such a layer")
    require_patterns("AttentionSimulator", estimated_heads(layer, version), layer.tokens)


def require_patterns(owner: str, heads: int, length: int) -> None:
    """Raise where a run would form more numbers than :data:`PATTERNS`."""
    if heads * length**2 > PATTERNS:
        raise AnyformerError(
            f"{owner}: about {heads:,} heads, each with a pattern of {length:,} x {length:,} tokens, are more than {PATTERNS:,} numbers a "
            "run; choose a smaller layer (tokens, features, heads)"
        )


def _gap(layer: Layer, logits: int | float, dtype: str) -> Gap:
    """What scores of up to ``logits`` allow, those of padding beside them."""
    return Gap(2.0 * logits + (2.0 * logits + MASKED if layer.padding else 0.0) + 2.0, _above(logits, dtype))


def estimated_heads(layer: Layer, version: Version) -> int:
    """About how many heads a simulator has, counted before it is built."""
    n, d, v, h, r = layer.n, layer.d, layer.d_v, layer.heads, layer.feed_forward
    k = layer.d_k or d
    if version == "paper":
        found = h * (n * k * (2 if layer.d_k else 1) + n * v + n * n + n * v) + h * n * d * layer.output
        return found + n * (r + d) * bool(r)
    return 2 * d + h * (2 * d + 2 * k + 2 * v) + 2 * h * v * layer.output + 2 * (d + r) * bool(r)


def simulated(layer: Layer, version: Version, *, logits: int | float = 2000.0, gap: Gap | None = None) -> Sequence:
    """The RASP program of a simulator: at position p = i * outputs + j entry (i, j) of the layer's output."""
    given = {name: Matrix(tokens, *shape, layer.starts[name]) for name, shape in layer.matrices.items()}
    return layer_output(layer, version, given, logits, gap=gap).values


def layer_output(
    layer: Layer, version: Version, given: Mapping[str, Matrix], logits: int | float, label: str = "", gap: Gap | None = None
) -> Matrix:
    """The output of one layer whose input and parameters are these matrices (wherever they are). With a ``label`` the unnormalised weights of
    head h in a compact version are called ``label`` and h."""
    multiply: Product = product_of_columns_and_rows if version == "paper" else product
    x, gap = given["X"], gap or _gap(layer, logits, "float64")
    entering = layer_norm(x, given["gamma_1"], given["beta_1"], layer.eps) if layer.norm == "pre" else x
    heads = [_head(layer, h, entering, given, multiply, version, logits, label, gap) for h in range(layer.heads)]
    out = _sum(heads)
    if layer.output:
        out = _sum([multiply(head, _rows(given["W_O"], h * layer.d_v, layer.d_v)) for h, head in enumerate(heads)])
        out = with_bias(out, given["b_O"]) if layer.biases else out
    if layer.residual:
        out = _sum([out, moved(x)])
    if layer.norm == "post":
        out = layer_norm(out, given["gamma_1"], given["beta_1"], layer.eps)
    if layer.feed_forward:
        entering = layer_norm(out, given["gamma_2"], given["beta_2"], layer.eps) if layer.norm == "pre" else out
        hidden = relu(with_bias(multiply(entering, given["W_1"]), given["b_1"]))
        part = with_bias(multiply(hidden, given["W_2"]), given["b_2"])
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
    gap: Gap,
) -> Matrix:
    if layer.projections == "folded":
        query, key, value = multiply(x, given[f"A{h}"]), x, multiply(x, given[f"V{h}"])
    else:
        query, key, value = (multiply(x, given[f"W_{c}{h}"]) for c in "QKV")
        if layer.biases:
            query, key, value = (with_bias(m, given[f"b_{c}{h}"]) for m, c in zip((query, key, value), "QKV", strict=True))
    scores = multiply(query, transpose(key)) if version == "paper" else product(query, key, transposed=True)
    scores = scores.map(lambda values: assume(layer.scale * values, -logits, logits))
    if layer.padding:
        column = given["valid"].at(tuple(given["valid"].position(0, p % layer.n) for p in range(layer.n**2)))
        # a unit: its 0 is exact, and takes no digit from a score
        below = apply("relu", (1 - assume(column, 0.0, 1.0)) * (2.0 * logits + MASKED))
        scores = scores.map(lambda values: values - below)

    def kept(i: int, j: int) -> bool:
        return j <= i or not layer.causal

    if version == "paper":
        return multiply(softmax_rows(scores, kept=kept, head_per_row=True, gap=gap), value)
    if version == "soft":
        return _soft_head(scores, value, kept)
    return _averaged_head(scores, value, kept, f"{label}{h}" if label else None, gap)


def _averaged_head(scores: Matrix, value: Matrix, kept: Kept, label: str | None, gap: Gap) -> Matrix:
    """``mean_k e_ik v_kj / mean_k e_ik`` with ``e_ik = exp(score_ik - max_i)``: key (i, k) carries all e_ik v_kj, and for each column j a head
    averages them over row i at the positions of that column only, so that the sum of the heads is the numerator: 2 layers."""
    n, c = scores.rows, value.columns
    group = by_position(row_groups(n, n, kept), NOWHERE)
    weights = exponentials(scores, [select(group, group, EQ)], gap)
    weights.label = label
    rows = tuple(p // c for p in range(n * c))
    mean = aggregate(select(group, by_position(rows, OUTSIDE), EQ), weights) + by_position((0,) * (n * c), 1)
    total: Any = None
    for j, carried in enumerate(_carried(value, n)):
        mine = tuple(row if p % c == j else OUTSIDE for p, row in enumerate(rows))
        part = aggregate(select(group, by_position(mine, OUTSIDE), EQ), weights * carried)
        total = part if total is None else total + part
    return Matrix(total / assume(mean, 0.5 / n, gap.most), n, c)


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


def with_bias(a: Matrix, bias: Matrix) -> Matrix:
    """``a_ij + bias_j``: one head."""
    rows = bias.at(tuple(bias.position(0, p % a.columns) for p in range(a.size)))
    return Matrix(a.values + rows, a.rows, a.columns)


def _rows(a: Matrix, first: int, count: int) -> Matrix:
    """Some rows of a matrix, in place."""
    return Matrix(a.values, count, a.columns, a.start + first * a.columns)
