"""ATen operations by what is known of them: moves, analytic ones, kinks, choices, random ones, constants.

How fixed and varying numbers pass through them is in :mod:`anyformer.approximation.levels`, their ball forms in
:mod:`anyformer.approximation.graph_balls`. An operation that stands in no table is one that nothing is known of.
"""

from typing import Any

import torch
from torch import Tensor


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names)


MOVES = _aten(
    "t.default", "view.default", "_unsafe_view.default", "permute.default", "transpose.int", "alias.default", "slice.Tensor",
    "unsqueeze.default", "expand.default", "clone.default", "detach.default", "cat.default", "stack.default", "split.Tensor",
    "split_with_sizes.default", "select.int", "squeeze.dim", "squeeze.default", "unbind.int", "reshape.default", "contiguous.default",
    "lift_fresh_copy.default", "flip.default", "roll.default", "_reshape_alias.default", "unflatten.int", "squeeze.dims", "repeat.default",
    "constant_pad_nd.default", "chunk.default", "narrow.default", "diagonal.default", "tril.default", "triu.default",
    "slice_scatter.default", "select_scatter.default", "diagonal_scatter.default",
) | {"getitem"}  # fmt: skip
"""Moved without change: whatever is said of the entries is moved alike. What fills the rest (padding, a triangle) is fixed."""

PAD = "aten.constant_pad_nd.default"
"""The one move that brings a number of its own: its third argument."""

PLACES = {
    "aten.index.Tensor": 1,
    "aten.gather.default": 2,
    "aten.embedding.default": 1,
    "aten.index_select.default": 2,
    "aten.index_put.default": 1,
    "aten.scatter.src": 2,
}
"""Entries taken from, or put at, integer places; the argument that holds the places: a move where they are fixed, a choice where they vary."""

COPIES = _aten("_to_copy.default", "copy.default")
SAME = _aten(
    "exp.default", "tanh.default", "erf.default", "sigmoid.default", "silu.default", "gelu.default", "neg.default",
    "cos.default", "sin.default", "softplus.default", "expm1.default", "atan.default"
)  # fmt: skip
SUMS = _aten("add.Tensor", "sub.Tensor", "add.Scalar", "sub.Scalar", "rsub.Scalar", "rsub.Tensor")
TIMES = _aten("mul.Tensor", "mul.Scalar")
CONTRACTIONS = _aten("mm.default", "bmm.default", "addmm.default", "baddbmm.default", "matmul.default")
REDUCTIONS = _aten("sum.dim_IntList", "mean.dim", "sum.default", "mean.default", "cumsum.default")
SOFTMAX = _aten("_softmax.default", "_safe_softmax.default")
CHOICES = _aten("where.self", "masked_fill.Scalar", "masked_fill.Tensor")
LINEAR = _aten(
    "_fft_c2c.default",
    "_fft_r2c.default",
    "view_as_real.default",
    "real.default",
    "convolution.default",
    "view_as_complex.default",
)
INTEGER_POWERS = _aten("pow.Tensor_Scalar", "square.default")

ALWAYS_ANALYTIC = MOVES | COPIES | SAME | SUMS | TIMES | CONTRACTIONS | REDUCTIONS | SOFTMAX | CHOICES | LINEAR
CONDITIONAL = _aten(
    "div.Tensor", "div.Scalar", "reciprocal.default", "sqrt.default", "rsqrt.default", "log.default", "pow.Tensor_Scalar",
    "native_layer_norm.default", "_fused_rms_norm.default", "var.correction", "square.default"
)  # fmt: skip
"""Analytic where an argument does not vanish."""
KINKS = _aten(
    "relu.default", "abs.default", "amax.default", "amin.default", "max.default", "max.dim", "maximum.default",
    "minimum.default", "clamp.default", "clamp_min.default", "clamp_max.default", "linalg_vector_norm.default",
    "acos.default", "elu.default", "leaky_relu.default", "hardtanh.default", "_cdist_forward.default", "logsumexp.default",
    "min.default", "_euclidean_dist.default"
)  # fmt: skip
HARD = _aten(
    "topk.default", "sort.default", "sort.stable", "argmax.default", "argmin.default", "argsort.default", "sign.default",
    "floor.default", "round.default", "ceil.default", "eq.Tensor", "eq.Scalar", "gt.Tensor", "ge.Tensor", "lt.Tensor",
    "le.Tensor", "gt.Scalar", "ge.Scalar", "lt.Scalar", "le.Scalar", "scatter.value", "one_hot.default", "ne.Scalar",
    "ne.Tensor", "nonzero.default", "kthvalue.default", "median.default", "bucketize.Tensor", "trunc.default", "sgn.default"
)  # fmt: skip
"""A choice: on data that vary they are not continuous, and no theorem here speaks of them."""
RANDOM = _aten(
    "bernoulli.default", "rand.default", "randn.default", "randint.default", "randint.low", "randperm.default",
    "rand_like.default", "randn_like.default", "native_dropout.default", "normal_.default", "uniform_.default",
    "multinomial.default", "bernoulli.p", "bernoulli_.float", "randint_like.default", "exponential_.default",
    "random_.default"
)  # fmt: skip
CREATED = _aten(
    "eye.default", "eye.m", "ones.default", "zeros.default", "full.default", "arange.default", "arange.start",
    "arange.start_step", "scalar_tensor.default", "empty.memory_format", "new_zeros.default", "new_ones.default",
    "new_full.default", "zeros_like.default", "ones_like.default", "full_like.default", "sym_size.int", "empty_like.default",
    "new_empty.default", "fill.Scalar", "zero.default"
)  # fmt: skip
"""Made from shapes alone."""
BOOLEAN = _aten(
    "logical_not.default", "bitwise_not.default", "logical_and.default", "bitwise_and.Tensor", "bitwise_or.Tensor",
    "logical_or.default", "any.dim", "all.default", "any.default"
)  # fmt: skip
"""Boolean arithmetic of masks."""

KNOWN = ALWAYS_ANALYTIC | CONDITIONAL | KINKS | HARD | RANDOM | CREATED | BOOLEAN | PLACES.keys()
"""Every operation that something is known of."""

MASKED = 1e4
"""A score whose fixed part lies this far below the largest of its row is read as forbidden, as the finite masks of real models mean it."""


def name_of(node: Any) -> str:
    """``aten.mm.default``, ``getitem``, ..."""
    if node.op != "call_function":
        return node.op
    target = node.target
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def writes_in_place(node: Any) -> bool:
    """Whether an operation writes into an argument: functionalisation has removed all that it can follow."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_whole(x: Any) -> bool:
    """Whether these are integers or Booleans: a tensor that varies with the data and is whole is a choice."""
    return isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex())
